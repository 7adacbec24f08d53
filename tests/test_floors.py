"""Imports only go down: each module stands on a floor and imports from its own floor or those below."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("impl", "harness", "experiments")

ROOMS = (
    "records", "rank", "analysis", "figures", "experiment", "predict", "launch", "tune", "bench", "doctor", "calibrate",
    "report", "cli",
)  # fmt: skip
"""Of the harness; the floors that they stand on are below."""

# a module stands where its own name says, else where the nearest `package.*` says;
# a package's __init__ is imported with any of its modules, so it stands under the lowest of them
FLOORS = {
    "impl": 0,
    "impl.errors": 0,
    "impl.fields": 0,
    "impl.files": 0,
    "impl.grouping": 0,
    "impl.detokenize": 0,
    "impl.plan": 0,
    "impl.recipe": 0,
    "impl.evaluation_config": 0,
    "impl.run": 0,
    "impl.own_code": 0,
    "impl.cost": 0,
    "impl.cost.*": 0,
    "impl.data": 0,
    "impl.data.config": 0,
    "impl.model": 0,
    "impl.model.config": 0,
    "impl.model.norm_placement": 0,
    "impl.model.parametrization": 0,
    "impl.model.sizes": 0,
    "impl.pipeline": 0,
    "impl.pipeline.bound": 0,
    "impl.pipeline.optimum": 0,
    "impl.pipeline.schedule": 0,
    "impl.pipeline.schedules": 0,
    "impl.pipeline.simulate": 0,
    "impl.pipeline.stage": 0,
    "impl.pipeline.written": 0,
    "impl.pipeline.zero_bubble": 0,
    "impl.simulator": 0,
    "impl.simulator.*": 0,
    "impl.zero": 0,
    "impl.zero.partition": 0,
    "impl.mesh": 1,
    "impl.collectives": 1,
    "impl.device": 1,
    "impl.seeding": 1,
    "impl.squares": 1,
    "impl.untraced": 1,
    "impl.recompute": 1,
    "impl.data.*": 1,
    "impl.context_parallel": 2,
    "impl.expert_parallel": 2,
    "impl.optim": 2,
    "impl.precision": 2,
    "impl.pipeline.engine": 2,
    "impl.tensor_parallel": 2,
    "impl.tensor_parallel.*": 2,
    "impl.zero.*": 2,
    "impl.evaluate": 3,
    "impl.grid": 3,
    "impl.downstream": 3,
    "impl.hugging_face": 3,
    "impl.model.*": 3,
    "impl.peers": 0,
    "impl.peers.validity": 0,
    "impl.engines": 4,
    "impl.ghost": 1,
    "impl.ghost.*": 4,
    "impl.peers.*": 4,
    "impl.train": 4,
    "impl.certificate": 4,
    "impl.checkpoint": 4,
    "impl.checkpoint_reader": 4,
    "impl.chunks": 4,
    "impl.dimensions": 4,
    "impl.instruments": 4,
    "impl.start": 4,
    "impl.train.*": 4,
    "harness": 5,
    "harness.records.*": 5,
    "harness.rank.*": 6,
    "harness.analysis.*": 6,
    "harness.terminal": 7,
    "harness.figures.*": 7,
    "harness.experiment.*": 8,
    "harness.predict.*": 9,
    "harness.launch.*": 10,
    "harness.tune.*": 11,
    "harness.bench.*": 11,
    "harness.doctor.*": 11,
    "harness.calibrate.*": 12,
    "harness.report.*": 12,
    "harness.cli.*": 13,
    "harness.__main__": 13,
    "experiments": 14,
    "experiments.*": 14,
    **{f"harness.{room}": 5 for room in ROOMS},
}
TORCH_FREE_ABOVE_FLOOR_0 = ("impl.seeding", "impl.data.*")
# rooms of floor 2 are put together on floor 4; evaluation takes a model, it does not choose one
STRANGERS = {
    2: ("impl.optim", "impl.precision", "impl.pipeline", "impl.tensor_parallel", "impl.zero"),
    6: ("harness.rank", "harness.analysis"),
    7: ("harness.terminal", "harness.figures"),
    11: ("harness.tune", "harness.bench", "harness.doctor"),
    12: ("harness.calibrate", "harness.report"),
}


def entry(module: str) -> str | None:
    """The line of FLOORS that a module stands on; None: it has no floor yet."""
    if module in FLOORS:
        return module
    parts = module.split(".")
    patterns = (".".join([*parts[:n], "*"]) for n in range(len(parts) - 1, 0, -1))
    return next((pattern for pattern in patterns if pattern in FLOORS), None)


def floor(module: str) -> int:
    line = entry(module)
    assert line is not None, f"{module} has no floor: give it one in FLOORS of tests/test_floors.py"
    return FLOORS[line]


def torch_free(module: str) -> bool:
    return floor(module) == 0 or entry(module) in TORCH_FREE_ABOVE_FLOOR_0


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def modules() -> dict[str, Path]:
    """Every module of the project, by name."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(module: str, source: str, known: set[str], is_package: bool = False) -> Iterator[str]:
    """The project's modules that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
            origin = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
            submodules = [f"{origin}.{alias.name}" for alias in node.names]
            names = [name if name in known else origin for name in submodules]
        yield from (name for name in names if name.split(".")[0] in PACKAGES)


def complaint(importer: str, imported: str) -> str | None:
    """Why this import is not allowed; None: it is."""
    above, below = floor(importer), floor(imported)
    if below > above:
        return f"{importer} (floor {above}) imports {imported} (floor {below}): imports only go down"
    strangers = STRANGERS.get(above, ())
    if below == above and room(importer) != room(imported) and {room(importer), room(imported)} <= set(strangers):
        return f"{importer} imports {imported}: the rooms of floor {above} do not know each other"
    if importer in ("impl.evaluate", "impl.downstream") and room(imported) == "impl.model" and below > 0:
        return f"{importer} imports {imported}: it evaluates any model"
    return None


def test_every_module_has_a_floor():
    homeless = [module for module in modules() if entry(module) is None]
    assert not homeless, f"no floor: {', '.join(homeless)}; give each one in FLOORS of tests/test_floors.py"


def test_imports_only_go_down():
    found = modules()
    assert len(found) > 10
    complaints = [
        text
        for module, path in found.items()
        for imported in imports(module, path.read_text(), set(found), path.name == "__init__.py")
        if (text := complaint(module, imported))
    ]
    assert not complaints, "\n".join(complaints)


def test_every_room_of_the_harness_says_what_it_holds_and_may_import():
    folders = {path.name for path in (ROOT / "harness").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ROOMS)
    for room in ROOMS:
        text = ast.get_docstring(ast.parse((ROOT / "harness" / room / "__init__.py").read_text())) or ""
        assert "\n\nMay import " in text, room


def test_torch_free_modules_load_no_torch():
    names = [module for module in modules() if torch_free(module)]
    assert "impl.run" in names
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} loads torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_imports_are_found_in_every_form():
    known = {"impl.mesh", "impl.zero.partition", "impl.zero", "impl.errors", "harness.rank.supervisor"}
    source = """
import torch, impl.mesh
from impl.errors import InputError
from impl.zero import partition
from . import partition
from .partition import owner
from ..errors import InputError
def late():
    import harness.rank.supervisor
"""
    found = list(imports("impl.zero.reduce", source, known))
    assert sorted(found) == sorted(
        ["impl.mesh", "impl.errors", *["impl.zero.partition"] * 3, "impl.errors", "harness.rank.supervisor"]
    )
    assert list(imports("impl.zero", "from .partition import owner", known, is_package=True)) == ["impl.zero.partition"]
    assert list(imports("impl.zero", "from ..mesh import make", known, is_package=True)) == ["impl.mesh"]


def test_wrong_imports_are_told():
    assert complaint("impl.cost.flops", "impl.collectives")
    assert complaint("impl.train", "harness.rank.supervisor")
    assert complaint("harness.launch.sweep", "experiments.quickstart")
    assert complaint("harness.records.store", "harness.launch.sweep")
    assert complaint("harness.rank.worker", "harness.analysis.tables")
    assert complaint("impl.model.config", "impl.model.gpt")
    assert complaint("impl.zero.reduce", "impl.optim")
    assert complaint("impl.optim", "impl.precision")
    assert complaint("impl.evaluate", "impl.model.gpt")


def test_right_imports_are_not():
    assert complaint("impl.evaluate", "impl.model.config") is None
    assert complaint("impl.zero.reduce", "impl.zero.bucket") is None
    assert complaint("impl.zero.reduce", "impl.collectives") is None
    assert complaint("impl.model.gpt", "impl.model.block") is None
    assert complaint("impl.train", "impl.optim") is None
    assert complaint("experiments.quickstart", "harness.rank.supervisor") is None
    assert entry("impl.unheard_of") is None
