"""Train FedMix for a crowd with a large catalogue, in this process: time, memory, what it finds.

python -m benchmarks.large_catalogue                                # 1,000,000 x 100,000
python -m benchmarks.large_catalogue --users 20000 --items 5000     # a trial
"""

from __future__ import annotations

import json
import time

import click

import hushrec
from benchmarks.__main__ import GIGABYTE, bar, machine
from hushrec.data.synthetic import crowd
from hushrec.federation.rounds import RoundRecord
from hushrec.io import peak_rss_bytes

FITTING = 2_500
"""Devices that fit the weights and the network."""
EVALUATED = 1_000
"""Users whose validation and test items are ranked."""
SETTINGS = {
    "count_rounds": 12,
    "window": 5,
    "latest": 30,
    "dense_items": 2_000,
    "neighbours": 40,
    "held_out": 1,
    "evaluation.every": 16,
}
"""Options that a catalogue of this size wants: fewer weights per item, a smaller head, pairs that
are counted in turn."""


@click.command()
@click.option("--users", default=1_000_000, show_default=True)
@click.option("--items", default=100_000, show_default=True)
@click.option("--length", default=30, show_default=True, help="Interactions of every user.")
@click.option("--trace", is_flag=True, help="Print time and memory after every round.")
def main(users: int, items: int, length: int, trace: bool) -> None:
    """Train, evaluate, and print JSON."""
    began, worked = time.perf_counter(), time.process_time()
    data = crowd(users, items, length)

    class Trace(hushrec.Callback):
        def on_round_end(self, record: RoundRecord) -> None:
            gigabytes = peak_rss_bytes() / GIGABYTE
            spent = time.perf_counter() - began, time.process_time() - worked
            line = f"round {record.round}: {spent[0]:.0f} s, {spent[1]:.0f} s of processor time"
            click.echo(f"{line}, {gigabytes:.2f} GB", err=True)

    made = time.perf_counter() - began, time.process_time() - worked
    run = hushrec.train(
        data,
        "fedmix",
        settings={
            **SETTINGS,
            "fit_fraction": min(1.0, FITTING / users),
            "evaluation.users": min(EVALUATED, users),
        },
        callbacks=[Trace()] if trace else [],
    )
    seconds, processor = time.perf_counter() - began, time.process_time() - worked
    assert run.summary.baselines is not None
    found, popular = run.summary.test["full"], run.summary.baselines.popularity["full"]
    result = {
        "machine": machine(),
        "users": users,
        "items": items,
        "interactions": len(data.user),
        "making_the_data_s": made,
        "seconds": seconds,
        "processor_seconds": processor,
        "uploaded_bytes_a_user": run.summary.communication.up_bytes / users,
        "test": found,
        "popularity": popular,
        "bars": [
            bar("minutes", seconds / 60, 20.0),
            bar("peak memory, GB", peak_rss_bytes() / GIGABYTE, 4.0),
        ],
    }
    click.echo(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
