"""FedPerGNN against devices with literal lists of neighbours, by autograd."""

import numpy as np
import pytest
import torch

import reference
from hushrec.aggregation import ExactSum
from hushrec.methods.fedpergnn import FedPerGNN
from hushrec.private import PrivateStore
from hushrec.streams import Round, Streams
from hushrec.testing import clients_of

N_ITEMS = 25
ROUNDS = 3
MAPS = ("item", "neighbour", "user", "join", "top")
BASE = {"d": 5, "lr": 0.01, "init_std": 0.5}
OPTIONS = {
    "plain": {},
    "all neighbours": {"fewest": 1, "dropout": 0.0},
    "late expansion": {"expand_after": 1, "negatives": 2},
    "decay": {"decay": 0.5, "dropout": 0.5},
}
COHORTS = {
    "everybody": [range(7)] * ROUNDS,
    "drawn": [(0, 1, 3, 4), (1, 2, 5, 6), (0, 2, 3, 6)],
}


def devices():
    """One item, every item, all but one, repeats, and ordinary ones."""
    rng = np.random.default_rng(5)
    rows = [[3], range(N_ITEMS), range(1, N_ITEMS), [4, 4, 9, 4]]
    rows += [rng.permutation(N_ITEMS)[:n] for n in (2, 5, 9)]
    return clients_of([list(map(int, row)) for row in rows], N_ITEMS)


def trained(view, streams, options, cohorts):
    method = FedPerGNN(FedPerGNN.Config(**{**BASE, **options}))
    shared = method.init(view, streams)
    store = PrivateStore(method.private_fields(view, shared, streams), len(view))
    for number, cohort in enumerate(cohorts, 1):
        who = np.array(cohort)
        fitted = method.fit(
            method.download(shared), store.read(who), view.take(who), Round(number, streams)
        )
        store.write(who, fitted.private)
        summed = ExactSum(view.n_items)
        summed.add(fitted.update)
        shared = method.apply(shared, summed.total())
    return method, shared, dict(store.read(np.arange(len(view)))), fitted.losses


class Graphs:
    """Every device's graph: own items, and of each item a list of the other users' embeddings."""

    def __init__(self, method, view, streams):
        first = method.init(view, streams)
        self.config, self.view = method.config, view
        self.items = torch.tensor(first["items"], dtype=torch.float64, requires_grad=True)
        self.maps = {
            n: torch.tensor(first[n], dtype=torch.float64, requires_grad=True) for n in MAPS
        }
        start = method.private_fields(view, first, streams)["vector"].initial
        self.vectors = [
            torch.tensor(start, dtype=torch.float64, requires_grad=True) for _ in view.users
        ]
        self.published = {}
        """Embeddings as the users last sent them, by user."""

    def neighbours(self, client, item):
        """Return the published embeddings of all other users of an item."""
        users = [v for v in self.published if item in self.view.positives[v]]
        if len(users) < self.config.fewest:
            return []
        return [self.published[v] for v in users if v != client]

    def state(self, client, history):
        hidden = []
        for item in history:
            others = self.neighbours(client, item)
            mean = sum(others) / len(others) if others else torch.zeros(self.config.d)
            both = [mean.double() @ self.maps["neighbour"], self.items[item] @ self.maps["item"]]
            hidden.append(torch.cat(both) @ self.maps["join"])
        user = self.vectors[client] @ self.maps["user"]
        if not hidden:
            return torch.cat([torch.zeros_like(user), user]) @ self.maps["top"]
        scores = torch.stack([h @ user for h in hidden]) / np.sqrt(self.config.d)
        weights = torch.softmax(scores, 0)
        mixed = sum(w * h for w, h in zip(weights, hidden, strict=True))
        return torch.cat([mixed, user]) @ self.maps["top"]

    def score(self, client, history):
        return self.items @ self.maps["item"] @ self.state(client, history)


def twin(method, view, streams, cohorts):
    graphs, config = Graphs(method, view, streams), method.config
    learnt = [graphs.items, *graphs.maps.values()]
    server = reference.Adam(learnt, config.lr, config.decay)
    own = [reference.Adam([vector], config.vector_lr, config.decay) for vector in graphs.vectors]
    for number, cohort in enumerate(cohorts, 1):
        sums, losses, moves = [torch.zeros_like(v) for v in learnt], [], {}
        for c in cohort:
            user, history = int(view.users[c]), np.unique(view.positives[c])
            coins = streams.generator("dropout", number, user).random(len(history))
            stream = reference.Stream(streams.key("fit", number), user)
            seen = reference.samples(
                stream, view.positives[c], history, view.n_items, config.negatives
            )
            ids, labels = zip(*seen, strict=True)
            logits = graphs.score(c, history[coins >= config.dropout])[list(ids)]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, torch.tensor(labels, dtype=torch.float64)
            )
            moving = [graphs.vectors[c], *learnt]
            moves[c], *gradients = torch.autograd.grad(loss, moving, materialize_grads=True)
            losses.append(loss.item())
            sums = [total + g for total, g in zip(sums, gradients, strict=True)]
        server.step([total / len(cohort) for total in sums])
        for c, move in moves.items():
            own[c].step([move])
            if number > config.expand_after:
                graphs.published[c] = graphs.vectors[c].detach().clone()
    return graphs, losses


@pytest.mark.parametrize("cohorts", COHORTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_sums_equal_literal_lists_of_neighbours(name, cohorts):
    view, streams = devices(), Streams(6)
    given = view, streams, OPTIONS[name], COHORTS[cohorts]
    method, shared, kept, losses = trained(*given)
    graphs, expected = twin(method, view, streams, COHORTS[cohorts])
    reference.close(losses, expected)
    reference.close(shared["items"], graphs.items.detach().numpy())
    for each, tensor in graphs.maps.items():
        reference.close(shared[each], tensor.detach().numpy())
    reference.close(kept["vector"], np.stack([v.detach().numpy() for v in graphs.vectors]))
    every = [graphs.score(c, np.unique(view.positives[c])) for c in range(len(view))]
    reference.close(method.score(shared, kept, view), np.stack([s.detach().numpy() for s in every]))


def test_the_running_sums_hold_what_everybody_sent_last():
    view, streams = devices(), Streams(6)
    _, shared, kept, _ = trained(view, streams, {}, COHORTS["drawn"])
    expected = np.zeros((N_ITEMS, 6))
    share = kept["share"]
    np.add.at(expected, share.ids, share.rows)
    reference.close(shared["neighbours"], expected)


def test_without_neighbours_it_is_attention_over_the_history():
    view, streams = devices(), Streams(6)
    method, shared, kept, _ = trained(view, streams, {"expand_after": 9}, COHORTS["everybody"])
    assert not shared["neighbours"].any()
    other = {**shared, "neighbour": shared["neighbour"] + 1}
    scores = [method.score(each, kept, view) for each in (shared, other)]
    np.testing.assert_array_equal(*scores)


def test_rows_of_few_users_are_not_sent():
    """An item with one or two users would show an embedding to whoever receives the row."""
    view, streams = devices(), Streams(6)
    method, shared, _, _ = trained(view, streams, {}, COHORTS["everybody"])
    users = np.zeros(N_ITEMS)
    for c in range(len(view)):
        users[np.unique(view.positives[c])] += 1
    sent = method.download(shared)["neighbours"]
    assert (users < 3).any() and not sent[users < 3].any()
    np.testing.assert_array_equal(sent[users >= 3], shared["neighbours"][users >= 3])
