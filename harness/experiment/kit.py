"""What a file of an experiment needs, in one place: runs, claims and checks, points, columns and tables."""

from harness.analysis.columns import (
    BATCH, CHUNKS, DEVICE_RATE, DP, GB, MIB, MICROBATCH, MICROBATCHES, MODEL, PARAMETERS, PP, PP_SENT, PREDICTED_BUBBLE,
    PRINTED_DEVICE_RATE, RANKS, SCATTER_GATHER, SCHEDULE, TP, TP_SENT, ZERO_STAGE, gib, gigabytes, in_bytes, mebibytes,
    milliseconds, of_run, per_device, printed, ratio, sent, share, value,
)  # fmt: skip
from harness.analysis.points import Measure, Point, points, relative
from harness.analysis.render import Column, Table, number
from harness.analysis.tables import (
    BUBBLE, DEVICE, EFFICIENCY, FLOP_RATE, GIB, MARK, MILLI, PERCENT, PUBLISHED, RATE, RUNS, TERA, VARIES,
)  # fmt: skip
from harness.analysis.tabulate import listed, printed_value, tabulate
from harness.experiment import checks
from harness.experiment.by_size import BySize, with_size
from harness.experiment.checks import (
    AS_SIMULATED, all_hold, as_expected, as_predicted, best_over, each, ends, falls_along, grouped, known,
    larger, largest, measured_only, simulated_only, within, within_points, within_share,
)  # fmt: skip
from harness.experiment.claims import Check, Claim, Evidence, Kind, Tolerance, less, means, near, tally
from harness.experiment.comparison import (
    POINTS, Comparison, Printed, flop_rate, in_words, rate_with_recomputation, relative_to,
)  # fmt: skip
from harness.experiment.experiment import Experiment
from harness.experiment.pairs import STEP, Cell, apart_from, by_choice, cells, step_seconds, with_interval
from harness.experiment.paper import against_in_print, and_absent, noted, table_of, with_printed
from harness.experiment.published import published, published_number
from harness.experiment.runs import UNTESTED, repeated, untested
from harness.experiment.tiers import AT_ONCE, NEEDS_TEXT, Tier, cost
from harness.figures.style import figure_of
from harness.records.measures import about, size_name
from harness.records.record import Record, point
from harness.records.statistics import UNKNOWN, Estimate, estimate, exact, simulated
from impl.data.config import DataConfig
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan, ZeroStage
from impl.recipe import Recipe
from impl.run import EngineName, Precision, Run
