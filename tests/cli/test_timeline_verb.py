"""The verb `timeline`: what it draws, what it answers as JSON, what it writes, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness.cli import timeline
from harness.records import store
from impl.model.config import ModelConfig
from impl.pipeline.schedule import Action, Op, peak_in_flight
from impl.pipeline.schedules import build
from impl.pipeline.simulate import simulate
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.calls import call, document, refused

ROOT = Path(__file__).resolve().parents[2]
RUN = Run(
    model=ModelConfig(num_layers=4), plan=Plan(pp=2, tp=2, schedule="zb_h1"), train=Recipe(global_batch=4, microbatch=1)
)
SECONDS = {Op.F: 0.25, Op.I: 0.5, Op.W: 0.125}


def record(run: Run = RUN, late: float = 0.0) -> dict[str, Any]:
    """Of a run whose last step began at 100 s, and whose second rank was `late` at the first action."""
    schedule = build(run.plan.schedule, run.plan.pp, run.microbatches)
    delay = lambda action: late if action == Action(Op.F, 1, 0) else 0.0
    rows = simulate(schedule, lambda action: SECONDS[action.op] + delay(action)).as_rows()
    shifted = [[[text, 100 + start, 100 + end] for text, start, end in row] for row in rows]
    ranks = [{"rank": rank, "timeline": row} for row in shifted for rank in (0, 1)]
    for rank in ranks[1::2]:  # of two tensor-parallel ranks one is shown
        rank["timeline"] = None
    head = {"schema": 1, "id": run.id, "experiment": "made_up", "tier": "smoke", "status": "ok"}
    return head | {"config": json.loads(json.dumps(asdict(run))), "ranks": ranks}


def write(content: Any, name: str = "record.json") -> Path:
    path = Path(name)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# What it answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "v", "bubble"), [("gpipe", 1, 3 / 8), ("one_f_one_b", 1, 3 / 8), ("interleaved", 2, 3 / 16)]
)
def test_json_has_the_rows_the_spans_and_what_follows_from_them(schedule: str, v: int, bubble: float) -> None:
    answer = call("timeline", "--plan.schedule", schedule, "--plan.chunks", str(v), "--json")
    assert (answer.status, answer.errors) == (0, "")
    found, table = document(answer.output), build(schedule, 4, 8, v)
    assert found["rows"] == [[str(action) for action in row] for row in table.rows]
    assert found["rows"][0][0] == "0F0"
    assert [[text for text, _, _ in row] for row in found["spans"]] == found["rows"]
    assert found["bubble"] == pytest.approx(bubble)  # PTD-P, section 2.2
    assert found["peak_in_flight"] == [peak_in_flight(row) for row in table.rows]
    assert found["step_time"] == pytest.approx(24 * (1 + bubble))
    assert found["files"] == []


def test_costs_are_those_given() -> None:
    costs = ["--forward", "0.1", "--input-gradient", "0.3", "--weight-gradient=0.2", "--transfer", "0.05"]
    options = ["--plan.pp", "2", "--plan.schedule", "zb_h1", "--microbatches", "1"]
    found = document(call("timeline", *options, *costs, "--json").output)
    spans = [span for row in found["spans"] for span in row]
    assert spans == [
        *[["0F0", 0.0, 0.1], ["0I0", 0.6, 0.9], ["0W0", 0.9, 1.1]],
        *[["1F0", 0.15, 0.25], ["1I0", 0.25, 0.55], ["1W0", 0.55, 0.75]],
    ]  # exact: in fractions, not in sums of floats


def test_the_same_is_drawn_in_text() -> None:
    answer = call("timeline", "--plan.pp", "2", "--microbatches", "3")
    assert (answer.status, answer.errors) == (0, "")
    assert "r0 |F0 F1 ......B0--- F2 B1--- ...B2--- |" in answer.output
    assert answer.output.startswith("one_f_one_b: step 12 forward passes, bubble 0.3333")


def test_the_bound_and_the_shortest_table_in_the_same_memory() -> None:
    given = ("timeline", "--plan.schedule", "zbv", "--plan.chunks", "2", "--microbatches", "4")
    found, searched = (document(call(*given, *more, "--json").output) for more in ((), ("--search", "60")))
    assert (found["step_time"], found["bound"]) == (15, 13.5)
    assert (searched["step_time"], searched["bound"], searched["schedule"]) == (13.5, 13.5, "shortest")
    assert max(searched["peak_in_flight"]) <= max(found["peak_in_flight"])
    [table] = re.findall(r"--plan.schedule (v-rows:\S+)", call(*given, "--search", "60").output)
    as_plan = [table if word == "zbv" else word for word in given]
    assert document(call(*as_plan, "--json").output)["step_time"] == 13.5
    assert call(*given).output.endswith("shorter than 13.5 forward passes: this one is 11.1% longer\n")
    assert refused("timeline", "--search", "-1").endswith("--search -1.0: must not be negative; valid: 0 to 1e+09")


def test_a_record_is_drawn_under_its_prediction() -> None:
    path = write(record(late=1.0))
    found = document(call("timeline", "--record", path, "--json").output)
    assert found.keys() == {"predicted", "measured", "files"}
    rows = [[text for text, _, _ in row] for row in found["measured"]["spans"]]
    assert rows == [[str(action) for action in row] for row in build("zb_h1", 2, 4).rows]
    assert found["measured"]["spans"][0][0] == ["0F0", 0.0, 0.25]
    expected = simulate(build("zb_h1", 2, 4), lambda action: SECONDS[action.op])
    assert found["predicted"]["step_time"] == pytest.approx(float(expected.step_time)), "a median is no mean"
    assert found["measured"]["step_time"] == pytest.approx(float(expected.step_time) + 1.0)
    shown = call("timeline", "--record", path).output
    assert shown.index("predicted: step") < shown.index("measured: step")


# What it writes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_record", [False, True])
def test_out_is_a_png_and_an_svg(from_record: bool) -> None:
    given = ["--record", write(record())] if from_record else ["--plan.pp", "2"]
    answer = call("timeline", *given, "--out", "folder/made.up/steps", "--json")
    files = [Path("folder/made.up/steps.png"), Path("folder/made.up/steps.svg")]
    assert [Path(file) for file in document(answer.output)["files"]] == files
    assert sorted(Path("folder/made.up").iterdir()) == files
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert files[1].read_text().rstrip().endswith("</svg>")
    assert all(str(file) in call("timeline", *given, "--out", "folder/made.up/steps").output for file in files)


@pytest.mark.parametrize("where", ["file/steps", "full/steps", ".", "", "/"])
def test_what_cannot_be_written_leaves_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("mine")
    Path("full").mkdir()
    Path("full/steps.png").write_text("an older figure")

    def no_space(_: str, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    if where.startswith("full"):
        monkeypatch.setattr(store, "rename", no_space)  # behind the last write
    refused("timeline", "--plan.pp", "2", "--microbatches", "2", "--out", where)
    assert sorted(str(path) for path in Path().rglob("*")) == ["file", "full", "full/steps.png"]
    assert (Path("file").read_text(), Path("full/steps.png").read_text()) == ("mine", "an older figure")


# What it refuses ----------------------------------------------------------------------------------------------------


def with_rank(**rank: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: found | {"ranks": [{"rank": 0, **rank}]}


NO_RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "torn": lambda found: json.dumps(found)[:-20],
    "a list": lambda found: [found],
    "serial": with_rank(timeline=None),
    "failed": lambda found: found | {"status": "failed", "ranks": []},
    "without ranks": lambda found: {"config": found["config"]},
    "ranks of another kind": lambda found: found | {"ranks": [3]},
    "no actions": with_rank(timeline=[["0X0", 0.0, 1.0]]),
    "no times": with_rank(timeline=[["0F0", None, 1.0]]),
    "half a step": with_rank(timeline=[["0F0", 0.0, 1.0]]),
    "another configuration": lambda found: found | {"config": {"plan": {"pp": "many"}}},
    "a schedule that is lost": lambda found: found | {"config": {"plan": {"pp": 2, "schedule": "no.where:rows"}}},
}


@pytest.mark.parametrize("spoil", NO_RECORDS.values(), ids=NO_RECORDS)
def test_what_is_no_record_of_a_pipeline_is_told(spoil: Callable[[dict[str, Any]], Any]) -> None:
    path = write(spoil(record()))
    for more in ((), ("--json",), ("--out", "steps")):
        assert str(path) in refused("timeline", "--record", path, *more)
        assert "nowhere.json: No such file or directory; valid: a file of a" in refused(
            "timeline", "--record", "nowhere.json", *more
        )
    assert [path.name for path in Path().iterdir()] == ["record.json"]


def test_a_schedule_that_cannot_run_says_where_it_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "build", lambda name, *_: build(name, 2, 1))
    message = refused("timeline", "--plan.schedule", "tests.cli.test_timeline_verb:backward_first")
    assert "rank 0 is stuck at 0B0, which needs 0F0" in message


def backward_first(p: int, m: int) -> list[list[Action]]:
    return [[Action(Op.B, rank, 0), Action(Op.F, rank, 0)] for rank in range(p)]


def test_it_needs_no_torch(tmp_path: Path) -> None:
    """Whose import takes longer than the drawing."""
    path = write(record())
    program = (
        "import sys\n"
        "from harness.cli.main import main\n"
        "for more in ([], ['--out', 'steps'], ['--record', sys.argv[1]]):\n"
        "    assert main(['timeline', *more]) == 0\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    command, environment = [sys.executable, "-c", program, str(path)], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
