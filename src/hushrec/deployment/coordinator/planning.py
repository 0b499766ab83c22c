"""How long a round may take and how much it sends: policy, deadlines, and the forecast of a run.

A forecast follows from public facts alone: the contract, the catalogue, and how many nodes and
users there are. It counts messages, not the time that nodes and coordinator compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from hushrec.aggregation import UploadShape
from hushrec.config import Settings
from hushrec.federation.client import Download, Task
from hushrec.federation.contract import Contract
from hushrec.federation.setup import set_up_public
from hushrec.federation.sums import EvaluationVector, RoundVector, largest_sum, round_shape
from hushrec.io.codec import HEADER_BYTES
from hushrec.methods.base import is_marked
from hushrec.secagg import Stage, VectorLayout
from hushrec.streams import new_key

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class Policy(Settings):
    """Deadlines, repeated requests and exclusion of nodes."""

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
    backoff_seconds: Seconds = 2.0
    """Wait before a request is sent again that failed; it doubles with each failure, up to
    `resend_seconds`. A request is sent again until its deadline."""
    resend_seconds: Seconds = 60.0
    """A request to a connected node is sent again when there was no reply for so many seconds; it
    doubles with each time. A node answers a repeated request with the bytes of its first reply."""
    max_invalid_replies: Annotated[int, Field(ge=1)] = 3
    """A node is excluded after so many invalid replies."""
    largest_norm: Seconds = 1e6
    """Largest L2 norm of one client's upload, where no clipping bounds it."""
    max_users_per_node: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1_000_000
    """A node that claims more users is refused, and the others go on: memory of the coordinator
    and messages grow with the users."""
    keep_models: Annotated[int, Field(ge=1)] = 3
    """Finished runs whose model and log are kept; a new run drops those of older ones, of which
    configuration, metrics, summary and model card stay."""
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


BASE_BYTES = 250 * 10**6
"""Memory of a node or coordinator before the first message: interpreter, libraries, kernels."""
COPIES = 3
"""Copies of a message that a process holds at a time: as sent, as received, and decoded."""
USER_BYTES = 24
"""Bytes of a request for every user of the node: its number, its client's, and whether it trains.
"""
EVALUATION, SET_UP = "evaluation", "set-up of secure sums"
SETUP_STAGES = 2
"""Stages that are not repeated for every secure sum."""


@dataclass(frozen=True)
class LinkRates:
    """What a forecast assumes of machines and connections."""

    exchange_seconds: float = 1.0
    """Assumed for a request and its reply with nothing in them: Flower polls for messages."""
    megabytes_per_second: float = 20.0
    """Assumed for the coordinator's connection, which its nodes share."""


@dataclass(frozen=True)
class PhaseForecast:
    """Messages of one phase, or of all evaluations."""

    phase: str
    rounds: int
    exchanges: int
    down_bytes: int
    """To one node in a round; tables of bytes travel deflated, and take less."""
    up_bytes: int
    """From one node in a round: at most in the clear, exactly with secure sums."""
    seconds: float
    """Of all rounds, for the messages alone."""


@dataclass(frozen=True)
class Forecast:
    """Messages, memory and time of a run, from public facts."""

    nodes: int
    users: int
    secure: bool
    phases: tuple[PhaseForecast, ...]
    down_bytes: int
    """To all nodes in all rounds."""
    up_bytes: int
    seconds: float
    node_memory_bytes: int
    """At most, for the messages; a node's users and private parameters come on top."""
    coordinator_memory_bytes: int


def forecast(
    contract: Contract, nodes: int, users: int, rates: LinkRates, task: Task | None = None
) -> Forecast:
    """Return the forecast of a run with so many nodes and users, equally many on each node.

    ``task`` is that of the run, where it was set up already.
    """
    experiment, secure = contract.experiment, contract.secure is not None
    if task is None:
        task = set_up_public(experiment, contract.public, new_key(), "forecast", users).task
    own, agreed = -(-users // nodes), contract.secure
    left, first, found = experiment.rounds, 1, []

    def phase_of(name: str, rounds: int, down: int, up: int, exchanges: int = 1) -> PhaseForecast:
        sent = rounds * nodes * (down + up) / (rates.megabytes_per_second * 1e6)
        seconds = rounds * exchanges * rates.exchange_seconds + sent
        return PhaseForecast(name, rounds, rounds * exchanges, down, up, seconds)

    for phase in task.method.phases:
        rounds = left if phase.repeats else min(left, phase.rounds)
        if rounds > 0:
            down, shape = _round(task, first, own)
            sent = largest_sum(shape), 1
            if agreed is not None:
                sent = _vector(RoundVector(shape, users, agreed.most_bytes).layout)
            found.append(phase_of(phase.name, rounds, down, *sent))
        left, first = left - rounds, first + rounds
    if experiment.split.hold_out:
        every, marked = range(1, experiment.rounds + 1), task.method
        due = set(experiment.evaluation.evaluation_rounds(experiment.rounds))
        due |= {n for n in every if is_marked(marked, n) or is_marked(marked, n + 1)}
        serving = sum(array.nbytes for array in task.method.serving(task.initial).values())
        reported = experiment.evaluation.reported(experiment.split.next_basket)
        sent = _vector(EvaluationVector(reported).layout) if secure else (HEADER_BYTES, 1)
        found.append(phase_of(EVALUATION, len(due) + 2, serving + USER_BYTES * own, *sent))
    if agreed is not None:
        setups = -(-sum(each.rounds for each in found) // agreed.setup_sums)
        found.append(phase_of(SET_UP, setups, HEADER_BYTES, HEADER_BYTES, SETUP_STAGES))
    shared = sum(array.nbytes for array in task.initial.values())
    largest = max((each.down_bytes + each.up_bytes for each in found), default=0)
    most_up = max((each.up_bytes for each in found), default=0)
    return Forecast(
        nodes=nodes,
        users=users,
        secure=secure,
        phases=tuple(found),
        down_bytes=nodes * sum(each.rounds * each.down_bytes for each in found),
        up_bytes=nodes * sum(each.rounds * each.up_bytes for each in found),
        seconds=sum(each.seconds for each in found),
        node_memory_bytes=BASE_BYTES + COPIES * largest,
        coordinator_memory_bytes=BASE_BYTES + COPIES * (shared + most_up),
    )


def _vector(layout: VectorLayout) -> tuple[int, int]:
    """Return the bytes of a node's masked vector, and the exchanges of its sum."""
    return layout.nbytes, layout.pieces + len(Stage) - SETUP_STAGES - 1  # a vector is a stage


def _round(task: Task, number: int, own: int) -> tuple[int, UploadShape]:
    """Return the bytes of a request to a node with so many clients, and the shape of its sum."""
    everybody = task.download(number, task.initial, np.arange(own))
    common = sum(array.nbytes for array in everybody.common.values())
    each = sum(array.nbytes for array in everybody.own.values())
    empty: Download = everybody.to(np.zeros(0, np.int64))
    shape = round_shape(task, task.protection_of(empty), empty)
    return common + each + USER_BYTES * own, shape
