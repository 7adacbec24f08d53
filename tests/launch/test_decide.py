"""Whatever happens in whatever order, no finished record is lost, none is made again, no point runs twice at a time."""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from harness.launch.claim_lock import LEASE_SECONDS, Claims
from harness.launch.decide import attempt_state, decide, is_same_code, state_word
from harness.launch.flags import Trying
from harness.launch.preflight import Datasets
from harness.launch.site_file import Cluster
from harness.launch.sweep import Options, Sweep
from harness.rank.failure import AGAIN, RETRIED, Cause
from harness.rank.job import Job, JobState, job_of, keep
from harness.records.attempts import Attempts
from harness.records.parts import Head, Status, Try
from harness.records.store import FINISHED, Store
from harness.terminal import counted
from tests.harness.fake_site import CODE, end_rank
from tests.harness.made_up_records import changed, record
from tests.harness.small_runs import Told, point, small, write_tokens

# The decision ---------------------------------------------------------------------------------------------------------


records = st.builds(
    lambda status, cause, tries: Head(
        schema=2, id="x", experiment="x", tier="smoke", status=status, cause=cause, tries=[Try()] * tries
    ),
    st.sampled_from(get_args(Status)),
    st.sampled_from([None, *get_args(Cause)]),
    st.integers(0, 4),
)
facts = st.fixed_dictionaries(
    {
        "record": st.none() | records,
        "attempt": st.sampled_from([None, "live", "ended"]),
        "trying": st.builds(Trying, retries=st.integers(0, 3), retry=st.sampled_from(["again", "all"])),
        "is_fresh": st.booleans(),
        "is_same_code": st.booleans(),
        "starts": st.integers(0, 4),
    }
)


@given(facts)
def test_what_lives_is_waited_for_and_what_is_finished_never_started(given: dict[str, Any]):
    todo, record = decide(**given), given["record"]
    assert todo in ("leave", "wait", "harvest", "tidy", "start")
    if record is not None and record.status in FINISHED:
        assert todo in ("leave", "tidy")
    elif given["attempt"] is not None:
        assert todo == {"live": "wait", "ended": "harvest"}[given["attempt"]]
    if todo == "start" and given["is_fresh"] and record is not None:
        assert record.cause in RETRIED
        assert len(record.tries) < given["trying"].retries


@given(facts)
def test_one_command_ends(given: dict[str, Any]):
    """If every try ended like the first, only so many would follow."""
    given |= {"starts": 0, "attempt": None}
    while decide(**given) == "start":
        record = given["record"] and replace(given["record"], tries=[Try()] * given["starts"])
        given |= {"starts": given["starts"] + 1, "is_fresh": True, "record": record}
        assert given["starts"] <= given["trying"].retries + 1


@given(facts, records)
def test_what_the_same_code_did_is_done_again_on_request_only(given: dict[str, Any], record: Head):
    given |= {"record": replace(record, status="failed"), "attempt": None, "is_fresh": False}
    does_again = record.cause is None or record.cause in AGAIN or not given["is_same_code"]
    given["trying"] = Trying()
    assert (decide(**given) == "start") == does_again
    given["trying"] = Trying(retry="all")
    assert decide(**given) == "start"


def test_code_is_the_same_if_commit_and_changes_are():
    code = lambda commit, changes=None: {"git": {"commit": commit, "diff_sha256": changes}}
    at = lambda *git: changed(record(), environment=code(*git))
    assert is_same_code(at("a"), code("a"))
    assert is_same_code(at("a", "x"), code("a", "x"))
    unknown = changed(record(), environment={"git": None})
    own = changed(record(), environment=code("a") | {"own_code": {"mine.py:of_a_run_without_it": "0"}})
    for other in (at("b"), at("a", "x"), unknown, own, changed(record(), environment={})):
        assert not is_same_code(other, code("a"))
    assert not is_same_code(unknown, {"git": None}), "nobody knows"


def test_a_silent_scheduler_has_ended_nothing(tmp_path: Path):
    slurm, local = tmp_path / "slurm", tmp_path / "local"
    keep(slurm, "slurm", "12_3")
    keep(local, "local", "12")
    unknown = {slurm: JobState("unknown"), local: JobState("unknown")}
    assert attempt_state(slurm, unknown) == "live"
    assert attempt_state(local, unknown) == "ended", "of another machine: whoever claims its point decides"
    assert attempt_state(slurm, {}) == "live"


def test_a_point_is_shown_by_its_job_until_its_record_is_there():
    here, states = Path("a"), {Path("a"): JobState("pending"), Path("b"): JobState("running")}
    assert state_word(None, [], {}) == "missing"
    assert state_word(record(status="failed"), [], {}) == "failed"
    assert state_word(record(status="failed"), [here], states) == "pending"
    assert state_word(record(), [here], states) == "ok"
    assert state_word(None, [here, Path("b")], states) == "running"
    assert state_word(None, [Path("c")], states) == "unknown"
    assert counted(["ok", "missing", "failed", "ok"]) == "2 of 4 points finished: 2 ok, 1 failed, 1 missing"


# The machine ----------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """A harness is killed: nothing that it would still do happens."""


@dataclass
class Life:
    """Life of a harness: it ends after a number of calls, and once it sleeps in the middle of one."""

    left: float = float("inf")
    awake: float = float("inf")
    meanwhile: Callable[[], None] = lambda: None

    def call(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash
        self.awake -= 1
        if self.awake < 0:
            self.awake = float("inf")
            self.meanwhile()


class MortalStore(Store):
    life: Life

    def __getattribute__(self, name: str) -> Any:
        if name in ("read", "write", "attempts_of", "new_attempt", "forget_attempt", "forget_checkpoints"):
            super().__getattribute__("life").call()
        return super().__getattribute__(name)


class MortalClaims(Claims):
    life: Life

    def claim(self, name: str) -> Any:
        self.life.call()
        found = super().claim(name)
        self.life.call()
        return found

    def release(self, name: str) -> None:
        self.life.call()
        super().release(name)


@dataclass
class World:
    """What really goes on, on one machine and at one scheduler."""

    running: dict[Path, str] = field(default_factory=dict)
    """Tries that have a job, and of which run."""
    ended: set[Path] = field(default_factory=set)
    is_silent: bool = False
    """The scheduler does not answer."""
    finished: dict[str, bytes] = field(default_factory=dict)
    """Records, as they were first seen."""

    def see(self) -> None:
        """What holds at any moment, once supervisors have looked whether their ranks are wanted."""
        for attempt in list(self.running):
            if not _is_wanted(attempt):
                self.end(attempt)
        ids = list(self.running.values())
        assert len(ids) == len(set(ids)), "a point runs twice at a time"

    def end(self, attempt: Path) -> None:
        if self.running.pop(attempt, None) is not None:
            self.ended.add(attempt)


def _is_wanted(attempt: Path) -> bool:
    """By their orders, and on one machine by the claim."""
    try:
        claim = json.loads((attempt / "spec.json").read_text())["claim"]
    except OSError:
        return False
    return claim is None or Path(claim).is_dir()


@dataclass
class Hand:
    """What one harness can do to the world."""

    on: str
    world: World
    life: Life
    machine: int
    children: set[Path] = field(default_factory=set)
    """Tries whose ranks end with this harness."""
    device, allow_oom, agents, cluster = "cpu", False, None, Cluster()

    def why_invalid(self, ranks: int) -> str | None:
        return None

    def submit(self, attempts: Sequence[Path], ranks: int, seconds: float, at_once: int = 0) -> list[str]:
        for attempt in attempts:
            self.life.call()
            if (attempt / "spec.json").exists():
                self.world.running[attempt] = run_id = json.loads((attempt / "spec.json").read_text())["id"]
                self.children |= {attempt} if self.on == "local" else set()
                assert run_id not in self.world.finished, "a finished point is run again"
                self.world.see()
            self.life.call()
            keep(attempt, "local" if self.on == "local" else "slurm", str(1 + self.machine))
        return []

    def states(self, attempts: Sequence[Path]) -> dict[Path, JobState]:
        self.life.call()
        found = {attempt: job for attempt in attempts if (job := job_of(attempt)) is not None}
        return {attempt: self._state(attempt, job) for attempt, job in found.items()}

    def _state(self, attempt: Path, job: Job) -> JobState:
        if job.on == "slurm" and self.world.is_silent:
            return JobState("unknown")
        if job.on == "local" and job.job != str(1 + self.machine):  # a local job's number says whose machine it is
            return JobState("unknown")
        return JobState("running" if attempt in self.world.running else "ended")

    def cancel(self, attempts: Sequence[Path]) -> None:
        self.life.call()
        for attempt in attempts:
            self.world.end(attempt)

    def forget(self, attempt: Path) -> None:
        self.life.call()


@dataclass
class Harness:
    sweep: Sweep
    hand: Hand
    life: Life
    has_slept: bool = False


limit = st.none() | st.integers(0, 40)


class Machine(RuleBasedStateMachine):
    """Harnesses on two machines, and their jobs; everything may end at any moment."""

    tokens: Path

    @initialize(on=st.sampled_from(["local", "slurm"]), retries=st.integers(0, 2))
    def begin(self, on: str, retries: int) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=self.tokens.parent))
        self.on, self.retries, self.now = on, retries, 0.0
        self.store = Store(self.folder, "made_up", "smoke")
        self.runs = [small(self.tokens, seed=seed) for seed in range(2)]
        self.world = World()
        self.harnesses: list[Harness] = []

    # Harnesses

    @precondition(lambda self: len(self.harnesses) < 3)
    @rule(machine=st.integers(0, 1), jobs=st.integers(1, 2), lives=limit)
    def harness_starts(self, machine: int, jobs: int, lives: int | None) -> None:
        life = Life(float("inf") if lives is None else lives)
        store = MortalStore(self.folder, "made_up", "smoke")
        store.life = life
        hand = Hand(self.on, self.world, life, machine)
        options = Options(site=hand, retries=self.retries, jobs=jobs)  # type: ignore[arg-type]
        sweep = Sweep(store, Datasets(self.folder / "cache"), options, Told(), hand)
        sweep.claims = MortalClaims((self.store.folder / "claims").resolve(), LEASE_SECONDS, lambda: self.now)
        sweep.claims.life = life  # type: ignore[attr-defined]
        self.harnesses.append(Harness(sweep, hand, life))
        self.does(self.harnesses[-1], lambda: sweep.begin([point(run) for run in self.runs]))

    def does(self, harness: Harness, what: Any) -> None:
        try:
            what()
        except Crash:
            self.is_gone(harness)

    def is_gone(self, harness: Harness) -> None:
        self.harnesses = [one for one in self.harnesses if one is not harness]
        for attempt in harness.hand.children:
            self.world.end(attempt)

    @precondition(lambda self: self.harnesses)
    @rule(which=st.integers(0, 2), lives=limit, awake=limit)
    def harness_goes_on(self, which: int, lives: int | None, awake: int | None) -> None:
        harness = self.harnesses[which % len(self.harnesses)]
        harness.life.left = float("inf") if lives is None else lives
        harness.life.awake = float("inf") if awake is None else awake
        harness.life.meanwhile = lambda: self.goes_on_without(harness)
        if harness.sweep.is_open:
            self.does(harness, harness.sweep.step)
        else:
            self.does(harness, lambda: self.ends(harness))

    def goes_on_without(self, sleeper: Harness) -> None:
        """While one harness sleeps in the middle of a step, longer than a lease, others go on, and finish points."""
        for _ in range(3):
            for other in [one for one in self.harnesses if one is not sleeper and one.sweep.is_open]:
                other.life.awake = float("inf")
                self.does(other, other.sweep.step)
                self.world.see()
                for attempt in [a for a in self.world.running if a not in sleeper.hand.children]:
                    end_rank(attempt, 0, "ok")
                    self.world.end(attempt)
            self.no_finished_record_is_lost_or_changed()
            self.time_passes({i for i, one in enumerate(self.harnesses) if one is sleeper})

    def ends(self, harness: Harness) -> None:
        for name in list(harness.sweep.claims.held):
            harness.sweep.claims.release(name)
        raise Crash

    @precondition(lambda self: self.harnesses)
    @rule(which=st.integers(0, 2))
    def harness_is_interrupted(self, which: int) -> None:
        harness = self.harnesses[which % len(self.harnesses)]

        def leave() -> None:
            harness.sweep._stop_mine()
            self.ends(harness)

        self.does(harness, leave)

    @precondition(lambda self: self.harnesses)
    @rule(which=st.integers(0, 2))
    def harness_is_killed(self, which: int) -> None:
        self.is_gone(self.harnesses[which % len(self.harnesses)])

    @rule(asleep=st.sets(st.integers(0, 2)))
    def time_passes(self, asleep: set[int]) -> None:
        """More than a lease, in which those that sleep renew nothing."""
        for _ in range(4):
            self.now += LEASE_SECONDS / 3
            for i, harness in enumerate(self.harnesses):
                if i not in asleep:
                    harness.sweep.claims.renew()
                harness.has_slept |= i in asleep

    # Jobs

    @precondition(lambda self: self.world.running)
    @rule(which=st.integers(0, 3), outcome=st.sampled_from(["ok", "nan", *get_args(Cause)[1:]]))
    def job_ends(self, which: int, outcome: str) -> None:
        attempt = sorted(self.world.running)[which % len(self.world.running)]
        if attempt.is_dir():
            end_rank(attempt, 0, outcome)
        self.world.end(attempt)

    @rule(is_silent=st.booleans())
    def scheduler(self, is_silent: bool) -> None:
        self.world.is_silent = is_silent

    # Damage

    @precondition(lambda self: self.world.finished)
    @rule(which=st.integers(0, 1), keep=st.integers(0, 200))
    def record_is_damaged(self, which: int, keep: int) -> None:
        run_id = sorted(self.world.finished)[which % len(self.world.finished)]
        path = self.store.path(run_id)
        path.write_bytes(path.read_bytes()[:keep])
        del self.world.finished[run_id]

    # What holds

    @invariant()
    def no_point_runs_twice_at_a_time(self) -> None:
        self.world.see()

    @invariant()
    def who_renews_keeps_its_claims(self) -> None:
        for harness in self.harnesses:
            held = harness.sweep.claims.held.values()
            assert harness.has_slept or all(claim.is_held() for claim in held)

    @invariant()
    def no_finished_record_is_lost_or_changed(self) -> None:
        for run_id, content in self.world.finished.items():
            assert self.store.path(run_id).read_bytes() == content
        for one in self.store.records():
            if one.status in FINISHED and one.id not in self.world.finished:
                self.world.finished[one.id] = self.store.path(one.id).read_bytes()

    def teardown(self) -> None:
        """Left alone, one harness brings everything to an end, whatever went before, and leaves nothing but records."""
        for harness in list(self.harnesses):
            self.is_gone(harness)
        self.world.is_silent = False
        self.harness_starts(0, 1, None)
        [last] = self.harnesses
        last.sweep.options = replace(last.sweep.options, retry="all")
        for _ in range(40):
            if not last.sweep.is_open:
                break
            self.does(last, last.sweep.step)
            self.now += LEASE_SECONDS / 2
            for attempt in list(self.world.running):
                self.no_point_runs_twice_at_a_time()
                if attempt in self.world.running:
                    end_rank(attempt, 0, "ok")
                    self.world.end(attempt)
            self.no_finished_record_is_lost_or_changed()
        assert not last.sweep.is_open
        assert {record.id for record in self.store.records()} == {run.id for run in self.runs}
        assert Attempts(self.store).open() == {}
        shutil.rmtree(self.folder, ignore_errors=True)


def test_no_sequence_of_events_loses_a_record_or_runs_a_point_twice(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("harness.launch.sweep.host_environment", lambda _: dict(CODE))
    monkeypatch.setattr("harness.launch.attempt.why_invalid", lambda *_: None)
    monkeypatch.setattr("harness.launch.sweep.why_doubtful", lambda *_: None)
    monkeypatch.setattr("harness.launch.sweep.SCHEDULER_SECONDS", 0.0)
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("harness.launch.sweep.ELSEWHERE_SECONDS", 0.0)
    folder = tmp_path_factory.mktemp("machine")
    machine = type("WithTokens", (Machine,), {"tokens": write_tokens(folder / "tokens")})
    run_state_machine_as_test(machine, settings=settings(max_examples=50, stateful_step_count=30, deadline=None))
