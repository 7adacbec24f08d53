"""Training that starts from a smaller model's checkpoint: every layer begins as the layer that it is a copy of."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from impl.checkpoint import Checkpoints, chunks_of, latest, read_weights, why_another, with_defaults
from impl.errors import InputError
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.start import start_from, upcycled
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks, own_group

LAYERS = 4
REAL = ModelConfig(num_layers=LAYERS, hidden_size=16, num_heads=4, seq_len=16, vocab_size=300, norm_placement="scaled")
PSEUDO = replace(REAL, shared_layers=True)
SHALLOW = replace(REAL, num_layers=2)
RECIPE = Recipe(steps=3, global_batch=4, microbatch=1, warmup_steps=0)
PLANS = [
    Plan(), Plan(tp=2, sequence_parallel=True), Plan(pp=2), Plan(dp=2, tp=2, zero_stage=3),
    Plan(dp=2, zero_stage=2, offload_optimizer=True, bucket_bytes=2_000), Plan(pp=2, dp=2, zero_stage=1),
]  # fmt: skip


def run(model: ModelConfig, plan: Plan, **fields: Any) -> Run:
    return Run(model=model, plan=plan, train=RECIPE, evaluation=EvaluationConfig(sequences=4), **fields)


def test_a_model_is_the_same_whether_sizes_that_follow_are_written_out_or_not() -> None:
    sizes = {"model.hidden_size": 64, "model.num_heads": 4}
    short, long = with_defaults(sizes), with_defaults(sizes | {"model.mlp_size": 256, "model.kv_heads": 4})
    assert why_another(short, long) == ""
    experts = with_defaults({"model.hidden_size": 64, "model.experts": 4, "model.expert_size": 256})
    assert upcycled(short | {"model.biases": False}, experts) is not None


SMALL = [run(PSEUDO, Plan(tp=2, dp=2, zero_stage=3)), run(SHALLOW, Plan(pp=2))]
"""Whose checkpoints others start from."""


def save_trained(folder: Path, one: Trainer) -> float:
    """The loss of the next validation."""
    for i in range(RECIPE.steps):
        one.step(i)
    checkpoints = Checkpoints(folder / one.run.id, one, own_group())
    checkpoints.save(RECIPE.steps)
    checkpoints.wait()
    return one.evaluate(final=True)[0].nats


@pytest.fixture(scope="module")
def ends(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Run, float]]:
    folder = tmp_path_factory.mktemp("ends")
    return folder, {small: ranks[0] for small, ranks in on_ranks(partial(save_trained, folder), SMALL, data).items()}


class Begun(NamedTuple):
    """What a rank has before its first step."""

    weights: dict[str, np.ndarray]
    """Of what it owns of each parameter, as boxes: offsets and values in the whole."""
    moments: float
    updates: int
    nats: float


def begin(one: Trainer) -> Begun:
    assert start_from(Path(one.run.start or ""), one, own_group()) == RECIPE.steps
    owned, weights = list(one.optimizer.owned()), dict[str, np.ndarray]()
    for chunk in chunks_of(one, [part._replace(tensors={"weight": part.tensors["weight"]}) for part in owned]):
        whole = weights.setdefault(chunk.name.removeprefix("weight."), np.full(chunk.shape, np.nan, np.float32))
        box = tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.values.shape, strict=True))
        whole[box] = chunk.values.numpy()
    moments = sum(float(part.tensors[name].abs().sum()) for part in owned for name in ("exp_avg", "exp_avg_sq"))
    return Begun(weights, moments, one.optimizer.updates, one.evaluate(final=True)[0].nats)


@pytest.mark.parametrize("small", SMALL, ids=["delinked", "stacked"])
def test_every_layer_begins_as_its_source_to_the_bit(small: Run, ends: Any, data: Path) -> None:
    folder, nats = ends
    saved, _ = latest(folder / small.id)
    assert saved is not None
    source, layers = read_weights(saved), 1 if small.model.shared_layers else SHALLOW.num_layers
    plans = PLANS if small.model.shared_layers else PLANS[:3]  # sources differ by layer, not by layout
    runs = [run(REAL, plan, start=str(saved.path.parent), seed=1) for plan in plans]
    for begun in on_ranks(begin, runs, data).values():
        seen = set[str]()
        for rank in begun:
            assert (rank.moments, rank.updates) == (0.0, 0)
            for name, values in rank.weights.items():
                head, _, rest = name.partition("layers.")
                index, _, rest = rest.partition(".")
                there = f"{head}layers.{int(index) % layers}.{rest}" if rest else name
                is_here = ~np.isnan(values)
                np.testing.assert_array_equal(values[is_here], source[there].numpy()[is_here], err_msg=name)
                seen.add(name)
            if small.model.shared_layers:
                assert rank.nats == pytest.approx(nats[small], rel=1e-5)
        assert len({name for name in seen if "layers." in name}) == LAYERS * sum("layers.0." in name for name in source)
        whole = [np.nanmax([rank.weights[name] for rank in begun if name in rank.weights], 0) for name in seen]
        assert not any(np.isnan(values).any() for values in whole), "a part of a weight is nowhere"


NO_BIASES = replace(REAL, biases=False)
MIXTURE = replace(NO_BIASES, experts=4, experts_per_token=2, balance_loss=0.01, balance_bias=0.001)


def test_experts_begin_as_the_mlp_and_routers_at_random(data: Path, tmp_path: Path) -> None:
    small = run(replace(NO_BIASES, num_layers=2), Plan(tp=2))
    [nats, _] = on_ranks(partial(save_trained, tmp_path), [small], data)[small]
    saved, _ = latest(tmp_path / small.id)
    assert saved is not None
    source = read_weights(saved)
    models = [replace(MIXTURE, num_layers=2), MIXTURE, replace(MIXTURE, experts_every=2, expert_prototypes=2)]
    plans = [Plan(), Plan(dp=2, ep=2, zero_stage=2), Plan(dp=2, tp=2, ep=2)]
    runs = [run(model, plan, start=str(saved.path.parent), seed=1) for model in models for plan in plans]
    for of, begun in on_ranks(begin, runs, data).items():
        values = {name: rank.weights[name] for rank in begun for name in rank.weights if ".mlp." in name}
        routers = {name for name in values if ".router." in name}
        assert len(routers) == 2 * of.model.expert_layers
        copies = {name for name in values if ".experts." in name}
        assert len(copies) == 2 * of.model.expert_layers * of.model.experts
        for name in values.keys() - routers:
            index, rest = int(name.split(".")[2]), name.rpartition(".mlp.")[2].split(".")[-2:]
            there = source[f"trunk.layers.{index % 2}.mlp.{'.'.join(rest)}"].numpy()
            is_here = ~np.isnan(values[name])
            np.testing.assert_array_equal(values[name][is_here], there[is_here], err_msg=name)
        if of.model == models[0]:
            assert begun[0].nats == pytest.approx(nats, rel=1e-5), "weights of two experts sum up to 1"


WRONG = {
    "model.num_layers 2, here 3": (1, replace(REAL, num_layers=3)),
    "model.num_layers 2, here 1": (1, replace(REAL, num_layers=1)),
    "model.shared_layers False, here True": (1, replace(SHALLOW, shared_layers=True)),
    "model.num_layers 4, here 8": (0, replace(PSEUDO, num_layers=8)),
    "model.hidden_size 16, here 32": (0, replace(REAL, hidden_size=32)),
    "model.experts 0, here 4": (1, replace(SHALLOW, experts=4)),  # of a checkpoint with biases
}


def why_not(one: Trainer) -> str:
    try:
        start_from(Path(one.run.start or ""), one, own_group())
    except InputError as error:
        return str(error)
    return ""


def test_what_is_no_growth_is_refused(ends: Any, data: Path) -> None:
    folder = ends[0]
    runs = {run(model, Plan(), start=str(folder / SMALL[which].id)): words for words, (which, model) in WRONG.items()}
    for found, [words] in on_ranks(why_not, runs, data).items():
        assert words.endswith(f"is a checkpoint of another model: {runs[found]}")
