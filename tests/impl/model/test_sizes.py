"""Named sizes: all there, sourced, and unknown names answered with what is valid."""

import pytest

from impl.errors import InputError
from impl.model.sizes import SIZES, named

NAMES = {
    "gpt": ["0.5m", "2m", "8m", "25m", "355m", "1.2b", "2.5b", "4.2b", "8b", "8.3b", "175b"],
    "bert": ["0.5m", "2m", "8m", "25m", "336m", "1.3b", "3.9b"],
    "ptdp": ["1.7b", "3.6b", "7.5b", "18.4b", "39.1b", "76.1b", "145.6b", "310.1b", "529.6b", "1t"],
    "gpt-neox": ["20b"],
    "korthikanti": ["22b", "175b", "530b", "1t"],
    "llama": [
        "0.5m", "2m", "8m", "25m", "2-7b", "2-13b", "2-70b", "3.1-8b", "3.1-70b", "3.1-405b", "8b", "70b", "405b",
    ],
    "opt": ["175b"],
    "mixtral": ["8x7b", "8x22b"],
    "nemotron": ["15b", "340b"],
    "frontier": ["1.4b", "22b", "175b", "1t"],
}  # fmt: skip


def test_every_size_is_there_with_its_source_and_papers_fix_the_vocabulary():
    assert set(SIZES) == {f"{kind}-{size}" for kind, sizes in NAMES.items() for size in sizes}
    for name, size in SIZES.items():
        assert size.config.family == ("bert" if name.startswith("bert-") else "gpt")
        assert size.source
        on_cpu = name.endswith("m") and name.split("-")[1] not in ("355m", "336m")
        assert (size.config.vocab_size is None) == on_cpu == (size.published is None)
        assert size.config.dropout == (
            0.1 if name.startswith(("korthikanti", "opt")) or size.source.startswith("Megatron") else 0.0
        )


def test_cpu_family_is_named_by_its_layers():
    for name in ("0.5m", "2m", "8m", "25m"):
        config = named(f"gpt-{name}")
        llama = named(f"llama-{name}")
        assert llama.layer_weights == pytest.approx(config.layer_weights, rel=0.05)
        assert config.num_layers * config.layer_weights == pytest.approx(float(name[:-1]) * 1e6, rel=0.25)
        assert config.hidden_size // config.num_heads == 64
        assert named(f"bert-{name}").hidden_size == config.hidden_size


@pytest.mark.parametrize(("name", "hint"), [("gpt-8.3", "gpt-8.3b"), ("ptdp-1tb", "ptdp-1t"), ("?", "frontier-22b")])
def test_unknown_name_lists_near_or_all_names(name: str, hint: str):
    with pytest.raises(InputError, match=hint) as caught:
        named(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
