"""The report's planner: a browser's answers are Python's, to the printed digits."""

import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.predict.interval import interval
from harness.predict.kinds import errors_by_kind, kind_doubts
from harness.predict.systems import load_system
from harness.report import planner
from harness.report.html import TEMPLATES, templates
from harness.report.traced import OPERATIONS, Program
from harness.tune.tune import TOKENS
from impl.cost.flops import model_flops
from impl.errors import InputError
from impl.model.sizes import named
from impl.pipeline.schedule import Op
from impl.pipeline.schedules import build
from impl.pipeline.simulate import simulate
from impl.simulator.closed_form import ClosedForm, Details
from impl.simulator.columns import Work
from impl.simulator.plans import run_of
from impl.simulator.step import pipeline_of

RESULTS = Path(__file__).resolve().parents[2] / "results"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SYSTEMS, MODELS = ("selene", "dgx_h100"), ("llama-2-13b", "llama-3.1-70b", "mixtral-8x7b")
"""Habits of dropout and of gathering ahead; heads that tp 16 does not divide; sequences and experts to share."""
LITTLE = {"pp": (1, 2, 4, 8, 32), "dp": (1, 2, 4, 8, 32, 128), "ep": (1, 2, 8), "microbatch": (1, 4)}
"""Parts of the grid that are tried."""
PLANS = int(os.environ.get("PLANNER_PLANS", "300"))
"""All: `PLANNER_PLANS=10000 EVERY_SYSTEM=1 pytest tests/report/test_planner.py`."""
SEED = int(os.environ.get("RANDOM_SEED", "0")) or random.randrange(10**6)
ALONE = 20
"""Plans that Python estimates with a form for their own number of GPUs, as `tune` does."""
Choice = dict[str, Any]


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("EVERY_SYSTEM"):
            patch.setattr(planner, "SYSTEMS", SYSTEMS)
            patch.setattr(planner, "MODELS", MODELS)
            patch.setattr(planner, "GRID", planner.GRID | LITTLE)
        yield planner.document(RESULTS)


@pytest.fixture(scope="module")
def page(made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The planner's page as the report has it."""
    folder = tmp_path_factory.mktemp("planner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "document", lambda _: made)
        patch.setenv("LMSCALE_CACHE", str(folder))
        text = templates().get_template("planner.html").render(heading="Planner", data=planner.embedded(RESULTS))
    (folder / "planner.html").write_text(text)
    for name in ("planner.js", "style.css"):
        shutil.copyfile(TEMPLATES / name, folder / name)
    return folder


def answered(page: Path, expression: str, given: Any = None) -> Any:
    """Evaluate an expression of `given` in the planner's page, in headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    body = f"""<pre id="answers"></pre><script>
const given = {json.dumps(given)};
document.getElementById("answers").textContent = JSON.stringify({expression});</script></body>"""
    probe = page / "probe.html"
    probe.write_text((page / "planner.html").read_text().replace("</body>", body))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
    flags += ("--disable-component-update", f"--user-data-dir={page / 'profile'}")
    command = [CHROMIUM, *flags, "--dump-dom", probe.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    [text] = re.findall(r'<pre id="answers">(.*?)</pre>', done.stdout, re.DOTALL)
    for code, letter in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        text = text.replace(code, letter)
    assert text, done.stderr
    return json.loads(text)


# What Python says ----------------------------------------------------------------------------------------------------


def drawn(generator: random.Random) -> Choice:
    """A plan that the sliders can ask for, of as many GPUs as it needs."""
    choice = {name: generator.choice(values) for name, values in planner.GRID.items()}
    choice |= {"system": generator.choice(planner.SYSTEMS), "model": generator.choice(planner.MODELS)}
    choice["cp"] = min(choice["cp"], max(1, named(choice["model"]).seq_len // TOKENS))
    gpus = choice["tp"] * choice["cp"] * choice["pp"] * choice["dp"]
    return choice | {"gpus": gpus, "batch": generator.choice(planner.BATCHES)} if gpus <= 4096 else drawn(generator)


def settled(choice: Choice) -> Choice:
    """The plan that is meant: a knob without effect has its default."""
    found = dict(choice)
    if found["pp"] == 1:
        found["schedule"] = "one_f_one_b"
    if found["schedule"] != "interleaved":
        found["chunks"] = 1
    found["sequence_parallel"] &= found["tp"] > 1
    found["zero_stage"] *= found["dp"] * found["cp"] > 1
    if not named(found["model"]).experts:
        found["ep"] = 1
    return found


def printed(choice: Choice, seconds: float, parts: Any, bounds: Any, flops: float, peak: float) -> dict[str, Any]:
    """Numbers as the page prints them."""
    mfu = flops * choice["batch"] / seconds / choice["gpus"] / peak
    digits = {"seconds": seconds, "low": bounds.low, "high": bounds.high}
    half_up = lambda size: str((Decimal(size) / 2**30).quantize(Decimal("0.01"), ROUND_HALF_UP))  # as JavaScript does
    sizes = {name: half_up(size) for name, size in parts._asdict().items()}
    numbers = {name: float(f"{value:.4g}") for name, value in digits.items()}
    return {**numbers, "memory": sizes, "mfu": f"{100 * mfu:.1f}"}


class Python:
    """Answers of `predict` and of the closed form that `tune` asks."""

    def __init__(self) -> None:
        self.tasks = {(s, m): planner.task_of(m, load_system(s)) for s in planner.SYSTEMS for m in planner.MODELS}
        self.errors = cache(lambda name: errors_by_kind(load_system(name)))

    def asked(self, c: Choice) -> Any:
        """The plan's run as it is simulated; raises InputError if it is impossible."""
        task = self.tasks[c["system"], c["model"]]
        base = replace(task.base, train=replace(task.base.train, global_batch=c["batch"]))
        knobs = {name: value for name, value in c.items() if name in planner.KNOBS}
        return task.simulated(run_of(planner.DEFAULTS | knobs, base))

    def is_possible(self, choice: Choice) -> bool:
        with contextlib.suppress(InputError):
            return bool(self.asked(choice))
        return False

    def answers(self, choices: list[Choice]) -> list[dict[str, Any]]:
        """The answer to each possible plan."""
        found: list[dict[str, Any]] = [{} for _ in choices]
        by_form: dict[tuple[str, str, int], list[int]] = {}
        for i, c in enumerate(choices):
            alone = i < ALONE  # by a form of as many GPUs, for the laws of which there is less to share
            by_form.setdefault((c["system"], c["model"], c["gpus"] if alone else planner.GPUS[-1]), []).append(i)
        for (system, model, gpus), places in by_form.items():
            form, some = replace(self.tasks[system, model], gpus=gpus).form(), [choices[i] for i in places]
            details = form.details(planner.plans_of(some), np.array([c["batch"] for c in some]))
            for at, i in enumerate(places):
                found[i] = self.one(choices[i], form, details, at)
        return found

    def one(self, c: Choice, form: ClosedForm, details: Details, at: int) -> dict[str, Any]:
        task, asked, seconds = self.tasks[c["system"], c["model"]], self.asked(c), float(details.seconds[at])
        moments = [type(one)(*(float(part[at]) for part in one)) for one in details.memory]
        most, bounds = max(moments, key=sum), interval(task.system, asked, seconds)
        flops = model_flops("ptdp", asked.asked.model, 1, form.vocab_size)
        numbers = printed(c, seconds, most, bounds, flops, task.system.peak(asked.asked.precision) or math.nan)
        doubts = kind_doubts(asked.done, task.system, self.errors(c["system"]))
        texts = {"warnings": sorted(bounds.warnings), "kinds": sorted(doubts)}
        return numbers | texts | {"fit": task.system.device.fit(sum(most))}


AS_PRINTED = """given.map((choice) => { const of = judged(choice), four = (one) => Number(one.toPrecision(4));
  return of.reason ? {reason: of.reason} : {seconds: four(of.seconds), low: four(of.low), high: four(of.high),
    memory: Object.fromEntries(Object.entries(of.memory).map(([name, size]) => [name, gib(size)])),
    mfu: (100 * of.mfu).toFixed(1), warnings: of.warnings.sort(), kinds: of.kinds.sort(), fit: of.fit}; })"""


def test_answers_to_random_plans_are_those_of_python(page: Path) -> None:
    print(f"seed {SEED}: RANDOM_SEED={SEED} repeats it")
    generator, python = random.Random(SEED), Python()
    choices, reasons = list[Choice](), list[str]()
    while reasons.count("") < PLANS:
        choices.append(drawn(generator))
        try:
            python.asked(settled(choices[-1]))
            reasons.append("")
        except InputError as error:
            reasons.append(str(error))
    shown = answered(page, AS_PRINTED, choices)
    possible = [i for i, reason in enumerate(reasons) if not reason]
    expected = python.answers([settled(choices[i]) for i in possible])
    wrong = [(choices[i], shown[i], one) for i, one in zip(possible, expected, strict=True) if shown[i] != one]
    assert not wrong, f"{len(wrong)} of {len(possible)} plans, seed {SEED}: {wrong[0]}"
    for choice, reason, answer in zip(choices, reasons, shown, strict=True):
        assert answer.get("reason", "") == reason, (SEED, choice)


def test_an_answer_names_what_is_nearest_and_where_the_plan_lies(page: Path, made: dict[str, Any]) -> None:
    choice = drawn(random.Random(3)) | {"system": "selene", "tp": 8, "cp": 1, "ep": 1, "pp": 1, "gpus": 8, "batch": 64}
    shown = answered(page, "judged(given)", choice)
    assert shown["shift"] in made["shifts"]
    assert shown["nearest"] in made["systems"]["selene"]["published"]


# The program and its drawing ------------------------------------------------------------------------------------------


def executed(document: dict[str, Any], plan: dict[str, Any], inputs: dict[str, int]) -> list[Any]:
    """The results of all operations of a program, by NumPy."""
    results: list[Any] = []
    for name, *parts in document["programs"][plan["program"]]["lines"]:
        of = [results[part] if isinstance(part, int) else part[0] if isinstance(part, list) else part for part in parts]
        if name == "input":
            results.append(inputs[of[0]])
        elif name == "row":
            table = plan["laws"][of[0]]
            [row] = [i for i, key in enumerate(zip(*table["knobs"], strict=True)) if key == tuple(map(int, of[1:]))]
            results.append([values[at[row]] for values, at in table["columns"]])
        elif name == "item":
            results.append(of[0][of[1]])
        else:
            results.append(np.array(of) if name == "stack" else getattr(np, name)(*of))
    return results


def test_a_program_has_the_results_of_the_closed_form(made: dict[str, Any]) -> None:
    generator, python = random.Random(5), Python()
    for choice in itertools.islice(filter(python.is_possible, map(settled, map(drawn, [generator] * 50))), 5):
        names = choice["system"], choice["model"]
        plan, form, one = made["plans"][" ".join(names)], python.tasks[names].form(), planner.plans_of([choice])
        inputs = {knob: int(one[knob][0]) for knob in planner.KNOBS} | {"global_batch": choice["batch"]}
        places = made["programs"][plan["program"]]["results"]
        results, details = executed(made, plan, inputs), form.details(one, np.array([choice["batch"]]))
        assert results[places["seconds"]] == details.seconds[0]
        for place, parts in zip(places["memory"], details.memory, strict=True):
            assert [float(results[place[name]]) for name in parts._fields] == [float(part[0]) for part in parts]


def test_tables_are_made_again_where_anything_of_them_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Path]()
    monkeypatch.setenv("LMSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planner, "document", lambda results: made.append(results) or {"text": f"</{len(made)}>"})
    assert [planner.embedded(tmp_path) for _ in range(2)] == [r'{"text":"\u003c/1>"}'] * 2
    monkeypatch.setattr(planner, "MODELS", ("llama-2-13b",))
    assert "2" in planner.embedded(tmp_path)
    (tmp_path / "accuracy.md").write_text("other errors")
    assert "3" in planner.embedded(tmp_path)
    assert "3" in planner.embedded(tmp_path)
    kept = tmp_path / "cache" / "planner"
    kept.write_text(kept.read_text()[:-1])
    assert "4" in planner.embedded(tmp_path)
    kept.unlink()
    kept.mkdir()
    assert "5" in planner.embedded(tmp_path)
    assert "6" in planner.embedded(tmp_path)
    assert [path.name for path in kept.parent.iterdir()] == ["planner"]


def test_an_operation_that_the_page_lacks_is_refused() -> None:
    script = (TEMPLATES / "planner.js").read_text()
    assert all(f"{name}:" in script or f'"{name}"' in script for name in OPERATIONS)
    with pytest.raises(NotImplementedError, match="uses arctan"):
        np.arctan(Program().add("input", "tp"))


PIPELINES = [
    *(("one_f_one_b", p, m, 1) for p, m in ((1, 3), (2, 4), (4, 2), (4, 8))),
    *(("gpipe", 4, 3, 1), ("zb_h1", 4, 8, 1), ("zb_h1", 4, 2, 1)),
    *(("interleaved", p, m, v) for p, m, v in ((2, 4, 2), (2, 2, 4), (4, 8, 2), (4, 4, 1))),
]


def test_a_drawn_timeline_is_the_simulated_one(page: Path) -> None:
    seconds = {name: [1.0 + i, 1.5 + i, 1.25 + i] for i, name in enumerate(Work._fields)}
    hops = {"one_way": 0.75, "back": 0.5}
    choices = [{"schedule": s, "pp": p, "microbatches": m, "chunks": v} for s, p, m, v in PIPELINES]
    shown = answered(page, "given[0].map((choice) => timeline(choice, ...given[1]))", [choices, [seconds, hops]])
    of: dict[Op, list[float]] = dict(zip((Op.F, Op.B, Op.I, Op.W), seconds.values(), strict=True))
    for (name, p, m, v), spans in zip(PIPELINES, shown, strict=True):
        kinds = [0, *[1] * (p * v - 2), 2][: p * v]
        near = lambda a, b, p=p: 0.75 / (p - 1) if p == 2 or abs(a - b) == 1 else 0.5
        found = simulate(build(name, p, m, v), lambda action, kinds=kinds: of[action.op][kinds[action.stage]], near)
        expected = [(one.rank, str(one.action.op), *one.action[1:], one.start, one.end) for one in found.spans]
        assert sorted(map(tuple, spans)) == sorted(expected), (name, p, m, v)


def test_a_drawn_timeline_ends_as_a_predicted_step_does(page: Path) -> None:
    base = {"system": "selene", "model": "llama-3.1-70b", "tp": 2, "cp": 1, "dp": 1, "microbatch": 1, "zero_stage": 0}
    base |= {"ep": 1, "recompute": "full", "sequence_parallel": False, "batch": 16}
    shapes = [{"pp": pp, "schedule": s, "chunks": v} for s, pp, _, v in PIPELINES[3:9]]
    choices = [base | shape | {"gpus": 2 * shape["pp"]} for shape in shapes]
    ends = """given.map(judged).map(({choice, passes, hops}) =>
      Math.max(...timeline(choice, passes, hops).map((span) => span[5])))"""
    python = Python()
    for choice, end in zip(choices, answered(page, ends, choices), strict=True):
        asked = python.asked(choice).done
        system = load_system(choice["system"])
        seconds, delay = pipeline_of(asked, asked.model.vocab_size or 0, system, stages=system.habits.stages_of(asked))
        table = build(choice["schedule"], choice["pp"], asked.microbatches, choice["chunks"])
        found = simulate(table, lambda action, of=seconds: of[action.op][action.stage], delay)
        assert end == pytest.approx(float(found.step_time), rel=0.01), choice
