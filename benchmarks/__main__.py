"""Measure hushrec: ``python -m benchmarks``.

Every claim but that of loading is a ratio of two times taken in the same run, or a peak of memory.
A missed bar is shown, not hidden, and is no error: the exit code tells whether measuring worked.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from numba import njit
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hushrec.api import train
from hushrec.data import load
from hushrec.data.reading import read_interactions
from hushrec.data.splitting import make_split
from hushrec.data.synthetic import population
from hushrec.data.views import CohortConfig, Ragged, TrainView
from hushrec.errors import DataError
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import ExperimentRequest
from hushrec.io import peak_rss_bytes, usable_cores
from hushrec.kernels.draws import draw
from hushrec.methods.pfedrec import PFedRec
from hushrec.privacy.discrete import law
from hushrec.private import PrivateStore, StoreConfig
from hushrec.streams import Round, SecretStreams, Streams
from hushrec.testing import Federation
from hushrec.training.samples import draw_negatives

Json = dict[str, Any]
LATEST = Path(__file__).parent / "latest.json"
GIGABYTE = 10**9
SAME_RANGE = 0.25
"""Losses of the two loops may differ by this share: other negatives, another shuffle."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the quick sizes try the machinery and prove nothing."""

    speed_rounds: int = 15
    plain_rounds: int = 2
    devices: int | None = None
    """Devices of the speed benchmark; all of them by default."""
    base_users: int = 4_000
    growth_items: int = 2_000
    growth_rounds: int = 9
    population_users: int = 1_000_000
    few_users: int = 10_000
    population_items: int = 100_000
    cohort: int = 2_000
    population_rounds: int = 25
    draws: int = 5_000_000
    rows: int = 1_000_000
    served: int = 1_000
    """Users of a batch of recommendations."""
    served_alone: int = 60
    """Users in turn after each batch."""


FULL = Sizes()
QUICK = Sizes(
    speed_rounds=3,
    plain_rounds=2,
    devices=12,
    base_users=60,
    growth_items=300,
    growth_rounds=3,
    population_users=5_000,
    few_users=1_000,
    population_items=2_000,
    cohort=100,
    population_rounds=3,
    draws=20_000,
    rows=5_000,
    served=40,
    served_alone=5,
)
MEAN_LENGTH = 20
FACTORS = (1, 2, 4, 8)
WARM_UP = 3
NOISE_TURNS = 4
LOADS = 3
SERVING: dict[str, Json] = {
    "fednext": {},
    "pfedrec": {"rounds": 2, "settings": {"evaluation.every": 2}},
    "fedmix": {"settings": {"newton_rounds": 2, "network_rounds": 2, "evaluation.every": 100}},
}
"""Methods whose lists are timed, trained as briefly as their models allow: item pairs, private
parameters, and a mixture with explanations."""
SERVING_TURNS = 5


def bar(what: str, value: float, limit: float, at_least: bool = False) -> Json:
    """Hold a number against its bar."""
    met = value >= limit if at_least else value <= limit
    sign = ">=" if at_least else "<="
    return {"what": what, "value": value, "bar": f"{sign} {limit:g}", "met": met}


def spread(seconds: list[float]) -> Json:
    """Describe repeated times; the median is what ratios are made of."""
    return {
        "median_s": statistics.median(seconds),
        "mean_s": statistics.mean(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "rounds": len(seconds),
    }


class Timed:
    """A federation whose rounds are timed, from the draw of the cohort on."""

    def __init__(
        self,
        method: PFedRec,
        view: TrainView,
        store: StoreConfig,
        folder: Path,
        threads: int | None,
    ) -> None:
        shared = method.init(view, Streams(0))
        fields = method.private_fields(view, shared, Streams(0))
        self.first = {name: getattr(spec, "initial", None) for name, spec in fields.items()}
        self.store = PrivateStore.create(fields, len(view), store, folder)
        self.federation = Federation(method, view, store=self.store, machine=Machine(threads))
        self.up_bytes = 0

    def round(self, cohort: CohortConfig, threads: int | None = None) -> tuple[float, float]:
        """Run one round; return its seconds and its mean loss."""
        federation = self.federation
        if threads:
            federation.backend.machine = Machine(threads)
        began = time.perf_counter()
        population = len(federation.backend.view)
        clients = cohort.draw(population, federation.task.streams, federation.number + 1)
        collected = federation.round(clients)
        seconds = time.perf_counter() - began
        self.up_bytes = collected.up_bytes
        return seconds, collected.loss.mean or 0.0


def pfedrec() -> PFedRec:
    """Return PFedRec with the options of the paper."""
    return PFedRec(
        PFedRec.Config(
            **ExperimentRequest("benchmark", "pfedrec", preset="paper").experiment().options
        )
    )


def synthetic_view(n_users: int, n_items: int) -> TrainView:
    """Return a population as training sees it, times and values as large as real ones."""
    indptr, items = population(n_users, n_items, MEAN_LENGTH)
    return TrainView(
        users=np.arange(n_users, dtype=np.int32),
        n_items=n_items,
        positives=Ragged(indptr, items),
        times=Ragged(indptr, np.arange(len(items))),
        values=Ragged(indptr, np.ones(len(items), np.float32)),
    )


ALL = CohortConfig(kind="all")
IN_MEMORY = StoreConfig(kind="memory")


# ---------------------------------------------------------------- (a) speed


def speed(sizes: Sizes, show: Progress) -> Json:
    """Time a round of PFedRec, here and in a plain per-device loop, on one thread."""
    if importlib.util.find_spec("torch") is None:
        return {"skipped": "the plain loop needs torch: pip install 'hushrec[neural]'", "bars": []}
    experiment = ExperimentRequest("ml-100k", "pfedrec", preset="paper").experiment()
    try:
        data = load("ml-100k")
    except DataError:
        data = load("demo")
    streams = Streams(0)
    view = make_split(data, experiment.split, streams).train
    if sizes.devices is not None:
        view = view.take(np.arange(sizes.devices))

    method = pfedrec()
    with TemporaryDirectory(prefix="hushrec-benchmark-") as folder:
        ours = Timed(method, view, IN_MEMORY, Path(folder), 1)
        table, first = ours.federation.shared["items"], ours.first
        task = show.add_task("speed: hushrec", total=sizes.speed_rounds + WARM_UP)
        rounds, processor = [], []
        for _ in range(sizes.speed_rounds + WARM_UP):
            began = time.process_time()
            rounds.append(ours.round(ALL))
            processor.append(time.process_time() - began)
            show.advance(task)
    sampling = [
        _sampling_seconds(view, method, number) for number in range(WARM_UP + sizes.speed_rounds)
    ][WARM_UP:]

    plain = _plain_rounds(view, method, table, first, sizes.plain_rounds, show)
    hushrec = spread([seconds for seconds, _ in rounds[WARM_UP:]])
    hushrec["cpu_s"] = statistics.median(processor[WARM_UP:])
    hushrec["sampling_s"] = statistics.median(sampling)
    hushrec["training_and_aggregation_s"] = hushrec["median_s"] - hushrec["sampling_s"]
    negatives = draw_negatives(view, method.config.negatives, Round(1, streams))
    hushrec["samples"] = sum(len(part.values) for part in (view.positives, negatives))
    hushrec["losses"] = [loss for _, loss in rounds[: sizes.plain_rounds]]
    hushrec["note"] = (
        "one kernel draws and trains; sampling is the time of drawing the same negatives alone"
    )
    best = min(plain, key=lambda times: times["total"])
    losses = [times["loss"] for times in plain]
    apart = [abs(a - b) / b for a, b in zip(hushrec["losses"], losses, strict=True)]
    ratio = best["total"] / hushrec["median_s"]
    return {
        "data": data.name,
        "data_note": None if data.name == "ml-100k" else "ml-100k was not found: demo data instead",
        "devices": len(view),
        "items": view.n_items,
        "options": experiment.options,
        "threads": 1,
        "hushrec": hushrec,
        "plain_loop": {**best, "rounds": plain, "losses": losses},
        "ratio": ratio,
        "cpu_ratio": min(times["cpu_s"] for times in plain) / hushrec["cpu_s"],
        "same_work": {
            "samples_equal": all(times["samples"] == hushrec["samples"] for times in plain),
            "losses_apart": apart,
            "losses_in_the_same_range": max(apart) < SAME_RANGE,
        },
        "bars": [bar("plain loop / hushrec, one thread", ratio, 100, at_least=True)],
    }


def _sampling_seconds(view: TrainView, method: PFedRec, number: int) -> float:
    began = time.perf_counter()
    draw_negatives(view, method.config.negatives, Round(number, Streams(0)))
    return time.perf_counter() - began


def _plain_rounds(
    view: TrainView,
    method: PFedRec,
    table: NDArray[Any],
    first: Mapping[str, NDArray[Any] | None],
    n_rounds: int,
    show: Progress,
) -> list[Json]:
    """Run the plain loop from the same start as ours."""
    import torch

    from benchmarks.plain_loop import Model, PlainLoop, Settings

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    config = method.config
    positives = [view.positives[device].tolist() for device in range(len(view))]
    everything = set(range(view.n_items))
    pools = [everything.difference(items) for items in positives]
    settings = Settings(
        d=config.d,
        lr=config.lr,
        item_lr=config.lr * view.n_items * config.item_rate,
        negatives=config.negatives,
        epochs=config.epochs,
        batch=config.batch,
    )
    model = Model(view.n_items, config.d)
    with torch.no_grad():
        model.item_embedding.weight.copy_(torch.from_numpy(table))
        model.score_function.weight.copy_(torch.from_numpy(np.array(first["vector"])[None, :]))
        model.score_function.bias.copy_(torch.from_numpy(np.array(first["bias"])[None]))
    PlainLoop(positives, pools, copy.deepcopy(model), settings).round(range(min(8, len(view))))

    loop = PlainLoop(positives, pools, model, settings)
    task = show.add_task("speed: plain loop", total=n_rounds * len(view))
    out = []
    for _ in range(n_rounds):
        began = time.process_time()
        times = loop.round(range(len(view)), lambda: show.advance(task))
        processor = time.process_time() - began
        out.append({**asdict(times), "total": times.total, "cpu_s": processor})
    return out


# ---------------------------------------------------------------- (b) growth


def growth(sizes: Sizes, show: Progress) -> Json:
    """Time a round of all users for once, twice, four and eight times as many of them."""
    threads = {"one thread": 1, "all threads": usable_cores()}
    seconds: dict[str, dict[int, list[float]]] = {name: {} for name in threads}
    task = show.add_task(
        "growth", total=(WARM_UP + sizes.growth_rounds) * len(FACTORS) * len(threads)
    )
    with TemporaryDirectory(prefix="hushrec-benchmark-") as folder:
        federations = {
            factor: Timed(
                pfedrec(),
                synthetic_view(factor * sizes.base_users, sizes.growth_items),
                IN_MEMORY,
                Path(folder),
                1,
            )
            for factor in FACTORS
        }
        # The sizes take turns, so that a busy moment of the machine hits all of them.
        for repeat in range(WARM_UP + sizes.growth_rounds):
            for name, count in threads.items():
                for factor, federation in federations.items():
                    spent, _ = federation.round(ALL, count)
                    if repeat >= WARM_UP:
                        seconds[name].setdefault(factor, []).append(spent)
                    show.advance(task)
    out: Json = {
        "users": {str(factor): factor * sizes.base_users for factor in FACTORS},
        "items": sizes.growth_items,
        "mean_length": MEAN_LENGTH,
        "bars": [],
    }
    for name, count in threads.items():
        times = {factor: spread(of_factor) for factor, of_factor in seconds[name].items()}
        ratios = {
            str(factor): times[factor]["median_s"] / times[1]["median_s"] for factor in FACTORS
        }
        by_factor = {str(factor): value for factor, value in times.items()}
        out[name] = {"threads": count, "times": by_factor, "ratios": ratios}
        out["bars"].append(bar(f"time of 8x users / 1x, {name}", ratios["8"], 8.8))
    return out


# ---------------------------------------------------------------- (c) population


def big_population(sizes: Sizes, show: Progress, quick: bool) -> Json:
    """Time equal cohorts out of many users and out of few, each in a process of its own."""
    task = show.add_task("population", total=2)
    found = {}
    for users in (sizes.few_users, sizes.population_users):
        command = [sys.executable, "-m", "benchmarks", "population", "--users", str(users)]
        command += ["--json", *(["--quick"] if quick else [])]
        root = Path(__file__).parents[1]
        done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
        found[users] = json.loads(done.stdout)
        show.advance(task)
    few, many = found[sizes.few_users], found[sizes.population_users]
    ratio = many["round"]["median_s"] / few["round"]["median_s"]
    return {
        "few": few,
        "many": many,
        "ratio": ratio,
        "bars": [
            bar(f"round time, {many['users']:,} users / {few['users']:,}", ratio, 1.3),
            bar("peak memory, GB", many["peak_rss_bytes"] / GIGABYTE, 2.0),
        ],
    }


def one_population(sizes: Sizes, n_users: int, on_round: Callable[[], None]) -> Json:
    """Run cohorts out of one population in this process."""
    began = time.perf_counter()
    with TemporaryDirectory(prefix="hushrec-benchmark-") as folder:
        view = synthetic_view(n_users, sizes.population_items)
        method = pfedrec()
        federation = Timed(method, view, StoreConfig(kind="auto"), Path(folder), None)
        setup = time.perf_counter() - began
        cohort = CohortConfig(kind="fixed", size=min(sizes.cohort, n_users))
        seconds = []
        for repeat in range(WARM_UP + sizes.population_rounds):
            spent, _ = federation.round(cohort)
            if repeat >= WARM_UP:
                seconds.append(spent)
            on_round()
        return {
            "users": n_users,
            "items": sizes.population_items,
            "interactions": len(view.positives.values),
            "cohort": cohort.size,
            "d": method.config.d,
            "threads": federation.federation.backend.machine.n_threads,
            "store": "memory" if federation.store.folder is None else "memory, then file",
            "setup_s": setup,
            "round": spread(seconds),
            "peak_rss_bytes": peak_rss_bytes(),
        }


# ---------------------------------------------------------------- (d) loading


def loading(sizes: Sizes, show: Progress) -> Json:
    """Read a CSV file in a process of its own, as `hushrec data info` does."""
    task = show.add_task("loading", total=1 + LOADS)
    with TemporaryDirectory(prefix="hushrec-benchmark-") as folder:
        file = Path(folder) / "rows.csv"
        write_rows(file, sizes.rows)
        show.advance(task)
        turns = []
        for _ in range(LOADS):
            command = [sys.executable, "-m", "benchmarks", "loading", "--file", str(file)]
            root = Path(__file__).parents[1]
            done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
            turns.append(json.loads(done.stdout))
            show.advance(task)
        size = file.stat().st_size
    # Whatever else the machine does can only make it slower.
    best = min(turns, key=lambda turn: turn["wall_s"])
    million = 1_000_000 / sizes.rows
    return {
        "rows": sizes.rows,
        "bytes": size,
        "turns": turns,
        **best,
        "bars": [
            bar("a million rows of CSV, s", best["wall_s"] * million, 10.0),
            bar("the same, processor time, s", best["cpu_s"] * million, 10.0),
            bar("peak memory, MB", best["peak_rss_bytes"] / 1e6, 400.0),
        ],
    }


def write_rows(file: Path, rows: int) -> None:
    """Write made-up ratings: ids, a rating and a time in each row."""
    draws = np.random.default_rng(0)
    users = (draws.random(rows) ** 2 * 60_000).astype(int)
    items = (draws.random(rows) ** 2 * 20_000).astype(int)
    ratings, times = (
        draws.integers(1, 11, rows) / 2,
        draws.integers(900_000_000, 1_000_000_000, rows),
    )
    columns = (column.tolist() for column in (users, items, ratings, times))
    with file.open("w") as out:
        out.write("user,item,rating,timestamp\n")
        for row in zip(*columns, strict=True):
            out.write("{},{},{},{}\n".format(*row))


def one_loading(file: Path) -> Json:
    """Read one file in this process."""
    began, processor = time.perf_counter(), time.process_time()
    data = read_interactions(file)
    return {
        "read": len(data),
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - processor,
        "peak_rss_bytes": peak_rss_bytes(),
    }


# ---------------------------------------------------------------- (e) serving


def serving(sizes: Sizes, show: Progress, quick: bool) -> Json:
    """Time the list of one user against a user's share of a batch, on one thread."""
    try:
        data = load("demo" if quick else "ml-1m")
    except DataError:
        data = load("demo")
    task = show.add_task("serving", total=len(SERVING) * (1 + SERVING_TURNS))
    out: Json = {"data": data.name, "batch": sizes.served, "methods": {}, "bars": []}
    for name, options in SERVING.items():
        model = train(data, name, **options).model
        show.advance(task)
        users = np.random.default_rng(0).permutation(data.users)[: sizes.served].tolist()
        model.recommend(users[:2], threads=1), model.recommend(users[0])
        batch, alone = list[float](), list[float]()
        for turn in range(SERVING_TURNS):
            began = time.perf_counter()
            model.recommend(users, threads=1)
            batch.append((time.perf_counter() - began) / len(users))
            for user in users[turn * sizes.served_alone :][: sizes.served_alone]:
                began = time.perf_counter()
                model.recommend(user)
                alone.append(time.perf_counter() - began)
            show.advance(task)
        both = spread(alone), spread(batch)
        ratio = both[0]["median_s"] / both[1]["median_s"]
        out["methods"][name] = {"alone": both[0], "in_a_batch": both[1], "ratio": ratio}
        what = f"one user / one of {sizes.served:,} in a batch, {name}"
        out["bars"].append(bar(what, ratio, 3.0))
    return out


# ---------------------------------------------------------------- the command


def machine() -> Json:
    """Say where this was measured."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    versions = {
        name: importlib.metadata.version(name) if importlib.util.find_spec(name) else None
        for name in ("hushrec", "numpy", "numba", "torch")
    }
    return {
        "cores": usable_cores(),
        "cpu": model,
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


ABOUT = {
    "speed": "speed: one PFedRec round of all devices, one thread, against a plain per-device loop",
    "growth": "growth: the time of a round as the users double, and double again",
    "population": "population: equal cohorts out of a million users and out of ten thousand",
    "loading": "loading: a million rows of CSV, checked line by line",
    "serving": "serving: the list of one user, against a user's share of a batch of lists",
    "noise": "noise: numbers of discrete noise from a cipher, against floating point without one",
}


def noise(sizes: Sizes, show: Progress) -> Json:
    """Draw noise as local modes do, and as floating-point numbers by Box and Muller."""
    task = show.add_task("noise", total=NOISE_TURNS)
    draws, found = sizes.draws, dict[str, list[float]]()
    for turn in range(NOISE_TURNS):
        words = SecretStreams(0).words("noise", turn)
        key = Streams(0).key("noise", turn)
        ways: dict[str, Callable[[], object]] = {
            "gaussian": partial(law("gaussian", 2**32).draw, words, draws),
            "laplace": partial(law("laplace", 2**32).draw, words, draws),
            "floating": partial(box_and_muller, key, draws),
        }
        for way, draw_all in ways.items():
            began = time.perf_counter()
            draw_all()
            found.setdefault(way, []).append((time.perf_counter() - began) / draws)
        show.update(task, advance=1)
    nanoseconds = {kind: 1e9 * min(seconds) for kind, seconds in found.items()}
    return {
        "draws": sizes.draws,
        "nanoseconds": nanoseconds,
        "bars": [
            bar(f"{kind} over floating point", nanoseconds[kind] / nanoseconds["floating"], 5.0)
            for kind in ("gaussian", "laplace")
        ],
    }


@njit(cache=True)
def box_and_muller(key: NDArray[np.uint64], size: int) -> NDArray[np.float32]:
    """Draw Gaussian noise in floating point from a fast generator: the rival."""
    out = np.empty(size, np.float32)
    for k in range(0, size - 1, 2):
        radius = math.sqrt(-2.0 * math.log((float(draw(key, 0, k) >> 11) + 0.5) * 2.0**-53))
        angle = 2.0 * math.pi * (float(draw(key, 0, k + 1) >> 11) + 0.5) * 2.0**-53
        out[k], out[k + 1] = radius * math.cos(angle), radius * math.sin(angle)
    return out


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """Show what is being measured; redraws are rare, so that they cost nothing measurable."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, refresh_per_second=1, transient=True
    ) as show:
        yield show


def measure(which: str, sizes: Sizes, quick: bool, console: Console) -> Json:
    """Run the chosen benchmarks."""
    chosen = list(ABOUT) if which == "all" else [which]
    out: Json = {"machine": machine(), "quick": quick, "sizes": asdict(sizes)}
    for name in chosen:
        console.print(ABOUT[name])
        with progress(console) as show:
            if name == "speed":
                out[name] = speed(sizes, show)
            elif name == "growth":
                out[name] = growth(sizes, show)
            elif name == "noise":
                out[name] = noise(sizes, show)
            elif name == "loading":
                out[name] = loading(sizes, show)
            elif name == "serving":
                out[name] = serving(sizes, show, quick)
            else:
                out[name] = big_population(sizes, show, quick)
    out["bars_met"] = all(one["met"] for name in chosen for one in out[name]["bars"])
    return out


def as_table(result: Json) -> Table:
    """Lay the bars and the times behind them out."""
    title = "hushrec benchmarks" + (" (quick: proves nothing)" if result["quick"] else "")
    table = Table("benchmark", "measured", "value", "bar", "", title=title, title_justify="left")
    for name in ABOUT:
        if name not in result:
            continue
        if "skipped" in result[name]:
            table.add_row(name, result[name]["skipped"], "", "", "[yellow]skipped[/]")
        for one in result[name]["bars"]:
            verdict = "[green]met[/]" if one["met"] else "[bold red]bar missed[/]"
            table.add_row(name, one["what"], f"{one['value']:.2f}", one["bar"], verdict)
        for what, value in _details(name, result[name]):
            table.add_row("", f"[dim]{what}[/]", f"[dim]{value}[/]", "", "")
        table.add_section()
    return table


def _details(name: str, found: Json) -> Iterator[tuple[str, str]]:
    if "skipped" in found:
        return
    if name == "speed":
        ours, plain, same = found["hushrec"], found["plain_loop"], found["same_work"]
        alike = same["samples_equal"] and same["losses_in_the_same_range"]
        rest = ours["training_and_aggregation_s"]
        yield f"data: {found['data']}, {found['devices']} devices", found["data_note"] or ""
        yield "hushrec: sampling, rest", f"{ours['sampling_s']:.4f} s, {rest:.4f} s"
        yield (
            "plain loop: sampling, training",
            f"{plain['sampling']:.2f} s, {plain['training']:.2f} s",
        )
        yield "ratio of processor time", f"{found['cpu_ratio']:.1f}"
        yield "same work (samples, losses)", "yes" if alike else "[bold red]NO[/]"
    elif name == "noise":
        each = found["nanoseconds"]
        yield "a number", "  ".join(f"{kind} {time:.0f} ns" for kind, time in each.items())
    elif name == "loading":
        yield f"{found['rows']:,} rows, {found['bytes'] / 1e6:.1f} MB", f"{found['wall_s']:.2f} s"
    elif name == "serving":
        for method, times in found["methods"].items():
            alone, batch = (1000 * times[key]["median_s"] for key in ("alone", "in_a_batch"))
            yield f"{method} on {found['data']}", f"{alone:.2f} ms alone, {batch:.2f} in a batch"
    elif name == "growth":
        for threads in ("one thread", "all threads"):
            times = found[threads]["times"].values()
            yield (
                f"1x 2x 4x 8x, {threads}",
                "  ".join(f"{1000 * t['median_s']:.0f} ms" for t in times),
            )
    else:
        for size in ("few", "many"):
            one = found[size]
            memory = f"{one['peak_rss_bytes'] / GIGABYTE:.2f} GB"
            yield (
                f"{one['users']:,} users, store in {one['store']}",
                f"{1000 * one['round']['median_s']:.0f} ms a round (mean "
                f"{1000 * one['round']['mean_s']:.0f}), {memory}",
            )


@click.command()
@click.argument("which", type=click.Choice([*ABOUT, "all"]), default="all")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quick", is_flag=True, help="Tiny sizes: tries the machinery, proves nothing.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the JSON here; a full run of everything writes benchmarks/latest.json.",
)
@click.option("--users", type=int, help="With `population`: this many users, in this process.")
@click.option("--file", type=Path, help="With `loading`: this file, in this process.")
def main(
    which: str, as_json: bool, quick: bool, out: Path | None, users: int | None, file: Path | None
) -> None:
    """Measure speed, growth and memory as ratios within one run."""
    console = Console(stderr=True)
    sizes = QUICK if quick else FULL
    if users is not None:
        if which != "population":
            raise click.UsageError("--users goes with: population")
        result = one_population(sizes, users, lambda: None)
        click.echo(json.dumps(result, indent=2))
        return
    if file is not None:
        if which != "loading":
            raise click.UsageError("--file goes with: loading")
        click.echo(json.dumps(one_loading(file), indent=2))
        return
    result = measure(which, sizes, quick, console)
    text = json.dumps(result, indent=2) + "\n"
    if out is None and which == "all" and not quick:
        out = LATEST
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, "utf-8")
    if as_json:
        click.echo(text, nl=False)
    else:
        Console().print(as_table(result))
        if out is not None:
            click.echo(f"written to {out}")


if __name__ == "__main__":
    main()
