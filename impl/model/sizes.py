"""Named model shapes: the papers' and a family that trains on a CPU, each with its source."""

import difflib
from dataclasses import dataclass
from typing import Any, Literal

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


def _paper(source: str, published: str, family: Literal["gpt", "bert"], *shape: int, **fields: Any) -> Size:
    layers, hidden, heads = shape
    config = ModelConfig(family=family, num_layers=layers, hidden_size=hidden, num_heads=heads, **fields)
    return Size(config=config, source=source, published=published)


def _megatron(table: str, published: str, *shape: int) -> Size:
    source = f"Megatron-LM, Shoeybi et al. 2019 (1909.08053), {table}; sequence, dropout: section 4.2; vocabulary: 5.1"
    return _paper(source, published, "gpt", *shape, seq_len=1024, vocab_size=51200, dropout=0.1)


def _megatron_bert(published: str, *shape: int) -> Size:
    source = (
        "Megatron-LM, Shoeybi et al. 2019 (1909.08053), table 4; vocabulary, dropout: section 4.2; "
        "sequence: Devlin et al. 2019 (1810.04805), which it follows"
    )
    return _paper(source, published, "bert", *shape, seq_len=512, vocab_size=30522, dropout=0.1)


def _ptdp(published: str, *shape: int) -> Size:
    source = "PTD-P, Narayanan et al. 2021 (2104.04473), table 1; sequence, vocabulary: section 5; dropout not stated"
    return _paper(source, published, "gpt", *shape, seq_len=2048, vocab_size=51200)


def _korthikanti(published: str, *shape: int) -> Size:
    source = (
        "Korthikanti et al. 2022 (2205.05198), table 3; sequence, vocabulary: section 6; "
        "dropout 0.1 assumed, whose masks its memory formulas count"
    )
    return _paper(source, published, "gpt", *shape, seq_len=2048, vocab_size=51200, dropout=0.1)


def _frontier(shape_from: str, published: str, *shape: int) -> Size:
    source = (
        f"Frontier, Dash et al. 2023 (2312.12705), table I, {shape_from}; "
        "vocabulary not stated, Megatron's 51200 assumed; dropout not stated"
    )
    return _paper(source, published, "gpt", *shape, seq_len=2048, vocab_size=51200)


def _cpu_family(family: Literal["gpt", "bert"]) -> dict[str, Size]:
    shapes = {"0.5m": (2, 128, 2, 128), "2m": (4, 192, 3, 128), "8m": (6, 320, 5, 256), "25m": (8, 512, 8, 256)}
    return {
        f"{family}-{name}": Size(
            config=ModelConfig(family=family, num_layers=L, hidden_size=h, num_heads=a, seq_len=s),
            source="this suite: trains on a CPU; named by 12 L h^2, with 64 hidden units a head as in GPT-2",
        )
        for name, (L, h, a, s) in shapes.items()
    }


SIZES: dict[str, Size] = {
    **_cpu_family("gpt"),
    **_cpu_family("bert"),
    "gpt-355m": _megatron("table 2", "355M", 24, 1024, 16),
    "gpt-1.2b": _megatron("table 1", "1.2B", 40, 1536, 16),
    "gpt-2.5b": _megatron("tables 1 and 2", "2.5B", 54, 1920, 20),
    "gpt-4.2b": _megatron("table 1", "4.2B", 64, 2304, 24),
    # the scaling study of table 1 has 32 heads, the model trained to convergence 24
    "gpt-8b": _megatron("table 1 (32 heads; table 2 has 24)", "8.3B", 72, 3072, 32),
    "gpt-8.3b": _megatron("table 2 (24 heads; table 1 has 32)", "8.3B", 72, 3072, 24),
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
    "gpt-175b": _paper(
        "GPT-3, Brown et al. 2020 (2005.14165), table 2.1; vocabulary: GPT-2's; dropout not stated",
        "175.0B",
        "gpt",
        *(96, 12288, 96),
        seq_len=2048,
        vocab_size=50257,
    ),
    "korthikanti-22b": _korthikanti("22B", 48, 6144, 64),
    "korthikanti-175b": _korthikanti("175B", 96, 12288, 96),
    "korthikanti-530b": _korthikanti("530B", 105, 20480, 128),
    "korthikanti-1t": _korthikanti("1T", 128, 25600, 160),
    # table I has hidden size 2114, which 24 heads do not divide
    "frontier-1.4b": _frontier("from memory, with hidden size 2112 from the authors' code", "1.4B", 24, 2112, 24),
    "frontier-22b": _frontier("and the authors' launch script", "22B", 48, 6144, 48),
    "frontier-175b": _frontier("and the authors' launch script", "175B", 96, 12288, 96),
    "frontier-1t": _frontier("and the authors' launch script of July 2023", "1T", 128, 25600, 128),
}
