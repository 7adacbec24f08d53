"""A norm placement of one's own, as `lmscale new placement` writes it, trains in parallel as it does serially."""

import re
from pathlib import Path

import pytest

from harness.cli.new import KINDS
from impl import own_code
from impl.errors import InputError
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.norm_placement import placement
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.impl.on_ranks import on_ranks
from tests.impl.parity import assert_equal_first_steps, first_step, serial

PLANS = Plan(tp=2, sequence_parallel=True), Plan(dp=2, zero_stage=3), Plan(pp=2)


def test_it_trains_alike_under_every_plan(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    law = "NAME = NormPlacement(residual=lambda layers: layers**0.5, input_factor=lambda layer: 1 / layer,"
    text = KINDS["placement"].template.read_text()
    file.write_text(text.replace("NAME = NormPlacement(", law).replace("NAME", "own"))
    model = ModelConfig(num_layers=3, hidden_size=16, num_heads=4, seq_len=16, norm_placement=f"{file}:own")
    recipe = Recipe(steps=2, global_batch=4, microbatch=1, lr=1e-3)
    few = EvaluationConfig(sequences=8)
    runs = [Run(model=model, plan=plan, train=recipe, precision="fp64", evaluation=few) for plan in PLANS]
    for run in runs:
        own_code.trust_code_of(run)
    assert not [problem for run in runs for problem in run.problems()]
    answers = on_ranks(first_step, [*runs, serial(runs[0])], data)
    for run in runs:
        assert_equal_first_steps(answers[run], run.plan.tp, answers[serial(run)][0])


HEAD = "from impl.model.norm_placement import BlockNorms, NormPlacement\n\n\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "own = NormPlacement(mlp=BlockNorms(before=True))",
            "line 4: TypeError: BlockNorms.__init__() got an unexpected",
        ),
        ("own = NormPlacement(", "line 4: SyntaxError: '(' was never closed"),
        ("own = NormPlacement(residual=lambda _: 1 / 0)", "line 4: ZeroDivisionError: division by zero"),
        ("own = NormPlacement(initial=lambda depth: {}[depth])", "line 4: KeyError: 2"),
    ],
)
def test_an_error_in_its_file_is_told_with_its_line(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + text)
    own_code.trust(f"{file}:own")
    with pytest.raises(InputError, match=re.escape(f"'{file}:own' cannot be loaded: {file}, {problem}")):
        placement(f"{file}:own")
