"""System to predict for: published numbers, measured tables, and a few constants of its software."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass

from impl.cost.gemms import Pass
from impl.cost.traffic import Op
from impl.errors import InputError, first_problem, nearest
from impl.fields import CHECKED, AtLeastTwo
from impl.run import Precision, Run, with_fields
from impl.simulator.constants import CONSTANTS, LIMITS, Constant
from impl.simulator.habits import Habits
from impl.simulator.residuals import Residuals
from impl.simulator.room import Fit, Taken, fit, taken_of
from impl.simulator.surface import Surface

Two = tuple[PositiveFloat, PositiveFloat]
Four = tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat]
Six = tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat]
CONFIG = CHECKED | {"frozen": True}
OWN_STACK = "this suite"
"""Beginning of the name of the software whose memory is predicted."""


@dataclass(config=CONFIG)
class Number:
    """Positive number with its source."""

    value: PositiveFloat
    source: str


@dataclass(config=CONFIG)
class Count:
    """Positive count with its source."""

    value: PositiveInt
    source: str


@dataclass(config=CONFIG)
class Elementwise:
    """Measured bytes/s of one kind of elementwise operation: a name of `impl.simulator.operations`."""

    precision: Precision
    name: str
    forward: PositiveFloat
    backward: PositiveFloat
    source: str


@dataclass(config=CONFIG)
class Device:
    """Device of one rank."""

    kind: Literal["cuda", "cpu"]
    memory_bytes: Number
    memory_bandwidth: Number
    """Bandwidth in bytes/s."""
    peak_flops: dict[Precision, Number]
    """Peak FLOP/s of dense products, by precision."""
    elementwise: list[Elementwise] = Field(default_factory=list)
    """Measured rates of some operations."""
    processors: Count | None = None
    """Processors of a GPU, each of which computes a tile of a product at a time; None: products split continuously."""
    fused_attention: bool = True
    """True if attention's core writes no scores; else it is products and a softmax, through memory."""
    framework_bytes: Taken | None = None
    """What the software was seen to take; None: not known."""

    @property
    def room(self) -> float:
        """Memory that tensors may take, in bytes, as far as is known."""
        return self.memory_bytes.value - (self.framework_bytes.value if self.framework_bytes is not None else 0.0)

    @property
    def taken(self) -> Taken:
        """Bounds of the memory that is taken besides tensors."""
        return self.framework_bytes or taken_of(self.kind)

    def fit(self, size: float) -> Fit:
        """Return whether tensors of a number of bytes fit."""
        return fit(size, self.memory_bytes.value, self.taken)


@dataclass(config=CONFIG)
class Node:
    """Devices that share a fast network and links to other nodes; bandwidths in bytes/s and each direction."""

    size: Count
    nics: Count
    nic_bandwidth: Number
    """Bandwidth of one network card between nodes."""
    link_bandwidth: Number
    """Bandwidth of a device to the others of its node."""


@dataclass(config=CONFIG)
class Level:
    """Level of a network besides its nodes: adjacent devices that share the links out of them.

    Fewer devices than a node has are an island in it; more are nodes on one switch, whose spine may be oversubscribed.
    """

    name: str
    size: Count
    """Devices of one unit of the level."""
    way_out: Number
    """Bandwidth out of a unit, of all of its links together, in bytes/s in each direction."""


@dataclass(config=CONFIG)
class GemmTable:
    """Measured products [m, k] times [k, n]: m, n, k, seconds."""

    precision: Precision
    source: str
    rows: list[Four] = Field(min_length=1)
    pass_: Pass | None = None
    """Pass that was measured; None: all alike."""


@dataclass(config=CONFIG)
class AttentionTable:
    """Measured attention cores: batch, heads, sequence, head size, seconds forward, seconds backward."""

    precision: Precision
    source: str
    rows: list[Six] = Field(min_length=1)


@dataclass(config=CONFIG)
class Curve:
    """Measured collective, all groups of its kind at once: bytes of the whole tensor, seconds."""

    op: Op
    span: Literal["intra", "inter"]
    ranks: AtLeastTwo
    source: str
    rows: list[Two] = Field(min_length=1)


@dataclass(config=CONFIG)
class StepLog:
    """Seconds that a tenth, half and nine tenths of the steps of logged runs took at most."""

    gpus: PositiveInt
    p10: PositiveFloat
    p50: PositiveFloat
    p90: PositiveFloat
    source: str

    @model_validator(mode="after")
    def _in_order(self) -> "StepLog":
        if not self.p10 <= self.p50 <= self.p90:
            raise ValueError(f"p10 {self.p10:g}, p50 {self.p50:g}, p90 {self.p90:g} must not fall")
        return self


@dataclass(config=CONFIG)
class Calibration:
    """Rows that constants were fitted on, and their errors on rows that were held out."""

    stack: str
    rows: list[str]
    """Rows fitted on."""
    held_out: list[str]
    mape: NonNegativeFloat
    """Mean absolute percentage error of the held-out rows, or of each row left out in turn."""
    worst: NonNegativeFloat
    constant_mfu_mape: NonNegativeFloat | None = None
    """Mean error in percent of predictions by one utilization of all devices, fitted to the same rows."""
    calculon_mape: NonNegativeFloat | None = None
    """Error in percent of Calculon as published, where known."""
    interval: tuple[PositiveFloat, PositiveFloat] | None = None
    """Bounds of measured over predicted seconds for the middle nine tenths of the held-out rows."""
    ranges: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Smallest and largest values fitted on: gpus, hidden_size, layers, tokens, tp, pp, dp."""
    features: dict[str, list[str]] = Field(default_factory=dict)
    """Values that the fitted rows had of each feature in `harness.predict.interval.BASELINE`; none: not recorded."""
    table: str = ""
    """Table of published steps whose rows of split `calibrate` were fitted on; empty: they are not published here."""
    spread: dict[str, list[float]] = Field(default_factory=dict)
    """Joint spread of the fitted constants: a lower-triangular factor of the covariance of their logarithms, in units
    of each prior's standard deviation, a row per constant; none: not recorded."""
    residuals: Residuals | None = None
    """Residuals of the constants, near what was fitted on."""


@dataclass(config=CONFIG)
class System:
    """Devices in nodes, and the software on them."""

    name: str
    stack: str
    """Software whose constants these are."""
    hardware: str
    """Name as `torch.cuda.get_device_name` reports it; a CPU's model name."""
    device: Device
    node: Node
    levels: list[Level] = Field(default_factory=list)
    """Levels of the network besides devices and nodes, in any order."""
    gemm: list[GemmTable] = Field(default_factory=list)
    attention: list[AttentionTable] = Field(default_factory=list)
    collectives: list[Curve] = Field(default_factory=list)
    step_logs: list[StepLog] = Field(default_factory=list)
    constants: dict[str, Constant] = Field(default_factory=dict)
    """Constants that differ from CONSTANTS."""
    calibration: Calibration | None = None
    row_sd: PositiveFloat = 0.02
    """Standard deviation of log measured over predicted seconds that weighs rows against the constants' priors, for
    what no field of a run explains. Runs of PTD-P differ by as much on another cluster."""
    habits: Habits = Habits()
    """Settings of fields that a run does not give; predictions are of `habits.of(run, given)`."""
    defaults: dict[str, Any] = Field(default_factory=dict)
    """Values for fields of a run, by dotted name, that are not given, and that the software has no habit of.

    They are what all of the measured runs had, where their table has no column for it. Without one, `Run`'s own default
    holds.
    """
    note: str = ""

    @field_validator("levels")
    @classmethod
    def _are_nested(cls, levels: list[Level]) -> list[Level]:
        sizes = sorted(level.size.value for level in levels)
        if any(larger % smaller for smaller, larger in pairwise(sizes)) or len(set(sizes)) < len(sizes) or 1 in sizes:
            raise ValueError(f"sizes {sizes} must be above 1, and each a multiple of those below it")
        return levels

    @field_validator("defaults")
    @classmethod
    def _are_fields(cls, defaults: dict[str, Any]) -> dict[str, Any]:
        try:
            with_fields(Run(), defaults)
        except ValidationError as error:
            field, value, reason = first_problem(error)
            raise ValueError(f"{field} {value!r:.40}: {reason}") from None
        return defaults

    @field_validator("constants")
    @classmethod
    def _known(cls, constants: dict[str, Constant]) -> dict[str, Constant]:
        if unknown := constants.keys() - CONSTANTS.keys():
            raise ValueError(f"{', '.join(sorted(unknown))} is no constant; valid: {', '.join(CONSTANTS)}")
        for name, one in constants.items():
            least, most = LIMITS[name]
            if not least <= one.value <= most:
                raise ValueError(f"{name} {one.value:g}; valid: {least:g} to {most:g}")
        return constants

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "System":
        """Return the system that a file describes.

        Raises:
            InputError: the first thing wrong with it: field, value, what would be valid.
        """
        try:
            return TypeAdapter(cls).validate_python(dict(document))
        except ValidationError as error:
            field, value, reason = first_problem(error)
            if reason == "Unexpected keyword argument":
                kinds = TypeAdapter(cls).json_schema()
                known = {name for kind in (kinds, *kinds["$defs"].values()) for name in kind.get("properties", ())}
                reason = f"does not exist; {nearest(field.rpartition('.')[2], known)}".rstrip("; ")
                raise InputError(f"system field {field} {reason}") from None
            if reason.endswith((" of Number", " of Count", " of Constant")):
                reason = 'valid: its value and source, as {value: 8, source: "data sheet"}'
            shown = "" if reason == "Field required" else f" {str(value)[:60]!r}"
            raise InputError(f"system field {field}{shown}: {reason}") from None

    def as_dict(self) -> dict[str, Any]:
        """Return the document from which `from_dict` makes this system."""
        return TypeAdapter(System).dump_python(self, mode="json", exclude_defaults=True)

    @cached_property
    def all_constants(self) -> dict[str, Constant]:
        return CONSTANTS | self.constants

    @cached_property
    def widest(self) -> int:
        """Devices of the largest unit that has a way out: a node, or a unit of a level."""
        return max([self.node.size.value, *(level.size.value for level in self.levels)])

    def rate_out(self, level: Level) -> float:
        """Return the bytes/s out of one unit of a level that large transfers reach."""
        of_nodes = level.size.value > self.node.size.value
        return level.way_out.value * self.constant("nic_efficiency" if of_nodes else "link_efficiency")

    def constant(self, name: str) -> float:
        """Return a constant's value."""
        return self.all_constants[name].value

    def with_scores(self, run: Run) -> Run:
        """Return the run for memory formulas, which count the scores of attention if these have dropout.

        Fused attention keeps none whatever the dropout, and one that is not fused keeps them always.
        """
        rate = 0.0 if self.device.fused_attention else run.model.scores_dropout or 0.1
        if run.model.scores_dropout == rate:
            return run
        return dataclasses.replace(run, model=dataclasses.replace(run.model, attention_dropout=rate))

    def peak(self, precision: str) -> float | None:
        """Return the peak FLOP/s; None: not known."""
        number = self.device.peak_flops.get(precision)  # type: ignore[call-overload]
        return None if number is None else number.value

    @cached_property
    def curves(self) -> dict[tuple[str, str], list[tuple[int, np.ndarray, np.ndarray]]]:
        """Ranks, and logarithms of bytes and of seconds, of the measured collectives."""
        found: dict[tuple[str, str], list[tuple[int, np.ndarray, np.ndarray]]] = {}
        for curve in self.collectives:
            rows = np.log(np.array(sorted(curve.rows)))
            found.setdefault((curve.op, curve.span), []).append((curve.ranks, rows[:, 0], rows[:, 1]))
        return found

    @cached_property
    def products(self) -> dict[tuple[str, str | None], tuple[np.ndarray, Surface]]:
        """Rows of m, n, k and seconds, by precision and pass."""
        tables = {(table.precision, table.pass_): np.array(table.rows) for table in self.gemm}
        return {kind: (rows, Surface(rows[:, :3])) for kind, rows in tables.items()}

    @cached_property
    def cores(self) -> dict[str, tuple[np.ndarray, Surface]]:
        """Rows of batch, heads, sequence, head size, seconds forward and backward, by precision."""
        tables = {table.precision: np.array(table.rows) for table in self.attention}
        return {precision: (rows, Surface(rows[:, :4])) for precision, rows in tables.items()}

    @cached_property
    def _rates(self) -> dict[tuple[str, str, bool], float]:
        return {
            (one.precision, one.name, is_backward): one.backward if is_backward else one.forward
            for one in self.device.elementwise
            for is_backward in (False, True)
        }

    def elementwise_rate(self, precision: str, name: str = "", *, is_backward: bool = False) -> float:
        """Return bytes/s of an elementwise operation: a share of its measured rate, or of the memory's bandwidth."""
        alone = self._rates.get((precision, name, is_backward), self.device.memory_bandwidth.value)
        return alone * self.constant("memory_efficiency")

    def correction(self, run: Run) -> float:
        """Return the ratio of measured to predicted seconds expected from the calibration's rows."""
        known = None if self.calibration is None else self.calibration.residuals
        return 1.0 if known is None else known.factor(run)
