"""Saved in one layout and loaded in another, training goes on as if it had not stopped."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from impl.checkpoint import Checkpoints, Loaded, latest
from impl.chunks import Chunk, LoadChunks, SaveChunks, chunks
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.fields import divisors
from impl.model.config import ModelConfig
from impl.optim import Owned
from impl.plan import Plan, ZeroStage
from impl.recipe import Recipe
from impl.run import Run
from impl.tensor_parallel.group import Part
from impl.tensor_parallel.shards import Shard
from impl.train import Trainer
from impl.zero.partition import BucketLayout, Slot
from tests.impl.on_ranks import on_ranks, own_group, trainer

MODEL = ModelConfig(num_layers=4, hidden_size=16, num_heads=4, seq_len=16, dropout=0.1, attention_dropout=0.0)
RUN = Run(model=MODEL, train=Recipe(steps=5, global_batch=4, microbatch=1, warmup_steps=2))
SAVED, LAST = 3, 5


# Boxes, without training ---------------------------------------------------------------------------------------------


SHARDS: dict[str, Callable[[int, int], Shard | None]] = {
    "qkv": lambda rows, tp: Shard(0, rows, (rows // 3,) * 3),
    "vocabulary": lambda rows, tp: Shard(0, rows, padding=-rows % (8 * tp)),
    "row": lambda rows, tp: Shard(1, rows),
    "whole": lambda rows, tp: None,
}
DEGREES = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4))


def owned(whole: Tensor, shard: Shard | None, tp: int, dp: int) -> Iterator[tuple[Owned, list[Chunk]]]:
    """What every rank owns of a parameter that `tp` ranks split (or each have), `dp` ranks of each divide further."""
    for part in (Part(index, tp) for index in range(tp)):
        own = shard.take(whole, part) if shard else whole
        bucket = BucketLayout((Slot("weight", 0, own.numel()),), dp)
        for piece in (piece for rank in range(dp) for piece in bucket.pieces(rank)):
            values = own.flatten()[piece.start : piece.stop].clone()
            of_rank = Owned("weight", piece.start, piece.stop, {"exp_avg": values}, shard is not None or not part.index)
            yield of_rank, list(chunks(of_rank, own.shape, shard, part))


@settings(max_examples=60)
@given(st.sampled_from(sorted(SHARDS)), st.integers(1, 3), st.integers(1, 40), st.booleans(), DEGREES, DEGREES)
def test_any_split_of_a_parameter_reads_what_any_other_has_written(
    tmp_path_factory: pytest.TempPathFactory, one_rank: dist.ProcessGroup,
    kind: str, dozens: int, width: int, is_matrix: bool, there: tuple[int, int], here: tuple[int, int],
) -> None:  # fmt: skip
    rows = 12 * dozens
    shape = (width, rows) if kind == "row" else (rows, width) if is_matrix else (rows,)
    whole = 1.0 + torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    folder, shard = tmp_path_factory.mktemp("checkpoint"), SHARDS[kind]
    ranks = owned(whole, shard(rows, there[0]), *there)
    written = [chunk for of_rank, some in ranks if of_rank.is_writer for chunk in some]
    assert sum(chunk.values.numel() for chunk in written) == whole.numel()
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    dcp.save({}, storage_writer=writer, planner=SaveChunks(written, {}), process_group=one_rank)
    for of_rank, some in owned(whole, shard(rows, here[0]), *here):
        values, expected = of_rank.tensors["exp_avg"], of_rank.tensors["exp_avg"].clone()
        values[values != 0] = -1.0  # what is not padding
        reader = dcp.FileSystemReader(folder)
        dcp.load({}, storage_reader=reader, planner=LoadChunks(some), process_group=one_rank)
        assert torch.equal(values, expected)


# Training, in pairs of layouts ---------------------------------------------------------------------------------------


def losses(one: Trainer) -> list[float]:
    return [one.step(i).loss.item() for i in range(SAVED, LAST)]


def save_and_go_on(folder: Path, one: Trainer) -> list[float]:
    """The losses after a checkpoint, which is being written meanwhile."""
    for i in range(SAVED):
        one.step(i)
    checkpoints = Checkpoints(folder / one.run.id, one, own_group())
    checkpoints.save(SAVED)
    found = losses(one)
    checkpoints.wait()
    return found


def load_and_go_on(folders: dict[Run, list[Path]], one: Trainer) -> list[list[float]]:
    """The losses after each of the checkpoints that a run is to go on from."""
    found, group = [], own_group()
    for folder in folders[one.run]:
        assert Checkpoints(folder, one, group).load() == Loaded(SAVED, [])
        assert one.optimizer.updates == SAVED
        found.append(losses(one))
    return found


@st.composite
def layouts(draw: st.DrawFn, most: int) -> Plan:
    schedule = draw(st.sampled_from(["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zbv"]))
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    stage: ZeroStage = draw(st.sampled_from([0, 1, 2, 3]))
    plan = Plan(
        pp=draw(st.sampled_from([1, 2, 4])),
        dp=dp,
        tp=tp,
        cp=(cp := draw(st.sampled_from([1, 2]))),
        schedule=schedule,
        chunks=2 if schedule in ("interleaved", "zbv") else 1,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        zero_stage=stage,
        zero_group=draw(st.sampled_from([None, *divisors(dp * cp)])) if stage else None,
        bucket_bytes=draw(st.sampled_from([2_000, 20_000])),
        offload_optimizer=draw(st.booleans()),
    )
    return plan if plan.world_size <= most and not replace(RUN, plan=plan).problems() else draw(layouts(most))


@st.composite
def pairs(draw: st.DrawFn, most: int) -> tuple[Run, Run]:
    heads = draw(st.sampled_from([None, 1]))
    run = replace(RUN, model=replace(MODEL, family=draw(st.sampled_from(["gpt", "bert"])), kv_heads=heads))
    return replace(run, plan=draw(layouts(most))), replace(run, plan=draw(layouts(most)))


def check(drawn: list[tuple[Run, Run]], data: Path, folder: Path) -> None:
    saved = on_ranks(partial(save_and_go_on, folder), [before for before, _ in drawn], data)
    folders: dict[Run, list[Path]] = {}
    for before, after in drawn:
        folders.setdefault(after, []).append(folder / before.id)
    loaded = on_ranks(partial(load_and_go_on, folders), folders, data)
    for before, after in drawn:
        expected, *others = saved[before]
        found, *also = (of_rank[folders[after].index(folder / before.id)] for of_rank in loaded[after])
        assert all(other == expected for other in others)
        assert all(other == found for other in also)
        tolerance = 0.0 if before == after else 1e-6
        assert found == pytest.approx(expected, rel=tolerance, abs=0.0), (before.plan, after.plan)


def draws(strategy: st.SearchStrategy[tuple[Run, Run]], count: int) -> list[tuple[Run, Run]]:
    """Examples that are looked at together, in few processes."""
    found: list[tuple[Run, Run]] = []

    @settings(max_examples=count, phases=[Phase.generate], derandomize=True, database=None)
    @given(strategy)
    def draw(pair: tuple[Run, Run]) -> None:
        found.append(pair)

    draw()
    return found


def test_training_goes_on_in_any_layout_of_up_to_4_ranks(data: Path, tmp_path: Path) -> None:
    drawn = draws(pairs(4), 4)
    plans = [run.plan for pair in drawn for run in pair]
    for field in ("pp", "dp", "cp", "tp", "zero_stage", "replicas", "schedule", "sequence_parallel"):
        assert len({getattr(plan, field) for plan in plans}) > 1
    same = [(before, before) for before in dict.fromkeys(before for before, _ in drawn)]
    shared = replace(RUN, model=replace(MODEL, shared_layers=True))
    before, after = Plan(tp=2, dp=2, zero_stage=3), Plan(dp=2, zero_stage=1)
    drawn.append((replace(shared, plan=before), replace(shared, plan=after)))
    check(drawn + same[-1:], data, tmp_path)


def test_training_goes_on_from_8_ranks_and_on_8(data: Path, tmp_path: Path) -> None:
    are_large = lambda pair: pair[0] != pair[1] and all(run.plan.world_size == 8 for run in pair)
    check(draws(pairs(8).filter(are_large), 1), data, tmp_path)


# What a checkpoint is, on one rank -----------------------------------------------------------------------------------


@pytest.fixture
def make(data: Path, one_rank: dist.ProcessGroup, tmp_path: Path) -> Callable[..., tuple[Trainer, Checkpoints]]:
    """A trainer of a run, with its checkpoints in one folder whatever the run."""

    def make(run: Run = RUN, keep: int = 2) -> tuple[Trainer, Checkpoints]:
        one = trainer(run, data)
        return one, Checkpoints(tmp_path, one, one_rank, keep=keep)

    return make


Make = Callable[..., tuple[Trainer, Checkpoints]]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state(one: Trainer) -> dict[str, list[float]]:
    return {f"{k}.{own.name}": t.tolist() for own in one.optimizer.owned() for k, t in own.tensors.items()}


def test_tensors_lie_whole_and_without_padding_under_their_names(data: Path, make: Make, tmp_path: Path) -> None:
    split = replace(RUN, plan=Plan(tp=2, zero_stage=0))
    on_ranks(partial(save_and_go_on, tmp_path), [split], data)
    dcp_to_torch_save(tmp_path / split.id / "step-00000003", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")
    one, _ = make()
    for i in range(SAVED):
        one.step(i)
    named = dict(one.model.named_parameters())
    assert found.keys() == {f"{kind}.{name}" for kind in ("weight", "exp_avg", "exp_avg_sq") for name in named}
    for name, parameter in named.items():
        weight = found[f"weight.{name}"]
        expected = parameter.detach()[: one.vocab_size] if name == "trunk.tokens.weight" else parameter.detach()
        assert weight.shape == expected.shape
        np.testing.assert_allclose(weight, expected, atol=1e-5)


def test_the_newest_are_kept_and_what_an_interrupted_save_left_is_removed(make: Make, tmp_path: Path) -> None:
    _, checkpoints = make(keep=2)
    assert checkpoints.load() is None
    (tmp_path / "step-00000009.part").mkdir()
    for step in (1, 2, 3):
        checkpoints.save(step)
    checkpoints.wait()
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    checkpoints.save(1)  # training began anew: what is ahead is another's
    checkpoints.save(1)
    checkpoints.wait()
    assert names(tmp_path) == ["step-00000001"]


OTHERS = {
    "model.hidden_size 16, here 32": replace(RUN, model=replace(MODEL, hidden_size=32)),
    "model.dropout 0.1, here 0.0": replace(RUN, model=replace(MODEL, dropout=0.0)),
    "model.vocab_size 257, here 300": replace(RUN, model=replace(MODEL, vocab_size=300)),
    "seed 0, here 1": replace(RUN, seed=1),
}


@pytest.mark.parametrize("why", OTHERS)
def test_another_runs_checkpoint_is_refused_in_a_line_and_changes_nothing(make: Make, why: str) -> None:
    _, checkpoints = make()
    checkpoints.save(SAVED)
    checkpoints.wait()
    one, checkpoints = make(OTHERS[why])
    before = state(one)
    with pytest.raises(InputError, match=f"step-00000003 is a checkpoint of another run: {why}$"):
        checkpoints.load()
    assert state(one) == before


def test_other_data_is_refused(make: Make, tmp_path_factory: pytest.TempPathFactory) -> None:
    one, checkpoints = make()
    checkpoints.save(SAVED)
    folder = tmp_path_factory.mktemp("other") / "tokens"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_001, valid_tokens=2_000))
    one.data = TokenFolder.open(folder)
    with pytest.raises(InputError, match="of another run: data '"):
        checkpoints.load()


def cut(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a file that is cut": lambda folder: cut(folder / "__0_0.distcp"),
    "a file that is lost": lambda folder: (folder / "__0_0.distcp").unlink(),
    "metadata that are cut": lambda folder: cut(folder / ".metadata"),
    "metadata that are lost": lambda folder: (folder / ".metadata").unlink(),
    "metadata of something else": lambda folder: (folder / ".metadata").write_bytes(b"tensors"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_said(make: Make, tmp_path: Path, damage: str) -> None:
    one, checkpoints = make()
    checkpoints.save(1)
    one.step(1)
    checkpoints.save(2)
    checkpoints.wait()
    DAMAGES[damage](tmp_path / "step-00000002")
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.step == 1
    [warning] = loaded.warnings
    assert warning.startswith(f"{tmp_path}/step-00000002 is damaged")
    assert "\n" not in warning
    DAMAGES[damage](tmp_path / "step-00000001")
    assert latest(tmp_path)[0] is None
    with pytest.raises(
        InputError, match=r"^no whole checkpoint: .*step-00000002 is damaged.*step-00000001 is"
    ) as error:
        checkpoints.load()
    assert "\n" not in str(error.value)


def test_a_save_that_fails_is_told_at_the_next_call_and_the_one_after_may_succeed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoints = make()
    checkpoints.save(1)
    checkpoints.wait()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for method in ("write_data", "finish"):
        monkeypatch.setattr(dcp.FileSystemWriter, method, full)
        checkpoints.save(2)
        with pytest.raises(RuntimeError, match=r"^no checkpoint was written to .*: rank 0: OSError: .*No space left"):
            checkpoints.save(3)
        monkeypatch.undo()
        assert latest(tmp_path)[0] is not None
    checkpoints.save(2)
    checkpoints.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


# Precisions ----------------------------------------------------------------------------------------------------------


def test_masters_are_the_same_in_every_precision_and_a_loss_scale_in_its_own(make: Make) -> None:
    half = replace(RUN, precision="fp16", train=replace(RUN.train, initial_loss_scale=2.0**24, loss_scale_window=3))
    one, checkpoints = make(half)
    skipped = sum(one.step(i).is_skipped for i in range(15))
    assert one.optimizer.updates == 15 - skipped
    assert 0 < skipped < 15
    saved, scale = state(one), (one.loss_scale.scale, one.loss_scale.good_steps, one.loss_scale.skipped)
    checkpoints.save(15)
    checkpoints.wait()
    for precision in ("fp16", "bf16", "fp32"):
        other, checkpoints = make(replace(half, precision=precision))
        fresh = other.loss_scale.scale
        assert checkpoints.load() == Loaded(15, [])
        assert state(other) == saved
        assert other.optimizer.updates == 15 - skipped
        restored = (other.loss_scale.scale, other.loss_scale.good_steps, other.loss_scale.skipped)
        assert restored == (scale if precision == "fp16" else (fresh, 0, 0))
        assert math.isfinite(other.step(15).loss.item())
    one.step(15)
    again, checkpoints = make(half)
    checkpoints.load()
    again.step(15)
    assert state(again) == state(one)
