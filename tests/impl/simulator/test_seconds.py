"""Laws of seconds: continuous in every size, never slower on faster machines, and a table where there is one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.plan import Plan
from impl.simulator.seconds import Group, attention, beside, collective, elementwise, gemm, group, launched, send
from impl.simulator.system import System
from tests.impl.simulator.made_up import DOCUMENT, SYSTEM, faster

SIZES = st.integers(1, 30_000)
SPANS = [Group(8, 8, 1), Group(16, 8, 1), Group(4, 1, 8), Group(64, 2, 4)]


@settings(max_examples=100, deadline=None)
@given(SIZES, SIZES, SIZES, st.integers(0, 2))
def test_products_have_no_steps(m: int, n: int, k: int, grows: int):
    """A size that grows by a thousandth, or by 1, changes seconds by at most 30 times as much, in proportion: where a
    tile begins and a wave with it."""
    size = [m, n, k]
    before = gemm(SYSTEM, "bf16", size[0], size[1], size[2])
    more = max(1, size[grows] // 1000)
    growth = more / size[grows]
    size[grows] += more
    after = gemm(SYSTEM, "bf16", size[0], size[1], size[2])
    assert before * (1 - 1e-9) <= after <= before * (1 + 30 * growth)


@settings(max_examples=50, deadline=None)
@given(SIZES, SIZES, SIZES, st.floats(1.0, 8.0))
def test_products_are_never_slower_with_more_flops_or_bandwidth(m: int, n: int, k: int, factor: float):
    before = gemm(SYSTEM, "bf16", m, n, k)
    for rate in ("peak_flops", "memory_bandwidth"):
        assert gemm(faster(**{rate: factor}), "bf16", m, n, k) <= before * (1 + 1e-12)


def test_a_large_product_takes_its_operations_at_a_share_of_the_peak():
    size = 16384
    rate = 2 * size**3 / gemm(SYSTEM, "bf16", np.array([size]), size, size)[0]
    assert 0.9 < rate / (300e12 * SYSTEM.constant("gemm_efficiency")) < 1


@given(st.integers(4096, 30_000), st.integers(4096, 30_000), st.integers(1, 8192))
def test_a_product_added_to_a_sum_takes_longer_than_alone_and_less_than_with_an_addition_after_it(
    m: int, n: int, k: int
):
    alone, added = (gemm(SYSTEM, "bf16", m, n, k, is_sum=is_sum) for is_sum in (False, True))
    addition = elementwise(SYSTEM, "bf16", (2 + 4 + 4) * m * n) + SYSTEM.constant("kernel_seconds")
    assert alone < added < alone + addition


def test_tiles_take_as_long_to_write_with_operands_of_8_bits_as_with_16():
    """They halve the time of a depth of k and not that of filling and writing."""
    fill, peaks = SYSTEM.constant("gemm_fill"), DOCUMENT["device"]["peak_flops"]
    twice = peaks | {"fp8": {"value": 2 * peaks["bf16"]["value"], "source": "made up"}}
    system = System.from_dict({**DOCUMENT, "device": DOCUMENT["device"] | {"peak_flops": twice}})
    fast, slow = (gemm(system, precision, 16384, 16384, 16384) for precision in ("fp8", "bf16"))
    assert fast / slow == pytest.approx((16384 + 2 * fill) / (16384 + fill) / 2, rel=0.01)


def test_a_wave_that_is_barely_begun_costs_more_than_its_work():
    full, begun = (gemm(SYSTEM, "bf16", 256 * tiles, 1280, 4096) for tiles in (10, 11))
    assert begun / full > 1.25


def test_a_measured_product_takes_what_was_measured():
    rows = [[m, n, 512, 1e-3 * m * n] for m in (64, 256) for n in (64, 256)]
    table = {"precision": "bf16", "source": "made up", "rows": rows, "pass_": "forward"}
    system = System.from_dict({**DOCUMENT, "gemm": [table]})
    assert gemm(system, "bf16", 256, 64, 512, "forward") == pytest.approx(1e-3 * 256 * 64)
    assert gemm(system, "bf16", 256, 64, 512, "weight gradient") == gemm(SYSTEM, "bf16", 256, 64, 512)


def test_a_measured_core_and_elementwise_operation_take_what_was_measured():
    table = {"precision": "bf16", "source": "made up", "rows": [[1, 16, 1024, 128, 2e-3, 5e-3]]}
    system = System.from_dict({**DOCUMENT, "attention": [table]})
    assert attention(system, "bf16", (1, 16, 1024, 128), masked=1.0, backward=True) == pytest.approx(5e-3)
    assert attention(system, "bf16", (2, 16, 1024, 128), masked=1.0, backward=False) == pytest.approx(4e-3)
    rate = {"precision": "fp32", "name": "gelu", "forward": 1e9, "backward": 2e9, "source": "made up"}
    device = {**DOCUMENT["device"], "elementwise": [rate]}
    system = System.from_dict({**DOCUMENT, "device": device})
    share = system.constant("memory_efficiency")
    assert elementwise(system, "fp32", 4e9, "gelu") == pytest.approx(4.0 / share)
    assert elementwise(system, "fp32", 4e9, "gelu", is_backward=True) == pytest.approx(2.0 / share)
    assert elementwise(system, "fp32", 4e9, "norm") == elementwise(SYSTEM, "fp32", 4e9)


@pytest.mark.parametrize("ranks", SPANS)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_collectives_grow_with_bytes_from_a_floor(op, ranks: Group):
    sizes = np.geomspace(1, 1e10, 300)
    seconds = collective(SYSTEM, op, sizes, ranks)
    growth = np.diff(np.log(seconds))
    assert seconds[0] > 5e-6
    assert (growth >= 0).all()
    assert growth.max() <= np.log(sizes[1] / sizes[0]) + 1e-9
    if ranks == Group(4, 1, 8):  # of which 8 share the way out
        assert (seconds > 6 * collective(SYSTEM, op, sizes, Group(4, 1, 1)))[-1]
    for rate in ("nics", "nic_bandwidth", "link_bandwidth"):
        assert (collective(faster(**{rate: 2}), op, sizes, ranks) <= seconds * (1 + 1e-12)).all()


def test_a_small_all_reduce_goes_through_a_tree_and_others_round_a_ring():
    """Four nodes of 8: a tree has 7 links and 2 levels of cards, both ways; a ring 28 links and 3 cards."""
    link, card = SYSTEM.constant("link_latency"), SYSTEM.constant("nic_latency")
    wide = Group(32, 8, 1)
    assert collective(SYSTEM, "all_reduce", 0, wide) == pytest.approx(2 * (7 * link + 2 * card))
    for op in ("all_gather", "reduce_scatter", "broadcast"):
        assert collective(SYSTEM, op, 0, wide) == pytest.approx(28 * link + 3 * card)
    for op in ("all_gather", "broadcast"):
        assert collective(SYSTEM, op, 0, Group(8, 8, 1)) == pytest.approx(7 * link)


def test_the_parts_of_an_all_to_all_go_on_at_the_same_time():
    link, card = SYSTEM.constant("link_latency"), SYSTEM.constant("nic_latency")
    for ranks, hop in ((Group(8, 8, 1), link), (Group(32, 8, 1), card), (Group(128, 1, 8), card)):
        assert collective(SYSTEM, "all_to_all", 0, ranks) == pytest.approx(hop)


def test_groups_lie_where_the_mesh_puts_them():
    plan = Plan(tp=4, dp=4, pp=2)
    assert group(("tp",), plan, SYSTEM) == Group(4, 4, 2)
    assert group(("dp",), plan, SYSTEM) == Group(4, 2, 4)
    assert group(("dp", "tp"), plan, SYSTEM) == Group(16, 8, 1)
    assert group(("tp",), Plan(tp=16), SYSTEM) == Group(16, 8, 1)
    assert group(("dp",), Plan(tp=8, dp=32), SYSTEM) == Group(32, 1, 8)
    assert group(("dp",), Plan(dp=2), SYSTEM) == Group(2, 2, 1)
    parts = Plan(tp=2, dp=16, zero_stage=1, zero_group=4)
    assert group(("zero",), parts, SYSTEM) == Group(4, 4, 2)
    assert group(("zero", "tp"), parts, SYSTEM) == Group(8, 8, 1)
    assert group(("replicas",), parts, SYSTEM) == Group(4, 1, 8)
    assert group(("dp",), parts, SYSTEM) == Group(16, 4, 2)


def test_a_measured_collective_takes_what_was_measured():
    curve = {"op": "all_reduce", "span": "intra", "ranks": 2, "source": "made up", "rows": [[1e3, 1e-4], [1e6, 1e-3]]}
    system = System.from_dict({**DOCUMENT, "collectives": [curve]})
    ranks = Group(2, 2, 4)
    assert collective(system, "all_reduce", 1e6, ranks) == pytest.approx(1e-3)
    assert collective(system, "all_reduce", 1.0, ranks) == pytest.approx(1e-4)
    assert collective(system, "all_reduce", 1e7, ranks) == pytest.approx(1e-2)
    assert collective(system, "all_reduce", 1e6, Group(2, 1, 8)) == collective(
        SYSTEM, "all_reduce", 1e6, Group(2, 1, 8)
    )


def test_sends_between_nodes_share_the_adapters():
    one, four, eight = (send(SYSTEM, 1e9, is_inter=True, senders=n) for n in (1, 4, 8))
    assert one == four
    assert eight == pytest.approx(2 * four, rel=1e-3)
    assert send(SYSTEM, 1e9, is_inter=False, senders=8) < one


@given(st.floats(0, 10), st.floats(0, 10))
def test_what_goes_on_at_once_takes_no_longer_than_one_after_the_other(a: float, b: float):
    assert beside(SYSTEM, a, b) + 1e-12 >= 0
    assert beside(SYSTEM, a, b) <= a + 1e-12
    assert max(a, b) - 1e-12 <= launched(SYSTEM, a, b) <= a + b + 1e-12


CORES = {"FlashAttention-2": (191, 260, 298, 319, 333, 335), "cuDNN": (315, 410, 484, 518, 529, 539)}
"""TFLOP/s of causal forward passes on an H100, heads of 128, 512 to 16,384 tokens: FlashAttention-3, figure 5."""


@pytest.mark.parametrize("name", CORES)
def test_a_fused_core_reaches_less_of_the_peak_in_short_sequences_as_published(name: str):
    fused = System.from_dict({**DOCUMENT, "device": DOCUMENT["device"] | {"fused_attention": True}})

    def speeds(system: System, masked: float) -> np.ndarray:
        core = lambda s: attention(system, "bf16", (16384 // s, 16, s, 128), masked=masked, backward=False)
        return np.array([s / core(s) for s in (512 * 2**i for i in range(6))])

    published, law = np.array(CORES[name]), speeds(fused, 1.0)
    assert np.log(published / law).std() < 0.03
    assert speeds(fused, 0.0) == pytest.approx(np.full(6, law[2]))  # nothing is masked: all as at 2,048
    assert speeds(SYSTEM, 1.0) == pytest.approx(np.full(6, law[2]))


@given(st.integers(1, 512), st.booleans())
def test_a_core_whose_rows_are_not_of_16_bytes_has_the_rate_of_fp32(head_size: int, backward: bool):
    shape = 2, 16, 1024, head_size
    core = lambda system, precision: attention(system, precision, shape, masked=0.0, backward=backward)
    slower = 15.0 if head_size % 8 else 1.0  # 300 over 20 TFLOP/s
    document = {**DOCUMENT, "device": DOCUMENT["device"] | {"fused_attention": True}}
    assert core(SYSTEM, "bf16") == pytest.approx(slower * core(System.from_dict(document), "bf16"))
    assert core(SYSTEM, "fp32") == core(System.from_dict(document), "fp32")
