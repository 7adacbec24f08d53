"""A rank that compiles nothing imports no compiler; one that does leaves some functions as they are."""

import subprocess
import sys
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.model.rotary import Rotary, rotate
from impl.untraced import compile_in_place, untraced
from tests.ranks import run_ranks

RANK = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import harness.rank.worker
from harness.rank.instruments import Inspection, Measured, Stopwatch
from impl.data.tokens import TokenFolder
from impl.engines import make
from impl.mesh import build_mesh
from impl.run import Run

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
cpu, run = torch.device("cpu"), Run()
mesh = build_mesh(run.plan, "cpu")
trainer = make(run, TokenFolder.open(Path(sys.argv[1])), mesh, cpu)
Inspection(trainer, mesh, Stopwatch(cpu)).step(0, Measured())
print([name for name in ("torch._dynamo", "torch.distributed.checkpoint") if name in sys.modules])
dist.destroy_process_group()
"""


def test_a_rank_imports_neither_compiler_nor_checkpoints_unless_it_needs_them(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "data", SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    command = [sys.executable, "-c", RANK, tmp_path / "data", tmp_path / "rendezvous"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


def compiling() -> float:
    return float(torch.compiler.is_compiling())


@untraced
def compiling_here() -> float:
    return compiling()


@untraced
def same(x: Tensor) -> Tensor:
    return x


class Both(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + compiling(), x + compiling_here()


def a_compiled_module_calls_an_untraced_function_as_it_is() -> None:
    both = Both()
    compile_in_place(both)
    traced, left = both(torch.zeros(2))
    assert traced.tolist() == [1, 1]
    assert left.tolist() == [0, 0]


class OfManyShapes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return same(x) + same(x[None]) + same(x[None, None])


def an_untraced_function_is_compiled_for_none_of_the_shapes_that_it_is_given() -> None:
    from torch._dynamo import config

    module = OfManyShapes()
    compile_in_place(module)
    with config.patch(fail_on_recompile_limit_hit=True, recompile_limit=1):
        assert module(torch.ones(1)).item() == 3


def compiled_code_has_the_angles_of_rotary_positions_as_constants() -> None:
    codes: list[str] = []

    def as_it_is(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        codes.append(graph.code)
        return graph

    how = Rotary(4, 100.0, None, torch.arange)
    compiled = torch.compile(lambda x, length: rotate(x, length, 2, 4, how), backend=as_it_is)
    for length in (4, 8, 2):
        x = torch.arange(96.0).view(8, 12)
        torch.testing.assert_close(compiled(x, length), rotate(x.clone(), length, 2, 4, how))
    assert ".cos" not in codes[0]


CHECKS = (
    a_compiled_module_calls_an_untraced_function_as_it_is,
    an_untraced_function_is_compiled_for_none_of_the_shapes_that_it_is_given,
    compiled_code_has_the_angles_of_rotary_positions_as_constants,
)


def without_machine_code(check: Callable[[], None]) -> None:
    """What is traced is executed as it is."""
    nn.Module.compile = partialmethod(nn.Module.compile, backend="eager")  # type: ignore[method-assign]
    check()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_that(check: Callable[[], None]) -> None:
    """In a process that has the compiler, whose import takes seconds."""
    run_ranks(1, without_machine_code, check)
