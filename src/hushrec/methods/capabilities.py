"""What some methods can be asked besides: a method inherits these beside `Method`.

Whoever asks checks first, ``isinstance(method, Guided)``; a method without a capability knows
nothing of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import UploadShape
from hushrec.clients import TrainView
from hushrec.errors import ConfigError
from hushrec.methods.base import Method, Private, Shared


@dataclass(frozen=True)
class Between:
    """An option that `hushrec tune` draws between two numbers; logarithmically where ``log``."""

    low: float
    high: float
    log: bool = True


@dataclass(frozen=True)
class OneOf:
    """An option that `hushrec tune` chooses from a few values."""

    values: tuple[float | int | str | bool, ...]


SearchSpace = Mapping[str, Between | OneOf]


class Tunable(ABC):
    """Options are worth a search (`hushrec tune`)."""

    @property
    @abstractmethod
    def search(self) -> SearchSpace:
        """Name the options that are looked for, and where."""


class OwnTable(ABC):
    """Clients score with an item table of their own."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def own_table(self) -> tuple[str, ...]:
        """Name the private fields that are the table; none where options leave it out.

        `score` with another client's fields of these names scores with that client's table.
        """

    @abstractmethod
    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Return parameters that make `score` use the server's table in place of the own one."""


class ItemTables(ABC):
    """Items are vectors, and can be shown on a map."""

    @abstractmethod
    def item_tables(self, shared: Shared, private: Private) -> Mapping[str, NDArray[np.float32]]:
        """Return the tables [items, d] that the one client of ``private`` scores with, by name."""


class Guided(ABC):
    """From time to time, rounds do something special to clients."""

    @abstractmethod
    def marks(self, round_number: int) -> bool:
        """Say whether a round is one of those, so that it is looked at before and after."""

    @abstractmethod
    def gates(self, shared: Shared, private: Private) -> NDArray[np.float32]:
        """Return every client's gate of every item: [clients, items]."""


class Staged(ABC):
    """Rounds do different things, by a plan: more of them than planned add nothing."""

    @abstractmethod
    def stage(self, round_number: int) -> str:
        """Say in a few words what a round does."""


class Described(ABC):
    """The shared parameters are worth a few figures."""

    @abstractmethod
    def facts(self, shared: Shared) -> Mapping[str, float]:
        """Return what a summary should show."""


class Explains(ABC):
    """Scores come from several voices, which can be told apart."""

    @abstractmethod
    def voices(
        self, shared: Shared, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[str]]:
        """Name, for every client and each of its items [clients, places], who spoke for it most."""


class GuardsSteps(ABC):
    """What is uploaded is made of the gradients of steps, each of which can be clipped and noised.

    Where `Round.guard` is given, `fit` takes one step a round on what it uploads, and takes it with
    what the guard makes of the gradient.
    """

    name: ClassVar[str]

    @abstractmethod
    def gradient_shape(self, view: TrainView) -> UploadShape:
        """Return what a step's gradient looks like; refuse options under which there is no such."""

    @abstractmethod
    def unguarded(self) -> str | None:
        """Say what else of a client's data gets into what it uploads; None if nothing does."""


class SharesBudget(ABC):
    """Rounds spend different shares of the privacy budget."""

    upload_norm: ClassVar[float]
    """The L2 norm that no upload exceeds, by the method's own doing. Clipping, which is still done,
    is then flat and at this bound by default."""

    @abstractmethod
    def budget_shares(self) -> tuple[float, ...]:
        """Return the share of every round."""


def is_marked(method: Method, round_number: int) -> bool:
    """Say whether a round does something special to clients."""
    return isinstance(method, Guided) and method.marks(round_number)


def stage_of(method: Method, round_number: int) -> str:
    """Say what a round does, where that differs from round to round."""
    return method.stage(round_number) if isinstance(method, Staged) else ""


def facts_of(method: Method, shared: Shared) -> Mapping[str, float]:
    """Return what a method says of its shared parameters."""
    return method.facts(shared) if isinstance(method, Described) else {}


def no_own_table(name: str) -> ConfigError:
    """Say that there is but one table."""
    return ConfigError(f"{name} keeps no item table on the clients: there is only one")
