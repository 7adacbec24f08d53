"""What ranks are told, as their folder keeps it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.calibrate.runs import CalibrationOrders
from harness.doctor.measuring import orders
from harness.launch.slurm import Site
from harness.rank.orders import Orders, TrainingOrders, UnreadableError
from impl.plan import Plan
from impl.run import Run
from tests.harness.made_up_orders import made_up

RUN = Run(plan=Plan(dp=2), threads=3, engine="torch")


def changed(attempt: Path, fields: dict[str, Any]) -> None:
    path = attempt / "spec.json"
    found = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in found.items() if value != "missing"}))


def test_orders_are_read_as_they_were_written(tmp_path: Path) -> None:
    told = made_up(RUN, container=("apptainer", "exec"), claim=tmp_path, driver_pid=7, tries=[{"status": "failed"}])
    told.write(tmp_path)
    found = TrainingOrders.read(tmp_path)
    assert replace(found, config={}) == replace(told, config={})
    assert (found.run, found.threads, found.engine) == (RUN, 3, "torch")
    common = Orders.read(tmp_path)
    assert (common.claim, common.container, common.run) == (told.claim, told.container, RUN)


def test_those_of_other_programs_have_what_is_common_and_their_own(tmp_path: Path) -> None:
    orders(RUN, Site(), 60.0, "a.module").write(tmp_path)
    assert Orders.read(tmp_path).module == "a.module"
    assert TrainingOrders.found(tmp_path) is None
    with pytest.raises(UnreadableError, match="precisions"):
        CalibrationOrders.read(tmp_path)
    changed(tmp_path, {"precisions": ["fp32", "bf16"]})
    assert CalibrationOrders.read(tmp_path).precisions == ("fp32", "bf16")


def test_another_version_may_tell_more_or_less(tmp_path: Path) -> None:
    made_up(RUN).write(tmp_path)
    changed(tmp_path, {"more": 1, "requeues": "missing", "module": "missing", "tries": "missing"})
    assert replace(TrainingOrders.read(tmp_path), config={}) == replace(made_up(RUN), config={})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"token": "missing"}, "token"),
        ({"run": "missing"}, "dict"),
        ({"on": "moon"}, "moon"),
        ({"ranks": "two"}, "two"),
        ({"submitted": None}, "None"),
        ({"container": "apptainer"}, "apptainer"),
        ({"container": ["apptainer", 3]}, "3"),
        ({"folder": 7}, "7"),
        *((content, "missing, or not a JSON object") for content in ("", "{", "[]")),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, damage: dict[str, Any] | str, named: str) -> None:
    assert Orders.found(tmp_path) is None
    made_up(RUN).write(tmp_path)
    if isinstance(damage, str):
        (tmp_path / "spec.json").write_text(damage)
    else:
        changed(tmp_path, damage)
    with pytest.raises(UnreadableError, match=rf"spec\.json is not a file of orders: .*{named}"):
        Orders.read(tmp_path)
    assert Orders.found(tmp_path) is None


def test_what_watches_over_ranks_reads_orders_without_the_class_of_runs(tmp_path: Path) -> None:
    made_up(RUN).write(tmp_path)
    program = (
        "import sys; from pathlib import Path; from harness.rank import supervisor; "
        "assert supervisor.Orders.read(Path(sys.argv[1])).threads == 3; "
        "assert not {'pydantic', 'impl.run', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
