"""Points of a sweep: what repeats and seeds say of a measure."""

from harness.analysis.points import points
from harness.experiment.kit import step_seconds
from tests.harness.made_up_records import record


def last_loss(of: object) -> float:
    return of.losses[-1]  # type: ignore[attr-defined]


def test_repeats_of_a_seed_tell_of_seconds_and_not_of_losses() -> None:
    repeats = [record(repeat=i, seconds=0.1 + i / 100, nats=2.2) for i in range(3)]
    [point] = points(repeats, step_seconds)
    assert (point.estimate(step_seconds).n, point.estimate(lambda one: one.peak_memory_bytes).n) == (3, 3)
    for of_training in (last_loss, lambda one: one.last_evaluations[0].nats):
        found = point.estimate(of_training)
        assert (found.n, found.half_width) == (1, None)


def test_each_seed_counts_once_by_the_mean_of_its_repeats() -> None:
    runs = [record(seed=seed, repeat=i, nats=2.0 + seed / 10 + i / 100) for seed in range(2) for i in range(2)]
    [point] = points(runs, last_loss)
    found, alone = (
        point.estimate(last_loss),
        points([record(seed=0, nats=2.005), record(seed=1, nats=2.105)], last_loss),
    )
    assert (found.n, len(alone)) == (2, 1)
    assert abs(found.mean - alone[0].mean(last_loss)) < 1e-6


def test_one_repeat_on_too_few_cores_is_enough_for_its_point_to_tell_nothing_of_scaling() -> None:
    repeats = [record(repeat=0, cores=2, plan__dp=2), record(repeat=1, cores=1, plan__dp=2)]
    [point] = points(repeats, step_seconds)
    [alone] = points([record()], step_seconds)
    assert point.is_oversubscribed
    assert point.over(alone, step_seconds).n == 0
