"""Training that begins with a checkpoint's weights: of the same model, or of a smaller one that has grown into it."""

import re
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import torch.distributed as dist

from impl.checkpoint import WEIGHT, chunks_of, identity, latest, read, why_another, with_defaults
from impl.checkpoint_reader import CheckpointReader
from impl.chunks import State
from impl.errors import InputError
from impl.train import Trainer

Source = Callable[[str], str]
"""Function from a tensor's name to that of the checkpoint's tensor of which it begins as a copy; "" if of none."""


def stacked(there: State, here: State) -> Source | None:
    """Return the source of a deeper model's layers: layer i begins as layer i mod n of a checkpoint of n layers.

    A layer that all layers shared is one, of which each gets a copy ("delinking"). None: the layers are no multiple.

    Source: Efficient Training of BERT by Progressively Stacking, Gong et al. 2019 (ICML); G_stack in Du et al. 2024
    (2405.15319), the best of its growth operators. Delinking: M6-10T, Lin et al. 2021 (2110.03888).
    """
    layers = 1 if there["model.shared_layers"] else there["model.num_layers"]
    is_multiple = isinstance(layers, int) and layers > 0 and here["model.num_layers"] % layers == 0
    if here["model.shared_layers"] or not is_multiple:
        return None
    return lambda name: re.sub(r"(?<=trunk\.layers\.)\d+", lambda index: str(int(index[0]) % layers), name)


def upcycled(there: State, here: State) -> Source | None:
    """Return the source of experts: each begins as a copy of the checkpoint's MLP in its layer; routers are new.

    Where a token meets several experts of one prototype, whose weights sum up to 1, and they take all, the model begins
    as the function that the checkpoint's is. None: the checkpoint has experts, or biases, which experts do not have, or
    the experts are of another size than its MLP.

    Source: Sparse Upcycling, Komatsuzaki et al. 2022 (2212.05055); so inherits CPM-2, Zhang et al. 2021 (2106.10715).
    """
    is_same_size = here["model.expert_size"] == there["model.mlp_size"]
    if there["model.experts"] or there["model.biases"] or not is_same_size:
        return None
    return lambda name: "" if ".mlp.router." in name else re.sub(r"(?<=\.mlp\.)experts\.\d+\.", "", name)


GROWTHS: dict[tuple[str, ...], Callable[[State, State], Source | None]] = {
    ("model.num_layers", "model.shared_layers"): stacked,
    (
        "model.experts", "model.experts_every", "model.expert_prototypes", "model.experts_per_token",
        "model.expert_size", "model.expert_capacity", "model.balance_loss", "model.balance_bias",
    ): upcycled,
}  # fmt: skip
"""Rules by the fields in which they let models differ: from both identities, the checkpoint's first, the source."""


FREE = ("seed", "model.dropout", "model.attention_dropout", "model.init_std")
"""Fields in which training may differ from what it starts from: none changes what the weights mean."""


def start_from(folder: Path, trainer: Trainer, group: dist.ProcessGroup) -> int:
    """Load the weights of the newest complete checkpoint in a folder as initial weights, and return its step.

    Moments and everything else keep their initial values. Heads that the checkpoint does not have keep their initial
    weights; the layout, the precision and FREE may differ. What a model has more than the checkpoint's, by
    one of GROWTHS, begins as copies.

    Memory: as `Checkpoints.load`.

    Raises:
        InputError: there is no checkpoint, or it belongs to another model, vocabulary or data.
    """
    saved, damaged = latest(folder)
    if saved is None:
        raise InputError(f"start: {'; '.join(damaged) or f'no checkpoint in {folder}'}")
    there = with_defaults(saved.state["identity"])
    here = {name: value for name, value in identity(trainer).items() if name not in FREE}
    sources, explained = list[Source](), State()
    for fields, growth in GROWTHS.items():
        if any(there[name] != here[name] for name in fields) and (source := growth(there, here)):
            sources.append(source)
            explained |= {name: there[name] for name in fields}
    if why := why_another(there, here | explained):
        raise InputError(f"start: {saved.path} is a checkpoint of another model: {why}")
    origin = lambda name: reduce(lambda name, source: source(name), sources, name)
    reader = CheckpointReader(saved.path)
    names = reader.read_metadata().state_dict_metadata
    wanted = [
        owned._replace(tensors={WEIGHT: owned.tensors[WEIGHT]})
        for owned in trainer.optimizer.owned()
        if (source := origin(f"{WEIGHT}.{owned.name}")) in names or (source and owned.name.startswith("trunk."))
    ]
    read(reader, chunks_of(trainer, wanted), group, prefix="start: ", origin=origin)
    trainer.optimizer.publish()
    return saved.step
