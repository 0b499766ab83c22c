"""Measure federations of real processes on loopback; ``results.json`` keeps what came out.

python experiments/deployment/measure.py methods     # the bits of one process, on 2, 3, 5 nodes
python experiments/deployment/measure.py overhead    # ML-1M in 3 silos: time and bytes
python experiments/deployment/measure.py many        # 20 nodes on one machine
python experiments/deployment/measure.py soak        # 50 rounds, a node killed every 3 of them
python experiments/deployment/measure.py default     # ML-1M, fedmix untouched: bits, time, memory
python experiments/deployment/measure.py default --secure
python experiments/deployment/measure.py faults      # each fault by itself, in one federation
python experiments/deployment/measure.py random      # 40 random faults in a run of 12 rounds
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np
from faults import Federation
from safetensors.numpy import load_file

from hushrec import train
from hushrec.cli.federate import ExperimentOptions, make_rehearsal, train_on
from hushrec.deployment.coordinator.run import newest_run, status_of
from hushrec.deployment.flower.processes import Processes
from hushrec.deployment.flower.programs import federation_running, start_node
from hushrec.federation.experiment import parse_settings
from hushrec.runs.folder import RunFolder

RESULTS = Path(__file__).parent / "results.json"
FINAL = "checkpoint/final/selected-shared.safetensors"
NOISE = ("privacy.mode=central", "privacy.epsilon=8", "privacy.noise_seed=0")
POISSON = ("cohort.kind=poisson", "cohort.probability=0.5", "privacy.clipping=adaptive")
SILOS = ("silos.kind=dirichlet", "silos.count=10", "d=8", "hidden=[8]", "epochs=1")
METHODS = {
    "pfedrec": ("pfedrec", 3, ()),
    "fedrap": ("fedrap", 3, ()),
    "fedrkg": ("fedrkg", 3, ("interval=1",)),
    "dp-privrec": ("privrec", 3, (*NOISE, *POISSON)),
    "lipm": ("lipm", 3, SILOS),
    "fednext": ("fednext", None, ()),
    "fednext under noise": ("fednext", None, NOISE),
}


@contextmanager
def federation(data, nodes, trained):
    """A federation that runs, in a folder that goes with it."""
    with TemporaryDirectory(prefix="hushrec-") as place:
        top = Path(place) / "f"
        make_rehearsal(top, data, nodes, trained)
        with federation_running(top) as (server, programs):
            yield top, server, programs


def keep(name, found):
    """Put a result beside the others, in place of one with the same keys, and show it."""
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    results[name] = {**results.get(name, {}), **found}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    click.echo(json.dumps({name: found}, indent=1))


def memory(process, kind="VmRSS"):
    """Resident bytes of a process, or with VmHWM their peak; 0 if it is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = (int(x.split()[1]) * 1024 for x in status.splitlines() if x.startswith(kind))
    return next(found, 0)


@click.group()
def main():
    """Measure federations of real processes on loopback."""


@main.command()
@click.option("--nodes", default="2,3,5", show_default=True)
@click.option("--only", help="One of the methods.")
def methods(nodes, only):
    """Compare a federation's model and metrics with those of one process, bit by bit."""
    for name, (method, rounds, pairs) in METHODS.items():
        if only not in (None, name):
            continue
        with TemporaryDirectory() as place:
            settings = parse_settings(pairs)
            alone = train("demo", method, rounds=rounds, settings=settings, out=Path(place) / "a")
            expected = load_file(Path(place) / "a" / FINAL)
        for count in map(int, nodes.split(",")):
            began = time.monotonic()
            trained = ExperimentOptions(method, None, rounds, 0, pairs)
            with federation("demo", count, trained) as (_, server, _programs):
                summary, path = train_on(server.folder, resume=False, quiet=True)
                model = load_file(path / FINAL)
            same = model.keys() == expected.keys() and all(
                np.array_equal(model[key], expected[key]) for key in expected
            )
            found = {
                "same_bits": bool(same),
                "same_metrics": summary.test == alone.summary.test,
                "seconds": round(time.monotonic() - began, 1),
            }
            keep("methods", {f"{name}, {count} nodes": found})


@main.command()
def overhead():
    """Time a round of three silos that hold ML-1M, and compare bytes on the wire with the count."""
    found = {}
    for method, rounds in (("fednext", 2), ("pfedrec", 3)):
        pairs = (f"evaluation.every={rounds}",)
        with TemporaryDirectory() as place:
            out = Path(place) / "a"
            train("ml-1m", method, rounds=rounds, settings=parse_settings(pairs), out=out)
            alone = rounds_of(out)
        trained = ExperimentOptions(method, None, rounds, 0, pairs)
        with federation("ml-1m", 3, trained) as (_, server, _programs):
            _, path = train_on(server.folder, resume=False, quiet=True)
            status, federated = status_of(newest_run(server.folder.runs)), rounds_of(path)
            wire = server.traffic
            found[method] = {
                "seconds_a_round_in_process": alone,
                "seconds_a_round_on_flower": federated,
                "message_bytes": {"up": status.up_bytes, "down": status.down_bytes},
                "wire_bytes": {"up": wire.up, "down": wire.down},
                "wire_over_messages": (wire.up + wire.down) / (status.up_bytes + status.down_bytes),
            }
    keep("overhead", found)


def rounds_of(path):
    """Seconds of each round."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [round(json.loads(line)["seconds"], 2) for line in lines]


@main.command()
@click.option("--nodes", default=20, show_default=True)
def many(nodes):
    """Run many nodes on one machine."""
    began = time.monotonic()
    with federation("demo", nodes, ExperimentOptions("pfedrec", None, 2, 0, ())) as (
        _,
        server,
        programs,
    ):
        summary, path = train_on(server.folder, resume=False, quiet=True)
        held = sum(memory(each.process.pid) for each in programs.values())
        alone = train("demo", "pfedrec", rounds=2)
        found = {
            "nodes": len(summary.nodes or {}),
            "same_metrics": summary.test == alone.summary.test,
            "seconds": round(time.monotonic() - began, 1),
            "seconds_a_round": rounds_of(path),
            "gigabytes_of_the_nodes": round(held / 1e9, 2),
        }
    keep("many", found)


@main.command()
@click.option("--rounds", default=50, show_default=True)
@click.option("--nodes", default=4, show_default=True)
def soak(rounds, nodes):
    """Train for long while a node is killed every third round."""
    trained = ExperimentOptions("pfedrec", None, rounds, 0, (f"evaluation.every={rounds}",))
    rng, kills, held, began = random.Random(0), [], [], time.monotonic()
    with federation("demo", nodes, trained) as (top, server, running):
        stop = threading.Event()
        (top / "again").mkdir()
        with Processes(top / "again", {}) as programs:

            def disturb():
                last = 0
                while not stop.wait(0.5):
                    newest = newest_run(server.folder.runs)
                    number = 0 if newest is None else status_of(newest).round
                    held.append([number, memory(server.superlink.process.pid), memory(os.getpid())])
                    if number >= last + 3:
                        last, name = number, rng.choice(sorted(running))
                        os.kill(running[name].process.pid, signal.SIGKILL)
                        kills.append([number, name])
                        running[name].process.wait()
                        running[name] = start_node(programs, top / "nodes" / name)

            disturber = threading.Thread(target=disturb)
            disturber.start()
            try:
                summary, _ = train_on(server.folder, resume=False, quiet=True)
            finally:
                stop.set()
                disturber.join()
            status = status_of(newest_run(server.folder.runs))
    alone = train("demo", "pfedrec", rounds=rounds, settings={"evaluation.every": rounds})
    third = max(1, len(held) // 3)
    keep(
        "soak",
        {
            "rounds": summary.rounds,
            "kills": len(kills),
            "same_metrics": summary.test == alone.summary.test,
            "sat_out": {name: node.sat_out for name, node in status.nodes.items()},
            "lost_and_asked_again": sum(node.lost for node in status.nodes.values()),
            "megabytes_of_the_superlink": [
                round(float(np.mean([each[1] for each in part])) / 1e6)
                for part in (held[:third], held[third:-third], held[-third:])
            ],
            "megabytes_of_the_run": [
                round(float(np.mean([each[2] for each in part])) / 1e6)
                for part in (held[:third], held[third:-third], held[-third:])
            ],
            "seconds": round(time.monotonic() - began, 1),
        },
    )


@contextmanager
def peaks(processes):
    """Watch the peak memory of processes, by name; yields the highest of each so far."""
    highest, stop = dict.fromkeys(processes, 0), threading.Event()

    def watch():
        while not stop.wait(0.2):
            for name, number in processes.items():
                highest[name] = max(highest[name], memory(number, "VmHWM"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield highest
    finally:
        stop.set()
        watcher.join()


def phase_seconds(path):
    """Rounds and seconds of each phase, and the seconds of its first round."""
    folder, found = RunFolder(path), {}
    method = folder.experiment().make_method()
    for number, seconds in enumerate(rounds_of(path), 1):
        known = found.setdefault(method.phase_of(number).name, [])
        known.append(seconds)
    return {
        name: {"rounds": len(each), "first": each[0], "all": round(sum(each), 1)}
        for name, each in found.items()
    }


@main.command()
@click.option("--secure", is_flag=True, help="Secure sums.")
@click.option("--data", default="ml-1m", show_default=True)
@click.option("--nodes", default=3, show_default=True)
def default(secure, data, nodes):
    """Train the default with the configuration that `federate init` writes, untouched."""
    load, trained = os.getloadavg()[0], ExperimentOptions(None, None, None, 0, (), secure)
    with federation(data, nodes, trained) as (top, server, programs):
        began, processes = time.monotonic(), {name: p.process.pid for name, p in programs.items()}
        command = [sys.executable, "-m", "hushrec", "federate", "run", str(server.folder.path)]
        coordinator = subprocess.Popen(command)
        processes |= {"coordinator": coordinator.pid, "superlink": server.superlink.process.pid}
        with peaks(processes) as highest:
            code = coordinator.wait()
        seconds, newest = time.monotonic() - began, newest_run(server.folder.runs)
        status = status_of(newest)
        found = {
            "exit_code": code,
            "seconds": round(seconds, 1),
            "seconds_by_phase": phase_seconds(newest.path),
            "peak_gigabytes": {name: round(size / 1e9, 2) for name, size in highest.items()},
            "megabytes_up_and_down": {
                name: {
                    what: {
                        "up": round(each.up_bytes / 1e6, 2),
                        "down": round(each.down_bytes / 1e6, 2),
                    }
                    for what, each in node.traffic.items()
                }
                for name, node in status.nodes.items()
            },
            "lost": {name: node.lost + node.sat_out for name, node in status.nodes.items()},
            "file_megabytes": {
                path.parent.name: round(path.stat().st_size / 1e6, 1)
                for path in sorted(top.glob("nodes/*/data.node"))
            },
            "load_before": round(load, 2),
            "load_after": round(os.getloadavg()[0], 2),
        }
        model = load_file(newest.path / FINAL) if code == 0 else {}
    with TemporaryDirectory() as place:
        train(data, out=Path(place) / "a")
        alone = load_file(Path(place) / "a" / FINAL)
    found["same_bits"] = model.keys() == alone.keys() and all(
        np.array_equal(model[key], alone[key]) for key in alone
    )
    keep("default", {f"{data}, {nodes} nodes, {'secure' if secure else 'in the clear'}": found})


def fault_table(federation):
    """Faults of a federation, by what they are called."""
    return {
        "nothing": lambda: None,
        "kill -9 of a node": lambda: federation.kill("node-1"),
        "kill -9 of a SuperNode": lambda: federation.kill_program("node-2"),
        "kill -9 of the SuperLink": lambda: federation.kill_program("server"),
        "kill -9 of the server's supervisor": lambda: federation.kill("server"),
        "kill -9 of federate run": lambda: "run",
        "a node stopped for 60 s": lambda: federation.freeze("node-3", 60.0),
        "a node stopped for 90 s": lambda: federation.freeze("node-1", 90.0),
        "a SuperNode stopped for 90 s": lambda: federation.freeze("node-2", 90.0, whole=False),
        "the SuperLink stopped for 60 s": lambda: federation.freeze("server", 60.0, whole=False),
        "a link cut for 60 s": lambda: federation.relays["node-3"].cut(60.0),
        "a link cut for 90 s": lambda: federation.relays["node-1"].cut(90.0),
    }


def outcome_of(federation, outcome):
    """What is kept of a run with faults."""
    return {
        "seconds": round(outcome.seconds, 1),
        "resumed_by_hand": outcome.resumes,
        "missed": sorted(outcome.missed),
        "same_bits": federation.same_bits(),
        "uploads_charged": sorted(federation.uploads()),
        "load": round(os.getloadavg()[0], 1),
    }


@main.command()
@click.option("--only", multiple=True, help="One of the faults; repeatable.")
def faults(only):
    """Play each fault in the second round of a run of four, with a deadline of 300 s."""
    with (
        TemporaryDirectory(prefix="hushrec-") as place,
        Federation(Path(place) / "f", rounds=4, policy={"round_seconds": 300.0}) as federation,
    ):
        for name, fault in fault_table(federation).items():
            if not only or name in only:
                outcome = federation.run([(1, fault)])
                keep("faults", {name: outcome_of(federation, outcome)})


@main.command("random")
@click.option("--seeds", default=3, show_default=True)
@click.option("--first", default=0, show_default=True, help="First seed.")
@click.option("--secure/--clear", default=False)
@click.option("--count", default=40, show_default=True)
@click.option("--rounds", default=12, show_default=True)
def random_faults(seeds, first, secure, count, rounds):
    """Play random faults in one run, each a random time after a random round."""
    for seed in range(first, first + seeds):
        with (
            TemporaryDirectory(prefix="hushrec-") as place,
            Federation(
                Path(place) / "f",
                nodes=4 if secure else 3,
                rounds=rounds,
                secure=secure,
                policy={"round_seconds": 300.0},
            ) as federation,
        ):
            drawn, played = random.Random(seed), []
            table = fault_table(federation)

            def play(name, wait, table=table, played=played):
                time.sleep(wait)
                played.append(name)
                return table[name]()

            names = [name for name in table if name != "nothing"]
            moments = sorted(drawn.randrange(rounds) for _ in range(count))
            planned = [
                (moment, partial(play, drawn.choice(names), drawn.uniform(0, 5)))
                for moment in moments
            ]
            outcome = federation.run(planned, seconds=4 * 3600)
            found = {**outcome_of(federation, outcome), "played": dict(Counter(played))}
            what = (
                f"{count} faults, {rounds} rounds, {'secure' if secure else 'clear'}, seed {seed}"
            )
            keep("random faults", {what: found})


if __name__ == "__main__":
    main()
