"""Accuracy against epsilon: measure points, and draw them.

    python experiments/privacy-utility/measure.py run --data ml-1m --method fednext
    python experiments/privacy-utility/measure.py draw

A point is one training run with ``settings.toml``'s options; it is added to ``results.json``, in
place of an older one of the same data, method, epsilon and seed. Any installed method will do.
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import click

import hushrec
from hushrec.cli import module_of
from hushrec.data import load
from hushrec.data.interactions import Interactions
from hushrec.data.synthetic import demo
from hushrec.federation.backends import Machine
from hushrec.runs.schema import Summary

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
drawings = module_of("experiments.drawings")  # this file is a script, outside the package


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure accuracy against epsilon, and draw it."""


@main.command()
@click.option("--data", required=True, help="A [data.…] of settings.toml: ml-1m or viewers.")
@click.option("--method", "methods", multiple=True, required=True)
@click.option("--epsilon", "epsilons", multiple=True, type=float, help="[those of settings.toml]")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0,))
@click.option("--threads", type=int, default=None)
def run(
    data: str,
    methods: tuple[str, ...],
    epsilons: tuple[float, ...],
    seeds: tuple[int, ...],
    threads: int | None,
) -> None:
    """Train a method at each epsilon; `inf` is without noise."""
    settings = read_settings()
    interactions = read_data(data, settings)
    for method in methods:
        for seed in seeds:
            for epsilon in epsilons or settings["epsilons"]:
                options = options_of(settings, data, method, epsilon, seed)
                rounds = options.pop("rounds", None)
                trained = hushrec.train(
                    interactions,
                    method,
                    rounds=rounds,
                    seed=seed,
                    settings=options,
                    machine=Machine(threads=threads),
                )
                add(point(data, method, epsilon, seed, trained.summary))


def read_settings() -> dict[str, Any]:
    """Read what is measured."""
    return tomllib.loads((HERE / "settings.toml").read_text("utf-8"))


def read_data(name: str, settings: dict[str, Any]) -> Interactions:
    """Load a data set by name, or make the viewers up."""
    if name not in settings["data"]:
        raise click.UsageError(f"--data {name}: settings.toml has {', '.join(settings['data'])}")
    viewers = settings["data"][name].get("viewers")
    return load(name) if viewers is None else demo(viewers=viewers)


def options_of(
    settings: dict[str, Any], data: str, method: str, epsilon: float, seed: int
) -> dict[str, Any]:
    """Return the settings of one run; its noise can be repeated, as this is an experiment."""
    own = settings.get("method", {}).get(method, {})
    options = {**settings["data"][data].get("settings", {}), **own.get("settings", {})}
    if math.isinf(epsilon):
        return options
    return {
        **options,
        **own.get("private", {}),
        "privacy.mode": "central",
        "privacy.epsilon": epsilon,
        "privacy.noise_seed": seed,
    }


def point(data: str, method: str, epsilon: float, seed: int, summary: Summary) -> dict[str, Any]:
    """Keep of a run what the drawing and a reader need."""
    return {
        "data": data,
        "method": method,
        "epsilon": "inf" if math.isinf(epsilon) else epsilon,
        "seed": seed,
        "guaranteed_epsilon": summary.privacy.epsilon,
        "delta": summary.privacy.delta if summary.privacy.promises else None,
        "rounds": summary.rounds,
        **{
            part: {name: round(table["full"][name], 5) for name in ("hr@10", "ndcg@10")}
            for part, table in (("valid", summary.valid), ("test", summary.test))
        },
    }


def add(new: dict[str, Any]) -> None:
    """Write a point into the results, sorted, in place of the one it repeats."""
    keys = ("data", "method", "epsilon", "seed")
    old = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    kept = [one for one in old if any(one[key] != new[key] for key in keys)]
    points = sorted(
        [*kept, new], key=lambda p: (p["data"], p["method"], float(p["epsilon"]), p["seed"])
    )
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, points)) + "\n]\n", "utf-8")
    click.echo(json.dumps(new))


@main.command()
@click.option("--metric", default="hr@10", show_default=True)
def draw(metric: str) -> None:
    """Draw from the results, test items, mean over seeds: against epsilon, and against people."""
    settings, points = read_settings(), json.loads(RESULTS.read_text("utf-8"))
    names = ["∞" if math.isinf(e) else f"{e:g}" for e in settings["epsilons"]]
    crowds = {a["viewers"]: d for d, a in sorted(settings["data"].items()) if "viewers" in a}
    lines = [
        drawings.Trend(
            f"ε = {name}",
            tuple(mean_of(points, crowds[n], "fednext", e, metric) for n in sorted(crowds)),
        )
        for name, e in zip(names, settings["epsilons"], strict=True)
        if e in (1.0, 8.0, math.inf)
    ]
    places = [f"{n:,}" for n in sorted(crowds)]
    save("people", lines, places, f"{metric.upper()} of FedNext by the number of viewers")
    for data, about in settings["data"].items():
        if "title" not in about:
            continue
        by_method: dict[str, list[float | None]] = {}
        for method in dict.fromkeys(p["method"] for p in points if p["data"] == data):
            by_method[method] = [
                mean_of(points, data, method, epsilon, metric) for epsilon in settings["epsilons"]
            ]
        if by_method:
            lines = [drawings.Trend(method, tuple(values)) for method, values in by_method.items()]
            save(data, lines, names, f"{metric.upper()} against ε · {about['title']}")


def save(name: str, lines: list[Any], places: list[str], title: str) -> None:
    """Write a picture."""
    drawn = drawings.trends(lines, places, title)
    file = drawings.standalone_trends(drawn, [line.name for line in lines], title)
    (HERE / f"{name}.svg").write_text(file, "utf-8")
    click.echo(HERE / f"{name}.svg")


def mean_of(
    points: list[dict[str, Any]], data: str, method: str, epsilon: float, metric: str
) -> float | None:
    """Return the mean over seeds; None where nothing was measured."""
    found = [
        p["test"][metric]
        for p in points
        if (p["data"], p["method"], float(p["epsilon"])) == (data, method, epsilon)
    ]
    return sum(found) / len(found) if found else None


if __name__ == "__main__":
    main()
