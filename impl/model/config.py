"""The shape of a transformer."""

from typing import Literal

from pydantic import PositiveFloat, field_validator, model_validator
from pydantic.dataclasses import dataclass

from impl.fields import CHECKED, AtLeastTwo, Depth, Fraction, Positive
from impl.model.norm_placement import PLACEMENTS, NormPlacement

SPECIAL_TOKENS = {"gpt": 0, "bert": 3}
"""Tokens a family adds to the tokenizer's, with the ids after them: BERT's [CLS], [SEP] and [MASK]."""
VOCABULARY_MULTIPLE = 128
"""Rows of a rank's embedding come in multiples of this, for fast matrix products (Megatron-LM 2019, section 4.2)."""

NormKind = Literal["layernorm", "rmsnorm", "dyt"]

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
    """Positions the model has, and tokens in a training sequence."""
    vocab_size: AtLeastTwo | None = None
    """None: the tokenizer's, plus BERT's three special tokens."""
    norm_placement: str = "pre"
    """Where norms stand: a name in `impl.model.norm_placement`."""
    norm: NormKind = "layernorm"
    """Which function they are: LayerNorm, RMSNorm, or the element-wise dynamic tanh."""
    dropout: Fraction = 0.0
    init_std: PositiveFloat = 0.02

    @field_validator("norm_placement")
    @classmethod
    def _known_placement(cls, value: str) -> str:
        if value not in PLACEMENTS:
            raise ValueError(f"{value!r} is not a norm placement; valid: {', '.join(PLACEMENTS)}")
        return value

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelConfig":
        if self.hidden_size % self.num_heads:
            valid = [a for a in range(1, 129) if self.hidden_size % a == 0]
            raise ValueError(
                f"num_heads {self.num_heads} does not divide hidden_size {self.hidden_size}; "
                f"valid: {', '.join(map(str, valid))}"
            )
        return self

    def vocabulary(self, tokenizer_size: int) -> int:
        """Return the rows of the token embedding: `vocab_size`, or what the tokenizer and the family need."""
        return self.vocab_size or tokenizer_size + SPECIAL_TOKENS[self.family]

    @property
    def norms(self) -> NormPlacement:
        return PLACEMENTS[self.norm_placement]


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """Return the embedding's rows over all tensor-parallel ranks: the vocabulary, up to the next multiple of 128 t.

    Source: Megatron-LM 2019, section 4.2: 50,257 tokens become 51,200 for up to 8 ranks.
    """
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple
