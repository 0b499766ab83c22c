"""How long a round may take: the policy of a server, and the deadline that follows from it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hushrec.config import Settings

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class Policy(Settings):
    """Deadlines, retries and exclusion of nodes."""

    nodes: Annotated[int, Field(ge=1)] = 2
    """A run begins when so many nodes have enrolled."""
    min_nodes: Annotated[int, Field(ge=1)] = 2
    """A round or an evaluation needs replies of so many nodes; with fewer the run stops, and
    continues with --resume."""
    enrol_seconds: Seconds = 300.0
    """How long to wait for nodes to enrol."""
    round_seconds: Seconds = 300.0
    """Shortest deadline of a round and of an evaluation, or of each stage of a secure sum; a node
    without a reply by the deadline is left out. `allowed_seconds` says how it grows."""
    phase_seconds: dict[str, Seconds] = Field(default_factory=dict)
    """Shortest deadlines of the rounds of a phase, by the phase's name, in place of
    `round_seconds`."""
    first_round_factor: Factor = 3.0
    """The shortest deadline is so many times longer in the first round of a phase, in which nodes
    compile kernels; a continued run begins with such a round."""
    slowest_factor: Factor = 5.0
    """A deadline is at least so many times the longest that a node took in the phase so far."""
    bytes_per_second: Seconds = 2e6
    """Slowest connection of a node: a deadline allows for the messages of a round beside it."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Requests to a node that does not reply, after the first, within the deadline."""
    backoff_seconds: Seconds = 2.0
    """Wait before the first retry; it doubles with each retry."""
    max_invalid_replies: Annotated[int, Field(ge=1)] = 3
    """A node is excluded after so many invalid replies."""
    largest_norm: Seconds = 1e6
    """Largest L2 norm of one client's upload, where no clipping bounds it."""
    rebind: bool = False
    """Whether a name may return under another transport identity, as nodes without keys do. Leave
    it off with authentication: a name then belongs to the key that enrolled it."""


def allowed_seconds(policy: Policy, phase: str, size: int, slowest: float | None) -> float:
    """Return the deadline of a request to all nodes in a round of a phase.

    ``size`` is the largest number of bytes that a node may receive and send. ``slowest`` is the
    longest that a node took for such a request in the phase's earlier rounds; None in the first.
    """
    shortest = policy.phase_seconds.get(phase, policy.round_seconds)
    messages = size / policy.bytes_per_second
    if slowest is None:
        return shortest * policy.first_round_factor + messages
    return max(shortest + messages, policy.slowest_factor * slowest)
