"""A pipeline's forward pass alone, for engines whose own returns only the mean loss."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from impl.collectives import broadcast, receive_start, send_start
from impl.peers.training import Peer
from impl.train import WEIGHTS


def between(peer: Peer, width: int, device: torch.device | str) -> Tensor:
    """Return a tensor like a stage's output for a microbatch; its memory is not touched. Shapes: [b s, width]."""
    run = peer.run
    return torch.empty(run.train.microbatch * run.model.seq_len, width, dtype=WEIGHTS[run.precision], device=device)


def score(peer: Peer, stages: Mapping[int, Callable[[Tensor], Tensor]], inputs: Tensor, targets: Tensor) -> Tensor:
    """Return `peer.score` by the stages of a pipeline, `peer.group`, one after another: the i-th is on rank i mod p.

    Communication: a send of [b s, h] between two stages, a broadcast of the result.
    """
    group, ranks, me = peer.group, peer.group.size(), peer.group.rank()
    last, x = ranks * len(stages) - 1, inputs
    for i in range(last + 1):
        if i % ranks == me:
            if i > 0 and ranks > 1:
                x = receive_start(between(peer, peer.run.model.hidden_size, peer.device), (i - 1) % ranks, group).wait()
            x = stages[i](x)
            if i < last and ranks > 1:
                send_start(x.contiguous(), (i + 1) % ranks, group).wait()
    scores = torch.empty(2, *targets.shape, device=peer.device)
    return broadcast(peer.scores(x, targets) if last in stages else scores, last % ranks, group)
