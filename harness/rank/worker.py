"""One rank of a run: `python -m harness.rank.worker ATTEMPT RANK LOCAL_RANK RANKS RENDEZVOUS`."""

import contextlib
import dataclasses
import gc
import math
import os
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.rank.failure import cause_of, fail, one_line
from harness.rank.heartbeat import EXIT_SAVED, Heartbeat, places
from harness.rank.host_use import HostUse
from harness.rank.instruments import DamagedError, Inspection, Measured, Stopwatch
from harness.rank.json_files import write_as
from harness.rank.orders import TrainingOrders
from harness.rank.profile import profiled
from harness.rank.rendezvous import RendezvousError, join
from harness.rank.results import HASHES, MEMORY, RESUMED, Result, Resumption, StepLog, note_evaluations
from harness.rank.roofline import gemm_rate, roofline
from harness.records.environment import CODE, commits, device_environment, git_state, numerics
from harness.records.parts import Git
from harness.records.store import Document
from impl.collectives import observed
from impl.cost.parameters import count_parameters
from impl.data.batches import head_positions
from impl.data.tokens import TokenFolder
from impl.device import Device
from impl.dimensions import dimensions
from impl.engines import Engine, make
from impl.instruments import attention_kernel
from impl.mesh import build_mesh
from impl.own_code import trust_code_of
from impl.plan import AXES
from impl.train import Trainer

if TYPE_CHECKING:  # checkpoints take half a second to import, and most runs have none
    from harness.rank.resume import Continuation
    from impl.certificate import StepHashes


LEAST_SCALE = 1.0
"""Least loss scale: below it fp16 gradients that overflow come from a run that is lost."""


def main(attempt: Path, rank: int, local_rank: int, world_size: int, rendezvous: str) -> int:
    """Train the run of the attempt's orders; return the exit status, and write a failure for the record."""
    try:
        worker = Worker(attempt, rank, local_rank, world_size, rendezvous)
        with observed(worker.heart.began):
            return 0 if worker.run_to_end() else EXIT_SAVED
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        text = one_line(error)
        cause = cause_of(text)
        if isinstance(error, RendezvousError | DamagedError) and cause != "oom":
            cause = "launch"
        where = f" ({places(attempt, world_size)})" if cause == "hang" else ""
        fail(attempt, rank, cause, f"rank {rank}: {text}{where}")
        return 1


class Worker:
    """One rank that trains and evaluates; it logs steps as they happen, and writes its result at the end."""

    def __init__(self, attempt: Path, rank: int, local_rank: int, world_size: int, rendezvous: str) -> None:
        self.heart = Heartbeat.of_this_rank()
        self.heart.enter("start-up", action="rendezvous")
        self.attempt, self.rank, self.local_rank = attempt, rank, local_rank
        self.orders = TrainingOrders.read(attempt)
        self.run = self.orders.run
        # what is imported may have changed since the orders were given
        self.git = git_state(CODE) or self.orders.environment.get("git") or {} if rank == 0 else {}
        trust_code_of(self.run)  # the command that started this rank checked it
        torch.set_num_threads(self.run.threads)
        self.device, self.store = join(self.orders, rank, local_rank, world_size, rendezvous)
        self.mesh = build_mesh(self.run.plan, self.device.type)
        groups = {axis: self.mesh.get_group(axis) for axis in AXES}
        self.heart.name_groups({str(g.group_name): axis if g.size() > 1 else None for axis, g in groups.items()})
        seconds = {"startup": 0.0, "training": 0.0, "evaluation": 0.0}
        self.measured = Measured(seconds=seconds, code=[{**self.git, "step": 0}])
        self.hashes: StepHashes | None = None
        self.watch = Stopwatch(self.device, self.heart.begin, self.heart.end)

    def run_to_end(self) -> bool:
        """Start up, train, evaluate, write the result; return False if the rank saved and ended before, on request."""
        self.heart.enter("start-up", action="making the model")
        data = TokenFolder.open(self.orders.data)
        trainer = make(self.run, data, self.mesh, self.device)
        if not isinstance(trainer, Trainer):
            self._note_batches(trainer)
        self.heart.enter("start-up", action="measuring products")
        gemm = gemm_rate(self.run, self.device)
        inspection = Inspection(trainer, self.mesh, self.watch) if isinstance(trainer, Trainer) else None
        gc.collect()
        gc.freeze()  # the model's objects are never garbage: do not scan them between steps
        self.heart.enter("start-up", action="loading a checkpoint")
        self._load_start(trainer)
        continuation = self._resume(trainer)
        self._certify(trainer)
        self.heart.enter("start-up", action="waiting for all ranks")
        dist.barrier()
        self.measured.seconds["startup"] = time.time() - self.orders.submitted
        Device.of(self.device).reset_peak()  # the recorded peak leaves start-up out
        use = HostUse(self.local_rank)
        status, reason = self._train(trainer, inspection, continuation)
        host = {"host": use.so_far()}
        if status == "saved":
            dist.destroy_process_group()
            return False
        if status == "ok":
            self._evaluate(trainer, self.run.train.steps, final=True)
            if not all(math.isfinite(evaluation["nats"]) for evaluation in self.measured.evaluations):
                status, reason = "nan", "an evaluation's loss is not finite"
        if continuation is not None:
            self.heart.enter("checkpoint", self.run.train.steps)
            continuation.checkpoints.wait()
        memory = {"peak_memory_bytes": self._peak_bytes(), "memory_kind": Device.of(self.device).memory_kind}
        measured = memory | gemm | host | (inspection.of_rank(self.measured) if inspection else {})
        if self.hashes is not None:
            measured |= {"numerics": numerics(self.device), "pieces": self.hashes.pieces}
        elif status == "ok" and self.orders.profile:
            measured |= self._profile(trainer)
        self._write(trainer, measured, status, reason)
        dist.destroy_process_group()
        return True

    def _write(self, trainer: Engine, measured: Document, status: str, reason: str | None) -> None:
        """Write the result for the record."""
        kernel = {"attention": attention_kernel(trainer)} if isinstance(trainer, Trainer) else {}
        result = Result(
            status=status,
            reason=reason,
            seconds=self.measured.seconds,
            evaluations=self.measured.evaluations,
            rank={"rank": self.rank, **measured},
            certificate=[line[HASHES] for line in self.measured.steps if HASHES in line],
            engine={"name": self.run.engine, **trainer.settings(), **kernel},
            device=device_environment(self.device) | ({"git": git} if (git := self.measured.git) else {}),
            resolved={
                "vocab_size": trainer.vocab_size,
                "parameters": count_parameters(self.run.model, trainer.vocab_size),
                "head_positions": 0 if self.run.data.race else head_positions(self.run.model),
            },
        )
        write_as(self.attempt / f"rank-{self.rank}.json", result)

    def _load_start(self, trainer: Engine) -> None:
        """Load the weights of another run if training starts from them."""
        if self.orders.start is None:
            return
        assert isinstance(trainer, Trainer)
        from impl.start import start_from

        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.orders.collective_timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        start_from(self.orders.start, trainer, group)

    def _resume(self, trainer: Engine) -> "Continuation | None":
        """Return the checkpoints if there are to be any, and resume from the last one if there is one."""
        every = self.orders.checkpoint_every or (self.run.train.steps if self.run.keep_end else 0)
        if not every:
            return None
        assert isinstance(trainer, Trainer)  # other engines are refused checkpoints before they start
        from harness.rank.resume import AgreedEnd, Continuation

        # on this machine no end is ever requested
        is_slurm = self.orders.on == "slurm"
        end = AgreedEnd(self.store, self.rank, self.heart.is_end_requested) if is_slurm else None
        timeout = timedelta(seconds=self.orders.collective_timeout_seconds)
        note = partial(self.heart.begin, "files of a checkpoint")
        continuation = Continuation(self.orders.checkpoints, every, trainer, timeout, end, note)
        before, warnings = continuation.resume()
        self.measured = before or self.measured
        if before:
            before.note_code(self.git, before.resumed[-1])
            mixed = f"not all steps are of one known code: commit {commits(Git(**before.git))}"
            warnings += [mixed] * (len(before.code) > 1)
        if self.rank == 0:
            (self.attempt / RESUMED).unlink(missing_ok=True)  # of an earlier start of the same job
            if before or warnings:
                write_as(self.attempt / RESUMED, Resumption(warnings, self.measured.resumed, self.measured.git))
        return continuation

    def _certify(self, trainer: Engine) -> None:
        """Hash every step if there is to be a certificate."""
        if self.orders.certify:
            assert isinstance(trainer, Trainer)  # other engines are refused certificates before they start
            from impl.certificate import StepHashes

            self.hashes = StepHashes(trainer)

    def _train(
        self, trainer: Engine, inspection: Inspection | None, continuation: "Continuation | None"
    ) -> tuple[str, str | None]:
        """Do all remaining steps, each timed until the device has finished it, to the end, a NaN loss or a request."""
        every, begun = self.run.evaluation.every, len(self.measured.steps)
        with contextlib.closing(StepLog(self.attempt, self.rank, self.measured.steps)) as log:
            for i in range(begun, self.run.train.steps):
                self.watch.reset()
                begin = time.perf_counter()
                self.heart.enter("training", i)
                first = inspection if i == begun else None
                step = first.step(i, self.measured) if first else trainer.step(i, self.watch)
                loss, norm = step.loss.item(), step.grad_norm.item()  # waits for the device
                seconds = time.perf_counter() - begin
                self.measured.seconds["training"] += seconds
                line = {"step": i, "loss": loss, "grad_norm": norm, "lr": step.lr, "seconds": seconds}
                line |= {"skipped": True} if step.is_skipped else {}
                line |= {HASHES: self.hashes.of(step)} if self.hashes else {}
                self.measured.steps.append(line)
                self.measured.peak_bytes = self._peak_bytes()
                log.add(line | {MEMORY: self.measured.peak_bytes})
                if not math.isfinite(loss):
                    return "nan", f"loss is {loss} at step {i}"
                if step.is_skipped and isinstance(trainer, Trainer) and trainer.loss_scale.scale < LEAST_SCALE:
                    return "nan", f"fp16 gradients overflow at any loss scale down to {LEAST_SCALE:g}, at step {i}"
                if every and (i + 1) % every == 0 and i + 1 < self.run.train.steps:
                    self._evaluate(trainer, i + 1, final=False)
                if continuation is not None:
                    self.heart.enter("checkpoint", i + 1)
                    if inspection is not None:
                        inspection.keep(self.measured)
                    if continuation.after(i + 1, self.measured, seconds):
                        return "saved", None
                    self.heart.enter("training", i + 1)
        return "ok", None

    def _evaluate(self, trainer: Engine, step: int, *, final: bool) -> None:
        begin = time.perf_counter()
        self.heart.enter("evaluation", step)
        found = [{"step": step, **dataclasses.asdict(evaluation)} for evaluation in trainer.evaluate(final=final)]
        if self.run.evaluation.dimensions and isinstance(trainer, Trainer):
            found[0]["dimensions"] = dimensions(trainer, final=final)
        self.measured.evaluations += found
        if self.rank == 0:
            note_evaluations(self.attempt, found)
        self.measured.seconds["evaluation"] += time.perf_counter() - begin

    def _note_batches(self, engine: Any) -> None:
        """Note each batch of another engine's evaluation as progress, as its collectives are not observed."""
        score = engine.next_token

        def noted(*batch: Any) -> Any:
            self.heart.begin("a batch")
            return score(*batch)

        engine.next_token = noted

    def _profile(self, trainer: Engine) -> Document:
        """Repeat the last step under a profiler, and measure its operations alone."""
        begin, last = time.perf_counter(), self.run.train.steps - 1
        self.heart.enter("profiling")
        found = {
            "profile": profiled(lambda: trainer.step(last).grad_norm.item(), self.device),
            "limit": roofline(self.run, trainer.vocab_size, self.mesh, self.device),
        }
        self.measured.seconds["profiling"] = time.perf_counter() - begin
        return found

    def _peak_bytes(self) -> int:
        """Return the peak so far, that of the attempts before this one included."""
        return max(self.measured.peak_bytes, Device.of(self.device).peak_bytes())


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), rendezvous=sys.argv[5])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # everything is written, and threads of libraries may fail when an interpreter ends
