"""Networks over item rows: the fused descent and FedRKG's gate against batched tensors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushrec.kernels.draws import Pace
from hushrec.kernels.row_networks import fit_gates
from hushrec.streams import Round, Streams
from hushrec.testing import clients_of
from hushrec.training.samples import Descent, draw_device_samples

pytest.importorskip("torch", reason="needs the 'neural' extra")
from hushrec.training import tensors
from hushrec.training.networks import gated_loss, row_loss, train_row_networks

STREAMS = Streams(6)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(0, 9),
    st.lists(st.integers(1, 9), max_size=3),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([None, 0.02]),
    st.booleans(),
    st.booleans(),
)
def test_the_fused_descent_is_that_of_batched_tensors(
    d, vector, hidden, epochs, batch, clip, two_steps, own_tables
):
    view = clients_of([[3], [], list(range(25)), [4, 9], [8, 2, 11, 17, 5]], 25)
    rng, n = np.random.default_rng(0), len(view)
    table = rng.standard_normal((n, 25, d) if own_tables else (25, d)).astype(np.float32)
    network = tensors.initial_mlp([vector + d, *hidden, 1], STREAMS, "test")
    params = tensors.repeat(network, n)
    if vector:
        params["vector"] = rng.standard_normal((n, vector)).astype(np.float32)
    trained, rows, losses = train_row_networks(
        view,
        Round(2, STREAMS),
        table,
        params,
        Pace(4, epochs, batch),
        Descent(0.3, 0.5, two_steps=two_steps, clip=clip),
        vector_rate=2.0,
    )
    rates = {name: 0.6 if name == "vector" else 0.3 for name in params}
    both = [rates, {"items": 0.5}] if two_steps else [{**rates, "items": 0.5}]
    phases = [tensors.DescentStep(part, clip) for part in both]
    samples = draw_device_samples(view, 4, epochs, Round(2, STREAMS))
    expected, tables, before = tensors.train_tensors(
        params, {"items": table}, row_loss, phases, samples, batch, 25
    )
    assert set(trained) == set(params)
    for name, array in expected.items():
        np.testing.assert_allclose(trained[name], array, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(rows.ids, tables["items"].ids)
    np.testing.assert_allclose(rows.rows, tables["items"].rows, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(losses, before, rtol=1e-4)


def test_the_gate_over_a_linear_loss_is_the_one_of_the_kernel():
    view = clients_of([[3], list(range(25)), [4, 9], [8, 2, 11, 17, 5]], 25)
    rng, n = np.random.default_rng(0), len(view)
    tables, mean = rng.standard_normal((n, 25, 6)), rng.standard_normal((25, 6))
    tables, mean = tables.astype(np.float32), mean.astype(np.float32)
    vectors = rng.standard_normal((n, 6)).astype(np.float32)
    biases = rng.standard_normal(n).astype(np.float32)
    gates, gate_biases = np.zeros((n, 18), np.float32), np.zeros(n, np.float32)
    samples = draw_device_samples(view, 4, 5, Round(1, STREAMS), purpose="guide")
    fit_gates(
        samples,
        tables,
        mean,
        vectors,
        biases,
        gates,
        gate_biases,
        7,
        *(np.float32(value) for value in (0.5, 0.7, 0.1)),
    )
    trained, _, _ = tensors.train_tensors(
        {
            "layer0/weight": vectors[..., None],
            "layer0/bias": biases[:, None],
            "gate": np.zeros((n, 18), np.float32),
            "gate_bias": np.zeros(n, np.float32),
        },
        {"items": tables, "guidance": mean},
        gated_loss(row_loss, 0.7),
        [tensors.DescentStep({"gate": 0.5, "gate_bias": 0.5}, 0.1)],
        samples,
        7,
        25,
    )
    for ours, theirs in ((gates, trained["gate"]), (gate_biases, trained["gate_bias"])):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert np.linalg.norm(gates) > 0.01
