"""What FedMix costs for many silos and for many phones: a calculation, nothing is trained.

python -m benchmarks.scale                      # the tables of docs/scale.md
python -m benchmarks.scale --items 100000       # for another catalogue

Uploads have the layouts of real secure sums, for the shapes that the method declares for a
catalogue without any interactions; downloads are the bytes of the arrays, which travel deflated.
The rest are formulas over them. Rates of machines are assumptions, and options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import click
import numpy as np

from hushrec.aggregation import Total, UploadShape
from hushrec.data.interactions import Categorical
from hushrec.data.views import Ragged, TrainView
from hushrec.evaluation.evaluator import EvaluationConfig
from hushrec.federation.client import Task
from hushrec.federation.contract import SecureSums
from hushrec.federation.experiment import read_preset
from hushrec.federation.sums import EvaluationVector, RoundVector
from hushrec.methods.statistics.experts import HEAD
from hushrec.methods.statistics.fedmix import FedMix, FedMixConfig
from hushrec.privacy.protection import Protection
from hushrec.secagg import Stage
from hushrec.secagg.keys import SHARE_BYTES, SIGNATURE_BYTES
from hushrec.secagg.messages import Announcement, sealed_bytes
from hushrec.streams import SecretStreams, Streams

ITEMS, CATEGORIES = 3_706, (81, 18)
"""The catalogue of ML-1M: films, years and genres."""
LIMIT = 4e6
"""Bytes that a phone uploads at most, over all rounds."""
SETUP_STAGES = (Stage.KEYS, Stage.SHARES)
"""Stages of a set-up, which many sums share; the others are of every sum."""
EVALUATION = "evaluation"
ANY_BYTES = 2**40
"""No vector is refused here: the report compares the longest with the contract's limit."""
MEGABYTE, GIGABYTE = 1e6, 1e9


def catalogue(items: int) -> TrainView:
    """Return a public view: items and their categories, and no client."""
    nothing = Ragged(np.zeros(1, np.int64), np.zeros(0, np.int32))
    times = Ragged(np.zeros(1, np.int64), np.zeros(0, np.int64))
    values = Ragged(np.zeros(1, np.int64), np.zeros(0, np.float32))
    features = {
        f"feature {n}": Categorical(
            np.arange(items, dtype=np.int32) % size, np.array([str(k) for k in range(size)])
        )
        for n, size in enumerate(CATEGORIES)
    }
    return TrainView(np.zeros(0, np.int32), items, nothing, times, values, item_features=features)


@dataclass(frozen=True)
class PhaseCost:
    """What each round of a phase, or each evaluation, costs every participant."""

    name: str
    rounds: int
    numbers: int
    """Of one upload, in dense form."""
    up: int
    """Bytes of the masked vector."""
    down: int
    """Bytes of the arrays of a download, before they are deflated."""
    pieces: int
    """Of the masked vector; each takes an exchange."""

    @property
    def exchanges(self) -> int:
        """Exchanges of one secure sum: the pieces, and the stages after them."""
        return self.pieces + len(Stage) - len(SETUP_STAGES) - 1


def phase_costs(method: FedMix, items: int, clients: int) -> list[PhaseCost]:
    """Return the costs of all phases, and of evaluations, from public facts alone."""
    costs: dict[str, PhaseCost] = {}
    for name, shape, down in _rounds(method, items):
        layout = RoundVector(shape, clients, ANY_BYTES).layout
        rounds = costs[name].rounds + 1 if name in costs else 1
        costs[name] = PhaseCost(name, rounds, shape.entries, layout.nbytes, down, layout.pieces)
    return [*costs.values(), _evaluations(method, items)]


def _evaluations(method: FedMix, items: int) -> PhaseCost:
    """Return the costs of evaluations: of some rounds, and two of the selected one at the end."""
    config = EvaluationConfig(every=method.traits.every)
    layout = EvaluationVector(config.reported(repeats=False)).layout
    served = method.serving(method.init(catalogue(items), Streams(0)))
    return PhaseCost(
        EVALUATION,
        len(config.evaluation_rounds(method.planned_rounds)) + 2,
        sum(math.prod(shape) for shape in layout.arrays.values()) + len(layout.wide),
        layout.nbytes,
        sum(array.nbytes for array in served.values()),
        layout.pieces,
    )


def _rounds(method: FedMix, items: int) -> Iterator[tuple[str, UploadShape, int]]:
    """Play all rounds with no clients; yield the phase, an upload's shape, a download's bytes."""
    view, streams = catalogue(items), Streams(0)
    task = Task(method, Protection(), streams, SecretStreams(0), view)
    shared = dict(method.init(view, streams))
    for number in range(1, method.planned_rounds + 1):
        phase, download = method.phase_of(number), task.download(number, shared)
        shape = task.upload_shape(download)
        yield phase.name, shape, sum(array.nbytes for array in download.received.values())
        # Sums over nobody: they change no shape but those that the optimisers choose.
        sums = {
            n: (np.zeros(1, np.int64), np.zeros(s)) for n, s in shape.spaces.items() if s[0] == 1
        }
        shared = dict(phase.apply(shared, Total(0, sums, {}), number))
        if HEAD in shared:
            shared[HEAD] = np.arange(items) < method.config.dense_items


@dataclass(frozen=True)
class Scenario:
    """A federation: its participants, and their machines."""

    title: str
    method: FedMix
    participants: int
    """Silos, or phones, that train."""
    clients: int
    """Users whose sums are added up."""
    group: int
    """Participants of one secure sum."""


def scenarios() -> list[Scenario]:
    """Return what docs/scale.md compares."""
    default = FedMix()
    halved = FedMix(FedMixConfig(hold_out="clients", fit_fraction=0.1))
    phones = FedMix(FedMixConfig(**read_preset("fedmix", "phones")["options"]))
    return [
        Scenario("1,000 silos of 1,000 users, the default", default, 1000, 10**6, 1000),
        Scenario("1,000 silos, hold_out=clients", halved, 1000, 10**6, 1000),
        Scenario("8,191 of 1,000,000 phones, the default", default, 8191, 8191, 100),
        Scenario("8,191 of 1,000,000 phones, preset phones", phones, 8191, 8191, 100),
    ]


def upload_bytes(scenario: Scenario, items: int) -> int:
    """Return what a participant uploads over all rounds, with the messages of the secure sums."""
    costs = phase_costs(scenario.method, items, scenario.clients)
    sums, in_setup = sum(cost.rounds for cost in costs), SecureSums().setup_sums
    setup = Announcement.size(in_setup) + scenario.group * sealed_bytes(in_setup)
    each = SIGNATURE_BYTES + scenario.group * SHARE_BYTES
    vectors = sum(cost.rounds * cost.up for cost in costs)
    return vectors + sums * each + _setups(costs) * setup


def _setups(costs: list[PhaseCost]) -> int:
    return math.ceil(sum(cost.rounds for cost in costs) / SecureSums().setup_sums)


def report(scenario: Scenario, items: int, rates: dict[str, float]) -> list[str]:
    """Return the lines of a scenario: its phases, and what they add up to."""
    costs = phase_costs(scenario.method, items, scenario.clients)
    lines = [f"### {scenario.title}", "", "| phase | rounds | numbers up | MB up | MB down |"]
    lines.append("|---|---|---|---|---|")
    for cost in costs:
        sizes = f"{cost.up / MEGABYTE:,.3f} | {cost.down / MEGABYTE:,.3f}"
        lines.append(f"| {cost.name} | {cost.rounds} | {cost.numbers:,} | {sizes} |")
    rounds = scenario.method.planned_rounds
    exchanges = sum(cost.rounds * cost.exchanges for cost in costs)
    exchanges += len(SETUP_STAGES) * _setups(costs)
    up = upload_bytes(scenario, items)
    down = sum(cost.rounds * cost.down for cost in costs)
    largest = max(cost.up for cost in costs)
    most = max(cost.numbers for cost in costs)
    head = min(items, scenario.method.config.dense_items)
    tables = sum(
        name not in ("popularity", "categories") for name in scenario.method.config.experts
    )
    both = 2 if scenario.method.config.hold_out == "items" else 1
    traffic = scenario.participants * up
    # As many bytes as the vectors that the server keeps until those of the group are there.
    masks, limit = scenario.group * largest, SecureSums().most_bytes
    # A Cholesky factor and as many right sides as items: 2⅓ n³ operations.
    solving = 7 / 3 * tables * both * head**3 / rates["solve"]
    rows = [
        ("all rounds", f"{rounds}, and evaluations: {exchanges:,} exchanges"),
        (
            "a participant, all rounds",
            f"{up / MEGABYTE:,.2f} MB up, {down / MEGABYTE:,.1f} MB down",
        ),
        (
            "server, all rounds",
            f"{traffic / GIGABYTE:,.1f} GB in, "
            f"{scenario.participants * down / GIGABYTE:,.0f} GB out",
        ),
        ("server, receiving it", f"{traffic / rates['network']:,.0f} s"),
        ("server, disk of the largest secure sum", f"{masks / GIGABYTE:,.1f} GB"),
        # Of every number that is not zero, its key and the sum.
        ("server, memory of a sum, at most", f"{16 * most / MEGABYTE:,.0f} MB"),
        ("server, solving the tables", f"{solving:,.1f} s, {32 * head**2 / MEGABYTE:,.0f} MB"),
        (
            f"groups of {scenario.group:,} participants",
            f"{math.ceil(scenario.participants / scenario.group):,}",
        ),
        (
            "masks, a participant",
            f"{masks / GIGABYTE:,.2f} GB, {masks / rates['keystream']:,.1f} s",
        ),
        (
            "masks, the server, a group of which a tenth is lost",
            f"{masks * (0.9 + 0.1 * scenario.group) / rates['keystream']:,.0f} s",
        ),
        (
            "longest vector",
            f"{largest:,} of {limit:,} bytes{': refused' if largest > limit else ''}; "
            f"pieces: {max(cost.pieces for cost in costs):,}",
        ),
        (f"limit of {LIMIT / MEGABYTE:.0f} MB up a phone", "met" if up <= LIMIT else "not met"),
    ]
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    return lines


@click.command()
@click.option("--items", default=ITEMS, show_default=True, help="Items of the catalogue.")
@click.option("--keystream", default=1e9, show_default=True, help="Bytes of masks a second.")
@click.option("--network", default=125e6, show_default=True, help="Bytes to the server a second.")
@click.option("--solve", default=2e10, show_default=True, help="Operations of a solver a second.")
def main(items: int, keystream: float, network: float, solve: float) -> None:
    """Print the costs of every scenario as Markdown."""
    rates = {"keystream": keystream, "network": network, "solve": solve}
    for scenario in scenarios():
        click.echo("\n".join(report(scenario, items, rates)))


if __name__ == "__main__":
    main()
