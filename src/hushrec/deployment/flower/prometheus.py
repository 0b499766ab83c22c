"""Prometheus metrics of a coordinator's newest run, served on the loopback address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hushrec.deployment.coordinator.status import Status
from hushrec.errors import RunError

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
