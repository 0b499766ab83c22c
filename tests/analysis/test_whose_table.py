"""Inference with the own, the server's and another user's table (PFedRec, figure 3)."""

import numpy as np
import pytest

import hushrec
from hushrec.analysis.run import _lenders, metrics_by_table
from hushrec.evaluation.metrics import rank_full, summarise

KINDS = {
    "pfedrec": ("pfedrec", {}),
    "half own": ("pfedrec", {"own_share": 0.5}),
    "network": ("pfedrec", {"score_function": "mlp", "hidden": [4, 3]}),
    "network and vector": ("fedncf", {"dual": True, "hidden": [4]}),
    "fedmf dual": ("fedmf", {"dual": True}),
    "fedrecon dual": ("fedrecon", {"dual": True, "recon_epochs": 2}),
    "fedrap": ("fedrap", {"epochs": 2, "table_lr": 20.0}),
    "fedrkg": ("fedrkg", {"interval": 2}),
}


def tables_of(run):
    """Every user's own table, and the server's: plainly, one by one."""
    name, users = run.model.method.name, np.arange(run.split.n_users)
    private, shared = run.model.private.read(users), run.model.shared
    if name == "fedrkg":
        return np.array(private["table"]), shared["guidance"]
    if name == "fedrap":
        own = private["personal"] * np.asarray(private["scale"])[:, None, None]
        return own + shared["common"], shared["common"]
    own = np.repeat(shared["received"][None], len(users), axis=0)
    rows = private["rows"]
    for user in users:
        mine = slice(rows.indptr[user], rows.indptr[user + 1])
        own[user, rows.ids[mine]] = rows.rows[mine]
    return own, shared["items"]


def scored(private, user, table):
    """What a user's vector, or network, makes of a table."""
    if "layer0/weight" not in private:
        bias = private["bias"][user] if "bias" in private else 0.0
        return table @ private["vector"][user] + bias
    if "vector" in private:
        table = np.hstack([np.tile(private["vector"][user], (len(table), 1)), table])
    last = max(int(name[5]) for name in private if name.startswith("layer"))
    for k in range(last + 1):
        table = table @ private[f"layer{k}/weight"][user] + private[f"layer{k}/bias"][user]
        table = table if k == last else np.maximum(table, 0)
    return table[:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_three_tables_the_slow_way(kind, small, tmp_path):
    method, settings = KINDS[kind]
    hushrec.train(small, method, rounds=5, settings={"d": 5, **settings}, out=tmp_path / "run")
    run = hushrec.Run.open(tmp_path / "run", small)  # from what is stored
    own, shared = tables_of(run)
    private = run.model.private.read(np.arange(run.split.n_users))
    lender = _lenders(run)
    view, targets = run.split.history("test"), run.split.test
    seen = view.positives
    found = metrics_by_table(run)
    for whose in ("own", "global", "random"):
        scores = np.empty((len(own), small.n_items), np.float32)
        for user in range(len(own)):
            table = {"own": own[user], "global": shared, "random": own[lender[user]]}[whose]
            scores[user] = scored(private, user, table)
        ranks = rank_full(scores, view.users, seen, targets)
        slow = summarise(ranks, ["hr@10", "ndcg@10", "auc"])
        for name, value in slow.items():
            assert found[whose]["full"][name] == pytest.approx(value, abs=2e-3), (whose, name)
    assert found["own"]["full"] == run.metrics["full"]
    assert found["own"] != found["random"]


def test_nobody_gets_their_own_table(small):
    run = hushrec.train(small, "pfedrec", rounds=1)
    lender = _lenders(run)
    users = np.arange(small.n_users)
    assert (lender != users).all()
    assert sorted(lender) == list(users)  # everybody lends once


@pytest.mark.parametrize("method", ["fedmf", "popularity", "fedals"])
def test_one_table_is_refused(method, tiny):
    run = hushrec.train(tiny, method, rounds=1)
    with pytest.raises(hushrec.HushrecError, match="keeps no item table on the clients"):
        metrics_by_table(run)


def test_a_share_of_the_own_step(tiny):
    """Share 0 scores like the received table, 1 with the paper's own one, 1/2 in between."""
    last = {"d": 5, "evaluation.every": 3}  # one look: all three select the last round
    runs = {
        share: hushrec.train(tiny, "pfedrec", rounds=3, settings={**last, "own_share": share})
        for share in (0.0, 0.5, 1.0)
    }
    everybody = np.arange(tiny.n_users)
    rows = {share: run.model.private.read(everybody)["rows"] for share, run in runs.items()}
    received = runs[0.0].model.shared["received"]
    np.testing.assert_array_equal(rows[0.0].rows, received[rows[0.0].ids])
    # What is shared does not depend on what a device scores with.
    np.testing.assert_array_equal(runs[0.0].model.shared["items"], runs[1.0].model.shared["items"])
    np.testing.assert_allclose(
        rows[0.5].rows, (rows[0.0].rows + rows[1.0].rows) / 2, rtol=1e-4, atol=1e-5
    )
