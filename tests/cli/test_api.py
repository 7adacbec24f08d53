"""What `import lmscale` offers: runs, records and frames, whose columns the documents name."""

import re
from pathlib import Path
from typing import Any

import pytest

from harness.cli import api, installed
from harness.records.measures import frame
from harness.records.store import Store
from impl.errors import InputError
from impl.evaluation_config import EvaluationConfig
from impl.model.sizes import named
from impl.recipe import Recipe
from impl.run import Run
from tests.documents import ROOT
from tests.harness.made_up_records import document, record


def keep(out: Path, name: str, tier: str, seed: int = 0) -> None:
    made = document(record(seed=seed)) | {"experiment": name, "tier": tier}
    Store(out, name, tier).write(made)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    keep(tmp_path / "runs", "quickstart", "small")
    keep(tmp_path / "runs", "quickstart", "small", seed=1)
    keep(tmp_path / "runs", "quickstart", "smoke")
    keep(tmp_path / "inbox" / "theirs", "lab/widths", "small")
    return tmp_path


def test_records_are_read_from_any_folder_at_or_above_their_tiers(records: Path) -> None:
    count = lambda where, **more: len(api.load(records / where, **more))
    assert [count(where) for where in ("runs", "runs/quickstart", "runs/quickstart/small", "inbox")] == [3, 3, 2, 1]
    assert count("runs", tier="smoke") == 1
    assert {one.experiment for one in api.load(records / "inbox/theirs")} == {"lab/widths"}
    assert repr(api.load("quickstart")) == "<2 records of quickstart, small>", "your own, the largest tier"
    assert isinstance(api.load("quickstart")[:1], api.Records)


def test_a_frame_has_a_row_for_each_run(records: Path) -> None:
    rows = api.load(records / "runs/quickstart/small").frame()
    assert list(rows["seed"]) == [0, 1]
    sizes = [record(model__hidden_size=h, parameters=h, seed=seed) for h in (256, 128, 64) for seed in (1, 0)]
    sorted_ = api.frame(sizes)
    assert dict(zip(sorted_["id"], sorted_["point"], strict=True)) == {one.id: one.point.id for one in sizes}
    both = [*api.load(records / "runs", tier="small"), *api.load(records / "inbox")]
    assert len(api.frame(both)) == 3
    assert list(api.load(records / "inbox").evaluations()["name"]) == ["valid"]


def test_what_has_no_records_is_refused(records: Path) -> None:
    (records / "empty").mkdir()
    with pytest.raises(InputError, match="empty: has no records; `lmscale run` makes some"):
        api.load(records / "empty")
    with pytest.raises(InputError, match="quick"):
        api.load("no_such_experiment")
    for verb in (api.load, api.run):
        with pytest.raises(InputError, match="tier 'tiny'; valid: smoke, small, paper"):
            verb("quickstart", tier="tiny")  # pyright: ignore[reportArgumentType]


ONE = "the id of an experiment, a file with one, a Run, or several Runs"
FOLDER = "a folder with records, or the id of an experiment"


@pytest.mark.parametrize(
    ("verb", "value", "fields", "line"),
    [
        (api.run, 3, {}, f"run: 3 is of type int; valid: {ONE}"),
        (api.run, [Run(), "quickstart"], {}, f"run: 'quickstart' is of type str; valid: {ONE}"),
        (api.run, [], {}, f"run: None is of type NoneType; valid: {ONE}"),
        (api.run, "quickstart", {"only": 3}, "only: 3 is of type int; valid: part of a point's label"),
        (api.run, "quickstart", {"out": None}, "out: None is of type NoneType; valid: the folder of the records"),
        (api.run, "quickstart", {"track": 3}, "track: 3 is of type int; valid: trackers, as of `--track`"),
        (api.load, 3, {}, f"load: 3 is of type int; valid: {FOLDER}"),
        (api.frame, 3, {}, "frame: 3 is of type int; valid: records, as `load` and `run` return them"),
        (api.frame, "abc", {}, "frame: 'a' is of type str; valid: records, as `load` and `run` return them"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_named_with_what_is_valid(verb: Any, value: Any, fields: Any, line: str) -> None:
    with pytest.raises(InputError) as told:
        verb(value, **fields)
    assert str(told.value).startswith(line)


def test_runs_are_trained_and_not_again(tmp_path: Path) -> None:
    recipe, few = Recipe(steps=3, global_batch=2, microbatch=2), EvaluationConfig(sequences=8)
    run = Run(model=named("gpt-0.5m"), train=recipe, evaluation=few)
    [first] = api.run(run, out="mine")
    assert (first.status, first.experiment) == ("ok", "mine")
    [again] = api.run([run], out="mine")
    assert again.attempt == first.attempt
    assert len(api.load("mine")) == 1
    with pytest.raises(InputError, match="no token folder nowhere"):
        api.run([run, Run(data=type(run.data)(dataset="nowhere"))], out="mine")


def test_the_documents_name_every_column() -> None:
    [section] = re.findall(r"^## In Python$(.*)", (ROOT / "docs/results.md").read_text(), re.MULTILINE | re.DOTALL)
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(frame([record()]).columns)


def test_the_package_has_these_names_and_says_so() -> None:
    assert installed.load is api.load
    assert set(installed.PUBLIC) <= set(dir(installed))
    with pytest.raises(AttributeError, match="valid: run, load, frame, Records"):
        installed.train  # noqa: B018
