"""`Agreement`: what every node and the server have in common before they first speak.

It is made once, in one file, and given to everybody. A node trains by its own copy and by no
other: the server cannot ask it for another method, another protection or another catalogue.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from hushrec.clients import TrainView
from hushrec.config import Experiment
from hushrec.disk import write_bytes
from hushrec.errors import ConfigError, MessageError
from hushrec.federation.catalogue import Catalogue
from hushrec.federation.secure import SecureSums
from hushrec.frame import pack, unpack


@dataclass(frozen=True, eq=False)
class Agreement:
    """The experiment, the public catalogue, and whether anybody sees a node's own sum."""

    experiment: Experiment
    catalogue: Catalogue
    secure: SecureSums | None = None
    """What secure sums need; None where nodes send their sums in the clear."""

    def __post_init__(self) -> None:
        check_can_be_federated(self.experiment)
        check_secure(self.experiment, self.secure)

    def check_nodes(self, count: int) -> None:
        """Refuse a number of nodes for which what is agreed does not hold."""
        if self.secure is not None:
            self.secure.check(count, self.experiment.privacy)

    @property
    def silos(self) -> bool:
        """Whether a client is a silo of several users."""
        return self.experiment.silos.kind != "none"

    @cached_property
    def nobody(self) -> TrainView:
        """What training sees of no client."""
        return self.catalogue.nobody(self.experiment.protocol, silos=self.silos)

    @cached_property
    def settings_digest(self) -> str:
        """Identify the experiment, and what is agreed of sums."""
        text = self.experiment.to_toml() + json.dumps(self._facts())
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        """Write all of it."""
        catalogue = np.frombuffer(self.catalogue.to_bytes(), np.uint8)
        experiment = np.frombuffer(self.experiment.to_toml().encode(), np.uint8)
        return pack("agreement", self._facts(), {"experiment": experiment, "catalogue": catalogue})

    def _facts(self) -> dict[str, Any]:
        return {"secure": None if self.secure is None else self.secure.model_dump()}

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the agreement") -> Agreement:
        """Read it back."""
        facts, arrays = unpack("agreement", data)
        if arrays.keys() != {"experiment", "catalogue"}:
            raise MessageError(f"{source} is damaged: it holds other arrays than it should")
        try:
            text = arrays["experiment"].tobytes().decode()
        except UnicodeDecodeError:
            raise MessageError(f"{source} is damaged: its experiment is no text") from None
        try:
            # What is not said would be a sum in the clear, so it has to be said.
            said = facts["secure"]
            secure = None if said is None else SecureSums.model_validate(said)
        except (KeyError, ValidationError):
            raise MessageError(f"{source} is damaged: it does not say how sums are made") from None
        experiment = Experiment.from_toml(text, source)
        return cls(experiment, Catalogue.from_bytes(arrays["catalogue"].tobytes()), secure)

    @classmethod
    def read(cls, path: Path) -> Agreement:
        """Read a file that `write` wrote."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the agreement {path}: {error.strerror}") from None
        try:
            return cls.from_bytes(data, str(path))
        except MessageError as error:
            raise ConfigError(f"{path} is no agreement of a federation: {error}") from None

    def write(self, path: Path) -> None:
        """Write the file that is given to everybody."""
        write_bytes(path, self.to_bytes())


def check_secure(experiment: Experiment, secure: SecureSums | None) -> None:
    """Refuse a promise that sums in the clear, or sums of whom the server likes, would break."""
    privacy = experiment.privacy
    if secure is None:
        if privacy.mode == "distributed":
            raise ConfigError(
                "a node's share of the noise does not hide its own sum, only all shares together "
                "hide everybody's: distributed noise needs secure sums, or use privacy.mode = "
                "central"
            )
        return
    if experiment.cohort.kind != "all":
        raise ConfigError(
            "a server that draws cohorts could draw one node's clients and nobody else, whose sum "
            "is that node's: secure sums need cohort.kind = all"
        )
    if privacy.nodes is not None:
        secure.check(privacy.nodes, privacy)


def check_can_be_federated(experiment: Experiment) -> None:
    """Refuse what nodes that see their own users alone cannot work out together."""
    method, split = experiment.make_method(), experiment.split
    if method.traits.pooled:
        raise ConfigError(f"{method.name} pools all data: a federation needs a federated method")
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
        raise ConfigError(
            "evaluation.users draws among everybody: nodes look at all of their users, so use 0"
        )
