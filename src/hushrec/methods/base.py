"""What a method is: pure functions over explicit state, grouped into phases.

A method owns no loop, no data set, no file and no random generator. Shared parameters travel to
the clients and back; private ones stay in the client's store. `fit` trains a whole batch of
clients; a device is a batch of one client.

The rounds of a method belong to phases. Most methods have one, "train", made of their own
`download`, `fit` and `apply`; a method whose rounds differ declares its `phases`. The loop, the
audit and a deployment ask `Method.phase_of` what a round does.

Methods are found by name through the entry point group ``hushrec.methods``, ours and other
people's alike, and checked by `hushrec.testing.MethodContract`. Optional capabilities (`Tunable`,
`Guided`, …) are base classes that a method inherits beside `Method`; callers check for them with
``isinstance``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from hushrec.aggregation import Total, Update, UploadShape
from hushrec.config import Settings, find, names
from hushrec.data.views import TrainView, chunks
from hushrec.errors import ConfigError
from hushrec.methods.forms import DeviceForm
from hushrec.private import Private, PrivateFields, PrivateStore
from hushrec.streams import Round, Streams

Array = NDArray[Any]
Scores = NDArray[np.float32]
Shared = Mapping[str, Array]


class MethodConfig(Settings):
    """Base of every method's options."""

    model_config = ConfigDict(allow_inf_nan=False)


@dataclass(frozen=True)
class Fitted:
    """Result of training a batch of clients."""

    update: Update
    private: Private
    losses: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Mean training loss of each client; empty where a method has none."""


@dataclass(frozen=True)
class Phase:
    """One kind of round of a method."""

    name: str
    """For displays, logs and the audit: "count", "fit weights"."""
    rounds: int
    """Planned number of rounds."""
    uploads: str
    """What a client uploads, in a few words."""
    fit: Callable[[Shared, Private, TrainView, Round], Fitted]
    """Train a batch of clients from what they received and keep."""
    apply: Callable[[Shared, Total, int], Shared]
    """Return the shared parameters after a round, from its sum and its number in the run."""
    download: Callable[[Shared], Shared] = lambda shared: shared
    """Return what is sent to a client that takes part."""
    budget: float | None = None
    """Share of the privacy budget that its rounds spend in equal parts; None: all rounds of the
    method spend alike."""
    repeats: bool = False
    """Whether rounds beyond the planned ones go on with this phase, if it is the last."""
    personal: bool = True
    """Whether `fit` trains private parameters that clients score with: new clients are folded in by
    the last such phase."""


@dataclass(frozen=True)
class Traits:
    """Properties of a method that the loop needs to know."""

    rounds: int = 100
    """Default number of rounds of a method with one phase."""
    every: int = 1
    """Default number of rounds between evaluations on the validation items."""
    patience: int | None = None
    """Default number of rounds of the last phase without a better evaluation, and at least two
    evaluations, after which training stops; None: 75 evaluations, in any phase."""
    learns: bool = True
    """False for baselines that one round finishes (popularity, the negative counter)."""
    pooled: bool = False
    """True for centralised baselines: all clients come in one batch, and nothing is private."""
    silos: bool = False
    """True where a client may hold several users: `fit` and `score` then read the batch's
    ``client_indptr``, and uploads, losses and private parameters are one per client."""
    data_weighted: bool = False
    """True where `apply` weighs clients by their data other than through the sum of the uploads;
    such a method cannot be given a privacy guarantee."""
    exact_sums: bool = False
    """True where `apply` needs sums without noise, as over all pairs of items; every privacy mode
    that would add noise to them is refused."""
    reveals: frozenset[str] = frozenset()
    """Private fields that some rounds upload all the same, because the paper's method does."""
    training_only: frozenset[str] = frozenset()
    """Private fields that `adapt` and `score` do not read; a device that serves drops them."""
    repeats: bool = True
    """False where scores of items in the history mean nothing; such a method is refused where lists
    may hold them (``split.kind = next-basket``)."""
    reads_times: bool = False
    """True where scores depend on the times of interactions; data without times is refused."""
    from_features: bool = False
    """True where a client without a history is scored from its user features."""
    batch_interactions: int | None = None
    """Training interactions per batch for which `fit` is fastest; None: the backend's default."""
    unexplained: str = "its score is not a sum of contributions"
    """Why no reason is given for the items of a list, by a method that does not inherit
    `Explains`."""


class Method(ABC):
    """Base of every method; stateless but for its frozen configuration.

    A method declares ``Config``, its options, and beside it ``config: ItsConfig``, their type.
    """

    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    config: MethodConfig
    traits: ClassVar[Traits] = Traits()
    under_noise: ClassVar[type[Method] | None] = None
    """The class that replaces this one where noise is added to sums (privacy.mode = central); it
    has the same name, and options and rounds of its own."""
    upload_norm: ClassVar[float | None] = None
    """L2 norm that the method keeps its uploads to, if it does: the default bound of clipping."""

    def __init__(self, config: MethodConfig | None = None) -> None:
        self.config = config if config is not None else self.Config()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases in their order: one, "train", unless a method declares others."""
        rounds, uploads = self.traits.rounds, "an update of the shared parameters"

        def apply(shared: Shared, total: Total, number: int) -> Shared:
            return self.apply(shared, total)

        return (Phase("train", rounds, uploads, self.fit, apply, self.download, repeats=True),)

    @property
    def planned_rounds(self) -> int:
        """Default number of rounds."""
        return sum(phase.rounds for phase in self.phases)

    def phase_of(self, round_number: int) -> Phase:
        """Return the phase of a round, counted from 1.

        Rounds beyond the planned ones repeat the last phase, or do nothing.
        """
        phases = self.phases
        for phase in phases:
            if round_number <= phase.rounds:
                return phase
            round_number -= phase.rounds
        return phases[-1] if phases[-1].repeats else IDLE

    @property
    def budget_shares(self) -> tuple[float, ...]:
        """Share of the privacy budget of every planned round; empty where all spend alike."""
        return tuple(
            phase.budget / phase.rounds
            for phase in self.phases
            if phase.budget is not None
            for _ in range(phase.rounds)
        )

    @abstractmethod
    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Return the shared parameters before the first round."""

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Declare what stays on a client."""
        return {}

    def fit(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        """Train a batch of clients from what they received and what they keep."""
        raise NotImplementedError(f"{type(self).__name__} needs fit and apply, or phases")

    def apply(self, shared: Shared, total: Total) -> Shared:
        """Return the shared parameters after a round."""
        raise NotImplementedError(f"{type(self).__name__} needs fit and apply, or phases")

    def adapt(self, shared: Shared, private: Private, view: TrainView, streams: Streams) -> Private:
        """Return the parameters that devices score with, after training on their own past alone.

        By default the private parameters. A method that fine-tunes a copy of the shared parameters
        gives `score` that copy; nothing of it is kept or sent.
        """
        return private

    @abstractmethod
    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
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
    def unexplained(self) -> str | None:
        """Why no reason is given for the items of a list; None where `Explains` gives one."""
        return None if isinstance(self, Explains) else self.traits.unexplained

    @property
    def adapts(self) -> bool:
        """Whether a device trains a copy of the shared parameters before it scores."""
        return type(self).adapt is not Method.adapt


IDLE = Phase(
    "idle",
    0,
    "nothing",
    lambda shared, private, view, now: Fitted(Update(len(view.clients)), private),
    lambda shared, total, number: shared,
    lambda shared: {},
)
"""The phase of rounds beyond the planned ones: clients receive, do and upload nothing."""


PASSES = 20
"""Training rounds of a new user on their own device."""


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
        """The options to search, each with its range or values."""


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
    """Some rounds send guidance to clients."""

    @abstractmethod
    def marks(self, round_number: int) -> bool:
        """Say whether a round sends guidance, so that it is evaluated before and after."""

    @abstractmethod
    def gates(self, shared: Shared, private: Private) -> NDArray[np.float32]:
        """Return every client's gate of every item: [clients, items]."""


class ModelFacts(ABC):
    """The shared parameters have statistics worth showing."""

    @abstractmethod
    def facts(self, shared: Shared) -> Mapping[str, float]:
        """Return the statistics that a summary shows."""


class ItemPopularity(ABC):
    """The shared parameters say how popular each item is."""

    @abstractmethod
    def item_popularity(self, shared: Shared) -> Scores | None:
        """Return the popularity of every item; None where options leave it out."""


class ItemNeighbours(ABC):
    """The shared parameters have weights from items to items."""

    @abstractmethod
    def item_neighbours(self, shared: Shared, item: int) -> Scores | None:
        """Return the weight from an item to every item; None where options leave weights out."""


@dataclass(frozen=True)
class Reason:
    """Why an item is in a list: the largest contribution to its score."""

    words: str = ""
    """The reason in a few words, as "often after {}"; {} is the item of the history."""
    expert: str = ""
    """The expert that contributes most, of a method that mixes experts."""
    item: int = -1
    """The item of the history that contributes most; -1 where no single one does."""


class Explains(ABC):
    """Scores are sums of contributions."""

    @abstractmethod
    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Return the largest contribution to each item's score, client by client.

        ``private`` is what `Method.score` gets. ``items`` is [clients, items of a list]; -1 is no
        item.
        """


class Exports(ABC):
    """Devices compute the scores with numpy, from shared parameters and a history alone."""

    @abstractmethod
    def device_form(self, shared: Shared, view: TrainView) -> DeviceForm:
        """Return how a device scores; refuse options that devices cannot compute.

        ``view`` has the catalogue and the features of its items.
        """


class ExportsUser(ABC):
    """A user's device computes the user's scores with numpy, from the user's own parameters."""

    @abstractmethod
    def user_form(self, shared: Shared, private: Private, history: TrainView) -> DeviceForm:
        """Return how the device of one user scores.

        ``private`` is what `adapt` returned for the user's client, and ``history`` has this user
        alone. The result holds parameters of this user and of nobody else.
        """


def of_one(private: Private) -> dict[str, Array]:
    """Return the private arrays of a batch of one client, without the client axis."""
    return {n: np.asarray(v)[0] for n, v in private.items() if isinstance(v, np.ndarray)}


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


def is_marked(method: Method, round_number: int) -> bool:
    """Say whether a round sends guidance to clients."""
    return isinstance(method, Guided) and method.marks(round_number)


def facts_of(method: Method, shared: Shared) -> Mapping[str, float]:
    """Return the statistics that a method reports of its shared parameters."""
    return method.facts(shared) if isinstance(method, ModelFacts) else {}


def fold_in(
    method: Method, shared: Shared, history: TrainView, streams: Streams, passes: int = PASSES
) -> Private:
    """Return private parameters of new clients after some rounds on their own devices.

    Nothing is uploaded, so nothing needs protection, and no noise is drawn.
    """
    declared = method.private_fields(history, shared, streams)
    store = PrivateStore(declared, len(history))
    everybody = np.arange(len(history))
    phases = [phase for phase in method.phases if phase.personal]
    if declared and phases:
        # A pooled method would train new clients on each other's data; each is alone here.
        for clients in chunks(everybody, 1 if method.traits.pooled else max(1, len(history))):
            own = history.take(clients)
            per_client = method.download_own(shared, own.clients.astype(np.int64))
            received = {**phases[-1].download(shared), **per_client}
            for number in range(passes):
                fitted = phases[-1].fit(received, store.read(clients), own, Round(number, streams))
                store.write(clients, fitted.private)
    return store.read(everybody)


NETWORK = "its score is the output of a network, which is not a sum of contributions"
PRODUCT = (
    "its score is one product of a user vector and an item vector, both trained over many rounds, "
    "and no part of it belongs to one item of the history"
)
"""Values of `Traits.unexplained` that several methods have."""
POPULAR = Reason("popular")
SHARED_TABLE, OWN_TABLE = Reason("the shared item table"), Reason("your own item table")
"""Reasons of scores that are a product with a shared table plus one with an own table."""


def larger_table(items: NDArray[np.int32], by_shared: Scores, by_own: Scores) -> list[list[Reason]]:
    """Return which of two tables contributes more to each score: both are [clients, items]."""
    own = (by_own > by_shared).tolist()
    return [
        [(OWN_TABLE if is_own else SHARED_TABLE) if item >= 0 else Reason() for item, is_own in row]
        for row in (zip(listed, more, strict=True) for listed, more in zip(items, own, strict=True))
    ]


def check_explains(method: Method) -> None:
    """Refuse a method that cannot say why an item is in a list."""
    if method.unexplained is not None:
        raise ConfigError(
            f"{method.name} gives no reasons for its lists: {method.unexplained}; use fedmix, "
            "fednext or fedals"
        )


def no_own_table(name: str) -> ConfigError:
    """Say that there is but one table."""
    return ConfigError(f"{name} keeps no item table on the clients: there is only one")
