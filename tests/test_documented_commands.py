"""Whatever README and docs tell people to type works, and prints what they show.

Documents are played from top to bottom in a folder of their own. Where nothing is shown for a
command, less is trained: the embedded data in place of real data sets and with fewer viewers, two
rounds, two trials. What is not played here is named below with the reason, and still has to be
understood by the command line: options, methods, presets and keys of `--set` exist.
"""

import re
import shutil
import subprocess
import tomllib
from functools import partial
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from documented import DOCUMENTS, REPO, Step, spoken, steps
from hushrec.cli import main
from hushrec.data import synthetic
from hushrec.federation.experiment import ExperimentRequest, parse_settings

NOT_PLAYED = {
    r"hushrec studio": "goes on until it is stopped: tests/studio",
    r"hushrec federate rehearse": "starts processes and waits for them: tests/deployment",
    r"hushrec federate (server|node|run|status)": "needs what another terminal runs: as above",
    r"hushrec node (recommend|export)": "needs a node that has trained: tests/deployment",
    r"hushrec reproduce (?!list)": "hours, on real data: tests/reproduce",
    r"hushrec audit": "a minute: tests/cli/test_audit_command.py",
    r"hushrec train .*--method (cooccurrence|two-tower)": "tests/test_example_package.py",
    r"hushrec train .*largest-rows": "tests/test_example_package.py",
    r"make |pip |python ": "checked by name, below",
}
ALL = [step for document in DOCUMENTS for step in steps(document)]
COMMANDS = [step for step in ALL if not step.python]
EMBEDDED = ("demo", "receipts")
"""Data sets that need no download."""
FEWER = 220
"""Viewers of the embedded data where no figures are shown."""


def reason_not_to_play(step: Step) -> str | None:
    return next((why for like, why in NOT_PLAYED.items() if re.match(like, step.text)), None)


def understood(words: list[str]) -> click.Context:
    """Let the command line read a command without doing it."""
    command: click.Command = main
    context = click.Context(main, info_name="hushrec")
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"no command {name}"
        command, parent = found, context
        context = click.Context(command, info_name=name, parent=parent)
    return command.make_context(context.info_name, words, parent=context.parent)


# ---------------------------------------------------------------- all of them


def test_documents_have_commands():
    """So that a broken reader of documents does not pass for documents without commands."""
    assert len(COMMANDS) > 80
    assert len({step.document for step in COMMANDS}) >= 10
    assert sum(bool(step.shown) for step in COMMANDS) >= 5
    assert [like for like in NOT_PLAYED if not any(re.match(like, s.text) for s in COMMANDS)] == []


@pytest.mark.parametrize("step", [s for s in COMMANDS if s.words[0] == "hushrec"], ids=str)
def test_the_command_line_understands_it(step, monkeypatch):
    given = understood(step.words[1:]).params
    asked = given.get("method")
    if asked is None or "cooccurrence" in step.text or "two-tower" in step.text:
        return
    # A preset that a search is to write is there only when the document is played.
    preset = given.get("preset")
    preset = None if preset and "/" in preset else preset
    settings = parse_settings(given.get("pairs", ()))
    if "largest-rows" not in step.text:
        ExperimentRequest("demo", asked, preset=preset, settings=settings).experiment()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(REPO).as_posix())
def test_commands_in_sentences_name_what_there_is(document):
    """They may leave out what is meant, so the options alone are looked up."""
    for step in spoken(document):
        command: click.Command = main
        context = click.Context(main)
        words = step.text.split()[1:]
        while isinstance(command, click.Group) and words and re.fullmatch("[a-z-]+", words[0]):
            found = command.get_command(context, words.pop(0))
            assert found is not None, step
            command = found
        known = {name for option in command.params for name in option.opts}
        asked = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert set(asked) - known - {"--help"} == set(), step


def test_examples_of_the_help_are_understood():
    """Every command's own examples, too."""
    found = 0
    stack: list[tuple[click.Command, click.Context]] = [(main, click.Context(main))]
    while stack:
        command, context = stack.pop()
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None
                stack.append((below, click.Context(below, info_name=name, parent=context)))
        text = re.sub(r"\\\n\s*", "", command.help or "")
        for line in text.splitlines():
            if line.strip().startswith("hushrec "):
                understood(Step("", 0, line.partition(" > ")[0].strip()).words[1:])
                found += 1
    assert found > 40


@pytest.mark.parametrize("step", [s for s in COMMANDS if s.words[0] != "hushrec"], ids=str)
def test_other_programs_find_what_is_named(step):
    program, *words = step.words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.M)
        assert set(words) <= set(targets)
    elif program == "pip":
        project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
        assert words.pop(0) == "install"
        if words[0] == "-c":
            assert (REPO / words[1]).is_file()
            words = words[2:]
        for word in words:
            place, bracket, extras = word.rstrip("]").partition("[")
            assert place == "hushrec" or (REPO / place / "pyproject.toml").is_file()
            assert not bracket or set(extras.split(",")) <= set(project["optional-dependencies"])
    elif program == "python":
        module = words[1].replace(".", "/") if words[0] == "-m" else words[0]
        assert (REPO / module).exists() or (REPO / f"{module}.py").exists()
    else:
        assert program == "printf"


# ---------------------------------------------------------------- played


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Files that documents speak of: ratings, films, viewers, a history, atomic files."""
    folder = tmp_path_factory.mktemp("prepared")
    generator = np.random.default_rng(0)
    cells = generator.permutation(30 * 40)[:600]
    rows = [f"u{c % 30},i{c // 30},{1 + c % 5},{1000 + n}" for n, c in enumerate(cells.tolist())]
    (folder / "ratings.csv").write_text("\n".join(["user,item,rating,timestamp", *rows]))
    films = [f"i{n},Film {n},{'drama|war' if n % 3 else 'comedy'},{1950 + n}" for n in range(40)]
    (folder / "films.csv").write_text("\n".join(["item,title,genres,year", *films]))
    people = [f"u{n},{18 + n},{'F' if n % 2 else 'M'}" for n in range(30)]
    (folder / "people.csv").write_text("\n".join(["user,age,gender", *people]))
    (folder / "anna.txt").write_text("film-0012\nfilm-0340\n")
    atomic = {
        "inter": ["user_id:token,item_id:token,rating:float,timestamp:float", *rows],
        "item": ["item_id:token,movie_title:token_seq,class:token_seq,year:token", *films],
        "user": ["user_id:token,age:token,gender:token", *people],
    }
    for kind, lines in atomic.items():
        text = "\n".join(lines).replace(",", "\t").replace("|", " ")
        (folder / f"ml-100k.{kind}").write_text(text)
    return folder


@pytest.fixture
def place(prepared, tmp_path, monkeypatch):
    """A folder with these files, and a cache of its own."""
    for file in prepared.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def shortened(step: Step) -> list[str]:
    """Return what is done in place of a command for which nothing is shown."""
    words = step.words[1:]
    if words[0] in ("train", "tune"):
        changes = {"--rounds": "2"} if "--resume" not in words else {}
        if words[0] == "tune":
            changes["--trials"] = "2"
        data = words[words.index("--data") + 1] if "--data" in words else "demo"
        if data not in EMBEDDED and not Path(data).exists():
            changes["--data"] = "demo"
            words = [word.replace(f"tunes/{data}-", "tunes/demo-") for word in words]
        if "--seeds" in words:
            changes["--seeds"] = "2"
        for option, value in changes.items():
            if option in words:
                words[words.index(option) + 1] = value
            else:
                words += [option, value]
        if words[0] == "train" and "--out" not in words:
            words += ["--overwrite"]  # another example went to the same place
    if words[:2] == ["federate", "init"] and "--data" in words:
        words[words.index("--data") + 1] = "demo"
    return words


def play(step: Step, whole: set[str]) -> None:
    """Do what a document says, and hold what it prints against what is shown.

    Runs in the folders ``whole`` are not cut short: something is shown of them.
    """
    if step.python:
        if re.search(r"^(import|from) hushrec", step.text, re.M):
            exec(compile(step.text, str(step), "exec"), {"__name__": step.document})
        return
    if reason_not_to_play(step):
        return
    if step.words[0] == "printf":
        subprocess.run(["bash", "-c", step.text], check=True)
        return
    words = step.words[1:] if step.shown or whole & set(step.words) else shortened(step)
    if words[:2] == ["federate", "init"] and Path(words[2]).exists():
        words[2] += f"-{step.line}"  # another way to begin, not the next step
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, f"{step}\n{words}\n{done.output}"
    if "--node" in words and "anna" in words:  # whose folder is then copied to her laptop
        shutil.copytree(Path(words[2]) / "nodes" / "anna", "anna")
    printed = " ".join(done.stdout.split())
    for line in step.shown:
        assert " ".join(line.split()) in printed, f"{step}\nshows {line}\nand not\n{done.stdout}"


PLAYED = [
    document
    for document in DOCUMENTS
    if any(step.python or reason_not_to_play(step) is None for step in steps(document))
]


@pytest.mark.parametrize("document", PLAYED, ids=lambda path: path.relative_to(REPO).as_posix())
def test_a_document_is_played(document, place, monkeypatch):
    told = steps(document)
    if not any(step.shown for step in told if reason_not_to_play(step) is None):
        monkeypatch.setattr(synthetic, "demo", partial(synthetic.demo, viewers=FEWER))
    if any("runs/monday" in step.text for step in told):
        for day in ("monday", "tuesday", "private"):
            private = ["--privacy", "central", "--epsilon", "4", "--rounds", "1"]
            words = ["train", "--method", "fedmf", *private, "--out", f"runs/{day}"]
            assert CliRunner().invoke(main, words).exit_code == 0
    named = [word for step in told if step.shown for word in step.words]
    for step in told:
        play(step, whole={word for word in named if word.startswith("runs/")})
