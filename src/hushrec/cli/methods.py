"""``hushrec methods``, ``doctor`` and ``studio``, and the generated reference of all options."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import click
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from rich.table import Table
from rich.text import Text

import hushrec
from hushrec.api import train
from hushrec.cli.capabilities import capabilities, capability_page, capability_table
from hushrec.cli.options import PATH, complete_methods, json_option
from hushrec.cli.terminal import Console, echo, echo_err, log_traceback, print_json, show
from hushrec.data.sources import cache_dir
from hushrec.data.synthetic import demo
from hushrec.errors import ConfigError, MissingExtraError, RunError, install_command, nearest
from hushrec.federation.experiment import SECTIONS, Experiment, preset_names
from hushrec.io import usable_cores
from hushrec.methods.base import Method, Tunable, method_class, method_names
from hushrec.reporting.html import write_report
from hushrec.reporting.tables import facts_table, plain_table

SHOWN_LIMIT = 1e9
"""Limits from here on are not shown: they only exclude nonsense."""


@dataclass(frozen=True)
class Key:
    """A configuration key."""

    name: str
    default: Any
    kind: str
    """Its allowed values, in words."""
    about: str


@dataclass(frozen=True)
class MethodDescription:
    """Name, options and presets of a method."""

    name: str
    about: str
    """First line of its docstring, or how to install it if an extra is missing."""
    options: list[Key]
    presets: list[str]
    tuned: list[str]
    """Options that `hushrec tune` searches."""
    noised: list[Key]
    """Its options under central or distributed noise, if they differ."""
    phases: list[dict[str, Any]]
    """Name and rounds of each phase, and what a client uploads in it."""
    noised_phases: list[dict[str, Any]]
    """Its phases under central or distributed noise, if they differ."""


def keys_of(model: type[BaseModel]) -> list[Key]:
    """Return the keys of a section or of a method's options."""
    return [
        Key(name, _default(field), _kind(field), _one_line(field.description or ""))
        for name, field in model.model_fields.items()
    ]


def describe_method(name: str) -> MethodDescription:
    """Describe a method."""
    presets = preset_names(name)
    try:
        found = method_class(name)
    except MissingExtraError as error:
        return MethodDescription(name, str(error), [], presets, [], [], [], [])
    method, noised = found(), found.under_noise
    return MethodDescription(
        name,
        about=(found.__doc__ or "").strip().splitlines()[0],
        options=keys_of(found.Config),
        presets=presets,
        tuned=list(method.search) if isinstance(method, Tunable) else [],
        noised=[] if noised is None else keys_of(noised.Config),
        phases=_phases(method),
        noised_phases=[] if noised is None else _phases(noised()),
    )


def _phases(method: Method) -> list[dict[str, Any]]:
    return [{"name": p.name, "rounds": p.rounds, "uploads": p.uploads} for p in method.phases]


def reference() -> str:
    """Return docs/reference.md."""
    top = [key for key in keys_of(Experiment) if key.name not in (*SECTIONS, "options")]
    parts = [
        "# Reference: every key",
        "Written by `hushrec methods --markdown`; a test holds this page to the code. A key of a "
        "section is set with `--set section.key=value`, an option of a method with "
        "`--set option=value`; in a file for `--config`, and in a run's `config.toml`, sections "
        "are tables and options are in `[options]`.",
        "## The experiment",
        _table(top),
    ]
    for section in SECTIONS:
        kind: Any = Experiment.model_fields[section].annotation
        parts += [f"## `{section}`", _one_line(kind.__doc__ or ""), _table(keys_of(kind))]
    parts.append("## Methods")
    for name in method_names():
        parts += _method_section(describe_method(name))
    return "\n\n".join(part for part in parts if part) + "\n"


def _method_section(found: MethodDescription) -> list[str]:
    def quoted(names: list[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    lines = [f"### `{found.name}`", found.about]
    if found.presets:
        lines.append(f"Presets: {quoted(found.presets)}.")
    if found.tuned:
        lines.append(f"`hushrec tune` looks for {quoted(found.tuned)}.")
    lines.append(_table(found.options) if found.options else "It has no options.")
    if found.noised:
        lines += ["Under `--privacy central` or `distributed`:", _table(found.noised)]
    return lines


def _table(keys: list[Key]) -> str:
    rows = []
    for key in keys:
        default = format_default(key.default)
        code = f"`{default}`" if default else ""
        kind, about = (text.replace("|", "\\|") for text in (key.kind, key.about))
        rows.append(f"| `{key.name}` | {code} | {kind} | {about} |")
    return "\n".join(["| key | default | values | description |", "|---|---|---|---|", *rows])


def format_default(default: Any) -> str:
    """Format a default as ``--set`` accepts it."""
    if default is None:
        return "none"
    return default if isinstance(default, str) else json.dumps(default)


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return ""
    default = field.get_default(call_default_factory=True)
    return TypeAdapter(Any).dump_python(default, mode="json")


def _kind(field: FieldInfo) -> str:
    whole: Any = field.annotation
    for bound in field.metadata:
        whole = Annotated[whole, bound]
    return _words(TypeAdapter(whole).json_schema())


def _words(schema: dict[str, Any]) -> str:
    """Describe the values that a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_words(one) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"a list of {_words(schema.get('items', {}))}"
    names = {"null": "none", "integer": "a whole number", "number": "a number"}
    names |= {"boolean": "true or false", "string": "text", "object": "a table"}
    marks = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    given = {mark: schema[at] for at, mark in marks.items() if at in schema}
    limits = [f"{mark} {at:g}" for mark, at in given.items() if abs(at) < SHOWN_LIMIT]
    return " ".join([names.get(kind, kind), ", ".join(limits)]).strip()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def package_table() -> str:
    """Return the table of packages in docs/architecture.md, from the packages' own docstrings."""
    lines = ["| package | role |", "|---|---|"]
    root = Path(hushrec.__file__).parent
    for file in sorted(root.rglob("__init__.py")):
        name = file.parent.relative_to(root).as_posix()
        if name != ".":
            text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
            lines.append(f"| `{name}/` | {_one_line(text.partition(chr(10) * 2)[0])} |")
    return "\n".join(lines) + "\n"


@click.command("methods")
@click.argument("name", metavar="[NAME]", required=False, shell_complete=complete_methods)
@click.option(
    "--capabilities",
    "as_table",
    is_flag=True,
    help="What every method can do, and the sentence of a refusal.",
)
@click.option("--markdown", is_flag=True, help="Every key of every section and method, as a page.")
@json_option
def methods_command(name: str | None, as_table: bool, markdown: bool, as_json: bool) -> None:
    """List the installed methods, or describe one and its options.

    \b
    hushrec methods
    hushrec methods fedmix
    hushrec methods --json
    hushrec methods --markdown
    hushrec methods --capabilities
    hushrec methods fedrap --capabilities
    """
    if markdown:
        page = capability_page(capability_table()) if as_table else reference()
        echo(page.rstrip("\n"))
        return
    known = method_names()
    if name is not None and name not in known:
        raise ConfigError(f"unknown method '{name}'{nearest(name, known)}")
    if as_table:
        _show_capabilities(name, as_json)
        return
    entries = [describe_method(one) for one in known if name in (None, one)]
    if as_json:
        found = [
            {**asdict(one), "options": {key.name: asdict(key) for key in one.options}}
            for one in entries
        ]
        print_json(found if name is None else found[0])
    elif name is None:
        _list(entries)
    else:
        _describe(entries[0])


def _show_capabilities(name: str | None, as_json: bool) -> None:
    if name is not None:
        cells = capabilities(name)
        show(as_json, cells, facts_table({column: why or "yes" for column, why in cells.items()}))
        return
    table = capability_table()
    refused = {method: [c for c, why in row.items() if why] for method, row in table.items()}
    rows = {
        method: f"all but {', '.join(columns)}" if columns else "everything"
        for method, columns in refused.items()
    }
    hint = "hushrec methods NAME --capabilities says why a method refuses something"
    show(as_json, table, facts_table(rows), Text(hint, style="dim"))


def _list(entries: list[MethodDescription]) -> None:
    rows = [(entry.name, entry.about, " ".join(entry.presets)) for entry in entries]
    console = Console()
    console.print(_text_table(None, ("method", "description", "presets"), rows))
    console.print("hushrec methods NAME describes a method and its options", style="dim")


def _describe(entry: MethodDescription) -> None:
    console = Console()
    console.print(entry.name, style="bold", end="  ")
    console.print(entry.about)
    if entry.presets:
        console.print(f"presets: {', '.join(entry.presets)} (--preset NAME)")
    if entry.tuned:
        console.print(f"searched by hushrec tune: {', '.join(entry.tuned)}")
    noised, heads = "where noise is added to sums", ("phase", "rounds", "a client uploads")
    for phases, title in ((entry.phases, None), (entry.noised_phases, noised)):
        if phases:
            rows = [(phase["name"], str(phase["rounds"]), phase["uploads"]) for phase in phases]
            console.print("", _text_table(title, heads, rows), sep="\n")
    for keys, title in ((entry.options, None), (entry.noised, noised)):
        if keys:
            rows = [
                (f"{key.name}={format_default(key.default)}", key.kind.replace("`", ""), key.about)
                for key in keys
            ]
            table = _text_table(title, ("--set", "values", "description"), rows)
            console.print("", table, sep="\n")


def _text_table(
    title: str | None, heads: tuple[str, str, str], rows: Sequence[tuple[str, str, str]]
) -> Table:
    table = plain_table(title, heads[0])
    for head in heads[1:]:
        table.add_column(head, overflow="fold", justify="right" if head == "rounds" else "left")
    for row in rows:
        table.add_row(*row)
    return table


EXTRAS = {"neural": "torch", "flower": "flwr", "tune": "optuna", "parquet": "pyarrow"}


@click.command("doctor")
@click.option(
    "--compile",
    "compiles",
    is_flag=True,
    help="Compile the kernels of the defaults now, with and without privacy, so that the first "
    "training does not wait.",
)
@json_option
def doctor_command(compiles: bool, as_json: bool) -> None:
    """Show versions, threads, extras, methods, and where data is looked for.

    \b
    hushrec doctor
    hushrec doctor --compile     # about a minute, once after an installation
    """
    if compiles:
        _compile()
    packages = ("hushrec", "numpy", "scipy", "numba", "pydantic", "safetensors")
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "threads": usable_cores(),
        "extras": {
            extra: importlib.metadata.version(module) if importlib.util.find_spec(module) else None
            for extra, module in EXTRAS.items()
        },
        "methods": method_names(),
        "data": {"HUSHREC_DATA": os.environ.get("HUSHREC_DATA"), "cache": str(cache_dir())},
    }
    rows = {
        "python": f"{found['python']} on {found['platform']}",
        "versions": "  ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "threads": str(found["threads"]),
        **{
            f"extra {extra}": version or f"not installed: {install_command(extra)}"
            for extra, version in found["extras"].items()
        },
        "methods": "  ".join(found["methods"]),
        "data": found["data"]["HUSHREC_DATA"] or "HUSHREC_DATA is not set",
        "cache": found["data"]["cache"],
    }
    show(as_json, found, facts_table(rows))


def _compile() -> None:
    """Compile all kernels of the defaults: with and without privacy, of training and of serving."""
    few = {"newton_rounds": 1, "network_rounds": 2, "evaluation.every": 1}
    data = demo(viewers=600)  # users for two batches
    defaults: list[dict[str, Any]] = [{"settings": few}, {"privacy": "central", "epsilon": 8.0}]
    with TemporaryDirectory() as folder:
        for number, options in enumerate(defaults):
            out = Path(folder) / f"run-{number}"
            run = train(data, out=out, progress=False, **options)
            write_report(run)
            run.recommend(data.users[:2].tolist())
            run.recommend("somebody new", history=data.items[:3].tolist())


@click.command("studio")
@click.argument("folder", metavar="[FOLDER]", type=PATH, default="runs")
@click.option(
    "--host",
    default="127.0.0.1",
    help="Address to listen on; on another than the loopback one, requests need a token.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8610,
    help="Port to listen on; 0 takes a free one.",
)
@click.option("--open", "open_it", is_flag=True, help="Open it in a browser.")
def studio_command(folder: Path, host: str, port: int, open_it: bool) -> None:
    """Browse a folder of runs: progress, comparisons, users, privacy, leak.

    \b
    hushrec studio
    hushrec studio runs --port 0 --open
    hushrec studio runs --host 0.0.0.0     # prints an address with a token; plain HTTP

    It only reads. Ctrl-C ends it.
    """
    from hushrec.studio.server import studio_server

    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder; train something first: hushrec train")
    with studio_server(folder, host, port, log_traceback) as (server, address):
        echo(f"{folder} is shown at {address.url}")
        if address.token:
            echo_err("the connection is not encrypted: prefer a tunnel, ssh -L")
        if open_it:
            webbrowser.open(address.url)
        server.serve_forever()
