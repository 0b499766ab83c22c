"""Dual personalization as a switch on FedMF and FedRecon, and FedRecon's reconstruction."""

import numpy as np
import pytest

import hushrec
import reference
from hushrec.aggregation import ExactSum
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.methods.fedmf import FedMF
from hushrec.methods.fedrecon import FedRecon
from hushrec.methods.pfedrec import PFedRec
from hushrec.private import PrivateStore
from hushrec.streams import Round, Streams
from hushrec.testing import MethodContract


def three_rounds(method, view, streams):
    """Train everybody; return (shared, private, the last round's Fitted)."""
    shared = method.init(view, streams)
    store = PrivateStore(method.private_fields(view, shared, streams), len(view))
    everybody = np.arange(len(view))
    for number in (1, 2, 3):
        received = method.download(shared)
        assert received.keys() == {"items"}
        fitted = method.fit(received, store.read(everybody), view, Round(number, streams))
        store.write(everybody, fitted.private)
        summed = ExactSum(view.n_items)
        summed.add(fitted.update)
        shared = method.apply(shared, summed.total())
    return shared, store.read(everybody), fitted


def close(ours, theirs):
    theirs = np.asarray(theirs)
    return np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("dual", [False, True], ids=["plain", "dual"])
@pytest.mark.parametrize("kind", [FedMF, FedRecon])
def test_it_equals_autograd(kind, dual, tiny):
    view, streams = make_split(tiny, SplitConfig(), Streams(0)).train, Streams(6)
    more = {"recon_epochs": 3, "recon_lr": 0.4} if kind is FedRecon else {}
    config = kind.Config(d=5, item_rate=2.0, init_std=0.7, batch=9, epochs=2, dual=dual, **more)
    method, everybody = kind(config), np.arange(len(view))
    shared, private, fitted = three_rounds(method, view, streams)

    table = method.init(view, streams)["items"]
    first = method.private_fields(view, {}, streams)["vector"].initial
    vectors, excluded = [first] * len(view), view.excluded()
    for number in (1, 2, 3):
        own_tables = []
        for c in everybody:
            mine = streams.key("fit", number), view.users[c], view.positives[c], excluded[c], table
            fixed = {"negatives": 4, "batch": 9, "with_bias": False}
            rate = config.lr
            if kind is FedRecon:
                frozen, vectors[c], *_ = reference.fit_device(
                    *mine, first, 0.0, epochs=3, rate=0.4, item_rate=0.0, two_steps=False, **fixed
                )
                np.testing.assert_array_equal(frozen, table)
                rate = config.lr if dual else 0.0
            out, vectors[c], _, _, loss = reference.fit_device(
                *mine,
                vectors[c],
                0.0,
                epochs=2,
                rate=rate,
                item_rate=config.lr * view.n_items * 2.0,
                two_steps=dual,
                **fixed,
            )
            own_tables.append(out)
            assert fitted.losses[c] == pytest.approx(loss, rel=1e-3) or number < 3
        table = reference.server_mean(table, own_tables)
    assert close(shared["items"], table)
    assert close(private["vector"], vectors)
    own = np.array([own_tables[c] @ vectors[c] for c in everybody])
    mean = np.array([table @ vectors[c] for c in everybody])
    assert close(method.score(shared, private, view), own if dual else mean)
    assert np.linalg.norm(own - mean) > 0.01 * np.linalg.norm(own)


def test_fedrecon_inherits_nothing(tiny):
    view, streams = make_split(tiny, SplitConfig(), Streams(0)).train, Streams(6)
    method = FedRecon(FedRecon.Config(d=5))
    shared, private, _ = three_rounds(method, view, streams)
    other = {"vector": np.full_like(private["vector"], 9.0)}
    once, again = (method.fit(shared, p, view, Round(4, streams)).private for p in (private, other))
    np.testing.assert_array_equal(once["vector"], again["vector"])


def test_dual_fedmf_starts_and_keeps_what_pfedrec_does(tiny):
    """The same first table, and own rows kept on the device; only the bias is missing."""
    view, streams = make_split(tiny, SplitConfig(), Streams(0)).train, Streams(6)
    dual = FedMF(FedMF.Config(d=5, item_rate=2.0, init_std=1.0, dual=True))
    pfedrec = PFedRec(PFedRec.Config(d=5, item_rate=2.0, init_std=1.0))
    shared = dual.init(view, streams)
    for name, array in pfedrec.init(view, streams).items():
        np.testing.assert_array_equal(array, shared[name])
    assert dual.private_fields(view, shared, streams).keys() == {"vector", "rows"}
    plain = FedMF(FedMF.Config(d=5))
    assert plain.init(view, streams).keys() == {"items"}
    assert plain.private_fields(view, shared, streams).keys() == {"vector"}


class TestDualFedMF(MethodContract):
    method = FedMF
    options = {"dual": True}  # noqa: RUF012


class TestDualFedRecon(MethodContract):
    method = FedRecon
    options = {"dual": True}  # noqa: RUF012


CELLS = [
    ("fedmf", "paper", 0.652),
    ("fedmf", "dualper", 0.716),
    ("fedrecon", "paper", 0.645),
    ("fedrecon", "dualper", 0.702),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "preset", "paper"), CELLS)
def test_table_3_of_the_paper_under_its_protocol(data_dir, method, preset, paper):
    """PFedRec's table 3, ML-100K, HR@10 against 99 sampled items, with the leak; 3 seeds."""
    data = hushrec.load("ml-100k", data_dir=data_dir)
    hits = [
        hushrec.train(data, method, preset=preset, protocol="published", seed=seed).metrics[
            "sampled99"
        ]["hr@10"]
        for seed in range(3)
    ]
    assert np.mean(hits) == pytest.approx(paper, abs=0.015)
