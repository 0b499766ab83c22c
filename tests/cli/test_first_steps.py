"""What a newcomer types first: version, help, methods, and the tabulator key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from numba.core.dispatcher import Dispatcher
from rich.table import Table

from hushrec import train
from hushrec.cli import COMMANDS, main
from hushrec.cli.terminal import Console
from hushrec.errors import ConfigError, RunError, install_command

HEAVY = "{'numpy', 'numba', 'scipy', 'pydantic', 'torch', 'jinja2'}"


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_the_first_words_do_not_wait_for_imports(word: str) -> None:
    code = (
        "import sys\nfrom hushrec.cli import main\n"
        f"try: main(['{word}'])\nexcept SystemExit: print(sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_of_a_command_what_it_says_of_itself(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None and command.help is not None
    assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name][1]
    assert command.name == name


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["trian"])
    assert result.exit_code == 2 and "No such command 'trian'" in result.stderr
    assert "Exit codes: 0 done" in CliRunner().invoke(main, ["--help"]).stdout


def test_one_method_is_described() -> None:
    shown = CliRunner().invoke(main, ["methods", "fednext"]).stdout
    assert "window=30" in shown and "searched by hushrec tune: window" in shown
    found = json.loads(CliRunner().invoke(main, ["methods", "pfedrec", "--json"]).stdout)
    assert found["options"]["lr"]["kind"] == "a number > 0" and "paper" in found["presets"]
    wrong = CliRunner().invoke(main, ["methods", "fednxt"])
    assert wrong.exit_code == 2 and "did you mean 'fednext'" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["train", "--method", "pfed"], "pfedrec"),
        (["methods", "fedn"], "fednext"),
        (["tune", "--data", "ml-1"], "ml-100k"),
        (["train", "--method", "pfedrec", "--preset", "pa"], "paper"),
        (["compare", "runs/"], "runs/first"),
        (["recommend", "ru"], "runs/first"),
    ],
)
def test_the_tabulator_knows_methods_data_presets_and_runs(
    words: list[str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.toml").touch()
    asked = {
        "_HUSHREC_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["hushrec", *words]),
        "COMP_CWORD": str(len(words)),
    }
    result = CliRunner().invoke(main, [], env=asked, prog_name="hushrec")
    assert f"plain,{wanted}" in result.stdout.splitlines()


# -------------------------------------------------------------------------- narrow terminals


def wide_table() -> Table:
    table = Table(title="fedmf on demo", box=None)
    table.add_column("who", overflow="fold")
    for name in ("HR@10", "NDCG@10", "MRR@10"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("fedmf", "0.1234 ± 0.0012", "0.0567 ± 0.0008", "0.0345 ± 0.0006")
    table.add_row("chance", "0.0067", "0.0030", "0.0020")
    table.caption = "a word below"
    return table


@pytest.mark.parametrize("width", [28, 40, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_figure_is_cut_however_narrow(
    width: int, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(Console, "is_terminal", terminal)
    Console().print(wide_table())
    out = capsys.readouterr().out
    for figure in ("0.1234 ± 0.0012", "0.0567 ± 0.0008", "0.0345 ± 0.0006", "0.0020"):
        assert figure in out
    assert "…" not in out
    for word in ("fedmf on demo", "a word below", "NDCG@10"):
        assert word in out
    if terminal:
        assert max(len(line) for line in out.splitlines() if "\x1b" not in line) <= width


def test_kernels_are_compiled_before_they_are_needed(tmp_path: Path) -> None:
    """Training and serving the defaults afterwards needs no kernel in a form that is not there."""
    assert CliRunner().invoke(main, ["doctor", "--compile", "--json"]).exit_code == 0

    def forms() -> dict[str, list[object]]:
        modules = [module for name, module in sys.modules.items() if name.startswith("hushrec.")]
        return {
            f"{module.__name__}.{name}": list(kernel.signatures)
            for module in modules
            for name, kernel in vars(module).items()
            if isinstance(kernel, Dispatcher)
        }

    compiled = forms()
    for needed in ("mixture.rerank", "pairs.following_pairs", "ragged.draw_whole"):
        assert compiled[f"hushrec.kernels.{needed}"], needed
    rows = [f"{u},{(u * 7 + n * n) % 53},{n}" for u in range(60) for n in range(12)]
    table = tmp_path / "rows.csv"
    table.write_text("\n".join(["user,item,timestamp", *dict.fromkeys(rows)]))
    few = {"newton_rounds": 1, "network_rounds": 1}
    for data, options in (
        ("demo", {"settings": few}),
        (table, {"settings": few}),
        ("demo", {"privacy": "central", "epsilon": 8}),
    ):
        run = train(data, **options)
        run.recommend(k=3)
        run.recommend("new", history=run.data.items[:2].tolist())
        run.evaluate("hr@10")
        assert forms() == compiled, options


def test_reproduce_outside_a_checkout_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hushrec.__file__", str(tmp_path / "site" / "lib" / "hushrec/__init__.py"))
    told = CliRunner().invoke(main, ["reproduce", "list"])
    assert told.exit_code == 2 and "run this command in a checkout" in told.stderr
    assert len(told.stderr.splitlines()) == 1


def test_the_hint_for_torch_names_the_build_that_the_constraints_name() -> None:
    """The CPU build: without a version pip brings several GB of CUDA packages."""
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    (pinned,) = [line for line in constraints.splitlines() if line.startswith("torch")]
    assert install_command("neural").startswith(f"pip install {pinned} 'hushrec[neural]'")
    assert install_command("tune") == "pip install 'hushrec[tune]'"


def test_errors_speak_the_language_of_the_caller(tmp_path: Path) -> None:
    run = train("demo", "popularity", out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"history=\[") as python:
        run.recommend("somebody")
    assert "--" not in str(python.value)
    told = CliRunner().invoke(main, ["recommend", str(tmp_path / "run"), "--user", "somebody"])
    assert told.exit_code == 2 and "--history FILE" in told.stderr and "history=" not in told.stderr
    with pytest.raises(RunError, match="use resume=True to go on") as python:
        train("demo", "popularity", out=tmp_path / "run")
    assert "--" not in str(python.value)
    again = ["train", "--data", "demo", "--method", "popularity", "--out", str(tmp_path / "run")]
    assert "add --resume to go on" in CliRunner().invoke(main, again).stderr
