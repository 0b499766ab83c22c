"""The map: groups that are apart stay apart, and each step is the paper's."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from hushrec.analysis.item_map import _slope, affinities, tsne


@pytest.fixture(scope="module")
def groups():
    """Three groups of 15 points in ten dimensions, far from each other."""
    rng = np.random.default_rng(0)
    centres = 20 * np.eye(3, 10)
    return np.repeat(centres, 15, axis=0) + rng.normal(size=(45, 10)), np.repeat(range(3), 15)


def test_groups_that_are_apart_stay_apart(groups):
    points, group = groups
    places = tsne(points, perplexity=10, seed=1)
    distances = cdist(places, places)
    np.fill_diagonal(distances, np.inf)
    assert (group[distances.argmin(axis=1)] == group).all()
    centres = np.array([places[group == k].mean(axis=0) for k in range(3)])
    widest = max(np.linalg.norm(places[group == k] - centres[k], axis=1).max() for k in range(3))
    nearest = min(np.linalg.norm(centres[a] - centres[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert nearest > 2 * widest
    assert np.array_equal(places, tsne(points, perplexity=10, seed=1)), "a seed repeats the map"
    assert not np.array_equal(places, tsne(points, perplexity=10, seed=2))


def test_every_point_has_so_many_neighbours(groups):
    points, _ = groups
    near = affinities(((points[:, None] - points[None]) ** 2).sum(axis=2), np.log(7.0))
    np.testing.assert_allclose(near.sum(axis=1), 1)
    assert not near.diagonal().any()
    entropy = -np.sum(near * np.log(np.where(near > 0, near, 1)), axis=1)
    np.testing.assert_allclose(np.exp(entropy), 7, rtol=1e-4)


def test_a_step_goes_down_the_divergence(groups):
    """The gradient against differences of the divergence itself."""
    points, _ = groups
    near = affinities(cdist(points[::3], points[::3], "sqeuclidean"), np.log(4.0))
    near = (near + near.T) / (2 * len(near))
    places = np.random.default_rng(3).normal(size=(len(near), 2))

    def divergence(at):
        kernel = 1 / (1 + ((at[:, None] - at[None]) ** 2).sum(axis=2))
        np.fill_diagonal(kernel, 0)
        kernel /= kernel.sum()
        both = near > 0
        return (near[both] * np.log(near[both] / kernel[both])).sum()

    slope, tiny = _slope(places, near, 1.0), 1e-6
    for i, k in ((0, 0), (4, 1), (9, 0)):
        step = np.zeros_like(places)
        step[i, k] = tiny
        rise = (divergence(places + step) - divergence(places - step)) / (2 * tiny)
        assert slope[i, k] == pytest.approx(rise, rel=1e-4, abs=1e-8)


def test_equal_points_and_too_few():
    assert np.isfinite(tsne(np.zeros((6, 3)))).all()
    with pytest.raises(ValueError, match="four points"):
        tsne(np.zeros((3, 2)))
