"""How a run of a federation stands, read from its event log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hushrec.deployment.coordinator.events import read_events
from hushrec.deployment.coordinator.run import EVENTS, is_finished
from hushrec.runs.folder import RunFolder

Stage = Literal["training", "interrupted", "finished"]


@dataclass
class NodeStatus:
    """What the log says of a node."""

    users: int = 0
    answered: int = 0
    """Requests that it answered and that counted."""
    lost: int = 0
    """Requests that no answer came to; it is asked again, and may answer then."""
    sat_out: int = 0
    """Rounds and looks that went on without it."""
    declined: int = 0
    refused: int = 0
    """Answers of it that could not be used."""
    excluded: bool = False
    """Whether it is asked no more."""
    last_seen: str | None = None


@dataclass
class Status:
    """What the log says of a run."""

    run: str
    stage: Stage
    rounds: int
    round: int = 0
    seconds: float = 0.0
    epsilon: float | None = None
    """Spent so far; None where nothing is promised."""
    up_bytes: int = 0
    """Of the messages that nodes sent."""
    down_bytes: int = 0
    """Of the messages that nodes were sent."""
    lost_rounds: int = 0
    """Rounds whose secure sum could not be opened."""
    strangers: int = 0
    """Invited nodes that were refused."""
    nodes: dict[str, NodeStatus] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def status_of(folder: RunFolder) -> Status:
    """Read how a run stands."""
    stage: Stage = "finished" if is_finished(folder) else "interrupted"
    if stage == "interrupted" and folder.is_locked():
        stage = "training"
    status = Status(folder.path.name, stage, folder.experiment().rounds)
    return _told(status, read_events(folder.path / EVENTS))


def _told(status: Status, events: Iterable[Mapping[str, Any]]) -> Status:
    for event in events:
        what, name = event.get("event"), event.get("node")
        if what == "round":
            status.round, status.seconds = event["round"], event["seconds"]
            status.epsilon = event["epsilon"]
        elif name is None:
            status.strangers += what == "refused"
            status.lost_rounds += what == "lost"
        else:
            _count(status, status.nodes.setdefault(name, NodeStatus()), event)
    return status


def _count(status: Status, node: NodeStatus, event: Mapping[str, Any]) -> None:
    what = event["event"]
    if what == "enrolled":
        node.users = event["users"]
    elif what == "answered":
        node.answered += 1
        status.up_bytes += event["up_bytes"]
        status.down_bytes += event["down_bytes"]
    elif what == "no answer":
        node.lost += 1
    elif what == "sat out":
        node.sat_out += 1
    elif what == "declined":
        node.declined += 1
    elif what == "refused":
        node.refused += 1
    elif what == "excluded":
        node.excluded = True
    if what in ("enrolled", "answered", "declined", "refused"):
        node.last_seen = event["time"]
