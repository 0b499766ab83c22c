"""What is agreed of secure sums, and who takes part in them.

The agreement says that sums are secure, and how many nodes they need: a node goes by its own copy.
Who the nodes are comes with each party's own folder, never from the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from hushrec.errors import ConfigError
from hushrec.privacy.config import PrivacyConfig
from hushrec.secure import Layout, Terms
from hushrec.secure.terms import colluders_of, threshold_of


class SecureSums(BaseModel):
    """That sums are secure, and what they need."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_nodes: Annotated[int, Field(ge=2)] = 3
    """Nodes refuse a sum over fewer."""
    threshold: Annotated[int, Field(ge=2)] | None = None
    """Nodes that must stay to the end of a sum.  [more than two thirds, and min_nodes]"""
    colluders: Annotated[int, Field(ge=0)] = 0
    """Nodes that may side with the server, and what is promised still holds for the others."""

    def threshold_of(self, nodes: int) -> int:
        """Return how many of so many nodes must stay."""
        return threshold_of(nodes, self.min_nodes, self.threshold)

    def check(self, nodes: int, privacy: PrivacyConfig) -> None:
        """Refuse what does not hold for so many nodes."""
        threshold = self.threshold_of(nodes)
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
class Registered:
    """Everybody who may take part in the secure sums of a federation."""

    federation: str
    identities: Mapping[str, bytes]
    """Public identity of every node, by its name."""

    def terms(self, agreed: SecureSums, number: int, layout: Layout, about: str) -> Terms:
        """Return the terms of one sum."""
        return Terms(
            self.federation,
            number,
            self.identities,
            layout,
            agreed.min_nodes,
            agreed.threshold,
            about,
        )
