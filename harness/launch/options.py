"""Where and how the points of a sweep run."""

from dataclasses import dataclass, field

from harness.launch.flags import Retry, Saving, Trying
from harness.launch.slurm import Site


@dataclass(frozen=True)
class Options:
    """Where and how the points of a sweep run."""

    site: Site = field(default_factory=Site)
    jobs: int | None = None
    """Points at the same time; None: one on this machine, on a cluster as many as its site allows."""
    time_limit_seconds: float = Trying.time_limit
    hang_seconds: float = Trying.hang_seconds
    collective_timeout_seconds: float | None = None
    """None: twice as long as it takes to see a hang, of which more can be told."""
    retries: int = Trying.retries
    retry: Retry = Trying.retry
    saving: Saving = field(default_factory=Saving)
    profile: bool = False
    """Look where a step's time goes, after what is timed."""
    detach: bool = False
    """Leave as soon as everything is submitted to the scheduler."""

    @property
    def is_local(self) -> bool:
        return self.site.on == "local"

    @property
    def at_once(self) -> int:
        """Points that may run at the same time; 0: as many as there is room for."""
        if self.jobs is not None:
            return self.jobs
        return 1 if self.is_local else self.site.cluster.at_once
