"""PFedRec as a whole against devices that each keep their own table."""

import numpy as np

import reference
from hushrec.aggregation import ExactSum
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.methods.baselines import LocalOnly
from hushrec.methods.pfedrec import PFedRec
from hushrec.private import PrivateStore
from hushrec.streams import Round, Streams


def test_a_device_scores_with_its_own_table(tiny):
    view, streams = make_split(tiny, SplitConfig(), Streams(0)).train, Streams(6)
    method = PFedRec(PFedRec.Config(d=5, item_rate=2.0))
    shared = method.init(view, streams)
    fields = method.private_fields(view, shared, streams)
    store, everybody = PrivateStore(fields, len(view)), np.arange(len(view))
    table = shared["items"].copy()
    vectors = [fields["vector"].initial] * len(view)
    biases = [float(fields["bias"].initial)] * len(view)
    excluded = view.excluded()
    for number in (1, 2, 3):
        received = method.download(shared)
        assert received.keys() == {"items"}
        fitted = method.fit(received, store.read(everybody), view, Round(number, streams))
        store.write(everybody, fitted.private)
        summed = ExactSum(view.n_items)
        summed.add(fitted.update)
        shared = method.apply(shared, summed.total())

        own_tables = []
        for c in everybody:
            out, vectors[c], biases[c], _, loss = reference.fit_device(
                streams.key("fit", number),
                view.users[c],
                view.positives[c],
                excluded[c],
                table,
                vectors[c],
                biases[c],
                negatives=4,
                epochs=1,
                batch=256,
                rate=0.1,
                item_rate=0.1 * view.n_items * 2.0,
                with_bias=True,
                two_steps=True,
            )
            own_tables.append(out)
            np.testing.assert_allclose(fitted.losses[c], loss, rtol=1e-4)
        table = reference.server_mean(table, own_tables)

    scores = method.score(shared, store.read(everybody), view)
    own = np.array([own_tables[c] @ vectors[c] + biases[c] for c in everybody])
    mean = np.array([table @ vectors[c] + biases[c] for c in everybody])
    scale = np.linalg.norm(own)
    assert np.linalg.norm(scores - own) / scale < 1e-5
    # Not a vacuous statement: scoring with the newest mean is something else.
    assert np.linalg.norm(mean - own) / scale > 0.01
    assert np.linalg.norm(shared["items"] - table) / np.linalg.norm(table) < 1e-5


def test_local_only_is_pfedrec_without_federation(tiny):
    """In the first round, before anything was averaged, the two are the same."""
    view, streams = make_split(tiny, SplitConfig(), Streams(0)).train, Streams(6)
    everybody, after = np.arange(len(view)), {}
    for kind in (PFedRec, LocalOnly):
        method = kind(kind.Config(d=5, item_rate=2.0, init_std=1.0))
        shared = method.init(view, streams)
        store = PrivateStore(method.private_fields(view, shared, streams), len(view))
        after[kind] = method.fit(shared, store.read(everybody), view, Round(1, streams)).private
    for name in ("vector", "bias"):
        np.testing.assert_array_equal(after[PFedRec][name], after[LocalOnly][name])
    rows, own = after[PFedRec]["rows"], after[LocalOnly]["table"]
    for name in ("indptr", "ids", "rows"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(own, name))
