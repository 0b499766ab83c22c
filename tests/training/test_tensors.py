"""Batched networks: the same samples as the kernels, the same bits in any company."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushrec.data.views import Ragged, TrainView
from hushrec.methods.shared.options import InnerProductConfig
from hushrec.streams import Round, Streams
from hushrec.training.samples import Descent, draw_device_samples, train_inner_product

torch = pytest.importorskip("torch", reason="needs the 'neural' extra")
from hushrec.training import tensors  # noqa: E402
from hushrec.training.tensors import DescentStep  # noqa: E402

N_ITEMS, D = 40, 6
STREAMS = Streams(5)


def clients(lengths: list[int]) -> TrainView:
    generator = np.random.default_rng(0)
    items = [generator.choice(N_ITEMS, n, replace=False) for n in lengths]
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = np.concatenate([*items, np.zeros(0)]).astype(np.int32)
    return TrainView(
        users=np.arange(len(lengths), dtype=np.int32) + 7,
        n_items=N_ITEMS,
        positives=Ragged(indptr, values),
        times=Ragged(indptr, np.arange(len(values))),
        values=Ragged(indptr, np.ones(len(values), np.float32)),
    )


LENGTHS = [3, 12, 0, 30, 1, 7, 7, 19, 2, 40, 5]


def table() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((N_ITEMS, D)).astype(np.float32)


def linear_loss(params, rows, batch):
    logits = (rows["items"] * params["vector"][:, None]).sum(-1) + params["bias"][:, None]
    return tensors.mean_bce(logits, batch)


@pytest.mark.parametrize("two_steps", [False, True])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_linear_score_is_trained_as_in_the_kernel(two_steps: bool, epochs: int) -> None:
    view = clients(LENGTHS)
    config = InnerProductConfig(d=D, epochs=epochs, batch=16, lr=0.1, item_rate=0.5)
    vectors = np.tile(np.linspace(-1, 1, D, dtype=np.float32), (len(view), 1))
    biases = np.zeros(len(view), np.float32)
    both = {"vector": config.lr, "bias": config.lr}
    item = {"items": config.lr * N_ITEMS * config.item_rate}
    params, tables, _ = tensors.train_tensors(
        {"vector": vectors, "bias": biases},
        {"items": table()},
        linear_loss,
        [DescentStep(both), DescentStep(item)] if two_steps else [DescentStep({**both, **item})],
        draw_device_samples(view, config.negatives, epochs, Round(3, STREAMS)),
        config.batch,
        N_ITEMS,
    )
    descent = Descent(*config.rates(N_ITEMS), two_steps=two_steps)
    rows, _ = train_inner_product(
        view, Round(3, STREAMS), table(), vectors, biases, config.pace, descent
    )
    np.testing.assert_allclose(params["vector"], vectors, atol=1e-5)
    np.testing.assert_allclose(params["bias"], biases, atol=1e-5)
    np.testing.assert_array_equal(tables["items"].indptr, rows.indptr)
    # The kernel numbers rows before it shuffles, the tensors after: the same rows in other places.
    for c in range(len(view)):
        mine, theirs = (
            dict(
                zip(
                    r.ids[r.indptr[c] : r.indptr[c + 1]],
                    r.rows[r.indptr[c] : r.indptr[c + 1]],
                    strict=True,
                )
            )
            for r in (tables["items"], rows)
        )
        assert mine.keys() == theirs.keys()
        for item_id, row in mine.items():
            np.testing.assert_allclose(row, theirs[item_id], atol=1e-4)


def deep_loss(params, rows, batch):
    return tensors.mean_bce(tensors.mlp(params, rows["items"])[..., 0], batch)


def train_deep(view: TrainView):
    network = tensors.initial_mlp([D, 8, 4, 1], STREAMS, "init")
    rates = {**dict.fromkeys(network, 0.3), "items": 0.5}
    samples = draw_device_samples(view, 4, 2, Round(1, STREAMS))
    return tensors.train_tensors(
        tensors.repeat(network, len(view)),
        {"items": table()},
        deep_loss,
        [DescentStep(rates)],
        samples,
        16,
        N_ITEMS,
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=11, unique=True))
def test_company_changes_no_bit(chosen: list[int]) -> None:
    whole, view = train_deep(clients(LENGTHS)), clients(LENGTHS)
    part = train_deep(view.take(np.array(chosen)))
    for k, c in enumerate(chosen):
        for name, array in whole[0].items():
            np.testing.assert_array_equal(part[0][name][k], array[c])
        (mine, all_rows) = (part[1]["items"], whole[1]["items"])
        np.testing.assert_array_equal(
            mine.rows[mine.indptr[k] : mine.indptr[k + 1]],
            all_rows.rows[all_rows.indptr[c] : all_rows.indptr[c + 1]],
        )
        assert part[2][k] == whole[2][c]


def test_a_deep_network_is_trained_as_one_device_would() -> None:
    view = clients(LENGTHS)
    params, tables, losses = train_deep(view)
    network = tensors.initial_mlp([D, 8, 4, 1], STREAMS, "init")
    for c in range(len(view)):
        samples = draw_device_samples(view.take(np.array([c])), 4, 2, Round(1, STREAMS))
        own = {name: torch.tensor(array, requires_grad=True) for name, array in network.items()}
        items = torch.tensor(table(), requires_grad=True)
        seen = []
        length = int(samples.lengths[0])
        for epoch in range(2):
            for first in range(0, length, 16):
                at = slice(epoch * length + first, epoch * length + min(first + 16, length))
                x = items[torch.from_numpy(samples.items[at].astype(np.int64))]
                for number in range(3):
                    x = x @ own[f"layer{number}/weight"] + own[f"layer{number}/bias"]
                    x = torch.relu(x) if number < 2 else x
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    x[:, 0], torch.from_numpy(samples.labels[at])
                )
                seen.append(float(loss.detach()))
                loss.backward()
                with torch.no_grad():
                    for tensor, rate in [*((t, 0.3) for t in own.values()), (items, 0.5)]:
                        tensor -= rate * tensor.grad
                        tensor.grad = None
        for name, tensor in own.items():
            np.testing.assert_allclose(params[name][c], tensor.detach().numpy(), atol=1e-5)
        rows = tables["items"]
        mine = slice(rows.indptr[c], rows.indptr[c + 1])
        np.testing.assert_allclose(
            rows.rows[mine], items.detach().numpy()[rows.ids[mine]], atol=1e-5
        )
        assert losses[c] == pytest.approx(np.mean(seen) if seen else 0, abs=1e-5)
