"""Configuration of a trained model's evaluations."""

from pydantic.dataclasses import dataclass

from impl.fields import CHECKED, Count


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class EvaluationConfig:
    """Evaluations to run: which, when, and by which rules."""

    every: Count = 0
    """Steps between validations; 0: only after the last step."""
    sequences: Count | None = 256
    """Sequences of every validation, the same ones each time; 0: all; None: no validation, for runs that measure
    speed."""
    overlap: Count = 0
    """Tokens of context that a sliding window keeps from the one before, unscored. Megatron-LM 2019, appendix E.1,
    moves its window on by 32 tokens: there the overlap is seq_len - 32."""
    texts: tuple[str, ...] = ()
    """Plain-text files for word perplexity, in WikiText's form."""
    lambada: str | None = None
    """A .jsonl file of passages whose last word is to be predicted."""
    dimensions: bool = False
    """With every validation, record how large each dimension of the layers' outputs is, and after the last step the
    loss without the dimension that stands out most."""
