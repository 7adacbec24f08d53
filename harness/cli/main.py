"""The command line: `lmscale VERB ...`, or `python -m harness VERB ...`."""

import atexit
import contextlib
import dataclasses
import functools
import gc
import importlib
import inspect
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_type_hints

import tyro
from pydantic import ValidationError

from harness.cli import verb_table
from harness.cli.run_file import run_in
from harness.cli.verb_table import SIZED, VERBS
from harness.cli.which import Which
from harness.records.labels import FIELDS, sized
from harness.records.printable import CONTROL, printable
from harness.terminal import OPTIONS, Unset
from impl.errors import InputError, first_problem, nearest
from impl.model.sizes import named
from impl.own_code import trust_words
from impl.run import Run

FAILED, INTERRUPTED = 1, 130
ABOUT = "`lmscale VERB --help` explains a verb and its options; `lmscale --version` prints the version."
TRAINING = ("run", "train", "watch")
ALL_STOPPED = "all ranks stopped, finished records kept: the same command continues"
TRACEBACK = "LMSCALE_TRACEBACK"
"""Environment variable: if not empty, internal errors are raised with their traceback."""
OBJECTS = 1_000_000
"""Objects made between two searches for dead cycles: a record is a thousand small objects without cycles."""
READERS = ("table", "claims", "report", "export", "import")
"""Verbs that read all records and end: they search for cycles a tenth as often."""
RUN_FIELDS = frozenset(FIELDS)
LONGEST_NAME, LONGEST_MESSAGE = 100, 2000
"""Most characters of a word in a message, which may be a quoted value, and of the message; their middle is left out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 1 if a point or verb failed, 2 for bad input, 130: interrupted."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # else it is ignored, as by nohup, or raises already
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _make_printable()
    os.environ["MPLBACKEND"] = "agg"  # figures are only written; an unknown name would fail matplotlib's import
    gc.set_threshold(OBJECTS * (10 if argv[:1] and argv[0] in READERS else 1))
    atexit.register(gc.freeze)  # else all records are searched for cycles again at exit
    try:
        if odd := [word for word in argv if CONTROL.search("".join(word.split()))]:
            raise InputError(f"{odd[0]!r}: control characters, which would reach the terminal; valid: text without")
        if argv == ["--version"]:
            from harness.records.environment import version_of

            print(f"lmscale {version_of('lmscale') or '(not installed)'}")
            return 0
        _find_modules_here()
        trust_words(argv)
        default, given = _default(argv) if argv[:1] and argv[0] in SIZED else (Run(), frozenset[str]())
        return parse(argv, default, _given(argv) | given)()
    except InputError as error:
        return _complain(_in_own_words(error))
    except ValidationError as error:
        return _complain(_first_problem(error))
    except KeyboardInterrupt as left:
        why = str(left) or ALL_STOPPED * (argv[0] in TRAINING if argv else False)
        print("; ".join(filter(None, ["interrupted", why])), file=sys.stderr)
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as left:
        if not any(isinstance(one, BrokenPipeError) for one in (left, left.__context__)):  # rich's tables exit so
            raise
        return 0
    except OSError as error:  # a full or read-only disk, a name that is too long
        return _complain(f"{error.filename or 'a file or standard output'}: {error.strerror or error}")
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        return _complain(_own(error), FAILED)


def _find_modules_here() -> None:
    """Let modules of the working directory be imported, such as a schedule of one's own, after everything installed.

    `python -m` puts the working directory first, a console script not at all; `--plan.schedule module:function` is
    found by both.
    """
    importlib.import_module("experiments")  # the package's, which a folder of this name here would hide
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.append(here)
    add_experiments(Path(here, "experiments"))


def add_experiments(own: Path) -> None:
    """Let files of this folder be experiments, besides those of the package.

    Raises:
        InputError: one has the name of another.
    """
    folders = importlib.import_module("experiments").__path__
    known = [Path(folder) for folder in folders if Path(folder).is_dir()]
    if not own.is_dir() or any(map(own.samefile, known)):
        return
    for path in sorted(own.rglob("*.py")):
        name = path.relative_to(own)
        if path.name != "__init__.py" and any((folder / name).exists() for folder in known):
            raise InputError(f"experiments/{name} is a packaged experiment, too; valid: a name of its own")
    folders.append(str(own))
    for folder in sorted(own.iterdir()):  # a package of the same name has the files of both
        if (folder / "__init__.py").is_file() and any((root / folder.name / "__init__.py").is_file() for root in known):
            importlib.import_module(f"experiments.{folder.name}").__path__.append(str(folder))


def parse(argv: list[str], default: Run, given: frozenset[str]) -> Callable[[], int]:
    """Return the verb with its typed arguments, ready to be called; only named verbs are imported.

    Raises:
        InputError: the command line is not valid; with tyro's own explanation, in one line.
        ValidationError: a field's value is not valid.
    """
    if not argv:
        raise InputError(f"no verb; valid: {', '.join(VERBS)} (--help explains them)")
    if argv[0] not in VERBS and not argv[0].startswith("-"):
        raise InputError(f"{argv[0]!r:.80} is no verb; {nearest(argv[0], VERBS)}valid: {', '.join(VERBS)}")
    problem = io.StringIO()
    app = {name: _deferred(name, default, given) if name in argv else _described(name) for name in VERBS}
    try:
        with contextlib.redirect_stderr(problem):
            return tyro.extras.subcommand_cli_from_dict(
                app, prog="lmscale", description=ABOUT, args=argv, registry=OPTIONS
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        text = _one_line(problem.getvalue())
        if (cause := _validation_error(stop)) is not None:
            part = re.search(r"__\.(?:config\.|which\.)?([\w.]+):", text)
            text = _first_problem(cause, part[1] if part else "")
        if argv[0] == "tune" and "--model." in text:
            text += "; another model: --config FILE.toml, with a table [model]"
        raise InputError(text) from None


def _described(name: str) -> Callable[[], None]:
    """Return a placeholder for a verb that is not called, for its line of --help."""

    def nothing() -> None: ...

    nothing.__doc__ = VERBS[name].summary
    return nothing


def _deferred(name: str, default: Run, given: frozenset[str]) -> Callable[..., Callable[[], int]]:
    """Return a function with the verb's signature.

    It passes the given fields on and does not call the verb, so that the verb's errors are not mistaken for the
    parser's.
    """
    verb = verb_table.function_of(name)
    options = inspect.signature(verb).parameters
    start = {"default": default} if "default" in options else {}  # `tune` has no options for the run's fields

    def hold(*args: object, **kwargs: object) -> Callable[[], int]:
        for option, value in kwargs.items():
            if option == "given":
                kwargs[option] = given
            elif isinstance(value, Which):
                kwargs[option] = dataclasses.replace(value, given=given)
        return functools.partial(verb, *args, **kwargs, **start)

    shown = [o.replace(default=default) if o.name == "config" else o for o in options.values() if o.name not in start]
    hold.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    sized = "\n\nBesides: `--model NAME`, a named size; `--config FILE.toml`, a file with a run." * (name in SIZED)
    first, _, rest = (inspect.getdoc(verb) or "").partition("\n\n")
    hints = get_type_hints(verb, include_extras=True)  # of fields of a run None is a value
    hold.__annotations__ = {name: of if name in ("config", "which") else Unset[of] for name, of in hints.items()}
    hold.__doc__ = "\n\n".join(filter(None, [f"Example: `lmscale {VERBS[name].example}`", first + sized, rest]))
    return hold


def _default(argv: list[str]) -> tuple[Run, frozenset[str]]:
    """Remove `--config FILE` and `--model NAME` from the command line; return their run, and the fields that they set.

    A named size takes the place of the file's model.
    """
    file, size = _take(argv, "--config", "a file with a run"), _take(argv, "--model", "the name of a model size")
    run, given = run_in(Path(file), _given(argv)) if file is not None else (Run(), frozenset[str]())
    if size is not None:
        run = dataclasses.replace(run, model=named(size))
        given |= sized(run.model)
    return run, given


def _take(argv: list[str], flag: str, what: str) -> str | None:
    """Remove a flag and its value, `--flag VALUE` or `--flag=VALUE`, from the command line; return None if absent."""
    for at, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            return argv.pop(at).removeprefix(f"{flag}=")
        if word == flag:
            if at + 1 >= len(argv) or argv[at + 1].startswith("--"):
                raise InputError(f"{flag} needs a value: {what}")
            del argv[at]
            return argv.pop(at)
    return None


def _given(argv: list[str]) -> frozenset[str]:
    """Return fields of a run, by dotted name, that options of the command line set, to their defaults too."""
    names = set[str]()
    for word in argv:
        group, dot, name = word.removeprefix("--").partition("=")[0].rpartition(".")
        if word.startswith("--"):
            names.add(group + dot + name.replace("_", "-").removeprefix("no-").replace("-", "_"))
    return frozenset(names) & RUN_FIELDS


def _one_line(panel: str) -> str:
    """Return the message in tyro's frame, with what is valid or was probably meant, without its title and pointers."""
    rows = [row.strip("│ ") for row in panel.splitlines()][1:]
    parts = [""]
    for row in rows:
        if not re.fullmatch("[─-]{8,}|╰─*╯", row):
            parts[-1] += f"{row} "
        elif parts[-1]:
            parts.append("")
    text = parts[0].strip().removesuffix(".")
    for part in map(str.strip, parts[1:]):
        if part.startswith("Available subcommands:"):
            text += f"; valid:{part.removeprefix('Available subcommands:')}"
        elif part.startswith("Perhaps you meant:") and "misplaced" not in text:
            text += f"; did you mean {part.split()[3].rstrip(',')}?"
    return text


def _validation_error(error: BaseException) -> ValidationError | None:
    """Return pydantic's refusal that caused an error, or None."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ValidationError):
        cause = cause.__context__
    return cause


def _in_own_words(error: InputError) -> str:
    """Return the text of an error; where it quotes pydantic, the field, value and valid values instead."""
    text, cause = str(error), _validation_error(error)
    before, quote, _ = text.partition(f"{ValidationError.__name__}: ")
    return f"{before}{_first_problem(cause)}" if quote and cause else text


def _first_problem(error: ValidationError, prefix: str = "") -> str:
    """Return field, value and valid values of the first problem that pydantic reports."""
    field, value, message = first_problem(error)
    where = ".".join(filter(None, [prefix, field]))
    got = f" (got {value!r})" if field and isinstance(value, str | int | float | bool | None) else ""
    return f"{where}: {message}{got}" if where else message


def _own(error: Exception) -> str:
    """Return an internal error in one line: what, where, and how to print its traceback."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(at.filename).name}, line {at.lineno}"
    why = "the memory of this machine is too small, or this is" if isinstance(error, MemoryError) else "this is"
    text = f"{type(error).__name__}: {error}"[:300].rstrip(": ")
    return f"{text} ({where}); {why} a bug: {TRACEBACK}=1 prints the traceback"


def _complain(text: str, status: int = 2) -> int:
    text = re.sub(r"[^\s/]+", lambda found: _cut(found[0], LONGEST_NAME), printable(" ".join(text.split())))
    print(f"error: {_cut(text, LONGEST_MESSAGE)}", file=sys.stderr)
    return status


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 2 // 3]}[...]{text[-most // 3 :]}"


def _make_printable() -> None:
    """Escape what the terminal's encoding lacks, pass each line on at once, and drop what a closed stream is given."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
