"""GPFedRec against devices with dense pulls by autograd, and a server with all tables at hand."""

import numpy as np
import pytest
import torch

import hushrec
import reference
from hushrec.errors import ConfigError
from hushrec.federation import spool
from hushrec.federation.backends import Machine
from hushrec.methods.fedncf import FedNCF
from hushrec.methods.gpfedrec import GPFedRec, cosines, neighbour_weights
from hushrec.private import PrivateStore
from hushrec.streams import Streams
from hushrec.testing import Federation, clients_of, taste_world

N_ITEMS = 25
LAYERS = 3


def devices():
    """One item, every item, all but one, repeats, and ordinary ones."""
    rng = np.random.default_rng(5)
    rows = [[3], list(range(N_ITEMS)), list(range(1, N_ITEMS)), [4, 4, 4, 9]]
    return clients_of([*rows, *(rng.permutation(N_ITEMS)[:n].tolist() for n in (2, 5, 9))], N_ITEMS)


def close(ours, theirs):
    theirs = np.asarray(theirs)
    return np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


class Device:
    """One device in torch: whole tables, the mean over all entries in the loss, float64."""

    def __init__(self, fields, positives, excluded, user):
        def parameter(array):
            return torch.tensor(array.astype(np.float64), requires_grad=True)

        self.vector = parameter(fields["vector"].initial)
        self.layers = [
            tuple(parameter(fields[f"layer{k}/{part}"].initial) for part in ("weight", "bias"))
            for k in range(LAYERS)
        ]
        self.positives, self.excluded, self.user, self.target = positives, excluded, user, None

    def logits(self, rows):
        out = torch.cat([self.vector.expand(len(rows), -1), rows], 1)
        for weight, bias in self.layers[:-1]:
            out = torch.relu(out @ weight + bias)
        weight, bias = self.layers[-1]
        return (out @ weight + bias)[:, 0]

    def train(self, received, key, config):
        table = torch.tensor(received, requires_grad=True)
        target = torch.tensor(received if self.target is None else self.target)
        network = [array for layer in self.layers for array in layer]
        descent = torch.optim.SGD(
            [
                {"params": network, "lr": config.lr},
                {"params": [self.vector], "lr": config.lr * config.vector_rate},
                {"params": [table], "lr": config.lr * len(received) * config.item_rate},
            ]
        )
        stream = reference.Stream(key, self.user)
        seen = reference.samples(
            stream, self.positives, self.excluded, len(received), config.negatives
        )
        for _ in range(config.epochs):
            reference.shuffle(stream, seen)
            for start in range(0, len(seen), config.batch):
                part = seen[start : start + config.batch]
                labels = torch.tensor([label for _, label in part]).double()
                descent.zero_grad()
                rows = table[[item for item, _ in part]]
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    self.logits(rows), labels
                )
                (loss + config.pull * ((table - target) ** 2).mean()).backward()
                descent.step()
        self.table = table.detach().numpy()
        return self.table

    def scores(self):
        return self.logits(torch.tensor(self.table)).detach().numpy()


def graph_of(tables, config):
    """The n x n graph, user by user; who is like nobody keeps itself."""
    n = len(tables)
    flat = [table.ravel() for table in tables]
    alike = np.zeros((n, n))
    for u in range(n):
        for v in range(n):
            cosine = flat[u] @ flat[v] / np.sqrt((flat[u] @ flat[u]) * (flat[v] @ flat[v]))
            alike[u, v] = 1 - cosine if config.graph == "dissimilar" else cosine
    if config.graph == "complete":
        return np.full((n, n), 1 / n), n * n
    linked = alike > config.threshold * alike.mean()
    for u in range(n):
        linked[u, u] |= not linked[u].any()
    return linked / linked.sum(1, keepdims=True), linked.sum()


BASE = {"d": 4, "hidden": (6, 3), "item_rate": 0.4, "vector_rate": 3.0, "lr": 0.2, "threshold": 1.0}
OPTIONS = {
    "similar": {},
    "dissimilar": {"graph": "dissimilar"},
    "complete": {"graph": "complete"},
    "small batches": {"batch": 7, "epochs": 2, "negatives": 2},
    "strong pull": {"pull": 40.0, "batch": 20},
    "no pull": {"pull": 0.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_equals_autograd_with_the_whole_graph(name):
    view, method = devices(), GPFedRec(GPFedRec.Config(**{**BASE, **OPTIONS[name]}))
    config, streams, excluded = method.config, Streams(0), view.excluded()
    ours = Federation(method, view, machine=Machine(threads=1, chunk=3))
    fields = method.private_fields(view, ours.shared, streams)
    table = ours.shared["items"].astype(np.float64)
    theirs = [
        Device(fields, view.positives[c], excluded[c], view.users[c]) for c in range(len(view))
    ]
    for number in (1, 2, 3):
        ours.round()
        tables = [device.train(table, streams.key("fit", number), config) for device in theirs]
        weights, edges = graph_of(tables, config)
        if name in ("similar", "dissimilar", "small batches"):
            assert len(view) < edges < len(view) ** 2, "a graph that tells users apart"
        targets = np.einsum("uv,vid->uid", weights, np.stack(tables))
        for device, target in zip(theirs, targets, strict=True):
            device.target = target
        table = targets.mean(axis=0)
    private = ours.store.read(np.arange(len(view)))
    assert close(ours.shared["items"], table)
    assert close(private["table"], [device.table for device in theirs])
    assert close(private["target"], targets)
    assert close(private["vector"], [device.vector.detach().numpy() for device in theirs])
    scores = method.score(ours.shared, private, view)
    assert close(scores, [device.scores() for device in theirs])


def test_without_pull_and_graph_it_is_fedncf_with_private_networks():
    """A complete graph hands out the mean of whole tables, which FedNCF adds up as deltas."""
    view = devices()
    common = {"d": 4, "hidden": (6, 3), "item_rate": 0.4, "vector_rate": 3.0, "init_std": 0.7}
    ours = Federation(GPFedRec(GPFedRec.Config(**common, lr=0.2, graph="complete", pull=0.0)), view)
    fedncf = FedNCF(FedNCF.Config(**common, lr=0.2, dual=True))

    class OneStep(FedNCF):
        """Dual personalization, but with joint steps."""

        def fit(self, shared, private, view, now):
            from hushrec.methods.shared.dual import without_rows
            from hushrec.training.networks import train_row_networks
            from hushrec.training.samples import Descent

            descent = Descent(*self.config.rates(view.n_items), two_steps=False)
            trained = train_row_networks(
                view,
                now,
                shared["items"],
                without_rows(private),
                self.config.pace,
                descent,
                self.config.vector_rate,
            )
            return self.fitted(shared["items"], *trained)

    theirs = Federation(OneStep(fedncf.config), view)
    for _ in range(3):
        ours.round()
        theirs.round()
    assert close(ours.shared["items"], theirs.shared["items"])
    everybody = np.arange(len(view))
    assert close(
        ours.task.method.score(ours.shared, ours.store.read(everybody), view),
        theirs.task.method.score(theirs.shared, theirs.store.read(everybody), view),
    )


def test_the_graph_does_not_depend_on_the_order_of_users():
    tables = np.random.default_rng(0).normal(0.3, 1, (9, 20, 4)).astype(np.float32)
    order = np.random.default_rng(1).permutation(9)
    for graph in ("similar", "dissimilar"):
        one = neighbour_weights(cosines([tables]), graph, 1.0)
        other = neighbour_weights(cosines([tables[order, :7], tables[order, 7:]]), graph, 1.0)
        assert len(np.unique(one)) > 2
        np.testing.assert_array_equal(one[np.ix_(order, order)], other)


def test_who_is_like_nobody_keeps_itself():
    alike = np.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 0.0]])
    weights = neighbour_weights(alike, "similar", 0.5)
    np.testing.assert_array_equal(weights, [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]])
    unlike = neighbour_weights(alike, "dissimilar", 0.5)
    assert unlike[0, 0] == 0 and unlike[0, 2] > 0, "the most unlike ones, never oneself"


@pytest.mark.parametrize("n_items", [N_ITEMS, 3 * spool.BLOCK - 5])
def test_threads_chunks_and_files_do_not_matter(n_items, tmp_path):
    rows = [[1, 2, 3], [4, 5], [1, 5, n_items - 1], [7], [2, 4, 6, 8, 10]]
    view, method = clients_of(rows, n_items), GPFedRec(GPFedRec.Config(**BASE))
    fields = method.private_fields(view, method.init(view, Streams(0)), Streams(0))
    found = []
    for machine, folder in [
        (Machine(threads=1), None),
        (Machine(threads=3, chunk=1), None),
        (Machine(threads=2, chunk=2), tmp_path),
    ]:
        store = PrivateStore(fields, len(view), folder, 0.0)
        federation = Federation(method, view, store=store, machine=machine)
        for cohort in (None, np.array([0, 2, 4]), None):
            collected = federation.round(cohort)
        private = store.read(np.arange(len(view)))
        found.append((federation.shared["items"], private["table"], private["target"]))
        assert not [path for path in tmp_path.iterdir() if path.name.startswith("uploads")]
        size = 4 * n_items * method.config.d
        assert collected.up_bytes == len(view) * size
        assert collected.down_bytes == 2 * len(view) * size, "Q, and an answer"
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, same)


def test_a_device_without_an_answer_pulls_towards_the_shared_table():
    view, method = devices(), GPFedRec(GPFedRec.Config(**BASE))
    federation = Federation(method, view)
    federation.round(np.array([0, 1, 2]))
    received = federation.shared["items"]
    federation.round(np.array([3, 4]))
    newcomer = np.asarray(federation.store.read(np.array([4]))["table"])[0]
    same = (newcomer == received).all(axis=1)
    assert 0 < same.sum() < N_ITEMS, "rows that it did not sample stay where they were"
    answered = np.asarray(federation.store.read(np.array([0, 3, 5]))["target"])
    assert answered[0].any() and answered[1].any() and not answered[2].any()


def test_a_pull_that_never_arrives_is_refused():
    with pytest.raises(ConfigError, match="never arrives: use a smaller pull"):
        GPFedRec(GPFedRec.Config(pull=4.0))
    GPFedRec(GPFedRec.Config(pull=3.99))


@pytest.mark.parametrize("mode", ["central", "distributed"])
def test_noise_on_sums_is_refused(mode):
    more = {"privacy.nodes": 3} if mode == "distributed" else {}
    with pytest.raises(ConfigError, match="relates clients by their single uploads"):
        hushrec.train(
            taste_world(),
            "gpfedrec",
            rounds=1,
            settings={"privacy.mode": mode, "privacy.epsilon": 8.0, **more},
        )


def test_the_statement_says_who_sees_what():
    run = hushrec.train(taste_world(), "gpfedrec", rounds=2, settings={"d": 8})
    told = run.summary.privacy.statement
    assert "uploads its clients' table" in told and "sees every upload by itself" in told


def test_local_noise_is_accounted_for():
    settings = {"privacy.mode": "local-gaussian", "privacy.epsilon": 8.0, "privacy.clip": 1.0}
    run = hushrec.train(taste_world(), "gpfedrec", rounds=2, settings={"d": 8, **settings})
    assert 0 < run.summary.privacy.epsilon <= 8 and run.summary.privacy.trust == "nobody"
