"""Bytes of activations: what a microbatch's forward pass keeps for its backward pass on one rank, part by part.

Letters are those of Korthikanti et al. 2022: b sequences of s tokens, n = b s, hidden size h, a heads, t ranks that
share a layer; e is an element's size. Every number equals what `impl.instruments` counts on a CPU, to the byte. CUDA
differs slightly: norms keep statistics in fp32, and fused attention is taken to keep what flash attention does: q, k,
v, its result and a logarithm a row, which its fp64 fallback exceeds. What a compiled layer keeps is the compiler's
choice.
"""

from dataclasses import dataclass

from impl.cost.parameters import INDEX_BYTES
from impl.cost.place import Sizes
from impl.model.config import LONGEST_PRODUCTS, padded_vocabulary
from impl.pipeline.stage import Stage
from impl.run import Run

OFFLOADED = "offloaded_layers"
"""Key of `stage_bytes` for activations that wait in host memory."""


def stage_bytes(run: Run, vocab_size: int, stage: Stage, head_positions: int) -> dict[str, int]:
    """Return the bytes kept of one microbatch in a pipeline stage, by part; `offloaded_layers` are in host memory.

    Args:
        head_positions: positions of a sequence that the output head scores: all of GPT's, the masked ones of BERT's.

    Source: Korthikanti et al. 2022 (2205.05198), sections 4.1 to 4.3.
    """
    rank, parts = _Rank(run), dict[str, int]()
    if stage.is_first:
        parts["embedding"] = rank.embedding
        parts["embedding_norm"] = rank.norm(rank.own_tokens) * run.model.norms.embedding + rank.token_mask
    experts = sum(map(run.model.has_experts, stage.layers))
    layers = (len(stage.layers) - experts) * rank.layer + experts * (
        _Rank(run, of_experts=True).layer if experts else 0
    )
    parts[OFFLOADED if run.plan.offload_activations else "layers"] = layers
    if stage.is_last:
        parts["head"] = rank.head(head_positions)
        parts["loss"] = rank.loss(vocab_size, head_positions)
    return parts


def layer_bytes(run: Run, *, of_experts: bool = False) -> int:
    """Return the bytes kept of one microbatch in one layer, with experts or without, on the device or in host memory.

    Without norms' statistics, with dropout, two norms and 16 bits: s b h (10 + 24/t + 5as/ht), 34/t for the first two
    with sequence parallelism; without the last term if recomputation is selective; 2 s b h if it is full.

    Source: Korthikanti et al. 2022 (2205.05198), table 2.
    """
    return _Rank(run, of_experts=of_experts).layer


def working_bytes(run: Run, *, of_experts: bool = False) -> int:
    """Return the additional bytes of a layer's backward pass: recomputed activations, and its input if not there.

    One layer has them at a time. Temporary gradients, as without recomputation, are not counted.
    """
    rank, plan = _Rank(run, of_experts=of_experts), run.plan
    if plan.recompute == "selective":
        return rank.core + rank.core_copies
    if plan.recompute == "full":
        has_input = not (plan.partition_activations or plan.offload_activations)
        return rank.around_core + rank.core - (rank.own if has_input else 0)
    return 0


def bytes_after_gelu(run: Run, *, of_experts: bool = False) -> int:
    """Return the bytes that a layer keeps after its GELU: by norms behind it, and a dropout mask."""
    rank, norms = _Rank(run, of_experts=of_experts), run.model.norms.mlp
    inner = norms.inner * rank.inner_norm(rank.inner)
    return (norms.sum + norms.output) * rank.norm(rank.own_tokens) + inner + rank.token_mask


def expert_bytes(run: Run) -> int:
    """Return the bytes that a layer's experts keep in addition to what goes into and out of their functions."""
    return _Rank(run, of_experts=True).experts


def has_products(run: Run) -> bool:
    """Return True if attention's backward pass is by matrix products, from queries, keys and values (see `attend`)."""
    model = run.model
    is_short = model.seq_len <= LONGEST_PRODUCTS and Sizes(run).groups == Sizes(run).heads
    return model.scores_dropout == 0.0 and run.precision == "bf16" and is_short and not run.plan.is_ring


@dataclass(frozen=True)
class _Rank(Sizes):
    """Byte counts of a microbatch on one tensor-parallel rank."""

    @property
    def wide(self) -> int:
        """Bytes of an element of tensors that are computed in fp32 at least."""
        return max(self.e, 4)

    @property
    def own_tokens(self) -> int:
        """Number of the rank's tokens between split blocks."""
        return self.tokens // self.parts

    @property
    def token_mask(self) -> int:
        """Bytes of the dropout mask on the rank's [n, h]."""
        return self.own_tokens * self.run.model.hidden_size // self.run.plan.y if self.run.model.dropout else 0

    @property
    def layer(self) -> int:
        plan = self.run.plan
        if plan.recompute == "full":
            return self.own // (plan.x if plan.partition_activations else 1)
        return self.around_core + (self.core if plan.recompute == "none" else 0)

    @property
    def around_core(self) -> int:
        """Bytes kept around attention's core.

        Counted: inputs of a layer's norms and column-parallel products; q, k, v, context, input and output of the
        MLP's function; masks.
        """
        norms = self.run.model.norms.of_tokens * self.norm(self.own_tokens) + self.norms_of_parts
        inputs = (2 - self.run.model.parallel_residual) * self.own  # both blocks may have the same
        inputs += self.experts - self.own if self.of_experts else 0
        return norms + inputs + self.qkv + self.features + self.before_function + self.inner + 2 * self.token_mask

    @property
    def experts(self) -> int:
        """Bytes that experts keep in addition to what goes into and out of their functions, with as many rows for each.

        Counted: their input whole; each row after an expert, and before it where ranks share them; probabilities, those
        of a token's choices and their weights, and indices; what the losses of balance add to gradients.
        """
        model, run = self.run.model, self.run
        rows = self.tokens * model.choices
        divided = model.experts_per_token > 1  # each by the sum of its prototype's
        probabilities = self.tokens * (model.experts + model.expert_prototypes * divided) + (1 + divided) * rows
        added = run.train.microbatch * model.experts * (model.balance_loss > 0)
        others = model.experts * self.e * (model.balance_bias > 0) + 2 * INDEX_BYTES * rows
        inputs = (1 + model.choices * (1 + (run.plan.ep > 1))) * self.activations
        return inputs + (probabilities + added) * self.wide + others

    @property
    def norms_of_parts(self) -> int:
        """Bytes kept by norms of a rank's heads, or of its part of the features: their inputs and statistics."""
        norms = self.run.model.norms
        rows = sum(self.heads if name == "q" else self.groups for name in norms.attention.heads) * self.tokens
        of_head = self.statistics(self.run.model.head_size * self.e)
        heads = self.qkv + rows * of_head if norms.attention.heads else 0
        inner = norms.mlp.inner * self.inner_norm(self.inner)
        return heads + norms.attention.inner * self.inner_norm(self.features) + inner

    def inner_norm(self, own: int) -> int:
        """Return the bytes that a norm over features of all ranks keeps: its input, `own` bytes, and statistics."""
        return own + self.tokens * self.statistics(own // self.tokens, is_split=self.run.plan.x > 1)

    @property
    def core(self) -> int:
        """Bytes of attention's core: probabilities before and after dropout, its mask, and repeated keys and values.

        Without dropout the fused kernel keeps a logarithm a row, matrix products nothing; and its result, where that
        goes to other ranks.
        """
        if self.run.model.scores_dropout == 0.0:
            result = self.features * self.run.plan.exchanges_heads
            return 0 if has_products(self.run) else self.heads * self.tokens * self.wide + result
        of_head = self.tokens * self.run.model.seq_len
        repeated = self.core_copies - self.qkv * self.is_copied if self.groups != self.heads else 0
        return self.heads * of_head * (2 * self.e + 1) + repeated

    @property
    def core_copies(self) -> int:
        """Bytes that the recomputed core keeps in addition to its inputs.

        The fused kernel's result, or q, k and v copied for batched products, where there are several sequences of
        several heads; keys and values of fewer heads are copied in any case. Before that, heads from other ranks.
        """
        if self.run.model.scores_dropout == 0.0:
            return self.qkv if self.run.plan.exchanges_heads else self.features
        copied = self.features * (3 if self.is_copied else 2 * (self.groups != self.heads))
        return copied + self.qkv * self.run.plan.exchanges_heads

    @property
    def is_copied(self) -> bool:
        return self.core_heads > 1 and self.run.train.microbatch > 1

    @property
    def embedding(self) -> int:
        """Bytes of token, position and (BERT) type indices, and of the mask of tokens that are another rank's."""
        by_own = (self.run.model.positions == "learned") + (self.run.model.family == "bert")
        elsewhere = self.tokens if self.run.plan.x > 1 else 0
        return INDEX_BYTES * (self.tokens + by_own * self.own_tokens) + elsewhere

    def statistics(self, row: int, *, is_split: bool = False) -> int:
        """Return the bytes that a norm keeps of a row, besides the row itself, given the row's bytes.

        Mean and deviation, of a split norm in fp32 at least; so the root mean square; or the hyperbolic tangents.
        """
        of_layernorm = 2 * (self.wide if is_split else self.e)
        return {"layernorm": of_layernorm, "rmsnorm": self.wide, "dyt": row}[self.run.model.norm]

    def norm(self, rows: int) -> int:
        """Return the bytes that a norm keeps: input and statistics."""
        row = self.run.model.hidden_size // self.run.plan.y * self.e
        return rows * (row + self.statistics(row, is_split=self.run.plan.y > 1))

    def head(self, positions: int) -> int:
        """Return the bytes of the last norm and the head's inputs; BERT's are the whole [n, h] and masked tokens."""
        b, h = self.run.train.microbatch, self.run.model.hidden_size
        final = self.norm(self.own_tokens) * self.run.model.norms.final
        if self.run.model.family == "gpt":
            return final + self.own
        masked = b * positions * (INDEX_BYTES + ((3 + (self.run.model.mlp != "relu")) * h + 2) * self.e)
        pooled = b * h * self.e
        return final + self.activations * self.run.plan.cp + masked + pooled

    def loss(self, vocab_size: int, positions: int) -> int:
        """Return the bytes of logits, of each token's sum, target and ownership, and (BERT) of the sentence loss."""
        scored, plan = self.scored(positions), self.run.plan
        logits = scored * padded_vocabulary(vocab_size, plan.x) // plan.x * self.e
        tokens = logits + scored * (self.wide + INDEX_BYTES + 1)
        if self.run.model.family == "gpt":
            return tokens
        return tokens + self.run.train.microbatch * (2 * self.wide + INDEX_BYTES) + self.wide
