"""Numbers that nobody can mean are refused by their types, at once, and nothing is made."""

import time

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from hushrec.cli import main
from hushrec.data.splitting import SplitConfig
from hushrec.errors import ConfigError
from hushrec.federation.experiment import Experiment, ExperimentRequest
from hushrec.methods.base import method_class, method_names
from hushrec.privacy.accountant import Gaussian, Poisson, noise_for
from hushrec.testing import taste_world

PRIVACY = ("--population", "100", "--rounds", "10", "--delta", "1e-4", "--cohort", "10")


@pytest.mark.parametrize(
    "words",
    [
        ("--set", "lr=1e308"),
        ("--set", "lr=inf"),
        ("--set", "d=1000000000"),
        ("--set", "hidden=[16, 99999999]"),
        ("--set", "epochs=100000000000000000000"),
        ("--set", "evaluation.sampled=1000000000000"),
        ("--set", "evaluation.k=[5, 1000000000]"),
        ("--rounds", "1000000000"),
        ("--rounds", "-1"),
        ("--seed", "-1"),
        ("--seed", "9" * 30),
        ("--seeds", "9" * 20),
        ("--threads", "9" * 20),
        ("--threads", "9" * 10_000),
        ("--privacy", "central", "--epsilon", "1e308"),
        ("--privacy", "central", "--epsilon", "1e-308"),
        ("--privacy", "central", "--epsilon", "nan"),
        ("--privacy", "central", "--set", "privacy.noise=1e308"),
        ("--privacy", "local-laplace", "--scale", "1e308"),
        ("--privacy", "central", "--epsilon", "1", "--clip", "1e308"),
        ("--set", "split.min_train=" + "9" * 20),
        ("--set", "store.budget_gb=1e308"),
    ],
)
def test_training_refuses_before_a_folder_is_made(tmp_path, monkeypatch, words):
    monkeypatch.setattr("hushrec.cli.train.load_with_progress", lambda *_, **__: taste_world())
    out = tmp_path / "run"
    result = CliRunner().invoke(main, ["train", "--method", "pfedrec", *words, "--out", str(out)])
    assert result.exit_code == 2, result.output
    assert not out.exists()
    assert len(result.output) < 2_500


@pytest.mark.parametrize(
    "words",
    [
        ("epsilon", "--noise", "1e308", *PRIVACY),
        ("epsilon", "--noise", "1e-308", *PRIVACY),
        ("epsilon", "--noise", "nan", *PRIVACY),
        ("epsilon", "--noise", "0.001", *PRIVACY),
        ("epsilon", "--noise", "1", *PRIVACY[:-1], "1e-308"),
        ("epsilon", "--noise", "1", *PRIVACY[:-1], "nan", "--sampling", "fixed"),
        ("epsilon", "--noise", "1", *PRIVACY, "--rounds", "9" * 30),
        ("noise", "--epsilon", "1e308", *PRIVACY),
        ("noise", "--epsilon", "1e-308", *PRIVACY),
    ],
)
def test_questions_about_privacy_end(words):
    began = time.process_time()
    result = CliRunner().invoke(main, ["privacy", *words])
    assert result.exit_code == 2, result.output
    assert time.process_time() - began < 10


def test_no_option_of_any_method_takes_a_number_without_a_bound():
    for name in method_names():
        config = method_class(name).Config
        for key, field in config.model_fields.items():
            if field.annotation in (int, float):
                for huge in (10**18, float("inf")):
                    with pytest.raises(ValidationError):
                        config(**{key: huge})


def test_sections_are_bounded_and_seeds_may_be_large():
    assert ExperimentRequest("demo", "fedmf", seed=2**62).experiment().seed == 2**62
    with pytest.raises(ConfigError, match="rounds = 1e"):
        ExperimentRequest("demo", "fedmf", rounds=10**9).experiment()
    text = ExperimentRequest("demo", "fedmf").experiment().to_toml()
    with pytest.raises(ConfigError, match="every"):
        Experiment.from_toml(text.replace("every = 1", f"every = {10**15}"))


def test_dates_are_as_large_as_clocks_make_them():
    """Milliseconds since 1970, and before it."""
    split = SplitConfig(kind="time", valid_from=-86_400_000, test_from=1_790_000_000_000)
    assert split.test_from == 1_790_000_000_000


def test_a_large_epsilon_is_answered_in_seconds():
    noise = noise_for(1e6, 1e-5, 1, lambda z: Gaussian(z, Poisson(0.1), "zero-out-one"))
    assert noise == 0.125


def test_settings_that_are_no_toml_and_presets_that_are_no_tables(tmp_path, monkeypatch):
    preset = tmp_path / "p.toml"
    monkeypatch.setattr("hushrec.cli.train.load_with_progress", lambda *_, **__: taste_world())
    for text in (
        "options = 5",
        "privacy = 'x'",
        "[" * 5_000,
        "a = " + "[" * 5_000,
        "\0",
        "x" * 2**21,
    ):
        preset.write_text(text)
        words = ["train", "--preset", str(preset), "--out", str(tmp_path / "run")]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2, result.output
        assert "p.toml" in result.output
    nested = ["train", "--set", "lr=" + "[" * 5_000, "--out", str(tmp_path / "run")]
    assert CliRunner().invoke(main, nested).exit_code == 2
    assert not (tmp_path / "run").exists()
