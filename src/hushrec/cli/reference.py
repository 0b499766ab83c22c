"""Reference of all configuration keys, generated from their models (docs/reference.md)."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

import hushrec
from hushrec.errors import MissingExtraError
from hushrec.federation.experiment import SECTIONS, Experiment, preset_names
from hushrec.methods.base import Method, Tunable, method_class, method_names

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
    about = (found.__doc__ or "").strip().splitlines()[0]
    noised = [] if found.under_noise is None else keys_of(found.under_noise.Config)
    options, tuned = keys_of(found.Config), _tuned(found)
    phases, noised_phases = _phases(found), _phases(found.under_noise)
    return MethodDescription(name, about, options, presets, tuned, noised, phases, noised_phases)


def _phases(found: type[Method] | None) -> list[dict[str, Any]]:
    phases = () if found is None else found().phases
    return [{"name": p.name, "rounds": p.rounds, "uploads": p.uploads} for p in phases]


def _tuned(found: type[Method]) -> list[str]:
    method = found(found.Config())
    return list(method.search) if isinstance(method, Tunable) else []


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
        kind = Experiment.model_fields[section].annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel), "a section is a model"
        parts += [f"## `{section}`", _one_line(kind.__doc__ or ""), _table(keys_of(kind))]
    parts.append("## Methods")
    for name in method_names():
        parts += _method_section(describe_method(name))
    return "\n\n".join(part for part in parts if part) + "\n"


def _method_section(found: MethodDescription) -> list[str]:
    lines = [f"### `{found.name}`", found.about]
    if found.presets:
        lines.append(f"Presets: {', '.join(f'`{name}`' for name in found.presets)}.")
    if found.tuned:
        lines.append(f"`hushrec tune` looks for {', '.join(f'`{name}`' for name in found.tuned)}.")
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
