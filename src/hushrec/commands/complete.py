"""What a shell may put where a word is unfinished: methods, data sets, presets, runs.

Switched on by what click prints: ``_HUSHREC_COMPLETE=bash_source hushrec`` (or zsh_source,
fish_source), to be read by the shell.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from hushrec.registry import names

DEEPEST = 3
"""Folders below the one we are in that runs are looked for in."""


def methods_like(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Name methods that begin so."""
    return _items(names("methods"), word)


def data_like(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Name data sets that begin so, and leave files to the shell."""
    from hushrec.data.catalog import names as data_names

    return [*_items(data_names(), word), CompletionItem(word, type="file")]


def presets_like(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Name presets of the method that was said, and leave files to the shell."""
    from hushrec.config import preset_names

    found = preset_names(ctx.params.get("method") or "")
    return [*_items(found, word), CompletionItem(word, type="file")]


def runs_like(ctx: click.Context, param: click.Parameter, word: str) -> list[CompletionItem]:
    """Name folders of runs that begin so; where there are none, leave folders to the shell."""
    found: list[str] = []
    level = [Path()]
    for _ in range(DEEPEST):
        level = [
            each
            for folder in level
            for each in sorted(folder.iterdir())
            if each.is_dir() and not each.name.startswith(".")
        ]
        found += [str(each) for each in level if (each / "config.toml").is_file()]
    return _items(found, word) or [CompletionItem(word, type="dir")]


def _items(known: Iterable[str], word: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in known if name.startswith(word)]
