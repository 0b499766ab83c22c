"""FedRKG: personalised federated recommendation with knowledge guidance (Lim et al., 2025).

Private: item table P_u [m, d], user vector e_u (with a bias where the backbone has one), score
function M_u where the backbone has one, gate (W_u [3d], b_u). Shared: the guidance table P_g, sent
only after a guidance round.

Ordinary rounds train (P_u, e_u) on the device (eq. 2) and upload nothing. Every ``interval``
rounds the devices upload P_u after training, and the server takes the mean, P_g (algorithm 1,
line 11); its sum grows as they arrive. Then each device trains its gate with everything else frozen
(eq. 7 and 8) on the fused rows of eq. 6 and commits them for all items (eq. 9):

    P_u <- beta P_u + 2 (1 - beta) g P_g,   g = sigmoid(W_u . [P_u, P_g, P_u - P_g] + b_u)

W_u and b_u start at 0, so an untrained gate is 1/2 and guidance the plain mix of eq. 3. The devices
hear of P_g with the next download, so the commit of guidance round t is the first thing they do in
round t + 1: the paper's order of steps, seen by the evaluation one round later. Where cohorts are
drawn, guidance reaches the cohort of that round.

P_u itself travels in guidance rounds: that is the paper's method, and ``reveals`` says so.
"""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import TrainView
from hushrec.kernels.guidance import Frozen, fit_gates, fused_tables, open_gates
from hushrec.kernels.row_networks import RowSamples
from hushrec.methods.base import (
    Fitted,
    Method,
    MethodConfig,
    PerClient,
    PerClientTable,
    Private,
    PrivateFields,
    Shared,
    Traits,
)
from hushrec.methods.capabilities import Between, Guided, OneOf, OwnTable, SearchSpace, Tunable
from hushrec.methods.options import SEARCH, InnerProductConfig
from hushrec.rng import Round, Streams
from hushrec.settings import Width
from hushrec.training.inner_product import (
    Descent,
    first_score_function,
    initial_table,
    score_own_tables,
    train_inner_product,
    with_rows,
)
from hushrec.training.samples import draw_device_samples

Array = NDArray[Any]

GUIDE_PURPOSE = "guide"
"""The stream of a gate's own negatives."""


class FedRKGConfig(InnerProductConfig):
    """Rates are those of the authors' code; `guidance` holds the paper's ablations."""

    backbone: Literal["fedmf", "pfedrec", "fedncf"] = "pfedrec"
    """A user vector and joint steps; a score function with bias and two steps; or a user vector
    under a network and joint steps, which needs the 'neural' extra."""
    hidden: tuple[Width, ...] = (32,)
    """Widths of the hidden layers of the fedncf backbone (paper, appendix C: 64, 32, 1)."""
    guidance: Literal["adaptive", "fixed", "replace", "none"] = "adaptive"
    """With the gate; without it ("w/o AG", eq. 3); by replacing P_u ("w/ GIE"); none ("w/ PIE")."""
    interval: Annotated[int, Field(ge=1)] = 100
    """T_int: every how many rounds the tables are uploaded."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.99
    """How much of P_u a commit keeps."""
    gate_lr: Annotated[float, Field(ge=0)] = 1e-4
    """Rate of the gate."""
    gate_epochs: Annotated[int, Field(ge=0)] = 5
    """Passes over the client's samples per guidance; 0 leaves the gate at 1/2."""
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of a gradient, of recommender and gate alike; none with None."""
    round_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Rates of vector and table shrink by this factor from one round to the next."""


class FedRKG(Method, Tunable, OwnTable, Guided):
    """Private tables that are guided by their mean from time to time."""

    name = "fedrkg"
    Config = FedRKGConfig
    config: FedRKGConfig
    traits = Traits(rounds=1000, reveals=frozenset({"table"}))
    own_table = ("table",)
    search: ClassVar[SearchSpace] = {
        **SEARCH,
        "interval": OneOf((1, 2, 5, 10)),
        "beta": Between(0.0, 0.99, log=False),
        "gate_lr": Between(1e-6, 10.0),
    }

    def __init__(self, config: MethodConfig | None = None) -> None:
        super().__init__(config)
        if self.config.backbone == "fedncf":
            _tensors()  # refuses here what is not installed, before a run begins

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the table that every device starts from (algorithm 1, line 2)."""
        table = initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return {"guidance": table, "fresh": np.zeros(1, np.int64)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep table, vector, bias and gate; a newcomer starts from the last guidance table."""
        d, network = self.config.d, {}
        if self.config.backbone == "fedncf":
            network = _tensors().initial_row_network(2 * d, self.config.hidden, streams)
        # A linear layer's draw for either backbone: the rates of the authors' code go with it.
        vector, bias = first_score_function(d, streams)
        return {
            "table": PerClientTable(shared["guidance"]),
            "vector": PerClient(vector),
            "bias": PerClient(bias if self.config.backbone == "pfedrec" else np.zeros_like(bias)),
            "gate": PerClient(np.zeros(3 * d, np.float32)),
            "gate_bias": PerClient(np.zeros((), np.float32)),
            **{name: PerClient(array) for name, array in network.items()},
        }

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Commit the guidance, if there is any, then train alone; upload in guidance rounds."""
        config = self.config
        has_bias, tables = config.backbone == "pfedrec", np.asarray(private["table"])
        vectors, biases = np.array(private["vector"]), np.array(private["bias"])
        gates = {name: np.array(private[name]) for name in ("gate", "gate_bias")}
        network, guided = _network(private), "guidance" in shared
        if guided:
            frozen = Frozen(tables, shared["guidance"], vectors, biases)
            if config.guidance == "adaptive" and config.gate_epochs:
                gates = self._trained_gates(gates, frozen, network, view, now)
            beta = np.float32(0 if config.guidance == "replace" else config.beta)
            tables = fused_tables(
                tables, shared["guidance"], gates["gate"], gates["gate_bias"], beta
            )
            tables.flags.writeable = False
        decayed = config.round_decay ** max(0, now.number - 1)
        own, item = (rate * decayed for rate in config.rates(view.n_items))
        descent = Descent(own, item, two_steps=has_bias, clip=config.clip)
        if network:
            network, rows, losses = _tensors().train_row_networks(
                view, now, tables, {"vector": vectors, **network}, config.pace, descent
            )
            vectors = network.pop("vector")
        else:
            rows, losses = train_inner_product(
                view, now, tables, vectors, biases if has_bias else None, config.pace, descent
            )
        uploads = config.guidance != "none" and now.number % config.interval == 0
        update = Update(len(view))
        table: Array | ClientRows = rows
        if guided or uploads:
            table = with_rows(tables, rows)
        if uploads:
            update = Update(len(view), dense={"table": np.asarray(table)})
        kept = {"table": table, "vector": vectors, "bias": biases, **gates, **network}
        return Fitted(update, kept, losses)

    def _trained_gates(
        self,
        gates: dict[str, Array],
        frozen: Frozen,
        network: dict[str, Array],
        view: TrainView,
        now: Round,
    ) -> dict[str, Array]:
        """Train the gates, all else frozen (eq. 7 and 8)."""
        config = self.config
        samples = draw_device_samples(
            view, config.negatives, config.gate_epochs, now, purpose=GUIDE_PURPOSE
        )
        if not network:
            fit_gates(
                RowSamples(samples.indptr, samples.items, samples.labels, samples.epochs),
                frozen,
                gates["gate"],
                gates["gate_bias"],
                config.batch,
                np.float32(config.gate_lr),
                np.float32(config.beta),
                np.float32(np.inf if config.clip is None else config.clip),
            )
            return gates
        from hushrec.training import tensors

        trained, _, _ = tensors.train_tensors(
            {"vector": frozen.vectors, **network, **gates},
            {"items": frozen.tables, "guidance": frozen.guidance},
            _tensors().gated_loss(_tensors().row_loss, config.beta),
            [tensors.Phase(dict.fromkeys(gates, config.gate_lr), config.clip)],
            samples,
            config.batch,
            view.n_items,
        )
        return {name: trained[name] for name in gates}

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take the mean of the tables, if they came (algorithm 1, line 11)."""
        if "table" not in total.dense:
            return {"guidance": shared["guidance"], "fresh": np.zeros(1, np.int64)}
        mean = total.dense["table"] / total.clients
        return {"guidance": mean.astype(np.float32), "fresh": np.ones(1, np.int64)}

    def download(self, shared: Shared) -> Shared:
        """Send the guidance table in the round after it was made, and else nothing."""
        return {"guidance": shared["guidance"]} if shared["fresh"][0] else {}

    def serving(self, shared: Shared) -> Shared:
        """Send nothing: a device scores with its own table."""
        return {}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the own table alone."""
        if network := _network(private):
            params = {"vector": np.asarray(private["vector"]), **network}
            scores: NDArray[np.float32] = _tensors().score_row_networks(
                params, np.asarray(private["table"])
            )
            return scores
        vectors, biases = np.asarray(private["vector"]), np.asarray(private["bias"])
        return score_own_tables(np.asarray(private["table"]), vectors, biases)

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Give everybody the last guidance table."""
        guidance, clients = shared["guidance"], len(np.asarray(private["vector"]))
        everywhere = np.broadcast_to(guidance, (clients, *guidance.shape))
        return shared, {**private, "table": everywhere}

    def marks(self, round_number: int) -> bool:
        """Mark the rounds that begin with the commit of a guidance."""
        guided = self.config.guidance != "none" and round_number > 1
        return guided and (round_number - 1) % self.config.interval == 0

    def gates(self, shared: Shared, private: Private) -> NDArray[np.float32]:
        """Return every client's gate of every item, for the last guidance table (eq. 5)."""
        return open_gates(
            np.asarray(private["gate"]),
            np.asarray(private["gate_bias"]),
            np.asarray(private["table"]),
            shared["guidance"],
        )


def _network(private: Private) -> dict[str, Array]:
    """Return the score function of a client, if the backbone has one."""
    return {name: np.asarray(array) for name, array in private.items() if name.startswith("layer")}


def _tensors() -> ModuleType:
    """Import what trains networks; the other backbones do without it."""
    from hushrec.training import row_network

    return row_network
