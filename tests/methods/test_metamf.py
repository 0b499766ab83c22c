"""MetaMF against one module with all of Theta, one user at a time, by autograd."""

import math

import numpy as np
import pytest
import torch

import reference
from hushrec.aggregation import ExactSum
from hushrec.methods.metamf import MetaMF
from hushrec.methods.shared.options import adam_step, first_moments
from hushrec.private import PrivateStore
from hushrec.streams import Round, Streams
from hushrec.testing import clients_of

N_ITEMS = 25
ROUNDS = 3
BASE = {"d": 6, "memory": 5, "hidden": 7, "rank": 3, "lr": 0.01}
OPTIONS = {
    "plain": {},
    "small batch": {"batch": 12, "negatives": 2},
    "decay": {"decay": 0.5, "vector_lr": 0.2},
}


def devices():
    """One item, every item, all but one, repeats, and ordinary ones."""
    rng = np.random.default_rng(5)
    rows = [[3], range(N_ITEMS), range(1, N_ITEMS), [4, 4, 9, 4]]
    rows += [rng.permutation(N_ITEMS)[:n] for n in (2, 5, 9)]
    return clients_of([list(map(int, row)) for row in rows], N_ITEMS)


def fit_all(method, shared, store, view, now):
    everybody = np.arange(len(view))
    fitted = method.fit(method.download(shared), store.read(everybody), view, now)
    store.write(everybody, fitted.private)
    summed = ExactSum(view.n_items)
    summed.add(fitted.update)
    return fitted, method.apply(shared, summed.total())


def trained(view, streams, options):
    method = MetaMF(MetaMF.Config(**{**BASE, **options}))
    shared = method.init(view, streams)
    store = PrivateStore(method.private_fields(view, shared, streams), len(view))
    for number in range(1, ROUNDS + 1):
        fitted, shared = fit_all(method, shared, store, view, Round(number, streams))
    return method, shared, dict(store.read(np.arange(len(view)))), fitted.losses


class MetaNetwork(torch.nn.Module):
    """Theta as layers that generate a whole item table and an MLP."""

    def __init__(self, shared, config):
        super().__init__()
        self.config = config
        rows = np.asarray(shared["items"], np.float64).reshape(-1, config.hidden + 1)
        self.memory = torch.nn.Parameter(torch.tensor(shared["memory"], dtype=torch.float64))
        self.left = self.linear(rows.T)
        layers = {n: a for n, a in shared.items() if n.startswith(("hidden", "factor", "layer"))}
        self.layers = torch.nn.ModuleDict(
            {n.replace("/", " "): self.linear(a) for n, a in layers.items()}
        )

    @staticmethod
    def linear(array):
        """A layer from weights [inputs, outputs] whose last row is the bias."""
        made = torch.nn.Linear(len(array) - 1, array.shape[1], dtype=torch.float64)
        with torch.no_grad():
            made.weight.copy_(torch.tensor(np.asarray(array, np.float64)[:-1].T))
            made.bias.copy_(torch.tensor(np.asarray(array, np.float64)[-1]))
        return made

    def forward(self, vector):
        """Return the scores of all items."""
        context, d = vector @ self.memory, self.config.d
        first, second, third = (torch.relu(self.layers[f"hidden{k}"](context)) for k in range(3))
        left = self.left(first).reshape(-1, self.config.rank)
        table = left @ self.layers["factor"](first).reshape(self.config.rank, d)
        inner = self.layers["layer0 weight"](second).reshape(d, 8)
        hidden = torch.relu(table @ inner + self.layers["layer0 bias"](second))
        return hidden @ self.layers["layer1 weight"](third) + self.layers["layer1 bias"](third)

    def arrays(self):
        """Return Theta in the form of the shared parameters."""

        def whole(made):
            return torch.cat([made.weight.T, made.bias[None]]).detach().numpy()

        rows = whole(self.left).T.reshape(-1, self.config.rank * (self.config.hidden + 1))
        named = {name.replace(" ", "/"): whole(made) for name, made in self.layers.items()}
        return {"items": rows, "memory": self.memory.detach().numpy(), **named}


def batch_of(view, c, config, key):
    """Draw one client's shuffled samples, and take the first batch."""
    stream = reference.Stream(key, view.users[c])
    excluded = np.unique(view.positives[c])
    seen = reference.samples(stream, view.positives[c], excluded, view.n_items, config.negatives)
    reference.shuffle(stream, seen)
    return seen[: config.batch]


@pytest.mark.parametrize("name", OPTIONS)
def test_metamf_equals_autograd(name):
    view, streams = devices(), Streams(6)
    method, shared, kept, losses = trained(view, streams, OPTIONS[name])
    config, first = method.config, method.init(view, streams)
    network = MetaNetwork(first, config)
    theta = list(network.parameters())
    start = method.private_fields(view, first, streams)["vector"].initial
    vectors = [torch.tensor(start, dtype=torch.float64, requires_grad=True) for _ in view.users]
    server = reference.Adam(theta, config.lr, config.decay)
    devices_ = [reference.Adam([vector], config.vector_lr, config.decay) for vector in vectors]
    for number in range(1, ROUNDS + 1):
        sums, expected, moves = [torch.zeros_like(v) for v in theta], [], []
        for c, vector in enumerate(vectors):
            seen = batch_of(view, c, config, streams.key("fit", number))
            ids, labels = zip(*seen, strict=True)
            labels = torch.tensor(labels, dtype=torch.float64)
            logits = network(vector)[list(ids)]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
            of_vector, *gradients = torch.autograd.grad(loss, [vector, *theta])
            moves.append(of_vector)
            expected.append(loss.item())
            sums = [total + g for total, g in zip(sums, gradients, strict=True)]
        server.step([total / len(view) for total in sums])
        for device, move in zip(devices_, moves, strict=True):
            device.step([move])
    reference.close(losses, expected)
    for each, array in network.arrays().items():
        reference.close(shared[each], array)
    reference.close(kept["vector"], np.stack([v.detach().numpy() for v in vectors]))
    reference.close(
        method.score(shared, kept, view), np.stack([network(v).detach().numpy() for v in vectors])
    )


def test_another_vector_gets_another_table_from_the_same_network():
    view, streams = devices(), Streams(6)
    method, shared, kept, _ = trained(view, streams, {})
    one, two = ({"vector": kept["vector"][c : c + 1]} for c in (0, 4))
    tables = [method.item_tables(shared, private)["generated"] for private in (one, two)]
    assert tables[0].shape == (N_ITEMS, 6) and (abs(tables[0] - tables[1]).max(1) > 0).all()


def test_rows_of_unseen_items_are_generated_as_well():
    """No sample of a client touches an item, and its row still depends on the client's vector."""
    view, streams = devices(), Streams(6)
    method, shared, kept, _ = trained(view, streams, {})
    scores = method.score(shared, kept, view)
    assert len(np.unique(scores, axis=0)) == len(view)


def test_the_facts_say_what_a_device_downloads():
    """0.47 million parameters and 4,104 for each item, at the paper's sizes."""
    view = devices()
    method = MetaMF()
    (size,) = method.facts(method.init(view, Streams(0))).values()
    assert math.isclose(size, 4 * (473_617 + 4_104 * N_ITEMS) / 1e6)


def test_adam_of_the_server_is_adam_as_written_out():
    rng = np.random.default_rng(0)
    network = rng.standard_normal(1001).astype(np.float32)
    twin = torch.tensor(network, dtype=torch.float64)
    adam, state = reference.Adam([twin], 0.013, 0.3), first_moments(network)
    for _ in range(5):
        gradient = rng.standard_normal(1001) * 10.0 ** rng.integers(-6, 3, 1001)
        network, state = adam_step(network, state, gradient, 0.013, 0.3)
        adam.step([torch.tensor(gradient)])
    reference.close(network, twin.numpy())
