"""Files of a run that somebody changed are refused by name and key, whatever is in them."""

import copy
import json

import numpy as np
import pytest
from click.testing import CliRunner

from hushrec.cli import main
from hushrec.errors import RunError
from hushrec.runs.folder import RunFolder, read_ranks
from hushrec.serving.recommender import MANIFEST, BundleError, Recommender

ODD = {
    "a word": "x",
    "a list": [1, 2],
    "an object": {"a": 1},
    "nothing": None,
    "a truth": True,
    "infinity": float("inf"),
    "no number": float("nan"),
    "a huge number": 10**400,
    "a negative number": -5,
    "nested": json.loads("[" * 50 + "]" * 50),
}
COMMANDS = (("report",), ("compare",), ("recommend", "--user", "0"), ("privacy", "compose"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    data = folder / "data.csv"
    lines = [f"{u},{i},1,{u + i}" for u in range(8) for i in range(9) if (u * i) % 4]
    data.write_text("\n".join(["user,item,rating,time", *lines]))
    words = ["train", "--data", str(data), "--method", "fednext", "--out", str(folder / "run")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return folder / "run"


def answers(run):
    """Run commands that read the folder; return their exit codes and words."""
    for command, *more in COMMANDS:
        places = [str(run)] * (2 if command == "compare" else 1)
        words = [command, *more, *places] if command == "privacy" else [command, *places, *more]
        result = CliRunner().invoke(main, words)
        yield result.exit_code, result.output


def keys(value, path=()):
    for key, below in value.items():
        yield (*path, key)
        if isinstance(below, dict):
            yield from keys(below, (*path, key))


def test_a_summary_of_other_types_is_a_sentence(run):
    """Each key, with each of ten odd values; 16 of these were tracebacks."""
    file = run / "summary.json"
    before = file.read_text()
    sound = json.loads(before)
    paths = [path for path in keys(sound) if path[0] not in ("test", "valid") or len(path) < 3]
    folder = RunFolder(run)
    try:
        for number, path in enumerate(paths):
            kinds = list(ODD.items())
            # All kinds through the reader; some of them through whole commands.
            for kind, (name, odd) in enumerate(kinds):
                changed = copy.deepcopy(sound)
                place = changed
                for key in path[:-1]:
                    place = place[key]
                place[path[-1]] = odd
                file.write_text(json.dumps(changed))
                if kind == number % len(kinds) and number % 6 == 0:
                    for code, said in answers(run):
                        assert code in (0, 2), (path, name, said)
                try:
                    folder.read_summary()
                except RunError as error:
                    assert "summary.json is damaged" in str(error)
    finally:
        file.write_text(before)


@pytest.mark.parametrize("text", ["", "5", "[" * 100_000, '{"seed": ' + "9" * 5_000 + "}", "\xff"])
@pytest.mark.parametrize("name", ["summary.json", "config.toml", "metrics.jsonl", "users.npz"])
def test_files_of_other_content_are_sentences(run, name, text):
    file = run / name
    before = file.read_bytes()
    try:
        file.write_bytes(text.encode("latin-1") + b"\n")
        for code, said in answers(run):
            assert code in (0, 2), said
            assert len(said) < 3_000
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("line", [{"round": "x"}, {"round": 1, "loss": [], "valid": None}, {}])
def test_lines_of_metrics_are_refused_by_number_and_key(run, line):
    file = run / "metrics.jsonl"
    before = file.read_text()
    try:
        file.write_text(before + json.dumps(line) + "\n")
        result = CliRunner().invoke(main, ["report", str(run)])
        assert result.exit_code == 2
        assert "metrics.jsonl, line 7, is damaged" in result.output
    finally:
        file.write_text(before)


def test_ranks_of_other_types_are_refused(run):
    file = run / "users.npz"
    before = file.read_bytes()
    with np.load(file) as arrays:
        sound = dict(arrays)
    try:
        for name in sound:
            for odd in (np.array(1), np.array(["a"]), sound[name].astype(float), np.zeros((2, 2))):
                np.savez(file, **{**sound, name: odd})
                with pytest.raises(RunError, match=r"users\.npz is damaged"):
                    read_ranks(RunFolder(run))
        np.savez(file, other=np.zeros(3))
        assert CliRunner().invoke(main, ["compare", str(run), str(run)]).exit_code == 2
    finally:
        file.write_bytes(before)


# ------------------------------------------------------------------------------------- bundles


@pytest.mark.parametrize("method", ["fednext", "popularity", "fedals", "fedmf"])
def test_bundles_of_other_types_huge_numbers_and_infinite_scores_are_refused(method, run, tmp_path):
    out = tmp_path / "bundle"
    if method != "fednext":
        data, run = run.parent / "data.csv", tmp_path / "run"
        words = ["train", "--data", str(data), "--method", method, "--rounds", "2"]
        assert CliRunner().invoke(main, [*words, "--out", str(run)]).exit_code == 0
    user = ["--user", "1"] if method == "fedmf" else []
    exported = CliRunner().invoke(main, ["export", str(run), str(out), *user])
    assert exported.exit_code == 0, exported.output
    sound = json.loads((out / MANIFEST).read_text())
    places = [(sound, key) for key in sound if key != "method"]
    places += [(part, key) for part in sound.get("branches", []) for key in part]
    for place, key in places:
        before = place[key]
        for what, odd in {**ODD, "the largest number": 1e308, "a large number": 1e30}.items():
            place[key] = odd
            (out / MANIFEST).write_text(json.dumps(sound))
            try:
                found = Recommender.load(out, ["1", "2"]).recommend(5)
            except BundleError:
                continue
            assert all(np.isfinite(one.score) for one in found), (key, what)
        place[key] = before
    for text in ("[" * 100_000, '{"a":' * 5_000, '{"format": ' + "9" * 5_000 + "}"):
        (out / MANIFEST).write_text(text)
        with pytest.raises(BundleError, match="is not JSON"):
            Recommender.load(out)
