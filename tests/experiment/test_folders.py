"""Which records a verb reads and writes where no folder is named: one's own, or the committed ones."""

from pathlib import Path
from typing import Any

import pytest

from harness.experiment import folders
from harness.experiment.experiment import Tier
from harness.experiment.loading import load
from harness.records.attempts import Attempts
from harness.records.store import SIMULATED, Store
from impl.run import Run, with_fields
from tests.harness import made_up_records
from tests.harness.calls import call, document, refused
from tests.harness.made_up_records import record_of

NAME = "megatron2019/layernorm_placement"


@pytest.fixture(autouse=True)
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of committed records, empty; the working directory is another one."""
    found, here = tmp_path / "archive", tmp_path / "here"
    for folder in (found, here):
        folder.mkdir()
    monkeypatch.setattr(folders, "ARCHIVE", found)
    monkeypatch.chdir(here)
    return found


def put(out: Path, tier: str, experiment: str = NAME, run: Run | None = None, **place: Any) -> Path:
    full = made_up_records.document(record_of(run or Run(), tier=tier, **place))
    return Store(out, experiment, tier).write(full | {"experiment": experiment})


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def simulate(out: Path, tier: str, system: str, experiment: str = NAME) -> None:
    place = {"system": system, "stack": "any", "device": "cuda", "device_name": "A100", "backend": "nccl"}
    fields = {"source": SIMULATED, "environment": place, "experiment": experiment, "evaluations": []}
    full = made_up_records.document(record_of(Run(), tier=tier))
    Store(out, experiment, tier, system).write(full | fields)


def read(out: Path | None, tier: Tier, experiment: str = NAME) -> list[Path]:
    """The folders of records that a tier is read from, those without records left out."""
    return [s.recorded for s in folders.stores(out, experiment, tier) if any(s.recorded.glob("*.json"))]


def test_own_records_go_before_committed_ones_of_the_same_kind_and_tier(archive: Path) -> None:
    at = lambda out, tier, kind="records": out / NAME / tier / kind
    for tier in ("small", "paper"):
        put(archive, tier)
    for out, system in ((archive, "selene"), (archive, "frontier"), (folders.OWN, "selene"), (folders.OWN, "mine")):
        simulate(out, "paper", system)
    put(folders.OWN, "smoke")
    assert read(None, "smoke") == [at(folders.OWN, "smoke")]
    assert read(None, "small") == [at(archive, "small")]
    assert read(None, "paper") == [
        at(archive, "paper"),
        at(archive, "paper", "simulated/frontier"),
        at(folders.OWN, "paper", "simulated/mine"),
        at(folders.OWN, "paper", "simulated/selene"),
    ]
    put(folders.OWN, "paper")
    assert read(None, "paper")[0] == at(folders.OWN, "paper")
    assert read(archive, "smoke") == []
    assert read(archive, "paper")[0] == at(archive, "paper"), "a folder that is named is read alone"
    assert read(None, "paper", "quickstart") == []


def test_a_prediction_of_ones_own_leaves_the_committed_measurements_in_the_claims(archive: Path) -> None:
    for norm, nats in (("pre", 2.2), ("post", 2.4)):
        put(archive, "small", run=with_fields(Run(), {"model.norm_placement": norm}), nats=nats)
    before = document(call("claims", NAME, "--json").output)
    assert sum(before["counts"]["measured"].values()) > 0
    simulate(folders.OWN, "paper", "selene")
    assert document(call("claims", NAME, "--json").output)["counts"]["measured"] == before["counts"]["measured"]
    assert f"your own in runs, before the committed ones in {archive}" in call("claims", NAME).output
    alone = document(call("claims", NAME, "--json", "--out", "runs").output)
    assert sum(alone["counts"]["measured"].values()) == 0


def test_several_sweeps_under_way_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    open_ = lambda attempts: {"id": []} if attempts.store.tier != "paper" else {}
    monkeypatch.setattr(Attempts, "open", open_)
    assert "at several tiers; --tier says which: smoke, small" in refused("cancel", NAME)


def test_a_table_of_committed_records_is_printed_and_nothing_written(archive: Path) -> None:
    put(archive, "small")
    before = files(archive)
    answer = call("table", "layernorm_placement")
    assert answer.status == 0, answer
    assert "small tier" in answer.output
    assert "1 record is of a point that the experiment does not have" in " ".join(answer.output.split())
    assert f"records: the committed ones in {archive}\n" in answer.output
    assert files(archive) == before
    assert list(Path().iterdir()) == []
    assert call("table", "layernorm_placement", "--out", archive).status == 0
    assert (archive / NAME / "small" / "tables").is_dir(), "the folder was named"


def test_a_table_takes_the_largest_measured_tier_and_writes_own_ones(archive: Path) -> None:
    put(archive, "paper")
    put(folders.OWN, "smoke")
    put(folders.OWN, "small")
    assert document(call("table", "layernorm_placement", "--json").output)["tier"] == "small"
    assert (folders.OWN / NAME / "small" / "tables").is_dir()
    assert document(call("table", "layernorm_placement", "--tier", "smoke", "--json").output)["tier"] == "smoke"
    assert document(call("table", "layernorm_placement", "--tier", "paper", "--json").output)["files"] == []


def test_without_any_record_the_command_that_makes_some_is_named() -> None:
    assert f"runs/{NAME}/smoke has no records; `lmscale run {NAME} --tier smoke`" in refused("table", NAME)


def test_status_is_of_own_sweeps_and_names_the_committed_records(archive: Path) -> None:
    put(archive, "small")
    answer = call("status", "layernorm_placement", "--tier", "small")
    assert "0 of 72 points finished" in answer.output
    assert f"the committed ones are in {archive}" in answer.output
    put(folders.OWN, "small", run=load(NAME).runs["small"][0])
    answer = call("status", "layernorm_placement")
    assert f"{NAME}, tier small, runs: 1 of 72 points finished" in answer.output
    assert str(archive) not in answer.output


@pytest.mark.parametrize("more", [(), ("--out", "named")])
def test_a_sweep_of_which_no_point_can_run_writes_nothing_and_offers_a_prediction(
    more: tuple[str, ...], archive: Path
) -> None:
    put(archive, "paper", experiment="ptdp2021/interleaving")
    before = files(archive)
    answer = call("run", "interleaving", "--tier", "paper", *more)
    assert answer.status == 1
    assert "none of 10 points can run here; nothing was written" in answer.output
    options = f"ptdp2021/interleaving --tier paper --system NAME {' '.join(more)}".strip()
    assert f"`lmscale predict {options}` predicts" in answer.output
    assert files(archive) == before
    assert list(Path().iterdir()) == []
    told = call("run", "interleaving", "--tier", "paper", "--json", *more)
    assert told.status == 1
    assert len(document(told.output)["points"]) == 10


def test_equal_reasons_are_one_line_that_names_the_missing_text(archive: Path) -> None:
    answer = call("run", "layernorm_placement", "--tier", "small")
    assert answer.status == 1
    lines = answer.output.splitlines()
    assert sum("no token folder data/books-byte" in line for line in lines) == 1
    assert lines[0].startswith("72 points: no token folder data/books-byte; it is 223 books")
    assert "public domain" in lines[0]
    assert "--data synthetic" in lines[0]
    assert list(Path().iterdir()) == []


def test_a_prediction_is_offered_of_the_same_points_only() -> None:
    which = ["--tier", "paper", "--only", "batch=12", "--plan.no-overlap-grad-reduce"]
    answer = call("run", "interleaving", *which)
    assert "--only batch=12 --plan.no-overlap-grad-reduce` predicts" in answer.output
    answer = call("run", "quickstart", "--engine", "deepspeed", "--plan.tp", "2")
    assert answer.status == 1
    assert "predict" not in answer.output


def test_a_dry_run_counts_the_points_that_can_run() -> None:
    answer = call("run", "interleaving", "--tier", "paper", "--dry-run", "--device", "cuda")
    assert "0 of 10 points would be run" in answer.output
    assert "0 of 72 points would be run" in call("run", "layernorm_placement", "--tier", "small", "--dry-run").output
    answer = call("run", "race", "--dry-run")
    assert "6 of 6 points would be run" in answer.output, "two of them start from the end of others"
