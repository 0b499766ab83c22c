"""Event log of a coordinator, the status of a run that is read from it, and Prometheus metrics.

The log has one JSON object per line, and nothing of any user. Metrics of the newest run are served
on the loopback address.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hushrec.errors import RunError
from hushrec.io.files import append_line
from hushrec.runs.folder import RunFolder

EVENTS = "events.jsonl"
Event = Mapping[str, Any]
RunStage = Literal["training", "interrupted", "finished"]
_COUNTERS = {
    "answered": "answered",
    "no answer": "lost",
    "sat out": "sat_out",
    "declined": "declined",
    "refused": "refused",
}
"""The field of a `NodeStatus` that counts an event."""


class EventLog:
    """A file of events that grows line by line."""

    def __init__(self, path: Path, echo: Callable[[Event], None] = lambda event: None) -> None:
        """``echo`` is called with every event as well."""
        self.path = path
        self.echo = echo

    def tell(self, event: str, **facts: Any) -> None:
        """Write a line with the time, the event and its facts."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line: Event = {"time": now, "event": event, **facts}
        append_line(self.path, json.dumps(line))
        self.echo(line)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events; a last line that a crash cut short is left out."""
    events = []
    for text in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            events.append(json.loads(text))
        except ValueError:
            continue
    return events


@dataclass
class NodeStatus:
    """Counts of one node's events."""

    users: int = 0
    answered: int = 0
    """Requests with a valid reply."""
    lost: int = 0
    """Requests without a reply; a retry may have had one."""
    sat_out: int = 0
    """Rounds and evaluations that the node was left out of."""
    declined: int = 0
    refused: int = 0
    """Invalid replies."""
    excluded: bool = False
    """Whether the node is sent no more requests."""
    last_seen: str | None = None


@dataclass
class Status:
    """Status of a run."""

    run: str
    stage: RunStage
    rounds: int
    round: int = 0
    seconds: float = 0.0
    epsilon: float | None = None
    """Spent so far; None without a privacy guarantee."""
    up_bytes: int = 0
    """Bytes of the messages from nodes."""
    down_bytes: int = 0
    """Bytes of the messages to nodes."""
    lost_rounds: int = 0
    """Rounds whose secure sum could not be opened."""
    strangers: int = 0
    """Invited nodes that were refused."""
    nodes: dict[str, NodeStatus] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def status_of(folder: RunFolder) -> Status:
    """Read the status of a run."""
    stage: RunStage = "training" if folder.is_locked() else "interrupted"
    status = Status(folder.path.name, stage, folder.experiment().rounds)
    for event in read_events(folder.path / EVENTS):
        what, name = event.get("event"), event.get("node")
        if what == "finished":
            status.stage = "finished"
        elif what == "round":
            status.round, status.seconds = event["round"], event["seconds"]
            status.epsilon = event["epsilon"]
        elif name is None:
            status.strangers += what == "refused"
            status.lost_rounds += what == "lost"
        else:
            _count(status, status.nodes.setdefault(name, NodeStatus()), event)
    return status


def _count(status: Status, node: NodeStatus, event: Event) -> None:
    what = event["event"]
    if what in _COUNTERS:
        setattr(node, _COUNTERS[what], getattr(node, _COUNTERS[what]) + 1)
    if what == "enrolled":
        node.users = event["users"]
    elif what == "answered":
        status.up_bytes += event["up_bytes"]
        status.down_bytes += event["down_bytes"]
    elif what == "excluded":
        node.excluded = True
    if what in ("enrolled", "answered", "declined", "refused"):
        node.last_seen = event["time"]


PREFIX = "hushrec_federation"


class StatusCollector(Collector):
    """Reads the status of the newest run whenever Prometheus asks."""

    def __init__(self, newest: Callable[[], Status | None]) -> None:
        """``newest`` returns the status of the newest run; None before the first one."""
        self.newest = newest

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest run."""
        status = self.newest()
        if status is None:
            return
        gauges: dict[str, tuple[str, float | None]] = {
            "round": ("Rounds done", status.round),
            "rounds": ("Rounds of the run", status.rounds),
            "training": ("Whether the run is training", status.stage == "training"),
            "epsilon_spent": ("Epsilon spent so far", status.epsilon),
            "lost_rounds": ("Rounds whose secure sum could not be opened", status.lost_rounds),
        }
        for name, (about, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"{PREFIX}_{name}", about, value)
        sent = CounterMetricFamily(
            f"{PREFIX}_message_bytes", "Bytes of messages", labels=["direction"]
        )
        sent.add_metric(["up"], status.up_bytes)
        sent.add_metric(["down"], status.down_bytes)
        yield sent
        for name in ("answered", "lost", "sat_out", "declined", "refused"):
            about = f"Requests or rounds of a node: {name.replace('_', ' ')}"
            counter = CounterMetricFamily(f"{PREFIX}_node_{name}", about, labels=["node"])
            for node, of in status.nodes.items():
                counter.add_metric([node], getattr(of, name))
            yield counter
        excluded = GaugeMetricFamily(
            f"{PREFIX}_node_excluded", "Whether a node is excluded", labels=["node"]
        )
        for node, of in status.nodes.items():
            excluded.add_metric([node], of.excluded)
        yield excluded


@contextmanager
def metrics_served(port: int | None, newest: Callable[[], Status | None]) -> Iterator[None]:
    """Serve the metrics to this machine until the context is left; without a port, do nothing."""
    if port is None:
        yield
        return
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(newest))
    try:
        server, thread = start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
        raise RunError(
            f"cannot serve metrics at 127.0.0.1:{port}: {error.strerror}; choose another "
            "metrics_port in config.toml"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
