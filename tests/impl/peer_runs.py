"""Trains runs by several engines, one after another in one group of ranks, and holds them against each other."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.engines import make
from impl.evaluation_config import EvaluationConfig
from impl.mesh import build_mesh
from impl.run import Precision, Run
from impl.tensor_parallel.shards import Shard, shards_of
from tests.ranks import run_ranks

HAS_DEEPSPEED = find_spec("deepspeed") is not None
TOLERANCES: dict[Precision, tuple[float, float]] = {"fp32": (1e-5, 1e-4), "bf16": (1e-3, 1e-2)}
"""Relative, of losses and of gradient norms."""
Data = tuple[Path, EvaluationConfig]
Weights = Callable[[Any], dict[str, np.ndarray]]


class Trained(NamedTuple):
    """What one engine did on one rank."""

    steps: np.ndarray
    """Loss, gradient norm and learning rate of every step."""
    evaluations: np.ndarray
    """Nats, tokens, and rightly predicted words of every evaluation after the last step."""
    settings: dict[str, Any]
    weights: dict[str, np.ndarray]


def write_data(folder: Path) -> Data:
    """Tokens; and evaluations that two ranks share unequally, in passes smaller than a microbatch, and shorter."""
    write_synthetic(folder / "synthetic", SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    passages = folder / "passages.jsonl"
    passages.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["a b", "ab cd e", "a b c d ef"]))
    return folder / "synthetic", EvaluationConfig(sequences=5, lambada=str(passages))


def trainer(run: Run, folder: TokenFolder) -> Any:
    if run.engine == "deepspeed":
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()), LOCAL_SIZE=str(dist.get_world_size()))
    return make(run, folder, build_mesh(run.plan, "cpu"), torch.device("cpu"))


def no_weights(trainer: Any) -> dict[str, np.ndarray]:
    return {}


def train_all(runs: Mapping[Any, Run], data: Path, weights: Weights = no_weights) -> dict[Any, Trained]:
    """Every run's training, by its key; those of an engine that is not there are left out."""
    folder, found = TokenFolder.open(data), {}
    for key, run in runs.items():
        if run.engine == "deepspeed" and not HAS_DEEPSPEED:
            continue
        engine = trainer(run, folder)
        steps = [engine.step(0)]
        engine.evaluate(final=False)  # which training must not notice
        steps += [engine.step(i) for i in range(1, run.train.steps)]
        evaluations = engine.evaluate(final=True)
        found[key] = Trained(
            np.array([[step.loss.item(), step.grad_norm.item(), step.lr] for step in steps]),
            np.array([[one.nats, one.tokens, one.correct or 0] for one in evaluations]),
            json.loads(json.dumps(engine.settings())),
            weights(engine),
        )
    return found


def ours(run: Run) -> Run:
    """The same training by our engine; how ZeRO divides and recomputation repeats work changes nothing of it."""
    return replace(run, engine="native", plan=replace(run.plan, recompute="none", zero_stage=0))


def both(runs: Mapping[str, Run], ranks: int, data: Data) -> list[dict[Any, Trained]]:
    """On every rank, each run's training by its key, and ours by the run that it is."""
    path, evaluation = data
    theirs: dict[Any, Run] = {key: replace(run, evaluation=evaluation) for key, run in runs.items()}
    return run_ranks(ranks, train_all, theirs | {ours(run): ours(theirs[key]) for key, run in runs.items()}, path)


def first_gradients(
    runs: list[Run], data: Path
) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Shard]]]:
    """Ours and the peer's on this rank, and how ours are split."""
    found, folder = [], TokenFolder.open(data)
    for run in runs:
        native, peer = trainer(ours(run), folder), trainer(run, folder)
        native.backward(0)
        peer.backward(0)
        theirs = {name: peer.masters[p].grad.numpy() for name, p in peer.model.named_parameters()}
        mine = {name: native.gradients.of[p].numpy() for name, p in native.model.named_parameters()}
        found.append((mine, theirs, shards_of(native.model)))
    return found


def assert_same_work(theirs: Trained, ours: Trained, run: Run, loss: float | None = None) -> None:
    """Equal losses, norms, learning rates and predictions; the losses fall, and clipping was at work if it is on."""
    tolerance, norm = TOLERANCES[run.precision]
    loss = loss or tolerance
    assert len(ours.steps) == run.train.steps
    np.testing.assert_allclose(theirs.steps[:, 0], ours.steps[:, 0], rtol=loss)
    np.testing.assert_allclose(theirs.steps[:, 1], ours.steps[:, 1], rtol=norm)
    np.testing.assert_array_equal(theirs.steps[:, 2], ours.steps[:, 2])
    np.testing.assert_allclose(theirs.evaluations[:, 0], ours.evaluations[:, 0], rtol=loss)
    np.testing.assert_array_equal(theirs.evaluations[:, 1:], ours.evaluations[:, 1:])
    assert ours.steps[-1, 0] < ours.steps[0, 0]
    assert not run.train.clip_norm or (ours.steps[:, 1] > run.train.clip_norm).any(), "clipping was never at work"
