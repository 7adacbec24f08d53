"""Optimizing Distributed Training on Frontier for Large Language Models (arXiv 2312.12705)."""

from harness.experiment.kit import Tier


def cost(small: str, paper: str) -> dict[Tier, str]:
    """Return the expected time of each tier, on two cores and on GCDs with 64 GB."""
    return {"smoke": "1 min, 2 CPU cores", "small": f"{small}, 2 CPU cores", "paper": f"{paper} GCDs with 64 GB"}
