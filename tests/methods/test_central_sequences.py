"""SASRec and GRU4Rec against networks of torch.nn, trained by torch.optim.Adam."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hushrec  # noqa: E402
from hushrec.errors import ConfigError  # noqa: E402
from hushrec.federation.backends import Machine  # noqa: E402
from hushrec.methods.central_sequences import (  # noqa: E402
    GRU4Rec,
    SASRec,
    full_softmax,
    padded,
    shuffled,
)
from hushrec.streams import Round, Streams  # noqa: E402
from hushrec.testing import clients_of  # noqa: E402
from hushrec.testing.checks import Federation  # noqa: E402

M, D = 17, 8
STREAMS = Streams(5)
OPTIONS = {"d": D, "length": 6, "batch": 4, "dropout": 0.0, "lr": 0.01, "init_std": 0.3}


def a_view():
    rng = np.random.default_rng(1)
    rows = [rng.permutation(M)[: rng.integers(1, 12)].tolist() for _ in range(23)]
    return clients_of([*rows, [4]], M)


class PlainSASRec(torch.nn.Module):
    """The network of Kang and McAuley, of the parts that torch has."""

    def __init__(self, blocks, heads, length):
        super().__init__()
        nn = torch.nn
        self.items, self.positions = nn.Embedding(M, D), nn.Embedding(length, D)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(D, heads, batch_first=True) for _ in range(blocks)
        )
        self.dense = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)) for _ in range(blocks)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(D, eps=1e-8) for _ in range(2 * blocks + 1))

    def load(self, shared):
        def put(parameter, *names, transpose=True):
            value = torch.cat([torch.tensor(shared[name].T) for name in names])
            assert parameter.shape == value.shape
            parameter.data = value

        self.items.weight.data = torch.tensor(shared["items"])
        self.positions.weight.data = torch.tensor(shared["positions"])
        for k, (attention, dense) in enumerate(zip(self.attention, self.dense, strict=True)):
            three = [f"block{k}/{name}" for name in ("queries", "keys", "values")]
            put(attention.in_proj_weight, *(f"{name}/weight" for name in three))
            put(attention.in_proj_bias, *(f"{name}/bias" for name in three))
            layers = {"output": attention.out_proj, "dense0": dense[0], "dense1": dense[2]}
            for name, layer in layers.items():
                put(layer.weight, f"block{k}/{name}/weight")
                put(layer.bias, f"block{k}/{name}/bias")
        return self

    def forward(self, items):
        length = items.shape[1]
        x = self.items(items) * D**0.5 + self.positions(torch.arange(length))
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        for k, (attention, dense) in enumerate(zip(self.attention, self.dense, strict=True)):
            normal = self.norms[2 * k](x)
            x = normal + attention(normal, x, x, attn_mask=later, need_weights=False)[0]
            normal = self.norms[2 * k + 1](x)
            x = normal + dense(normal)
        return self.norms[-1](x) @ self.items.weight.T


class PlainGRU4Rec(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.items = torch.nn.Embedding(M, D)
        self.gru = torch.nn.GRU(D, D, layers, batch_first=True)

    def load(self, shared):
        self.items.weight.data = torch.tensor(shared["items"])
        for k in range(self.gru.num_layers):
            for side, theirs in (("input", "ih"), ("state", "hh")):
                for kind in ("weight", "bias"):
                    value = torch.tensor(shared[f"layer{k}/{side}/{kind}"])
                    getattr(self.gru, f"{kind}_{theirs}_l{k}").data = value
        return self

    def forward(self, items):
        return self.gru(self.items(items))[0] @ self.items.weight.T


TWINS = {
    "sasrec": (SASRec(SASRec.Config(**OPTIONS)), PlainSASRec(2, 1, 6)),
    "sasrec, two heads": (
        SASRec(SASRec.Config(**OPTIONS, heads=2, blocks=1)),
        PlainSASRec(1, 2, 6),
    ),
    "gru4rec": (GRU4Rec(GRU4Rec.Config(**OPTIONS)), PlainGRU4Rec(1)),
    "gru4rec, two layers": (GRU4Rec(GRU4Rec.Config(**OPTIONS, layers=2)), PlainGRU4Rec(2)),
}


@pytest.mark.parametrize("name", TWINS)
def test_it_equals_the_network_of_torch_after_three_epochs(name):
    method, plain = TWINS[name]
    view = a_view()
    federation = Federation(method, view, machine=Machine(threads=1), seed=STREAMS.seed)
    plain.load(method.init(view, STREAMS))
    adam = torch.optim.Adam(plain.parameters(), lr=0.01)
    rows = [view.positives[c][-7:].astype(np.int64) for c in range(len(view))]
    lengths = np.array([len(row) for row in rows])
    for number in (1, 2, 3):
        collected = federation.round()
        total, count = 0.0, 0
        for users in shuffled(lengths, 4, STREAMS.generator("order", number)):
            loss, positions = 0.0, 0
            for row in (rows[user] for user in users):  # one user at a time: no padding
                logits = plain(torch.tensor(row[:-1])[None])[0]
                loss = loss + torch.nn.functional.cross_entropy(
                    logits, torch.tensor(row[1:]), reduction="sum"
                )
                positions += len(row) - 1
            adam.zero_grad()
            (loss / positions).backward()
            adam.step()
            total, count = total + loss.item(), count + positions
        assert collected.loss.mean == pytest.approx(total / count, rel=1e-4)
    ours = federation.shared["items"]
    theirs = plain.items.weight.detach().numpy()
    start = method.init(view, STREAMS)["items"]
    assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs - start)
    scores = method.score(federation.shared, {}, view)
    with torch.no_grad():
        for client in range(len(view)):
            recent = torch.tensor(view.positives[client][-6:].astype(np.int64))[None]
            expected = plain(recent)[0, -1].numpy()
            np.testing.assert_allclose(scores[client], expected, atol=2e-3)


def test_the_loss_and_its_gradients_are_those_of_autograd(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(30, D, generator=generator, requires_grad=True)
    items = torch.randn(M, D, generator=generator, requires_grad=True)
    targets = torch.randint(M, (30,), generator=generator)
    loss = torch.nn.functional.cross_entropy(states @ items.T, targets)
    expected = torch.autograd.grad(loss, [states, items])
    for at_once in (2**20, 4 * M, 1):
        monkeypatch.setattr("hushrec.methods.central_sequences.SCORES_AT_ONCE", at_once)
        value, *gradients = full_softmax(states, items, targets)
        assert value == pytest.approx(loss.item(), rel=1e-5)
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_batches_hold_everybody_who_has_a_next_item_once():
    lengths = np.array([1, 5, 2, 0, 9, 3, 3, 2])
    batches = shuffled(lengths, 3, STREAMS.generator("order", 1))
    assert sorted(np.concatenate(batches).tolist()) == [1, 2, 4, 5, 6, 7]
    inputs, targets = padded(clients_of([[3, 1, 2], [5, 4]], 9).positives)
    assert inputs.tolist() == [[3, 1], [5, 0]] and targets.tolist() == [[1, 2], [4, -1]]


@pytest.mark.parametrize("kind", [SASRec, GRU4Rec])
def test_neither_threads_nor_batches_change_a_bit(kind):
    method, view = kind(kind.Config(**{**OPTIONS, "dropout": 0.3})), a_view()
    everybody, results = np.arange(len(view)), []
    for threads, chunk in ((1, None), (2, None), (2, 1)):
        federation = Federation(method, view, machine=Machine(threads, chunk), seed=5)
        losses = [federation.round().loss for _ in range(2)]
        results.append([*federation.shared.values(), losses])
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    scores = method.score(federation.shared, {}, view)
    half = everybody[::2]
    np.testing.assert_array_equal(
        method.score(federation.shared, {}, view.take(half)), scores[half]
    )


def test_dropout_follows_from_the_round():
    view, method = a_view(), SASRec(SASRec.Config(**{**OPTIONS, "dropout": 0.5}))
    shared = method.init(view, STREAMS)
    one, again, other = (method.fit(shared, {}, view, Round(n, STREAMS)) for n in (1, 1, 2))
    np.testing.assert_array_equal(one.update.dense["items"], again.update.dense["items"])
    assert not np.array_equal(one.update.dense["items"], other.update.dense["items"])


def test_heads_divide_the_width():
    with pytest.raises(ConfigError, match="d = 9 is not a multiple of heads = 2"):
        hushrec.train("demo", "sasrec", rounds=1, settings={"d": 9, "heads": 2})
