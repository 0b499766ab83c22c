"""What is to be reproduced: exhibits, that is tables and figures, from TOML files.

::

    experiments/pfedrec/paper.toml        the paper itself
    experiments/pfedrec/table-2.toml      an exhibit, called pfedrec/table-2

Studies of our own are written like papers, and have a page of their own.
An exhibit has rows and data sets. Each row on each data set is a cell: what the paper prints, and
one task for each protocol. A task is a command; exhibits that need the same command share what it
gave. What a row says of its runs may be said for all rows (``every``), for a protocol and for a
data set (``on``); the more special word wins.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import hushrec
from hushrec.data.views import Protocol
from hushrec.errors import ConfigError, nearest
from hushrec.federation.experiment import preset_names, read_preset

Setting = bool | int | float | str | list[int]
PAPER_FILE = "paper.toml"
AS_PUBLISHED: Mapping[str, Mapping[str, Setting]] = {
    **{name: {"split.order": "time"} for name in ("filmtrust", "frappe", "lastfm-2k/listens-10")},
    **{name: {"split.ties": "file"} for name in ("lastfm-2k/tags-5", "lastfm-2k/tags-10")},
}
"""Papers hold out by the order of the file where data has no times, or ties by months; so do all
tasks on these data sets, under the honest protocol too, where it has to be said."""
EPSILONS = "hushrec privacy tables"
"""The command behind exhibits of kind epsilon."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Said(_Frozen):
    """What a run is told, besides data and protocol."""

    method: str | None = None
    preset: str | None = None
    rounds: Annotated[int, Field(ge=1)] | None = None
    seeds: Annotated[int, Field(ge=1)] | None = None
    """How many, from seed 0 on."""
    set: dict[str, Setting] = Field(default_factory=dict)
    without: str | None = None
    """Why it is not measured here: no such method yet, or no such data."""
    unobtainable: str | None = None
    """Why nobody can measure it: data or figures that are not to be had."""

    @property
    def missing(self) -> str | None:
        """Why there is nothing to run, if so."""
        return self.unobtainable or self.without

    def then(self, more: Said | None) -> Said:
        """Return this, overruled by ``more``."""
        if more is None:
            return self
        given = {k: v for k, v in more.model_dump(include=set(Said.model_fields)).items() if v}
        return Said(**{**self.model_dump(), **given, "set": {**self.set, **more.set}})


class OnData(Said):
    """What is said of one data set."""

    published: Said | None = None
    honest: Said | None = None


class Row(OnData):
    """A row of a table, or a point or curve of a figure."""

    name: str
    data: str | list[str] | None = None
    """Its own data set, where the exhibit has no common ones; those of them it is on.  [all]"""
    paper: dict[str, list[float | None]] | list[float | None] = Field(default_factory=dict)
    """What the paper prints, in the order of the metrics; by data set, where there are several."""
    read: str | None = None
    """Where in a result its figures stand, where it isn't the exhibit's place."""
    line: str | None = None
    """The line of a picture it is a point of, or its name in a forest."""
    at: str | None = None
    """Its place along that line."""
    against: list[str] = Field(default_factory=list)
    """Rows that it is tested against, user by user, on the data sets of both."""
    on: dict[str, OnData] = Field(default_factory=dict)


class Task(_Frozen):
    """One command, and what is done with its result."""

    data: str
    method: str
    preset: str | None = None
    protocol: Protocol = "honest"
    rounds: int | None = None
    seeds: int = 1
    set: dict[str, Setting] = Field(default_factory=dict)

    @cached_property
    def command(self) -> str:
        """The command to type, under which the result is filed."""
        words = ["hushrec", "train", "--data", self.data, "--method", self.method]
        words += ["--preset", self.preset] if self.preset else []
        words += ["--protocol", self.protocol]
        words += ["--rounds", str(self.rounds)] if self.rounds else []
        words += ["--seeds", str(self.seeds)] if self.seeds > 1 else []
        for key, value in self.settings.items():
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        return shlex.join(words)

    @property
    def settings(self) -> dict[str, Setting]:
        """What is set, by name; an experiment's noise can be repeated."""
        mode = self.set.get("privacy.mode") or _mode_of(self.method, self.preset)
        noisy = {} if mode == "none" else {"privacy.noise_seed": 0}
        order = AS_PUBLISHED.get(self.data, {}) if self.protocol == "honest" else {}
        return dict(sorted({**noisy, **order, **self.set}.items()))

    @property
    def folder(self) -> str:
        """Where its run goes, below the folder of all runs."""
        digest = hashlib.blake2b(self.command.encode(), digest_size=4).hexdigest()
        name = f"{self.method}-{self.preset}" if self.preset else self.method
        return f"{self.data.replace('/', '-')}/{self.protocol}/{name}-{digest}"


@cache
def _mode_of(method: str, preset: str | None) -> str:
    """Return the privacy that a preset asks for."""
    if preset is None or preset not in preset_names(method):
        return "none"
    return str(read_preset(method, preset).get("privacy", {}).get("mode", "none"))


class Cell(_Frozen):
    """One row on one data set."""

    row: Row
    label: str
    """The paper's name of the data set; empty where a row has its own."""
    data: str
    paper: tuple[float | None, ...]
    read: str
    tasks: dict[str, Task]
    """By protocol; empty where there is nothing to run."""
    missing: str | None
    """Why there is nothing to run."""
    unobtainable: bool


Kind = Literal["table", "overview", "trends", "dots", "curves", "map", "counts", "epsilon"]
"""Figures in a table, and with it a picture: trends over places, dots where places have no order,
curves over rounds, a map of the items. An overview has all data sets in one table first, and its
picture is a forest of differences. Counts are those of a data set; epsilon is computed, and nothing
is trained for either."""


class Exhibit(_Frozen):
    """A table or a figure of a paper."""

    name: str
    """Of its paper and its file, such as pfedrec/table-2."""
    title: str
    kind: Kind = "table"
    metrics: Annotated[list[str], Field(min_length=1)] = ["hr@10", "ndcg@10"]
    heads: list[str] = Field(default_factory=list)
    """What the paper calls the metrics, where it isn't that."""
    read: str = "test/full"
    """Where in a result its figures stand: test/full, test/sampled99, curve/full, tables/own/full,
    groups/cold, and so on."""
    scale: float = 1.0
    """What the paper's figures are multiplied by: 100 for per cent."""
    digits: int = 4
    one_held_out: bool = False
    """Whether users have one held-out item each, so that printed NDCG and hit rates can be checked
    against each other."""
    protocols: list[Protocol] = ["published", "honest"]
    data: dict[str, str] = Field(default_factory=dict)
    """Our data set for each of the paper's, in its order."""
    every: Said = Said()
    row: list[Row] = Field(default_factory=list)
    tested: list[str] = Field(default_factory=list)
    """The metrics of paired tests, p corrected over them; marks are of the last.  [the last one]"""
    note: str = ""

    @model_validator(mode="after")
    def _fits(self) -> Exhibit:
        if not self.row and self.kind != "epsilon":
            raise ValueError("no [[row]]")
        known = set(self.data)
        for row in self.row:
            if isinstance(row.data, str) == bool(self.data):
                raise ValueError(f"row '{row.name}': data is named by the exhibit or by each row")
            by_data = row.paper if isinstance(row.paper, dict) else {"": row.paper}
            for label, figures in by_data.items():
                if isinstance(row.paper, dict) and label not in known:
                    raise ValueError(f"row '{row.name}': '{label}' is none of the data sets")
                if len(figures) not in (0, len(self.metrics)):
                    raise ValueError(
                        f"row '{row.name}': {len(figures)} figures for {len(self.metrics)} metrics"
                    )
            for name in set(row.data or []) - known if self.data else ():
                raise ValueError(f"row '{row.name}': '{name}' is none of the data sets")
            for name in row.on.keys() - known:
                raise ValueError(f"row '{row.name}': on.{name} is none of the data sets")
            for name in set(row.against) - {other.name for other in self.row}:
                raise ValueError(f"row '{row.name}': against '{name}', which is no row")
        for label in known - {label for row in self.row for label in self._places(row)}:
            raise ValueError(f"no row is on '{label}'")
        names = [row.name for row in self.row]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two rows are called '{name}'")
        return self

    @property
    def shown(self) -> list[str]:
        """What the metrics are called."""
        return self.heads or [metric.upper() for metric in self.metrics]

    @property
    def compared(self) -> list[str]:
        """The metrics of paired tests."""
        return self.tested or self.metrics[-1:]

    def pairs(self, cell: Cell) -> Iterator[tuple[str, Task, Task]]:
        """Return the name of each row that a cell is tested against, with both their tasks."""
        others = {other.row.name: other for other in self.cells if other.label == cell.label}
        for name in cell.row.against:
            for protocol, task in cell.tasks.items():
                if name in others and protocol in others[name].tasks:
                    yield name, task, others[name].tasks[protocol]

    @cached_property
    def cells(self) -> list[Cell]:
        """Its rows on their data sets."""
        found = []
        for row in self.row:
            for label, data in self._places(row).items():
                paper = row.paper.get(label, []) if isinstance(row.paper, dict) else row.paper
                found.append(self._cell(row, label, data, tuple(paper)))
        return found

    def _places(self, row: Row) -> dict[str, str]:
        """Return the data sets that a row is on, by the paper's names."""
        if isinstance(row.data, str):
            return {"": row.data}
        return {name: data for name, data in self.data.items() if name in (row.data or self.data)}

    def _cell(self, row: Row, label: str, data: str, paper: tuple[float | None, ...]) -> Cell:
        here = row.on.get(label)
        common = self.every.then(row).then(here)
        tasks: dict[str, Task] = {}
        for protocol in self.protocols:
            said = self.every.then(row).then(getattr(row, protocol))
            said = said.then(here).then(getattr(here, protocol) if here else None)
            if said.method and not said.missing:
                told = said.model_dump(exclude_none=True, exclude={"without", "unobtainable"})
                tasks[protocol] = Task(data=data, protocol=protocol, **told)
        return Cell(
            row=row, label=label, data=data, paper=paper, read=row.read or self.read, tasks=tasks,
            missing=common.missing, unobtainable=bool(common.unobtainable),
        )  # fmt: skip


class Paper(_Frozen):
    """A paper, or a study of our own, and its exhibits."""

    key: str
    system: str
    """What it is called."""
    cited: str = ""
    page: Annotated[str, Field(pattern=r"^[\w-]+\.md$")] | None = None
    """The file of its folder that shows a study of our own; papers share a page."""
    note: str = ""
    nothing_to_run: dict[str, str] = Field(default_factory=dict)
    """Drawings and lists of settings: figures and tables in which nothing is measured."""
    exhibits: list[Exhibit] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> Paper:
        if not self.cited and self.page is None:
            raise ValueError("a paper is cited, a study of our own has a page")
        return self


Model = TypeVar("Model", bound=BaseModel)


def _read(kind: type[Model], file: Path, **more: Any) -> Model:
    try:
        return kind.model_validate({**more, **tomllib.loads(file.read_text("utf-8"))})
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        said = [str(file), where, first["msg"].removeprefix("Value error, ")]
        raise ConfigError(": ".join(filter(None, said))) from None


def _in_order(file: Path) -> tuple[str, int, str]:
    """Tables before figures, each by number, those of an appendix last."""
    kind, _, number = file.stem.partition("-")
    digits = "".join(filter(str.isdigit, number))
    appendix = number[:1].isalpha()
    return ("1" if kind == "table" else "2") + str(int(appendix)), int(digits or 0), number


def read_papers(folder: Path) -> list[Paper]:
    """Read every paper below the folder ``experiments``, those with a page of their own last."""
    places = sorted(file.parent for file in folder.glob(f"*/{PAPER_FILE}"))
    if not places:
        raise ConfigError(
            f"{folder} has no papers to reproduce: name the folder 'experiments' of a checkout of "
            "hushrec with --experiments DIR"
        )
    papers = []
    for place in places:
        files = [*place.glob("table-*.toml"), *place.glob("figure-*.toml")]
        exhibits = [
            _read(Exhibit, file, name=f"{place.name}/{file.stem}")
            for file in sorted(files, key=_in_order)
        ]
        papers.append(_read(Paper, place / PAPER_FILE, key=place.name, exhibits=exhibits))
    return sorted(papers, key=lambda paper: paper.page is not None)


def experiments_folder(given: Path | None) -> Path:
    """Find the folder ``experiments``: as given, here, or in the checkout this code runs from."""
    if given is not None:
        return given
    here = Path("experiments")
    checkout = Path(hushrec.__file__).parents[2] / "experiments"
    return here if here.is_dir() or not checkout.is_dir() else checkout


def chosen(papers: Sequence[Paper], names: Sequence[str]) -> list[Exhibit]:
    """Return the exhibits of these names; a paper's name means all of its own, ``all`` all."""
    known = {exhibit.name: exhibit for paper in papers for exhibit in paper.exhibits}
    of_paper: Mapping[str, list[str]] = {
        "all": list(known),
        **{paper.key: [exhibit.name for exhibit in paper.exhibits] for paper in papers},
    }
    found: dict[str, Exhibit] = {}
    for name in names:
        if name not in known and name not in of_paper:
            raise ConfigError(f"no table or figure '{name}'{nearest(name, [*known, *of_paper])}")
        found |= {each: known[each] for each in of_paper.get(name, [name])}
    return list(found.values())


def tasks_of(exhibits: Sequence[Exhibit]) -> Iterator[tuple[Exhibit, Cell, Task]]:
    """Return every task with the cell it is for."""
    for exhibit in exhibits:
        for cell in exhibit.cells:
            for task in cell.tasks.values():
                yield exhibit, cell, task
