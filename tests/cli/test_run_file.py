"""The option `--config FILE`: a run in a file, in which options of the command line change fields."""

import json
from pathlib import Path

import pytest

from harness.cli import sweeps
from harness.experiment.experiment import Point
from harness.records.store import Store
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run, to_dict
from tests.harness.calls import Started, call, document, refused
from tests.harness.made_up_records import document as document_of
from tests.harness.made_up_records import record_of

RUN = Run(model=named("gpt-0.5m"), plan=Plan(dp=2, zero_stage=1), train=Recipe(steps=7, lr=3e-4), seed=5)
TOML = """\
seed = 5
[model]
hidden_size = 96
num_heads = 3
[plan]
dp = 2
zero_stage = 1
"""


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that commands would train."""
    runs: list[Run] = []

    def start(points: list[Point], *_: object) -> None:
        runs.extend(point.run for point in points)
        raise Started

    monkeypatch.setattr(sweeps, "sweep", start)
    monkeypatch.setattr(sweeps, "gpu_count", lambda: 0)
    return runs


def train(*words: str | Path) -> None:
    with pytest.raises(Started):
        print(call("train", *words))


def test_a_record_s_run_is_trained_again(trained: list[Run]) -> None:
    path = Store(Path("runs"), "made_up", "smoke").write(document_of(record_of(RUN)))
    Path("run.json").write_text(json.dumps(to_dict(RUN)))
    train("--config", path)
    train("--config=run.json")
    assert trained == [RUN, RUN]


def test_options_and_a_named_size_win_over_the_file(trained: list[Run]) -> None:
    Path("run.toml").write_text(TOML)
    train("--plan.dp", "1", "--plan.zero-stage=0", "--config", "run.toml")
    train("--config", "run.toml", "--model", "gpt-2m", "--seed", "0")
    first, second = trained
    assert (first.seed, first.model.hidden_size, first.plan, first.train) == (5, 96, Plan(), Recipe())
    assert second == Run(model=named("gpt-2m"), plan=Plan(dp=2, zero_stage=1))


def test_its_fields_count_as_given_where_a_system_has_others() -> None:
    Path("run.toml").write_text('precision = "bf16"\n[plan]\nzero_stage = 0\n')
    asked = ("predict", "--system", "h100", "--json")
    spoken = ("--precision", "bf16", "--plan.zero-stage", "0")
    assert document(call(*asked, "--config", "run.toml").output) == document(call(*asked, *spoken).output)


@pytest.mark.usefixtures("errors_found_once")
def test_tune_takes_the_precision_and_the_batch_of_a_file_unless_others_are_given() -> None:
    Path("run.toml").write_text(
        'precision = "fp32"\n[train]\nglobal_batch = 8\n[model]\nnum_layers = 4\nhidden_size = 512\nnum_heads = 8\n'
    )
    asked = ("tune", "--system", "selene", "--gpus", "4", "--top", "1", "--json", "--config", "run.toml")
    few = ("--fix", "zero_stage=0", "schedule=one_f_one_b", "recompute=none")
    spoken = ("--precision", "fp32", "--global-batch", "8")
    best = lambda *more: document(call(*asked, *more, *few).output)["best"]
    found = best()
    assert found == best(*spoken)
    assert found != best("--precision", "bf16")
    assert found != best("--global-batch", "16")


def test_a_schedule_that_is_code_is_also_named_by_the_command(trained: list[Run]) -> None:
    Path("mine.py").write_text("open('imported', 'w')\nfrom impl.pipeline.schedules import gpipe as rows\n")
    Path("run.toml").write_text('train.microbatch = 1\n[plan]\npp = 2\nschedule = "mine:rows"\n')
    error = refused("train", "--config", "run.toml")
    assert "run.toml: plan.schedule 'mine:rows' is code; valid: the option --plan.schedule besides" in error
    assert not Path("imported").exists()
    train("--config", "run.toml", "--plan.schedule", "mine:rows")
    assert trained[0].plan.schedule == "mine:rows"
    assert Path("imported").exists()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.toml", "[plan]\ntp = 0\n", "run.toml: plan.tp: Input should be greater than 0 (got 0)"),
        ("run.toml", "[plan]\npt = 2\n", "run.toml: plan.pt: Unexpected keyword argument"),
        ("run.toml", "[model]\nhidden_size = 30\nnum_heads = 4\n", "run.toml: model: num_heads 4"),
        ("run.toml", 'model = "gpt-2m"\n', "run.toml: model: "),
        ("run.toml", "seed = \n", "run.toml: Invalid value (at line 1"),
        ("run.toml", '[plan]\nschedule = "gpip"\n', "gpip"),
        ("run.json", "seed = 3\n", "run.json: Expecting value"),
        (
            "run.json",
            "[1]",
            "run.json has no table of fields; valid: the fields of a run as a TOML file (.toml) or as JSON",
        ),
        ("run.json", '{"config": 3}', "run.json has no table of fields"),
        ("run.json", '{"train": {"lr": NaN}}', "run.json: train.lr: Input should be a valid number"),
        ("run.json", "[" * 100_000, "run.json: maximum recursion"),
        ("run.toml", "a = " + "[" * 100_000, "run.toml: "),
        ("run.json", "\xff", "run.json: "),
    ],
)
def test_what_is_wrong_names_file_and_field(name: str, text: str, said: str) -> None:
    Path(name).write_text(text, encoding="latin-1")
    assert said in refused("train", "--config", name)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "nowhere.toml: No such file" in refused("train", "--config", "nowhere.toml")
    assert str(tmp_path) in refused("train", "--config", tmp_path)
    assert "--config needs a value: a file with a run" in refused("train", "--config")
    assert "--config" in refused("list", "--config", "run.toml")
