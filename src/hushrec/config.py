"""`Settings`: typed options, frozen, unknown keys refused, and no number without a bound.

An absurd number (`lr` = 1e308, a billion rounds) is refused before training, not found out by an
overflow, a full memory or a program that does not end.

The registry (`names`, `find`) reads entry points: a package declares a name in one of the groups
``hushrec.methods``, ``hushrec.experts``, ``hushrec.datasets``, ``hushrec.metrics``,
``hushrec.mechanisms``, ``hushrec.backends`` and ``hushrec.callbacks`` of its ``pyproject.toml``, as
hushrec does itself.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hushrec.errors import ConfigError, nearest

LARGEST = 1e12
"""Of a real number whose type has no bound of its own."""
LARGEST_COUNT = 1_000_000
"""Of a whole number whose type has no bound of its own."""

Width = Annotated[int, Field(ge=1, le=4_096)]
"""Of a row or a layer: more than that fills a memory and has never helped."""
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Clients = Annotated[int, Field(ge=0, le=10**9)]
"""How many of them."""
Moment = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A time in the data's own unit."""


class Settings(BaseModel):
    """Base of everything that can be set."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _bounded(self) -> Settings:
        for name, field in type(self).model_fields.items():
            if not _has_bound((field.annotation, *field.metadata)):
                _require_bounded(name, getattr(self, name))
        return self


def _has_bound(types: tuple[Any, ...]) -> bool:
    """Return whether a type, or a type inside of it, declares an upper bound."""
    return any(
        getattr(kind, "le", getattr(kind, "lt", None)) is not None
        or _has_bound((*get_args(kind), *getattr(kind, "metadata", ())))
        for kind in types
    )


def _require_bounded(name: str, value: object) -> None:
    if isinstance(value, tuple):
        for one in value:
            _require_bounded(name, one)
    elif isinstance(value, int):
        if abs(value) > LARGEST_COUNT:
            raise ValueError(f"{name} = {value:.6g}: use at most {LARGEST_COUNT:,}")
    elif isinstance(value, float) and not (math.isfinite(value) and abs(value) <= LARGEST):
        raise ValueError(f"{name} = {value:g}: use a number of at most {LARGEST:g}")


DEFAULT_METHOD = "fedmix"
"""Trained where no method is named, by every command and in Python."""
DEFAULT_UNDER_NOISE = "fednext"
"""Trained in its place where noise is added to sums: `DEFAULT_METHOD` needs exact ones."""


@cache
def _installed(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by name; several packages may declare one name."""
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"hushrec.{group}"):
        points.setdefault(point.name, []).append(point)
    return points


def names(group: str) -> list[str]:
    """Return the installed names of a group such as ``methods``."""
    return sorted(_installed(group))


def find(group: str, name: str) -> Any:
    """Return the object that a name of a group stands for; its module is imported now."""
    what = group.removesuffix("s")
    points = _installed(group).get(name, [])
    if len(points) > 1:
        packages = " and ".join(sorted({point.dist.name for point in points if point.dist}))
        raise ConfigError(f"two packages bring a {what} '{name}': {packages}; uninstall one")
    if not points:
        known = names(group)
        hint = nearest(name, known) if known else f"; no {what} is installed"
        raise ConfigError(f"unknown {what} '{name}'{hint}")
    (point,) = points
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} '{name}': cannot import {point.value}: {error}") from None
