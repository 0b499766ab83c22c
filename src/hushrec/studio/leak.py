"""The leak, played live: a method that learns nothing, under the two protocols.

The negative counter counts how often each item was drawn as a negative, and ranks what was drawn
least often first. The published protocol draws from everything outside *all* of a user's items, the
held-out ones included: those are never drawn, and the counter finds them. The honest protocol draws
from everything outside the training items, and leaves it at chance.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from hushrec.api import Run, train
from hushrec.data.views import Protocol
from hushrec.errors import HushrecError
from hushrec.federation.rounds import RoundReport

ROUNDS = 20
NEGATIVES = 40
"""Drawn per training item and round. Published code draws 4, in 100 rounds: half as many in all."""
METHOD = "negative-counter"
METRIC, CANDIDATES = "hr@10", "sampled99"
PROTOCOLS: tuple[Protocol, ...] = ("honest", "published")


@dataclass(frozen=True)
class Played:
    """What one protocol has given so far."""

    points: tuple[tuple[int, float], ...] = ()
    """Validation HR@10 by round."""
    tested: float | None = None
    """HR@10 of the test items, when all rounds are done."""
    chance: float | None = None


@dataclass(frozen=True)
class Scene:
    """What there is to see of the demonstration now."""

    going_on: bool = False
    played: dict[Protocol, Played] = field(default_factory=dict)
    problem: str = ""


class Demonstration:
    """Plays the leak in a thread of its own, once at a time."""

    def __init__(self, working: threading.Lock) -> None:
        """``working`` is held while something is computed."""
        self._working = working
        self._changing = threading.Lock()
        self._scene = Scene()

    @property
    def scene(self) -> Scene:
        """What there is to see now."""
        return self._scene

    def start(self) -> None:
        """Begin anew, unless it is going on."""
        with self._changing:
            if self._scene.going_on:
                return
            self._scene = Scene(going_on=True)
        threading.Thread(target=self._play, name="leak", daemon=True).start()

    def _play(self) -> None:
        problem = ""
        try:
            for protocol in PROTOCOLS:
                with self._working:
                    run = play(protocol, lambda report, at=protocol: self._heard(at, report))
                self._show(protocol, tested=_rate(run.metrics), chance=_chance(run))
        except HushrecError as error:
            problem = str(error)
        finally:
            with self._changing:
                self._scene = replace(self._scene, going_on=False, problem=problem)

    def _heard(self, protocol: Protocol, report: RoundReport) -> None:
        before = self._scene.played.get(protocol, Played())
        if report.valid is not None:
            points = (*before.points, (report.round, _rate(report.valid)))
            self._show(protocol, points=points)

    def _show(self, protocol: Protocol, **new: Any) -> None:
        with self._changing:
            played = self._scene.played
            changed = replace(played.get(protocol, Played()), **new)
            self._scene = replace(self._scene, played={**played, protocol: changed})


def play(protocol: Protocol, on_round: Any) -> Run:
    """Count negatives of the embedded data under a protocol."""
    settings = {"negatives": NEGATIVES, "evaluation.every": 1, "evaluation.patience": 0}
    return train(
        *("demo", METHOD),
        protocol=protocol,
        rounds=ROUNDS,
        seed=0,
        settings=settings,
        on_round=on_round,
    )


def _rate(tables: Any) -> float:
    return float(tables[CANDIDATES][METRIC])


def _chance(run: Run) -> float:
    return _rate(run.summary["yardsticks"]["chance"])
