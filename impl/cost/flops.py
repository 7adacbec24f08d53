"""Floating-point operations of one training step, under named conventions.

A multiplication and an addition are two operations; the backward pass costs twice the forward pass. N counts the
parameters that a token is multiplied by: those of the layers' four matrices, 12 L h^2 of a GPT, and V h of the output
head. It leaves out embedding look-ups, positions, biases and norms. Model FLOPs (for MFU) need no recomputation;
hardware FLOPs (for HFU) add the forward work that activation recomputation does again.
"""

from impl.cost.parameters import resolve_vocab
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.plan import Recompute

MODEL_FLOPS = ("palm_12", "causal_6", "ptdp")
"""Names of the conventions.

palm_12: 6 N + 12 L h s a token: every token attends to the whole sequence. Source: PaLM, Chowdhery et al. 2022
(2204.02311), appendix B.
causal_6: 6 N + 6 L h s a token: a token attends to itself and those before it, half the sequence on average.
ptdp: 72 B s L h^2 (1 + s/6h + V/12Lh) a step of a GPT: palm_12 with the output head on every position; BERT's other
heads and masked positions do not enter. Source: PTD-P (2104.04473), equation 3, without its factor 4/3 of
recomputation; so in Korthikanti et al. 2022.
"""


def model_flops(
    convention: str,
    config: ModelConfig,
    sequences: int,
    vocab_size: int | None = None,
    head_positions: float | None = None,
) -> float:
    """Return the FLOPs that one step needs.

    Args:
        convention: name in `MODEL_FLOPS`.
        sequences: global batch of the step.
        vocab_size: where the configuration leaves it to the data.
        head_positions: positions of a sequence that the output head is applied to (BERT: the masked ones, on average);
            None: all.

    Raises:
        InputError: the convention does not exist, or does not fit the model's family.
    """
    if convention not in MODEL_FLOPS:
        raise InputError(f"FLOP convention {convention!r} does not exist; valid: {', '.join(MODEL_FLOPS)}")
    if convention == "causal_6" and config.family != "gpt":
        raise InputError(f"FLOP convention causal_6 does not fit model.family {config.family}; valid: palm_12, ptdp")
    h, s = config.hidden_size, config.seq_len
    positions = s if head_positions is None or convention == "ptdp" else head_positions
    if not 0 <= positions <= s:
        raise InputError(f"head_positions {positions} is not a count of positions; valid: 0 to {s}")
    head = resolve_vocab(config, vocab_size) * h * positions
    if config.family == "bert" and convention != "ptdp":
        # the MLM transform on the same positions; pooler and next-sentence classifier on the first
        head += h * h * positions + h * h + 2 * h
    return _layers(config, sequences) + 6 * sequences * head + _attention(convention, config, sequences)


def hardware_flops(
    convention: str,
    config: ModelConfig,
    sequences: int,
    vocab_size: int | None = None,
    head_positions: float | None = None,
    *,
    recompute: Recompute,
) -> float:
    """Return the FLOPs that one step carries out: the model's, and the forward passes of what is recomputed.

    `full` under `ptdp` is PTD-P's equation 3, 96 B s L h^2 (1 + s/6h + V/16Lh). `selective` adds 4 B L s^2 h, for an
    attention total of 16 (2s/9h inside the brackets), where Korthikanti et al. 2022 print 24 (s/3h): Megatron-LM#523.
    Arguments as in `model_flops`.

    Raises:
        InputError: the convention or `recompute` does not exist.
    """
    total = model_flops(convention, config, sequences, vocab_size, head_positions)
    attention = _attention(convention, config, sequences) // 3
    again = {"none": 0, "selective": attention, "full": attention + _layers(config, sequences) // 3}
    if recompute not in again:
        raise InputError(f"recompute {recompute!r} does not exist; valid: {', '.join(again)}")
    return total + again[recompute]


def _layers(config: ModelConfig, sequences: int) -> int:
    """Return the FLOPs of the layers' matrices, of experts those that tokens meet."""
    return 6 * sequences * config.seq_len * config.active_weights


def _attention(convention: str, config: ModelConfig, sequences: int) -> int:
    """Return the FLOPs of attention's products of queries with keys and of probabilities with values."""
    each = 6 if convention == "causal_6" else 12
    return each * sequences * config.seq_len**2 * config.num_layers * config.hidden_size
