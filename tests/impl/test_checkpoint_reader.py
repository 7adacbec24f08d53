"""A checkpoint is data: reading one executes nothing, and what is none is refused in a line that names it."""

import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from impl.checkpoint import Checkpoints, Loaded, latest
from impl.checkpoint_reader import CheckpointReader
from impl.data.config import DataConfig
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.recipe import Recipe
from impl.run import Run
from impl.start import start_from
from impl.train import Trainer
from tests.crafted import BYTES, OTHERS, PAYLOADS, PLACES, STEP, as_byte_entry, as_tensor, in_metadata, old_checkpoint
from tests.harness.saving import build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return old_checkpoint(tmp_path)


@pytest.fixture
def trainer(folder: Path, one_rank: dist.ProcessGroup) -> Trainer:
    return build(
        Run(
            model=ModelConfig(num_layers=1, hidden_size=8, num_heads=1, seq_len=8),
            train=Recipe(steps=2, global_batch=2, microbatch=1, warmup_steps=0),
            data=DataConfig(dataset=str(folder / "tokens")),
            precision="fp16",
            seed=3,
        )
    )


def the_damage(folder: Path) -> str:
    """What `latest` says of the only checkpoint."""
    saved, [damage] = latest(folder / "checkpoints")
    assert saved is None
    assert damage.startswith(f"{folder}/checkpoints/{STEP} is damaged (")
    assert "\n" not in damage
    return damage


def test_a_checkpoint_of_an_earlier_version_is_read_as_torch_reads_it(folder: Path) -> None:
    path = folder / "checkpoints" / STEP
    found, expected = (reader(path).read_metadata() for reader in (CheckpointReader, dcp.FileSystemReader))
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data
    assert len(found.storage_data) == 60


def test_training_goes_on_from_a_checkpoint_of_an_earlier_version(
    folder: Path, trainer: Trainer, one_rank: dist.ProcessGroup
) -> None:
    assert Checkpoints(folder / "checkpoints", trainer, one_rank).load() == Loaded(2, [])
    assert (trainer.optimizer.updates, trainer.loss_scale.good_steps) == (2, 2)
    sums = {own.name: own.tensors["exp_avg"].double().square().sum().item() for own in trainer.optimizer.owned()}
    assert sums["trunk.tokens.weight"] == pytest.approx(0.00988938469953131, rel=1e-6)
    assert sums["trunk.layers.0.mlp.down.bias"] == pytest.approx(0.004619518396715393, rel=1e-6)
    assert torch.isfinite(trainer.step(2).loss)


def with_flipped_bit(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_no_bit_of_a_checkpoint_changes_what_is_loaded(
    tmp_path: Path, trainer: Trainer, one_rank: dist.ProcessGroup
) -> None:
    checkpoints = Checkpoints(tmp_path / "new", trainer, one_rank)
    checkpoints.save(2)
    checkpoints.wait()
    reader, bits = CheckpointReader(checkpoints.folder / STEP), random.Random(0)
    metadata = reader.read_metadata()
    expected = dcp.FileSystemReader(checkpoints.folder / STEP).read_metadata()
    assert metadata.storage_data == expected.storage_data, "PyTorch reads it as well"
    reader.set_up_storage_reader(metadata, is_coordinator=True)

    data = checkpoints.folder / STEP / "__0_0.distcp"
    whole, refused = data.read_bytes(), 0
    for place in bits.choices(list(metadata.storage_data.values()), k=400):
        data.write_bytes(whole)
        saved = reader.read_tensor(place)
        at = 8 * place.offset + bits.randrange(8 * place.length)
        data.write_bytes(with_flipped_bit(whole, at))
        try:
            assert torch.equal(reader.read_tensor(place), saved), at
        except InputError:
            refused += 1
    assert 100 < refused < 400, "bits of padding change nothing"
    data.write_bytes(whole)

    file = checkpoints.folder / STEP / ".metadata"
    whole = file.read_bytes()
    for bit in bits.sample(range(8 * len(whole)), 400):
        file.write_bytes(with_flipped_bit(whole, bit))
        assert latest(checkpoints.folder)[0] is None, bit
    file.write_bytes(whole)
    assert checkpoints.load() == Loaded(2, [])


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("place", PLACES)
def test_a_call_in_the_metadata_is_named_and_not_made(folder: Path, place: str, payload: str) -> None:
    make, name = PAYLOADS[payload]
    in_metadata(folder / "checkpoints" / STEP, place, make(folder / "marker"))
    assert f"(.metadata holds {name!r}, which a checkpoint does not have)" in the_damage(folder)
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_is_named_in_every_pickle_protocol(folder: Path, protocol: int) -> None:
    call = PAYLOADS["os.system"][0](folder / "marker")
    (folder / "checkpoints" / STEP / ".metadata").write_bytes(pickle.dumps(call, protocol))
    assert "holds 'posix.system'" in the_damage(folder)
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_an_entry_that_is_no_tensor_is_refused(folder: Path, payload: str) -> None:
    as_byte_entry(folder / "checkpoints" / STEP, PAYLOADS[payload][0](folder / "marker"))
    assert "BytesStorageMetadata" in the_damage(folder)
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_call_in_a_data_file_is_named_and_not_made(
    folder: Path, trainer: Trainer, one_rank: dist.ProcessGroup, payload: str
) -> None:
    make, name = PAYLOADS[payload]
    as_tensor(folder / "checkpoints" / STEP, make(folder / "marker"))
    name = name.removeprefix("builtins.")
    why = f"/{STEP} cannot be loaded: rank 0: __0_0.distcp holds {name!r}, which a checkpoint does not have$"
    with pytest.raises(InputError, match=why):
        Checkpoints(folder / "checkpoints", trainer, one_rank).load()
    with pytest.raises(InputError, match=why):
        start_from(folder / "checkpoints", trainer, one_rank)
    assert not (folder / "marker").exists()


def write(data: bytes) -> Callable[[Path], object]:
    return lambda step: (step / ".metadata").write_bytes(data)


REFUSED = {what: (write(data), says) for what, (data, says) in BYTES.items()} | OTHERS


@pytest.mark.parametrize(("craft", "says"), REFUSED.values(), ids=REFUSED)
def test_metadata_of_something_else_are_refused_without_taking_time_or_memory(
    folder: Path, craft: Callable[[Path], object], says: str
) -> None:
    craft(folder / "checkpoints" / STEP)
    assert says in the_damage(folder)
    assert not hasattr(Metadata, "crack")
