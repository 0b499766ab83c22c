"""Noise on the gradients of training (FedRKG, section 5.2): what is noised, accounted, refused."""

import numpy as np
import pytest

import hushrec
from hushrec.aggregation import UploadShape
from hushrec.methods.fedrkg import GRADIENT, FedRKG
from hushrec.privacy.accountant import Everybody, Gaussian, epsilon_of
from hushrec.privacy.clipping import FlatClip
from hushrec.privacy.noise import LocalNoise
from hushrec.privacy.protection import Protection
from hushrec.private import PrivateStore
from hushrec.streams import Round, SecretRound, SecretStreams, Streams
from hushrec.testing import clients_of

N_ITEMS, D, CLIP, SCALE, ROUNDS = 25, 4, 0.02, 0.01, 5
OPTIONS = {"d": D, "item_rate": 2.0, "interval": 2, "beta": 0.7, "guidance": "fixed"}
ROWS = [[3, 4, 5, 9], list(range(12)), [1], [20, 21]]


def guarded(scale=SCALE, clip=CLIP):
    shape = UploadShape(N_ITEMS, {GRADIENT: D}, {})
    return Protection(steps=Protection((FlatClip(clip), LocalNoise("gaussian", scale, shape))))


def tables_after(rows, protection, rounds=ROUNDS, secret=None, **options):
    """Train everybody, guidance from outside, and return the tables round by round."""
    view, streams, secret = clients_of(rows, N_ITEMS), Streams(3), secret or SecretStreams(1)
    method = FedRKG(FedRKG.Config(**OPTIONS | options))
    shared = method.init(view, streams)
    store = PrivateStore(method.private_fields(view, shared, streams), len(view))
    everybody, found = np.arange(len(view)), []
    for number in range(1, rounds + 1):
        # The server's table is given, and the same for neighbours: what was released before.
        received = {"guidance": shared["guidance"]} if number == 3 else {}
        now = Round(
            number, streams, gradient_noise=protection.gradient_noise(SecretRound(number, secret))
        )
        fitted = method.fit(received, store.read(everybody), view, now)
        store.write(everybody, fitted.private)
        found.append(np.array(store.read(everybody)["table"]))
        assert ("table" in fitted.update.dense) == (number % 2 == 0)
    return method, shared, found


@pytest.mark.parametrize("backbone", ["fedmf", "pfedrec"])
def test_a_step_is_taken_with_the_clipped_and_noised_gradient(backbone):
    secret = SecretStreams(1)
    method, shared, found = tables_after(ROWS, guarded(), 1, secret, backbone=backbone)
    rate = method.config.lr * N_ITEMS * 2.0
    view = clients_of(ROWS, N_ITEMS)
    plain = FedRKG(FedRKG.Config(**OPTIONS | {"backbone": backbone, "batch": 10**6}))
    store = PrivateStore(plain.private_fields(view, shared, Streams(3)), len(view))
    free = plain.fit({}, store.read(np.arange(4)), view, Round(1, Streams(3)))
    rows = free.private["table"]
    shape = UploadShape(N_ITEMS, {GRADIENT: D}, {})
    drawn = LocalNoise("gaussian", SCALE, shape).past_noise(secret)
    noise = drawn(GRADIENT, (N_ITEMS, D), view, 1)
    for c in range(4):
        gradient = np.zeros((N_ITEMS, D))
        mine = slice(rows.indptr[c], rows.indptr[c + 1])
        gradient[rows.ids[mine]] = (shared["guidance"][rows.ids[mine]] - rows.rows[mine]) / rate
        norm = np.linalg.norm(gradient)
        assert norm > CLIP  # so that clipping is seen to act
        expected = shared["guidance"] - rate * (gradient * CLIP / norm + noise[c])
        np.testing.assert_allclose(found[0][c], expected, atol=1e-5)
    assert (found[0] != shared["guidance"]).all()  # every row moves, touched or not


def test_one_clients_data_moves_its_table_by_no_more_than_equation_14():
    """With the same noise: 2 rate C for each step, and the commit of a guidance adds nothing."""
    method, _, one = tables_after(ROWS, guarded())
    _, _, other = tables_after([[7, 8], *ROWS[1:]], guarded())
    rate = method.config.lr * N_ITEMS * 2.0
    for number in range(1, ROUNDS + 1):
        apart = np.linalg.norm(one[number - 1][0] - other[number - 1][0])
        assert 0 < apart <= number * 2 * rate * CLIP * (1 + 1e-5)
        np.testing.assert_array_equal(one[number - 1][1:], other[number - 1][1:])


def test_a_trained_gate_moves_it_further():
    """Which is why it is refused: the commit of round 3 depends on data that no noise covers."""
    gate = {"guidance": "adaptive", "gate_lr": 1e5, "beta": 0.0, "clip": None}
    method, _, one = tables_after(ROWS, guarded(1e-6, 1e-6), 3, **gate)
    _, _, other = tables_after([[7, 8], *ROWS[1:]], guarded(1e-6, 1e-6), 3, **gate)
    rate = method.config.lr * N_ITEMS * 2.0
    assert np.linalg.norm(one[2][0] - other[2][0]) > 3 * 2 * rate * 1e-6


SETTINGS = {
    "d": D,
    "interval": 3,
    "guidance": "fixed",
    "evaluation.every": 6,
    "privacy.mode": "local-gradients",
    "privacy.clip": 0.1,
    "privacy.noise_seed": 0,
}


def test_every_step_is_accounted_for_uploaded_or_not(tiny):
    run = hushrec.train(tiny, "fedrkg", rounds=6, settings={**SETTINGS, "privacy.epsilon": 8.0})
    said = run.summary.privacy
    assert 7.9 < said.epsilon <= 8.0
    assert sum(event["count"] for event in said.account) == 6
    assert "gradient of each round's one step" in said.statement
    noised = hushrec.train(tiny, "fedrkg", rounds=6, settings={**SETTINGS, "privacy.scale": 0.4})
    expected = epsilon_of(Gaussian(0.4 / 0.2, Everybody(), "replace-one"), 6, said.delta)
    assert noised.summary.privacy.epsilon == pytest.approx(expected, rel=1e-3)


def test_what_it_cannot_cover_has_no_guarantee(tiny):
    settings = {**SETTINGS, "guidance": "adaptive", "privacy.scale": 0.4}
    run = hushrec.train(tiny, "fedrkg", rounds=3, settings=settings)
    assert run.summary.privacy.epsilon is None
    assert "the gate is trained on a client's data without noise" in run.summary.privacy.statement


@pytest.mark.parametrize(
    ("method", "changed", "words"),
    [
        ("fedrkg", {"guidance": "adaptive"}, "use guidance = fixed"),
        ("fedrkg", {"guidance": "replace"}, "use privacy.mode = local-gaussian"),
        ("fedrkg", {"epochs": 2}, "more rounds"),
        ("fedmf", {"interval": None, "guidance": None}, "use privacy.mode = local-gaussian"),
    ],
)
def test_refusals(method, changed, words, tiny):
    asked = {**SETTINGS, "privacy.epsilon": 8.0, **changed}
    with pytest.raises(hushrec.HushrecError, match=words):
        settings = {name: value for name, value in asked.items() if value is not None}
        hushrec.train(tiny, method, rounds=6, settings=settings)
