"""What a method is: five pure functions over explicit state.

A method owns no loop, no data set, no file and no random generator. Shared parameters travel to
the clients and back; private ones stay in the client's store. `fit` trains a whole stack of
clients at once; a device is a stack of one.

A method is found by name through the entry point group ``hushrec.methods``, ours and other
people's alike, and checked by `hushrec.testing.MethodContract`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from hushrec.aggregate import ClientRows, Total, Update
from hushrec.clients import TrainView
from hushrec.errors import ConfigError, nearest
from hushrec.rng import Round, Streams

Array = NDArray[Any]
Shared = Mapping[str, Array]
Private = Mapping[str, "Array | ClientRows"]


class MethodConfig(BaseModel):
    """Base of every method's options: frozen, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class PerClient:
    """A private array of fixed shape; a client that was never trained holds ``initial``."""

    initial: Array


@dataclass(frozen=True)
class PerClientTable(PerClient):
    """A private table [rows, width]: `fit` may give back only the rows it changed, a ClientRows.

    It is read whole, but not copied where that can be avoided, and must not be written to.
    """


@dataclass(frozen=True)
class PerClientRows:
    """Private table rows, at most ``capacity[client]`` of them; none before the first training."""

    capacity: NDArray[np.int64]
    width: int


PrivateFields = Mapping[str, PerClient | PerClientRows]


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


@dataclass(frozen=True)
class Fitted:
    """What comes out of training a stack of clients."""

    update: Update
    private: Private
    losses: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Mean training loss of each client; empty where a method has none."""


class Method(ABC):
    """Base of every method; stateless but for its frozen configuration."""

    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    default_rounds: ClassVar[int] = 100
    learns: ClassVar[bool] = True
    """False for yardsticks that one round finishes (popularity, the negative counter)."""
    pooled: ClassVar[bool] = False
    """True for centralised yardsticks: all clients come in one stack, and nothing is private."""
    reveals: ClassVar[frozenset[str]] = frozenset()
    """Private fields that some rounds upload all the same, because the paper's method does."""
    adapts: ClassVar[bool] = False
    """True where a device trains a copy of the shared parameters before it scores; see `adapt`."""
    data_weighted: ClassVar[bool] = False
    """True where `apply` weighs clients by their data other than through the sum of the uploads;
    such a method cannot be given a privacy guarantee."""
    stack_interactions: ClassVar[int | None] = None
    """Training interactions per stack that suit `fit` best; None for what the backend takes."""
    under_noise: ClassVar[type[Method] | None] = None
    """The class that takes this one's place where noise is added to sums (privacy.mode =
    central); it has the same name, and options and rounds of its own."""
    upload_norm: ClassVar[float | None] = None
    """Where the method itself keeps the L2 norm of every upload below a bound: that bound.
    Clipping, which is still done, is then flat and at this bound by default."""

    silos: ClassVar[bool] = False
    """True where a client may hold several users: `fit` and `score` then read the stack's
    ``client_indptr``, and uploads, losses and private parameters are one per client."""

    def __init__(self, config: MethodConfig | None = None) -> None:
        self.config: Any = config if config is not None else self.Config()

    @property
    def planned_rounds(self) -> int:
        """Number of rounds where nobody says another one."""
        return self.default_rounds

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

    def budget_shares(self) -> tuple[float, ...]:
        """Return the share of the privacy budget that each round spends; none: all alike."""
        return ()

    def download(self, shared: Shared) -> Shared:
        """Return what is sent to a client that takes part in a round."""
        return shared

    def download_own(self, shared: Shared, clients: NDArray[np.int64]) -> Shared:
        """Return what is sent to each of these clients besides, with a leading axis of clients."""
        return {}

    def serving(self, shared: Shared) -> Shared:
        """Return what a device needs to score and adapt."""
        return shared

    # ------------------------------------------------------------ for analyses, all optional

    @property
    def search(self) -> SearchSpace:
        """Name the options that `hushrec tune` looks for, and where; none by default."""
        return {}

    @property
    def own_table(self) -> tuple[str, ...]:
        """Name the private fields that are a client's own item table; none by default.

        `score` with another client's fields of these names scores with that client's table.
        """
        return ()

    def with_global_table(self, shared: Shared, private: Private) -> tuple[Shared, Private]:
        """Return parameters that make `score` use the server's table in place of the own one."""
        raise ConfigError(f"{self.name} keeps no item table on the clients: there is only one")

    def marks(self, round_number: int) -> bool:
        """Say whether a round does something special, so that it is looked at before and after."""
        return False

    def gates(self, shared: Shared, private: Private) -> NDArray[np.float32] | None:
        """Return every client's gate of every item, [clients, items]; None without gates."""
        return None

    def facts(self, shared: Shared) -> Mapping[str, float]:
        """Return figures about the shared parameters that a summary should show."""
        return {}


def method_names() -> list[str]:
    """Return the names of all installed methods."""
    return sorted(point.name for point in entry_points(group="hushrec.methods"))


def method_class(name: str) -> type[Method]:
    """Find a method by name."""
    for point in entry_points(group="hushrec.methods"):
        if point.name == name:
            loaded = point.load()
            if not (isinstance(loaded, type) and issubclass(loaded, Method)):
                raise ConfigError(f"method '{name}' ({point.value}) is not a hushrec Method")
            return loaded
    raise ConfigError(f"unknown method '{name}'{nearest(name, method_names())}")
