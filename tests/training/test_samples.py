"""Samples: nobody is shown the future, and epochs, thresholds and halves are what they say."""

from dataclasses import replace

import numpy as np

from hushrec.data.views import Ragged
from hushrec.streams import Round, Streams
from hushrec.testing import clients_of
from hushrec.training.samples import draw_device_samples, draw_negatives, draw_silo_samples, halves
from odd_clients import population, ragged

STREAMS = Streams(3)


def rated_clients():
    view = clients_of([[7], list(range(60)), [5, 3, 9], [], [4, 40, 8, 2, 20], [59, 1]])
    values = np.arange(len(view.values.values), dtype=np.float32) % 5 + 1
    return replace(view, values=Ragged(view.values.indptr, values))


def test_negatives_know_the_future_under_the_published_protocol_only():
    view = population()
    heldout = [
        [k] if k not in view.positives[c] else [] for c, k in enumerate([9, 0, 11, 1, 2, 3, 4])
    ]
    published = replace(view, never_negative=ragged(heldout))
    honest_hits = published_hits = 0
    for number in range(60):
        for kind in (view, published):
            drawn = draw_negatives(kind, 4, Round(number, Streams(0)))
            hits = sum(int(np.isin(heldout[c], drawn[c]).sum()) for c in range(len(view)))
            for c in range(len(view)):
                assert not np.isin(drawn[c], view.positives[c]).any()
            if kind is view:
                honest_hits += hits
            else:
                published_hits += hits
    assert published_hits == 0
    assert honest_hits > 100
    assert (view.protocol, published.protocol) == ("honest", "published")
    # Device 2 has all items but one; when that one is held out it has no negative at all.
    assert len(draw_negatives(published, 4, Round(1, Streams(0)))[2]) == 0


def test_ratings_up_to_the_threshold_are_negatives():
    view = rated_clients()
    samples = draw_device_samples(view, 0, 1, Round(1, STREAMS), positive_above=3.0)
    for client in range(len(view)):
        at = slice(samples.indptr[client], samples.indptr[client + 1])
        said = dict(zip(samples.items[at], samples.labels[at], strict=True))
        expected = dict(zip(view.positives[client], view.values[client] > 3, strict=True))
        assert said == expected


def test_support_and_query_share_no_sample():
    samples = draw_device_samples(rated_clients(), 4, 1, Round(1, STREAMS))
    support, query = halves(samples, 2)
    for client in range(len(samples.indptr) - 1):
        whole = samples.items[samples.indptr[client] : samples.indptr[client + 1]]
        mine = support.items[support.indptr[client] : support.indptr[client + 1]]
        rest = query.items[query.indptr[client] : query.indptr[client + 1]]
        half = (len(whole) + 1) // 2
        assert mine.tolist() == whole[:half].tolist() * 2
        assert rest.tolist() == whole[half:].tolist()


def test_every_epoch_has_its_own_negatives_and_all_positives():
    everything = list(range(60))
    view = replace(clients_of([[1, 2, 3], everything, [4]]), holders=np.array([0, 0, 1], np.int32))
    samples = draw_silo_samples(view, 2, 3, Round(1, Streams(0)))
    assert samples.lengths.tolist() == [3 * 3 + 60, 3]
    seen = []
    for epoch in range(3):
        at = samples.order[0][epoch * 69 : (epoch + 1) * 69]
        assert len(np.unique(at)) == 69
        first = samples.users[at] == 0
        positives = samples.labels[at] == 1
        assert sorted(samples.items[at][first & positives]) == [1, 2, 3]
        assert sorted(samples.items[at][~first]) == everything
        seen.append(at[~positives])
        assert not np.isin(samples.items[at[~positives]], [1, 2, 3]).any()
    assert len(np.unique(np.concatenate(seen))) == 3 * 6
