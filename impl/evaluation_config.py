"""Configuration of a trained model's evaluations."""

from pydantic.dataclasses import dataclass

from impl.fields import CHECKED, Count


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class EvaluationConfig:
    """Which evaluations run, when, and by which rule."""

    every: Count = 0
    """Validation every so many steps; 0: only after the last one."""
    sequences: Count | None = 256
    """Validation sequences read each time, the same ones; 0: all, None: no validation, for runs that measure speed."""
    overlap: Count = 0
    """Tokens of context that a sliding window keeps from the one before, unscored. Megatron-LM 2019, appendix E.1,
    moves its window on by 32 tokens: there the overlap is seq_len - 32."""
    texts: tuple[str, ...] = ()
    """Plain-text files for word perplexity, in WikiText's form."""
    lambada: str | None = None
    """A .jsonl file of passages whose last word is to be predicted."""
    dimensions: bool = False
    """With every validation, how large each dimension is of what the layers hand on, and after the last step what the
    loss is without the one that stands out most."""
