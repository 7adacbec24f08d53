"""Supervision of one rank of a Slurm job, including its preemption, time limit and requeueing."""

import os
import signal
import time
from pathlib import Path

import submitit

from harness.rank.heartbeat import Ended
from harness.rank.job import adopt, job_of
from harness.rank.orders import Orders
from harness.rank.results import has_results
from harness.rank.slurm_queue import ask
from harness.rank.supervisor import Supervisor, Task

SIGNAL_SPREAD_SECONDS = 90.0
"""Inaccuracy of the signal before a job's end: up to a minute early, on a clock that is read every half minute."""
BEGAN = "LMSCALE_JOB_BEGAN"
"""Variable of a job with the time at which it began, before the site's `setup`, in seconds since the epoch."""
END_SECONDS = 900.0
"""Longest time from SIGTERM to the job's end; GraceTime of a partition is shorter."""


def supervise(folder: str) -> None:
    """Supervise this task's rank for the attempt in a folder, unless the attempt is over or another job's."""
    task, attempt = submitit.JobEnvironment(), Path(folder)
    orders = Orders.read(attempt)
    if has_results(attempt):
        return  # it came to its end just as it was requeued, or a killed controller has forgotten that it did
    restart = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    if adopt(attempt, "slurm", task.job_id):
        place = Task(task.global_rank, task.num_tasks, task.local_rank, task.job_id, task.hostnames, task.node)
        SlurmSupervisor(attempt, orders, place, restart=restart).run()


class SlurmSupervisor(Supervisor):
    """Supervisor of one rank in one start of a Slurm job; a requeued job continues the same attempt.

    SIGUSR2 announces the end of the job, by a preempting job or its time limit: all ranks save a checkpoint, and the
    supervisor of rank 0 requeues the job. SIGTERM may mean the same where the scheduler then requeues the job by
    itself, or that it was cancelled: ranks save, and nothing is requeued.
    """

    ignored = (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM)
    is_announced = is_terminated = has_reacted = False
    set_up = 0.0
    """Seconds that the job had taken before this process began."""

    def run(self) -> Ended:
        """Supervise the rank; if it has saved a checkpoint for the job's end, requeue the job."""
        signal.signal(signal.SIGUSR2, self._announce)  # in place of submitit's handlers, which ignore the ranks
        signal.signal(signal.SIGTERM, self._terminate)
        self.set_up = max(0.0, time.time() - float(os.environ.get(BEGAN) or time.time()))
        ended = super().run()
        if ended == "saved" and self.task.rank == 0:
            self._leave_node()
        return ended

    def _announce(self, *_: object) -> None:
        self.is_announced, self.is_terminated = True, False  # some sites send SIGTERM along with SIGUSR2

    def _terminate(self, *_: object) -> None:
        self.is_terminated = True

    def _prepare_end_of_job(self, now: float) -> None:
        """Have the ranks save; without checkpoints requeue the job at once, unless its time is over."""
        if self.task.rank or self.has_reacted or not (self.is_announced or self.is_terminated):
            return
        self.has_reacted = True
        if self.orders.checkpoint_every:
            self.memory.request_end()
        elif not self.is_terminated and not self._is_time_over(now) and self.restart < self.orders.requeues:
            requeue(self.task.job)  # if this is refused, the rank goes on for as long as it may

    def _leave_node(self) -> None:
        """Requeue the job, now that there is a checkpoint, and wait for the end that this brings."""
        if self.is_terminated:
            time.sleep(END_SECONDS)  # a job that ends by itself is not requeued by the scheduler
        if self.restart >= self.orders.requeues:
            refused = f"it was requeued {self.restart} times, which is the limit"
        elif (refused := requeue(self.task.job)) is None:
            time.sleep(END_SECONDS)
        is_limit = self._is_time_over(time.monotonic())
        cause, why = ("time_limit", "its job's time limit") if is_limit else ("preempted", "another job")
        refused = refused or "Slurm did not end the job"
        self._fail(cause, f"rank 0 saved a checkpoint for {why}, and was not requeued: {refused}")

    def _is_time_over(self, now: float) -> bool:
        """Return True if a signal at this time announces the job's time limit."""
        job = job_of(self.attempt)
        if job is None or not job.seconds:
            return False
        return self.set_up + now - self.begun > job.seconds - self.orders.signal_seconds - SIGNAL_SPREAD_SECONDS


def requeue(job: str) -> str | None:
    """Put a running job back into the queue; return why it is refused, None if it is not."""
    status, answer = ask("scontrol", "requeue", job)
    return answer if status else None
