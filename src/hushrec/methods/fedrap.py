"""FedRAP: federated recommendation with additive personalization (Li et al., ICLR 2024).

Shared: common item table C [m, d]. Private: personal item table D_u [m, d], and the user vector u
with a bias b, one linear layer as in the authors' code. The score is <u, D_i + C_i> + b ("two-way
personalization"). The objective of round a on a device ("varying regularization weights"):

    BCE - lambda_a ||D_u - C||_F^2 + mu_a ||C||_1

with lambda_a = tanh(a / 10) v1 and mu_a = tanh(a / 10) v2.

A round on a device: some epochs of joint SGD steps on u, D_u and its copy of C; the device uploads
the changed rows of C. Server: the mean, then the proximal step of ||C||_1, C <- sign(C)
max(|C| - t, 0) with t = mu_a / (m d) times the mean over devices of the sum of a device's rates.

Deviations from the paper and its code: regularisers are means over entries, so that they scale like
the BCE (of the batch's rows for the difference, of all C for the L1 norm). The schedule of the
weights reaches the loss, which it does not in the authors' code. The L1 term is a proximal step on
the server, which gives exact zeros; on the devices it would not, because a mean of copies is 0 only
where all copies are.

What an upload reveals: D_u and C have the same BCE gradient, so an uploaded change of C shows the
change of D_u up to the regularisers. FedRAP keeps the values of D_u private, not its updates.

Weight decay applies to whole tables, as torch's SGD does. Rows that a device did not train all
shrink by one factor per round, so a device keeps D_u as a table and a scale, and uploads the factor
of its copy of C with the rows that differ from the shrunk C.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from hushrec.aggregation import ClientRows, Total, Update
from hushrec.config import Count, Share
from hushrec.data.views import TrainView
from hushrec.kernels import ragged
from hushrec.kernels.inner_product import Additive
from hushrec.methods import base, forms
from hushrec.methods.base import Array, Between, Fitted, OneOf, Reason, Scores, SearchSpace, Shared
from hushrec.methods.shared.options import SampledConfig
from hushrec.private import PerClient, PerClientTable, Private, PrivateFields
from hushrec.streams import Round, Streams
from hushrec.training import samples as training

ZERO = 1e-4
"""Entries of C below this are counted as near zero."""
SMALLEST_SCALE = np.float32(1e-3)
"""Below this scale a device multiplies its table by the scale and resets the scale to 1."""


class FedRAPConfig(SampledConfig):
    """Options of FedRAP; defaults are those of the authors' code."""

    epochs: Count = 10
    """Epochs per round."""
    batch: Count = 2048
    """Batch size; the loss is a mean over the batch."""
    lr: PositiveFloat = 0.5
    """Learning rate of the user vector and its bias in the first round."""
    table_lr: NonNegativeFloat = 200.0
    """Learning rate of both item tables in the first round."""
    personal_rate: Share = 1.0
    """Learning rate of D as a share of that of C. The paper has 1; less keeps devices close to C,
    which a client's step changes only by its share of the mean."""
    round_decay: Annotated[float, Field(gt=0, le=1)] = 0.97
    """Factor on all rates after each round."""
    batch_decay: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Factor on all rates after each batch; rates start again in each round."""
    weight_decay: NonNegativeFloat = 1e-4
    """L2 weight decay of vector, bias and both tables."""
    difference: NonNegativeFloat = 0.1
    """Weight of the difference of D and C (v1); 0 for the ablation without this term."""
    sparsity: NonNegativeFloat = 0.1
    """Weight of the penalty on C (v2); 0 for the ablation without this term."""
    penalty: Literal["l1", "l2"] = "l1"
    """Penalty on C: the mean of |C|, by the server's proximal step, or of C², by the devices'
    gradients (ablation)."""
    schedule: Literal["tanh", "constant"] = "tanh"
    """Whether both weights grow as tanh(round / 10), or are constant (ablation)."""
    bias: bool = True
    """Whether the user vector has a bias, as in the authors' code."""
    init_std: PositiveFloat = 1.0
    """Standard deviation of both initial tables."""
    send_above: NonNegativeFloat = 0.0
    """Rows of C whose entries all changed by at most this are not uploaded."""

    @model_validator(mode="after")
    def _decays_gently(self) -> Self:
        if self.weight_decay * max(self.lr, self.table_lr) >= 1:
            raise ValueError("weight_decay * table_lr must be below 1: a step would flip the table")
        return self


class FedRAP(
    base.Method,
    base.Explains,
    base.ExportsUser,
    base.ItemTables,
    base.ModelFacts,
    base.OwnTable,
    base.Tunable,
):
    """A shared sparse item table plus a private one, with a private user vector."""

    name = "fedrap"
    Config = FedRAPConfig
    config: FedRAPConfig
    own_table = ("personal", "scale")
    search: ClassVar[SearchSpace] = {
        # C changes by a client's share of a step, so it needs larger rates than D.
        "lr": Between(0.02, 1.0),
        "table_lr": Between(10.0, 20_000.0),
        "personal_rate": Between(1e-5, 1.0),
        "epochs": OneOf((1, 3, 10)),
        "weight_decay": Between(1e-7, 4e-5),
        "difference": Between(1e-5, 0.1),
        "sparsity": Between(1e-3, 10.0),
        "init_std": Between(0.01, 1.0),
    }

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Draw the common table."""
        config = self.config
        return {"common": training.initial_table(config.d, config.init_std, view.n_items, streams)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep D, the user vector and its bias; all devices start from one draw."""
        d, std = self.config.d, self.config.init_std
        vector, bias = training.first_score_function(d, streams)
        personal = training.initial_table(d, std, view.n_items, streams, "init/personal")
        return {
            "personal": PerClientTable(personal),
            "scale": PerClient(np.ones((), np.float32)),
            "vector": PerClient(vector),
            "bias": PerClient(bias if self.config.bias else np.zeros_like(bias)),
        }

    def weights(self, round_number: int) -> tuple[float, float]:
        """Return lambda_a and mu_a of a round."""
        share = np.tanh(round_number / 10) if self.config.schedule == "tanh" else 1.0
        return float(share * self.config.difference), float(share * self.config.sparsity)

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train u, D and the device's copy of C; upload the changed rows of C."""
        config = self.config
        common = np.zeros((view.n_items, config.d), np.float32)
        common[shared["ids"]] = shared["rows"]
        vectors, biases = np.array(private["vector"]), np.array(private["bias"])
        tables, scales = np.asarray(private["personal"]), np.array(private["scale"])
        difference, sparsity = self.weights(now.number)
        by_gradient = config.penalty == "l2"
        own, item = self.rates(now.number)
        by_device = difference, sparsity if by_gradient else 0
        weights = map(np.float32, (*by_device, config.weight_decay, config.personal_rate))
        trained, losses = training.train_inner_product(
            view,
            now,
            common,
            vectors,
            biases if config.bias else None,
            config.pace,
            training.Descent(own, item, two_steps=False, decay=config.batch_decay),
            Additive(tables, scales, *weights),
        )
        rate_sums, factors, own_factors = self._whole_table(view, now.number)
        thresholds = 0 * rate_sums if by_gradient else sparsity / common.size * rate_sums
        copies, above = trained.rows[:, : config.d], np.float32(config.send_above)
        sent = ragged.changed_rows(trained.indptr, trained.ids, copies, common, factors, above)
        dense = {"factor": factors, "threshold": thresholds.astype(np.float32)}
        update = Update(len(view), {"common": ClientRows(*sent)}, dense)
        scales *= own_factors
        own_rows = trained.rows[:, config.d :] / np.repeat(scales, np.diff(trained.indptr))[:, None]
        changed = ClientRows(trained.indptr, trained.ids, own_rows)
        small = (scales < SMALLEST_SCALE).any()
        personal = _rescaled(tables, changed, scales) if small else changed
        kept: Private = {"personal": personal, "scale": scales, "vector": vectors, "bias": biases}
        return Fitted(update, kept, losses)

    def rates(self, round_number: int) -> tuple[float, float]:
        """Return the rates of (vector and bias, tables) at the start of a round."""
        decayed = self.config.round_decay ** max(0, round_number - 1)
        return self.config.lr * decayed, self.config.table_lr * decayed

    def _whole_table(
        self, view: TrainView, round_number: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.float32]]:
        """Return, for each client, the sum of its batches' rates and the weight decay of C and D.

        The L1 term needs the sum of rates; weight decay is a factor on whole tables.
        """
        config = self.config
        has_negatives = view.excluded().lengths < view.n_items
        samples = view.positives.lengths * np.where(has_negatives, 1 + config.negatives, 1)
        batches = config.epochs * -(-samples // config.batch)
        steps = np.arange(batches.max(initial=0))
        rates = self.rates(round_number)[1] * config.batch_decay**steps
        sums = np.cumsum(np.append(0.0, rates))

        def shrunk(rates: NDArray[np.float64]) -> NDArray[np.float32]:
            factors = np.cumprod(np.append(1.0, 1 - rates * config.weight_decay))
            return np.asarray(factors[batches], np.float32)

        return sums[batches], shrunk(rates), shrunk(config.personal_rate * rates)

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Average the devices' copies of C, then take the proximal step of the L1 term."""
        kept = np.float32(total.dense["factor"] / total.clients)
        threshold = np.float32(max(0.0, float(total.dense["threshold"] / total.clients)))
        mean = training.apply_mean(shared["common"] * kept, total, "common")
        return {"common": np.sign(mean) * np.maximum(abs(mean) - threshold, 0)}

    def download(self, shared: Shared) -> Shared:
        """Send the rows of C that are not all zero."""
        ids = np.flatnonzero(shared["common"].any(axis=1)).astype(np.int32)
        return {"ids": ids, "rows": shared["common"][ids]}

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Score with the sum of the new common table and the personal table."""
        tables = np.asarray(private["personal"]) * np.asarray(private["scale"])[:, None, None]
        vectors, biases = np.asarray(private["vector"]), np.asarray(private["bias"])
        return training.score_inner_product(tables + shared["common"], vectors, biases)

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Compare <u, C_i> with <u, D_i>, whose sum is the score but for the bias."""
        vectors, scales = np.asarray(private["vector"]), np.asarray(private["scale"])
        personal = np.asarray(private["personal"])[np.arange(len(items))[:, None], items]
        by_shared = np.einsum("ckd,cd->ck", shared["common"][items], vectors)
        by_own = np.einsum("ckd,cd->ck", personal, vectors * scales[:, None])
        return base.larger_table(items, by_shared, by_own)

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Set D to 0, so that the score is <u, C_i> + b."""
        return shared, {**private, "scale": np.zeros_like(np.asarray(private["scale"]))}

    def item_tables(self, shared: Shared, private: Private) -> dict[str, Array]:
        """Return C, D and their sum (figure 5)."""
        (personal,) = np.asarray(private["personal"]) * np.asarray(private["scale"])[:, None, None]
        common = shared["common"]
        return {"common": common, "personal": personal, "added": common + personal}

    def user_form(self, shared: Shared, private: Private, history: TrainView) -> forms.ItemNetworks:
        """Return the sum of both tables, with the own vector and bias."""
        table = self.item_tables(shared, private)["added"]
        return forms.ItemNetworks([forms.RowNetwork.of(table, base.of_one(private))])

    def facts(self, shared: Shared) -> Mapping[str, float]:
        """Return the sparsity of C."""
        common = shared["common"]
        return {
            "exact zeros in C": float((common == 0).mean()),
            f"entries of C below {ZERO:g}": float((abs(common) < ZERO).mean()),
            "rows of C that are all zero": float((common == 0).all(axis=1).mean()),
        }


def _rescaled(tables: Array, changed: ClientRows, scales: Array) -> Array:
    """Write changed rows into the tables, and multiply tables by small scales, which become 1."""
    tables, small = training.with_rows(tables, changed), scales < SMALLEST_SCALE
    tables[small] *= scales[small, None, None]
    scales[small] = 1
    return tables
