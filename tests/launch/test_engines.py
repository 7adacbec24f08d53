"""Other engines through the command line: chosen, refused with a reason, recorded with their settings, kept apart."""

import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.analysis import tables
from harness.analysis.points import points as points_of
from harness.experiment.claims_table import claims_table
from harness.experiment.comparison import relative_to
from harness.experiment.experiment import TIERS, Experiment
from harness.experiment.loading import load
from harness.launch import preflight
from harness.launch.flags import Saving
from harness.records.measures import frame
from harness.records.record import Record
from harness.records.store import Store
from harness.report import results
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.run import EngineName, Run
from impl.train import Trainer
from tests.harness import calls, made_up_records
from tests.harness.calls import (
    answer_every_name,
    call,
    document,
    elsewhere,  # noqa: F401 - a fixture of every test
    put_record,
    refused,
    stop_before_training,
)
from tests.harness.fake_site import FakeSite
from tests.harness.made_up_records import changed, made_of, record, record_of
from tests.harness.small_runs import small, sweep

INSIDE = ("state_bytes", "activation_bytes", "memory", "traffic", "timeline")
"""What only our own trainer shows."""
PEERS = ["torch", *(["deepspeed"] if find_spec("deepspeed") else [])]

pytestmark = pytest.mark.usefixtures("forked_ranks")


# Whole runs, with processes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def points(tokens: Path) -> list[Run]:
    """One that every engine can do, its ranks with unequal shares of the validation text; and one that is ours only."""
    divided = small(tokens, dp=2, steps=5)
    evaluation = replace(divided.evaluation, sequences=5)
    divided = replace(divided, plan=replace(divided.plan, zero_stage=3), evaluation=evaluation)
    return [divided, replace(divided, model=replace(divided.model, norm_placement="qk"))]


@pytest.fixture
def made_up(points: list[Run], no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    one = calls.made_up(points)
    answer_every_name(monkeypatch, one)
    return one


@pytest.mark.parametrize("engine", PEERS)
def test_an_engine_trains_the_points_that_it_can(
    engine: EngineName, made_up: Experiment, points: list[Run], tmp_path: Path, one_rank: dist.ProcessGroup
) -> None:
    answer = call("run", "made_up", "--engine", engine, "--profile", "--json", "--out", tmp_path / "out")
    assert answer.status == 0, answer.errors
    trained, refused = document(answer.output)["records"]
    assert [trained["id"], refused["id"]] == [replace(run, engine=engine).id for run in points]
    assert trained["status"] == "ok", trained["reason"]
    assert refused["status"] == "invalid"
    assert "norm_placement 'qk'" in refused["reason"]
    assert trained["engine"]["name"] == engine
    assert len(trained["engine"]) > 2, "no settings"
    for rank in trained["ranks"]:
        assert rank["peak_memory_bytes"] > 0
        assert not set(INSIDE) & set(rank)
        assert sum(rank["profile"]["parts"].values()) == pytest.approx(rank["profile"]["seconds"])
        assert min(rank["limit"][f"{kind}_seconds"] for kind in ("gemm", "attention", "collective")) > 0
    alone = replace(points[0], plan=replace(points[0].plan, dp=1, zero_stage=0))
    ours = Trainer(alone, TokenFolder.open(alone.data.dataset), build_mesh(alone.plan, "cpu"), torch.device("cpu"))
    for step, theirs in enumerate(trained["steps"]):
        assert theirs["loss"] == pytest.approx(ours.step(step).loss.item(), rel=1e-5)
    [expected], [found] = ours.evaluate(final=True), trained["evaluations"]
    assert found["nats"] == pytest.approx(expected.nats, rel=1e-5)
    assert (found["tokens"], found["words"], found["key"]) == (expected.tokens, expected.words, expected.key)


# The command line, without processes ---------------------------------------------------------------------------------


def test_an_engine_that_is_given_replaces_that_of_every_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = lambda *given: document(call("status", "quickstart", "--json", "--out", tmp_path, *given).output)
    first, *rest = load("quickstart").runs["smoke"]
    put_record(tmp_path, "quickstart", replace(first, engine="torch"))
    found = status("--engine", "torch")
    assert [p["id"] for p in found["points"]] == [replace(run, engine="torch").id for run in (first, *rest)]
    assert found["counts"] == {"ok": 1, "missing": len(rest)}
    native = status()
    assert native["counts"] == {"missing": 1 + len(rest)}
    assert not {p["id"] for p in native["points"]} & {p["id"] for p in found["points"]}
    engines: tuple[EngineName, ...] = ("native", "torch", "deepspeed")
    several = replace(load("quickstart"), runs={tier: [Run(engine=engine) for engine in engines] for tier in TIERS})
    answer_every_name(monkeypatch, several)
    assert status("--out", tmp_path / "empty")["counts"] == {"missing": 3}
    assert status("--out", tmp_path / "empty", "--engine", "native")["counts"] == {"missing": 1}, "they differ no more"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("run quickstart --engine jax", ("jax", "native", "deepspeed", "torch")),
        ("status quickstart --engine jax", ("jax", "native", "deepspeed", "torch")),
        ("run quickstart --engine", ("--engine",)),
        ("table quickstart --engine torch", ("--engine",)),
        ("train --engine jax", ("jax", "native", "deepspeed", "torch")),
        ("train --engine torch --model.norm-placement olmo2", ("torch engine", "model.norm_placement 'olmo2'")),
        ("train --engine deepspeed --plan.dp 2 --model.dropout 0.1", ("deepspeed engine", "model.dropout 0.1")),
        ("train --engine torch --model.family bert", ("torch engine", "model.family 'bert'")),
        ("train --engine torch --checkpoint-every 5", ("--checkpoint-every 5", "torch engine", "native")),
        ("memory --engine deepspeed", ("deepspeed", "native")),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_is_told_in_one_line(
    arguments: str, told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop_before_training(monkeypatch)
    message = refused(*arguments.split(), *(["--out", "out"] if arguments.startswith("train") else []))
    assert all(part in message for part in told), message
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch, tokens: Path) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    run = replace(small(tokens, dp=2), engine="deepspeed")
    reason = preflight.why_invalid(run, preflight.Datasets(tokens), preflight.Site())
    assert reason
    assert "not installed" in reason
    assert preflight.why_invalid(replace(run, engine="native"), preflight.Datasets(tokens), preflight.Site()) is None


def test_checkpoints_of_another_engine_are_an_invalid_point(tokens: Path, tmp_path: Path) -> None:
    store, site, run = Store(tmp_path, "made_up", "smoke"), FakeSite(), small(tokens, dp=2)
    divided = replace(run, plan=replace(run.plan, zero_stage=1))
    theirs = replace(divided, engine="torch")
    told = sweep(store, [divided, theirs], site=site, saving=Saving(checkpoint_every=2))
    assert dict(told.ends) == {divided.id: "ok", theirs.id: "invalid"}
    assert site.submitted == [divided.id]
    assert any("--checkpoint-every 2" in (one.reason or "") for one in store.records())


# Records, tables and claims -------------------------------------------------------------------------------------------


def peer(full: Record) -> Record:
    """The record, had another engine made it, which shows nothing of its inside."""
    ranks = [{k: v for k, v in rank.items() if k not in INSIDE} for rank in made_up_records.document(full)["ranks"]]
    return changed(full, ranks=ranks)


def theirs(engine: EngineName = "torch", **fields: Any) -> Record:
    return peer(record(engine=engine, **fields))


def test_engines_are_points_of_their_own_and_always_named() -> None:
    both = [record(seconds=0.1), theirs(seconds=0.2), theirs("deepspeed", seconds=0.3, plan__dp=2)]
    shown = tables.throughput_table(both)
    assert list(shown.frame["varies"]) == ["engine=native", "engine=torch", "engine=deepspeed"]
    assert list(shown.frame["n"]) == [1, 1, 1]
    perplexity = [table for table in results.all_tables(both) if table.name.startswith("perplexity")]
    named = {word for table in perplexity for text in table.frame["varies"] for word in text.split()}
    assert named == {*shown.frame["varies"], "dp=1", "dp=2"}


def test_a_record_without_an_engine_is_ours() -> None:
    older = made_up_records.document(record())
    del older["config"]["engine"]
    old = made_of(older)
    assert frame([old])["engine"].tolist() == ["native"]
    assert frame([old])["point"].tolist() == frame([record()])["point"].tolist()
    assert tables.throughput_table([old]).title == "Throughput: made_up, smoke tier"
    assert tables.throughput_table([theirs()]).title == "Throughput: made_up, smoke tier, torch engine"


def test_no_engine_is_another_ones_baseline() -> None:
    ours = [record(seconds=0.1, train__microbatch=1), record(seconds=0.06, train__microbatch=1, plan__dp=2)]
    two = theirs(seconds=0.05, train__microbatch=1, plan__dp=2)
    found = tables.scaling_table([*ours, two]).frame
    assert list(found["engine"]) == ["native", "native"]
    found = tables.scaling_table([*ours, two, theirs(seconds=0.2, train__microbatch=1)]).frame
    speedups = dict(zip(zip(found["engine"], found["ranks"], strict=True), found["speedup"], strict=True))
    assert speedups == {
        ("native", 1): 1, ("native", 2): pytest.approx(5 / 3), ("torch", 1): 1, ("torch", 2): pytest.approx(4)
    }  # fmt: skip
    rate = lambda record: record.tokens_per_second
    found = relative_to(points_of([*ours, two], rate), lambda one: one.run.plan.world_size == 1, rate)
    assert [math.isnan(one.relative.mean) for one in found] == [False, False, True]


@pytest.mark.parametrize(
    "name",
    [
        "quickstart", "korthikanti2022/sequence_parallel_memory", "megatron2019/tensor_parallel_scaling",
        "ptdp2021/pipeline_schedules", "zero2019/zero_memory",
    ],
)  # fmt: skip
def test_an_experiments_table_and_claims_are_about_its_own_engines(name: str) -> None:
    """Another engine's records change neither; alone they make a table, though much is not known of them."""
    experiment = load(name)
    runs = [run for run in experiment.runs["smoke"] if run.engine == "native"][:4]
    ours, others = [record_of(run) for run in runs], [peer(record_of(replace(run, engine="torch"))) for run in runs]
    if {run.engine for some in experiment.runs.values() for run in some} == {"native"}:
        verdicts = lambda records: claims_table(experiment.claims, records).cells
        assert verdicts([*ours, *others]) == verdicts(ours)
        if experiment.table:
            assert experiment.table([*ours, *others]).cells == experiment.table(ours).cells
    for table in results.all_tables(others, experiment.claims, table=experiment.table):
        assert table.cells
