"""What is wrong with a path is said once, in one place, before anything is done with it."""

import os
from pathlib import Path

import pytest

from hushrec.errors import ConfigError
from hushrec.io.files import LONGEST_NAME, checked_path, shown_path


def test_an_ordinary_path_stays_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("runs/first", "runs", "a.csv", str(tmp_path / "x" / "y"), "../elsewhere"):
        assert checked_path(given) == Path(given)
    assert checked_path("x" * LONGEST_NAME).name == "x" * LONGEST_NAME


def test_a_link_and_a_path_without_a_name_are_followed(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "ahead").symlink_to("not-yet")
    monkeypatch.chdir(tmp_path / "real")
    assert checked_path("../link") == tmp_path / "real"
    assert checked_path("../ahead") == tmp_path / "not-yet"
    assert checked_path(".") == tmp_path / "real"
    assert checked_path("..") == tmp_path
    assert checked_path("../link/run") == Path("../link/run")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("", "empty"),
        ("a\0b", "zero byte"),
        ("/", "file system's root"),
        ("/..", "file system's root"),
        ("x" * 300, "300 bytes is too long"),
        ("é" * (LONGEST_NAME // 2 + 1), "too long"),
        ("a/" * 5000, "too long"),
        (os.fsdecode(b"caf\xe9.csv"), r"caf\xe9.csv: the name is not UTF-8"),
        ("round", "symbolic links"),
        ("round/below", "symbolic links"),
    ],
)
def test_a_path_that_cannot_be_used_is_a_sentence(name, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(ConfigError) as error:
        checked_path(name)
    assert part in str(error.value)
    assert len(str(error.value)) < 250
    str(error.value).encode()


def test_the_folder_we_are_in_may_be_gone(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(ConfigError, match="No such file"):
        checked_path(".")


def test_what_is_shown_can_be_shown():
    assert shown_path("\x1b[31mred\x07") == r"\x1b[31mred\x07"
    assert len(shown_path("x" * 5000)) == 81
