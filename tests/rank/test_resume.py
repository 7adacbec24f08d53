"""What a later try goes on from, and when all ranks of one end that is told to."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from harness.rank.failure import cause_of
from harness.rank.instruments import DamagedError, Measured
from harness.rank.journal import Journal
from harness.rank.resume import AGREE_AFTER, AgreedEnd, Continuation
from harness.records.store import with_digest
from impl.errors import InputError
from impl.train import Trainer
from tests.crafted import as_tensor, in_metadata, system
from tests.harness.saving import build
from tests.harness.small_runs import files_of_at_most, small
from tests.ranks import run_ranks

MINUTE = timedelta(minutes=1)


def trained(one: Trainer, folder: Path, steps: int, every: int = 100) -> tuple[Measured, list[str]]:
    """Train from wherever training is to go on, with a checkpoint now and then; what was measured, and warnings."""
    continuation = Continuation(folder, every, one, MINUTE)
    before, warnings = continuation.resume()
    measured = before or Measured()
    for i in range(len(measured.steps), steps):
        measured.steps.append({"step": i, "loss": one.step(i).loss.item()})
        continuation.after(i + 1, measured)
    continuation.checkpoints.wait()
    return measured, warnings


def losses(measured: Measured) -> list[float]:
    return [line["loss"] for line in measured.steps]


# Damage -------------------------------------------------------------------------------------------------------------

OLD, NEW, JOURNAL = "step-00000002", "step-00000004", "rank-0.json"


def junk(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def lose_half(path: Path) -> None:
    lose(path, path.stat().st_size // 2)


def lose(path: Path, size: int) -> None:
    """Cut so many bytes off, or leave minus so many."""
    path.write_bytes(path.read_bytes()[:-size])


def as_one(path: Path) -> None:
    """Write all measurements into one object, as before journals had entries."""
    path.write_text(with_digest(json.dumps(asdict(Journal(path).read() or Measured()))))


DAMAGES: dict[str, tuple[Callable[[Path], object], int | None]] = {
    "nothing": (lambda folder: None, 4),
    "data cut": (lambda folder: lose_half(folder / NEW / "__0_0.distcp"), 2),
    "data of something else": (lambda folder: junk(folder / NEW / "__0_0.distcp"), 2),
    "metadata of something else": (lambda folder: junk(folder / NEW / ".metadata"), 2),
    "metadata that call a program": (lambda folder: in_metadata(folder / NEW, "state", system(folder / "marker")), 2),
    "data that call a program": (lambda folder: as_tensor(folder / NEW, system(folder / "marker")), 2),
    "all metadata lost": (lambda folder: [(folder / s / ".metadata").unlink() for s in (OLD, NEW)], None),
    "the newest lost": (lambda folder: shutil.rmtree(folder / NEW), 2),
    "journal lost": (lambda folder: (folder / JOURNAL).unlink(), None),
    "journal cut in its first entry": (lambda folder: lose(folder / JOURNAL, -90), None),
    "journal cut in its last entry": (lambda folder: lose(folder / JOURNAL, 9), 2),
    "journal of an earlier version": (lambda folder: as_one(folder / JOURNAL), 4),
    "journal of something else": (lambda folder: (folder / JOURNAL).write_text('{"steps": 3}'), None),
    "journal changed in its last entry": (
        lambda folder: (folder / JOURNAL).write_text((folder / JOURNAL).read_text().replace('"step": 3', '"step": 7')),
        2,
    ),
    "journal with a gap": (
        lambda folder: (folder / JOURNAL).write_text((folder / JOURNAL).read_text().replace('"step": 1', '"step": 7')),
        None,
    ),
    "everything lost": (shutil.rmtree, None),
}


UNNOTICED = ("nothing", "the newest lost", "everything lost", "journal of an earlier version")


@pytest.fixture(scope="module")
def saved(tokens: Path, one_rank: dist.ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run after the second and the fourth of its steps."""
    folder = tmp_path_factory.mktemp("saved")
    trained(build(small(tokens, steps=9)), folder, steps=4, every=2)
    assert sorted(path.name for path in folder.iterdir()) == [JOURNAL, OLD, NEW]
    return folder


@pytest.fixture(scope="module")
def uninterrupted(tokens: Path, one_rank: dist.ProcessGroup) -> list[float]:
    """The losses of the first five steps."""
    one = build(small(tokens, steps=9))
    return [one.step(i).loss.item() for i in range(5)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_after_any_damage_training_ends_as_if_there_had_been_none(
    tokens: Path, saved: Path, uninterrupted: list[float], tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    do, step = DAMAGES[damage]
    do(folder)
    measured, warnings = trained(build(small(tokens, steps=9)), folder, steps=5)
    assert measured.resumed == ([] if step is None else [step])
    assert bool(warnings) == (damage not in UNNOTICED)
    assert all("\n" not in warning for warning in warnings)
    assert not (folder / "marker").exists()
    assert losses(measured) == uninterrupted


def test_damage_that_shows_in_loading_the_only_one_ends_the_try_and_the_next_begins_anew(
    tokens: Path, saved: Path, one_rank: dist.ProcessGroup, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    shutil.rmtree(folder / OLD)
    junk(folder / NEW / "__0_0.distcp")
    continuation = Continuation(folder, 2, build(small(tokens, steps=9)), MINUTE)
    with pytest.raises(DamagedError, match="step-00000004 cannot be loaded"):
        continuation.resume()
    assert continuation.resume() == (None, [])


def test_a_checkpoint_of_another_run_is_refused(tokens: Path, saved: Path, one_rank: dist.ProcessGroup) -> None:
    with pytest.raises(InputError, match="of another run: seed 0, here 1"):
        trained(build(small(tokens, steps=9, seed=1)), saved, steps=5)
    assert (saved / NEW).exists()


def test_a_checkpoint_without_room_is_told_in_the_disks_own_words(
    tokens: Path, one_rank: dist.ProcessGroup, tmp_path: Path
) -> None:
    one = build(small(tokens, steps=9))
    continuation = Continuation(tmp_path / "checkpoints", 1, one, MINUTE)
    with files_of_at_most(1000):
        continuation.checkpoints.save(1)
        with pytest.raises(RuntimeError, match=r"checkpoints: rank 0: .* File too large") as told:
            continuation.checkpoints.wait()
    assert cause_of(str(told.value)) == "disk"
    assert continuation.resume() == (None, [])


def of_two(tokens: Path, folder: Path) -> tuple[list[int], list[str], int]:
    """Training whose second rank has lost what it measured: what each goes on from."""
    run = small(tokens, steps=9, dp=2)
    trained(build(run), folder, steps=2, every=2)
    if dist.get_rank() == 1:
        (folder / "rank-1.json").unlink()
    dist.barrier()
    measured, warnings = trained(build(run), folder, steps=3)
    return measured.resumed, warnings, len(measured.steps)


def test_ranks_agree_on_what_they_go_on_from(tokens: Path, tmp_path: Path) -> None:
    first, second = run_ranks(2, of_two, tokens, tmp_path / "checkpoints")
    assert first == second
    assert (first[0], first[2]) == ([], 3)
    assert ["cannot be used: measurements of rank 1 are missing" in warning for warning in first[1]] == [True]


@given(attempts=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 600)), max_size=4))
def test_a_journal_cut_anywhere_has_each_step_once_up_to_its_last_whole_entry(attempts: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, whole = Path(folder) / "rank-0.json", 0
        for saves, lost in attempts:
            journal, ends = Journal(path), {0: 0}
            measured = journal.read() or Measured()
            assert len(measured.steps) == whole
            for _ in range(saves):
                begun = len(measured.steps)
                measured.steps += [{"step": step, "loss": 0.5} for step in range(begun, begun + 2)]
                measured.evaluations.append({"step": begun + 2})
                journal.add(measured)
                ends[path.stat().st_size - 1] = begun + 2  # the newline at its end may be lost
            left = max(0, path.stat().st_size - lost)
            os.truncate(path, left)
            whole = max(steps for size, steps in ends.items() if size <= left)
        found = Journal(path).read() or Measured()
        assert [line["step"] for line in found.steps] == list(range(whole))
        assert [line["step"] for line in found.evaluations] == list(range(2, whole + 1, 2))


def test_no_byte_at_which_a_journal_is_cut_costs_an_entry_before_it(tmp_path: Path) -> None:
    journal, measured, ends = Journal(tmp_path / "rank-0.json"), Measured(), list[int]()
    for step in range(3):
        measured.steps.append({"step": step, "loss": 0.5})
        journal.add(measured)
        ends.append(journal.path.stat().st_size)
    for left in range(ends[-1], ends[0], -1):
        os.truncate(journal.path, left)
        found = journal.read()
        assert found is not None
        assert len(found.steps) == sum(left >= end - 1 for end in ends), left


def test_what_is_written_grows_as_the_steps_do(tmp_path: Path) -> None:
    sizes, journal, measured = list[int](), Journal(tmp_path / "rank-0.json"), Measured()
    for step in range(10, 50):
        measured.steps.append({"step": step, "loss": 0.5})
        before = len(sizes) and journal.path.stat().st_size
        journal.add(measured)
        sizes.append(journal.path.stat().st_size - before)
    assert len(set(sizes)) == 1, "each save writes its own step alone"


def test_what_was_measured_until_a_step() -> None:
    steps = [{"step": i, "seconds": 0.5} for i in range(5)]
    seconds = {"startup": 3.0, "training": 2.5}
    whole = Measured(steps=steps, evaluations=[{"step": 2}, {"step": 4}], seconds=seconds, resumed=[1])
    left = Measured(steps=steps[:2], evaluations=[{"step": 2}], seconds=seconds | {"training": 1.0}, resumed=[1])
    assert whole.until(2) == left, "steps after the checkpoint are done again"


@given(found=st.recursive(st.none() | st.integers() | st.text(), st.lists) | st.dictionaries(
    st.sampled_from(["steps", "evaluations", "traffic", "seconds", "resumed"]),
    st.none() | st.lists(st.none() | st.dictionaries(st.just("step"), st.integers() | st.text())) | st.just({}),
))  # fmt: skip
def test_what_is_no_journal_is_none(found: Any) -> None:
    read = Measured.read([found])
    assert read is None or [line["step"] for line in read.steps] == list(range(len(read.steps)))


# Told to end --------------------------------------------------------------------------------------------------------


class Kept:
    """The run's store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.looks = 0

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return all(key in self.values for key in keys)


@given(
    ranks=st.integers(1, 4),
    begun=st.integers(0, 7),
    told_at=st.integers(0, 40),
    seconds=st.sampled_from([0.02, 0.1, 0.4, 3.0]),
    chance=st.randoms(use_true_random=False),
)
def test_all_ranks_end_after_the_same_step_whoever_comes_first(
    ranks: int, begun: int, told_at: int, seconds: float, chance: random.Random
) -> None:
    """Every step ends with a sum over all ranks, so that none asks about a step before all have asked about the last
    but one; within a step they come in any order, and the first rank is told at any time."""
    store, is_told = Kept(), False
    notices = [AgreedEnd(store, rank, lambda: is_told) for rank in range(ranks)]  # type: ignore[arg-type]
    for steps in range(begun + 1, begun + 200):
        order = list(range(ranks))
        chance.shuffle(order)
        if steps - begun == AGREE_AFTER:
            order.sort(key=bool)  # the others wait for it here
        answers = {}
        for rank in order:
            is_told = is_told or (steps - begun > told_at and (rank == 0 or chance.random() < 0.5))
            answers[rank] = notices[rank].ends(steps, seconds if rank == 0 else seconds * 1.3)
        assert len(set(answers.values())) == 1, f"after {steps} steps {answers}"
        if answers[0]:
            assert steps - begun - told_at <= 1 / seconds + 3
            return
    raise AssertionError("nobody ends")


def test_the_other_ranks_ask_about_once_a_second() -> None:
    store = Kept()
    first, second = (AgreedEnd(store, rank, lambda: False) for rank in range(2))  # type: ignore[arg-type]
    for steps in range(1, 1001):
        assert not first.ends(steps, 0.01)
        assert not second.ends(steps, 0.01)
    assert store.looks <= 12
