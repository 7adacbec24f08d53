"""Saved in one layout and loaded in another, training goes on as if it had not stopped."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.optim import Owned
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.tensor_parallel.group import Part
from impl.tensor_parallel.shards import Shard
from impl.train import Trainer
from impl.zero.partition import BucketLayout, Slot
from tests.impl.on_ranks import own_group
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=4, hidden_size=16, num_heads=4, seq_len=16, dropout=0.1)
RUN = Run(model=MODEL, train=Recipe(steps=5, global_batch=4, microbatch=1, warmup_steps=2))
SAVED, LAST = 3, 5


# Boxes, without training ---------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """A whole parameter that `tp` ranks split (or each have), `dp` ranks of each of which divide it further."""

    whole: Tensor
    shard: Shard | None
    tp: int
    dp: int

    def owned(self) -> Iterator[tuple[Owned, torch.Size, Part]]:
        """What every rank owns; the first tensor-parallel rank writes what all have."""
        for index in range(self.tp):
            part = Part(index, self.tp)
            own = self.shard.take(self.whole, part) if self.shard else self.whole
            bucket = BucketLayout((Slot("weight", 0, own.numel()),), self.dp)
            for rank in range(self.dp):
                for piece in bucket.pieces(rank):
                    values = own.flatten()[piece.start : piece.stop].clone()
                    is_writer = self.shard is not None or index == 0
                    yield Owned("weight", piece.start, piece.stop, {"exp_avg": values}, is_writer), own.shape, part

    def chunks(self) -> list[tuple[bool, list[Chunk]]]:
        return [(own.is_writer, list(chunks(own, shape, self.shard, part))) for own, shape, part in self.owned()]


@st.composite
def pairs_of_splits(draw: st.DrawFn) -> tuple[Split, Split]:
    """One parameter in two layouts: of queries, keys and values, of a vocabulary, a row-parallel one, a norm's."""
    kind = draw(st.sampled_from(["qkv", "vocabulary", "row", "whole"]))
    width, rows = draw(st.integers(1, 40)), 12 * draw(st.integers(1, 3))
    shape = (rows, width) if draw(st.booleans()) or kind == "row" else (rows,)
    shape = (width, rows) if kind == "row" else shape
    whole = 1.0 + torch.arange(math.prod(shape), dtype=torch.float32).view(shape)

    def split() -> Split:
        tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
        shard = {
            "qkv": Shard(0, rows, blocks=3),
            "vocabulary": Shard(0, rows, padding=-rows % (8 * tp)),
            "row": Shard(1, rows),
            "whole": None,
        }[kind]
        return Split(whole, shard, tp, dp)

    return split(), split()


@settings(max_examples=60)
@given(pair=pairs_of_splits())
def test_any_split_of_a_parameter_reads_what_any_other_has_written(
    pair: tuple[Split, Split], tmp_path_factory: pytest.TempPathFactory, one_rank: dist.ProcessGroup
) -> None:
    there, here = pair
    folder = tmp_path_factory.mktemp("checkpoint")
    written = [chunk for is_writer, some in there.chunks() if is_writer for chunk in some]
    assert sum(chunk.values.numel() for chunk in written) == there.whole.numel()
    writer = dcp.FileSystemWriter(folder, sync_files=False)
    dcp.save({}, storage_writer=writer, planner=SaveChunks(written, {}), process_group=one_rank)
    for own, shape, part in here.owned():
        values, expected = own.tensors["exp_avg"], own.tensors["exp_avg"].clone()
        values[values != 0] = -1.0  # what is not padding
        planner = LoadChunks(list(chunks(own, shape, here.shard, part)))
        dcp.load({}, storage_reader=dcp.FileSystemReader(folder), planner=planner, process_group=one_rank)
        assert torch.equal(values, expected)


# Training, in pairs of layouts ---------------------------------------------------------------------------------------


def trainer(run: Run, data: Path, meshes: dict[Any, Any]) -> Trainer:
    layout = run.plan.pp, run.plan.dp, run.plan.tp
    if layout not in meshes:
        meshes[layout] = build_mesh(run.plan, "cpu")
    return Trainer(run, TokenFolder.open(data), meshes[layout], torch.device("cpu"))


def losses(one: Trainer, first: int) -> list[float]:
    return [one.step(i).loss.item() for i in range(first, LAST)]


Jobs = list[tuple[Run, Path]]


def save_and_go_on(jobs: Jobs, data: Path) -> list[list[float]]:
    """The losses behind a checkpoint that is being written meanwhile."""
    group, meshes, found = own_group(), {}, []
    for run, folder in jobs:
        one = trainer(run, data, meshes)
        for i in range(SAVED):
            one.step(i)
        checkpoints = Checkpoints(folder, one, group)
        checkpoints.save(SAVED)
        found.append(losses(one, SAVED))
        checkpoints.wait()
    return found


def load_and_go_on(jobs: Jobs, data: Path) -> list[list[float]]:
    group, meshes, found = own_group(), {}, []
    for run, folder in jobs:
        one = trainer(run, data, meshes)
        loaded = Checkpoints(folder, one, group).load()
        assert loaded == Loaded(SAVED, [])
        assert one.optimizer.updates == SAVED
        found.append(losses(one, SAVED))
    return found


def on_ranks(function: Callable[[Jobs, Path], list[list[float]]], jobs: Jobs, data: Path) -> list[list[float]]:
    """Losses of every job, equal on its ranks; jobs of one number of ranks share their processes."""
    found: dict[int, list[float]] = {}
    for ranks in sorted({run.plan.world_size for run, _ in jobs}):
        some = [i for i, (run, _) in enumerate(jobs) if run.plan.world_size == ranks]
        first, *others = run_ranks(ranks, function, [jobs[i] for i in some], data)
        assert all(other == first for other in others)
        found.update(zip(some, first, strict=True))
    return [found[i] for i in range(len(jobs))]


@st.composite
def layouts(draw: st.DrawFn, most: int) -> Plan:
    schedule = draw(st.sampled_from(["gpipe", "one_f_one_b", "interleaved", "zb_h1"]))
    tp = draw(st.sampled_from([1, 2, 4]))
    plan = Plan(
        pp=draw(st.sampled_from([1, 2, 4])),
        dp=draw(st.sampled_from([1, 2, 4])),
        tp=tp,
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        bucket_bytes=draw(st.sampled_from([2_000, 20_000])),
        offload_optimizer=draw(st.booleans()),
    )
    return plan if plan.world_size <= most and not replace(RUN, plan=plan).problems() else draw(layouts(most))


@st.composite
def pairs(draw: st.DrawFn, most: int) -> tuple[Run, Run]:
    run = replace(RUN, model=replace(MODEL, family=draw(st.sampled_from(["gpt", "bert"]))))
    return replace(run, plan=draw(layouts(most))), replace(run, plan=draw(layouts(most)))


def check(drawn: list[tuple[Run, Run]], data: Path, folder: Path) -> None:
    runs = list(dict.fromkeys(before for before, _ in drawn))
    folders = {run: folder / run.id for run in runs}
    expected = dict(zip(runs, on_ranks(save_and_go_on, list(folders.items()), data), strict=True))
    jobs = [(after, folders[before]) for before, after in drawn]
    for (before, after), found in zip(drawn, on_ranks(load_and_go_on, jobs, data), strict=True):
        tolerance = 0.0 if before == after else 1e-6
        assert found == pytest.approx(expected[before], rel=tolerance, abs=0.0), (before.plan, after.plan)


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
    drawn = draws(pairs(4), 8)
    plans = [run.plan for pair in drawn for run in pair]
    for field in ("pp", "dp", "tp", "zero_stage", "schedule", "sequence_parallel"):
        assert len({getattr(plan, field) for plan in plans}) > 1
    same = [(before, before) for before in dict.fromkeys(before for before, _ in drawn)]
    check(drawn + same[-4:], data, tmp_path)


def test_training_goes_on_from_8_ranks_and_on_8(data: Path, tmp_path: Path) -> None:
    from_8 = pairs(8).filter(lambda pair: pair[0].plan.world_size == 8 > pair[1].plan.world_size)
    first, second = draws(from_8, 2)
    small, large = second[1], second[0]
    check([first, (small, large)], data, tmp_path)


# What a checkpoint is, on one rank -----------------------------------------------------------------------------------


@pytest.fixture
def make(data: Path, one_rank: dist.ProcessGroup, tmp_path: Path) -> Callable[..., tuple[Trainer, Checkpoints]]:
    """A trainer of a run, with its checkpoints in one folder whatever the run."""

    def make(run: Run = RUN, keep: int = 2) -> tuple[Trainer, Checkpoints]:
        one = trainer(run, data, {})
        return one, Checkpoints(tmp_path, one, one_rank, keep=keep)

    return make


Make = Callable[..., tuple[Trainer, Checkpoints]]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state(one: Trainer) -> dict[str, list[float]]:
    return {f"{k}.{own.name}": t.tolist() for own in one.optimizer.owned() for k, t in own.tensors.items()}


def test_tensors_lie_whole_and_without_padding_under_their_names(data: Path, make: Make, tmp_path: Path) -> None:
    split = replace(RUN, plan=Plan(tp=2, zero_stage=0))
    run_ranks(2, save_and_go_on, [(split, tmp_path / "split")], data)
    dcp_to_torch_save(tmp_path / "split" / "step-00000003", tmp_path / "whole.pt")
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


def test_what_is_saved_is_what_was_there_when_it_was_asked_for(make: Make) -> None:
    one, checkpoints = make()
    one.step(0)
    saved = state(one)
    checkpoints.save(1)
    one.step(1)
    assert state(one) != saved
    checkpoints.wait()
    other, checkpoints = make()
    assert checkpoints.load() == Loaded(1, [])
    assert state(other) == saved


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
    half = replace(RUN, precision="fp16", train=replace(RUN.train, initial_loss_scale=2.0**40, loss_scale_window=3))
    one, checkpoints = make(half)
    skipped = sum(one.step(i).is_skipped for i in range(30))
    assert one.optimizer.updates == 30 - skipped
    assert 0 < skipped < 30
    saved, scale = state(one), (one.loss_scale.scale, one.loss_scale.good_steps, one.loss_scale.skipped)
    checkpoints.save(30)
    checkpoints.wait()
    for precision in ("fp16", "bf16", "fp32"):
        other, checkpoints = make(replace(half, precision=precision))
        fresh = other.loss_scale.scale
        assert checkpoints.load() == Loaded(30, [])
        assert state(other) == saved
        assert other.optimizer.updates == 30 - skipped
        restored = (other.loss_scale.scale, other.loss_scale.good_steps, other.loss_scale.skipped)
        assert restored == (scale if precision == "fp16" else (fresh, 0, 0))
        assert math.isfinite(other.step(30).loss.item())
    one.step(30)
    again, checkpoints = make(half)
    checkpoints.load()
    again.step(30)
    assert state(again) == state(one)
