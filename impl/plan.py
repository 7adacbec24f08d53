"""The parallel plan: how one training step is spread over ranks."""

from typing import Literal

from pydantic.dataclasses import dataclass

from impl.fields import CHECKED, Bytes, Depth, Positive

ZeroStage = Literal[0, 1, 2, 3]
Recompute = Literal["none", "selective", "full"]
AXES = ("pp", "dp", "cp", "tp")
"""Of the mesh of ranks, the slowest one first."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Plan:
    """Parallel degrees and what is needed to carry them out."""

    dp: Positive = 1
    """Data-parallel degree."""
    tp: Positive = 1
    """Tensor-parallel degree: ranks that share the matrices of every layer."""
    tp3: tuple[Positive, Positive, Positive] | None = None
    """AxoNN's grid (x, y, z), where x y is `tp`: y divides features between blocks, z divides weights (`impl.grid`)."""
    sequence_parallel: bool = False
    """Split norms, dropout and residuals over the tensor-parallel ranks' tokens; False duplicates them on each."""
    overlap_input_grad_reduce: bool = True
    """Reduce a column-parallel layer's input gradient while its weight gradient is computed; False waits for it."""
    cp: Positive = 1
    """Context-parallel degree: ranks that share every sequence, each with an equal part of its tokens."""
    cp_attention: Literal["ring", "ulysses"] = "ring"
    """How attention spans ranks: keys and values pass around a ring, or each rank gets all tokens of some heads."""
    ep: Positive = 1
    """Expert-parallel degree: consecutive ranks of dp and cp that divide every layer's experts among them."""
    pp: Depth = 1
    """Pipeline-parallel degree: ranks that divide the layers among them."""
    schedule: str = "one_f_one_b"
    """Pipeline schedule: a packaged one by name, or one's own code, `FILE.py:name` (`impl.own_code`)."""
    chunks: Depth = 1
    """Model chunks of a pipeline rank, for schedules that interleave them."""
    scatter_gather: bool = True
    """Each tensor-parallel rank sends its part of an activation, which the next stage gathers; False: all of it."""
    bucket_bytes: Bytes = 4 * 2**20
    """Size of the buckets in which gradients are reduced and parameters gathered, in bytes."""
    overlap_grad_reduce: bool = True
    """Reduce gradients during the backward pass; False: after it."""
    zero_stage: ZeroStage = 0
    """What dp and cp ranks divide among them: 1 optimizer states, 2 gradients too, 3 parameters too; 0 nothing."""
    zero_group: Positive | None = None
    """Number of consecutive ranks that divide them; every further group of that size has a copy. None: all ranks."""
    overlap_param_gather: bool = True
    """Gather parameters before they are needed, at stage 3 one block ahead; False: when they are needed."""
    offload_optimizer: bool = False
    """Keep master weights and moments in host memory, and update them there."""
    recompute: Recompute = "none"
    """What the backward pass computes again instead of keeping it: selective: attention's core; full: every layer."""
    partition_activations: bool = False
    """With full recomputation: each tensor-parallel rank keeps a part of a layer's input (ZeRO-R's P_a)."""
    offload_activations: bool = False
    """With full recomputation: layers' inputs are kept in host memory (ZeRO-R's P_a+cpu)."""

    @property
    def world_size(self) -> int:
        return self.dp_cp * self.tp * self.pp

    @property
    def y(self) -> int:
        """Tensor-parallel ranks that divide the hidden features between split blocks: 1 without `tp3`."""
        return self.tp3[1] if self.tp3 else 1

    @property
    def x(self) -> int:
        """Tensor-parallel ranks that divide heads, the MLP's features and the vocabulary: t / y."""
        return self.tp3[0] if self.tp3 else self.tp

    @property
    def dp_cp(self) -> int:
        """Number of ranks with the same parameters and different tokens: data- times context-parallel degree.

        Gradients are summed, and ZeRO's stages split, over them, as in Megatron-Core.
        """
        return self.dp * self.cp

    @property
    def is_ring(self) -> bool:
        """True if keys and values pass around a ring of the context-parallel ranks."""
        return self.cp > 1 and self.cp_attention == "ring"

    @property
    def exchanges_heads(self) -> bool:
        """True if context-parallel ranks exchange tokens for heads."""
        return self.cp > 1 and self.cp_attention == "ulysses"

    @property
    def cp_chunks(self) -> int:
        """Number of equal parts of a sequence in context parallelism: one a rank, or two in a balanced ring."""
        return self.cp * (1 + self.is_ring)

    @property
    def zero(self) -> int:
        """Data- and context-parallel ranks over which ZeRO's stages split."""
        return self.zero_group or self.dp_cp

    @property
    def replicas(self) -> int:
        """Number of groups of `zero` ranks, each of which has a copy of the states."""
        return self.dp_cp // self.zero
