"""Parsing of documents into records, with one-line messages for those that are invalid."""

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness.records.parts import CATEGORIES, Head, Span
from harness.records.record import Record
from harness.records.store import NO_JSON, Document
from impl.own_code import code_of
from impl.pipeline.schedule import Action
from impl.pipeline.schedules import build, is_packaged
from impl.run import Run

_RECORD, _HEAD = TypeAdapter(Record), TypeAdapter(Head)
_SHARED: dict[Any, Any] = {}
"""Configurations and comparability keys that were read, which many records have."""


def schema() -> dict[str, Any]:
    """Return the JSON schema of a record, as docs/record.schema.json has it."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A record of one run"}
    return {**_RECORD.json_schema(), **head}


def parse(text: bytes) -> Record:
    """Read a record from JSON; nothing that it names is loaded or run.

    Raises:
        ValueError: it is not a valid, complete record; the message names the first error, in one line.
    """
    try:
        record = _RECORD.validate_json(text, strict=True)
        why = _why_inconsistent(record)
    except ValidationError as error:
        raise ValueError(_first(error)) from None
    except (ValueError, RecursionError) as error:  # endlessly nested lists
        raise ValueError(f"not a record: {' '.join(str(error).split())}"[:300]) from None
    if why is None and record.id != record.run.id:
        why = f"config: it is that of the run {record.run.id}, not of {record.id!r:.60}"
    if why is not None:
        raise ValueError(why)
    _share(record)
    return record


def _share(record: Record) -> None:
    """Replace parts that are equal to another record's by that one's: many records take a fourth less memory."""
    for name in ("model", "plan", "train", "data", "evaluation"):
        part = getattr(record.run, name)
        object.__setattr__(record.run, name, _SHARED.setdefault(part, part))
    for one in record.evaluations:
        if one.key is not None:
            exactly = tuple((name, type(value), value) for name, value in one.key.items())
            one.key = _SHARED.setdefault(exactly, one.key)


def of_document(document: Document) -> Record:
    """Return the record of a document, as `parse` does.

    Raises:
        ValueError: as `parse`.
    """
    try:
        text = json.dumps(document).encode()
    except (ValueError, RecursionError) as error:  # an integer with more digits than Python converts
        raise ValueError(f"not a record: {' '.join(str(error).split())}"[:300]) from None
    return parse(text)


def head_of(text: bytes) -> Head:
    """Read identity and outcome of a record from JSON, all else unchecked.

    Raises:
        ValueError: it is not a JSON object with these fields.
    """
    try:
        return _HEAD.validate_json(text)
    except ValidationError as error:
        raise ValueError(_first(error)) from None


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return NO_JSON
    where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier())
    return f"{where or 'record'}: {' '.join(first['msg'].split())}"[:300]


def _why_inconsistent(record: Record) -> str | None:
    """Return, as a sentence, what contradicts the configuration; None if nothing does."""
    run, ranks, world_size = record.run, record.ranks, record.run.plan.world_size
    if len(ranks) > world_size:
        return f"ranks: {len(ranks)} of {world_size}"
    if (count := max(timed := record.steps.timed_ranks(), default=0)) > world_size:
        return f"steps.{timed.index(count)}.seconds: of {count} ranks, there are {world_size}"
    if any(one.total and one.correct is None for one in record.evaluations):
        return "evaluations: answers were counted, but not the right ones"
    if any(rank.memory for rank in ranks) and (why := _why_no_prediction(record)):
        return why
    rows = [rank.timeline for rank in ranks if rank.timeline]
    return _why_no_timeline(run, rows) if rows else None


def _why_no_prediction(record: Record) -> str | None:
    """Return what is missing to predict memory by category, for comparison with the counted one; None if nothing is."""
    run = record.run
    if not code_of(run) and (problems := run.problems()):
        return f"config: {problems[0]}"
    for rank in record.ranks:
        if rank.memory and (missing := set(CATEGORIES) - rank.memory.keys()):
            return f"ranks.{rank.rank}.memory: no {', '.join(sorted(missing))}"
        if any(size < 0 for name, size in (rank.memory or {}).items() if name != "rest"):
            return f"ranks.{rank.rank}.memory: less than 0"
    if record.resolved.vocab_size is None or record.resolved.head_positions is None:
        return "resolved: no vocab_size or head_positions"
    if record.environment.device not in ("cpu", "cuda"):
        return "environment.device: neither cpu nor cuda"
    return None


def _why_no_timeline(run: Run, rows: list[list[Span]]) -> str | None:
    """Return why a timeline cannot be compared with its schedule's simulation; None if it can.

    The timeline must have every kind of action of its schedule.
    """
    try:
        found = {Action.parse(text)[:2] for row in rows for text, _, _ in row}
    except ValueError as error:
        return f"ranks.timeline: {error}"
    lengths = [end - start for row in rows for _, start, end in row]
    if min(lengths) < 0 or max(lengths) == 0:
        return "ranks.timeline: actions that end before they begin, or take no time"
    if not is_packaged(run.plan.schedule):
        return None
    schedule = build(run.plan.schedule, run.plan.pp, run.microbatches, run.plan.chunks)
    wanted = {action[:2] for row in schedule.rows for action in row}
    return None if wanted <= found else f"ranks.timeline: not all actions of {run.plan.schedule}"
