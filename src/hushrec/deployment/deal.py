"""Users of one file, dealt out over nodes: each to exactly one, so that nothing is lost."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import ConfigError
from hushrec.rng import Streams

Deal = Literal["random", "in-order"]


def deal_users(
    count: int, nodes: int, how: Deal, seed: int, holders: NDArray[np.int32] | None = None
) -> NDArray[np.int64]:
    """Return the node of each user; nodes get as many as each other, or one more.

    ``holders`` is the silo of each user where silos are dealt out, whole ones.
    """
    parts = count if holders is None else int(holders.max()) + 1
    if nodes > parts:
        what = "users" if holders is None else "silos"
        raise ConfigError(f"{parts} {what} are too few for {nodes} nodes: use fewer nodes")
    order = np.arange(parts)
    if how == "random":
        order = Streams(seed).generator("federation/deal").permutation(parts)
    node = np.empty(parts, np.int64)
    for number, dealt in enumerate(np.array_split(order, nodes)):
        node[dealt] = number
    return node if holders is None else node[holders]
