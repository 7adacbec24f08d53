"""Which points a sweep runs, which it leaves alone, and under which name a record is kept."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.collect import base_record
from harness.experiment import Experiment, load, points
from harness.store import FINISHED, Store
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run, from_dict, non_defaults, to_dict
from tests.harness.small_runs import Told, small, sweep, write_tokens


class FakeJob:
    """A job that has ended when it is looked at for the `looks`-th time."""

    def __init__(self, site: "FakeSite", looks: int) -> None:
        self.site, self.looks, self.cancelled = site, looks, False

    def done(self) -> bool:
        self.looks -= 1
        if self.looks >= 0 and not self.cancelled:
            return False
        self.site.active.discard(self)
        return True

    def cancel(self, check: bool = True) -> None:
        self.cancelled = True
        if self.site.impatient:
            os.kill(os.getpid(), signal.SIGINT)


class FakeSite:
    """Ends every run as told, by what a worker would have written."""

    on, device, allow_oom = "local", "cpu", False
    impatient = False
    """Whether the user presses Ctrl-C again for every job that is being cancelled."""

    def __init__(self, outcomes: dict[str, str] | None = None, looks: int = 0) -> None:
        self.outcomes, self.looks = outcomes or {}, looks
        self.submitted: list[str] = []
        self.jobs: list[FakeJob] = []
        self.active: set[FakeJob] = set()
        self.most = 0

    def why_invalid(self, ranks: int) -> str | None:
        return None

    def submit(self, attempt: Path, ranks: int, time_limit_seconds: float) -> FakeJob:
        run_id = json.loads((attempt / "spec.json").read_text())["id"]
        for rank in range(ranks):
            end_rank(attempt, rank, self.outcomes.get(run_id, "ok"))
        self.submitted.append(run_id)
        self.jobs.append(FakeJob(self, self.looks))
        self.active.add(self.jobs[-1])
        self.most = max(self.most, len(self.active))
        return self.jobs[-1]


def end_rank(attempt: Path, rank: int, outcome: str) -> None:
    if outcome == "failed":
        failure = {"status": "failed", "reason": f"rank {rank}: no luck", "rank": rank, "time": rank, "log": ["end"]}
        (attempt / f"rank-{rank}.failure.json").write_text(json.dumps(failure))
        return
    step = {"step": 0, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "seconds": 0.1}
    (attempt / f"rank-{rank}.steps.jsonl").write_text(json.dumps(step) + "\n")
    result = {"status": outcome, "reason": None, "seconds": {}, "evaluations": [], "rank": {"rank": rank}}
    (attempt / f"rank-{rank}.json").write_text(json.dumps(result | {"device": {}, "resolved": {}}))


@pytest.fixture(autouse=True)
def no_waiting_and_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.launch.gpu_count", lambda: 0)
    monkeypatch.setattr("harness.sweep.POLL_SECONDS", 0.001)
    monkeypatch.setattr("harness.sweep.LOOK_SECONDS", 0.0)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, "made_up", "smoke")


# Names of records ---------------------------------------------------------------------------------------------------


def test_ids_of_runs_stay_what_they_are():
    """If this fails, every record that anyone has is orphaned: a default changed, or what an id is made of."""
    assert Run().id == "44136fa355b3"
    assert (
        Run(
            model=ModelConfig(num_layers=4, hidden_size=192, num_heads=3, norm_placement="post"),
            plan=Plan(dp=2),
            train=Recipe(steps=400, lr=3e-3),
            seed=1,
        ).id
        == "2bee64afd665"
    )
    assert Run(model=ModelConfig(family="bert", dropout=0.1), precision="bf16", repeat=2).id == "0097bf1a8d11"


def test_a_new_field_with_a_default_changes_no_id():
    before = Run(train=Recipe(steps=7), seed=3)
    wider = dataclasses.make_dataclass("Wider", [("novelty", int, 5), *_fields_of(Run)], frozen=True, kw_only=True)
    values = {field.name: getattr(before, field.name) for field in dataclasses.fields(before)}
    assert non_defaults(wider(**values)) == non_defaults(before) == {"train": {"steps": 7}, "seed": 3}
    assert non_defaults(wider(**values, novelty=6)) == {"novelty": 6, "train": {"steps": 7}, "seed": 3}


def _fields_of(config: type) -> list[tuple[str, Any, Any]]:
    return [(f.name, f.type, dataclasses.field(default=f.default)) for f in dataclasses.fields(config)]


runs = st.builds(
    Run,
    model=st.builds(ModelConfig, num_layers=st.integers(1, 3), norm_placement=st.sampled_from(["pre", "post"])),
    plan=st.builds(Plan, dp=st.integers(1, 2), overlap_grad_reduce=st.booleans()),
    train=st.builds(Recipe, lr=st.sampled_from([1e-3, 1e-4]), steps=st.integers(100, 101)),
    precision=st.sampled_from(["fp32", "bf16"]),
    seed=st.integers(0, 1),
    repeat=st.integers(0, 1),
)


@given(one=runs, other=runs)
def test_runs_have_the_same_id_if_and_only_if_they_are_the_same(one: Run, other: Run):
    assert (one.id == other.id) == (one == other)
    assert from_dict(json.loads(json.dumps(to_dict(one)))) == one


# What runs and what does not ----------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    rounds=st.lists(st.lists(st.sampled_from(["ok", "nan", "failed"]), min_size=4, max_size=4), min_size=1, max_size=4),
    jobs=st.integers(1, 3),
    looks=st.integers(0, 2),
)
def test_every_call_runs_what_has_no_finished_record_in_order_and_nothing_else(
    tokens: Path, tmp_path_factory: pytest.TempPathFactory, rounds: list[list[str]], jobs: int, looks: int
):
    store = Store(tmp_path_factory.mktemp("rounds"), "made_up", "smoke")
    four = [small(tokens, dp=1 + seed % 2, seed=seed) for seed in range(4)]
    status = {run.id: "missing" for run in four}
    for outcomes in rounds:
        expected = [run.id for run in four if status[run.id] not in FINISHED]
        site = FakeSite(dict(zip(status, outcomes, strict=True)), looks)
        told = sweep(store, four, site=site, jobs=jobs)
        assert site.submitted == told.starts == expected
        assert site.most <= jobs
        status |= {run_id: site.outcomes[run_id] for run_id in expected}
        assert sorted(told.ends) == sorted((run_id, status[run_id]) for run_id in expected)
        assert {r["id"]: r["status"] for r in store.records()} == status


def test_the_files_of_a_failed_attempt_are_kept_and_those_of_a_good_one_not(tokens: Path, store: Store):
    good, bad = small(tokens), small(tokens, seed=1)
    sweep(store, [good, bad], site=FakeSite({bad.id: "failed"}))
    [kept] = (store.folder / "attempts").iterdir()
    assert kept.name.startswith(bad.id)


def test_a_point_that_cannot_run_is_a_record_with_its_reason_and_the_others_run(tokens: Path, store: Store):
    odd = small(tokens, dp=1, global_batch=3, microbatch=2)
    lost = small(tokens.parent / "nowhere", seed=1)
    huge = small(tokens, dp=100_000, global_batch=100_000, microbatch=1)
    site = FakeSite()
    told = sweep(store, [odd, lost, huge, small(tokens)], site=site)
    assert site.submitted == [small(tokens).id]
    assert [status for _, status in told.ends] == ["invalid", "invalid", "invalid", "ok"]
    reasons = [record["reason"] for run in (odd, lost, huge) if (record := store.read(run.id))]
    assert "not divisible" in reasons[0]
    assert "no token folder" in reasons[1]
    assert "100000 ranks" in reasons[2]
    assert all(reason.count("\n") == 0 for reason in reasons)


def test_more_ranks_than_cores_are_warned_about_and_run(tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.validity.os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("harness.validity.os.cpu_count", lambda: 2)
    told = sweep(store, [small(tokens, dp=4, global_batch=4)], site=FakeSite())
    assert "4 ranks x 1 threads share 2 cores" in told.messages[0]
    assert [status for _, status in told.ends] == ["ok"]


def test_records_of_another_tier_or_experiment_are_never_taken_for_done(tokens: Path, tmp_path: Path):
    run = small(tokens)
    for experiment, tier in (("made_up", "small"), ("other", "smoke"), ("made_up", "paper")):
        sweep(Store(tmp_path, experiment, tier), [run], site=FakeSite())
    foreign = Store(tmp_path, "made_up", "small").path(run.id).read_text()
    store = Store(tmp_path, "made_up", "smoke")
    store.path(run.id).parent.mkdir(parents=True)
    store.path(run.id).write_text(foreign)  # even where someone copied it
    site = FakeSite()
    sweep(store, [run], site=site)
    assert site.submitted == [run.id]
    record = store.read(run.id)
    assert record is not None
    assert (record["tier"], record["experiment"]) == ("smoke", "made_up")


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"status": "ok"}'])
def test_a_broken_record_is_missing_and_its_point_runs_again(tokens: Path, store: Store, content: str):
    run = small(tokens)
    sweep(store, [run], site=FakeSite())
    store.path(run.id).write_text(content)
    site = FakeSite()
    sweep(store, [run], site=site)
    assert site.submitted == [run.id]
    record = store.read(run.id)
    assert record is not None
    assert record["status"] == "ok"


def test_a_record_cut_short_by_a_byte_is_run_again(tokens: Path, store: Store):
    run = small(tokens)
    sweep(store, [run], site=FakeSite())
    whole = store.path(run.id).read_text()
    store.path(run.id).write_text(whole.rstrip()[:-1])
    site = FakeSite()
    sweep(store, [run], site=site)
    assert site.submitted == [run.id]


# Interruption, without processes ------------------------------------------------------------------------------------


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("impatient", [False, True])
def test_an_interrupt_cancels_what_runs_and_leaves_no_record_of_it(tokens: Path, store: Store, impatient: bool):
    first, second, third = (small(tokens, seed=seed) for seed in range(3))
    sweep(store, [first], site=FakeSite())
    kept = store.path(first.id).read_bytes()
    site = FakeSite(looks=10**9)
    site.impatient = impatient
    with pytest.raises(KeyboardInterrupt):
        sweep(store, [first, second, third], site=site, told=Told(on_look=interrupt), jobs=2)
    assert site.submitted == [second.id, third.id]
    assert all(job.cancelled for job in site.jobs)
    assert [r["id"] for r in store.records()] == [first.id]
    assert store.path(first.id).read_bytes() == kept
    assert list((store.folder / "attempts").iterdir()) == []


@pytest.mark.parametrize("where", ["harness.sweep.summary", "harness.sweep.record_of"])
def test_an_interrupt_between_start_and_end_leaves_no_attempt(
    tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch, where: str
):
    monkeypatch.setattr(where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep(store, [small(tokens)], site=FakeSite())
    assert store.records() == []
    assert list((store.folder / "attempts").iterdir()) == []


def test_a_disk_that_is_full_keeps_the_records_that_are_there(
    tokens: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    done, new = small(tokens), small(tokens, seed=1)
    sweep(store, [done], site=FakeSite({done.id: "failed"}))
    kept = store.path(done.id).read_bytes()

    def full(self: Store, record: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "write", full)
    with pytest.raises(OSError, match="No space"):
        sweep(store, [done, new], site=FakeSite())
    assert store.path(done.id).read_bytes() == kept
    assert [path.name for path in (store.folder / "records").iterdir()] == [f"{done.id}.json"]


# Names of points and experiments ------------------------------------------------------------------------------------


def test_only_takes_a_part_of_a_label_a_pattern_or_the_beginning_of_an_id(tokens: Path):
    three = [small(tokens, seed=seed) for seed in range(3)]
    assert [p.run.seed for p in points(three)] == [0, 1, 2]
    assert [p.run.seed for p in points(three, "seed=1")] == [1]
    assert [p.run.seed for p in points(three, "*=2")] == [2]
    assert [p.run.seed for p in points(three, three[0].id[:8])] == [0]
    with pytest.raises(InputError, match=r"matches no point; points: .*seed=0.*seed=1.*seed=2"):
        points(three, "seed=7")


def test_two_points_that_are_the_same_run_are_refused(tokens: Path):
    with pytest.raises(InputError, match="same run"):
        points([small(tokens), small(tokens)])


def test_an_experiment_is_found_by_its_last_word_and_a_near_miss_is_named():
    assert load("layernorm_placement").id == "megatron2019/layernorm_placement"
    assert isinstance(load("quickstart"), Experiment)
    with pytest.raises(InputError, match="did you mean quickstart"):
        load("quikstart")


def test_a_record_names_its_run_whatever_came_of_it():
    spec = {"id": "x", "experiment": "made_up", "tier": "smoke", "run": {"seed": 0}}
    assert base_record(spec)["config"] == {"seed": 0}
