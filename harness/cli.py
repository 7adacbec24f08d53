"""The command line: `python -m harness VERB ...`, or `lmscale VERB ...`."""

import contextlib
import io
import re
import signal
import sys
from collections.abc import Callable, Sequence

import tyro
from pydantic import ValidationError

from harness import verbs
from impl.errors import InputError
from impl.model.sizes import named
from impl.run import Run

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 1 if a point failed, 2 for bad input, 130 when interrupted."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        default = Run(model=named(_take(argv, "--model"))) if "--model" in argv else Run()
        return _parse(verbs.table_of(default), argv)()
    except InputError as error:
        return _complain(str(error))
    except ValidationError as error:
        return _complain(_first_problem(error))
    except KeyboardInterrupt:
        print("interrupted; all ranks stopped, finished records kept: the same command goes on", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return 0


def _parse(table: dict[str, Callable[..., int]], argv: list[str]) -> Callable[[], int]:
    """The verb and its typed arguments, ready to be called.

    Raises:
        InputError: the command line is off; tyro's own explanation, in one line.
    """
    problem = io.StringIO()
    app = {name: _deferred(verb) for name, verb in table.items()}
    try:
        with contextlib.redirect_stderr(problem):
            return tyro.extras.subcommand_cli_from_dict(app, prog="harness", args=argv or ["--help"])
    except SystemExit as stop:
        if stop.code:
            raise InputError(_one_line(problem.getvalue())) from None
        raise


def _deferred(verb: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """A function with the verb's signature that does nothing yet: its errors are not the parser's."""
    import functools

    @functools.wraps(verb)
    def hold(*args: object, **kwargs: object) -> Callable[[], int]:
        return functools.partial(verb, *args, **kwargs)

    return hold


def _take(argv: list[str], flag: str) -> str:
    """Remove a flag and its value from the command line."""
    at = argv.index(flag)
    if at + 1 >= len(argv):
        raise InputError(f"{flag} needs a value: the name of a model size")
    value = argv[at + 1]
    del argv[at : at + 2]
    return value


def _one_line(panel: str) -> str:
    """The text of tyro's framed message without the frame, up to its pointer to the help."""
    words = re.sub(r"[╭╮╰╯│─]+", " ", panel)
    words = re.sub(r"\s+", " ", words).strip()
    return re.sub(r"\s*For full helptext.*$", "", words)


def _first_problem(error: ValidationError) -> str:
    """Field, value and what would be valid, of the first thing pydantic refuses."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    shown = isinstance(first["input"], str | int | float | bool | None)
    value = f" (got {first['input']!r})" if where and shown else ""
    return f"{where}: {message}{value}" if where else message


def _complain(text: str) -> int:
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return 2


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
