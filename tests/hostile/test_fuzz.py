"""Thousands of hostile cases, one oracle: a sentence or a result, nothing hung, left or lost.

    HUSHREC_FUZZ=20000 python -m pytest tests/hostile/test_fuzz.py --hypothesis-seed=1

runs so many cases, from that seed; 2,000 without the variable.
"""

import os

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.hostile import fuzzing
from tests.hostile.fuzzing import judge, judge_bundle, unharmed

from hushrec.cli import main

CASES = int(os.environ.get("HUSHREC_FUZZ", "2000"))


def cases(share):
    """Give a kind of case its share of all."""
    return settings(
        max_examples=round(CASES * share),
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    top = tmp_path_factory.mktemp("fuzz")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(top / "cache")
    data = top / "data.csv"
    rows = [f"{u},{i},{(u * i) % 5 + 1},{u + i}" for u in range(1, 9) for i in range(1, 10)]
    data.write_text("\n".join(["user,item,rating,time", *rows[::2], *rows[1::3]]))
    kinds = {"run": "fednext", "counts": "popularity", "factors": "fedals", "network": "fedmf"}
    for name, method in kinds.items():
        run, user = top / name, ("--user", "1") if name == "network" else ()
        for words in (
            ("train", "--data", data, "--method", method, "--rounds", "2", "--out", run),
            ("export", run, top / f"bundle-{name}", *user),
        ):
            result = CliRunner().invoke(main, [str(word) for word in words])
            assert result.exit_code == 0, result.output
    bundles = tuple(top / f"bundle-{name}" for name in kinds)
    yield fuzzing.Place(top, data, top / "run", bundles)
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@cases(0.3)
@given(file=fuzzing.data_files(), command=st.sampled_from(["info", "import", "recommend"]))
def test_files(place, file, command):
    case = place.fresh()
    content, name = file
    data = case / name
    data.write_bytes(content)
    if command == "recommend":
        judge(place, ("recommend", place.run, "--user", "new", "--history", data))
    elif command == "info":
        judge(place, ("data", "info", data))
    else:
        judge(place, ("data", "import", data, "--name", "fuzzed", "--overwrite"))
        judge(place, ("data", "info", "fuzzed"))
    unharmed(place)


@cases(0.1)
@given(
    words=st.lists(fuzzing.WORDS, max_size=4),
    command=st.sampled_from(
        ["data import", "data info", "recommend", "privacy epsilon", "methods"]
    ),
    flags=st.lists(
        st.sampled_from(
            [*("--name", "--user", "--item", "--delimiter", "--noise", "--rounds", "-k", "--json")]
        ),
        max_size=4,
    ),
)
def test_words(place, words, command, flags):
    place.fresh()
    mixed = [word for pair in zip(flags, words, strict=False) for word in pair]
    judge(place, (*command.split(), *mixed, *words[len(flags) :]))
    unharmed(place)


@cases(0.1)
@given(words=fuzzing.settings_of(), method=st.sampled_from(["popularity", "fedmf", "fedals"]))
def test_options(place, words, method):
    case = place.fresh()
    out = case / "out"
    begin = ("train", "--data", place.data, "--method", method, "--rounds", "2", "--out", out)
    given = (*begin, *words)
    result = judge(place, given, made={"out"})
    assert (result.exit_code in (0, 3)) >= out.exists(), words
    unharmed(place)


@cases(0.1)
@given(words=fuzzing.settings_of())
def test_a_run_survives_a_new_one_that_comes_to_nothing(place, words):
    place.fresh()
    command = ("train", "--data", place.data, "--method", "popularity", "--out", place.run)
    result = judge(place, (*command, "--overwrite", *words))
    if result.exit_code == 2:
        unharmed(place)
    else:
        place.restore()


@cases(0.1)
@given(data=st.data(), command=st.sampled_from(["train", "export", "plot"]))
def test_paths(place, data, command):
    case = place.fresh()
    out = data.draw(fuzzing.paths_in(case))
    train = ("train", "--data", place.data, "--method", "popularity", "--out", out)
    plot = ("privacy", "plot", "--noise", "1", "--population", "100", "--rounds", "9")
    words = {
        "train": train,
        "export": ("export", place.run, out),
        "plot": (*plot, "--delta", "1e-4", "--sampling", "none", "--out", out),
    }[command]
    names = {path.name for path in case.iterdir()}
    assert not names
    given = [os.fsencode(str(word)).decode("utf-8", "surrogateescape") for word in words]
    # What is asked for may be made, wherever that is; nothing else.
    top = out[len(str(case)) + 1 :].split("/")[0] if out.startswith(str(case)) else "out"
    judge(place, given, made={top})
    unharmed(place)


@cases(0.2)
@given(data=st.data(), command=st.sampled_from(["recommend", "report", "compare", "resume"]))
def test_changed_runs(place, data, command):
    place.fresh()
    name, content = data.draw(fuzzing.changed_runs(place.kept))
    if name.endswith(".npz"):
        content = data.draw(fuzzing.arrays_of(place.kept[name]))
    (place.run / name).write_bytes(content)
    words = {
        "recommend": ("recommend", place.run, "--user", "1"),
        "report": ("report", place.run),
        "compare": ("compare", place.run, place.run),
        "resume": ("train", "--resume", "--out", place.run),
    }[command]
    try:
        judge(place, words)
    finally:
        place.restore()


@cases(0.1)
@given(data=st.data())
def test_bundles(place, data):
    case = place.fresh()
    manifest, model = data.draw(fuzzing.bundles(data.draw(st.sampled_from(place.bundles))))
    (case / "manifest.json").write_bytes(manifest)
    (case / "model.safetensors").write_bytes(model)
    judge_bundle(case)
