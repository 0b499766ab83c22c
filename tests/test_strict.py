"""No keyword is ignored: every public callable refuses what it does not know."""

import inspect
import random
from importlib import import_module

import pandas as pd
import pytest
from pydantic import BaseModel

import hushrec
from hushrec.errors import ConfigError
from hushrec.federation.experiment import parse_settings
from hushrec.io.codec import Stored
from hushrec.methods.base import method_class
from surface import SECTIONS

CALLS = 200
METHOD = "fednext"


@pytest.fixture(scope="module")
def run(tiny):
    return hushrec.train(tiny, METHOD)


def public_callables() -> dict[str, object]:
    """Functions, constructors and methods of the public surface, by name.

    What is read from files (`Stored`) keeps keys of newer versions.
    """
    found = {}
    for section in SECTIONS:
        for name in section.names:
            thing = getattr(import_module(section.module), name)
            if inspect.isfunction(thing):
                found[name] = thing
            elif inspect.isclass(thing) and not issubclass(thing, (Stored, BaseException)):
                found[name] = thing
                own = {each for each in dir(thing) if each[0] != "_"} - set(dir(BaseModel))
                members = {f"{name}.{each}": getattr(thing, each) for each in own}
                found |= {each: member for each, member in members.items() if callable(member)}
    return {name: thing for name, thing in found.items() if _signature(thing) is not None}


def _signature(thing):
    try:
        return inspect.signature(thing)
    except (ValueError, TypeError):  # of C, for example a class method of dict
        return None


def _takes_any(thing) -> bool:
    kinds = [parameter.kind for parameter in _signature(thing).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _misspelt(name: str, draw: random.Random) -> str:
    at = draw.randrange(len(name))
    return draw.choice(
        [name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], f"{name}s", f"n_{name}"]
    )


def test_generated_calls_with_an_unknown_keyword_are_refused(run, tiny, tmp_path):
    """A keyword that is misspelt, or of another function, raises TypeError in 200 of 200 calls."""
    real = {  # the callables that take any keyword check them themselves
        "train": lambda **given: hushrec.train(tiny, METHOD, rounds=1, **given),
        "load": lambda **given: hushrec.load("demo", **given),
        "Run.recommend": lambda **given: run.recommend(k=1, **given),
        "Run.export": lambda **given: run.export(tmp_path / "bundle", **given),
        "Run.write_lists": lambda **given: run.write_lists(tmp_path / "lists.csv", **given),
        "Model.recommend": lambda **given: run.model.recommend(k=1, **given),
    }
    callables, draw = public_callables(), random.Random(0)
    assert {name for name, thing in callables.items() if _takes_any(thing)} == real.keys()
    words = sorted(
        {word for thing in callables.values() for word in _signature(thing).parameters}
        - {"self", "cls"}
    )
    options = method_class(METHOD).Config.model_fields
    names, ignored, calls = sorted(callables), [], 0
    while calls < CALLS:
        # Every second call is one of the callables that check for themselves.
        name = draw.choice(sorted(real) if calls % 2 else names)
        keyword = draw.choice([_misspelt(draw.choice(words), draw), draw.choice(words)])
        known = {*_signature(callables[name]).parameters, *options}
        if name != "train" and name in real:  # their keywords are in a TypedDict
            known |= {"user", "item", "value", "time", "title", "delimiter", "name", "data_dir"}
            known |= {"download", "progress", "neighbours", "precision", "overwrite"}
            known |= {"only", "without", "where", "seen"}
        if keyword in known or not keyword.isidentifier():
            continue
        calls += 1
        try:
            if name in real:
                real[name](**{keyword: 1})
            else:
                _signature(callables[name]).bind_partial(**{keyword: 1})
            ignored.append((name, keyword))
        except TypeError as error:
            assert keyword in str(error), (name, keyword, error)
    assert ignored == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"round": 1}, "did you mean 'rounds'"),
        ({"epsilonn": 8}, "did you mean 'epsilon'"),
        ({"neighbors": 20}, "did you mean 'neighbours'"),
        ({"epochs": 3}, "no option of fednext either; .*fedmf.* have it"),
        ({"gate_lr": 0.1}, "no option of fednext either; fedrkg has it"),
    ],
)
def test_train_says_what_was_meant_and_whose_an_option_is(given, words, tiny):
    with pytest.raises(TypeError, match=words):
        hushrec.train(tiny, METHOD, **given)


def test_a_privacy_keyword_protects(tiny):
    """``privacy="central", epsilon=8`` was ignored once: the run was not private."""
    listed = pd.DataFrame({"item": tiny.items})
    frame = pd.DataFrame(
        {"user": tiny.users[tiny.user], "item": tiny.items[tiny.item], "time": tiny.time}
    )
    private = hushrec.train(frame, METHOD, items=listed, privacy="central", epsilon=8, delta=1e-3)
    assert private.summary.privacy.epsilon == pytest.approx(8, rel=0.01)
    same = {"privacy.mode": "central", "privacy.epsilon": 8, "privacy.delta": 1e-3}
    dotted = hushrec.train(hushrec.load(frame, items=listed), METHOD, settings=same)
    assert dotted.experiment == private.experiment


def test_options_of_a_method_are_keywords(tiny):
    given = hushrec.train(tiny, "fedmf", rounds=2, lr=0.3, d=4, seed=1, threads=1)
    settings = {"lr": 0.3, "d": 4}
    assert (
        given.experiment
        == hushrec.train(tiny, "fedmf", rounds=2, seed=1, settings=settings).experiment
    )
    assert given.experiment.options["lr"] == 0.3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": 0.5, "settings": {"lr": 0.1}}, "lr is given twice, as 0.1 and as 0.5"),
        ({"epsilon": 8, "settings": {"privacy.epsilon": 4}}, "privacy.epsilon is given twice"),
        ({"threads": 2, "machine": hushrec.Machine(threads=1)}, "threads is given twice"),
        ({"seed": 1, "seeds": [1, 2]}, "seed and a list of seeds say the same thing"),
        ({"user": "who"}, "the data is loaded already: give user= to load"),
    ],
)
def test_two_ways_of_saying_a_thing_are_refused_where_they_differ(given, words, tiny):
    with pytest.raises(ConfigError, match=words):
        hushrec.train(tiny, "fedmf", **given)
    hushrec.train(tiny, "fedmf", rounds=1, lr=0.5, settings={"lr": 0.5})


def test_a_word_with_two_meanings_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"clip is an option of fedrkg, and of privacy"):
        hushrec.train(tiny, "fedrkg", clip=1.0)


def test_the_command_line_refuses_two_values_of_one_setting():
    assert parse_settings(("lr=0.1", "lr=0.1")) == {"lr": 0.1}
    with pytest.raises(ConfigError, match=r"lr is given twice, as 0\.1 and as 0\.2"):
        parse_settings(("lr=0.1", "lr=0.2"))


def test_rows_know_their_columns(run):
    rows = run.recommend(k=1)
    assert len(rows.where(rank=1)) == len(rows)
    with pytest.raises(TypeError, match="did you mean 'rank'"):
        rows.where(ranks=1)
