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

With ``guidance = "replace"`` ("w/ GIE", global item embeddings only) there is one table, P_g: every
round every device starts from it, uploads how its rows moved, and the mean of that is added; a
device scores with P_g. That is the backbone without personal tables, as the paper's figures are
(its rows "w/ GIE" and FedMF are the same); ``interval`` and ``beta`` mean nothing then.

With ``privacy.mode = "local-gradients"`` the gradient of P_u is clipped and noised in every round
(section 5.2, eq. 10 to 14): one step a round on all samples, since how many batches a client has
is its data, and noise on every row, since which rows move is. P_u is then made of noised gradients
and guidance tables only; e_u, M_u and b_u learn without noise and stay. A trained gate is not: it
shapes P_u past the noise, which the paper passes over, so a guarantee needs ``guidance = "fixed"``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec import kernels
from hushrec.aggregation import ClientRows, Total, Update, UploadShape
from hushrec.config import Width
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.kernels.guidance import Frozen, fit_gates, fused_tables, open_gates
from hushrec.kernels.row_networks import RowSamples
from hushrec.methods.base import (
    Between,
    Fitted,
    Guided,
    Method,
    MethodConfig,
    NoisesGradients,
    OneOf,
    OwnTable,
    PerClient,
    PerClientTable,
    Private,
    PrivateFields,
    SearchSpace,
    Shared,
    Traits,
    Tunable,
    no_own_table,
)
from hushrec.methods.shared.options import SEARCH, InnerProductConfig
from hushrec.streams import GradientNoise, Round, Streams
from hushrec.training.inner_product import (
    Descent,
    apply_mean,
    deltas,
    first_score_function,
    initial_table,
    score_own_tables,
    train_inner_product,
    with_rows,
)
from hushrec.training.samples import draw_device_samples

Array = NDArray[Any]

GRADIENT = "gradient"
GUIDE_PURPOSE = "guide"
"""The stream of a gate's own negatives."""


class FedRKGConfig(InnerProductConfig):
    """Rates are those of the authors' code; `guidance` holds the paper's ablations."""

    backbone: Literal["fedmf", "pfedrec", "fedncf"] = "pfedrec"
    """A user vector and joint steps; a score function with bias and two steps; or a user vector
    under a network and joint steps, which needs the 'neural' extra."""
    score_function: Literal["linear", "mlp"] = "linear"
    """Of the pfedrec backbone: one layer, or a network, which needs the 'neural' extra."""
    hidden: tuple[Width, ...] | None = None
    """Widths of the hidden layers of a network.  [the paper's, appendix C: 32 for fedncf, so
    64-32-1 with d = 32, and 16 for pfedrec, 32-16-1]"""
    guidance: Literal["adaptive", "fixed", "replace", "none"] = "adaptive"
    """With the gate; without it ("w/o AG", eq. 3); one table for all in place of P_u, replaced in
    every round ("w/ GIE"); none ("w/ PIE")."""
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


class FedRKG(Method, Tunable, OwnTable, Guided, NoisesGradients):
    """Private tables that are guided by their mean from time to time."""

    name = "fedrkg"
    Config = FedRKGConfig
    config: FedRKGConfig
    traits = Traits(rounds=1000, reveals=frozenset({"table"}))
    search: ClassVar[SearchSpace] = {
        **SEARCH,
        "interval": OneOf((1, 2, 5, 10)),
        "beta": Between(0.0, 0.99, log=False),
        "gate_lr": Between(1e-6, 10.0),
    }

    def __init__(self, config: MethodConfig | None = None) -> None:
        super().__init__(config)
        if self.config.score_function == "mlp" and self.config.backbone != "pfedrec":
            raise ConfigError(
                f"score_function = mlp is for the pfedrec backbone, not {self.config.backbone}"
            )
        if self.has_network:
            _tensors()  # refuses here what is not installed, before a run begins

    @property
    def has_network(self) -> bool:
        """Whether a device scores with a network, and not with an inner product."""
        return self.config.backbone == "fedncf" or self.config.score_function == "mlp"

    @property
    def global_only(self) -> bool:
        """Whether there is one table for all ("w/ GIE")."""
        return self.config.guidance == "replace"

    @property
    def own_table(self) -> tuple[str, ...]:
        """Name P_u."""
        return () if self.global_only else ("table",)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the table that every device starts from (algorithm 1, line 2)."""
        table = initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return {"guidance": table, "fresh": np.full(1, self.global_only, np.int64)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep table, vector, bias and gate; a newcomer starts from the last guidance table."""
        config, d, first = self.config, self.config.d, {}
        if config.score_function == "linear":
            # A linear layer's draw for any backbone: the rates of the authors' code go with it.
            first["vector"], bias = first_score_function(d, streams)
            first["bias"] = bias if config.backbone == "pfedrec" else np.zeros_like(bias)
        if self.has_network:
            width, hidden = (2 * d, (32,)) if config.backbone == "fedncf" else (d, (16,))
            first |= _tensors().initial_row_network(width, config.hidden or hidden, streams)
        recommender = {name: PerClient(array) for name, array in first.items()}
        if self.global_only:
            return recommender
        return {
            **recommender,
            "table": PerClientTable(shared["guidance"]),
            "gate": PerClient(np.zeros(3 * d, np.float32)),
            "gate_bias": PerClient(np.zeros((), np.float32)),
        }

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Commit the guidance, if there is any, then train alone; upload in guidance rounds."""
        if self.global_only:
            table = shared["guidance"]
            kept, rows, losses = self._trained(table, private, view, now)
            return Fitted(Update(len(view), rows={"table": deltas(rows, table)}), kept, losses)
        config, tables = self.config, np.asarray(private["table"])
        gates = {name: np.array(private[name]) for name in ("gate", "gate_bias")}
        guided = "guidance" in shared
        if guided:
            if config.guidance == "adaptive" and config.gate_epochs:
                gates = self._trained_gates(gates, tables, shared["guidance"], private, view, now)
            tables = fused_tables(
                tables,
                shared["guidance"],
                gates["gate"],
                gates["gate_bias"],
                np.float32(config.beta),
            )
            tables.flags.writeable = False
        kept, rows, losses = self._trained(tables, private, view, now)
        own: Array | ClientRows = rows
        if now.gradient_noise is not None:
            own = self._noised(tables, rows, view, now, now.gradient_noise)
        uploads = config.guidance != "none" and now.number % config.interval == 0
        update = Update(len(view))
        if isinstance(own, ClientRows) and (guided or uploads):
            own = with_rows(tables, rows)
        if uploads:
            update = Update(len(view), dense={"table": np.asarray(own)})
        return Fitted(update, {"table": own, **kept, **gates}, losses)

    def _trained(
        self, tables: Array, private: Private, view: TrainView, now: Round
    ) -> tuple[dict[str, Array], ClientRows, NDArray[np.float64]]:
        """Train the recommender from one table, or each device from its own (eq. 2).

        Returns vector, bias and network, the rows of the table that moved, and the losses.
        """
        config, two_steps = self.config, self.config.backbone == "pfedrec"
        descent = Descent(*self._rates(view, now), two_steps=two_steps, clip=config.clip)
        pace = config.pace
        if now.gradient_noise is not None:
            most = int(view.positives.lengths.max(initial=1)) * (1 + config.negatives)
            pace = pace._replace(batch=max(1, most))
        kept = {name: np.array(private[name]) for name in private if name in ("vector", "bias")}
        if self.has_network:
            network, rows, losses = _tensors().train_row_networks(
                view, now, tables, _network(private), pace, descent
            )
            return kept | network, rows, losses
        biases = kept["bias"] if two_steps else None
        rows, losses = train_inner_product(view, now, tables, kept["vector"], biases, pace, descent)
        return kept, rows, losses

    def _rates(self, view: TrainView, now: Round) -> tuple[float, float]:
        """Return this round's rates of (own parameters, item rows)."""
        decayed = self.config.round_decay ** max(0, now.number - 1)
        own, item = self.config.rates(view.n_items)
        return own * decayed, item * decayed

    def _noised(
        self, tables: Array, rows: ClientRows, view: TrainView, now: Round, noise: GradientNoise
    ) -> Array:
        """Take the step on the tables again, with its gradient clipped and noised."""
        rate = np.float32(self._rates(view, now)[1])
        owner = np.repeat(np.arange(len(view)), np.diff(rows.indptr))
        gradient = ClientRows(rows.indptr, rows.ids, (tables[owner, rows.ids] - rows.rows) / rate)
        safe = noise(Update(len(view), rows={GRADIENT: gradient}), view)
        stepped: Array = tables - rate * safe.dense[GRADIENT]
        return stepped

    def gradient_shape(self, view: TrainView) -> UploadShape:
        """Return the shape of P_u's gradient."""
        config = self.config
        if self.global_only:
            raise ConfigError(
                "with guidance = replace what is uploaded is the step itself: use --privacy "
                "local-gaussian, which noises it"
            )
        if config.epochs != 1:
            raise ConfigError(
                f"epochs = {config.epochs}: under noise on gradients a round is one step: use "
                "epochs = 1, and more rounds"
            )
        if config.item_rate == 0:
            raise ConfigError("item_rate = 0: there is no step on the item table to be noised")
        return UploadShape(view.n_items, {GRADIENT: config.d}, {})

    def uncovered(self) -> str | None:
        """Name the gate, where it is trained."""
        if self.config.guidance == "adaptive" and self.config.gate_epochs:
            return (
                "the gate is trained on a client's data without noise and shapes the table that "
                "it uploads next: use guidance = fixed, or gate_epochs = 0"
            )
        return None

    def _trained_gates(
        self,
        gates: dict[str, Array],
        tables: Array,
        guidance: Array,
        private: Private,
        view: TrainView,
        now: Round,
    ) -> dict[str, Array]:
        """Train the gates, all else frozen (eq. 7 and 8)."""
        config = self.config
        samples = draw_device_samples(
            view, config.negatives, config.gate_epochs, now, purpose=GUIDE_PURPOSE
        )
        if not self.has_network:
            vectors, biases = np.asarray(private["vector"]), np.asarray(private["bias"])
            fit_gates(
                RowSamples(samples.indptr, samples.items, samples.labels, samples.epochs),
                Frozen(tables, guidance, vectors, biases),
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
            {**_network(private), **gates},
            {"items": tables, "guidance": guidance},
            _tensors().gated_loss(_tensors().row_loss, config.beta),
            [tensors.DescentStep(dict.fromkeys(gates, config.gate_lr), config.clip)],
            samples,
            config.batch,
            view.n_items,
        )
        return {name: trained[name] for name in gates}

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Take the mean of the tables, if they came (algorithm 1, line 11)."""
        if self.global_only:
            mean = apply_mean(shared["guidance"], total, "table")
            return {"guidance": mean, "fresh": shared["fresh"]}
        if "table" not in total.dense:
            return {"guidance": shared["guidance"], "fresh": np.zeros(1, np.int64)}
        mean = total.dense["table"] / total.clients
        return {"guidance": mean.astype(np.float32), "fresh": np.ones(1, np.int64)}

    def download(self, shared: Shared) -> Shared:
        """Send the guidance table in the round after it was made, and else nothing."""
        return {"guidance": shared["guidance"]} if shared["fresh"][0] else {}

    def serving(self, shared: Shared) -> Shared:
        """Send nothing to who scores with its own table."""
        return {"guidance": shared["guidance"]} if self.global_only else {}

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score with the own table alone, or with that of all."""
        table = shared["guidance"] if self.global_only else np.asarray(private["table"])
        scores: NDArray[np.float32]
        if self.has_network:
            scores = _tensors().score_row_networks(_network(private), table)
            return scores
        vectors, biases = np.asarray(private["vector"]), np.asarray(private["bias"])
        if self.global_only:
            scores = kernels.inner_products(table, vectors, biases)
            return scores
        return score_own_tables(table, vectors, biases)

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Give everybody the last guidance table."""
        if self.global_only:
            raise no_own_table(self.name)
        guidance, clients = shared["guidance"], len(np.asarray(private["gate"]))
        everywhere = np.broadcast_to(guidance, (clients, *guidance.shape))
        return shared, {**private, "table": everywhere}

    def marks(self, round_number: int) -> bool:
        """Mark the rounds that begin with the commit of a guidance."""
        guided = self.config.guidance not in ("none", "replace") and round_number > 1
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
    """Return what a network scores with: its layers, and the vector where the backbone has one."""
    names = [name for name in private if name == "vector" or name.startswith("layer")]
    return {name: np.asarray(private[name]) for name in names}


def _tensors() -> ModuleType:
    """Import what trains networks; the other backbones do without it."""
    from hushrec.training import networks

    return networks
