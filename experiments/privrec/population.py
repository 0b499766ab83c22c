"""How many people DP-PrivRec needs: its Hits@20 on made-up viewers, with noise and without.

    python experiments/privrec/population.py --viewers 1000 --viewers 10000

Every population is asked for the same share of its people in a round, as DP-PrivRec asks for 30 of
ML-1M's 4,228 training users, so epsilon stays about the same while the noise on the mean, of norm
z / sqrt(1 - h) * 2 S / M * sqrt(parameters), falls with the cohort M. What is left of it: a line
for each population.
"""

from __future__ import annotations

from typing import Any

import click

import hushrec
from hushrec.data import Interactions
from hushrec.data.synthetic import demo
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import read_preset
from hushrec.runs.schema import Summary

SHARE = 30 / 4228
"""Of the training users, in a round."""
TRAINING = 0.7
"""Of all users: the others are unseen, and asked."""


def settings_of(preset: str) -> dict[str, Any]:
    """Return what a preset of PrivRec says, but for its rounds and its privacy."""
    told = read_preset("privrec", preset)
    sections = {name: told[name] for name in ("cohort", "split", "evaluation")}
    inside = {f"{s}.{key}": value for s, said in sections.items() for key, value in said.items()}
    return {**told["options"], **inside}


@click.command()
@click.option("--viewers", multiple=True, type=int, default=(1_000, 3_000, 10_000, 30_000))
@click.option("--rounds", type=int, default=400, show_default=True)
@click.option("--threads", type=int, default=2, show_default=True)
def main(viewers: tuple[int, ...], rounds: int, threads: int) -> None:
    """Print a row of a table for each population."""

    def found(data: Interactions, method: str, **told: Any) -> Summary:
        return hushrec.train(data, method, machine=Machine(threads), **told).summary

    click.echo("| viewers | cohort | epsilon | delta | DP-PrivRec | without noise | popularity |")
    click.echo("|---:|---:|---:|---:|---:|---:|---:|")
    for count in viewers:
        data, delta, asked = demo(viewers=count), 0.1 / count, settings_of("dp-paper")
        asked["cohort.size"] = max(2, round(SHARE * TRAINING * count))
        asked["evaluation.every"] = rounds // 4
        noise = {"privacy.noise_seed": 0, "privacy.delta": delta}
        noisy = found(
            data, "privrec", preset="dp-paper", rounds=rounds, settings={**asked, **noise}
        )
        plain = found(data, "privrec", rounds=rounds, settings=asked)
        split = {k: v for k, v in asked.items() if k.startswith(("split.", "evaluation."))}
        popular = found(data, "popularity", settings=split)
        hits = [run.test["full"]["hits@20"] for run in (noisy, plain, popular)]
        shown = " | ".join(f"{value:.3f}" for value in hits)
        epsilon = noisy.privacy.epsilon
        click.echo(
            f"| {count:,} | {asked['cohort.size']} | {epsilon:.2f} | {delta:.0e} | {shown} |"
        )


if __name__ == "__main__":
    main()
