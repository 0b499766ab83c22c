"""The setup of a run: each part is worked out once, in a simulation and on a node."""

from collections import Counter

import pytest

import hushrec
from hushrec.data.splitting import Split
from hushrec.federation import setup
from hushrec.federation.experiment import Experiment

CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 8.0, "d": 4}


@pytest.fixture
def calls(monkeypatch):
    """How often each part of a setup is worked out."""
    counts = Counter()

    def count(owner, name):
        worked_out = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return worked_out(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(Experiment, "make_method")
    count(Split, "digest")
    count(Split, "train_view")
    count(setup, "make_plan")
    return counts


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_works_each_part_out_once(saved, tiny, tmp_path, calls):
    out = tmp_path / "run" if saved else None
    hushrec.train(tiny, "fedmf", rounds=2, settings=CENTRAL, out=out)
    assert calls == {"make_method": 1, "digest": 1, "train_view": 1, "make_plan": 1}


def test_unknown_keywords_are_refused_by_name(tiny):
    with pytest.raises(TypeError, match=r"'round', which .*; did you mean 'rounds'"):
        hushrec.train(tiny, "fedmf", round=2)
    with pytest.raises(TypeError, match=r"'over_write', which .*; did you mean 'overwrite'"):
        hushrec.train(tiny, "fedmf", over_write=True)
