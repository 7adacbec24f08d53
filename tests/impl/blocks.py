"""Blocks of a model that are not GPT-2's, in small."""

from dataclasses import replace

from impl.model.config import ModelConfig

LLAMA = ModelConfig(
    num_layers=3, hidden_size=32, num_heads=8, kv_heads=4, seq_len=16, positions="rotary", mlp="swiglu", mlp_size=88,
    biases=False, tied=False, norm="rmsnorm",
)  # fmt: skip
BLOCKS = {
    "llama": LLAMA,
    "grouped queries, dropout": replace(LLAMA, dropout=0.1, biases=True, tied=True, kv_heads=2),
    "nemotron": replace(
        LLAMA,
        mlp="squared_relu",
        norm="layernorm",
        mlp_size=None,
        norm_placement="sub",
        kv_heads=1,
        rotary_fraction=0.5,
    ),
    "opt": ModelConfig(num_layers=3, hidden_size=32, num_heads=4, seq_len=16, mlp="relu", dropout=0.1),
    "olmo 2": replace(LLAMA, norm_placement="olmo2", kv_heads=2, parallel_residual=True),
    "neox": replace(
        LLAMA,
        hidden_size=64,
        norm="layernorm",
        mlp="gelu",
        mlp_size=None,
        biases=True,
        kv_heads=None,
        dropout=0.1,
        parallel_residual=True,
        rotary_fraction=0.25,
    ),
    "rotary bert": replace(LLAMA, family="bert", norm="layernorm", norm_placement="post", mlp="gelu_erf", tied=True),
}
