"""FLOP conventions against published rates and times; `test_gemms` has the matrix products that they count."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.cost.flops import MODEL_FLOPS, hardware_flops, model_flops
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.model.sizes import named

# PTD-P table 1: GPUs, global batch, TFLOP/s per GPU, percent of 312, PFLOP/s of all GPUs
TABLE_1 = {
    "ptdp-1.7b": (32, 512, 137, 44, 4.4),
    "ptdp-3.6b": (64, 512, 138, 44, 8.8),
    "ptdp-7.5b": (128, 512, 142, 46, 18.2),
    "ptdp-18.4b": (256, 1024, 135, 43, 34.6),
    "ptdp-39.1b": (512, 1536, 138, 44, 70.8),
    "ptdp-76.1b": (1024, 1792, 140, 45, 143.8),
    "ptdp-145.6b": (1536, 2304, 148, 47, 227.1),
    "ptdp-310.1b": (1920, 2160, 155, 50, 297.4),
    "ptdp-529.6b": (2520, 2520, 163, 52, 410.2),
    "ptdp-1t": (3072, 3072, 163, 52, 502.0),
}
# Megatron-LM's README of September 2020, tables: layers, hidden, heads, GPUs, batch, measured seconds, TFLOP/s per GPU
README_2020 = [
    (24, 1920, 15, 1, 8, 1.121, 71.9),
    (30, 2304, 18, 2, 8, 1.093, 64.2),
    (36, 3072, 24, 4, 8, 1.238, 58.5),
    (42, 4096, 32, 8, 8, 1.407, 52.2),
    (24, 1920, 15, 1, 16, 1.076, 149.8),
    (30, 2304, 18, 2, 16, 1.026, 136.8),
    (36, 3072, 24, 4, 16, 1.162, 124.7),
    (42, 4096, 32, 8, 16, 1.343, 109.3),
    (24, 1920, 15, 128, 2048, 1.153, 139.8),
    (30, 2304, 18, 256, 2048, 1.101, 127.5),
    (36, 3072, 24, 512, 2048, 1.242, 116.7),
    (42, 4096, 32, 1024, 2048, 1.380, 106.5),
]
# PTD-P table 2 and section 5.1: model, GPUs, global batch, TFLOP/s per GPU, billions of tokens, days
DAYS = [
    ("gpt-175b", 384, 1536, 153, 300, 84),
    ("gpt-175b", 768, 1536, 149, 300, 43),
    ("gpt-175b", 1536, 1536, 141, 300, 23),
    ("ptdp-529.6b", 560, 2240, 171, 300, 156),
    ("ptdp-529.6b", 1120, 2240, 167, 300, 80),
    ("ptdp-529.6b", 2240, 2240, 159, 300, 42),
    ("ptdp-1t", 3072, 3072, 163, 450, 84),  # 85.3: its 8TP/nX leaves attention and vocabulary out
]
# Korthikanti et al. 2022, tables 3 and 5: model, GPUs, global batch, seconds with selective recomputation and sequence
# parallelism, MFU and HFU in percent of 312 TFLOP/s
TABLE_5 = [
    ("korthikanti-22b", 8, 4, 1.10, 41.5, 43.7),
    ("korthikanti-175b", 64, 64, 13.75, 51.4, 52.8),
    ("korthikanti-530b", 280, 280, 37.83, 56.0, 57.0),
    ("korthikanti-1t", 512, 512, 71.49, 56.3, 57.0),
]

gpts = st.builds(
    lambda layers, heads, width, s, vocab: ModelConfig(
        num_layers=layers, hidden_size=heads * width, num_heads=heads, seq_len=s, vocab_size=vocab
    ),
    *(st.integers(1, 64), st.integers(1, 32), st.integers(1, 64), st.integers(2, 2048), st.integers(2, 10**5)),
)


def recomputed(name: str, batch: int) -> float:
    """FLOPs with PTD-P's vocabulary and full recomputation, as the paper counts all rates."""
    return hardware_flops("ptdp", dataclasses.replace(named(name), vocab_size=51200), batch, recompute="full")


@given(gpts, st.integers(1, 4096))
def test_ptdp_with_full_recomputation_is_equation_3_and_its_model_flops_are_palms(config: ModelConfig, batch: int):
    s, layers, h, vocab = config.seq_len, config.num_layers, config.hidden_size, config.vocab_size
    assert vocab is not None
    equation_3 = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert hardware_flops("ptdp", config, batch, recompute="full") == pytest.approx(equation_3, rel=1e-12)
    assert model_flops("ptdp", config, batch) == model_flops("palm_12", config, batch)


@pytest.mark.parametrize(("layers", "hidden", "heads", "gpus", "batch", "seconds", "tflops"), README_2020)
def test_measured_iteration_times_give_the_printed_rates(
    layers: int, hidden: int, heads: int, gpus: int, batch: int, seconds: float, tflops: float
):
    config = ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, seq_len=1024, vocab_size=51200)
    rate = hardware_flops("ptdp", config, batch, recompute="full") / seconds / gpus
    # the milliseconds are rounded too: half a millisecond is 0.05%
    assert rate / 1e12 == pytest.approx(tflops, abs=0.05 + 0.0005 * tflops)


def test_gpt_3_at_32_seconds_a_batch_runs_at_138_teraflops():
    """Megatron-LM's README: 1024 A100, batch 1536."""
    assert recomputed("gpt-175b", 1536) / 32 / 1024 / 1e12 == pytest.approx(138, abs=0.5)


@pytest.mark.parametrize(("name", "gpus", "batch", "tflops", "tokens", "days"), DAYS)
def test_days_of_training_are_ptdps(name: str, gpus: int, batch: int, tflops: float, tokens: int, days: float):
    steps = tokens * 1e9 / (batch * named(name).seq_len)
    seconds = steps * recomputed(name, batch) / (gpus * tflops * 1e12)
    assert seconds / 86400 == pytest.approx(days, abs=1.5 if name == "ptdp-1t" else 1)


@pytest.mark.parametrize("name", TABLE_1)
def test_ptdp_table_1_prints_hfu_and_its_mfu_is_a_quarter_lower(name: str):
    gpus, batch, tflops, percent, petaflops = TABLE_1[name]
    # 1.7B: 137 is 43.9% and 3 072 x 163 is 500.7: rates are rounded before printing
    assert 100 * tflops / 312 == pytest.approx(percent, abs=0.6)
    assert gpus * tflops / 1000 == pytest.approx(petaflops, rel=0.004)
    assert model_flops("ptdp", named(name), batch) / recomputed(name, batch) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize(("name", "gpus", "batch", "seconds", "mfu", "hfu"), TABLE_5)
def test_korthikanti_table_5_and_what_selective_recomputation_costs_of_it(
    name: str, gpus: int, batch: int, seconds: float, mfu: float, hfu: float
):
    """Equation 8 adds three times what selective recomputation does again: Megatron-LM#523."""
    config = named(name)
    layers, h, s = config.num_layers, config.hidden_size, config.seq_len
    model, ours = (hardware_flops("ptdp", config, batch, recompute=way) for way in ("none", "selective"))
    equation_8 = 72 * batch * layers * s * h**2 * (1 + s / (3 * h) + 51200 / (12 * h * layers))
    percent = lambda flops: 100 * flops / seconds / gpus / 312e12
    assert percent(model) == pytest.approx(mfu, abs=0.2)  # 1.10 s are rounded to half a percent
    assert percent(equation_8) == pytest.approx(hfu, abs=0.2)
    assert 3 * (ours - model) == pytest.approx(equation_8 - model, rel=1e-9)


@given(gpts, st.integers(1, 64), st.integers(2, 8), st.sampled_from(sorted(MODEL_FLOPS)))
def test_flops_grow_with_the_batch_and_with_recomputation(config: ModelConfig, batch: int, times: int, convention: str):
    model = model_flops(convention, config, batch)
    assert model_flops(convention, config, batch * times) == times * model
    assert hardware_flops(convention, config, batch, recompute="none") == model
    selective = hardware_flops(convention, config, batch, recompute="selective")
    full = hardware_flops(convention, config, batch, recompute="full")
    assert model < selective < full <= model * 4 / 3


def test_wrong_input_names_what_is_valid():
    gpt, bert = ModelConfig(vocab_size=100), ModelConfig(family="bert", vocab_size=100)
    with pytest.raises(InputError, match=r"'6n'.*valid: palm_12, causal_6, ptdp"):
        model_flops("6n", gpt, 1)
    with pytest.raises(InputError, match=r"causal_6 does not fit.*valid: palm_12, ptdp"):
        model_flops("causal_6", bert, 1)
    assert model_flops("palm_12", bert, 1) == model_flops("palm_12", bert, 1, head_positions=128)
    with pytest.raises(InputError, match=r"valid: 0 to 128"):
        model_flops("palm_12", bert, 1, head_positions=129)
    with pytest.raises(InputError, match=r"valid: none, selective, full"):
        hardware_flops("ptdp", gpt, 1, recompute="half")  # pyright: ignore[reportArgumentType]
