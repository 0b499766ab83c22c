"""Options that travel together arrive as one value."""

from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from hushrec.cli.options import default_name, gather


@dataclass(frozen=True)
class Size:
    wide: int
    high: int | None


def test_options_are_gathered_and_keep_their_order():
    @click.command()
    @click.option("--first")
    @gather("size", Size, click.option("--wide", type=int, default=3), click.option("--high"))
    @click.option("--last")
    def command(first: str | None, size: Size, last: str | None) -> None:
        click.echo(f"{first} {size} {last}")

    assert [option.name for option in command.params] == ["first", "wide", "high", "last"]
    said = CliRunner().invoke(command, ["--high", "7", "--last", "x"]).output
    assert said == "None Size(wide=3, high='7') x\n"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("demo", "demo-fedmf"),
        ("amazon-video/fedrkg", "amazon-video-fedrkg-fedmf"),
        ("ratings.csv", "ratings-fedmf"),
        ("deep/er/ratings.csv", "ratings-fedmf"),
    ],
)
def test_a_folder_is_named_after_what_is_trained_in_it(data, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for file in ("ratings.csv", "deep/er/ratings.csv"):
        (tmp_path / file).touch()
    assert default_name(data, "fedmf") == name
