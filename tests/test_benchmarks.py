"""The benchmarks run and report what they promise; how fast they are is no matter of a test."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def check_bars(bars: list[dict], count: int) -> None:
    assert len(bars) == count
    for bar in bars:
        assert set(bar) == {"what", "value", "bar", "met"}
        assert bar["value"] > 0
        sign, limit = bar["bar"].split()
        assert bar["met"] == (
            bar["value"] >= float(limit) if sign == ">=" else bar["value"] <= float(limit)
        )


def test_everything_in_one_run(tmp_path):
    out = tmp_path / "new" / "result.json"
    latest = ROOT / "benchmarks" / "latest.json"
    before = latest.stat().st_mtime_ns if latest.exists() else None
    done = run("--quick", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "proves nothing" in done.stdout
    for name in ("speed", "growth", "population", "loading", "serving", "noise"):
        assert name in done.stdout
    assert (latest.stat().st_mtime_ns if latest.exists() else None) == before

    result = json.loads(out.read_text())
    assert {"cores", "cpu", "python", "numpy", "numba", "torch"} <= set(result["machine"])
    assert result["quick"] is True

    speed = result["speed"]
    if "skipped" not in speed:
        check_bars(speed["bars"], 1)
        assert speed["same_work"]["samples_equal"]
        assert speed["same_work"]["losses_in_the_same_range"]
        ours, plain = speed["hushrec"], speed["plain_loop"]
        assert speed["ratio"] == pytest.approx(plain["total"] / ours["median_s"])
        assert plain["total"] == pytest.approx(
            plain["sampling"] + plain["training"] + plain["aggregation"]
        )

    growth = result["growth"]
    check_bars(growth["bars"], 2)
    assert list(growth["users"]) == ["1", "2", "4", "8"]
    for threads in ("one thread", "all threads"):
        assert growth[threads]["ratios"]["1"] == 1

    population = result["population"]
    check_bars(population["bars"], 2)
    assert population["few"]["users"] < population["many"]["users"]
    assert population["few"]["cohort"] == population["many"]["cohort"]
    assert 10**7 < population["many"]["peak_rss_bytes"] < 10**10

    loading = result["loading"]
    check_bars(loading["bars"], 3)
    assert loading["read"] == loading["rows"] == result["sizes"]["rows"]
    assert loading["wall_s"] == min(turn["wall_s"] for turn in loading["turns"])

    serving = result["serving"]
    check_bars(serving["bars"], 3)
    for bar, times in zip(serving["bars"], serving["methods"].values(), strict=True):
        assert bar["value"] == times["ratio"]
        assert times["ratio"] == pytest.approx(
            times["alone"]["median_s"] / times["in_a_batch"]["median_s"]
        )

    noise = result["noise"]
    check_bars(noise["bars"], 2)
    assert noise["bars"][0]["value"] == pytest.approx(
        noise["nanoseconds"]["gaussian"] / noise["nanoseconds"]["floating"]
    )


def test_one_benchmark_as_json_writes_no_file():
    done = run("population", "--quick", "--users", "300", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["users"] == 300
    assert result["store"] == "memory"
    assert result["round"]["rounds"] == 3


def test_users_need_the_population_benchmark():
    done = run("growth", "--quick", "--users", "300")
    assert done.returncode == 2
    assert "population" in done.stderr


def test_a_small_crowd_goes_through_the_large_catalogue(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    command = importlib.import_module("benchmarks.large_catalogue").main
    done = CliRunner().invoke(command, ["--users", "200", "--items", "300", "--length", "12"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    check_bars(result["bars"], 2)
    assert result["interactions"] == 2400
    assert result["test"]["ndcg@10"] > 2 * result["popularity"]["ndcg@10"], "an order to find"


def test_scale_is_the_calculation_that_the_document_shows(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    done = CliRunner().invoke(importlib.import_module("benchmarks.scale").main, [])
    assert done.exit_code == 0, done.output
    document = (ROOT / "docs" / "scale.md").read_text()
    assert done.output.strip() in document, "write docs/scale.md again: python -m benchmarks.scale"
    assert "refused" not in done.output, "every vector is within the contract's limit"
    assert done.output.count("| met |") == 1


def test_a_phone_uploads_at_most_four_megabytes(monkeypatch):
    """Over all rounds, in dense secure sums: counted again from what devices of ML-1M's size do."""
    monkeypatch.syspath_prepend(ROOT)
    scale = importlib.import_module("benchmarks.scale")
    phones = scale.scenarios()[-1]
    assert scale.upload_bytes(phones, scale.ITEMS) <= scale.LIMIT
    config = phones.method.config
    costs = {c.name: c for c in scale.phase_costs(phones.method, scale.ITEMS, phones.clients)}
    pairs = costs["count pairs of popular items"]
    assert pairs.numbers == config.dense_items**2
    beside = 5 * 8 + 40  # five counts and the loss
    assert pairs.up == 2 * pairs.numbers + beside
    assert (pairs.pieces, pairs.exchanges) == (1, 3)
    # One client more, and the sums need words of four bytes.
    more = scale.phase_costs(phones.method, scale.ITEMS, phones.clients + 1)
    assert next(c.up for c in more if c.name == pairs.name) == 4 * pairs.numbers + beside
    categories = sum(size + 1 for size in scale.CATEGORIES)
    assert costs["count items"].numbers == 2 * scale.ITEMS + categories**2
    scores = 10 + 2 + 3 * len(scale.CATEGORIES)
    derivatives = 2 + scores + scores * (scores + 1) // 2
    assert costs["score candidates"].numbers == 3 + 2 * scores + derivatives
    assert costs["fit weights"].numbers == 3 * derivatives
    network = (scores + 1) * config.hidden + config.hidden**2 + 3 * config.hidden + 1
    assert costs["fit network"].numbers == 1 + network
    evaluation = costs.pop(scale.EVALUATION)
    evaluations, evaluated = evaluation.rounds, evaluation.up
    assert sum(cost.rounds for cost in costs.values()) == phones.method.planned_rounds
    # One set-up of 32 sums serves all; to every other phone of the group it sends shares.
    assert phones.method.planned_rounds + evaluations <= 32
    messages = (96 + 64 * 32) + phones.group * (66 * 32 + 16)
    messages += (phones.method.planned_rounds + evaluations) * (64 + 33 * phones.group)
    vectors = sum(c.rounds * c.up for c in costs.values()) + evaluations * evaluated
    assert scale.upload_bytes(phones, scale.ITEMS) == messages + vectors


@pytest.mark.slow
def test_a_small_secure_sum_is_that_of_one_process(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    command = importlib.import_module("benchmarks.secure_sums").main
    done = CliRunner().invoke(command, ["--data", "demo", "--method", "fedease"])
    assert done.exit_code == 0, done.output
    assert "the same sum as one process" in done.output


def test_plain_loop_learns_and_keeps_devices_apart(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT)
    plain_loop = importlib.import_module("benchmarks.plain_loop")
    torch.manual_seed(0)
    positives = [[0, 1, 2], [0, 1, 3]]
    pools = [set(range(30)) - set(items) for items in positives]
    settings = plain_loop.Settings(d=4, lr=0.1, item_lr=5.0, negatives=4, epochs=1, batch=8)
    loop = plain_loop.PlainLoop(positives, pools, plain_loop.Model(30, 4), settings)
    rounds = [loop.round([0, 1]) for _ in range(30)]
    assert all(times.samples == 2 * 3 * 5 for times in rounds)
    assert rounds[-1].loss < rounds[0].loss
    tables = [loop.device_states[device][plain_loop.TABLE] for device in (0, 1)]
    assert not torch.equal(*tables)
    assert torch.allclose(loop.table, (tables[0] + tables[1]) / 2)
