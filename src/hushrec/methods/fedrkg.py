"""FedRKG: personalised federated recommendation with knowledge guidance (Lim et al., 2025).

Private: item table P_u [m, d], user vector e_u (and bias, if the backbone has one), score function
M_u, if the backbone has one, gate (W_u [3d], b_u). Shared: the guidance table P_g, sent only after
a guidance round.

A round: devices train (P_u, e_u) locally (eq. 2) and upload nothing, except in every
``interval``-th round, a guidance round, in which they upload P_u and the server computes the mean,
P_g (algorithm 1, line 11). Then each device trains its gate with all other parameters frozen (eq. 7
and 8) on the fused rows of eq. 6, and replaces its table by them (eq. 9):

    P_u <- beta P_u + 2 (1 - beta) g P_g,   g = sigmoid(W_u . [P_u, P_g, P_u - P_g] + b_u)

W_u and b_u start at 0, so an untrained gate is 1/2 and guidance is the fixed mix of eq. 3. Devices
receive P_g with the next download, so the guidance of round t is applied at the start of round
t + 1: the order of the paper, but an evaluation sees it one round later. With sampled cohorts,
guidance reaches the cohort of round t + 1. P_u itself is uploaded in guidance rounds, as in the
paper (``reveals``).

``guidance = "replace"`` ("w/ GIE", global item embeddings only) has one table, P_g: in every round
devices start from it and upload the deltas of their rows, the server adds the mean, and devices
score with P_g. This is the backbone without personal tables, as the paper's figures show (its rows
"w/ GIE" and FedMF are equal); ``interval`` and ``beta`` have no effect.

``privacy.mode = "local-gradients"`` clips and noises the gradient of P_u in every round (section
5.2, eq. 10 to 14). Deviations from the paper: a round is one step on all samples, because the
number of batches depends on private data, and all rows get noise, because the set of updated rows
does too. P_u is then a function of noised gradients and guidance tables; e_u, M_u and b_u are
trained without noise and stay private. A trained gate changes P_u without noise, which the paper
does not discuss, so a guarantee needs ``guidance = "fixed"``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update, UploadShape
from hushrec.config import Count, Share, Width
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.kernels.row_networks import fit_gates, fused_tables, open_gates
from hushrec.methods import base, forms
from hushrec.methods.base import Array, Fitted, MethodConfig, Scores, Shared
from hushrec.methods.shared.options import SEARCH, InnerProductConfig, networks
from hushrec.private import PerClient, PerClientTable, Private, PrivateFields
from hushrec.streams import GradientNoise, Round, Streams
from hushrec.training import samples as training

GRADIENT = "gradient"
GATE = ("gate", "gate_bias")
GUIDE_PURPOSE = "guide"
"""Purpose of the stream of the gate's negatives."""


class FedRKGConfig(InnerProductConfig):
    """Options of FedRKG; default rates are those of the authors' code."""

    backbone: Literal["fedmf", "pfedrec", "fedncf"] = "pfedrec"
    """fedmf: user vector, joint steps; pfedrec: score function with bias, two steps; fedncf: user
    vector and MLP, joint steps, which needs the 'neural' extra."""
    score_function: Literal["linear", "mlp"] = "linear"
    """Score function of the pfedrec backbone: linear, or an MLP, which needs the 'neural' extra."""
    hidden: tuple[Width, ...] | None = None
    """Widths of the hidden layers of an MLP.  [as in the paper, appendix C: 32 for fedncf, so
    64-32-1 with d = 32, and 16 for pfedrec, 32-16-1]"""
    guidance: Literal["adaptive", "fixed", "replace", "none"] = "adaptive"
    """adaptive: with the gate; fixed: without it ("w/o AG", eq. 3); replace: one global table in
    place of P_u ("w/ GIE"); none: no guidance ("w/ PIE")."""
    interval: Count = 100
    """Number of rounds between uploads of the tables (T_int)."""
    beta: Share = 0.99
    """Weight of P_u in the fused rows."""
    gate_lr: NonNegativeFloat = 1e-4
    """Learning rate of the gate."""
    gate_epochs: NonNegativeInt = 5
    """Epochs of training the gate after each guidance round; 0 keeps the gate at 1/2."""
    clip: PositiveFloat | None = 1.0
    """Bound of the norm of gradients, of recommender and gate; None for no bound."""
    round_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the rates of vector and table after each round."""


class FedRKG(
    base.Method,
    base.ExportsUser,
    base.Guided,
    base.NoisesGradients,
    base.OwnTable,
    base.Tunable,
):
    """Private item tables that are mixed with their mean every ``interval`` rounds."""

    name = "fedrkg"
    Config = FedRKGConfig
    config: FedRKGConfig
    traits = base.Traits(
        rounds=1000,
        reveals=frozenset({"table"}),
        unexplained="a device scores with one table, into which it has mixed every guidance table "
        "(eq. 9), so what came from others can no longer be told from its own",
    )
    search: ClassVar[base.SearchSpace] = {
        **SEARCH,
        "interval": base.OneOf((1, 2, 5, 10)),
        "beta": base.Between(0.0, 0.99, log=False),
        "gate_lr": base.Between(1e-6, 10.0),
    }

    def __init__(self, config: MethodConfig | None = None) -> None:
        super().__init__(config)
        if self.config.score_function == "mlp" and self.config.backbone != "pfedrec":
            raise ConfigError(
                f"score_function = mlp is for the pfedrec backbone, not {self.config.backbone}"
            )
        if self.has_network:
            networks()  # raises MissingExtraError before a run begins

    @property
    def has_network(self) -> bool:
        """Whether a device scores with an MLP, not with an inner product."""
        return self.config.backbone == "fedncf" or self.config.score_function == "mlp"

    @property
    def global_only(self) -> bool:
        """Whether there is one global table ("w/ GIE")."""
        return self.config.guidance == "replace"

    @property
    def own_table(self) -> tuple[str, ...]:
        """Names of the private table fields."""
        return () if self.global_only else ("table",)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the initial table of all devices (algorithm 1, line 2)."""
        table = training.initial_table(self.config.d, self.config.init_std, view.n_items, streams)
        return {"guidance": table, "fresh": np.full(1, self.global_only, np.int64)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep table, vector, bias and gate; new devices start from the last guidance table."""
        config, d, first = self.config, self.config.d, {}
        if config.score_function == "linear":
            # All backbones use the initialisation of a linear layer, as the authors' rates do.
            first["vector"], bias = training.first_score_function(d, streams)
            first["bias"] = bias if config.backbone == "pfedrec" else np.zeros_like(bias)
        if self.has_network:
            width, hidden = (2 * d, (32,)) if config.backbone == "fedncf" else (d, (16,))
            first |= networks().initial_row_network(width, config.hidden or hidden, streams)
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
        """Apply received guidance, if any, then train locally; upload in guidance rounds."""
        if self.global_only:
            table = shared["guidance"]
            kept, rows, losses = self._trained(table, private, view, now)
            uploaded = {"table": training.deltas(rows, table)}
            return Fitted(Update(len(view), rows=uploaded), kept, losses)
        config, tables = self.config, np.asarray(private["table"])
        gates = {name: np.array(private[name]) for name in GATE}
        guidance = shared.get("guidance")
        if guidance is not None:
            if config.guidance == "adaptive" and config.gate_epochs:
                gates = self._trained_gates(tables, guidance, private, view, now)
            beta = np.float32(config.beta)
            tables = fused_tables(tables, guidance, gates["gate"], gates["gate_bias"], beta)
            tables.flags.writeable = False
        kept, rows, losses = self._trained(tables, private, view, now)
        own: Array | ClientRows = rows
        if now.gradient_noise is not None:
            own = self._noised(tables, rows, view, now, now.gradient_noise)
        uploads = config.guidance != "none" and now.number % config.interval == 0
        update = Update(len(view))
        if isinstance(own, ClientRows) and (guidance is not None or uploads):
            own = training.with_rows(tables, rows)
        if uploads:
            update = Update(len(view), dense={"table": np.asarray(own)})
        return Fitted(update, {"table": own, **kept, **gates}, losses)

    def _trained(
        self, tables: Array, private: Private, view: TrainView, now: Round
    ) -> tuple[dict[str, Array], ClientRows, NDArray[np.float64]]:
        """Train from one table, or own ones (eq. 2): return own parameters, item rows, losses."""
        config, two_steps = self.config, self.config.backbone == "pfedrec"
        descent = training.Descent(*self._rates(view, now), two_steps=two_steps, clip=config.clip)
        pace = config.pace
        if now.gradient_noise is not None:
            most = int(view.positives.lengths.max(initial=1)) * (1 + config.negatives)
            pace = pace._replace(batch=max(1, most))
        kept = {name: np.array(private[name]) for name in private if name in ("vector", "bias")}
        if self.has_network:
            network, rows, losses = networks().train_row_networks(
                view, now, tables, _network(private), pace, descent
            )
            return kept | network, rows, losses
        vectors, biases = kept["vector"], kept["bias"] if two_steps else None
        trained = training.train_inner_product(view, now, tables, vectors, biases, pace, descent)
        return kept, *trained

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
        return np.asarray(tables - rate * safe.dense[GRADIENT])

    def gradient_shape(self, view: TrainView) -> UploadShape:
        """Return the shape of P_u's gradient."""
        config = self.config
        if self.global_only:
            raise ConfigError(
                "guidance = replace uploads deltas of the global table: use privacy.mode = "
                "local-gaussian, which adds noise to uploads"
            )
        if config.epochs != 1:
            raise ConfigError(
                f"epochs = {config.epochs}: under noise on gradients a round is one step; use "
                "epochs = 1, and more rounds"
            )
        if config.item_rate == 0:
            raise ConfigError("item_rate = 0: there is no step on the item table to add noise to")
        return UploadShape(view.n_items, {GRADIENT: config.d}, {})

    def uncovered(self) -> str | None:
        """Return a reason if the gate is trained without noise."""
        if self.config.guidance == "adaptive" and self.config.gate_epochs:
            return (
                "the gate is trained on a client's data without noise and changes the table that "
                "it uploads next: use guidance = fixed, or gate_epochs = 0"
            )
        return None

    def _trained_gates(
        self, tables: Array, guidance: Array, private: Private, view: TrainView, now: Round
    ) -> dict[str, Array]:
        """Train the gates with all other parameters frozen (eq. 7 and 8)."""
        config, gates = self.config, {name: np.array(private[name]) for name in GATE}
        samples = training.draw_device_samples(
            view, config.negatives, config.gate_epochs, now, purpose=GUIDE_PURPOSE
        )
        if not self.has_network:
            vectors, biases = np.asarray(private["vector"]), np.asarray(private["bias"])
            frozen = (tables, guidance, vectors, biases)
            clip = np.inf if config.clip is None else config.clip
            rates = np.float32(config.gate_lr), np.float32(config.beta), np.float32(clip)
            fit_gates(samples, *frozen, gates["gate"], gates["gate_bias"], config.batch, *rates)
            return gates
        from hushrec.training import tensors

        trained, _, _ = tensors.train_tensors(
            {**_network(private), **gates},
            {"items": tables, "guidance": guidance},
            networks().gated_loss(networks().row_loss, config.beta),
            [tensors.DescentStep(dict.fromkeys(gates, config.gate_lr), config.clip)],
            samples,
            config.batch,
            view.n_items,
        )
        return {name: trained[name] for name in gates}

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Compute the mean of the tables after a guidance round (algorithm 1, line 11)."""
        if self.global_only:
            mean = training.apply_mean(shared["guidance"], total, "table")
            return {"guidance": mean, "fresh": shared["fresh"]}
        if "table" not in total.dense:
            return {"guidance": shared["guidance"], "fresh": np.zeros(1, np.int64)}
        mean = total.dense["table"] / total.clients
        return {"guidance": mean.astype(np.float32), "fresh": np.ones(1, np.int64)}

    def download(self, shared: Shared) -> Shared:
        """Send the guidance table in the round after a guidance round, and otherwise nothing."""
        return {"guidance": shared["guidance"]} if shared["fresh"][0] else {}

    def serving(self, shared: Shared) -> Shared:
        """Return the global table if there is one; devices otherwise score with their own."""
        return {"guidance": shared["guidance"]} if self.global_only else {}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with the private table, or with the global one."""
        table = shared["guidance"] if self.global_only else np.asarray(private["table"])
        if self.has_network:
            return np.asarray(networks().score_row_networks(_network(private), table))
        vectors, biases = np.asarray(private["vector"]), np.asarray(private["bias"])
        return training.score_inner_product(table, vectors, biases)

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the own table, or the global one, with the own vector, bias and network."""
        own = base.of_one(private)
        table = shared["guidance"] if self.global_only else own["table"]
        return forms.ItemNetworks([forms.RowNetwork.of(table, own)])

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Replace private tables by the last guidance table."""
        if self.global_only:
            raise base.no_own_table(self.name)
        guidance, clients = shared["guidance"], len(np.asarray(private["gate"]))
        everywhere = np.broadcast_to(guidance, (clients, *guidance.shape))
        return shared, {**private, "table": everywhere}

    def marks(self, round_number: int) -> bool:
        """Mark the rounds that begin with the commit of a guidance."""
        guided = self.config.guidance not in ("none", "replace") and round_number > 1
        return guided and (round_number - 1) % self.config.interval == 0

    def gates(self, shared: Shared, private: Private) -> Scores:
        """Return every client's gate of every item, for the last guidance table (eq. 5)."""
        gate, bias, tables = (np.asarray(private[name]) for name in ("gate", "gate_bias", "table"))
        return open_gates(gate, bias, tables, shared["guidance"])


def _network(private: Private) -> dict[str, Array]:
    """Return the parameters of the MLP: layers, and the vector if the backbone has one."""
    names = [name for name in private if name == "vector" or name.startswith("layer")]
    return {name: np.asarray(private[name]) for name in names}
