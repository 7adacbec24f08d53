"""The shape of a transformer."""

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, field_validator, model_validator
from pydantic.dataclasses import dataclass

from impl.fields import CHECKED, AtLeastTwo, Count, Depth, Fraction, Positive, PositiveFraction, divisors
from impl.model.norm_placement import PLACEMENTS, NormPlacement, placement

SPECIAL_TOKENS = {"gpt": 0, "bert": 3}
"""Tokens a family adds to the tokenizer's, with the ids after them: BERT's [CLS], [SEP] and [MASK]."""
VOCABULARY_MULTIPLE = 128
"""Rows of a rank's embedding come in multiples of this, for fast matrix products (Megatron-LM 2019, section 4.2)."""

NormKind = Literal["layernorm", "rmsnorm", "dyt"]
MLPKind = Literal["gelu", "gelu_erf", "relu", "squared_relu", "swiglu"]

MASK_BLOCKS = 8
"""Blocks in which a dropout mask is drawn, each from a seed of its own."""
LONGEST_PRODUCTS = 512
"""Tokens of a sequence beyond which fused attention's own backward pass is as fast as one by matrix products."""
PRODUCT_ROWS = 256
"""Queries whose probabilities that one has at a time; with a causal mask the keys behind them are left out."""
GELU_CHUNK = 2**16
"""Elements that a CPU takes at a time: in fp32 they stay in a core's cache."""
LOSS_CHUNK = {"cpu": 2**18, "cuda": 2**26}
"""Logits that are turned to fp32 at a time: as many as stay in a core's cache, or keep a GPU busy."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class ModelConfig:
    """Everything that fixes a model's parameters, except the vocabulary when the data decides it.

    Raises:
        pydantic.ValidationError: names the field, the value and what would be valid.
    """

    family: Literal["gpt", "bert"] = "gpt"
    num_layers: Depth = 2
    hidden_size: Positive = 128
    num_heads: Positive = 2
    seq_len: AtLeastTwo = 128
    """Positions of the model, and tokens in a training sequence."""
    vocab_size: AtLeastTwo | None = None
    """Size of the vocabulary; None: the tokenizer's, plus BERT's three special tokens."""
    norm_placement: str = "pre"
    """Where norms stand: a packaged placement by name, or one's own code, `FILE.py:name` (`impl.own_code`)."""
    norm: NormKind = "layernorm"
    """Kind of norm: LayerNorm, RMSNorm, or the element-wise dynamic tanh."""
    norm_epsilon: PositiveFloat = 1e-5
    """Epsilon that norms add to the variance."""
    kv_heads: Positive | None = None
    """Heads of keys and values (grouped-query attention); None: as many as query heads."""
    positions: Literal["learned", "rotary"] = "learned"
    rotary_base: PositiveFloat = 10_000.0
    """Base of the angles of rotary positions."""
    rotary_fraction: PositiveFraction = 1.0
    """Share of a head's features, from the first on, that rotary positions turn."""
    rotary_scaling: tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat] | None = None
    """Llama 3.1's factor, low and high frequency factor, and original length (`impl.model.rotary.rates`)."""
    parallel_residual: bool = False
    """Whether attention and MLP both take the layer's input, and both outputs are added to it."""
    mlp: MLPKind = "gelu"
    """Activation function of MLPs; gelu is its tanh approximation, gelu_erf its exact form."""
    mlp_size: Positive | None = None
    """Inner width of an MLP; None: four times the hidden size."""
    biases: bool = True
    """Whether the linear layers have biases."""
    tied: bool = True
    """Whether the output head's matrix is the token embedding's."""
    experts: Count = 0
    """Experts of a layer in place of its MLP, to some of which each token is sent (`impl.model.experts`); 0: none."""
    experts_every: Depth = 1
    """Layers whose number, from 1, is a multiple of this have experts."""
    expert_prototypes: Positive = 1
    """Equal groups of a layer's experts, each of which routes every token (M6-T 2021, k top-1)."""
    experts_per_token: Positive = 1
    """Experts of each prototype that a token is sent to: those with the highest probabilities."""
    expert_size: Positive | None = None
    """Inner width of an expert; None: that of an MLP."""
    shared_expert_size: Count = 0
    """Inner width of a further expert that every token is sent to; 0: there is none."""
    expert_capacity: PositiveFloat | None = None
    """Most tokens of a sequence that an expert takes, over the mean; it drops later ones. None: no limit."""
    balance_loss: NonNegativeFloat = 0.0
    """Coefficient of the loss that grows with the imbalance of each sequence's tokens over the experts."""
    balance_bias: NonNegativeFloat = 0.0
    """Change in a step of what is added to an expert's probability when experts are chosen, against the imbalance of
    the global batch; it changes no weight of an expert's output."""
    shared_layers: bool = False
    """Whether all layers share the first one's weights (ALBERT 2019, 1909.11942; M6-10T 2021, 2110.03888, "pseudo")."""
    dropout: Fraction = 0.0
    attention_dropout: Fraction | None = None
    """Dropout of attention's probabilities, which are then kept for the backward pass; None: `dropout`."""
    init_std: PositiveFloat = 0.02

    @field_validator("norm_placement")
    @classmethod
    def _known_placement(cls, value: str) -> str:
        if value not in PLACEMENTS and ":" not in value:
            from impl.own_code import offered, unknown  # for few runs

            if value not in offered("placements"):
                what = f"{value!r} is not a norm placement"
                raise ValueError(unknown(what, value, "model.norm_placement", PLACEMENTS))
        return value

    @model_validator(mode="after")
    def _norms_fit(self) -> "ModelConfig":
        if self.norm_placement in PLACEMENTS:  # code of a user's own is judged by `Run.problems`, once it is trusted
            for problem in self.problems_of_norms():
                raise ValueError(problem)
        return self

    def problems_of_norms(self) -> Iterator[str]:
        """Yield what does not go with the norm placement.

        Raises:
            InputError: it is of a user's own, and not trusted, or cannot be loaded.
        """
        norms, what = self.norms, f"norm_placement {self.norm_placement} has a norm"
        if self.parallel_residual and (norms.attention.sum or norms.mlp.sum):
            what += " of the sum after each block"
            yield f"parallel_residual adds both blocks to one input, {what}; valid: placements without"
        if self.experts and norms.mlp.inner:
            yield f"{what} within MLPs, which is not built within experts; valid: placements without"

    @model_validator(mode="after")
    def _block_is_whole(self) -> "ModelConfig":
        if self.hidden_size % self.num_heads:
            valid = ", ".join(str(heads) for heads in divisors(self.hidden_size) if heads <= 128)
            what = f"num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}"
            raise ValueError(f"{what}; valid: {valid}")
        if self.num_heads % self.groups:
            valid = ", ".join(map(str, divisors(self.num_heads)))
            raise ValueError(f"kv_heads {self.groups} does not divide num_heads {self.num_heads}; valid: {valid}")
        if self.positions == "rotary" and (self.turned % 2 or not self.turned):
            what = f"rotary positions turn pairs of features, here {self.turned} of a head's {self.head_size}"
            raise ValueError(f"{what}; valid: even numbers")
        if self.rotary_scaling is not None and not self.rotary_scaling[1] < self.rotary_scaling[2]:
            raise ValueError(f"rotary_scaling {self.rotary_scaling}: the second number has to be below the third")
        if self.family == "bert" and self.mlp == "swiglu":
            raise ValueError(
                "mlp swiglu is not built for family bert, whose head has the MLP's function; valid: others"
            )
        if self.family == "bert" and not self.tied:
            raise ValueError("tied False is not built for family bert, whose head has the embedding's matrix")
        return self

    @model_validator(mode="after")
    def _experts_are_met(self) -> "ModelConfig":
        if not self.experts:
            needing = ("experts_every", "expert_prototypes", "experts_per_token", "expert_size", "shared_expert_size")
            needing += ("expert_capacity", "balance_loss", "balance_bias")
            given = [name for name in needing if getattr(self, name) != type(self).__dataclass_fields__[name].default]
            if given:
                raise ValueError(f"{given[0]} {getattr(self, given[0])} is about experts, of which there are none")
            return self
        if self.experts % self.expert_prototypes:
            valid = ", ".join(map(str, divisors(self.experts)))
            raise ValueError(
                f"expert_prototypes {self.expert_prototypes} is no divisor of {self.experts}; valid: {valid}"
            )
        if self.experts_per_token > (most := self.experts // self.expert_prototypes):
            raise ValueError(f"experts_per_token {self.experts_per_token} of {most} experts; valid: 1 to {most}")
        if self.shared_layers and self.experts_every > 1:
            what = f"experts_every {self.experts_every} gives layers weights of different kinds"
            raise ValueError(f"shared_layers gives all layers the same, {what}; valid: 1")
        if self.experts_every > self.num_layers:
            raise ValueError(f"experts_every {self.experts_every} of {self.num_layers} layers; valid: 1 to these")
        return self

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def turned(self) -> int:
        """Features of a head that rotary positions turn."""
        return int(self.head_size * self.rotary_fraction)

    @property
    def scores_dropout(self) -> float:
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.num_heads

    def groups_of(self, tp: int) -> int:
        """Return the heads of keys and values of each of `tp` ranks: one at least, which neighbours then share."""
        return max(1, self.groups // tp)

    def sharing(self, tp: int) -> int:
        """Return how many of `tp` ranks share a head of keys and values, of which each projects a part."""
        return max(1, tp // self.groups)

    def divides_groups(self, tp: int) -> bool:
        """Return True if each of `tp` ranks has as many whole heads of keys and values, or an equal part of one."""
        parts = self.sharing(tp)
        return self.groups_of(tp) * tp == self.groups * parts and self.head_size % parts == 0

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Features of queries, keys and values."""
        return self.hidden_size, self.groups * self.head_size, self.groups * self.head_size

    @property
    def mlp_inner(self) -> int:
        """Inner width of an MLP, f."""
        return self.mlp_size or 4 * self.hidden_size

    @property
    def mlp_outputs(self) -> tuple[int, ...]:
        """Features of the MLP's first product: f, or a gate's and another f."""
        return self.outputs_of(self.mlp_inner)

    def outputs_of(self, inner: int) -> tuple[int, ...]:
        """Return the output features of the first product of an MLP or an expert of this inner width."""
        return (inner,) * (2 if self.mlp == "swiglu" else 1)

    def own(self, layers: range) -> range:
        """Return which of these layers, from the first on, have weights of their own: one if all share them."""
        return layers[:1] if self.shared_layers else layers

    @property
    def layer_weights(self) -> int:
        """Weights of the four matrices of a layer without experts, by which each token is multiplied: 12 h^2 of GPT."""
        h = self.hidden_size
        return h * (sum(self.qkv_sizes) + h + sum(self.mlp_outputs) + self.mlp_inner)

    @property
    def active_weights(self) -> int:
        """Weights of all layers' matrices by which each token is multiplied, if no expert drops it."""
        if not self.experts:
            return self.num_layers * self.layer_weights
        each = len(self.mlp_outputs) + 1
        met = self.choices * self.expert_inner + self.shared_expert_size - self.mlp_inner
        return self.num_layers * self.layer_weights + self.expert_layers * self.hidden_size * (
            met * each + self.experts
        )

    def has_experts(self, layer: int) -> bool:
        """Return True if the layer with this number, from 0, has experts in place of an MLP."""
        return bool(self.experts) and (layer + 1) % self.experts_every == 0

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.num_layers // self.experts_every if self.experts else 0

    @property
    def choices(self) -> int:
        """Number of experts that a token is sent to in a layer."""
        return self.expert_prototypes * self.experts_per_token

    @property
    def expert_inner(self) -> int:
        """Inner width of an expert."""
        return self.expert_size or self.mlp_inner

    def vocabulary(self, tokenizer_size: int) -> int:
        """Return the rows of the token embedding: `vocab_size`, or what the tokenizer and the family need."""
        return self.vocab_size or tokenizer_size + SPECIAL_TOKENS[self.family]

    @property
    def norms(self) -> NormPlacement:
        return placement(self.norm_placement)


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """Return the embedding's rows over all tensor-parallel ranks: the vocabulary, up to the next multiple of 128 t.

    Source: Megatron-LM 2019, section 4.2: 50,257 tokens become 51,200 for up to 8 ranks.
    """
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple
