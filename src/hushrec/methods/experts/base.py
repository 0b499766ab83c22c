"""What an expert is: sums over clients, in one round of uploads, and scores on the device.

An expert is found by name through the entry point group ``hushrec.experts``, ours and other
people's alike. It keeps no state: what it learnt is a few named arrays, its *model*, whose shapes
follow from public facts. `fedmix` calls it in this order:

1. `hears` – whether the catalogue has what it goes by; if not, it is left out;
   `init` – the model before anything was counted;
2. `count` – on the clients: what each adds to the sums, over the history that it is shown;
3. `learn` – on the server: the sums as a model;
4. `score` – on the devices: a few scores of every item, from the own history;
   `parts` – the same scores as numpy alone can work them out, for bundles.

What `count` returns must be a plain sum over interactions of a history, in no order but its own:
`fedmix` shows an expert histories with and without their last items, and sends the difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregate import ClientRows
from hushrec.clients import TrainView
from hushrec.errors import ConfigError
from hushrec.methods.base import MethodConfig, Shared
from hushrec.registry import find, names
from hushrec.settings import Width

Array = NDArray[Any]


class ExpertsConfig(MethodConfig):
    """Options of our experts; other people's may read them too."""

    window: Annotated[int, Field(ge=1)] = 30
    """What follows: how many steps later an item still counts."""
    power: Annotated[float, Field(gt=0, le=1)] = 0.5
    """What follows: sums are taken to this power before the regression."""
    gram: Annotated[float, Field(ge=0, le=1)] = 0.4
    """What follows: how much of the sums is correlation of past items."""
    ridge: Annotated[float, Field(gt=0)] = 100.0
    """What follows: added to the diagonal of the system, in counts."""
    latest: Annotated[int, Field(ge=2)] = 140
    """Company: how many of its last items a device makes pairs of."""
    company_ridge: Annotated[float, Field(gt=0)] = 300.0
    """Company: added to the diagonal of the system, in users."""
    factors: Width = 64
    """Company: numbers of an item's vector."""
    neighbours: Annotated[int, Field(ge=1)] = 1000
    """Weights kept per item and table, the largest in size."""
    dense_items: Annotated[int, Field(ge=2)] = 4000
    """Items up to which systems are solved in full; beyond, these many most popular ones."""


@dataclass(frozen=True)
class Part:
    """Some of an expert's scores, as `serve.recommender` works them out; it has the kinds."""

    kind: str
    options: Mapping[str, Any]
    arrays: Mapping[str, Array]


class Expert(ABC):
    """One voice of the mixture."""

    name: ClassVar[str]
    counted: ClassVar[Literal["once", "head", "head and rest"]] = "once"
    """What becomes of its sums where counting takes several rounds. They may be all counted in the
    first one; or keys are pairs of items, i·m + j, with counts under (i, i), of which `learn` gets
    those within the head of the catalogue and `extend` may get the others later."""
    start: ClassVar[dict[str, float]] = {}
    """What scores weigh before weights are fitted, and which items are looked at then."""

    def __init__(self, config: ExpertsConfig) -> None:
        self.config = config

    def hears(self, view: TrainView) -> bool:
        """Say whether it has anything to go by.

        Only what is public may decide: the catalogue and the features of its items.
        """
        return True

    @abstractmethod
    def init(self, view: TrainView) -> Shared:
        """Return the model before anything was counted; public facts alone give its shapes."""

    @abstractmethod
    def scores(self, model: Shared) -> tuple[str, ...]:
        """Name the scores that it gives an item."""

    @abstractmethod
    def count(self, view: TrainView) -> ClientRows:
        """Return what each client adds to the sums; keys are below the square of the catalogue."""

    @abstractmethod
    def learn(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Turn the sums, ascending keys and a row for each, into a model of the same shapes."""

    def extend(self, model: Shared, keys: NDArray[np.int64], sums: NDArray[np.float64]) -> Shared:
        """Take further pairs into a model, of some first items, and those items' counts."""
        return model

    @abstractmethod
    def score(self, model: Shared, view: TrainView, out: NDArray[np.float32]) -> None:
        """Fill ``out[client, score, item]``, which is all zeros, from the clients' histories."""

    def parts(self, model: Shared) -> tuple[Part, ...] | None:
        """Say all scores in their order as parts that a bundle can hold; None if it cannot."""
        return None


def expert_names() -> list[str]:
    """Return the names of all installed experts."""
    return names("experts")


@cache
def expert_class(name: str) -> type[Expert]:
    """Find an expert by name; once, as reading entry points takes longer than scoring a client."""
    loaded = find("experts", name)
    if not (isinstance(loaded, type) and issubclass(loaded, Expert)):
        raise ConfigError(f"expert '{name}' ({loaded!r}) is not a hushrec Expert")
    return loaded
