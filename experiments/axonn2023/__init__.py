"""What the experiments of AxoNN (Singh et al. 2023, arXiv 2305.13525) share: grids of ranks, and its model of them.

Of the paper the abstract was read; shapes, flags and the model are from axonn-ai/Megatron-AxoNN.
"""

from itertools import product
from math import prod

from harness.experiment.kit import UNTESTED, ModelConfig, Plan, Recipe, Run, published
from harness.experiment.paper import noted
from impl.cost.parameters import ELEMENT_BYTES

WHOLE = 2**34
"""Bytes of a bucket in which all of a layer is gathered and summed at once."""
PAPER = Recipe(steps=10, global_batch=1024, lr=6e-5, min_lr=1e-5, warmup_steps=2)
"""1,024 sequences are our own choice, for all sizes; the rates are the job scripts'."""
SHAPES = {
    round(row["value"]): ModelConfig(seq_len=2048, vocab_size=51200, **noted(row["note"]))
    for row in published("axonn2023", "parameters").to_dict("records")
}
"""Models by billions of parameters: model-table.md; sequence: examples/template_perlmutter.sh."""
PRODUCTS = ((1, 3, False), (1, 1, True), (1, 4, False), (4, 1, True))
"""Inputs and outputs of a layer's products in hidden sizes; True: inputs are divided over x, not over y."""
AS_STORED = (*PRODUCTS[:3], (1, 4, True))
"""As examples/comm_model.py at 8a4ae24 has them: the MLP's second product gives 4 h there, and takes h."""
NODE, PAIR, FOUR, OUT = 4, 76.0, 225.0, 80.0
"""Perlmutter's GPUs of a node; GB/s of a pair, of all four, and of all that leaves a node, in the same file."""
Grid = tuple[int, int, int, int]
"""Ranks of x, y and z, and data-parallel ones."""


def grid_of(run: Run) -> Grid:
    assert run.plan.tp3
    x, y, z = run.plan.tp3
    return x, y, z, run.plan.dp // z


def name(run: Run) -> str:
    return " x ".join(map(str, grid_of(run)))


def grids(ranks: int, *, has_d: bool, least: int = 1, most: int = 2**20) -> list[Grid]:
    """Return grids of powers of 2, with at least so many parts of a weight and at most so many of a product."""
    powers = [2**i for i in range(ranks.bit_length())]
    every = [(x, y, z, ranks // (x * y * z)) for x, y, z in product(powers, repeat=3) if not ranks % (x * y * z)]
    return [one for one in every if (has_d or one[3] == 1) and prod(one[:3]) >= least and one[0] * one[1] <= most]


def on_grid(grid: Grid, **more: object) -> Plan:
    """Return the plan of a grid; layers are recomputed, as in the job scripts and in AxoNN's model."""
    x, y, z, d = grid
    divided = {"zero_stage": 3, "zero_group": z} if z > 1 else {}
    return Plan(**{"tp": x * y, "tp3": (x, y, z), "dp": z * d, "recompute": "full", **divided, **more})  # type: ignore[arg-type]


def modelled(run: Run, products: tuple[tuple[int, int, bool], ...] = AS_STORED) -> tuple[float, float, float, float]:
    """Return the bytes that pass a rank's link for x, y, z and d in a step of rings, by AxoNN's model.

    Of n tokens a rank, a product's outputs are summed twice, as layers are recomputed, over the ranks that divide its
    inputs, and once its inputs' gradients over those that divide its outputs. A block of weights is gathered twice over
    z and its gradient divided once, each of which moves (z - 1) / z of it; over d gradients are summed in fp32.
    Embeddings, logits and norms are left out.

    Source: examples/comm_model.py at 8a4ae24, whose Gr, Gc, Gd and Gdata are x, y, z and d.
    """
    x, y, z, d = grid_of(run)
    model, e = run.model, ELEMENT_BYTES[run.precision]
    hidden = run.train.global_batch * model.seq_len // (z * d) * model.hidden_size * e
    block = sum(i * o for i, o, _ in PRODUCTS) * model.hidden_size**2 / (x * y)
    over_x = sum(2 * o if is_turned else i for i, o, is_turned in products) * hidden / y
    over_y = sum(i if is_turned else 2 * o for i, o, is_turned in products) * hidden / x
    rings = [(n - 1) / n * model.num_layers for n in (x, y, z, d)]
    sizes = (2 * over_x, 2 * over_y, 3 * block * e, 2 * block / z * 4)
    return tuple(ring * size for ring, size in zip(rings, sizes, strict=True))  # type: ignore[return-value]


def communicating(run: Run) -> float:
    """Return AxoNN's model of the seconds that a step communicates on Perlmutter: its bytes, one axis after another.

    A group within a node has the links of a pair or of four; of what leaves a node, groups with ranks there get parts.
    Here as everywhere x is innermost; with AxoNN Gc is.
    """
    degrees, seconds = grid_of(run), 0.0
    for i, (n, size) in enumerate(zip(degrees, modelled(run), strict=True)):
        inner = prod(degrees[:i])
        rate = {2: PAIR, 4: FOUR}[n] if inner == 1 and n <= NODE and n > 1 else OUT / min(inner, NODE)
        rate = PAIR if (inner, n) == (2, 2) else rate
        seconds += size / 2**30 / rate
    return seconds


def on_perlmutter(model: ModelConfig, plan: Plan, microbatch: int) -> Run:
    """Return a run as in AxoNN's job scripts: bf16 in all collectives but those of d."""
    recipe = Recipe(**{**vars(PAPER), "microbatch": microbatch})
    return Run(model=model, plan=plan, train=recipe, evaluation=UNTESTED, precision="bf16", fp32_gradients=False)
