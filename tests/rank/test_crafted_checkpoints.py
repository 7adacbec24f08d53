"""`evaluate --checkpoint` and `train --start` refuse crafted checkpoints in one line and execute nothing of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crafted import PAYLOADS, STEP, Call, as_byte_entry, as_tensor, in_metadata, old_checkpoint
from tests.harness.calls import call, refused

TRAIN = (
    "train --model.num-layers 1 --model.hidden-size 8 --model.num-heads 1 --model.seq-len 8 --train.steps 1 "
    "--train.global-batch 2 --train.microbatch 1 --train.warmup-steps 0 --evaluation.sequences 2 --device cpu "
    "--data.dataset tokens --start checkpoints"
)
EVALUATE = "evaluate --device cpu --checkpoint checkpoints --data tokens --texts text.txt"
PLACES: dict[str, Callable[[Path, Call], object]] = {
    "metadata": lambda step, call: in_metadata(step, "all", call),
    "state, nested": lambda step, call: in_metadata(step, "state, nested", call),
    "byte entry": as_byte_entry,
    "tensor": as_tensor,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(old_checkpoint(tmp_path))
    (tmp_path / "text.txt").write_text("yes no maybe " * 20)
    return tmp_path


@pytest.mark.usefixtures("forked_ranks")
def test_a_checkpoint_of_an_earlier_version_is_evaluated_and_started_from(folder: Path) -> None:
    assert "word perplexity" in call(*EVALUATE.split()).output
    assert call(*TRAIN.split()).status == 0


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("place", PLACES)
def test_evaluate_refuses_a_call_wherever_it_is(folder: Path, place: str, payload: str) -> None:
    make, name = PAYLOADS[payload]
    PLACES[place](folder / "checkpoints" / STEP, make(folder / "marker"))
    error = refused(*EVALUATE.split())
    assert f"checkpoints/{STEP} " in error
    named = "BytesStorageMetadata'" if place == "byte entry" else f"{name.removeprefix('builtins.')}'"
    assert f"{named}, which a checkpoint does not have" in error
    assert ("__0_0.distcp holds" if place == "tensor" else ".metadata holds") in error
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("place", ["metadata", "state, nested", "byte entry"])
def test_training_does_not_start_from_metadata_with_a_call(folder: Path, place: str) -> None:
    PLACES[place](folder / "checkpoints" / STEP, PAYLOADS["os.system"][0](folder / "marker"))
    error = refused(*TRAIN.split())
    assert error.startswith(f"error: start checkpoints: {folder}/checkpoints/{STEP} is damaged (.metadata holds '")
    assert not (folder / "marker").exists()
