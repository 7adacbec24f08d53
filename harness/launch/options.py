"""Options of a sweep."""

from dataclasses import dataclass, field

from harness.launch.flags import Retry, Saving, Trying
from harness.launch.slurm import Site


@dataclass(frozen=True)
class Options:
    """Options of a sweep: where and how its points run."""

    site: Site = field(default_factory=Site)
    jobs: int | None = None
    """Points that run at the same time; None for one on this machine, and the site's limit on a cluster."""
    time_limit_seconds: float = Trying.time_limit
    hang_seconds: float = Trying.hang_seconds
    collective_timeout_seconds: float | None = None
    """Longest wait in a collective; None for twice the time until a hang is noticed, which is reported better."""
    retries: int = Trying.retries
    retry: Retry = Trying.retry
    saving: Saving = field(default_factory=Saving)
    profile: bool = False
    """True if one more step is profiled after the timed ones."""
    detach: bool = False
    """True if the sweep ends as soon as everything is submitted to the scheduler."""

    @property
    def is_local(self) -> bool:
        """True if ranks are processes of this machine."""
        return self.site.on == "local"

    @property
    def at_once(self) -> int:
        """Number of points that may run at the same time; 0 for as many as there is room for."""
        if self.jobs is not None:
            return self.jobs
        return 1 if self.is_local else self.site.cluster.at_once
