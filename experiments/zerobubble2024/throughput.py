"""How much faster are pipelines whose weight gradients fill the idle time, at 1F1B's memory?

Qi et al. split the backward pass: the gradient of a layer's input, which the stage before waits for, and that of its
weights, which can be put off into the bubble. On 8 to 32 A100s, models of 1.5 to 28.3 billion parameters, one pipeline
and no other parallelism, their schedule with 1F1B's memory (ZB-1p) is 4 to 15% faster than 1F1B (table 4), the more so
the fewer microbatches there are. Here ZB-H1 is run, whose bubble table 5 says is ZB-1p's; ZB-H2, ZB-2p and 1F1B
interleaved over as many chunks as theirs are not.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from experiments.ptdp2021 import layouts
from experiments.zerobubble2024 import PAPER, PIPELINE, SCHEDULES, bubble, by_rate, gains, samples_per_second
from harness.analysis.points import relative
from harness.analysis.tabulate import printed_value
from harness.experiment.checks import as_expected, each, grouped
from harness.experiment.kit import (
    MARK, MODEL, PERCENT, POINTS, RUNS, Claim, Column, Evidence, Experiment, Plan, Record, Tolerance, printed, share,
    table_of, tally,
)  # fmt: skip
from harness.figures.style import figure_of

PLANS = [Plan(pp=2, schedule=schedule) for schedule in SCHEDULES]
SAME_BUBBLE = Tolerance(0.03, "half of the smallest difference between the two schedules' bubbles", "2026-11-21")
SHOWN = (
    *PIPELINE,
    Column(key="rate", header="rate per device", unit="samples/s", si="samples/s", digits=3, of=samples_per_second),
    printed("published_rate", "rate per device, published", "samples/s", si="samples/s"),
    Column(key="gain", header="over 1F1B", si="ratio", digits=3, of=lambda one: one.relative),
    printed("published_gain", "over 1F1B, published", si="ratio"),
    replace(share("bubble", "bubble", lambda one: bubble(one).mean), unit="% of the step"),
    printed("published_bubble", "bubble, published", "% of the step", PERCENT, "fraction"), RUNS, MARK,
)  # fmt: skip
NOTE = (
    "Published: table 4 on A100s, where ZB-1p stands for ZB-H1, and table 5's bubbles, of ZB-H1 itself. Bubble: "
    "idle time over the whole step, as table 5 counts; the update is not in it."
)


def falls_with_microbatches(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the gain falls with more microbatches, for every model."""
    lines = [line for line in grouped(gains(records), MODEL) if len(line) > 1]
    margins = [a.relative / b.relative - 1 for line in lines for a, b in pairwise(line)]
    at = lambda one: f"{one.relative - 1:+.1%} at {one.run.microbatches}"
    return tally(margins, "increases", "; ".join(f"{at(line[0])}, {at(line[-1])} ({line[0].model})" for line in lines))


EXPERIMENT = Experiment(
    source="Zero bubble 2024 (Qi et al.), section 5, tables 3 to 5",
    expectation="4 to 15% more than 1F1B at its memory: 15% with 3 microbatches a stage, 4 to 10% with 8",
    claims=(
        Claim(
            "ZB-H1 is faster than 1F1B", "table 4",
            each(
                lambda records: [(one.relative - 1,) for one in gains(records)], lambda gain: gain, "pipelines",
                "{:+.1%}", is_brief=True,
            ),
            "+4.2% to +15.0% (ZB-1p)", kind="direction", about="bubble",
        ),
        Claim(
            "the gain falls with the microbatches", "table 4", falls_with_microbatches, kind="direction", about="bubble"
        ),
        Claim(
            "gains are within 5 points of ZB-1p's, for the paper's models", "table 4",
            as_expected(gains, relative, printed_value("published_gain"), POINTS, "pipelines", are_shares=True),
            kind="quantitative", about="bubble", tolerance=POINTS,
        ),
        Claim(
            "bubbles of 1F1B and ZB-H1 are within 3 points of the published, for the paper's models", "table 5",
            as_expected(by_rate, bubble, printed_value("published_bubble"), SAME_BUBBLE, "pipelines", are_shares=True),
            kind="quantitative", about="bubble", tolerance=SAME_BUBBLE,
        ),
    ),
    table=table_of("zero_bubble", "Zero bubble against 1F1B", SHOWN, by_rate, [NOTE]),
    figure=figure_of(
        "ZB-H1 over 1F1B", "microbatches of a step", "gain over 1F1B (%)", gains, name=lambda one: one.model,
        at=lambda one: one.run.microbatches, ours=lambda one: (one.relative.mean - 1) / PERCENT,
        published=lambda one: (printed_value("published_gain")(one) - 1) / PERCENT,
    ),
    cost={"smoke": "1 min, 2 CPU cores", "small": "5 min, 2 CPU cores", "paper": "40 min, 32 GPUs with 80 GB"},
    deviations="The paper names neither vocabulary nor dropout: Megatron's, as its memory suggests. It gives its first "
    "and last stage a layer less for the embedding and the head; here stages are of equal work, the head counted. "
    "ZB-H1 is compared with ZB-1p, and the optimizer waits for all stages' norm, where theirs is validated afterwards. "
    "ZB-H2, ZB-2p, ZB-V and 1F1B with several chunks a stage are not run. At `smoke` and `small` the "
    "pipeline is two ranks deep, of a model of eight small layers without dropout.",
    runs={"smoke": layouts(128, PLANS, (8, 32)), "small": layouts(512, PLANS, (12, 16, 32), 3), "paper": list(PAPER)},
)  # fmt: skip
