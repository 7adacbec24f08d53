"""Frontier's scaling is within 3 points of what was published, under the assumptions that are written down."""

from harness.published_scaling import frontier


def test_frontiers_scaling_is_within_3_points():
    found = frontier()
    assert len(found) == 4
    for one in found:
        assert abs(one.predicted - one.published) <= 3, one
