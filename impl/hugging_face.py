"""Configurations and weights of some models as transformers stores them, and ours: a table of names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from impl.cost.parameters import named_parameters
from impl.errors import InputError
from impl.model.config import MLPKind, ModelConfig

Kind = Literal["gpt2", "gpt_neox", "bert", "llama"]
Config = Mapping[str, Any]
Names = Mapping[str, tuple[str, ...]]
ACTIVATIONS: dict[str, MLPKind] = {
    **{"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf", "relu": "relu", "relu2": "squared_relu"},
    **{"gelu_fast": "gelu", "silu": "swiglu"},
}
"""Names of activations there and here; a Llama's is gated."""


@dataclass(frozen=True, kw_only=True)
class _Names:
    """Names of an architecture; several names are parts of one of our tensors, one after another."""

    layers: str
    """Prefix of the names of a layer's tensors, with the layer's index."""
    layer: Names
    """Names there of a layer's modules, by ours."""
    ends: Names
    """Names there of the tensors outside the layers, by ours."""
    body: str
    """Prefix that tensors outside the heads may have."""
    architecture: str
    transposed: tuple[str, ...] = ()
    """Modules whose matrices are stored with inputs before outputs."""
    by_head: tuple[str, ...] = ()
    """Modules whose queries, keys and values stand together for each head."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Names there, of fields of `ModelConfig` that have the same values."""


SIZES = {
    **{"num_hidden_layers": "num_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_heads"},
    **{"intermediate_size": "mlp_size", "max_position_embeddings": "seq_len", "vocab_size": "vocab_size"},
}
"""Names of sizes that all architectures but GPT-2 share."""
TABLE: dict[Kind, _Names] = {
    "gpt2": _Names(
        architecture="GPT2LMHeadModel",
        body="transformer.",
        layers="h.{}.",
        layer={
            **{"attention_norms.input": ("ln_1",), "attention.qkv": ("attn.c_attn",)},
            **{"attention.projection": ("attn.c_proj",), "mlp_norms.input": ("ln_2",)},
            **{"mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",)},
        },
        transposed=("attention.qkv", "attention.projection", "mlp.up", "mlp.down"),
        ends={
            **{"trunk.tokens.weight": ("wte.weight",), "trunk.positions.weight": ("wpe.weight",)},
            **{f"trunk.final_norm.{part}": (f"ln_f.{part}",) for part in ("weight", "bias")},
        },
        fields={
            **{"n_layer": "num_layers", "n_embd": "hidden_size", "n_head": "num_heads", "n_inner": "mlp_size"},
            **{"n_positions": "seq_len", "vocab_size": "vocab_size", "layer_norm_epsilon": "norm_epsilon"},
        },
    ),
    "gpt_neox": _Names(
        architecture="GPTNeoXForCausalLM",
        body="gpt_neox.",
        layers="layers.{}.",
        layer={
            **{"attention_norms.input": ("input_layernorm",), "mlp_norms.input": ("post_attention_layernorm",)},
            **{"attention.qkv": ("attention.query_key_value",), "attention.projection": ("attention.dense",)},
            **{"mlp.up": ("mlp.dense_h_to_4h",), "mlp.down": ("mlp.dense_4h_to_h",)},
        },
        by_head=("attention.qkv",),
        ends={
            **{"trunk.tokens.weight": ("embed_in.weight",), "trunk.output.weight": ("embed_out.weight",)},
            **{f"trunk.final_norm.{part}": (f"final_layer_norm.{part}",) for part in ("weight", "bias")},
        },
        fields={**SIZES, "layer_norm_eps": "norm_epsilon", "use_parallel_residual": "parallel_residual"},
    ),
    "llama": _Names(
        architecture="LlamaForCausalLM",
        body="model.",
        layers="layers.{}.",
        layer={
            **{"attention_norms.input": ("input_layernorm",), "mlp_norms.input": ("post_attention_layernorm",)},
            "attention.qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"),
            **{"attention.projection": ("self_attn.o_proj",), "mlp.up": ("mlp.gate_proj", "mlp.up_proj")},
            "mlp.down": ("mlp.down_proj",),
        },
        ends={
            **{"trunk.tokens.weight": ("embed_tokens.weight",), "trunk.final_norm.weight": ("norm.weight",)},
            "trunk.output.weight": ("lm_head.weight",),
        },
        fields={**SIZES, "num_key_value_heads": "kv_heads", "rms_norm_eps": "norm_epsilon"},
    ),
    "bert": _Names(
        architecture="BertForPreTraining",
        body="bert.",
        layers="encoder.layer.{}.",
        layer={
            "attention.qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
            **{"attention.projection": ("attention.output.dense",), "mlp.up": ("intermediate.dense",)},
            **{"attention_norms.sum": ("attention.output.LayerNorm",), "mlp_norms.sum": ("output.LayerNorm",)},
            "mlp.down": ("output.dense",),
        },
        ends={
            "trunk.tokens.weight": ("embeddings.word_embeddings.weight",),
            "trunk.positions.weight": ("embeddings.position_embeddings.weight",),
            "trunk.token_types.weight": ("embeddings.token_type_embeddings.weight",),
            **{f"trunk.embedding_norm.{part}": (f"embeddings.LayerNorm.{part}",) for part in ("weight", "bias")},
            "token_bias": ("cls.predictions.bias",),
            **{
                f"{ours}.{part}": (f"{theirs}.{part}",)
                for ours, theirs in {
                    **{"token_dense": "cls.predictions.transform.dense", "pooler": "pooler.dense"},
                    **{"token_norm": "cls.predictions.transform.LayerNorm", "next_sentence": "cls.seq_relationship"},
                }.items()
                for part in ("weight", "bias")
            },
        },
        fields={**SIZES, "layer_norm_eps": "norm_epsilon"},
    ),
}
BLOCKS: dict[Kind, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {"positions": "rotary", "parallel_residual": True},
    "llama": {"norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu", "norm_epsilon": 1e-6},
    "bert": {"family": "bert", "norm_placement": "post", "norm_epsilon": 1e-12},
}
"""Fields of `ModelConfig` that an architecture fixes, or has where `config.json` does not say them."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Entries that `ModelConfig.rotary_scaling` has, in its order."""
FIXED: dict[Kind, dict[str, Any]] = {
    "gpt2": {
        **{"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        "tie_word_embeddings": True,
    },
    "gpt_neox": {"attention_bias": True, "is_decoder": False},
    "llama": {"mlp_bias": False, "pretraining_tp": 1, "attention_bias": False},
    "bert": {
        **{"type_vocab_size": 2, "position_embedding_type": "absolute", "is_decoder": False},
        "tie_word_embeddings": True,
    },
}
"""Entries that change what is computed, with the only values that are built here."""
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Ends of names of causal masks and angles, which older versions of transformers stored with a layer's weights."""


def config_from(theirs: Config) -> ModelConfig:
    """Return our configuration of a model that transformers describes by `config.json`.

    Raises:
        InputError: names the entry that is not built here, and what would be valid.
    """
    kind = theirs.get("model_type")
    if kind not in TABLE:
        raise InputError(f"config.json: model_type {kind!r:.40} is not known; valid: {', '.join(TABLE)}")
    if how := theirs.get("quantization_config"):
        raise InputError(
            f"config.json: quantization_config {how!r:.40} is not built; valid: weights of 16 bits or more"
        )
    for name, only in FIXED[kind].items():
        if (found := theirs.get(name, only)) not in (only, None):
            raise InputError(f"config.json: {name} {found!r:.40} is not built; valid: {only}")
    fields = {ours: theirs[name] for name, ours in TABLE[kind].fields.items() if theirs.get(name) is not None}
    activation = theirs.get("activation_function" if kind == "gpt2" else "hidden_act", "?")
    valid = [name for name, mlp in ACTIVATIONS.items() if (mlp == "swiglu") == (kind == "llama")]
    if activation not in valid:
        raise InputError(f"config.json: activation {activation!r:.40} is not built; valid: {', '.join(valid)}")
    more: dict[str, Any] = {"mlp": ACTIVATIONS[activation]}
    if kind in ("gpt_neox", "llama"):
        more |= _of_rotary(theirs, kind)
        more |= {"tied": theirs.get("tie_word_embeddings", False), "biases": kind == "gpt_neox"}
    return ModelConfig(**(BLOCKS[kind] | fields | more))


def _of_rotary(theirs: Config, kind: Kind) -> dict[str, Any]:
    rotary = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}  # in the order of transformers
    if (how := rotary.get("rope_type", rotary.get("type", "default"))) not in ("default", "llama3"):
        raise InputError(f"config.json: rope_type {how!r:.40} is not built; valid: default, llama3")
    size = theirs["hidden_size"] // theirs["num_attention_heads"]
    if (theirs.get("head_dim") or size) != size:
        raise InputError(f"config.json: head_dim {theirs['head_dim']!r:.40} is not built; valid: {size}")
    base = theirs.get("rope_theta", theirs.get("rotary_emb_base", 10_000.0))
    usual = theirs.get("rotary_pct", 0.25) if kind == "gpt_neox" else 1.0
    fraction = rotary.get("partial_rotary_factor", usual)
    if kind == "llama" and fraction != 1.0:
        raise InputError(f"config.json: partial_rotary_factor {fraction!r:.40} is not a Llama's; valid: 1.0")
    return {
        "rotary_base": rotary.get("rope_theta", base),
        "rotary_fraction": fraction,
        "rotary_scaling": tuple(rotary[name] for name in SCALING) if how == "llama3" else None,
    }


def config_to(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the `config.json` of one of our models.

    Raises:
        InputError: no architecture of transformers that is known here is this model.
    """
    for kind, names in TABLE.items():
        theirs = {name: getattr(config, ours) for name, ours in names.fields.items()} | {"vocab_size": vocab_size}
        activation = next(name for name, ours in ACTIVATIONS.items() if ours == config.mlp)
        theirs |= {"activation_function" if kind == "gpt2" else "hidden_act": activation}
        theirs |= FIXED[kind] | {"model_type": kind, "architectures": [names.architecture]}
        theirs |= {"n_inner" if kind == "gpt2" else "intermediate_size": config.mlp_inner}
        if kind == "llama":
            theirs |= {"num_key_value_heads": config.groups, "head_dim": config.head_size}
        if kind in ("gpt_neox", "llama"):
            rotary = {"rope_theta": config.rotary_base, "partial_rotary_factor": config.rotary_fraction}
            scaled = dict(zip(SCALING, config.rotary_scaling or (), strict=False))
            theirs |= {"rope_theta": config.rotary_base, "tie_word_embeddings": config.tied}
            theirs |= {"rope_parameters": {"rope_type": "llama3" if scaled else "default", **rotary, **scaled}}
        try:
            back = config_from(theirs)
        except InputError:
            continue
        if _plain(back, vocab_size) == _plain(config, vocab_size):
            return theirs
    valid = "GPT-2 (pre), GPT-NeoX, BERT (post) and Llama, each with its own block"
    raise InputError(f"transformers has no architecture known here for this model; valid: {valid}")


def _plain(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the settings that fix the computation, with defaults filled in."""
    filled = {"vocab_size": vocab_size, "kv_heads": config.groups, "mlp_size": config.mlp_inner}
    left_out = {"dropout": 0.0, "attention_dropout": None, "init_std": 0.0}
    if config.positions != "rotary":
        left_out |= dict.fromkeys(("rotary_base", "rotary_fraction", "rotary_scaling"))
    return vars(config) | filled | left_out


class _Pair(NamedTuple):
    """One of our tensors and the names of its parts there."""

    ours: str
    theirs: tuple[str, ...]
    is_transposed: bool
    is_head: bool
    is_by_head: bool = False


def _pairs(kind: Kind, config: ModelConfig, vocab_size: int) -> Iterator[_Pair]:
    names = TABLE[kind]
    for parameter in named_parameters(config, vocab_size, 1):
        ours = parameter.name
        if not ours.startswith("trunk.layers."):
            is_head = any(name.startswith(("cls.", "lm_head.", "embed_out.", "pooler.")) for name in names.ends[ours])
            yield _Pair(ours, names.ends[ours], False, is_head)
            continue
        _, _, index, module = ours.split(".", 3)
        module, _, part = module.rpartition(".")
        theirs = tuple(f"{names.layers.format(index)}{one}.{part}" for one in names.layer[module])
        yield _Pair(ours, theirs, part == "weight" and module in names.transposed, False, module in names.by_head)


def weights_from(theirs: Mapping[str, Tensor], config: ModelConfig, kind: Kind) -> dict[str, Tensor]:
    """Return our whole tensors, in fp32 at least, from those of transformers; heads that are not there are left out.

    The rows of BERT's next-sentence classifier are swapped: there the first is for a sentence that follows.

    Raises:
        InputError: a tensor is missing, of another shape, or quantised, or a layer has one that `config` does not have.
    """
    found: dict[str, Tensor] = {}
    body = TABLE[kind].body
    now = lambda name: name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    own = {now(name.removeprefix(body)): tensor for name, tensor in theirs.items()}  # older BERTs have Google's names
    shapes = {p.name: p.shape for p in named_parameters(config, config.vocab_size, 1)}
    pairs = list(_pairs(kind, config, config.vocab_size or 0))
    of_layers, used = TABLE[kind].layers.partition("{")[0], {name for pair in pairs for name in pair.theirs}
    if more := [n for n in own if n.startswith(of_layers) and n not in used and not n.endswith(CONSTANTS)]:
        raise InputError(f"the checkpoint's {body}{min(more)} has no place in the model of config.json")
    for pair in pairs:
        if missing := [name for name in pair.theirs if name not in own]:
            if pair.is_head and pair.ours != "trunk.output.weight":
                continue
            raise InputError(f"the checkpoint has no tensor {body}{missing[0]}")
        if odd := [name for name in pair.theirs if own[name].dtype not in FLOATS]:
            raise InputError(f"the checkpoint's {body}{odd[0]} is of {own[odd[0]].dtype}; valid: 16 bits or more")
        parts = [own[name].t() if pair.is_transposed else own[name] for name in pair.theirs]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if pair.ours.startswith("next_sentence."):
            whole = whole.flip(0)
        if pair.is_by_head:
            whole = whole.unflatten(0, (config.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        rows = config.vocab_size if pair.ours in ("trunk.tokens.weight", "trunk.output.weight", "token_bias") else None
        expected = (rows, *shapes[pair.ours][1:]) if rows else shapes[pair.ours]
        if tuple(whole.shape) != tuple(expected):
            what = f"{body}{pair.theirs[0]} is {list(own[pair.theirs[0]].shape)}"
            raise InputError(f"the checkpoint's {what}, which does not give {list(expected)} of config.json")
        found[pair.ours] = (whole if whole.element_size() >= 4 else whole.float()).contiguous()
    return found


def weights_to(ours: Mapping[str, Tensor], config: ModelConfig, vocab_size: int, kind: Kind) -> dict[str, Tensor]:
    """Return the tensors of transformers from our whole tensors: the inverse of `weights_from`.

    Raises:
        InputError: there is a head of another task.
    """
    found: dict[str, Tensor] = {}
    sizes = {"attention.qkv": config.qkv_sizes, "mlp.up": config.mlp_outputs}
    body, pairs = TABLE[kind].body, list(_pairs(kind, config, vocab_size))
    if others := ours.keys() - {pair.ours for pair in pairs}:
        raise InputError(f"{TABLE[kind].architecture} has no place for {min(others)}; valid: its own heads alone")
    for pair in pairs:
        if pair.is_head and pair.ours not in ours:
            continue
        whole = ours[pair.ours].flip(0) if pair.ours.startswith("next_sentence.") else ours[pair.ours]
        if pair.is_by_head:
            whole = whole.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1).flatten(0, 2)
        parts = [whole]
        if len(pair.theirs) > 1:
            parts = list(whole.split(next(size for module, size in sizes.items() if module in pair.ours)))
        for name, part in zip(pair.theirs, parts, strict=True):
            prefix = "" if name.startswith(("cls.", "lm_head.", "embed_out.")) else body
            found[f"{prefix}{name}"] = (part.t() if pair.is_transposed else part).contiguous()
    return found
