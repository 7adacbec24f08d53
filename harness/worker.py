"""One rank of a run: `python -m harness.worker ATTEMPT RANK LOCAL_RANK RANKS RENDEZVOUS`, started by the launcher."""

import dataclasses
import gc
import json
import math
import resource
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from harness import launch
from harness.continuation import Continuation, Measured
from harness.environment import device_environment
from harness.inside import Inside
from harness.limit import gemm_rate, limit
from harness.profile import profiled
from harness.stopwatch import Stopwatch
from harness.store import RESUMED, write_atomically
from impl.cost.parameters import count_parameters
from impl.data.batches import head_positions
from impl.data.tokens import TokenFolder
from impl.engines import Engine, make
from impl.mesh import build_mesh
from impl.run import Run, from_dict
from impl.train import Trainer

FLUSH_SECONDS = 0.5


def main(attempt: Path, rank: int, local_rank: int, world_size: int, rendezvous: str) -> int:
    """Train the run in `attempt/spec.json`; returns the exit status, and leaves a failure for the collector."""
    try:
        Worker(attempt, rank, local_rank, world_size, rendezvous).run_to_end()
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _failed(attempt, rank, "oom", error)
    except Exception as error:
        memory = "can't allocate memory" in str(error)  # what PyTorch's CPU allocator raises
        return _failed(attempt, rank, "oom" if memory else "failed", error)
    return 0


class Worker:
    """Trains and evaluates, writing steps as they happen and the result once at the end."""

    def __init__(self, attempt: Path, rank: int, local_rank: int, world_size: int, rendezvous: str) -> None:
        self.attempt, self.rank = attempt, rank
        self.spec = json.loads((attempt / "spec.json").read_text())
        self.run: Run = from_dict(self.spec["run"])
        torch.set_num_threads(self.run.threads)
        cuda = self.spec["device"] == "cuda"
        self.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=self.spec["collective_timeout_seconds"]),
            device_id=self.device if cuda else None,
        )
        self.mesh = build_mesh(self.run.plan, self.device.type)
        self.measured = Measured(seconds={"startup": 0.0, "training": 0.0, "evaluation": 0.0})
        self.watch = Stopwatch(self.device)

    def run_to_end(self) -> None:
        """Start up, train, evaluate, write the result."""
        data = TokenFolder.open(Path(self.spec["data"]))
        trainer = make(self.run, data, self.mesh, self.device)
        gemm = gemm_rate(self.run, self.device)
        inside = Inside(trainer, self.mesh, self.watch) if isinstance(trainer, Trainer) else None
        gc.collect()
        gc.freeze()  # the model's objects are never garbage: do not scan them between steps
        continuation = self._continuation(trainer)
        dist.barrier()
        self.measured.seconds["startup"] = time.time() - self.spec["submitted"]
        status, reason = self._train(trainer, inside, continuation)
        if status == "ok":
            self._evaluate(trainer, self.run.train.steps, final=True)
            if not all(math.isfinite(evaluation["nats"]) for evaluation in self.measured.evaluations):
                status, reason = "nan", "an evaluation's loss is not finite"
        if continuation is not None:
            continuation.checkpoints.wait()
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
                **(self._profile(trainer) if status == "ok" and self.spec.get("profile") else {}),
            },
            "engine": {"name": self.run.engine, **trainer.settings()},
            "device": device_environment(self.device),
            "resolved": {
                "vocab_size": trainer.vocab_size,
                "parameters": count_parameters(self.run.model, trainer.vocab_size).total,
                "head_positions": head_positions(self.run.model),
            },
        }
        write_atomically(self.attempt / f"rank-{self.rank}.json", json.dumps(result))
        dist.destroy_process_group()

    def _continuation(self, trainer: Engine) -> Continuation | None:
        """Checkpoints, if they are asked for; training goes on from the last one, if there is one."""
        if not self.spec["checkpoint_every"]:
            return None
        assert isinstance(trainer, Trainer)  # no other is started then
        timeout = timedelta(seconds=self.spec["collective_timeout_seconds"])
        folder = Path(self.spec["checkpoints"])
        continuation = Continuation(folder, self.spec["checkpoint_every"], trainer, timeout)
        found = continuation.resume()
        if found is not None:
            self.measured, warnings = found
            if self.rank == 0:
                told = {"step": self.measured.resumed[-1], "warnings": warnings}
                write_atomically(self.attempt / RESUMED, json.dumps(told))
        return continuation

    def _train(
        self, trainer: Engine, inside: Inside | None, continuation: Continuation | None
    ) -> tuple[str, str | None]:
        """All steps that are left, timed at their ends, when the device has finished; stops at the first NaN loss."""
        every, begun = self.run.evaluation.every, len(self.measured.steps)
        with open(self.attempt / f"rank-{self.rank}.steps.jsonl", "w") as log:
            flushed = time.perf_counter()
            log.writelines(json.dumps(line) + "\n" for line in self.measured.steps)
            log.flush()
            for i in range(begun, self.run.train.steps):
                begin = time.perf_counter()
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
                if continuation is not None:
                    continuation.after(i + 1, self.measured)
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
        for evaluation in trainer.evaluate(final=final):
            self.measured.evaluations.append({"step": step, **dataclasses.asdict(evaluation)})
        self.measured.seconds["evaluation"] += time.perf_counter() - begin

    def _profile(self, trainer: Engine) -> dict[str, Any]:
        """The last step once more, under a profiler, and what its parts take alone."""
        begin, last = time.perf_counter(), self.run.train.steps - 1
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


def _failed(attempt: Path, rank: int, status: str, error: BaseException) -> int:
    traceback.print_exc()
    sys.stderr.flush()
    first_line = (str(error).strip().splitlines() or [""])[0]
    launch.fail(attempt, rank, status, f"rank {rank}: {type(error).__name__}: {first_line}")
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), rendezvous=sys.argv[5]))
