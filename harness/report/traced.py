"""The closed form as a program: its operations, recorded while it estimates one plan whose knobs are unknown.

The report's planner executes the program on the reader's numbers, with the same operations in the same order.
"""

from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from impl.grouping import by_key
from impl.simulator.closed_form import ClosedForm
from impl.simulator.plans import KNOBS, Plans

BATCH = "global_batch"
"""Unknown of the program besides the knobs."""
OPERATIONS = (
    *("add", "subtract", "multiply", "divide", "floor_divide", "power", "maximum", "minimum", "invert"),
    *("equal", "greater", "greater_equal", "less", "less_equal", "bitwise_or"),
    *("where", "max", "stack", "item", "row", "input"),
)
"""Operations of a program; planner.js has one of each."""


class Program:
    """Operations in order, each on the results of earlier ones.

    An operation is its name and its arguments: the number of an earlier operation, or a constant in a list.
    """

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self._known: dict[tuple[Any, ...], Traced] = {}

    def add(self, name: str, *arguments: Any) -> "Traced":
        """Return the result of an operation, which equal ones share.

        Raises:
            NotImplementedError: no program has such an operation.
        """
        if name not in OPERATIONS:
            raise NotImplementedError(f"the closed form uses {name}, which the planner lacks; valid: {OPERATIONS}")
        line = (name, *map(_argument, arguments))
        if line not in self._known:
            self._known[line] = Traced(self, len(self.lines))
            self.lines.append(line)
        return self._known[line]


def _argument(value: Any) -> Any:
    """Return an argument of an operation: a result's number, a name, or a constant."""
    return (
        value.number if isinstance(value, Traced) else value if isinstance(value, str) else (np.asarray(value).item(),)
    )


class Traced(NDArrayOperatorsMixin):
    """Result of an operation: a column of one plan, or a quantity of its three kinds of rank."""

    def __init__(self, program: Program, number: int) -> None:
        self.program, self.number = program, number

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **_: Any) -> "Traced":
        return self.program.add(ufunc.__name__ if method == "__call__" else method, *inputs)

    def __array_function__(self, function: Any, _types: Any, args: Any, _options: Any) -> "Traced":
        every = [one for some in args for one in (some if isinstance(some, list) else [some])]
        return self.program.add(function.__name__, *every)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, kind: int) -> "Traced":
        return self.program.add("item", self, kind)

    def __iter__(self) -> Any:
        return (self[kind] for kind in range(3))


class _Tracing(ClosedForm):
    """Closed form whose laws are looked up in a table when the program is executed."""

    def __init__(self, form: ClosedForm, plan: Plans, program: Program) -> None:
        vars(self).update(vars(form))
        self.form, self.plan, self.program = form, plan, program

    def _gather(self, plans: Plans, law: Any, *knobs: str) -> Any:
        found = self.form._gather(self.plan, law, *knobs)
        row = self.program.add("row", law.__name__, *(plans[knob] for knob in (*knobs, *self.everywhere)))
        return _like(found, iter(range(10**6)), row)


def _like(found: Any, places: Any, row: Traced) -> Any:
    """Return a law's quantities, each as the item of a row that has it."""
    if isinstance(found, tuple):
        return type(found)(*(_like(one, places, row) for one in found))
    numbers = [row[next(places)] for _ in range(np.size(found))]
    return numbers[0] if len(numbers) == 1 else row.program.add("stack", *numbers)


def traced(form: ClosedForm, plan: Plans) -> dict[str, Any]:
    """Return the program of `details` that a plan of this form records, and which operations give its results."""
    program = Program()
    inputs = {name: program.add("input", name) for name in (*KNOBS, BATCH)}
    found = _Tracing(form, plan, program).details(Plans(inputs), inputs[BATCH])  # type: ignore[arg-type]
    return {"lines": program.lines, "results": _places(found)}


def _places(found: Any) -> Any:
    """Return results with their numbers in the program in place of values."""
    if isinstance(found, list):
        return [_places(one) for one in found]
    return found.number if isinstance(found, Traced) else {name: _places(one) for name, one in found._asdict().items()}


def rows_of(form: ClosedForm) -> dict[str, Any]:
    """Return all rows of each law that the form has computed: columns of the knobs' values, then of its quantities.

    A quantity's column has its distinct values, and the place among them for each row.
    """
    laws = by_key((name, [*knobs, *_flat(values)]) for (name, *knobs), values in form.known.items())
    width = {name: len(key) - 1 for key in form.known for name in [key[0]]}
    tables = {}
    for name, rows in laws.items():
        columns = [list(column) for column in zip(*sorted(rows), strict=True)]
        tables[name] = {"knobs": columns[: width[name]], "columns": list(map(_coded, columns[width[name] :]))}
    return tables


def _flat(values: Any) -> list[float]:
    return [one for some in values for one in _flat(some)] if isinstance(values, tuple) else [float(values)]


def _coded(column: list[float]) -> list[list[float]]:
    distinct = {value: place for place, value in enumerate(dict.fromkeys(column))}
    return [list(distinct), [distinct[value] for value in column]]
