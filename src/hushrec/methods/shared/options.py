"""Options that several methods share, and what is made of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hushrec.config import Width
from hushrec.kernels.draws import Pace
from hushrec.methods.base import Between, MethodConfig, SearchSpace


class SampledConfig(MethodConfig):
    """How a client's samples are made and gone through."""

    d: Width = 32
    """Width of an item row."""
    negatives: Annotated[int, Field(ge=1, le=1000)] = 4
    """Drawn per positive, afresh every round."""
    epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the client's samples per round."""
    batch: Annotated[int, Field(ge=1)] = 256
    """Samples per step; the loss is a mean over them."""

    @property
    def pace(self) -> Pace:
        """How a client goes through its samples."""
        return Pace(self.negatives, self.epochs, self.batch)


class InnerProductConfig(SampledConfig):
    """Options of the members that train one table."""

    lr: Annotated[float, Field(gt=0)] = 0.1
    """Rate of the client's own vector."""
    item_rate: Annotated[float, Field(ge=0)] = 80.0
    """Item rows move at lr * (number of items) * item_rate: the loss is a mean over the batch and
    the server divides by the number of clients, so useful rates are large."""
    init_std: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of the item rows before training."""

    def rates(self, n_items: int) -> tuple[float, float]:
        """Return the rates of (own parameters, item rows)."""
        return self.lr, self.lr * n_items * self.item_rate


SEARCH: SearchSpace = {
    "lr": Between(0.02, 1.0),
    "item_rate": Between(1.0, 100.0),
    "init_std": Between(0.03, 1.0),
}
"""Where `hushrec tune` looks: low item rates keep the devices close to the shared table."""


class FeatureNetworkConfig(MethodConfig):
    """Options of every method with this network."""

    d: Width = 64
    """Width of an embedding."""
    hidden: Annotated[tuple[Width, ...], Field(min_length=1)] = (
        64,
        32,
        16,
        8,
    )
    """Widths of the hidden layers."""
    lr: Annotated[float, Field(gt=0)] = 0.05
    """Rate of a step on the device (alpha1)."""
    epochs: Annotated[int, Field(ge=1)] = 5
    """Passes over the client's samples per round (E2)."""
    batch: Annotated[int, Field(ge=1)] = 32
    """Samples per step; the loss is a mean over them."""
    positive_above: float | None = None
    """A training row with a value above this is a positive, any other a negative.  [all positive]
    """
    negatives: Annotated[int, Field(ge=0, le=1000)] = 4
    """Items without a training row that are drawn as negatives, per row, afresh every round."""
    server_rate: Annotated[float, Field(gt=0)] = 1.0
    """How far the server follows the mean difference (alpha3)."""
    adapt_epochs: Annotated[int, Field(ge=0)] = 5
    """Passes over its samples that a device fine-tunes its copy for before it scores."""
    adapt_lr: Annotated[float, Field(gt=0)] | None = None
    """Rate of those steps.  [lr]"""

    @property
    def adapt_rate(self) -> float:
        """The rate of fine-tuning."""
        return self.lr if self.adapt_lr is None else self.adapt_lr


class PerceptronConfig(MethodConfig):
    """Options of the perceptron and of its training on a client."""

    d: Width = 64
    """Embedding dimensions."""
    hidden: tuple[Width, ...] = (64, 32)
    """Widths of the hidden layers."""
    lr: Annotated[float, Field(gt=0)] = 5e-3
    """Rate of Adam."""
    batch: Annotated[int, Field(ge=1)] = 128
    """Samples per step."""
    epochs: Annotated[int, Field(ge=1)] = 5
    """Passes over a client's samples in a round."""
    negatives: Annotated[int, Field(ge=1)] = 1
    """Negatives per positive, drawn afresh in every epoch."""
    decay: Annotated[float, Field(ge=0)] = 0.05
    """Weight of the squared embeddings in the loss, so that silos do not learn theirs by heart."""
    init_std: Annotated[float, Field(gt=0)] = 0.1
    """Deviation of the first item table."""
