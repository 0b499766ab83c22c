"""Experiments: what decides a run, refused when wrong, the same after a round trip."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from hushrec.errors import ConfigError
from hushrec.federation.experiment import (
    Experiment,
    ExperimentRequest,
    parse_settings,
    preset_names,
    read_preset,
)
from hushrec.methods.base import method_class, method_names

BUILT_IN = (
    "central-mf",
    "fedmf",
    "fedncf",
    "fedrap",
    "fedrecon",
    "fedrkg",
    "local-only",
    "negative-counter",
    "neumf",
    "pfedrec",
    "popularity",
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lrr": 1}, r"unknown option of pfedrec: 'lrr'; did you mean 'lr'\?"),
        ({"zzz": 1}, r"unknown option of pfedrec: 'zzz'; known: .*batch"),
        ({"cohort.sise": 3}, r"'cohort\.sise'; did you mean 'size'\?"),
        ({"evaluation.evry": 3}, r"'evaluation\.evry'; did you mean 'every'\?"),
        ({"split.kid": "time"}, r"'split\.kid'; did you mean 'kind'\?"),
        ({"store.knd": "file"}, r"'store\.knd'; did you mean 'kind'\?"),
        ({"cohrt.size": 3}, r"unknown section 'cohrt'.*did you mean 'cohort'\?"),
        ({"d": 0}, "'d' = 0"),
        ({"d": -4}, "'d' = -4"),
        ({"d": 2.5}, r"'d' = 2\.5"),
        ({"lr": 0}, "'lr' = 0"),
        ({"lr": "fast"}, "'lr' = 'fast'"),
        ({"batch": 0}, "'batch' = 0"),
        ({"negatives": -1}, "'negatives' = -1"),
        ({"epochs": 0}, "'epochs' = 0"),
        ({"item_rate": -1}, "'item_rate' = -1"),
        ({"init_std": -1}, "'init_std' = -1"),
        ({"cohort.size": 0}, r"cohort\.size"),
        ({"cohort.probability": 1.2}, r"cohort\.probability"),
        ({"cohort.kind": "some"}, r"cohort\.kind"),
        ({"split.kind": "leave-two-out"}, r"split\.kind"),
        ({"split.test": 0}, r"split\.test"),
        ({"split.min_train": 0}, r"split\.min_train"),
        ({"evaluation.every": 0}, r"evaluation\.every"),
        ({"evaluation.k": [0]}, r"evaluation\.k"),
        ({"evaluation.select": "hitrate@10"}, "hitrate"),
        ({"evaluation.patience": -1}, r"evaluation\.patience"),
        ({"store.budget_gb": 0}, r"store\.budget_gb"),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["pfedrec", "fedmf"])
def test_what_is_wrong_is_refused_by_name(method, settings, message):
    with pytest.raises(ConfigError, match=message.replace("pfedrec", method)):
        ExperimentRequest("demo", method, settings=settings).experiment()


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"rounds": -3}, {"seed": -1}, {"protocol": "honourable"}]
)
def test_wrong_top_level_values(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ExperimentRequest("demo", "pfedrec", **wrong).experiment()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("method", ["pfedrec", "fedmf", "central-mf"])
def test_a_rate_is_a_number(method, value):
    with pytest.raises(ConfigError, match="'lr'"):
        ExperimentRequest("demo", method, settings={"lr": value}).experiment()


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"unknown method 'pfedrek'; did you mean 'pfedrec'\?"):
        ExperimentRequest("demo", "pfedrek").experiment()
    with pytest.raises(ConfigError, match=r"unknown preset 'papper'.*did you mean 'paper'\?"):
        ExperimentRequest("demo", "pfedrec", preset="papper").experiment()
    with pytest.raises(ConfigError, match="has no presets"):
        ExperimentRequest("demo", "popularity", preset="paper").experiment()


def test_later_settings_win():
    base = ExperimentRequest("demo", "pfedrec", preset="paper").experiment()
    assert base.evaluation.select == "hr@10"
    assert base.preset == "paper"
    more = ExperimentRequest(
        "demo", "pfedrec", preset="paper", settings={"lr": 0.7, "evaluation.k": [3]}, rounds=7
    ).experiment()
    assert (more.rounds, more.options["lr"], more.evaluation.k) == (7, 0.7, (3,))
    assert more.evaluation.select == "hr@10"
    assert more.options["d"] == base.options["d"]
    assert more.protocol == "honest"


@pytest.mark.parametrize("method", BUILT_IN)
def test_options_are_written_out_in_full(method):
    made = ExperimentRequest("demo", method).experiment()
    config = method_class(method).Config()
    assert made.options == config.model_dump(mode="json", exclude_none=True)
    assert made.make_method().config == config
    assert made.rounds == method_class(method)().planned_rounds


def test_a_frozen_experiment():
    made = ExperimentRequest("demo", "fedmf").experiment()
    with pytest.raises(ValidationError):
        made.rounds = 3
    with pytest.raises(ValidationError):
        made.cohort.size = 3


positive = st.floats(1e-6, 1e6)
cohorts = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"cohort.kind": st.just("fixed"), "cohort.size": st.integers(1, 10**6)}),
    st.fixed_dictionaries(
        {"cohort.kind": st.just("poisson"), "cohort.probability": st.floats(1e-9, 1)}
    ),
)
requests = st.builds(
    ExperimentRequest,
    st.text(min_size=1),
    st.sampled_from(["fedmf", "pfedrec", "local-only"]),
    protocol=st.sampled_from(["honest", "published"]),
    rounds=st.integers(1, 10**6),
    seed=st.integers(0, 2**63 - 1),
    settings=st.builds(
        lambda cohort, others: cohort | others,
        cohorts,
        st.fixed_dictionaries(
            {},
            optional={
                "lr": positive,
                "item_rate": st.floats(0, 1e6),
                "d": st.integers(1, 4096),
                "split.kind": st.sampled_from(["leave-one-out", "ratio", "time", "unseen-users"]),
                "split.valid": st.floats(0.01, 0.49),
                "split.min_train": st.integers(1, 9),
                "evaluation.k": st.lists(st.integers(1, 100), min_size=1, max_size=4),
                "evaluation.select": st.sampled_from(["auc", "hr@1", "ndcg@33"]),
                "store.budget_gb": positive,
            },
        ),
    ),
)


@given(requests)
@settings(max_examples=150)
def test_toml_round_trip(request):
    experiment = request.experiment()
    assert Experiment.from_toml(experiment.to_toml()) == experiment


def test_toml_that_is_wrong():
    text = ExperimentRequest("demo", "fedmf").experiment().to_toml()
    with pytest.raises(ConfigError, match=r"run/config\.toml: not valid TOML"):
        Experiment.from_toml(text + "\n[[[", "run/config.toml")
    with pytest.raises(ConfigError, match=r"unknown key in run/config\.toml: 'sed'.*'seed'"):
        Experiment.from_toml("sed = 1\n" + text, "run/config.toml")
    with pytest.raises(ConfigError, match="data"):
        Experiment.from_toml("", "run/config.toml")


def test_settings_of_the_command_line():
    assert parse_settings(
        ("lr=0.05", "d=8", "cohort.kind=fixed", "evaluation.k=[5, 10]", "a=true", "b=1e-3")
    ) == {"lr": 0.05, "d": 8, "cohort.kind": "fixed", "evaluation.k": [5, 10], "a": True, "b": 1e-3}
    assert parse_settings(("name='quoted'", "text=a=b", "cohort.size=none", "empty=")) == {
        "name": "quoted",
        "text": "a=b",
        "cohort.size": "none",
        "empty": "",
    }
    for wrong in ("lr", "=3", ""):
        with pytest.raises(ConfigError, match="expected key=value"):
            parse_settings((wrong,))


def test_none_is_a_word_where_it_is_a_value_and_else_nothing():
    def made(**settings):
        text = ExperimentRequest("demo", "fedrkg", settings=settings).experiment().to_toml()
        again = Experiment.from_toml(text)  # as `--resume` reads it
        return again, again.make_method().config

    assert made(guidance="none")[1].guidance == "none"
    assert made()[1].clip == 1.0
    assert made(clip="none")[1].clip is None, "not the default, which it would be if left out"
    assert made(clip=None)[1].clip is None
    assert made(**{"cohort.size": "none"})[0].cohort.size is None
    assert made(**{"privacy.mode": "none"})[0].privacy.mode == "none"
    with pytest.raises(ConfigError, match=r"'lr' = 'none': Input should be a valid number"):
        made(lr="none")
    with pytest.raises(ConfigError, match=r"'clip' = -1"):
        made(**{"cohort.size": "none", "clip": -1})
    with pytest.raises(ConfigError, match=r"'cohort.kind' = 'bad'"):
        made(**{"cohort.size": "none", "cohort.kind": "bad"})


@pytest.mark.parametrize("method", BUILT_IN)
def test_every_preset_is_an_experiment(method):
    for preset in preset_names(method):
        made = ExperimentRequest("demo", method, preset=preset).experiment()
        made.make_method()
        given = read_preset(method, preset)
        # Whatever the file says is what the experiment holds, except the options' section name.
        held = made.model_dump(mode="json")
        for key, value in given.items():
            if isinstance(value, dict):
                assert value.items() <= {k: v for k, v in held[key].items() if k in value}.items()
            else:
                assert held[key] == value


def test_pfedrec_ships_the_papers_settings():
    assert "paper" in preset_names("pfedrec")
    options = ExperimentRequest("ml-100k", "pfedrec", preset="paper").experiment().options
    assert (options["lr"], options["item_rate"], options["d"]) == (0.1, 80.0, 32)


def every_model(model, seen):
    if model not in seen:
        seen.add(model)
        for info in model.model_fields.values():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                every_model(info.annotation, seen)
    return seen


@pytest.mark.parametrize(
    "model",
    sorted(
        every_model(Experiment, set()) | {method_class(n).Config for n in BUILT_IN},
        key=lambda m: m.__name__,
    ),
    ids=lambda m: m.__name__,
)
def test_every_config_is_frozen_and_strict(model):
    assert model.model_config["frozen"] is True
    assert model.model_config["extra"] == "forbid"
    assert model.__doc__


def test_names_are_sorted_and_unique():
    assert method_names() == sorted(set(method_names()))
    assert (
        tomllib.loads(ExperimentRequest("demo", "fedmf").experiment().to_toml())["method"]
        == "fedmf"
    )
