"""Weights from and to the format of transformers: a folder with config.json and safetensors files."""

import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.records.store import write_atomically
from harness.terminal import Flag, print_json
from impl.errors import InputError, in_one_line

VALID = "valid: a folder as save_pretrained of transformers writes it, config.json and safetensors"


def import_hf(*, weights: Path, data: Path, out: Path, seq_len: int | None = None, json: Flag = False) -> int:
    """Make a checkpoint of GPT-2, GPT-NeoX, BERT or Llama from transformers, for `evaluate` and `train --start`.

    Args:
        weights: The folder with config.json and *.safetensors.
        data: A token folder made with the weights' tokenizer.
        out: The folder to write the checkpoint to.
        seq_len: Tokens of a sequence, for models with rotary positions; as many as config.json says by default.
        json: Print one JSON document on standard output.
    """
    _require_safetensors()
    from impl.checkpoint import write_weights
    from impl.data.tokens import TokenFolder
    from impl.hugging_face import config_from, weights_from

    described, tensors = _object(weights / "config.json"), _tensors(weights)
    try:
        config = config_from(described)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # entries of any kind
        why = f"an entry is missing or not what it has to be ({type(error).__name__}: {in_one_line(error):.100})"
        raise InputError(f"--weights {weights / 'config.json'}: {why}; valid: as transformers writes it") from None
    if seq_len is not None:
        if config.positions != "rotary" or seq_len < 2:
            raise InputError(f"--seq-len {seq_len}: valid with rotary positions, 2 or more; here: {config.positions}")
        config = replace(config, seq_len=seq_len)
    tokens = TokenFolder.open(data)
    if (size := tokens.manifest.vocab_size) > (config.vocab_size or 0):
        have = f"--data {data} has a vocabulary of {size}, the weights have {config.vocab_size}"
        raise InputError(f"{have}; valid: a token folder made with their tokenizer")
    if list(out.glob("step-*")):
        raise InputError(f"--out {out} has a checkpoint already; valid: another folder")
    found = weights_from(tensors, config, described["model_type"])
    identity = {f"model.{name}": value for name, value in asdict(config).items()}
    write_weights(out, found, {**identity, "seed": 0, "data": tokens.sha256})
    count = sum(tensor.numel() for tensor in found.values())
    if json:
        return print_json({"checkpoint": str(out), "parameters": count, "model": asdict(config)})
    print(f"written: {out}, {count:,} parameters of {described['model_type']}")
    return 0


def export_hf(*, checkpoint: Path, out: Path) -> int:
    """Write a checkpoint as transformers reads it: config.json and model.safetensors, in fp32.

    Args:
        checkpoint: The folder of a run's checkpoints; the newest is taken.
        out: The folder to write to.
    """
    _require_safetensors()
    from safetensors.torch import save_file

    from impl.checkpoint import latest, read_weights
    from impl.hugging_face import config_to, weights_to
    from impl.model.config import ModelConfig

    saved, damaged = latest(checkpoint)
    if saved is None:
        raise InputError(f"--checkpoint: {'; '.join(damaged) or f'no step-* in {checkpoint}'}")
    if out.exists() and any(out.iterdir()):
        raise InputError(f"--out {out} is not empty; valid: a new folder")
    own = {name.removeprefix("model."): value for name, value in saved.state["identity"].items()}
    config = ModelConfig(**{name: value for name, value in own.items() if name not in ("seed", "data")})
    described = config_to(config, config.vocab_size or 0)
    tensors = weights_to(read_weights(saved), config, config.vocab_size or 0, described["model_type"])
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    write_atomically(out / "config.json", json.dumps(described, indent=2) + "\n")
    print(f"written: {out}, step {saved.step:,} as {described['architectures'][0]}")
    return 0


def _require_safetensors() -> None:
    if find_spec("safetensors") is None:
        raise InputError("this needs the package safetensors; install the extra: pip install 'lmscale[hf]'")


def _object(path: Path) -> dict[str, Any]:
    from impl.data.make_tokenizer import read_json

    try:
        return read_json(path)
    except (OSError, InputError) as error:
        why = f"{path}: {error.strerror}" if isinstance(error, OSError) else error
        raise InputError(f"--weights {why}; {VALID}") from None


def _tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of the files that transformers reads in a folder; nothing in them is executed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found, names, index = dict[str, Any](), {"model.safetensors"}, folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        if not isinstance(places := _object(index).get("weight_map"), dict):
            raise InputError(f"--weights {index} has no weight_map; {VALID}")
        names = {str(name) for name in places.values()}
    for path in (folder / name for name in sorted(names)):
        if not path.is_file():
            raise InputError(f"--weights {path}: no such file; {VALID}")
        try:
            found |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"--weights {path} cannot be read: {error!s:.100}") from None
    return found
