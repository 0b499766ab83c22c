"""GPFedRec: graph-guided personalization for federated recommendation (Zhang et al., KDD 2024).

Private: user vector p_u [d], score function o_u, an MLP over [p_u, q_i], own item table P_u [m, d],
and the target R_u [m, d] that the server answered last. Shared: item table Q.

A round on device u starts from Q. A batch takes one joint step on p_u, o_u and P_u with the loss

    BCE + pull * mean over all m d entries of (P_u - R_u)^2     (eq. 8 and 9)

and the device uploads P_u. It scores with P_u. The server (eq. 4 to 6) compares the uploads:

    S_uv = cos(P_u, P_v) over whole tables
    A_uv = 1 where S_uv > threshold * mean(S); a user without neighbours keeps itself
    R = rows of A divided by their sums, times P;   Q = mean over users of R_u

Equation 6 prints a sum for Q; the authors' code has the mean. The server answers each device of the
round with its R_u, which rests there; a device that was never answered pulls towards Q. The graph
is one of the round's cohort.

Only rows that a device sampled have a gradient of the BCE. A step moves every other row by the
share a = 2 pull * rate / (m d) of its distance from R_u, so after B batches it is
(1-a)^B Q + (1 - (1-a)^B) R_u, which is how it is computed. For items that a device never sampled
this is all of its personalization.

``graph = "dissimilar"`` is what the authors' code does: it takes the cosine distance for a
similarity, and links users whose tables are least alike. ``graph = "complete"`` links all, so that
R_u = Q.

The server must see every upload by itself (`methods.relations`), and R_u of a user with few
neighbours is nearly the table of another user.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveFloat

from hushrec.aggregation import Total, Update
from hushrec.config import Width
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.kernels.row_networks import pulled_tables
from hushrec.methods import base, forms
from hushrec.methods.base import Array, Fitted, MethodConfig, Scores, SearchSpace, Shared
from hushrec.methods.relations import Relates
from hushrec.methods.shared.options import SEARCH, InnerProductConfig
from hushrec.private import PerClient, PerClientTable, Private, PrivateFields
from hushrec.streams import Round, Streams
from hushrec.training import samples as training
from hushrec.training.networks import (
    Pull,
    initial_row_network,
    score_row_networks,
    train_row_networks,
)


class GPFedRecConfig(InnerProductConfig):
    """Options of GPFedRec; default rates are those of the authors' code."""

    hidden: tuple[Width, ...] = (32, 16, 8)
    """Widths of the hidden layers, between 2d inputs and one output."""
    vector_rate: PositiveFloat = 79.0
    """Learning rate of the user vector: lr * vector_rate."""
    graph: Literal["similar", "dissimilar", "complete"] = "similar"
    """Whom the server links: users with similar tables, as in the paper; with dissimilar ones, as
    in the authors' code; or everybody."""
    threshold: NonNegativeFloat = 0.5
    """Two users are linked if their similarity is above this multiple of the mean (gamma)."""
    pull: NonNegativeFloat = 0.5
    """Weight of the mean squared distance of P_u from R_u in the loss (lambda)."""

    @property
    def pull_step(self) -> float:
        """Share of its distance from R_u by which a step moves a row."""
        return 2 * self.pull * self.lr * self.item_rate / self.d


class GPFedRec(
    base.Method, base.ExportsUser, base.ItemTables, base.OwnTable, base.Tunable, Relates
):
    """Own item tables, pulled towards the mean of the tables of related users."""

    name = "gpfedrec"
    Config = GPFedRecConfig
    config: GPFedRecConfig
    traits = base.Traits(
        reveals=frozenset({"table"}),
        training_only=frozenset({"target"}),
        unexplained=base.NETWORK,
    )
    uploaded, answered = "table", "target"

    def __init__(self, config: MethodConfig | None = None) -> None:
        super().__init__(config)
        if self.config.pull_step >= 2:
            raise ConfigError(
                f"pull = {self.config.pull:g}: a step moves a row by {self.config.pull_step:.3g} "
                "times its distance from its target, and by 2 or more it never arrives: use a "
                "smaller pull, lr or item_rate"
            )

    @property
    def search(self) -> SearchSpace:
        """Search space of the rates and of the pull."""
        return {
            **SEARCH,
            "vector_rate": base.Between(1.0, 100.0),
            "pull": base.Between(0.01, 1.0),
        }

    @property
    def own_table(self) -> tuple[str, ...]:
        """Names of the private table fields."""
        return ("table",)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the item table from N(0, init_std)."""
        config = self.config
        return {"items": training.initial_table(config.d, config.init_std, view.n_items, streams)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep vector, network, own table and target; a target of zeros is none."""
        config, table = self.config, shared["items"]
        network = initial_row_network(2 * config.d, config.hidden, streams)
        vector = training.first_vector(config.d, config.init_std, streams)
        return {
            "vector": PerClient(vector),
            **{name: PerClient(array) for name, array in network.items()},
            "table": PerClientTable(table),
            "target": PerClientTable(np.zeros_like(table)),
        }

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train vector, network and table from Q, with the pull towards R_u; upload P_u."""
        config, received, targets = self.config, shared["items"], np.asarray(private["target"])
        answered = np.asarray(targets[:, 0].any(axis=1))
        if not answered.all():
            targets = np.where(answered[:, None, None], targets, received)
        params, rows, losses = train_row_networks(
            view,
            now,
            received,
            _network(private),
            config.pace,
            training.Descent(*config.rates(view.n_items), two_steps=False),
            config.vector_rate,
            Pull(targets, config.pull_step),
        )
        left = (1 - config.pull_step) ** self._batches(view)
        tables = pulled_tables(received, targets, (1 - left).astype(np.float32))
        tables = training.with_rows(tables, rows)
        update = Update(len(view), dense={"table": tables})
        return Fitted(update, {**params, "table": tables, "target": private["target"]}, losses)

    def _batches(self, view: TrainView) -> NDArray[np.int64]:
        """Return how many steps every client takes in a round."""
        config = self.config
        free = view.n_items > np.diff(view.excluded().indptr)  # there is something to draw
        samples = view.positives.lengths * np.where(free, 1 + config.negatives, 1)
        return np.asarray(config.epochs * -(-samples // config.batch))

    def relate(self, tables: Iterable[Array]) -> None:
        """Replace each P_u by R_u."""
        if self.config.graph == "complete":
            for block in tables:
                block[:] = block.mean(axis=0, dtype=np.float64)
            return
        weights = neighbour_weights(cosines(tables), self.config.graph, self.config.threshold)
        for block in tables:
            flat = block.reshape(len(block), -1)
            flat[:] = weights @ flat

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Return the mean of the answers."""
        return {"items": (total.dense["table"] / total.clients).astype(np.float32)}

    def serving(self, shared: Shared) -> Shared:
        """Return nothing: devices score with their own tables."""
        return {}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with the own network and the own table."""
        return score_row_networks(_network(private), np.asarray(private["table"]))

    def item_tables(self, shared: Shared, private: Private) -> dict[str, Array]:
        """Return the own table of a single client."""
        return {"own": base.of_one(private)["table"]}

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Replace own tables by Q."""
        table, clients = shared["items"], len(np.asarray(private["vector"]))
        return shared, {**private, "table": np.broadcast_to(table, (clients, *table.shape))}

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the own table with the own vector and network."""
        own = base.of_one(private)
        return forms.ItemNetworks([forms.RowNetwork.of(own["table"], own)])


def cosines(tables: Iterable[Array]) -> NDArray[np.float64]:
    """Return the cosines of all pairs of clients' tables; sums are in float64, block by block.

    A table of zeros has cosine 0 with every other, and 1 with itself.
    """
    products: NDArray[np.float64] | None = None
    for block in tables:
        wide = block.reshape(len(block), -1).astype(np.float64)
        added = wide @ wide.T
        products = added if products is None else np.add(products, added, out=products)
    assert products is not None, "there are items"
    lengths = np.sqrt(np.diag(products))
    lengths[lengths == 0] = 1
    products /= lengths
    products /= lengths[:, None]
    np.fill_diagonal(products, 1)
    return products


def neighbour_weights(
    similarity: NDArray[np.float64], graph: Literal["similar", "dissimilar"], threshold: float
) -> NDArray[np.float32]:
    """Return the weight of every user in every user's target: rows sum to 1 (eq. 5)."""
    if graph == "dissimilar":
        similarity = 1 - similarity
    linked = similarity > threshold * similarity.mean()
    alone = np.flatnonzero(~linked.any(axis=1))
    linked[alone, alone] = True
    return np.asarray(linked / linked.sum(axis=1, keepdims=True), np.float32)


def _network(private: Private) -> dict[str, Array]:
    """Return the vector and the layers of the network."""
    names = [name for name in private if name == "vector" or name.startswith("layer")]
    return {name: np.asarray(private[name]) for name in names}
