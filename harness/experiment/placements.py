"""Checks on placements of LayerNorm: which diverge, end worse, have outlier dimensions, and what their laws give."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import product
from operator import attrgetter

from harness.analysis.outliers import FAR, IN_LAYERS, Look, looks
from harness.analysis.placement_laws import BASELINE, SURE, ends, fits, targets
from harness.analysis.render import number
from harness.analysis.scaling_law import Fitted, difference
from harness.analysis.stability import Arm, arms, loss_or_inf
from harness.experiment.checks import each
from harness.experiment.claims import Check, Evidence, Tolerance, less, means, near, tally
from harness.experiment.published import published
from harness.records.measures import size_name
from harness.records.record import Record
from harness.records.statistics import Estimate, estimate
from harness.records.store import FINISHED
from impl.grouping import by_key
from impl.model.norm_placement import PLACEMENTS

WORSE = Tolerance(0.05, "assumed before the spread between seeds was measured", "2026-11-20")
"""Share by which a perplexity that counts as worse is larger."""
Model = tuple[str, int, float, float]
"""Family, layers, parameters and learning rate."""


def perplexities(record: Record) -> list[float]:
    return [math.inf] if record.has_diverged else [last.token_perplexity for last in record.last_evaluations]


def by_rate(records: Sequence[Record], norm: str) -> dict[Model, Estimate]:
    """Return the mean perplexity on held-out text of each model with this placement; infinite if a run diverged."""
    key = lambda one: (one.run.model.family, one.run.model.num_layers, one.parameters, one.run.train.lr)
    ours = [one for one in records if one.run.model.norm_placement == norm]
    return means((key(one), value) for one in ours for value in perplexities(one))


def pre_beats_post(family: str) -> Check:
    """Return a check that pre-layernorm has the lower perplexity in every model of a family at every learning rate."""

    def check(records: Sequence[Record]) -> Evidence | None:
        pre, post = by_rate(records, "pre"), by_rate(records, "post")
        both = [model for model in sorted(pre.keys() & post.keys()) if model[0] == family]
        over = [post[model].mean / pre[model].mean for model in both]
        numbers = f"post's is {min(over):.2f} to {max(over):.2f} times pre's" if over else ""
        return tally([less(pre[model], post[model]) for model in both], "pairs", numbers)

    return check


def only_post_diverges(records: Sequence[Record]) -> Evidence | None:
    """Judge whether some run with LayerNorm after each block diverges, and none with it before."""
    finished = [record for record in records if record.status in FINISHED]
    of = lambda norm: [one for one in finished if one.run.model.norm_placement == norm]
    runs = {norm: [math.isinf(loss_or_inf(one)) for one in of(norm)] for norm in ("pre", "post")}
    if not all(runs.values()):
        return None
    numbers = (f"{sum(of_one)} of {len(of_one)} runs ({norm})" for norm, of_one in runs.items())
    return tally([not any(runs["pre"]) and any(runs["post"])], "", f"diverged: {', '.join(numbers)}")


def rate_hurts_post_more(records: Sequence[Record]) -> Evidence | None:
    """Judge whether post-layernorm loses more than pre, or gains less, from the lowest learning rate to the highest."""
    pre, post = by_rate(records, "pre"), by_rate(records, "post")
    rates = by_key((tuple(model), lr) for *model, lr in sorted(pre.keys() & post.keys()))
    loses = lambda found, model, lr: found[*model, lr[-1]] / found[*model, lr[0]]
    both = {model: (loses(post, model, lr), loses(pre, model, lr)) for model, lr in rates.items() if len(lr) > 1}
    numbers = (f"{model[0]} of {model[1]} layers: post {a:.3f}, pre {b:.3f} times" for model, (a, b) in both.items())
    return tally([less(b, a) for a, b in both.values()], "models", "; ".join(numbers))


def deep_post_fails(records: Sequence[Record]) -> Evidence | None:
    """Judge whether every deeper post-layernorm model ends over WORSE worse than shallow ones at the same rate."""
    post = by_rate(records, "post")
    pairs = [
        (shallow, deep)
        for shallow, deep in product(sorted(post), repeat=2)
        if (shallow[0], shallow[3]) == (deep[0], deep[3]) and shallow[1] < deep[1]
    ]
    numbers = [f"{s[0]} lr {s[3]:g}: {number(post[d].mean)} deep, {number(post[s].mean)} shallow" for s, d in pairs]
    margins = [less(post[shallow].scaled(1 + WORSE), post[deep]) for shallow, deep in pairs]
    return tally(margins, "pairs", "; ".join(numbers))


WORTH = Tolerance(10, "assumed", "2026-11-22")
"""Least ratio of the loss without the most outstanding dimension to that without an average one."""
EARLY = Tolerance(0.5, "assumed", "2026-11-22")
"""Share of the training after which outliers have to be there."""


def at_the_end(records: Sequence[Record], norm: str) -> list[Look]:
    """Return the last look at each run of one placement."""
    return [one for one in looks(records) if one.share == 1 and one.norm == norm]


def by_model(found: Iterable[Look], measure: str) -> str:
    """Return means over seeds by model, as `1.3 (GPT 0.3M), 2 (BERT 0.3M)`."""
    values = means((one.model, getattr(one, measure)) for one in found)
    return ", ".join(f"{number(value.mean, 3)} ({model})" for model, value in values.items())


def has_outliers(norm: str) -> Check:
    """Return a check that every model with this placement ends with outlier dimensions."""
    judge = lambda found: tally([one.outliers > 0 for one in found], "runs", by_model(found, "outliers"))
    return lambda records: judge(at_the_end(records, norm))


def same_in_most_norms(records: Sequence[Record]) -> Evidence | None:
    """Judge whether post-layernorm BERTs have their furthest weight over FAR, in the same dimension of most norms."""
    found = [one for one in at_the_end(records, "post") if one.record.run.model.family == "bert"]
    numbers = f"furthest {by_model(found, 'weight')} sd; the same in {by_model(found, 'same')} of the norms"
    return tally([one.weight > FAR and one.same > IN_LAYERS for one in found], "runs", numbers)


def worth_more(records: Sequence[Record]) -> Evidence | None:
    """Judge whether losing the most outstanding dimension raises the loss WORTH times as much as losing another."""
    found = {norm: [one for one in at_the_end(records, norm) if not math.isnan(one.lost)] for norm in PLACEMENTS}
    numbers = (
        f"{norm}: {by_model(own, 'lost')} and {by_model(own, 'lost_average')} nats"
        for norm, own in found.items()
        if own
    )
    held = [one.lost > WORTH * max(one.lost_average, 0.0) for own in found.values() for one in own]
    return tally(held, "runs", "; ".join(numbers))


def there_early(records: Sequence[Record]) -> Evidence | None:
    """Judge whether runs that end with outliers have some after EARLY of their training, or before."""
    found = [one for one in looks(records) if one.outliers > 0]
    early = {one.record.id for one in found if one.share <= EARLY}
    return tally([one.record.id in early for one in found if one.share == 1], "runs that end with some")


def ratios(records: Sequence[Record]) -> list[tuple[Estimate, Estimate, str]]:
    """Return by how much the largest dimension stands out with pre-layernorm and with post, by model."""
    pre, post = (means((one.model, one.ratio) for one in at_the_end(records, norm)) for norm in ("pre", "post"))
    return [(pre[model], post[model], model) for model in pre if model in post]


most_without_end_norm = each(
    ratios, lambda a, b, _: less(b, a), "models", "{:.2f} and {:.2f} ({})", after=" times the median"
)
"""Check that the largest dimension stands out more with pre-layernorm, whose sum is unscaled, than with post."""


CLOSE = Tolerance(0.02, "assumed", "2026-11-22")
"""Largest root mean square of log loss over the law's that counts as described by it."""


described = each(
    lambda records: [(one.off, norm) for norm, one in fits(records).items()],
    lambda off, _: off <= CLOSE, "placements", "{:.2%} ({})",
)  # fmt: skip
"""Check that the law is close to the losses of every placement."""


def higher_here(other: str) -> Check:
    """Return a check that the other placement ends higher than the baseline at every size that was trained."""

    def over(records: Sequence[Record]) -> list[tuple[Estimate, str]]:
        ours, theirs = ends(records, BASELINE), ends(records, other)
        mean = lambda end: estimate(end.losses)
        return [(mean(theirs[name]) - mean(end), name) for name, end in ours.items() if name in theirs]

    return each(over, lambda by, _: by, "sizes", "{:+.3f} ({})", after=" nats")


def higher_beyond(records: Sequence[Record]) -> Evidence | None:
    """Judge whether SURE of the draws have post above the baseline at every larger size."""
    laws, norms = fits(records), (BASELINE, "post")
    if any(norm not in laws for norm in norms):
        return None
    if rejected := _rejected(laws, norms):
        return rejected
    found = [(size, difference(laws["post"], laws[BASELINE], size, tokens)) for size, tokens in targets(laws)]
    found = [(size, one) for size, one in found if not math.isnan(one.above)]
    numbers = ", ".join(
        f"{one.mean:+.2f}, {one.low:+.2f} to {one.high:+.2f}, in {one.above:.0%} of the draws "
        f"({size_name(round(size))})"
        for size, one in found
    )
    return tally([one.above >= SURE for _, one in found], "sizes", numbers)


def _rejected(laws: Mapping[str, Fitted], norms: Sequence[str]) -> Evidence | None:
    """Return that nothing can be said, as the losses of a placement are not those of its law; None if they are."""
    far = [f"{laws[norm].off:.1%} off the losses of {norm}" for norm in norms if laws[norm].off > CLOSE]
    return Evidence(0, 0, 0, f"the law is {' and '.join(far)}") if far else None


EXPONENT = Tolerance(0.05, "assumed after the first runs, whose exponents are 0.17 and more off", "2026-11-24")
"""Largest difference from a published exponent that counts as the same."""


def as_chinchilla(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the baseline's exponents, with the interval of the draws, are Chinchilla's within EXPONENT."""
    if (one := (laws := fits(records)).get(BASELINE)) is None:
        return None
    held, parts = [], []
    for name in ("alpha", "beta"):
        (printed,) = published("chinchilla2022", f"fit_{name}")["value"]
        low, high = one.interval(lambda law, name=name: getattr(law, name))
        if math.isnan(low):
            return None
        held.append(near(Estimate((low + high) / 2, (high - low) / 2, len(one.points), math.inf), printed, EXPONENT))
        parts.append(f"{name} {getattr(one.law, name):.2f}, {low:.2f} to {high:.2f}")
    if rejected := _rejected(laws, [BASELINE]):
        return rejected._replace(numbers="; ".join([rejected.numbers, *parts]))
    return tally(held, "exponents", "; ".join(parts))


SEEDS = 3
"""Least number of runs of every cell of the map before a claim on it is judged."""


def _arms(records: Sequence[Record]) -> list[Arm]:
    """Return the arms; none before every cell has SEEDS runs, so that no claim is judged by a part of the map."""
    found = arms(records)
    return found if all(len(losses) >= SEEDS for one in found for losses in one.losses.values()) else []


def _paired(records: Sequence[Record], one: str, other: str) -> list[tuple[Arm, Arm, str]]:
    """Return the arms of two placements, paired by depth and warm-up, with these in words."""
    found = {(arm.norm, arm.layers, arm.warmup): arm for arm in _arms(records)}
    pairs = ((arm, found.get((other, arm.layers, arm.warmup))) for arm in found.values() if arm.norm == one)
    return [(arm, its, _at(arm)) for arm, its in pairs if its]


def _lines(found: Iterable[Arm], key: Callable[[Arm], Hashable]) -> list[list[Arm]]:
    """Return the arms with the same key in lines of two or more."""
    return [line for line in by_key((key(arm), arm) for arm in found).values() if len(line) > 1]


def _at(arm: Arm) -> str:
    return f"{arm.layers} layers, warm-up {arm.warmup}"


STABLE = "{0.stable_rate:g} and {1.stable_rate:g} ({2})"


def stable_at_higher_rates(layers: int) -> Check:
    """Return a check that pre-layernorm's largest stable rate is above post-layernorm's, with `layers` and more."""
    deep = lambda records: [both for both in _paired(records, "pre", "post") if both[0].layers >= layers]
    return each(deep, lambda pre, post, _: pre.stable_rate > post.stable_rate, "models", STABLE, "; ")


def as_stable(one: str, other: str) -> Check:
    """Return a check that one placement's largest stable rate is not below the other's, in every model."""
    pairs = lambda records: _paired(records, one, other)
    return each(pairs, lambda a, b, _: a.stable_rate >= b.stable_rate, "models", STABLE, "; ")


def best_beats(lower: str, higher: str) -> Check:
    """Return a check that a placement's loss at its best rate is below another's at its own, in every model."""
    pairs = lambda records: _paired(records, lower, higher)
    text = "{0.best_loss:.3f} and {1.best_loss:.3f} ({2})"
    return each(pairs, lambda a, b, _: less(a.best_loss, b.best_loss), "models", text, "; ", after="; nats")


def falls_with_depth(norm: str) -> Check:
    """Return a check that the deepest model's largest stable rate is below the shallowest's, for every warm-up."""

    def check(records: Sequence[Record]) -> Evidence | None:
        lines = _lines((arm for arm in _arms(records) if arm.norm == norm), attrgetter("warmup"))
        rates = (", ".join(f"{arm.stable_rate:g} ({arm.layers})" for arm in own) for own in lines)
        numbers = (f"warm-up {own[0].warmup}: {text}" for own, text in zip(lines, rates, strict=True))
        return tally([own[-1].stable_rate < own[0].stable_rate for own in lines], "warm-ups", "; ".join(numbers))

    return check


def warmup_helps(norm: str, layers: int) -> Check:
    """Return a check that the longest warm-up's largest stable rate is above the shortest's, with `layers` and more."""

    def ends_of(records: Sequence[Record]) -> list[tuple[Arm, Arm]]:
        deep = (arm for arm in _arms(records) if arm.norm == norm and arm.layers >= layers)
        return [(own[0], own[-1]) for own in _lines(deep, attrgetter("layers"))]

    text = "{0.stable_rate:g} to {1.stable_rate:g} ({0.layers} layers)"
    return each(ends_of, lambda a, b: b.stable_rate > a.stable_rate, "depths", text, "; ")


def no_worse(one: str, other: str, by: float) -> Check:
    """Return a check that a placement's loss at its best rate is at most a share above another's, in every model."""

    losses = lambda records: [(a.best_loss, b.best_loss, at) for a, b, at in _paired(records, one, other)]
    over = lambda records: [(a.mean / b.mean - 1, at, less(a, b.scaled(1 + by))) for a, b, at in losses(records)]
    return each(over, lambda _over, _at, margin: margin, "models", "{:+.1%} ({})", "; ")


def rate_transfers(by: float, norms: Sequence[str] = ()) -> Check:
    """Return a check that the smallest model's best rate costs every larger one at most a share of its lowest loss.

    It costs nothing where it is the larger model's best rate, too. Models that train at no rate are left out.

    Args:
        norms: of which arms; none: of all but those with the standard parametrization.
    """

    def check(records: Sequence[Record]) -> Evidence | None:
        meant = (arm for arm in _arms(records) if arm.norm in norms or not (norms or arm.norm.endswith("standard")))
        pairs = [(own[0], larger) for own in _lines(meant, attrgetter("norm")) for larger in own[1:]]
        pairs = [both for both in pairs if math.isfinite(both[1].best_loss.mean)]
        at_first = [estimate(larger.losses[first.best_rate]) for first, larger in pairs]
        over = [at.mean / larger.best_loss.mean - 1 for at, (_, larger) in zip(at_first, pairs, strict=True)]
        held = [
            first.best_rate == larger.best_rate or less(at, larger.best_loss.scaled(1 + by))
            for at, (first, larger) in zip(at_first, pairs, strict=True)
        ]
        worst = max(zip(over, pairs, strict=True), default=None, key=lambda one: one[0])
        numbers = "" if worst is None else f"at most {worst[0]:+.1%} ({worst[1][1].norm}, {_at(worst[1][1])})"
        return tally(held, "models", numbers)

    return check
