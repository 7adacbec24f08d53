"""Where ranks can run: nodes that they fill, GPUs that are there."""

import pytest

from harness.launch import Site
from harness.verbs import _site
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run


def runs(*degrees: int) -> list[Run]:
    return [Run(plan=Plan(dp=dp), train=Recipe(global_batch=dp, microbatch=1)) for dp in degrees]


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (8, True), (9, False), (12, True), (16, True), (17, False)])
def test_ranks_fill_the_nodes_of_a_cluster_evenly(ranks: int, fits: bool) -> None:
    site = Site("slurm", ranks_per_node=8)
    reason = site.why_invalid(ranks)
    assert (reason is None) == fits
    if fits:
        assert site.nodes(ranks) * (ranks // site.nodes(ranks)) == ranks


def test_auto_takes_gpus_only_where_every_point_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, device in ((0, "cpu"), (1, "cpu"), (2, "cuda"), (8, "cuda")):
        monkeypatch.setattr("harness.verbs.gpu_count", lambda gpus=gpus: gpus)
        assert _site("local", "auto", runs(1, 2)).device == device
    assert _site("local", "cpu", runs(1, 2)).device == "cpu"


def test_more_ranks_than_gpus_is_invalid_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.launch.gpu_count", lambda: 1)
    assert Site(device="cuda").why_invalid(1) is None
    reason = Site(device="cuda").why_invalid(2)
    assert reason is not None
    assert "2 GPUs" in reason
    assert "--device cpu" in reason
