"""The page of all keys is what the code says."""

from pathlib import Path

import pytest

import hushrec
from hushrec.cli.methods import describe_method, keys_of, reference
from hushrec.federation.experiment import SECTIONS, Experiment
from hushrec.methods.base import method_names

PAGE = Path(hushrec.__file__).parents[2] / "docs" / "reference.md"


def test_the_page_is_current():
    assert PAGE.read_text("utf-8") == reference(), "hushrec methods --markdown > docs/reference.md"


def test_every_key_says_what_it_is_for():
    for section in SECTIONS:
        for key in keys_of(Experiment.model_fields[section].annotation):
            assert key.kind and key.about, f"{section}.{key.name}"
            assert f"| `{key.name}` |" in PAGE.read_text("utf-8")


@pytest.mark.parametrize("name", method_names())
def test_every_method_is_describe_method(name):
    found = describe_method(name)
    assert found.about
    assert set(found.tuned) <= {key.name for key in found.options}
    assert all(key.about for key in (*found.options, *found.noised))


def test_limits_and_choices_are_in_words():
    keys = {key.name: key for key in describe_method("fednext").options}
    assert keys["power"].kind == "a number > 0, ≤ 1"
    assert keys["recency"].kind == "a number ≥ 0 or none" and keys["recency"].default is None
    split = {key.name: key for key in keys_of(Experiment.model_fields["split"].annotation)}
    assert split["kind"].kind == "`leave-one-out`, `ratio`, `time`, `unseen-users`, `next-basket`"
