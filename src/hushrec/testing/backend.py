"""`BackendContract`: what every backend must do; `MemoryLink`: nodes in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from hushrec.aggregation import Evaluation
from hushrec.data.splitting import make_split
from hushrec.errors import ConfigError, HushrecError
from hushrec.federation.backends import THIS_MACHINE, Backend, Machine, OneByOne
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.requests import Failure, NodeId
from hushrec.federation.rounds import History, RoundRecord, ServerState, Training, run_rounds
from hushrec.federation.setup import SimulationSetup, set_up
from hushrec.methods.base import method_class, method_names
from hushrec.streams import Streams
from hushrec.testing.checks import check_same, taste_world


class MemoryLink:
    """Nodes in this process, functions that answer a message when it is sent.

    Waiting takes no time: its clock is set forward.
    """

    def __init__(self, nodes: Mapping[NodeId, Callable[[bytes], bytes]]) -> None:
        self.nodes = dict(nodes)
        self.waited = 0.0
        self.replies: dict[str, bytes | Failure] = {}
        """By ticket, until they are received."""

    def present(self) -> dict[NodeId, str]:
        """Return all nodes, each with one connection for ever."""
        return dict.fromkeys(self.nodes, "memory")

    def send(self, node: NodeId, request: bytes, seconds: float) -> str | None:
        """Let a node answer; a node that raises has failed."""
        answer = self.nodes.get(node)
        if answer is None:
            return None
        ticket = f"{node}/{self.waited}/{len(self.replies)}"
        try:
            self.replies[ticket] = answer(request)
        except (HushrecError, OSError, RuntimeError) as error:
            self.replies[ticket] = Failure(type(error).__name__)
        return ticket

    def receive(self, tickets: Sequence[str]) -> Iterator[tuple[str, bytes | Failure]]:
        """Yield what was answered."""
        for ticket in tickets:
            if ticket in self.replies:
                yield ticket, self.replies.pop(ticket)

    def wait(self, seconds: float) -> None:
        """Set the clock forward."""
        self.waited += seconds

    def now(self) -> float:
        """Return the time of this machine, and what was waited."""
        return time.monotonic() + self.waited


SEEDED = {"privacy.noise_seed": 0}
CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 8.0, **SEEDED}
ADAPTIVE = {**CENTRAL, "cohort.kind": "poisson", "cohort.probability": 0.5}
LOCAL = {"privacy.mode": "local-gaussian", "privacy.clip": 1.0, **SEEDED}
GAUSSIAN = {**LOCAL, "privacy.epsilon": 8.0}
LAPLACE = {**GAUSSIAN, "privacy.mode": "local-laplace"}
PERSONAL = {"privacy.epsilon_min": 1.0, "privacy.epsilon_max": 8.0}
BUDGETS = {**LOCAL, **PERSONAL, "privacy.budgets": "activity"}
SILOS = {"silos.kind": "dirichlet", "silos.count": 7}
SMALLER: Mapping[str, Mapping[str, Any]] = {
    **{name: {"d": 8, "hidden": [8], "epochs": 1} for name in ("lipm", "pfedme")},
    **{name: {"d": 4, "hidden": [4]} for name in ("privrec", "nn-self", "fofl-self")},
    "fedncf": {"d": 4, "hidden": [4]},
    "cofedrec": {"d": 4, "clusters": 4},
    "gpfedrec": {"d": 4, "hidden": [4], "item_rate": 2.0},
    **{name: {"d": 4} for name in ("feddae", "fedpergnn")},
    "metamf": {"d": 4, "memory": 4, "hidden": 4, "rank": 2},
    "fedrkg": {"interval": 1, "d": 4},
}
"""Options that keep the contract quick, and let guidance happen within its rounds."""
PRIVACY = {"plain": {}, "central": CENTRAL, "gaussian": GAUSSIAN}
FORMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fedmf adaptive, Poisson": ("fedmf", ADAPTIVE),
    "fedmf validation queries": ("fedmf", {**CENTRAL, "privacy.selection_share": 0.3}),
    "fedmf laplace": ("fedmf", LAPLACE),
    "fedmf budgets": ("fedmf", {**BUDGETS, "privacy.budget_uploads": 2}),
    "fedmf dual, fixed": ("fedmf", {"dual": True, "cohort.kind": "fixed", "cohort.size": 20}),
    "fedrecon dual": ("fedrecon", {"dual": True}),
    "pfedrec mlp": ("pfedrec", {"score_function": "mlp", "d": 4}),
    "fedncf dual": ("fedncf", {"dual": True, **SMALLER["fedncf"]}),
    "feddae without personal parts": ("feddae", {"d": 4, "personal": False, "epochs": 2}),
    "fedrkg with silent rounds": ("fedrkg", {**SMALLER["fedrkg"], **CENTRAL, "interval": 2}),
    "fedrkg fedncf": ("fedrkg", {**SMALLER["fedrkg"], "backbone": "fedncf", "hidden": [4]}),
    "lipm silos": ("lipm", {**SMALLER["lipm"], **SILOS}),
    "lipm DPPS": ("lipm", {**SMALLER["lipm"], **SILOS, **BUDGETS, "guidance": 0.5}),
    "pfedme silos": ("pfedme", {**SMALLER["pfedme"], **SILOS}),
    "privrec unseen users": ("privrec", {**SMALLER["privrec"], "split.kind": "unseen-users"}),
    "pfedrec unseen users": ("pfedrec", {"split.kind": "unseen-users"}),
    "negative-counter published": ("negative-counter", {"protocol": "published"}),
}


class BackendContract:
    """What every backend must do: inherit, name yours in `machine`, run pytest."""

    machine: ClassVar[Machine] = THIS_MACHINE
    """The machine that trains; it names the entry point of the backend."""
    rounds: ClassVar[int] = 3

    def make(self, setup: SimulationSetup) -> Backend:
        """Return the backend for the clients of a setup."""
        return setup.start(self.machine)[0].backend

    @pytest.mark.parametrize("mode", PRIVACY)
    @pytest.mark.parametrize("method", method_names())
    def test_every_method(self, method: str, mode: str) -> None:
        """Every federated method, with and without privacy."""
        if method_class(method).traits.pooled:
            pytest.skip("a pooled baseline has no clients")
        try:
            self.compare(method, {**SMALLER.get(method, {}), **PRIVACY[mode]})
        except ConfigError as refused:
            pytest.skip(f"refused: {refused}")

    @pytest.mark.parametrize("form", FORMS)
    def test_every_form(self, form: str) -> None:
        """Noise forms, guidance, budgets, silos, cohorts, own tables, protocols."""
        self.compare(*FORMS[form])

    def compare(self, method: str, settings: Mapping[str, Any]) -> None:
        """Play a run on the backend and on the reference, and hold them equal."""
        setup = self._setup(method, settings)
        state, records, test = play(setup, self.make(setup))
        devices = OneByOne(setup.task, setup.split, setup.experiment, setup.plan.deviations)
        expected, expected_records, expected_test = play(setup, devices)
        reference = "against the reference backend's"
        check_same(state.shared, expected.shared, f"shared parameters {reference}")
        check_same(state.selected_shared, expected.selected_shared, f"selected ones {reference}")
        for name in ("account", "protection", "selected_round", "up_bytes", "down_bytes"):
            own, reference = getattr(state, name), getattr(expected, name)
            assert own == reference, f"{name} is {own}, and {reference} on the reference backend"
        for one, other in zip(records, expected_records, strict=True):
            assert (one.loss, one.valid) == (other.loss, other.valid), (
                f"loss or validation of round {one.round} differ from the reference backend's"
            )
        assert test.means() == expected_test.means(), (
            "the test metrics differ from the reference backend's"
        )
        for name, tally in test.tallies.items():
            ranks = expected_test.tallies[name].rank_counts
            assert np.array_equal(tally.rank_counts, ranks), (
                "the histogram of test ranks differs from the reference backend's"
            )

    def _setup(self, method: str, settings: Mapping[str, Any]) -> SimulationSetup:
        # One cut-off: most of the reference's time is metrics, device by device.
        rest = {"evaluation.k": [10], **settings}
        request = ExperimentRequest("tastes", method, protocol=rest.pop("protocol", None))
        experiment = replace(request, settings=rest).experiment()
        # The number of rounds that share a budget is fixed.
        if not experiment.make_method().budget_shares:
            experiment = experiment.model_copy(update={"rounds": self.rounds})
        split = make_split(taste_world(), experiment.split, Streams(0), experiment.silos)
        return set_up(experiment, split)


def play(
    setup: SimulationSetup, backend: Backend
) -> tuple[ServerState, list[RoundRecord], Evaluation]:
    """Run all rounds on a backend; return the state, the records and the test evaluation."""
    history = History()
    parts = setup.experiment, setup.task, setup.plan, setup.clients
    training = Training(*parts, backend, setup.split.newcomers)
    state = setup.first_state(len(setup.view.clients), setup.shared)
    run_rounds(training, state, [history])
    serving = training.serving(state.selected_shared)
    return state, history.records, backend.evaluate(serving, "test", selected=True)
