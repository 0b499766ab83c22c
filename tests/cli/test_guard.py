"""Whatever happens in a command ends in a sentence: bad paths, no memory, faults of our own."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from hushrec.cli import main
from hushrec.cli.options import PATH, SOURCE


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Callable[[BaseException], Result]:
    """Let a command fail in its middle."""

    def fail(error: BaseException) -> Result:
        def raise_it() -> int:
            raise error

        monkeypatch.setattr("hushrec.cli.methods.usable_cores", raise_it)
        return CliRunner().invoke(main, ["doctor"])

    return fail


def test_a_fault_of_ours_is_a_sentence_and_its_traceback_a_file(
    failing: Callable[[BaseException], Result], cache: Path
) -> None:
    result = failing(KeyError("x\x1b[31m" + "y\n" * 2000))
    assert result.exit_code == 70
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("hushrec: this is a bug in hushrec: KeyError (")
    assert "Please report it" in line
    assert len(line) < 600
    assert line.isprintable()
    assert str(cache / "last-error.log") in line
    log = (cache / "last-error.log").read_text()
    assert log.startswith("hushrec 0.")
    assert "Traceback (most recent call last)" in log
    assert "raise_it" in log


def test_where_no_log_can_be_kept_it_says_how_to_see_the_traceback(
    failing: Callable[[BaseException], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    result = failing(KeyError("x"))
    assert (result.exit_code, len(result.stderr.splitlines())) == (70, 1)
    assert "HUSHREC_TRACEBACK=1" in result.stderr
    monkeypatch.setenv("HUSHREC_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in failing(KeyError("x")).stderr


@pytest.mark.parametrize(
    ("error", "exit_code", "part"),
    [
        (MemoryError("Unable to allocate 7 TiB"), 2, "7 TiB): use less data, a smaller d"),
        (MemoryError(), 2, "not have enough memory"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "/a"), 2, "/a: Read-only file system"),
        (OSError("no words from the system"), 2, "no words from the system"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_what_is_nobodys_fault_is_a_sentence(
    error: BaseException,
    exit_code: int,
    part: str,
    failing: Callable[[BaseException], Result],
) -> None:
    result = failing(error)
    assert result.exit_code == exit_code
    (line,) = result.stderr.splitlines()
    assert line.startswith("hushrec: ")
    assert part in line


def test_a_reader_that_went_away_is_no_error(failing: Callable[[BaseException], Result]) -> None:
    result = failing(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))
    assert result.output == ""


def test_a_term_ends_a_command_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        "hushrec.cli.methods.usable_cores", lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    result = CliRunner().invoke(main, ["doctor"])
    assert (result.exit_code, result.stderr) == (130, "hushrec: stopped\n")
    assert signal.getsignal(signal.SIGTERM) is before


# ---------------------------------------------------------------- paths


def commands(
    group: click.Group = main, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


PATHS = [
    pytest.param(words, command, parameter, id=" ".join((*words, parameter.name or "")))
    for words, command in commands()
    for parameter in command.params
    if parameter.type in (PATH, SOURCE)
]


def test_no_path_goes_unchecked() -> None:
    assert len(PATHS) > 40
    for words, command in commands():
        for parameter in command.params:
            assert not isinstance(parameter.type, click.Path | click.File), (words, parameter)
            named = {"FILE", "DIR", "RUN", "NAME|FILE"} & {
                parameter.make_metavar(click.Context(command))
            }
            assert not named or parameter.type in (PATH, SOURCE), (words, parameter)


@pytest.mark.parametrize(("words", "command", "parameter"), PATHS)
def test_every_path_is_checked(
    words: tuple[str, ...],
    command: click.Command,
    parameter: click.Parameter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "round").symlink_to("round")
    for bad in ("x" * 300, os.fsdecode(b"\xff"), "round"):
        arguments = [*words]
        for other in command.params:
            if other is parameter:
                value = bad
            elif other.required or isinstance(other, click.Argument):
                value = "1"
            else:
                continue
            arguments += [value] if isinstance(other, click.Argument) else [other.opts[0], value]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith("hushrec: ")
        assert any(part in line for part in ("too long", "UTF-8", "symbolic links"))
    assert [path.name for path in tmp_path.iterdir()] == ["round"]
