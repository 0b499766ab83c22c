"""pFedMe: the Moreau envelope against one written out in torch."""

import numpy as np
import pytest

from hushrec.streams import Round, Streams
from hushrec.testing import clients_of

torch = pytest.importorskip("torch", reason="needs the 'neural' extra")
from hushrec.methods.pfedme import (  # noqa: E402
    PFedMe,
    PFedMeConfig,
)
from hushrec.private import PrivateStore  # noqa: E402
from hushrec.training.samples import draw_silo_samples  # noqa: E402
from hushrec.training.silo_network import unpack_flat  # noqa: E402

SMALL = {"d": 8, "hidden": (8, 4), "batch": 16, "epochs": 6, "lr": 0.05}


def test_theta_and_w_move_as_in_the_paper():
    view = clients_of([[1, 2, 3, 4], [5, 6]])
    method = PFedMe(PFedMeConfig(**{**SMALL, "batch": 64, "epochs": 2, "pull": 0.5}))
    shared = method.init(view, Streams(0))
    fields = method.private_fields(view, shared, Streams(0))
    private = PrivateStore(fields, 2).read(np.arange(2))
    fitted = method.fit(shared, private, view, Round(1, Streams(0)))
    samples = draw_silo_samples(view, 1, 2, Round(1, Streams(0)))
    shapes = method.perceptron.shapes
    c = 1
    w_net, w_items = torch.tensor(shared["network"][None]), torch.tensor(shared["items"])
    net, items = (t.clone().requires_grad_() for t in (w_net, w_items))
    users = torch.zeros((1, 8), requires_grad=True)
    optimizer = torch.optim.Adam([net, items, users], lr=0.05)
    length = samples.lengths[c]
    for epoch in range(2):
        at = samples.order[c][epoch * length : (epoch + 1) * length]
        looked_up = np.unique(samples.items[at]).astype(np.int64)
        others = np.setdiff1d(np.arange(60), looked_up)
        for _ in range(3):
            p = unpack_flat(net, shapes)
            v = items[samples.items[at].astype(np.int64)]
            u = users[samples.users[at]]
            h = u @ p["user"][0] + v @ p["item"][0] + (u * v) @ p["product"][0] + p["bias"][0]
            h = torch.relu(torch.relu(h) @ p["layer0/weight"][0] + p["layer0/bias"][0])
            logits = (h @ p["layer1/weight"][0] + p["layer1/bias"][0])[:, 0]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, torch.from_numpy(samples.labels[at])
            )
            loss = loss + 3e-3 * (u**2 + v**2).sum(1).mean()
            loss = loss + 0.25 * ((net - w_net) ** 2).sum()
            loss = loss + 0.25 * ((items - w_items)[looked_up] ** 2).sum()
            optimizer.zero_grad()
            loss.backward()
            kept = items.detach()[others].clone()
            moments = optimizer.state.get(items, {})
            held = {k: v[others].clone() for k, v in moments.items() if k.startswith("exp")}
            optimizer.step()
            with torch.no_grad():  # lazy: rows that the batch does not hold stay as they are
                items[others] = kept
                for k, v in optimizer.state[items].items():
                    if k.startswith("exp"):
                        v[others] = held.get(k, torch.zeros_like(kept))
        with torch.no_grad():
            w_net += 0.5 * (net - w_net)
            w_items[looked_up] += 0.5 * (items - w_items)[looked_up]
    np.testing.assert_allclose(fitted.private["network"][c], net.detach()[0].numpy(), atol=1e-4)
    sent = fitted.update.dense["network"][c]
    np.testing.assert_allclose(sent, w_net[0].numpy() - shared["network"], atol=1e-4)
    rows = fitted.update.rows["items"]
    own = slice(rows.indptr[c], rows.indptr[c + 1])
    expected = (w_items.numpy() - shared["items"])[rows.ids[own]]
    np.testing.assert_allclose(rows.rows[own], expected, atol=1e-4)
