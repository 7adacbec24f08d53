"""Named model shapes: the papers' and a family that trains on a CPU, each with its source."""

import difflib
from dataclasses import dataclass
from functools import partial
from typing import Any

from impl.errors import InputError
from impl.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model shape, where it comes from, and the parameter count printed there (`8.3B`), if one is."""

    config: ModelConfig
    source: str
    published: str | None = None


def named(name: str) -> ModelConfig:
    """Return the configuration with this name.

    Raises:
        InputError: no size has this name; lists the near ones, or all.
    """
    if name in SIZES:
        return SIZES[name].config
    near = difflib.get_close_matches(name, SIZES, n=5, cutoff=0.6)
    hint = f"nearest: {', '.join(near)}" if near else f"valid: {', '.join(SIZES)}"
    raise InputError(f"model size {name!r} does not exist; {hint}")


def _size(source: str, published: str | None, *shape: int, where: str = "", **fields: Any) -> Size:
    """Return a size of these layers, hidden size and heads; `where` fills the gap in the source."""
    layers, hidden, heads = shape
    config = ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, **fields)
    return Size(config=config, source=source.format(where), published=published)


_MEGATRON = "Megatron-LM, Shoeybi et al. 2019 (1909.08053)"
_megatron = partial(
    _size,
    f"{_MEGATRON}, {{}}; sequence, dropout: section 4.2; vocabulary: 5.1",
    **{"seq_len": 1024, "vocab_size": 51200, "dropout": 0.1},
)
_megatron_bert = partial(
    _size,
    f"{_MEGATRON}, table 4; vocabulary, dropout: section 4.2; sequence: Devlin et al. 2019 (1810.04805), "
    "which it follows",
    **{"family": "bert", "seq_len": 512, "vocab_size": 30522, "dropout": 0.1},
)
_ptdp = partial(
    _size,
    "PTD-P, Narayanan et al. 2021 (2104.04473), table 1; sequence, vocabulary: section 5; dropout not stated",
    **{"seq_len": 2048, "vocab_size": 51200},
)
_korthikanti = partial(
    _size,
    "Korthikanti et al. 2022 (2205.05198), table 3; sequence, vocabulary: section 6; "
    "dropout 0.1 assumed, whose masks its memory formulas count",
    **{"seq_len": 2048, "vocab_size": 51200, "dropout": 0.1},
)
_frontier = partial(
    _size,
    "Frontier, Dash et al. 2023 (2312.12705), table I, {}; "
    "vocabulary not stated, Megatron's 51200 assumed; dropout not stated",
    **{"seq_len": 2048, "vocab_size": 51200},
)
LLAMA_BLOCK: dict[str, Any] = {
    **{"norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu", "biases": False, "tied": False},
}
"""Fields of Llama's block: RMSNorm before attention and MLP, no biases, an output head of its own."""
_llama2 = partial(
    _size,
    "Llama 2, Touvron et al. 2023 (2307.09288), section 2.2 and table 1; widths: the weights' configuration",
    **LLAMA_BLOCK,
    seq_len=4096,
    vocab_size=32000,
)
_llama3 = partial(
    _size,
    "Llama 3, Grattafiori et al. 2024 (2407.21783), table 3; sequence: section 3.4.1; vocabulary: 128,000 and 256 "
    "special tokens",
    **LLAMA_BLOCK,
    **{"kv_heads": 8, "rotary_base": 500_000.0, "seq_len": 8192, "vocab_size": 128256},
)
_nemotron = partial(
    _size,
    "{}; its LayerNorm's weight is one more than ours",
    **{"positions": "rotary", "rotary_fraction": 0.5, "mlp": "squared_relu", "biases": False, "tied": False},
    **{"kv_heads": 8, "seq_len": 4096, "vocab_size": 256000},
)
_mixtral = partial(
    _size,
    "Mixtral, Mistral AI 2023 and 2024; shape, sequence: NVIDIA/Megatron-LM, core v0.8, README of its experts, and "
    "yanring/Megatron-MoE-ModelZoo@0993e66; counts: Mistral AI's announcements, as quoted",
    **LLAMA_BLOCK,
    **{"kv_heads": 8, "rotary_base": 1_000_000.0, "seq_len": 4096, "vocab_size": 32000},
    **{"experts": 8, "experts_per_token": 2},
)
_on_cpu = partial(
    _size, "this suite: trains on a CPU; named by 12 L h^2, with 64 hidden units a head as in GPT-2", None
)
_ON_CPU = {"0.5m": (2, 128, 2, 128), "2m": (4, 192, 3, 128), "8m": (6, 320, 5, 256), "25m": (8, 512, 8, 256)}


def _two_thirds(hidden: int) -> int:
    """Return the width at which a gated MLP has about the weights of one of 4 h: 8 h / 3, a multiple of 32."""
    return -(-8 * hidden // 96) * 32


SIZES: dict[str, Size] = {
    **{
        f"{family}-{name}": _on_cpu(*shape, family=family, seq_len=seq_len)
        for family in ("gpt", "bert")
        for name, (*shape, seq_len) in _ON_CPU.items()
    },
    **{
        f"llama-{name}": _on_cpu(layers, hidden, heads, **LLAMA_BLOCK, mlp_size=_two_thirds(hidden), seq_len=seq_len)
        for name, (layers, hidden, heads, seq_len) in _ON_CPU.items()
    },
    "gpt-355m": _megatron("355M", 24, 1024, 16, where="table 2"),
    "gpt-1.2b": _megatron("1.2B", 40, 1536, 16, where="table 1"),
    "gpt-2.5b": _megatron("2.5B", 54, 1920, 20, where="tables 1 and 2"),
    "gpt-4.2b": _megatron("4.2B", 64, 2304, 24, where="table 1"),
    # the scaling study of table 1 has 32 heads, the model trained to convergence 24
    "gpt-8b": _megatron("8.3B", 72, 3072, 32, where="table 1 (32 heads; table 2 has 24)"),
    "gpt-8.3b": _megatron("8.3B", 72, 3072, 24, where="table 2 (24 heads; table 1 has 32)"),
    "bert-336m": _megatron_bert("336M", 24, 1024, 16),
    "bert-1.3b": _megatron_bert("1.3B", 24, 2048, 32),
    "bert-3.9b": _megatron_bert("3.9B", 48, 2560, 40),
    "ptdp-1.7b": _ptdp("1.7B", 24, 2304, 24),
    "ptdp-3.6b": _ptdp("3.6B", 30, 3072, 32),
    "ptdp-7.5b": _ptdp("7.5B", 36, 4096, 32),
    "ptdp-18.4b": _ptdp("18.4B", 40, 6144, 48),
    "ptdp-39.1b": _ptdp("39.1B", 48, 8192, 64),
    "ptdp-76.1b": _ptdp("76.1B", 60, 10240, 80),
    "ptdp-145.6b": _ptdp("145.6B", 80, 12288, 96),
    "ptdp-310.1b": _ptdp("310.1B", 96, 16384, 128),
    "ptdp-529.6b": _ptdp("529.6B", 105, 20480, 128),
    "ptdp-1t": _ptdp("1008.0B", 128, 25600, 160),
    "gpt-175b": _size(
        "GPT-3, Brown et al. 2020 (2005.14165), table 2.1; vocabulary: GPT-2's; dropout not stated",
        *("175.0B", 96, 12288, 96),
        seq_len=2048,
        vocab_size=50257,
    ),
    "opt-175b": _size(
        "OPT, Zhang et al. 2022 (2205.01068), from memory",
        *("175B", 96, 12288, 96),
        **{"seq_len": 2048, "vocab_size": 50272, "mlp": "relu", "dropout": 0.1},
    ),
    "gpt-neox-20b": _size(
        "GPT-NeoX-20B, Black et al. 2022 (2204.06745); shape: configs/20B.yml of the authors' code; padded vocabulary: "
        "its model card",
        *("20.554567680B", 44, 6144, 64),
        **{"seq_len": 2048, "vocab_size": 50432, "tied": False, "parallel_residual": True},
        **{"positions": "rotary", "rotary_fraction": 0.25},
    ),
    "korthikanti-22b": _korthikanti("22B", 48, 6144, 64),
    "korthikanti-175b": _korthikanti("175B", 96, 12288, 96),
    "korthikanti-530b": _korthikanti("530B", 105, 20480, 128),
    "korthikanti-1t": _korthikanti("1T", 128, 25600, 160),
    "llama-2-7b": _llama2("7B", 32, 4096, 32, mlp_size=11008),
    "llama-2-13b": _llama2("13B", 40, 5120, 40, mlp_size=13824),
    "llama-2-70b": _llama2("70B", 80, 8192, 64, mlp_size=28672, kv_heads=8),
    "llama-3.1-8b": _llama3("8B", 32, 4096, 32, mlp_size=14336),
    "llama-3.1-70b": _llama3("70B", 80, 8192, 64, mlp_size=28672),
    "llama-3.1-405b": _llama3("405B", 126, 16384, 128, mlp_size=53248),
    "mixtral-8x7b": _mixtral("46.7B", 32, 4096, 32, mlp_size=14336),
    "mixtral-8x22b": _mixtral("141B", 56, 6144, 48, mlp_size=16384),
    "nemotron-15b": _nemotron("15B", 32, 6144, 48, where="Nemotron-4 15B, 2024 (2402.16819), table 1"),
    "nemotron-340b": _nemotron("340B", 96, 18432, 96, where="Nemotron-4 340B, 2024 (2406.11704), table 1"),
    # table I has hidden size 2114, which 24 heads do not divide
    "frontier-1.4b": _frontier("1.4B", 24, 2112, 24, where="from memory, with hidden size 2112 from the authors' code"),
    "frontier-22b": _frontier("22B", 48, 6144, 48, where="and the authors' launch script"),
    "frontier-175b": _frontier("175B", 96, 12288, 96, where="and the authors' launch script"),
    "frontier-1t": _frontier("1T", 128, 25600, 128, where="and the authors' launch script of July 2023"),
}
SIZES |= {f"llama-{size}": SIZES[f"llama-3.1-{size}"] for size in ("8b", "70b", "405b")}
