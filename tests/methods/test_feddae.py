"""FedDAE against one full-width module per client, trained by autograd."""

import numpy as np
import pytest
import torch

import hushrec
import reference
from hushrec.aggregation import ExactSum
from hushrec.methods.feddae import FedDAE, first_rows
from hushrec.private import PrivateStore
from hushrec.streams import Round, Streams
from hushrec.testing import MethodContract, clients_of

N_ITEMS = 25
ROUNDS = 3
BASE = {"d": 4, "lr": 0.02, "server_lr": 0.01}
OPTIONS = {
    "plain": {},
    "several steps": {"epochs": 3},
    "divergence": {"kl": 0.3, "anneal": True},
    "no dropout": {"dropout": 0.0, "kl": 1.0},
    "decay": {"decay": 0.1},
    "authors": {"personal": False, "epochs": 2},
}


def devices():
    """One item, every item, repeats, and ordinary ones."""
    rng = np.random.default_rng(5)
    rows = [
        [3],
        list(range(N_ITEMS)),
        [4, 4, 9, 4],
        *(rng.permutation(N_ITEMS)[:n] for n in (2, 9)),
    ]
    return clients_of([list(map(int, row)) for row in rows], N_ITEMS)


def trained(view, streams, options, rounds=ROUNDS):
    """Train the method's way; return (method, shared, what is kept, losses of the last round)."""
    method = FedDAE(FedDAE.Config(**{**BASE, **options}))
    shared = method.init(view, streams)
    store = PrivateStore(method.private_fields(view, shared, streams), len(view))
    everybody = np.arange(len(view))
    for number in range(1, rounds + 1):
        fitted = method.fit(
            method.download(shared), store.read(everybody), view, Round(number, streams)
        )
        store.write(everybody, fitted.private)
        summed = ExactSum(view.n_items)
        summed.add(fitted.update)
        shared = method.apply(shared, summed.total())
    return method, shared, dict(store.read(everybody)), fitted.losses


class Autoencoder(torch.nn.Module):
    """All parameters of one client, with first layers as whole matrices [items, width]."""

    def __init__(self, method, shared, fields, n_items):
        super().__init__()
        d = method.config.d
        whole = first_rows(shared["key"], np.arange(n_items), 5 * d, n_items)
        whole[:, : shared["rows"].shape[1]] = shared["rows"]
        parts = {
            "global": whole[:, : 2 * d],
            "local": whole[:, 2 * d : 4 * d],
            "gate": whole[:, 4 * d :],
        }
        arrays = {f"{part}/hidden/weight": array for part, array in parts.items()}
        arrays |= {name: array for name, array in shared.items() if name.count("/") == 2}
        arrays |= {name: field.initial for name, field in fields.items() if name != "rows"}
        self.names = list(arrays)
        self.values = torch.nn.ParameterList(
            torch.nn.Parameter(torch.tensor(array, dtype=torch.float64))
            for array in arrays.values()
        )

    def __getitem__(self, name):
        return self.values[self.names.index(name)]

    def linear(self, name, inputs):
        return inputs @ self[f"{name}/weight"] + self[f"{name}/bias"]

    def encode(self, part, inputs):
        out = self.linear(f"{part}/out", torch.tanh(self.linear(f"{part}/hidden", inputs)))
        return out[: len(out) // 2], out[len(out) // 2 :]

    def gate(self, x, kept):
        hidden = torch.relu(self.linear("gate/hidden", x)) * kept
        return torch.softmax(self.linear("gate/out", hidden), 0)

    def decode(self, z):
        hidden = torch.tanh(self.linear("decoder/hidden", z))
        return self["decoder/out/weight"] @ hidden + self["decoder/out/bias"]

    def loss(self, x, config, generator, number):
        items, dropout = torch.nonzero(x)[:, 0], config.dropout
        kept = torch.zeros(len(x), 2, dtype=torch.float64)
        kept[items] = torch.tensor(
            generator.random((len(items), 2)) >= dropout, dtype=torch.float64
        )
        hidden = torch.tensor(generator.random(config.d) >= dropout) / (1 - dropout)
        normal = torch.tensor(generator.standard_normal((2, config.d)))
        w1, w2 = self.gate(x, hidden)
        inputs = (x / x.norm())[:, None] * kept / (1 - dropout)
        mu_g, log_g = self.encode("global", inputs[:, 0])
        mu_l, log_l = self.encode("local", inputs[:, 1])
        z = w1 * (mu_l + normal[0] * torch.exp(log_l / 2)) + w2 * (
            mu_g + normal[1] * torch.exp(log_g / 2)
        )
        mixed = torch.distributions.Normal(
            w1 * mu_l + w2 * mu_g, torch.sqrt(w1**2 * torch.exp(log_l) + w2**2 * torch.exp(log_g))
        )
        prior = torch.distributions.Normal(torch.zeros(config.d), torch.ones(config.d))
        divergence = torch.distributions.kl_divergence(mixed, prior).sum()
        weight = config.kl * (np.tanh(number / 10) if config.anneal else 1)
        return -(x * torch.log_softmax(self.decode(z), 0)).sum() + weight * divergence

    def score(self, x):
        w1, w2 = self.gate(x, torch.ones(1))
        unit = x / x.norm()
        return self.decode(w1 * self.encode("local", unit)[0] + w2 * self.encode("global", unit)[0])


def twin(view, streams, method, rounds=ROUNDS):
    """Train every client's module alone; return the modules and the losses of the last round."""
    config = method.config
    first = method.init(view, streams)
    fields = method.private_fields(view, first, streams)
    modules = [Autoencoder(method, first, fields, view.n_items) for _ in view.users]
    common = ("global", "decoder") if config.personal else ("global", "decoder", "local")
    histories = torch.zeros(len(view), view.n_items, dtype=torch.float64)
    for c in range(len(view)):
        histories[c, view.positives[c].astype(int)] = 1
    server = {n: modules[0][n].detach().clone() for n in modules[0].names if n.startswith(common)}
    gate = {n: modules[0][n].detach().clone() for n in modules[0].names if n.startswith("gate")}
    moments = {n: [torch.zeros_like(a), torch.zeros_like(a)] for n, a in server.items()}
    for number in range(1, rounds + 1):
        sums, losses = {n: torch.zeros_like(a) for n, a in server.items()}, []
        for module, user, x in zip(modules, view.users.tolist(), histories, strict=True):
            with torch.no_grad():
                for name, array in {**server, **({} if config.personal else gate)}.items():
                    module[name].copy_(array)
            generator = streams.generator("fit", number, user)
            own = 0.0
            for _ in range(config.epochs):
                module.zero_grad()
                loss = module.loss(x, config, generator, number)
                loss.backward()
                own += loss.item() / config.epochs / int(x.sum())
                with torch.no_grad():
                    for name in module.names:
                        if name in sums:
                            sums[name] += module[name].grad
                        module[name].sub_(config.lr * module[name].grad)
            losses.append(own)
        for name, array in server.items():
            gradient, (first, second) = sums[name] / len(view), moments[name]
            first.mul_(0.9).add_(0.1 * gradient)
            second.mul_(0.99).add_(0.01 * gradient**2)
            step = first / (1 - 0.9**number) / (torch.sqrt(second / (1 - 0.99**number)) + 1e-8)
            array.mul_(1 - config.server_lr * config.decay).sub_(config.server_lr * step)
    for module in modules:
        with torch.no_grad():
            for name, array in {**server, **({} if config.personal else gate)}.items():
                module[name].copy_(array)
    return modules, losses, histories


@pytest.mark.parametrize("name", OPTIONS)
def test_feddae_equals_autograd(name):
    view, streams = devices(), Streams(6)
    method, shared, kept, losses = trained(view, streams, OPTIONS[name])
    modules, expected, histories = twin(view, streams, method)
    d = method.config.d
    reference.close(losses, expected)
    reference.close(shared["rows"][:, : 2 * d], modules[0]["global/hidden/weight"].detach().numpy())
    for each in (n for n in shared if n.count("/") == 2):
        reference.close(shared[each], modules[0][each].detach().numpy())
    for c, module in enumerate(modules):
        for each in (n for n in kept if n != "rows"):
            reference.close(kept[each][c], module[each].detach().numpy())
        if method.config.personal:
            rows = kept["rows"]
            own = slice(rows.indptr[c], rows.indptr[c + 1])
            whole = torch.cat([module["local/hidden/weight"], module["gate/hidden/weight"]], 1)
            reference.close(rows.rows[own], whole.detach().numpy()[rows.ids[own]])
    scores = method.score(shared, kept, view)
    reference.close(
        scores,
        np.stack([m.score(x).detach().numpy() for m, x in zip(modules, histories, strict=True)]),
    )


def test_only_own_rows_move():
    """Rows of the twin's whole local matrices outside the history are still the first draw."""
    view, streams = devices(), Streams(6)
    method, shared, kept, _ = trained(view, streams, {"dropout": 0.0})
    modules, _, _ = twin(view, streams, method)
    first = first_rows(shared["key"], np.arange(N_ITEMS), 20, N_ITEMS)
    rows = kept["rows"]
    for c, module in enumerate(modules):
        ids = rows.ids[rows.indptr[c] : rows.indptr[c + 1]]
        others = np.setdiff1d(np.arange(N_ITEMS), ids)
        local = module["local/hidden/weight"].detach().numpy()
        np.testing.assert_allclose(local[others], first[others, 8:16], rtol=1e-6)
        assert (abs(local[ids] - first[ids, 8:16]).max(1) > 0).all()


def test_a_gate_of_zero_and_one_is_a_federated_mult_vae():
    """The local encoder then has no effect, on the scores or on any upload."""
    view, streams = devices(), Streams(6)
    method = FedDAE(FedDAE.Config(**BASE))
    shared = method.init(view, streams)
    fields = method.private_fields(view, shared, streams)
    store, everybody = PrivateStore(fields, len(view)), np.arange(len(view))
    shut = {name: np.array(a) for name, a in store.read(everybody).items() if name != "rows"}
    shut["rows"] = store.read(everybody)["rows"]
    shut["gate/out/weight"][:] = 0
    shut["gate/out/bias"][:] = (-1e4, 1e4)
    other = {n: a + 1 if n.startswith("local") else a for n, a in shut.items()}
    one, two = (
        method.fit(method.download(shared), p, view, Round(1, streams)) for p in (shut, other)
    )
    for name in one.update.dense:
        np.testing.assert_array_equal(one.update.dense[name], two.update.dense[name])
    np.testing.assert_array_equal(
        method.score(shared, shut, view), method.score(shared, other, view)
    )


@pytest.mark.parametrize("personal", [True, False])
def test_both_protocols_give_the_same_bits(personal):
    runs = [
        hushrec.train(
            "demo",
            "feddae",
            rounds=3,
            protocol=protocol,
            settings={"d": 8, "personal": personal},
            progress=False,
        )
        for protocol in ("honest", "published")
    ]
    one, two = runs
    for name, array in one.model.shared.items():
        np.testing.assert_array_equal(array, two.model.shared[name])
    for part, by_candidates in one.ranks.items():
        mine, theirs = by_candidates["full"], two.ranks[part]["full"]
        for name, array in mine.to_arrays("").items():
            np.testing.assert_array_equal(array, theirs.to_arrays("")[name])


def test_an_upload_is_the_history():
    """What the docstring says of raw uploads: the decoder's bias and the rows name the items."""
    view, streams = devices(), Streams(6)
    method = FedDAE(FedDAE.Config(**BASE))
    shared = method.init(view, streams)
    fields = method.private_fields(view, shared, streams)
    private = PrivateStore(fields, len(view)).read(np.arange(len(view)))
    update = method.fit(method.download(shared), private, view, Round(1, streams)).update
    for c in range(len(view)):
        items = np.unique(view.positives[c])
        negative = np.flatnonzero(update.dense["decoder/out/bias"][c] < 0)
        if len(items) < N_ITEMS:
            np.testing.assert_array_equal(negative, items)


class TestWithoutPersonalParts(MethodContract):
    method = FedDAE
    options = {"personal": False, "d": 8, "epochs": 2, "server_lr": 0.01}  # noqa: RUF012
