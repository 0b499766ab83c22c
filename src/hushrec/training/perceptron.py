"""The network of LIPM and pFedMe: an MLP over user, item, their product and optionally an interest.

A user's interest is the state of a gated recurrent unit over rounds (`methods.lipm`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hushrec.streams import Streams
from hushrec.training.silo_network import pack_flat, unpack_flat
from hushrec.training.tensors import (
    GROUP,
    Arrays,
    Params,
    SampleBatch,
    Tensor,
    groups_in_order,
    mean_bce,
    mlp,
    mlp_shapes,
    torch,
)

BLOCK = 64
"""Users of a client whose interests are computed in one product."""


@dataclass(frozen=True)
class Perceptron:
    """Sizes, loss and scores of the network."""

    d: int
    """Embedding width."""
    hidden: tuple[int, ...]
    interest: int = 0
    """Width of the interest; 0 without one."""
    matching: float = 0.0
    """Weight of the loss of matching interests and items directly."""
    meets_items: bool = False
    """Whether the interest is added to the user embedding, which is multiplied with the item's
    entry by entry, and not a separate input of the first layer."""

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters, in the order of the flat vector."""
        d, width, first = self.d, self.interest, self.hidden[0]
        shapes: dict[str, tuple[int, ...]] = {
            "user": (d, first),
            "item": (d, first),
            "product": (d, first),
            "bias": (first,),
            **mlp_shapes([*self.hidden, 1]),
        }
        if self.interest:
            shapes |= {
                "interest": (width, d if self.meets_items else first),
                "gru/input": (d, 3 * width),
                "gru/state": (width, 3 * width),
                "gru/input_bias": (3 * width,),
                "gru/state_bias": (3 * width,),
                "gate": (width, d),
            }
        if self.matching:
            shapes["match"] = (width, d)
        return shapes

    def initial(self, streams: Streams) -> NDArray[np.float32]:
        """Draw the flat initial parameters; the gate starts at 1."""
        generator = streams.generator("init/network")
        drawn = {}
        for name, shape in self.shapes.items():
            n_in = self.d if name == "bias" else shape[0]
            if name.startswith("gru/"):
                n_in = self.interest
            bound = 0.0 if name == "gate" else 1 / np.sqrt(n_in)
            drawn[name] = generator.uniform(-bound, bound, shape)
        return pack_flat(drawn, self.shapes)

    def unpack(self, flat: NDArray[np.float32]) -> dict[str, Tensor]:
        """Return named views of flat parameters, [clients, …]."""
        return unpack_flat(torch.from_numpy(flat), self.shapes)

    def loss(self, p: Params, rows: Params, fixed: Params, step: SampleBatch) -> Tensor:
        """Return each client's binary cross-entropy, plus that of matching interest and item."""
        loss = mean_bce(self.logits(p, rows["users"], rows["items"], fixed), step)
        if not self.matching:
            return loss
        interest = gru(p, fixed["behaviour"], fixed["interest"])
        degree = (torch.bmm(interest, p["match"]) * rows["items"]).sum(-1)
        return loss + self.matching * mean_bce(degree, step)

    def gated_loss(self, p: Params, rows: Params, fixed: Params, step: SampleBatch) -> Tensor:
        """Return the loss where item rows are the received rows plus gated deltas."""
        received, deltas = rows["items"].chunk(2, -1)
        gate = 2 * torch.sigmoid(torch.bmm(fixed["client"], p["gate"]))
        return mean_bce(self.logits(p, rows["users"], received + gate * deltas, fixed), step)

    def logits(self, p: Params, users: Tensor, items: Tensor, fixed: Params) -> Tensor:
        """Return the logits of samples: [clients, samples]."""
        interest = None
        if self.interest:
            interest = gru(p, fixed["behaviour"], fixed["interest"])
        if interest is not None and self.meets_items:
            users, interest = torch.baddbmm(users, interest, p["interest"]), None
        out = torch.baddbmm(p["bias"][:, None], users, p["user"])
        out = torch.baddbmm(out, items, p["item"])
        out = torch.baddbmm(out, users * items, p["product"])
        if interest is not None:
            out = torch.baddbmm(out, interest, p["interest"])
        return upper_layers(p, out)

    def score_user(
        self, p: Params, table: Tensor, user: Tensor, interest: Tensor | None = None
    ) -> NDArray[np.float32]:
        """Score every item for one user under one client's network."""
        guides = None if interest is None else interest[None] @ p["interest"][0]
        if guides is not None and self.meets_items:
            user, guides = user + guides[0], None
        own = user[None] @ p["user"][0] + p["bias"]
        if guides is not None:
            own = own + guides
        # An item row enters by itself and multiplied with the user embedding.
        items = table @ (p["item"][0] + user[:, None] * p["product"][0])
        scores: NDArray[np.float32] = upper_layers(p, (items + own)[None])[0].numpy()
        return scores

    def interests(
        self, network: NDArray[np.float32], fixed: Arrays, indptr: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return the interest of every user after a round."""
        out = np.zeros_like(fixed["interest"])
        for filled, real in groups_in_order(len(indptr) - 1):
            p, clients = self.unpack(network[filled]), filled[:real]
            for first in range(0, int(np.diff(indptr)[clients].max()), BLOCK):
                starts = np.minimum(indptr[clients] + first, indptr[clients + 1])
                ends = np.minimum(starts + BLOCK, indptr[clients + 1])
                cut = [slice(a, b) for a, b in zip(starts, ends, strict=True)]
                given = {n: _filled(fixed[n], cut) for n in ("behaviour", "interest")}
                after = gru(p, given["behaviour"], given["interest"]).numpy()
                for number, own in enumerate(cut):
                    out[own] = after[number, : own.stop - own.start]
        return out


def upper_layers(p: Params, first: Tensor) -> Tensor:
    """Return the logits of first-layer sums [clients, samples, width]."""
    return mlp(p, torch.relu(first))[..., 0]


def gru(p: Params, inputs: Tensor, state: Tensor) -> Tensor:
    """Take one step of each client's gated recurrent unit: [clients, users, width]."""
    given = torch.baddbmm(p["gru/input_bias"][:, None], inputs, p["gru/input"])
    before = torch.baddbmm(p["gru/state_bias"][:, None], state, p["gru/state"])
    width = state.shape[-1]
    gates = torch.sigmoid(given[..., : 2 * width] + before[..., : 2 * width])
    reset, update = gates[..., :width], gates[..., width:]
    new = torch.tanh(given[..., 2 * width :] + reset * before[..., 2 * width :])
    return new + update * (state - new)


def _filled(rows: NDArray[np.float32], cut: list[slice]) -> Tensor:
    filled = np.zeros((GROUP, BLOCK, rows.shape[1]), np.float32)
    for number, own in enumerate(cut):
        filled[number, : own.stop - own.start] = rows[own]
    return torch.from_numpy(filled)
