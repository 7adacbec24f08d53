"""Runs the points of an experiment that are missing, and keeps a record of each, whatever came of it.

State lies on the disk only. A sweep looks at a point, decides what it needs (`decide`), and does that under a claim on
it (`claim_lock`), after another look. So several sweeps may work on one folder, each may be stopped at any moment, and
one that comes back goes on with what it finds: jobs that live are waited for, those that have ended are harvested.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from harness.experiment.experiment import Point
from harness.launch.attempt import (
    Case,
    Jobs,
    facts_of,
    first_to_start,
    orders,
    refused_record,
    shape,
    why_refused,
)
from harness.launch.claim_lock import ClaimLost, Claims
from harness.launch.decide import Todo, attempt_state, attempts_state, decide, document_of_try, is_local, waits_for
from harness.launch.follow import Display, Follower, again, left_alone
from harness.launch.interruption import LeftRunning, go_on, undisturbed
from harness.launch.options import Options
from harness.launch.preflight import Datasets, warnings
from harness.rank import jobs as jobs_of_this_machine
from harness.rank.collect import UnreadableError
from harness.rank.jobs import ABSENT, SILENT, JobState, stop
from harness.rank.orders import TrainingOrders
from harness.records.environment import host_environment, keep_changes
from harness.records.parse import of_document
from harness.records.record import Record
from harness.records.store import FINISHED, JOB, Store

POLL_SECONDS = 0.25
SCHEDULER_SECONDS = 5.0
"""How often a scheduler is asked about all jobs."""
ELSEWHERE_SECONDS = 0.2
"""How often points that another harness has claimed are looked at, for each of them."""


class Sweep:
    """The points of one experiment at one tier, the store that holds their records, and where they run."""

    def __init__(
        self, store: Store, datasets: Datasets, options: Options, display: Display, jobs: Jobs = jobs_of_this_machine
    ) -> None:
        self.store, self.datasets, self.options, self.display, self.jobs = store, datasets, options, display, jobs
        typed = [Path(sys.argv[0]).name, *sys.argv[1:]]  # the program's path is a person's machine
        self.environment = host_environment(typed)
        self.claims = Claims((store.folder / "claims").resolve())
        self.may_start = True
        self.ready, self.live = list[Case](), list[Case]()
        self.elsewhere: list[Case] = []
        """Claimed by another harness, with no job to be seen."""
        self.left: list[Point] = []
        """They would fail again."""
        self.mine: set[Path] = set()
        """Tries whose ranks are processes of this machine that this sweep has started."""
        self.asked = self.waited = -SCHEDULER_SECONDS

    def run(self, points: list[Point]) -> None:
        """Bring every point to a record; a point that fails does not end the sweep.

        Raises:
            KeyboardInterrupt: after all ranks of this machine were stopped, whose points keep no new record;
                LeftRunning if jobs go on at a scheduler.
        """
        keep_changes(self.store.changes, self.environment)
        self._go(points)

    def watch(self, points: list[Point]) -> None:
        """Wait for the jobs of these points and write their records; nothing is started.

        Raises:
            LeftRunning: interrupted; nothing was stopped.
        """
        self.may_start = False
        self._go(points)

    def missing(self, points: list[Point]) -> list[Point]:
        """Those that `run` would start, as things stand."""
        attempts = self.store.attempts()
        states = self._states([attempt for found in attempts.values() for attempt in found])
        return [
            case.point for case in map(Case, points) if self._todo(case, attempts.get(case.id, []), states) == "start"
        ]

    def _states(self, attempts: Sequence[Path]) -> dict[Path, JobState]:
        """How jobs are doing; a Slurm that this sweep submits to is here, though it may not answer."""
        instead = {} if self.options.is_local else {ABSENT: SILENT}
        return {path: instead.get(state, state) for path, state in self.jobs.states(attempts).items()}

    def _go(self, points: list[Point]) -> None:
        with self.claims:
            try:
                self.begin(points)
                while self.is_open:
                    if not self.step():
                        time.sleep(POLL_SECONDS)
            except BaseException as error:
                with undisturbed():
                    self._stop_mine()
                if isinstance(error, KeyboardInterrupt) and self.live:
                    raise LeftRunning(go_on(len(self.live))) from None
                raise

    def begin(self, points: list[Point]) -> None:
        """Look at all points, and write the records that are due."""
        self._settle([*map(Case, points)])
        if self.left:
            self.display.message(left_alone(self.left))

    @property
    def is_open(self) -> bool:
        """Whether there is more to do."""
        return bool(self.ready) or (bool(self.live or self.elsewhere) and not self.options.detach)

    def step(self) -> bool:
        """Start what there is room for, and settle what has ended; whether it did anything."""
        ready = len(self.ready)
        self._start()
        if changed := [] if self.options.detach else self._changed():
            self._settle(changed)
        return bool(changed) or len(self.ready) != ready

    def _todo(self, case: Case, attempts: Sequence[Path], states: Mapping[Path, JobState]) -> Todo:
        record, attempt = self.store.read(case.id), attempts_state(attempts, states)
        if not case.is_known:
            case.before, case.is_known = record.attempt if record else None, True
        case.is_watched = case.is_watched or attempt == "live"
        facts = facts_of(case, record, attempt, self.environment)
        todo = decide(facts, self.options.retries, self.options.retry)
        if record is not None:
            case.tries = [*map(asdict, record.tries), record.as_try()] if todo == "start" and facts.is_fresh else []
        return todo

    def _settle(self, cases: list[Case]) -> None:
        """Find out what each of these points needs, write the records that are due, and put it where it belongs:
        among those that are to be started, that live, or that another harness works on."""
        attempts = self.store.attempts()
        states = self._states([attempt for case in cases for attempt in attempts.get(case.id, [])])
        for case in cases:
            todo, harvested = self._todo(case, attempts.get(case.id, []), states), None
            if todo in ("harvest", "tidy"):
                if not self._claim(case):
                    continue
                try:
                    harvested = self._harvest(case, states)
                except ClaimLost:
                    self._lose(case)
                    continue
                if harvested and not case.is_watched:  # of an earlier command
                    case.before = harvested.attempt
                todo = self._todo(case, self.store.attempts_of(case.id), states)
            if todo == "start" and self.may_start:
                if harvested:
                    self.display.message(again(case.point, harvested, len(case.tries), self.options.retries))
                at = 0 if case.starts else len(self.ready)  # what is tried again goes first
                self.ready.insert(at, case)
            elif todo == "wait":
                self._follow(case, states)
            else:
                self._end(case, harvested)

    def _follow(self, case: Case, states: Mapping[Path, JobState]) -> None:
        """Somebody's try lives; it is waited for."""
        attempts = [a for a in self.store.attempts_of(case.id) if attempt_state(a, states) == "live"]
        self._release(case)
        if attempts:
            case.attempt, case.is_local = attempts[0], is_local(attempts[0])
            case.follower = Follower(self.display, case.point, attempts[0], is_told=False)
            self.live.append(case)
        else:
            self.elsewhere.append(case)  # it has ended since

    def _end(self, case: Case, harvested: Record | None) -> None:
        """Nothing more is to be done for this point here."""
        self._release(case)
        head = self.store.head(case.id) or harvested
        has_ended = head is not None and (harvested or head.attempt != case.before)
        if has_ended and (record := self.store.read(case.id) or harvested):
            self.display.finished(case.point, record)
            return
        self.display.skipped(case.point)
        if head and head.status not in FINISHED and self.may_start:
            self.left.append(case.point)

    def _claim(self, case: Case) -> bool:
        case.claim = self.claims.claim(case.id)
        if case.claim is None:
            if not case.is_watched and (owner := self.claims.owner(case.id)):
                self.display.message(f"{case.point.label}: {owner} works on it; waiting")
            case.is_watched = True
            self.elsewhere.append(case)
        return case.claim is not None

    def _release(self, case: Case) -> None:
        if case.claim is not None:
            self.claims.release(case.id)
            case.claim = None

    def _lose(self, case: Case) -> None:
        """Another harness has taken the point over."""
        self._release(case)
        self.elsewhere.append(case)

    def _changed(self) -> list[Case]:
        """The cases whose job has ended, as far as it is time to look, and those to be asked for again."""
        now = time.monotonic()
        is_due = now - self.asked >= SCHEDULER_SECONDS
        looked = [case for case in self.live if case.attempt and (case.is_local or is_due)]
        states = self._states([case.attempt for case in looked if case.attempt])
        changed = [case for case in looked if case.claim is not None and not case.claim.is_held()]
        for case in changed:
            self._abandon(case)
        for case in looked:
            state = states.get(case.attempt) if case.attempt else None
            if case.attempt is None or state is None or attempt_state(case.attempt, states) == "ended":
                changed += [] if case in changed else [case]
            elif case.follower and state and state.name == "running":
                case.follower.look()
        if is_due and len(looked) > sum(case.is_local for case in looked):
            self.asked = now
            names = [state.name for state in states.values()]
            waiting = waits_for([case.attempt for case in looked if case.attempt], states)
            self.display.waiting(names.count("pending"), names.count("running"), waiting)
        if now - self.waited >= ELSEWHERE_SECONDS * len(self.elsewhere):
            self.waited = now
            changed, self.elsewhere = changed + self.elsewhere, []
        self.live = [case for case in self.live if case not in changed]
        return changed

    def _harvest(self, case: Case, states: Mapping[Path, JobState]) -> Record | None:
        """Write the record of every try that has ended, under the claim; the last one, None if there was none.

        Raises:
            ClaimLost: another harness has taken the point over.
        """
        record = None
        for attempt in self.store.attempts_of(case.id):
            if attempt_state(attempt, states) == "ended":
                record = self._record(case, attempt, states.get(attempt)) or record
        if self.store.has_finished(case.id):
            for attempt in self.store.all_attempts(case.id):
                self._forget(attempt)
            if not (case.keeps_checkpoints or self.options.saving.keep_checkpoints or case.point.run.keep_end):
                self.store.forget_checkpoints(case.id)
        return record

    def _record(self, case: Case, attempt: Path, state: JobState | None) -> Record | None:
        """Write the record of one try; None: it leaves none, since it was stopped with its harness, or damaged."""
        assert case.claim is not None
        case.keeps_checkpoints = (told := TrainingOrders.found(attempt)) is not None and told.keep_checkpoints
        if self.store.has_finished(case.id):
            return None
        if case.follower is not None:
            case.follower.tell_resumed()
        try:
            document = document_of_try(attempt, state, case.id, is_mine=attempt in self.mine)
            if document is None:
                self._forget(attempt)
                return None
            self.store.write(document, case.claim.publish)
        except UnreadableError as error:
            if not case.claim.is_held():
                raise ClaimLost from None  # and the harness that has it has removed the try
            self._set_aside(case, attempt, str(error))
            return None
        self.store.close(attempt)
        self.mine.discard(attempt)
        return of_document(document)

    def _set_aside(self, case: Case, attempt: Path, why: str) -> None:
        """Give a try up of which no record can be made; what starts nothing leaves it out, and as it is."""
        self.display.message(f"{case.point.label}: {why}; this try is {'given up' if self.may_start else 'left out'}")
        if self.may_start:
            stop(attempt)
            self.store.close(attempt)
        else:
            self.store.ignored[attempt] = why
        self.mine.discard(attempt)

    def _void(self, attempt: Path) -> None:
        """Remove a try that was not submitted; ranks that start all the same find no orders."""
        stop(attempt)
        self._forget(attempt)

    def _forget(self, attempt: Path) -> None:
        self.mine.discard(attempt)
        self.jobs.forget(attempt)
        self.store.forget_attempt(attempt)

    def _room(self) -> int:
        """How many points may be started now; a scheduler takes all at once, and keeps to the limit itself."""
        return self.options.at_once - len(self.mine) if self.options.is_local else len(self.ready)

    def _start(self) -> None:
        """Start what is ready, as far as there is room, after another look under a claim."""
        shapes: dict[tuple[int, int], list[Case]] = {}
        coming = [] if self.options.detach else [*self.ready, *self.live, *self.elsewhere]
        while self._room() > 0 and (case := first_to_start(self.ready, coming)):
            self.ready.remove(case)
            if not self._claim(case):
                continue
            attempts = self.store.attempts_of(case.id)
            if self._todo(case, attempts, self._states(attempts) if attempts else {}) != "start":
                self._settle([case])
            elif not self._is_refused(case) and self.options.is_local:
                self._submit([case])
            elif case.claim is not None:
                shapes.setdefault(shape(case.point), []).append(case)
        for cases in shapes.values():
            self._submit(cases)

    def _is_refused(self, case: Case) -> bool:
        """Whether it cannot run here; that becomes a record with the reason."""
        run = case.point.run
        if (reason := why_refused(run, self.store, self.datasets, self.options)) is None:
            for warning in warnings(run, self.options.site):
                self.display.message(f"{case.point.label}: {warning}")
            return False
        assert case.claim is not None
        try:
            document = refused_record(case, self.store, reason, self.environment)
            self.store.write(document, case.claim.publish)
        except ClaimLost:
            self._lose(case)
            return True
        self._release(case)
        self.display.finished(case.point, of_document(document))
        return True

    def _submit(self, cases: list[Case]) -> None:
        """Write down what the ranks of these points are to do, and start them; on a cluster they are one array."""
        options, made = self.options, list[Case]()
        try:
            for case in cases:
                if options.is_local:
                    self.display.started(case.point)
                self._prepare(case)
                made.append(case)
            # who takes a claim over removes the tries that are there, so one that is made before this look is safe
            held = [case for case in made if case.claim and case.claim.is_held()]
            if attempts := [case.attempt for case in held if case.attempt]:
                ranks = cases[0].point.run.plan.world_size
                options.site.submit(attempts, ranks, options.time_limit_seconds, options.at_once)
        finally:  # whatever stops this: what was submitted is followed, of the others nothing stays
            for case in made:
                self._follow_or_forget(case)

    def _follow_or_forget(self, case: Case) -> None:
        assert case.attempt is not None
        if (case.attempt / JOB).exists():
            self.live.append(case)
            if not case.is_local:
                self._release(case)
            return
        self._void(case.attempt)
        if case.claim is not None and not case.claim.is_held():
            self._lose(case)

    def _prepare(self, case: Case) -> None:
        """The folder of a new try, with what its ranks are to do."""
        for dead in self.store.dead_starts(case.id):
            self._void(dead)
        attempt = self.store.new_attempt(case.id)
        case.attempt, case.is_local, case.is_watched = attempt, self.options.is_local, True
        case.follower = Follower(self.display, case.point, attempt, is_told=case.is_local)
        case.starts += 1
        self.mine |= {attempt} if case.is_local else set()
        try:
            orders(case, self.store, self.datasets, self.options, self.environment).write(attempt)
        except BaseException:
            self._forget(attempt)
            raise

    def _abandon(self, case: Case) -> None:
        """The claim on a point was lost while its ranks ran here: they stop."""
        self.display.message(f"{case.point.label}: another harness has taken it over")
        if case.attempt is not None:
            self.jobs.cancel([case.attempt])
            self._forget(case.attempt)
        self._release(case)

    def _stop_mine(self) -> None:
        """Stop what runs in processes of this sweep; what has ended is left for the next one to harvest."""
        states = self._states(list(self.mine))
        running = [attempt for attempt in self.mine if attempt_state(attempt, states) == "live"]
        self.jobs.cancel(running)
        self.live = [case for case in self.live if case.attempt not in self.mine]
        for attempt in running:
            self._forget(attempt)
