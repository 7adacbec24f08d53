"""Perplexity and accuracy of a checkpoint, in one process, next to the results of lm-evaluation-harness."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from harness.analysis.render import Column, Table, as_json, texts
from harness.launch.flags import DeviceChoice, require_positive
from harness.rank.devices import gpu_count
from harness.terminal import Flag, print_json, print_tables
from impl.data.config import DataConfig
from impl.errors import InputError
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.own_code import trust
from impl.recipe import Recipe
from impl.run import Run

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from impl.checkpoint import Saved
    from impl.evaluate import Evaluation

COLUMNS = (
    *texts(name="text", measure="measure"),
    Column(key="ours", header="ours", digits=6),
    Column(key="lm_eval", header="lm-eval", digits=6),
    Column(key="difference", header="difference", digits=2),
)


class Score(NamedTuple):
    """Score on one text, by our own path and by lm-evaluation-harness."""

    name: str
    measure: str
    ours: float | None
    lm_eval: float = math.nan

    @property
    def difference(self) -> float:
        """Difference of accuracies, or relative difference of perplexities."""
        ours = math.nan if self.ours is None else self.ours
        return self.lm_eval - ours if self.measure == "accuracy" else self.lm_eval / ours - 1


def evaluate(
    *,
    checkpoint: Path,
    data: Path,
    texts: tuple[Path, ...] = (),
    lambada: Path | None = None,
    overlap: int = 0,
    batch: int = 8,
    device: DeviceChoice = "auto",
    norm_placement: str | None = None,
    lm_eval: Flag = False,
    json: Flag = False,
) -> int:
    """Evaluate a checkpoint of a GPT on texts and LAMBADA; any layout may have saved it.

    Args:
        checkpoint: The folder of a run's checkpoints; the newest is taken.
        data: The token folder that it was trained on, with its tokenizer.
        texts: Plain-text files for word perplexity, in the format of WikiText.
        lambada: A .jsonl file of passages whose last word is to be predicted.
        overlap: Tokens of context that a sliding window keeps from the one before, unscored.
        batch: Sequences in a forward pass.
        device: cpu or cuda; auto takes a GPU where there is one.
        norm_placement: The checkpoint's norm placement where it is code of your own, which is executed then.
        lm_eval: Also evaluate with lm-evaluation-harness (needs the extra `eval`), and show both with the difference.
        json: Print one JSON document on standard output.
    """
    require_positive(batch=batch)
    if device == "cuda" and not gpu_count():
        raise InputError("--device cuda: PyTorch sees no GPU here; valid: cpu")
    if not texts and lambada is None:
        raise InputError("nothing to evaluate on; valid: --texts FILE ..., --lambada FILE.jsonl, or both")
    if lm_eval and find_spec("lm_eval") is None:
        raise InputError("--lm-eval needs the package lm-eval; install the extra: pip install 'lmscale[eval]'")
    from impl.checkpoint import latest
    from impl.downstream import missing_inputs

    saved, damaged = latest(checkpoint)
    if saved is None:
        raise InputError(f"--checkpoint: {'; '.join(damaged) or f'no step-* in {checkpoint}'}")
    evaluation = EvaluationConfig(
        sequences=None, texts=tuple(map(str, texts)), lambada=None if lambada is None else str(lambada), overlap=overlap
    )
    trust(*filter(None, [norm_placement]))
    run = _run_of(saved, data, evaluation, batch)
    if reason := next(iter(run.untrainable()), None) or missing_inputs(run):
        raise InputError(reason)
    chosen = ("cuda" if gpu_count() else "cpu") if device == "auto" else device
    found = _scored(saved, run, chosen, lm_eval)
    columns = COLUMNS if lm_eval else COLUMNS[:3]
    frame = pd.DataFrame([{column.key: getattr(one, column.key) for column in columns} for one in found])
    notes = ("Difference: of perplexities relative to ours, of accuracies as it is.",) if lm_eval else ()
    table = Table("evaluation", f"Checkpoint after {saved.step:,} steps", columns, frame, notes)
    if json:
        return print_json({"checkpoint": str(saved.path), "step": saved.step, **as_json(table)})
    print_tables([table])
    return 0


def _run_of(saved: "Saved", data: Path, evaluation: EvaluationConfig, batch: int) -> Run:
    """Return a run on one rank with the model of a checkpoint."""
    identity = saved.state["identity"]
    model = {name.removeprefix("model."): value for name, value in identity.items() if name.startswith("model.")}
    return Run(
        model=ModelConfig(**model),
        train=Recipe(global_batch=batch, microbatch=batch),
        data=DataConfig(dataset=str(data)),
        evaluation=evaluation,
        precision=saved.state["precision"],
        seed=identity["seed"],
    )


def _scored(saved: "Saved", run: Run, device: str, with_lm_eval: bool) -> list[Score]:
    """Return the scores of each evaluation, by our own path and, on request, by lm-evaluation-harness."""
    import torch
    import torch.distributed as dist

    from impl.data.tokens import TokenFolder
    from impl.start import start_from
    from impl.train import Trainer

    data = TokenFolder.open(run.data.dataset)
    with _alone(device) as mesh:
        trainer, group = Trainer(run, data, mesh, torch.device(device)), dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        start_from(saved.path.parent, trainer, group)
        found = [score for evaluation in trainer.evaluate(final=True) for score in _scores(evaluation)]
        if with_lm_eval:
            from harness.cli.lm_eval import scores

            theirs = scores(run, data.tokenizer, trainer)
            return [one._replace(lm_eval=value) for one, value in zip(found, theirs, strict=True)]
    return found


@contextmanager
def _alone(device: str) -> Iterator["DeviceMesh"]:
    """Yield the mesh of this process alone."""
    import torch.distributed as dist

    from impl.mesh import build_mesh
    from impl.plan import Plan

    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield build_mesh(Plan(), device)
    finally:
        dist.destroy_process_group()


def _scores(evaluation: "Evaluation") -> list[Score]:
    """Return an evaluation's scores; words of LAMBADA are the last ones."""
    found = {"word perplexity": evaluation.word_perplexity}
    if evaluation.kind == "last_word":
        found = {"accuracy": evaluation.accuracy, **found}
    return [Score(evaluation.name, measure, value) for measure, value in found.items()]
