"""One list: its products are the FLOPs, its collectives the traffic, its parameters the memory of other formulas."""

from collections import Counter

import pytest

from impl.cost.flops import model_flops
from impl.cost.parameters import named_parameters
from impl.cost.place import Place
from impl.cost.traffic import tensor_parallel_traffic
from impl.run import Run
from impl.simulator.operations import Block, BlockName, block, parameters
from tests.impl.simulator.made_up import MODEL, longer, run_of

VOCAB = 51200
COUNT: dict[BlockName, int] = {"embedding": 1, "layer": MODEL.num_layers, "head": 1}


def blocks(run: Run) -> dict[BlockName, Block]:
    return {name: block(run, VOCAB, name, run.model.seq_len) for name in COUNT}


SHARED = [{}, {"cp": 4}, {"cp": 4, "cp_attention": "ulysses"}]


@pytest.mark.parametrize("shared", SHARED, ids=["whole", "ring", "ulysses"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_products_and_cores_are_the_models_flops(recompute, shared):
    run = run_of(recompute=recompute, **shared)
    of_microbatch = sum(
        COUNT[name] * (sum(product.flops for product in one.products) + (one.core.flops if one.core else 0))
        for name, one in blocks(run).items()
    )
    assert of_microbatch * run.plan.cp == model_flops("palm_12", run.model, run.train.microbatch)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("family", "kv_heads", "over"), [("gpt", None, "tp"), ("bert", 2, "tp"), ("gpt", 2, "heads")])
def test_collectives_are_the_traffic(family, kv_heads, over, recompute, sequence_parallel):
    run = run_of(tp=4, recompute=recompute, sequence_parallel=sequence_parallel)
    run = longer(run, family=family, kv_heads=kv_heads)
    calls, sizes = Counter[str](), dict[str, float]()
    for name, one in blocks(run).items():
        for each in (each for each in one.collectives if each.over == over):
            again = 2 if recompute == "full" and name == "layer" and each.when == "forward" else 1
            calls[each.op] += COUNT[name] * again * run.microbatches
            moved = COUNT[name] * again * run.microbatches * each.bytes
            sizes[each.op] = sizes.get(each.op, 0.0) + moved
    traffic = tensor_parallel_traffic(Place(run, VOCAB), run.model.seq_len, over)
    assert traffic
    assert calls == {op: count.calls for op, count in traffic.items()}
    assert sizes == {op: count.bytes for op, count in traffic.items()}


@pytest.mark.parametrize("shared", SHARED[1:], ids=["ring", "ulysses"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_so_of_ranks_that_share_sequences(family, recompute, shared):
    run = longer(run_of(tp=2, recompute=recompute, **shared), family=family, kv_heads=8)
    found = Counter[str]()
    for name, one in blocks(run).items():
        for each in (each for each in one.collectives if each.over == "cp"):
            again = 2 if recompute == "selective" and name == "layer" and each.when == "forward" else 1
            found[each.op] += COUNT[name] * again * run.microbatches * int(each.bytes)
    traffic = tensor_parallel_traffic(Place(run, VOCAB), run.model.seq_len, "cp")
    assert found == {op: count.bytes for op, count in traffic.items()}
    assert ("all_gather" in found) == (family == "bert")


def test_blocks_have_all_parameters():
    run = run_of(tp=2)
    every = sum(p.size for p in named_parameters(run.model, VOCAB, 2))
    here = sum(COUNT[name] * parameters(run, VOCAB, name) for name in COUNT)
    twice = VOCAB // 2 * run.model.hidden_size  # the tied embedding, at both ends
    assert here - twice == every
