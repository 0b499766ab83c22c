"""What a method is: a few pure functions over explicit state.

A method owns no loop, no data set, no file and no random generator. Shared parameters travel to
the clients and back; private ones stay in the client's store. `fit` trains a whole stack of
clients at once; a device is a stack of one.

A method is found by name through the entry point group ``hushrec.methods``, ours and other
people's alike, and checked by `hushrec.testing.MethodContract`. What only some methods can be asked
is in `methods.capabilities`.

What some methods can be asked besides: a method inherits these beside `Method`.

Whoever asks checks first, ``isinstance(method, Guided)``; a method without a capability knows
nothing of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from hushrec.aggregation import Total, Update, UploadShape
from hushrec.config import Settings, find, names
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.private import PerClient as PerClient
from hushrec.private import PerClientRows as PerClientRows
from hushrec.private import PerClientTable as PerClientTable
from hushrec.private import Private as Private
from hushrec.private import PrivateFields as PrivateFields
from hushrec.streams import Round, Streams

Array = NDArray[Any]
Shared = Mapping[str, Array]


class MethodConfig(Settings):
    """Base of every method's options."""

    model_config = ConfigDict(allow_inf_nan=False)


@dataclass(frozen=True)
class Fitted:
    """What comes out of training a stack of clients."""

    update: Update
    private: Private
    losses: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Mean training loss of each client; empty where a method has none."""


@dataclass(frozen=True)
class Traits:
    """What the loop has to know of a kind of method."""

    rounds: int = 100
    """Number of rounds where nobody says another one."""
    every: int = 1
    """Rounds between two looks at the validation items where nobody says another number."""
    learns: bool = True
    """False for yardsticks that one round finishes (popularity, the negative counter)."""
    pooled: bool = False
    """True for centralised yardsticks: all clients come in one stack, and nothing is private."""
    silos: bool = False
    """True where a client may hold several users: `fit` and `score` then read the stack's
    ``client_indptr``, and uploads, losses and private parameters are one per client."""
    data_weighted: bool = False
    """True where `apply` weighs clients by their data other than through the sum of the uploads;
    such a method cannot be given a privacy guarantee."""
    exact_sums: bool = False
    """True where `apply` needs sums without noise, as over all pairs of items; every privacy mode
    that would add noise to them is refused."""
    reveals: frozenset[str] = frozenset()
    """Private fields that some rounds upload all the same, because the paper's method does."""
    stack_interactions: int | None = None
    """Training interactions per stack that suit `fit` best; None for what the backend takes."""


class Method(ABC):
    """Base of every method; stateless but for its frozen configuration.

    A method declares ``Config``, its options, and beside it ``config: ItsConfig``, their type.
    """

    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    config: MethodConfig
    traits: ClassVar[Traits] = Traits()
    under_noise: ClassVar[type[Method] | None] = None
    """The class that takes this one's place where noise is added to sums (privacy.mode =
    central); it has the same name, and options and rounds of its own."""

    def __init__(self, config: MethodConfig | None = None) -> None:
        self.config = config if config is not None else self.Config()

    @property
    def planned_rounds(self) -> int:
        """Number of rounds where nobody says another one."""
        return self.traits.rounds

    @abstractmethod
    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Return the shared parameters before the first round."""

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Declare what stays on a client."""
        return {}

    @abstractmethod
    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train a stack of clients from what they received and what they keep."""

    @abstractmethod
    def apply(self, shared: Shared, total: Total) -> Shared:
        """Return the shared parameters after a round."""

    def adapt(self, shared: Shared, private: Private, view: TrainView, streams: Streams) -> Private:
        """Return what the devices score with, after training on their own past alone.

        By default what they keep. A method that fine-tunes a copy of the shared parameters gives
        `score` that copy; nothing of it is kept or sent.
        """
        return private

    @abstractmethod
    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Score every item for every client, higher is better: [clients, items]."""

    def download(self, shared: Shared) -> Shared:
        """Return what is sent to a client that takes part in a round."""
        return shared

    def download_own(self, shared: Shared, clients: NDArray[np.int64]) -> Shared:
        """Return what is sent to each of these clients besides: arrays with a client axis first."""
        return {}

    def serving(self, shared: Shared) -> Shared:
        """Return what a device needs to score and adapt: no more than all of ``shared``.

        `score` and `adapt` give the same bits with it.
        """
        return shared

    @property
    def adapts(self) -> bool:
        """Whether a device trains a copy of the shared parameters before it scores."""
        return type(self).adapt is not Method.adapt


def method_names() -> list[str]:
    """Return the names of all installed methods."""
    return names("methods")


def method_class(name: str) -> type[Method]:
    """Find a method by name."""
    loaded = find("methods", name)
    if not (isinstance(loaded, type) and issubclass(loaded, Method)):
        raise ConfigError(f"method '{name}' ({loaded!r}) is not a hushrec Method")
    return loaded


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


class NoisesGradients(ABC):
    """A method whose uploads are made of gradients that can be clipped and noised one by one.

    If `Round.gradient_noise` is given, `fit` takes one step a round on what it uploads, with the
    gradient that `gradient_noise` returns.
    """

    name: ClassVar[str]

    @abstractmethod
    def gradient_shape(self, view: TrainView) -> UploadShape:
        """Return the shape of a step's gradient; refuse options under which there is none."""

    @abstractmethod
    def uncovered(self) -> str | None:
        """Return why noised gradients do not cover the whole upload; None if they do."""


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
