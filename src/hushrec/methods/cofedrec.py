"""CoFedRec: co-clustering for federated recommendation (He et al., WWW 2024).

Private: own item table P_u [m, d], score function (w_u, b_u) as PFedRec's, and whether the device
is a member of the last group. The device's loss is the binary cross-entropy plus

    weight * mean over all items of the supervised contrast of `kernels.contrast`

whose clusters are the server's clusters of items; there are none in the first round. A batch takes
a step on (w_u, b_u) and then one on the item rows, and P_u stays on the device between rounds.

The paper's server sees every P_u. It clusters the rows of their mean V by k-means, draws a core
client c and a cluster k, sorts clients by s_u, the sum over the items of k of
cos(P_c,i, P_u,i), cuts the sorted list at its elbow (the point farthest from the line through its
ends), and replaces the tables of all clients before the cut by their mean.

Here the same is done with sums, in four rounds for one of the paper:

1. train, and upload P_u; the server computes V and its clusters, and draws k and c;
2. the core client uploads its rows of cluster k, and nobody else anything;
3. everybody uploads a one in the bin of the own s_u; the elbow of the histogram is the threshold;
4. members, who have s_u above the threshold, upload P_u and a one; the server computes their mean.

If the core client does not take part in round 2, the rows of V stand for its own.

A member takes the mean for its table when it trains again, and scores with it until then, as the
paper's evaluation after each replacement does. Groups differ from the paper's by the width of a
bin. So the server needs no single upload but the core's rows, which go to everybody.

``core = "mean"`` takes the rows of V in place of a client's, so that round 2 falls away and all
rounds have uploads of one shape. This is another method than the paper's; it is the only one that
noise on sums covers (`PrivateCoFedRec`), because the core's rows cannot be noised away.

``contrast = "batch"``, the default, contrasts the rows of a step's batch only, with the factor 1/m
of the mean over all items. The paper contrasts all m rows in every step ("all"), which takes m²
products of rows a step.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, PositiveFloat

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Count
from hushrec.data.views import TrainView
from hushrec.kernels.contrast import Contrast, mean_cosines
from hushrec.methods import base, forms
from hushrec.methods.base import Array, Fitted, Phase, Scores, Shared
from hushrec.methods.shared.options import SEARCH, InnerProductConfig
from hushrec.private import PerClient, PerClientTable, Private, PrivateFields
from hushrec.streams import Round, Streams
from hushrec.training import samples as training

BINS = 4096
"""Of the histogram of mean cosines. Tables that began alike have cosines near 1, so bins are
geometric in the distance from 1, from 2 to 1e-6: each is 0.35 % of its distance wide."""
NEAREST = 5e-7
"""Smallest distance that bins tell from a smaller one, as a share of the largest."""
VALUES = 1 - 2 * NEAREST ** ((np.arange(BINS) + 0.5) / BINS)
"""The cosine in the middle of every bin, ascending."""
NOBODY = BINS
"""The threshold that no client reaches."""
PASSES = 100
"""Most passes of k-means."""
Step = Literal["train", "core", "count", "group"]
SENT: dict[Step, tuple[str, ...]] = {
    "train": ("labels", "group"),
    "core": ("labels", "chosen", "core_client"),
    "count": ("labels", "chosen", "core"),
    "group": ("labels", "chosen", "core", "threshold"),
}
"""What clients receive at the beginning of each step."""


class CoFedRecConfig(InnerProductConfig):
    """Options of CoFedRec; default rates are those of the authors' code."""

    epochs: Count = 2
    """Epochs per round."""
    clusters: Count = 30
    """Number of clusters of items (K)."""
    weight: NonNegativeFloat = 0.005
    """Weight of the contrast in the loss (lambda)."""
    temperature: PositiveFloat = 0.1
    """Temperature of the contrast (tau)."""
    contrast: Literal["batch", "all"] = "batch"
    """Which rows a step contrasts: those of its batch, or all, as in the paper."""
    core: Literal["client", "mean"] = "client"
    """With whose rows devices compare theirs: those of a client, drawn in each round of the paper,
    or of the mean."""
    least_group: Count = 2
    """Smallest group whose mean is computed: the mean of one client would be that client's
    table."""


class PrivateCoFedRecConfig(CoFedRecConfig):
    """Options of CoFedRec under noise on sums."""

    core: Literal["mean"] = "mean"
    """With whose rows devices compare theirs: no client's can be covered by noise."""
    least_group: Count = 10
    """Smallest group whose mean is computed, by noised counts."""


class PrivateCoFedRec(base.Method, base.ExportsUser, base.OwnTable, base.Tunable):
    """Own item tables; those of clients who are like the mean table are averaged."""

    name = "cofedrec"
    Config: ClassVar[type[base.MethodConfig]] = PrivateCoFedRecConfig
    config: CoFedRecConfig
    traits = base.Traits(
        rounds=300,
        every=3,
        reveals=frozenset({"table"}),
        unexplained="a device scores with one table, which a group's mean replaces from time to "
        "time, so what came from others can no longer be told from its own",
    )
    search: ClassVar[base.SearchSpace] = {**SEARCH, "weight": base.Between(1e-4, 0.1)}

    @property
    def steps(self) -> tuple[Step, ...]:
        """The rounds that one round of the paper takes."""
        if self.config.core == "mean":
            return ("train", "count", "group")
        return ("train", "core", "count", "group")

    def step_of(self, number: int) -> Step:
        """Return what a round does."""
        return self.steps[(number - 1) % len(self.steps)]

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One phase, whose rounds take turns; alone, as for a new client, it trains."""
        return (self._phase("train"),)

    def phase_of(self, round_number: int) -> Phase:
        """Return the phase, with what this round's step sends and does."""
        return self._phase(self.step_of(round_number))

    def _phase(self, step: Step) -> Phase:
        """Return the phase for rounds of one step."""
        uploads = "the own table, a bin, or, as a member of a group, the own table again"
        fits = {"train": self.fit, "core": self._core, "count": self._count, "group": self._group}

        def download(shared: Shared) -> Shared:
            return {name: shared[name] for name in SENT[step]}

        rounds = self.traits.rounds
        return Phase("train", rounds, uploads, fits[step], self._apply, download, repeats=True)

    @property
    def own_table(self) -> tuple[str, ...]:
        """Names of the private table fields."""
        return ("table",)

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the table and the server's key; there are no clusters, no core and no group yet."""
        config, n_items = self.config, view.n_items
        return {
            "key": streams.key("cofedrec/server"),
            "labels": np.full(n_items, -1, np.int32),
            "chosen": np.zeros(1, np.int64),
            "core_client": np.full(1, -1, np.int64),
            "core": np.zeros((n_items, config.d), np.float32),
            "threshold": np.full(1, NOBODY, np.int64),
            "group": training.initial_table(config.d, config.init_std, n_items, streams),
        }

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep table and score function; new devices start from the last group's mean."""
        vector, bias = training.first_score_function(self.config.d, streams)
        return {
            "table": PerClientTable(shared["group"]),
            "vector": PerClient(vector),
            "bias": PerClient(bias),
            "member": PerClient(np.zeros((), np.int8)),
        }

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Take the group's mean as a member of it, train, and upload the table."""
        config, tables = self.config, np.asarray(private["table"])
        member = np.asarray(private["member"]) > 0
        if member.any():
            tables = np.where(member[:, None, None], shared["group"], tables)
        term = None
        if config.weight and shared["labels"][0] >= 0:
            weight = np.float32(config.weight / view.n_items)
            whole = config.contrast == "all"
            term = Contrast(shared["labels"], weight, np.float32(config.temperature), whole)
        vectors, biases = np.array(private["vector"]), np.array(private["bias"])
        descent = training.Descent(*config.rates(view.n_items), two_steps=True)
        rows, losses = training.train_inner_product(
            view, now, tables, vectors, biases, config.pace, descent, term
        )
        tables = training.with_rows(tables, rows)
        everybody = np.ones(len(view), np.bool_)
        update = self._update(len(view), _rows_of(tables, everybody, np.arange(view.n_items)))
        own = {"table": tables, "vector": vectors, "bias": biases}
        return Fitted(update, {**own, "member": np.zeros(len(view), np.int8)}, losses)

    def _core(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Upload the rows of the chosen cluster, as the core client."""
        is_core = np.asarray(view.clients == shared["core_client"][0])
        rows = _rows_of(np.asarray(private["table"]), is_core, _chosen_items(shared))
        return Fitted(self._update(len(view), rows), private)

    def _count(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Upload a one in the own bin."""
        n = len(view)
        bins = np.zeros((n, BINS), np.float32)
        bins[np.arange(n), _own_bins(shared, private)] = 1
        return Fitted(self._update(n, None, bins), private)

    def _group(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Upload the table and a one, as a member of the group."""
        n, tables = len(view), np.asarray(private["table"])
        member = _own_bins(shared, private) >= shared["threshold"][0]
        bins = np.zeros((n, BINS), np.float32)
        bins[:, 0] = member
        everything, nobody = np.arange(view.n_items), np.zeros(n, np.bool_)
        kept = {
            "table": _rows_of(tables, nobody, everything),
            "vector": np.array(private["vector"]),
            "bias": np.array(private["bias"]),
            "member": member.astype(np.int8),
        }
        return Fitted(self._update(n, _rows_of(tables, member, everything), bins), kept)

    def _update(
        self, clients: int, rows: ClientRows | None, bins: NDArray[np.float32] | None = None
    ) -> Update:
        """Upload rows and bins; noise needs uploads of one shape, so with zeros for what lacks."""
        if self.config.core == "mean":
            rows = rows or ClientRows(
                np.zeros(clients + 1, np.int64),
                np.zeros(0, np.int32),
                np.zeros((0, self.config.d), np.float32),
            )
            bins = np.zeros((clients, BINS), np.float32) if bins is None else bins
        tables = {} if rows is None else {"table": rows}
        return Update(clients, tables, {} if bins is None else {"bins": bins})

    def _apply(self, shared: Shared, total: Total, number: int) -> Shared:
        """Return the shared parameters after a round's step."""
        step, n_items = self.step_of(number), len(shared["labels"])
        after = dict(shared)
        if step == "count":
            return {**after, "threshold": np.array([self._threshold(total.dense["bins"])])}
        table = total.table("table", n_items, self.config.d)
        if step == "core":
            # An absent core client uploads nothing: the mean's rows stay for its own.
            return {**after, "core": table.astype(np.float32)} if table.any() else after
        if step == "group":
            size = total.dense["bins"][0]
            if size >= self.config.least_group:
                after["group"] = (table / size).astype(np.float32)
            return after
        mean = table / total.clients
        generator = _server_generator(shared["key"], number)
        labels = cluster_rows(mean, self.config.clusters, generator)
        chosen = int(generator.integers(self.config.clusters))
        after |= {"labels": labels, "chosen": np.array([chosen])}
        after["core_client"] = generator.integers(max(1, round(total.clients)), size=1)
        in_cluster = (labels == chosen)[:, None]
        return {**after, "core": np.where(in_cluster, mean, 0).astype(np.float32)}

    def _threshold(self, counts: NDArray[np.float64]) -> int:
        """Return the lowest bin of the group; `NOBODY` if the group would be too small."""
        lowest = elbow_bin(counts)
        members = np.maximum(np.rint(counts[lowest:]), 0).sum()
        return lowest if members >= self.config.least_group else NOBODY

    def serving(self, shared: Shared) -> Shared:
        """Return the mean of the last group, for its members."""
        return {"group": shared["group"]}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with the own table, or, as a member of the last group, with the group's."""
        tables, member = np.asarray(private["table"]), np.asarray(private["member"]) > 0
        if member.any():
            tables = np.where(member[:, None, None], shared["group"], tables)
        vectors, biases = np.asarray(private["vector"]), np.asarray(private["bias"])
        return training.score_inner_product(tables, vectors, biases)

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the table that the user scores with, and the score function."""
        own = base.of_one(private)
        table = shared["group"] if own["member"] else own["table"]
        return forms.ItemNetworks([forms.RowNetwork.of(table, own)])

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Replace own tables by the last group's mean."""
        return shared, {**private, "member": np.ones_like(np.asarray(private["member"]))}


class CoFedRec(PrivateCoFedRec):
    """Own item tables; those of clients with rows like a drawn client's are averaged."""

    Config = CoFedRecConfig
    traits = base.Traits(
        rounds=400,
        every=4,
        reveals=PrivateCoFedRec.traits.reveals,
        unexplained=PrivateCoFedRec.traits.unexplained,
    )
    under_noise = PrivateCoFedRec


def _chosen_items(shared: Shared) -> NDArray[np.int64]:
    """Return the items of the chosen cluster."""
    return np.flatnonzero(shared["labels"] == shared["chosen"][0])


def _own_bins(shared: Shared, private: Private) -> NDArray[np.int64]:
    """Return the bin of every client, by its rows and the core's."""
    tables = np.asarray(private["table"])
    return bins_of(mean_cosines(tables, shared["core"], _chosen_items(shared)))


def _rows_of(tables: Array, who: NDArray[np.bool_], items: NDArray[np.int64]) -> ClientRows:
    """Return some clients' rows of some items."""
    indptr = np.concatenate([[0], np.cumsum(who * len(items))])
    ids = np.tile(items.astype(np.int32), int(who.sum()))
    rows = tables[who][:, items].reshape(len(ids), tables.shape[2])
    return ClientRows(indptr, ids, np.ascontiguousarray(rows))


def _server_generator(key: Array, number: int) -> np.random.Generator:
    """Return the generator of the server's draws after a round."""
    low, high = (int(word) for word in key)
    return np.random.Generator(np.random.Philox(key=[low, high ^ number]))


def cluster_rows(
    rows: NDArray[np.float64], count: int, generator: np.random.Generator
) -> NDArray[np.int32]:
    """Cluster rows by k-means (Lloyd), from centres drawn by k-means++ (Arthur, 2007)."""
    count = min(count, len(rows))
    centres = rows[generator.integers(len(rows), size=1)]
    nearest = ((rows - centres[0]) ** 2).sum(axis=1)
    while len(centres) < count:
        shares = np.cumsum(nearest)
        drawn = min(np.searchsorted(shares, generator.random() * shares[-1]), len(rows) - 1)
        centres = np.concatenate([centres, rows[drawn : drawn + 1]])
        nearest = np.minimum(nearest, ((rows - rows[drawn]) ** 2).sum(axis=1))
    labels = np.full(len(rows), -1)
    for _ in range(PASSES):
        apart = (centres**2).sum(axis=1) - 2 * rows @ centres.T
        before, labels = labels, apart.argmin(axis=1)
        if np.array_equal(before, labels):
            break
        for k in range(count):  # a centre without rows stays where it is
            if (labels == k).any():
                centres[k] = rows[labels == k].mean(axis=0)
    return labels.astype(np.int32)


def bins_of(cosines: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bin of every cosine."""
    apart = np.clip((1 - cosines) / 2, NEAREST, 1)
    bins = (np.log(apart) / np.log(NEAREST) * BINS).astype(np.int64)
    return np.asarray(np.minimum(bins, BINS - 1))


def elbow_bin(counts: NDArray[np.float64]) -> int:
    """Return the bin of the elbow of the values in a histogram, sorted from the largest.

    The elbow is the point (place, value) farthest from the line through the first and the last
    point; values of a bin are equal, so its first or last place is the farthest one of the bin.
    """
    counts = np.maximum(np.rint(counts), 0)
    used = np.flatnonzero(counts)[::-1]
    if not len(used):
        return NOBODY
    last = np.cumsum(counts[used]) - 1
    first = last - counts[used] + 1
    fall = VALUES[used[0]] - VALUES[used]
    along = fall[-1] / max(1.0, last[-1])
    farthest = np.maximum(abs(fall - along * first), abs(fall - along * last))
    return int(used[farthest.argmax()])
