"""One rank of a run: `python -m harness.rank.worker ATTEMPT RANK LOCAL_RANK RANKS RENDEZVOUS`."""

import dataclasses
import gc
import json
import math
import os
import resource
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.rank import supervisor
from harness.rank.failure import cause_of
from harness.rank.heartbeat import Heartbeat, entered, places
from harness.rank.instruments import Inside
from harness.rank.journal import DamagedError, Measured
from harness.rank.notice import Notice
from harness.rank.orders import TrainingOrders
from harness.rank.profile import profiled
from harness.rank.rendezvous import MeetingError, meet
from harness.rank.roofline import gemm_rate, limit
from harness.rank.stopwatch import Stopwatch
from harness.records.environment import device_environment
from harness.records.store import RESUMED, write_atomically
from impl.collectives import observed
from impl.cost.parameters import count_parameters
from impl.data.batches import head_positions
from impl.data.tokens import TokenFolder
from impl.dimensions import dimensions
from impl.engines import Engine, make
from impl.mesh import build_mesh
from impl.pipeline.schedules import trust
from impl.plan import AXES
from impl.train import Trainer

if TYPE_CHECKING:  # checkpoints take half a second to import, and most runs have none
    from harness.rank.resume import Continuation

FLUSH_SECONDS = 0.5


def main(attempt: Path, rank: int, local_rank: int, world_size: int, rendezvous: str) -> int:
    """Train the run that the attempt's orders name; returns the exit status, and leaves a failure for the collector."""
    try:
        is_over = Worker(attempt, rank, local_rank, world_size, rendezvous).run_to_end()
    except Exception as error:
        return _failed(attempt, rank, world_size, error)
    return 0 if is_over else supervisor.TOLD


class Worker:
    """Trains and evaluates, writing steps as they happen and the result once at the end."""

    def __init__(self, attempt: Path, rank: int, local_rank: int, world_size: int, rendezvous: str) -> None:
        self.heart = Heartbeat.of_this_rank()
        self.heart.enter("start-up", action="meeting")
        self.attempt, self.rank = attempt, rank
        self.orders = TrainingOrders.read(attempt)
        self.run = self.orders.run
        trust(self.run.plan.schedule)  # by the command that started this rank
        torch.set_num_threads(self.run.threads)
        self.device, self.store = meet(self.orders, rank, local_rank, world_size, rendezvous)
        self.mesh = build_mesh(self.run.plan, self.device.type)
        groups = {axis: self.mesh.get_group(axis) for axis in AXES}
        self.heart.name_groups({str(g.group_name): axis if g.size() > 1 else None for axis, g in groups.items()})
        self.measured = Measured(seconds={"startup": 0.0, "training": 0.0, "evaluation": 0.0})
        self.watch = Stopwatch(self.device, self.heart.begin, self.heart.end)

    def run_to_end(self) -> bool:
        """Start up, train, evaluate, write the result; whether it came to that, and was not told to end before."""
        with observed(self.heart.began):
            return self._run_to_end()

    def _run_to_end(self) -> bool:
        self.heart.enter("start-up", action="making the model")
        data = TokenFolder.open(self.orders.data)
        trainer = make(self.run, data, self.mesh, self.device)
        if not isinstance(trainer, Trainer):
            self._note_batches(trainer)
        self.heart.enter("start-up", action="measuring products")
        gemm = gemm_rate(self.run, self.device)
        inside = Inside(trainer, self.mesh, self.watch) if isinstance(trainer, Trainer) else None
        gc.collect()
        gc.freeze()  # the model's objects are never garbage: do not scan them between steps
        self.heart.enter("start-up", action="loading a checkpoint")
        self._start(trainer)
        continuation = self._continuation(trainer)
        self.heart.enter("start-up", action="waiting for all ranks")
        dist.barrier()
        self.measured.seconds["startup"] = time.time() - self.orders.submitted
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the peak that is recorded leaves start-up out
        status, reason = self._train(trainer, inside, continuation)
        if status == "told":
            dist.destroy_process_group()
            return False
        if status == "ok":
            self._evaluate(trainer, self.run.train.steps, final=True)
            if not all(math.isfinite(evaluation["nats"]) for evaluation in self.measured.evaluations):
                status, reason = "nan", "an evaluation's loss is not finite"
        if continuation is not None:
            self.heart.enter("checkpoint", self.run.train.steps)
            continuation.checkpoints.wait()
        self._write(trainer, inside, gemm, status, reason)
        dist.destroy_process_group()
        return True

    def _write(
        self, trainer: Engine, inside: Inside | None, gemm: dict[str, Any], status: str, reason: str | None
    ) -> None:
        """Leave the result for the collector."""
        result = {
            "status": status,
            "reason": reason,
            "seconds": self.measured.seconds,
            "evaluations": self.measured.evaluations,
            "resumed": self.measured.resumed,
            "rank": {
                "rank": self.rank,
                **self._memory(),
                **gemm,
                **(inside.of_rank(self.measured) if inside else {}),
                **(self._profile(trainer) if status == "ok" and self.orders.profile else {}),
            },
            "engine": {"name": self.run.engine, **trainer.settings()},
            "device": device_environment(self.device),
            "resolved": {
                "vocab_size": trainer.vocab_size,
                "parameters": count_parameters(self.run.model, trainer.vocab_size).total,
                "head_positions": 0 if self.run.data.race else head_positions(self.run.model),
            },
        }
        write_atomically(self.attempt / f"rank-{self.rank}.json", json.dumps(result))

    def _start(self, trainer: Engine) -> None:
        """Weights of another run, if training starts from them."""
        if self.orders.start is None:
            return
        assert isinstance(trainer, Trainer)
        from impl.checkpoint import start_from

        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.orders.collective_timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        start_from(self.orders.start, trainer, group)

    def _continuation(self, trainer: Engine) -> "Continuation | None":
        """Checkpoints, if they are asked for; training goes on from the last one, if there is one."""
        every = self.orders.checkpoint_every or (self.run.train.steps if self.run.keep_end else 0)
        if not every:
            return None
        assert isinstance(trainer, Trainer)  # no other is started then
        from harness.rank.resume import Continuation

        timeout = timedelta(seconds=self.orders.collective_timeout_seconds)
        continuation = Continuation(self.orders.checkpoints, every, trainer, timeout)
        before, warnings = continuation.resume()
        self.measured = before or self.measured
        if self.rank == 0 and (before or warnings):
            told = {"step": before.resumed[-1] if before else 0, "warnings": warnings}
            write_atomically(self.attempt / RESUMED, json.dumps(told))
        return continuation

    def _train(
        self, trainer: Engine, inside: Inside | None, continuation: "Continuation | None"
    ) -> tuple[str, str | None]:
        """All steps that are left, timed at their ends, when the device has finished; stops at the first NaN loss, and
        when it is told to."""
        every, begun = self.run.evaluation.every, len(self.measured.steps)
        is_told = self.orders.on == "slurm" and continuation is not None  # others go on from nowhere, or are not told
        notice = Notice(self.store, self.rank, self.heart.is_told) if is_told else None
        with open(self.attempt / f"rank-{self.rank}.steps.jsonl", "w") as log:
            flushed = time.perf_counter()
            log.writelines(json.dumps(line) + "\n" for line in self.measured.steps)
            log.flush()
            for i in range(begun, self.run.train.steps):
                begin = time.perf_counter()
                self.heart.enter("training", i)
                self.watch.reset()
                looks = inside if i == begun else None
                step = looks.step(i, self.measured) if looks else trainer.step(i, self.watch)
                loss, norm = step.loss.item(), step.grad_norm.item()  # waits for the device
                end = time.perf_counter()
                self.measured.seconds["training"] += end - begin
                line = {"step": i, "loss": loss, "grad_norm": norm, "lr": step.lr, "seconds": end - begin}
                line |= {"skipped": True} if step.is_skipped else {}
                self.measured.steps.append(line)
                flushed = self._log(log, flushed, line)
                if not math.isfinite(loss):
                    return "nan", f"loss is {loss} at step {i}"
                if every and (i + 1) % every == 0 and i + 1 < self.run.train.steps:
                    self._evaluate(trainer, i + 1, final=False)
                ends = notice is not None and notice.ends(i + 1, end - begin)
                if continuation is not None:
                    with entered(self.heart, "checkpoint", i + 1):
                        continuation.after(i + 1, self.measured, now=ends)
                        if ends:
                            continuation.checkpoints.wait()
                if ends:
                    return "told", None
        return "ok", None

    def _log(self, log: IO[str], flushed: float, line: dict[str, Any]) -> float:
        log.write(json.dumps(line) + "\n")
        now = time.perf_counter()
        if now - flushed > FLUSH_SECONDS:
            log.flush()
            return now
        return flushed

    def _evaluate(self, trainer: Engine, step: int, *, final: bool) -> None:
        begin = time.perf_counter()
        self.heart.enter("evaluation", step)
        found = [{"step": step, **dataclasses.asdict(evaluation)} for evaluation in trainer.evaluate(final=final)]
        if self.run.evaluation.dimensions and isinstance(trainer, Trainer):
            found[0]["dimensions"] = dimensions(trainer, final=final)
        self.measured.evaluations += found
        self.measured.seconds["evaluation"] += time.perf_counter() - begin

    def _note_batches(self, engine: Any) -> None:
        """Another engine's evaluation, of which nobody here knows the collectives, is seen to go on by its batches."""
        score = engine.next_token

        def noted(*batch: Any) -> Any:
            self.heart.begin("a batch")
            return score(*batch)

        engine.next_token = noted

    def _profile(self, trainer: Engine) -> dict[str, Any]:
        """The last step once more, under a profiler, and what its parts take alone."""
        begin, last = time.perf_counter(), self.run.train.steps - 1
        self.heart.enter("profiling")
        found = {
            "profile": profiled(lambda: trainer.step(last).grad_norm.item(), self.device),
            "limit": limit(self.run, trainer.vocab_size, self.mesh, self.device),
        }
        self.measured.seconds["profiling"] = time.perf_counter() - begin
        return found

    def _memory(self) -> dict[str, Any]:
        if self.device.type == "cuda":
            return {"peak_memory_bytes": torch.cuda.max_memory_allocated(), "memory_kind": "CUDA allocator peak"}
        return {
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "memory_kind": "peak RSS",
        }


def _failed(attempt: Path, rank: int, ranks: int, error: Exception) -> int:
    traceback.print_exc()
    sys.stderr.flush()
    first_line = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {first_line}"
    cause = "launch" if isinstance(error, MeetingError | DamagedError) else cause_of(text)
    where = f" ({places(attempt, ranks)})" if cause == "hang" else ""
    supervisor.fail(attempt, rank, cause, f"rank {rank}: {text}{where}")
    return 1


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), rendezvous=sys.argv[5])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is written: how the libraries' threads take an interpreter's end is no fact about the run
