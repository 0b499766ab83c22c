"""The contract of a federation: experiment, public catalogue, and conditions of secure sums.

A contract is made once, as one file that every party receives. A node trains by its own copy: the
coordinator cannot make it use another method, another protection, another catalogue or sums in the
clear. The identities of the nodes come from each party's own folder, never from the coordinator.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hushrec.data import features
from hushrec.data.interactions import Categorical, Features, Interactions, StrArray
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import ConfigError, MessageError, cut
from hushrec.federation.experiment import Experiment
from hushrec.io.codec import Arrays, GroupSpec, Message, printable
from hushrec.io.files import write_bytes
from hushrec.methods.relations import Relates
from hushrec.privacy.config import PrivacyConfig
from hushrec.secagg import SetupTerms, SumTerms, VectorLayout
from hushrec.secagg.messages import MOST_SUMS, colluders_of, threshold_of

NO_ROWS = np.zeros(0, np.int64)
SECURE = '{"secure": '
"""Beginning of the conditions of secure sums in the terms of a contract."""
LONGEST_VALUE = 30
"""Characters of a setting in a sentence about contracts that differ."""


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The public data of a federation: items, and the vocabulary of features."""

    items: StrArray
    titles: StrArray | None = None
    item_features: Features = field(default_factory=dict)
    user_features: Features = field(default_factory=dict)
    """Categories and ranges of users' features, without users."""
    context: Features = field(default_factory=dict)
    """The same of the features of interactions."""

    @classmethod
    def of(cls, data: Interactions) -> Catalogue:
        """Return the catalogue of interactions, without their rows."""
        return cls(
            data.items,
            data.titles,
            data.item_features,
            {name: column.take(NO_ROWS) for name, column in data.user_features.items()},
            {name: column.take(NO_ROWS) for name, column in data.context.items()},
        )

    @property
    def digest(self) -> str:
        """Digest of the whole catalogue."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        """Encode it; equal catalogues are equal bytes."""
        texts = {"items": self.items, "titles": self.titles}
        arrays = {name: features.text_to_array(t) for name, t in texts.items() if t is not None}
        owners = {"item": self.item_features, "user": self.user_features, "row": self.context}
        return _CatalogueMessage(arrays | features.features_to_arrays(owners)).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Catalogue:
        """Decode it."""
        arrays = _CatalogueMessage.from_bytes(data).arrays
        try:
            owners = features.features_from_arrays(("item", "user", "row"), arrays)
            titles = features.array_to_strings(arrays["titles"]) if "titles" in arrays else None
            items = features.array_to_strings(arrays["items"])
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(f"the catalogue is damaged: {type(error).__name__}") from None
        if len(items) < 2 or len(np.unique(items)) != len(items):
            raise MessageError("the catalogue needs two items or more, each once")
        return cls(items, titles, owners["item"], owners["user"], owners["row"])


@dataclass(frozen=True, eq=False)
class _CatalogueMessage(Message, kind="catalogue"):
    arrays: Annotated[Arrays, GroupSpec(finite=False)]
    """Items, titles and columns of features, in which NaN is an unknown value."""


class SecureSums(BaseModel):
    """Conditions of secure sums."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_nodes: Annotated[int, Field(ge=2)] = 3
    """Nodes refuse a sum over fewer."""
    threshold: Annotated[int, Field(ge=2)] | None = None
    """Nodes that must stay to the end of a sum.  [more than two thirds, and min_nodes]"""
    colluders: Annotated[int, Field(ge=0)] = 0
    """Nodes that may collude with the server without weakening the guarantee of the others."""
    setup_sums: Annotated[int, Field(ge=1, le=MOST_SUMS)] = 32
    """Sums that one set-up announces keys for; its messages grow with it."""
    most_bytes: Annotated[int, Field(ge=2**10, le=2**40)] = 2**30
    """Longest vector that a node sends for one sum."""

    def check(self, nodes: int, privacy: PrivacyConfig) -> None:
        """Refuse conditions that do not fit a number of nodes and the noise."""
        threshold = threshold_of(nodes, self.min_nodes, self.threshold)
        if not max(self.min_nodes, nodes // 2 + 1) <= threshold <= nodes:
            raise ConfigError(
                f"secure sums of {nodes} nodes cannot need {threshold} of them: it must be more "
                f"than half, at least min_nodes = {self.min_nodes}, and no more than there are"
            )
        most = colluders_of(nodes, threshold)
        if self.colluders > most:
            raise ConfigError(
                f"{self.colluders} of {nodes} nodes on the server's side could open single vectors "
                f"at a threshold of {threshold}: claim at most {most}, or raise the threshold"
            )
        if privacy.mode != "distributed":
            return
        if privacy.nodes != nodes:
            raise ConfigError(
                f"privacy.nodes = {privacy.nodes}, and {nodes} nodes are registered: each adds its "
                "share of the noise, so both must be the same"
            )
        least = nodes - threshold + self.colluders
        if privacy.most_tolerated < least:
            raise ConfigError(
                f"the noise tolerates {privacy.most_tolerated} of {nodes} nodes, but a sum may "
                f"lack {nodes - threshold} of them, and {self.colluders} may tell their noise: use "
                f"privacy.tolerated = {least}, or a higher threshold"
            )


@dataclass(frozen=True)
class NodeRegistry:
    """The nodes that may take part in the secure sums of a federation."""

    federation: str
    identities: Mapping[str, bytes]
    """Public identity of every node, by its name."""

    def setup_terms(self, agreed: SecureSums, first: int) -> SetupTerms:
        """Return the terms of the set-up of some sums."""
        more = agreed.setup_sums, agreed.min_nodes, agreed.threshold
        return SetupTerms(self.federation, first, self.identities, *more)

    def terms(
        self, agreed: SecureSums, first: int, number: int, layout: VectorLayout, about: str
    ) -> SumTerms:
        """Return the terms of one sum; ``first`` is the first one of its set-up."""
        more = agreed.setup_sums, agreed.min_nodes, agreed.threshold
        own = (self.federation, first, self.identities, *more)
        return SumTerms(*own, number=number, layout=layout, about=about)


@dataclass(frozen=True, eq=False)
class Contract:
    """The experiment, the public catalogue, and the conditions of secure sums."""

    experiment: Experiment
    catalogue: Catalogue
    secure: SecureSums | None = None
    """Conditions of secure sums; None where nodes send their sums in the clear."""

    def __post_init__(self) -> None:
        _check_can_be_federated(self.experiment)
        _check_secure(self.experiment, self.secure)

    def check_nodes(self, count: int) -> None:
        """Refuse a number of nodes that the contract does not fit."""
        if self.secure is not None:
            self.secure.check(count, self.experiment.privacy)

    @property
    def silos(self) -> bool:
        """Whether a client is a silo of several users."""
        return self.experiment.silos.kind != "none"

    @cached_property
    def public(self) -> TrainView:
        """The public view: the catalogue and its features, and no clients."""
        catalogue = self.catalogue
        split = self.experiment.split.resolved(in_order=True, has_baskets=False)
        usual = {name: c for name, c in catalogue.context.items() if isinstance(c, Categorical)}
        return TrainView(
            users=NO_ROWS.astype(np.int32),
            n_items=len(catalogue.items),
            positives=Ragged.empty(0),
            times=Ragged.empty(0, np.int64),
            values=Ragged.empty(0, np.float32),
            never_negative=Ragged.empty(0) if self.experiment.protocol == "published" else None,
            user_features={**catalogue.user_features, **usual},
            item_features=catalogue.item_features,
            holders=NO_ROWS.astype(np.int32) if self.silos else None,
            repeats=split.next_basket,
            merged=split.repeats == "merge",
        )

    @cached_property
    def terms(self) -> str:
        """The experiment and the conditions of secure sums, as text."""
        secure = None if self.secure is None else self.secure.model_dump()
        return self.experiment.to_toml() + json.dumps({"secure": secure})

    @cached_property
    def settings_digest(self) -> str:
        """Identify the experiment and the conditions of secure sums."""
        return hashlib.blake2b(self.terms.encode(), digest_size=16).hexdigest()

    def differences(self, terms: str) -> list[str]:
        """Return the settings that differ in another party's terms, each with both values."""
        try:
            ours, theirs = _settings(self.terms), _settings(terms)
        except (ValueError, RecursionError):
            return []
        return [
            f"{name} ({_value(ours.get(name))} here, {_value(theirs.get(name))} there)"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]

    def to_bytes(self) -> bytes:
        """Encode the contract."""
        experiment, catalogue = self.experiment.to_toml().encode(), self.catalogue.to_bytes()
        return _ContractMessage(self.secure, experiment, catalogue).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the contract") -> Contract:
        """Decode it."""
        sent = _ContractMessage.from_bytes(data)
        try:
            text = sent.experiment.decode()
        except UnicodeDecodeError:
            raise MessageError(f"{source} is damaged: its experiment is no text") from None
        catalogue = Catalogue.from_bytes(sent.catalogue)
        return cls(Experiment.from_toml(text, source), catalogue, sent.secure)

    @classmethod
    def read(cls, path: Path) -> Contract:
        """Read a file that `write` wrote."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the contract {path}: {error.strerror}") from None
        try:
            return cls.from_bytes(data, str(path))
        except MessageError as error:
            raise ConfigError(f"{path} is no contract of a federation: {error}") from None

    def write(self, path: Path) -> None:
        """Write the file that every party receives."""
        write_bytes(path, self.to_bytes())


def _settings(terms: str) -> dict[str, Any]:
    """Read `Contract.terms` as one dictionary with dotted names; ValueError if it is none."""
    begin = terms.rindex(SECURE)
    return _flat({**tomllib.loads(terms[:begin]), **json.loads(terms[begin:])})


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        whole = f"{before}{name}"
        found |= _flat(value, f"{whole}.") if isinstance(value, dict) else {whole: value}
    return found


def _value(value: object) -> str:
    return "not set" if value is None else cut(printable(str(value)), LONGEST_VALUE)


@dataclass(frozen=True, eq=False)
class _ContractMessage(Message, kind="contract"):
    secure: SecureSums | None
    experiment: bytes
    """TOML."""
    catalogue: bytes


def _check_secure(experiment: Experiment, secure: SecureSums | None) -> None:
    """Refuse experiments whose guarantee needs other conditions of sums."""
    privacy = experiment.privacy
    if secure is None and privacy.mode == "distributed":
        raise ConfigError(
            "a node's share of the noise does not hide its own sum, only all shares together "
            "hide everybody's: distributed noise needs secure sums, or use privacy.mode = central"
        )
    if secure is None:
        return
    if experiment.cohort.kind != "all":
        raise ConfigError(
            "a server that draws cohorts could draw the clients of one node only, whose sum "
            "is that node's: secure sums need cohort.kind = all"
        )
    if privacy.nodes is not None:
        secure.check(privacy.nodes, privacy)


def _check_can_be_federated(experiment: Experiment) -> None:
    """Refuse experiments that need data of several nodes in one place."""
    method, split = experiment.make_method(), experiment.split
    if method.traits.pooled:
        raise ConfigError(f"{method.name} pools all data: a federation needs a federated method")
    if isinstance(method, Relates):
        raise ConfigError(
            f"{method.name} relates clients by their single uploads, and a node sends the sum over "
            "its clients: use another method, or a simulation (hushrec train)"
        )
    if split.kind == "time" and None in (split.valid_from, split.test_from):
        raise ConfigError(
            "a node cannot know which date is a share of everybody's rows: give split.valid_from "
            "and split.test_from, or another split.kind"
        )
    if split.kind == "unseen-users" and experiment.privacy.budgets == "activity":
        raise ConfigError(
            "a node cannot know who is unseen before it says how active its users are: use another "
            "split.kind than unseen-users, or privacy.budgets = declared"
        )
    if experiment.privacy.undeclared:
        raise ConfigError(
            "everybody is given the list of items before anybody trains, so it must not come from "
            "people's rows: leave out privacy.undeclared, and give the list with --items FILE"
        )
    if experiment.evaluation.users:
        raise ConfigError("nodes evaluate all of their users: leave out evaluation.users, or use 0")
