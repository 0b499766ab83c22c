"""FedRec: the contract, the two ways to fill in, and a rating model that is found again."""

from dataclasses import replace

import numpy as np
import pytest

from hushrec.data.views import Ragged
from hushrec.streams import Round, Streams
from hushrec.testing import clients_of
from hushrec.testing.checks import Federation

pytest.importorskip("torch", reason="needs the 'neural' extra")
from hushrec.methods.fedrec import FedRec, FedRecConfig, mean_ratings


def rated():
    """Users of two tastes, who rate the one half of the items 5 and the other 1."""
    generator = np.random.default_rng(0)
    view = clients_of([generator.permutation(60)[:20].tolist() for _ in range(30)])
    taste = np.repeat(np.arange(30) % 2, 20)
    values = np.where((view.positives.values < 30) == (taste == 0), 5, 1).astype(np.float32)
    return replace(view, values=Ragged(view.positives.indptr, values))


@pytest.mark.parametrize(("fill", "number"), [("average", 50), ("hybrid", 3), ("hybrid", 10)])
def test_made_up_ratings(fill, number):
    view, method = rated(), FedRec(FedRecConfig(fill=fill))
    shared = method.init(view, Streams(0))
    vectors = np.random.default_rng(1).standard_normal((30, 20)).astype(np.float32)
    samples = method.samples(shared["items"], vectors, view, Round(number, Streams(0)))
    means = mean_ratings(view)
    for c in range(30):
        mine = slice(samples.indptr[c], samples.indptr[c + 1])
        given = dict(zip(view.positives[c].tolist(), view.values[c].tolist(), strict=True))
        assert mine.stop - mine.start == 40
        for item, label in zip(samples.items[mine], samples.labels[mine], strict=True):
            if item in given:
                assert label == pytest.approx(given[item] - means[c], abs=1e-6)
            elif fill == "hybrid" and number == 10:
                assert label == pytest.approx(float(vectors[c] @ shared["items"][item]), abs=1e-5)
            else:
                assert label == 0


def test_tastes_are_found():
    view, method = rated(), FedRec(FedRecConfig(d=4))
    federation = Federation(method, view)
    for _ in range(40):
        federation.round()
    scores = method.score(federation.shared, federation.store.read(np.arange(30)), view)
    likes_first = scores[:, :30].mean(1) > scores[:, 30:].mean(1)
    assert (likes_first == (np.arange(30) % 2 == 0)).mean() > 0.9
