"""Sweep over the points of an experiment: it runs those that are missing, and writes a record of each.

All state is on disk. A sweep looks at a point, decides what it needs (`decide`), and does that under a claim
(`claim_lock`), after another look. So several sweeps may work on one folder, each may be stopped at any moment, and a
later one continues with what it finds: it waits for live jobs, and writes the records of those that have ended.
"""

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from harness.experiment.experiment import Point
from harness.launch.attempt import Entry, Jobs, Options, free, left_alone, left_running, orders, refusal, shape
from harness.launch.claim_lock import ClaimLost, Claims
from harness.launch.decide import Todo, attempt_state, decide, document_of_attempt, is_local, is_same_code, waits_for
from harness.launch.follow import Display, Follower
from harness.launch.preflight import Datasets, why_doubtful
from harness.launch.turn import Turn
from harness.predict.forecast import Forecasts
from harness.rank import jobs as real_jobs
from harness.rank.collect import base_record
from harness.rank.job import ABSENT, SILENT, JobState, stop
from harness.rank.orders import TrainingOrders, UnreadableError
from harness.records.attempts import JOB, Attempts
from harness.records.environment import host_environment, keep_changes
from harness.records.parse import of_document
from harness.records.record import Record
from harness.records.store import FINISHED, Store
from impl.run import to_dict

POLL_SECONDS = 0.25
SCHEDULER_SECONDS = 5.0
"""Time between two queries of a scheduler about all jobs."""
ELSEWHERE_SECONDS = 0.2
"""Time between two looks at each point that another harness has claimed."""


class Sweep:
    """Points of one experiment at one tier, the store of their records, and where they run."""

    def __init__(
        self, store: Store, datasets: Datasets, options: Options, display: Display | None = None, jobs: Jobs = real_jobs
    ) -> None:
        self.store, self.datasets, self.options, self.jobs = store, datasets, options, jobs
        self.attempts = Attempts(store)
        self.display = display or Display(console=Console(quiet=True))
        self.environment = host_environment([Path(sys.argv[0]).name, *sys.argv[1:]])  # its path names a person
        self.forecasts = Forecasts(store, options.forecast, self.display.message)
        self.claims = Claims((store.folder / "claims").resolve())
        self.turn = Turn(options, f"{store.experiment}, {store.tier} tier", self.display.message)
        self.may_start = True
        self.ready, self.live = list[Entry](), list[Entry]()
        self.elsewhere: list[Entry] = []
        """Points claimed by another harness, without a visible job."""
        self.left: list[Point] = []
        """Points that would fail again."""
        self.mine: set[Path] = set()
        """Attempts whose ranks are processes of this machine started by this sweep."""
        self.asked = self.waited = -SCHEDULER_SECONDS

    def run(self, points: Sequence[Point]) -> None:
        """Bring every point to a record; a point that fails does not end the sweep.

        Raises:
            KeyboardInterrupt: after all ranks of this machine were stopped, whose points keep no new record; with a
                message if jobs go on at a scheduler.
        """
        keep_changes(self.store.changes, self.environment)
        self._go(points)

    def watch(self, points: Sequence[Point]) -> None:
        """Wait for the jobs of these points and write their records; start nothing.

        Raises:
            KeyboardInterrupt: interrupted; nothing was stopped.
        """
        self.may_start = False
        self._go(points)

    def missing(self, points: Sequence[Point]) -> list[Point]:
        """Return the points that `run` would start now."""
        attempts = self.attempts.open()
        states = self._states([attempt for found in attempts.values() for attempt in found])
        return [e.point for e in map(Entry, points) if self._todo(e, attempts.get(e.id, []), states) == "start"]

    def _states(self, attempts: Sequence[Path]) -> dict[Path, JobState]:
        """Return the states of jobs; a Slurm that this sweep submits to exists, even if it does not answer."""
        instead = {} if self.options.is_local else {ABSENT: SILENT}
        return {path: instead.get(state, state) for path, state in self.jobs.states(attempts).items()}

    def _go(self, points: Sequence[Point]) -> None:
        with self.claims, closing(self.turn):
            try:
                self.begin(points)
                while self.is_open:
                    if not self.step():
                        time.sleep(POLL_SECONDS)
            except BaseException as error:
                self._stop_mine()
                if isinstance(error, KeyboardInterrupt) and self.live:
                    raise KeyboardInterrupt(left_running(len(self.live), self.store.experiment)) from None
                raise

    def begin(self, points: Sequence[Point]) -> None:
        """Look at all points, and write the records that are due."""
        self._settle([*map(Entry, points)])
        if self.left:
            self.display.message(left_alone(self.left))

    @property
    def is_open(self) -> bool:
        """True if there is more to do."""
        return bool(self.ready) or (bool(self.live or self.elsewhere) and not self.options.detach)

    def step(self) -> bool:
        """Start what there is room for, and settle what has ended; return True if there was anything."""
        ready = len(self.ready)
        if not self.mine:
            self.turn.close()
        self._start()
        if changed := [] if self.options.detach else self._changed():
            self._settle(changed)
        return bool(changed) or len(self.ready) != ready

    def _todo(self, entry: Entry, attempts: Sequence[Path], states: Mapping[Path, JobState]) -> Todo:
        entry.record = self.store.replaceable(entry.id)
        if entry.before == "":
            entry.before = entry.record.attempt if entry.record is not None else None
        found = {attempt_state(attempt, states) for attempt in attempts}
        entry.is_watched = entry.is_watched or "live" in found
        return decide(
            entry.record,
            "live" if "live" in found else "ended" if found else None,
            self.options,
            is_fresh=entry.is_fresh,
            is_same_code=entry.record is not None and is_same_code(entry.record, self.environment),
            starts=entry.starts,
        )

    def _settle(self, entries: Sequence[Entry]) -> None:
        """Write the records that are due, and put each entry among those to be started, live or elsewhere."""
        attempts = self.attempts.open()
        states = self._states([attempt for entry in entries for attempt in attempts.get(entry.id, [])])
        for entry in entries:
            todo, harvested = self._todo(entry, attempts.get(entry.id, []), states), None
            if todo in ("harvest", "tidy"):
                if not self._claim(entry):
                    continue
                try:
                    harvested = self._harvest(entry, states)
                except ClaimLost:
                    self._lose(entry)
                    continue
                if harvested and not entry.is_watched:  # of an earlier command
                    entry.before = harvested.attempt
                todo = self._todo(entry, self.attempts.open_of(entry.id), states)
            if todo == "start" and self.may_start:
                if harvested:
                    tries, most = len(entry.tries) + 1, self.options.retries + 1
                    follows = f"try {tries} of {most} follows" if entry.tries else "runs again"
                    self._message(entry, f"{harvested.status}: {harvested.reason}; {follows}")
                at = 0 if entry.starts else len(self.ready)  # what is tried again goes first
                self.ready.insert(at, entry)
            elif todo == "wait":
                self._follow(entry, states)
            else:
                self._end(entry, harvested)

    def _follow(self, entry: Entry, states: Mapping[Path, JobState]) -> None:
        """Wait for a live attempt at the point, whichever command started it."""
        attempts = [a for a in self.attempts.open_of(entry.id) if attempt_state(a, states) == "live"]
        self._release(entry)
        if attempts:
            entry.attempt, entry.is_local = attempts[0], is_local(attempts[0])
            entry.follower = Follower(self.display, entry.point, attempts[0], is_shown=False)
            self.live.append(entry)
        else:
            self.elsewhere.append(entry)  # it has ended since

    def _end(self, entry: Entry, harvested: Record | None) -> None:
        """Report a point for which nothing more is to be done here."""
        self._release(entry)
        if (record := entry.record or harvested) is not None and (harvested or entry.is_fresh):
            return self.display.finished(entry.point, record)
        self.display.counted(entry.point)
        if record is not None and record.status not in FINISHED and self.may_start:
            self.left.append(entry.point)
        elif record is None and entry.starts:
            self._message(entry, f"tried {entry.starts} times, no result is left; the same command starts it again")

    def _message(self, entry: Entry, text: str) -> None:
        self.display.message(f"{entry.point.label}: {text}")

    def _claim(self, entry: Entry) -> bool:
        entry.claim = self.claims.claim(entry.id)
        if entry.claim is None:
            if not entry.is_watched and (owner := self.claims.owner(entry.id)):
                self._message(entry, f"{owner} works on it; waiting")
            entry.is_watched = True
            self.elsewhere.append(entry)
        return entry.claim is not None

    def _release(self, entry: Entry) -> None:
        if entry.claim is not None:
            self.claims.release(entry.id)
            entry.claim = None

    def _lose(self, entry: Entry) -> None:
        """Leave a point to the harness that has taken it over."""
        self._release(entry)
        self.elsewhere.append(entry)

    def _changed(self) -> list[Entry]:
        """Return the entries whose job has ended, if it is time to look, and those to be claimed once more."""
        now = time.monotonic()
        is_due = now - self.asked >= SCHEDULER_SECONDS
        looked = {entry.attempt: entry for entry in self.live if entry.attempt and (entry.is_local or is_due)}
        states, changed = self._states(list(looked)), list[Entry]()
        for attempt, entry in looked.items():
            if entry.claim is not None and not entry.claim.is_held():
                self._message(entry, "another harness has taken it over")
                self.jobs.cancel([attempt])
                self._forget(attempt)
                self._release(entry)
                changed.append(entry)
            elif attempt not in states or attempt_state(attempt, states) == "ended":
                changed.append(entry)
            elif entry.follower and states[attempt].name == "running":
                entry.follower.look()
        if is_due and not all(entry.is_local for entry in looked.values()):
            self.asked = now
            names = [state.name for state in states.values()]
            self.display.waiting(names.count("pending"), names.count("running"), waits_for(list(looked), states))
        self.live = [entry for entry in self.live if entry not in changed]
        if now - self.waited >= ELSEWHERE_SECONDS * len(self.elsewhere):
            self.waited = now
            changed, self.elsewhere = changed + self.elsewhere, []
        return changed

    def _harvest(self, entry: Entry, states: Mapping[Path, JobState]) -> Record | None:
        """Write the records of all attempts that have ended, under the claim; return the last one, None if none was.

        Raises:
            ClaimLost: another harness has taken the point over.
        """
        record, keeps_checkpoints = None, self.options.saving.keep_checkpoints or entry.point.run.keep_end
        for attempt in self.attempts.open_of(entry.id):
            if attempt_state(attempt, states) == "ended":
                free(attempt, states.get(attempt), self.store, self.jobs)
                given = TrainingOrders.found(attempt)
                keeps_checkpoints = keeps_checkpoints or (given is not None and given.keep_checkpoints)
                record = self._record(entry, attempt, states.get(attempt)) or record
        if self.store.has_finished(entry.id):
            for attempt in self.attempts.all(entry.id):
                self._forget(attempt)
            if not keeps_checkpoints:
                self.attempts.forget_checkpoints(entry.id)
        return record

    def _record(self, entry: Entry, attempt: Path, state: JobState | None) -> Record | None:
        """Write the record of an attempt; None if it leaves none, as it was stopped with its harness or is damaged."""
        assert entry.claim is not None
        if self.store.has_finished(entry.id):
            return None
        if entry.follower is not None:
            entry.follower.catch_up()
        try:
            document = document_of_attempt(attempt, state, entry.id, is_mine=attempt in self.mine)
            if document is None:
                self._forget(attempt)
                return None
            self.store.write(document, entry.claim.publish)
        except UnreadableError as error:
            if not entry.claim.is_held():
                raise ClaimLost from None  # and its new owner has removed the attempt
            self._message(entry, f"{error}; this try is {'given up' if self.may_start else 'left out'}")
            self.mine.discard(attempt)
            if self.may_start:
                stop(attempt)
                self.attempts.close(attempt)
            else:
                self.store.ignored[attempt] = str(error)
            return None
        self.attempts.close(attempt)
        self.mine.discard(attempt)
        return of_document(document)

    def _void(self, attempt: Path) -> None:
        """Remove an attempt that was not submitted; ranks that start all the same find no orders."""
        stop(attempt)
        self._forget(attempt)

    def _forget(self, attempt: Path) -> None:
        self.mine.discard(attempt)
        self.jobs.forget(attempt)
        self.attempts.forget(attempt)

    def _start(self) -> None:
        """Start what is ready, as far as there is room, which schedulers keep to, after another look under a claim."""
        options, shapes = self.options, dict[tuple[int, int], list[Entry]]()
        coming = set[str]() if options.detach else {e.id for e in (*self.ready, *self.live, *self.elsewhere)}
        while not options.is_local or (self.ready and len(self.mine) < options.at_once and self.turn.take()):
            # a run that starts from the end of another one waits for it
            if (entry := next((one for one in self.ready if one.point.run.start not in coming), None)) is None:
                break
            self.ready.remove(entry)
            if not self._claim(entry):
                continue
            attempts = self.attempts.open_of(entry.id)
            if self._todo(entry, attempts, self._states(attempts)) != "start":
                self._settle([entry])
            elif not self._is_refused(entry) and options.is_local:
                self._submit([entry])
            elif entry.claim is not None:
                shapes.setdefault(shape(entry.point), []).append(entry)
        for entries in shapes.values():
            self._submit(entries)

    def _is_refused(self, entry: Entry) -> bool:
        """Return True if it is not to start here, after writing why into a record."""
        run = entry.point.run
        if (outcome := refusal(run, self.store, self.datasets, self.options)) is None:
            if doubt := why_doubtful(run, self.options.site):
                self._message(entry, doubt)
            return False
        assert entry.claim is not None
        document = base_record(entry.id, self.store.experiment, self.store.tier, to_dict(run))
        document |= outcome | {"environment": self.environment}
        try:
            self.store.write(document, entry.claim.publish)
        except ClaimLost:
            self._lose(entry)
            return True
        self._release(entry)
        self.display.finished(entry.point, of_document(document))
        return True

    def _submit(self, entries: Sequence[Entry]) -> None:
        """Write the orders of these points, and start their ranks; on a cluster they are one array of jobs."""
        options, made = self.options, list[Entry]()
        try:
            for entry in entries:
                if options.is_local:
                    self.display.started(entry.point)
                self._prepare(entry)
                made.append(entry)
            # a claim's new owner removes the attempts that it finds, so one that is made before this look is safe
            held = [entry for entry in made if entry.claim and entry.claim.is_held()]
            if attempts := [entry.attempt for entry in held if entry.attempt]:
                ranks = entries[0].point.run.plan.world_size
                options.site.submit(attempts, ranks, options.time_limit, options.at_once)
        finally:  # whatever stops this: what was submitted is followed, and of the others nothing is left
            for entry in made:
                self._follow_or_forget(entry)

    def _follow_or_forget(self, entry: Entry) -> None:
        assert entry.attempt is not None
        if (entry.attempt / JOB).exists():
            self.live.append(entry)
            if not entry.is_local:
                self._release(entry)
            return
        self._void(entry.attempt)
        if entry.claim is not None and not entry.claim.is_held():
            self._lose(entry)

    def _prepare(self, entry: Entry) -> None:
        """Make the folder of a new attempt, with the orders of its ranks."""
        for dead in self.attempts.dead_starts(entry.id):
            self._void(dead)
        attempt = self.attempts.new(entry.id)
        entry.attempt, entry.is_local, entry.is_watched = attempt, self.options.is_local, True
        entry.follower = Follower(self.display, entry.point, attempt, is_shown=entry.is_local)
        entry.starts += 1
        self.mine |= {attempt} if entry.is_local else set()
        try:
            orders(entry, self.store, self.datasets, self.options, self.environment, self.forecasts).write(attempt)
        except BaseException:
            self._forget(attempt)
            raise

    def _stop_mine(self) -> None:
        """Stop the ranks that are processes of this sweep; the next one writes the records of what has ended."""
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            states = self._states(list(self.mine))
            running = [attempt for attempt in self.mine if attempt_state(attempt, states) == "live"]
            self.jobs.cancel(running)
            self.live = [entry for entry in self.live if entry.attempt not in self.mine]
            for attempt in running:
                self._forget(attempt)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
