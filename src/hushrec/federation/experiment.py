"""`Experiment`: everything that decides the outcome of a run; `ExperimentRequest` makes one.

What does not decide it (threads, chunk size, the output folder) is not in here. Round trip:
``Experiment.from_toml(experiment.to_toml()) == experiment``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tomli_w
from pydantic import (
    BaseModel,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from hushrec.config import DEFAULT_METHOD, DEFAULT_UNDER_NOISE, Seed, Settings
from hushrec.data import Interactions, load
from hushrec.data.partition import SilosConfig
from hushrec.data.splitting import Split, SplitConfig, make_split
from hushrec.data.tables import RECOGNISED
from hushrec.data.text import OnProgress, no_progress
from hushrec.data.views import CohortConfig, Protocol
from hushrec.errors import ConfigError, HushrecError, cut, listed, nearest
from hushrec.evaluation.evaluator import EvaluationConfig
from hushrec.federation.guard import GuardConfig
from hushrec.methods.base import Method, method_class, method_names
from hushrec.privacy.config import PrivacyConfig
from hushrec.private import StoreConfig
from hushrec.streams import Streams

Model = TypeVar("Model", bound=BaseModel)


class Experiment(Settings):
    """Data, split, method, cohort and evaluation of one run."""

    data: str
    """A name of the catalogue, an imported name, or a path."""
    items: str | None = None
    """Path of the public list of items, where one was given with data that is a file."""
    columns: dict[str, str | int] | None = None
    """Columns of a file that were named, by role: user, item, value, time, title, delimiter."""
    method: str
    """A name that `hushrec methods` lists."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the method, complete."""
    preset: str | None = None
    """Where the options came from, for the record."""
    protocol: Protocol = "honest"
    """`published` reproduces the papers' figures and leaks the held-out item."""
    rounds: Annotated[int, Field(ge=1)] = 100
    """How many there are at most.  [as many as the method plans]"""
    seed: Seed = 0
    """Of everything that is drawn, but for the noise of privacy."""
    split: SplitConfig = SplitConfig()
    cohort: CohortConfig = CohortConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    store: StoreConfig = StoreConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    silos: SilosConfig = SilosConfig()
    guard: GuardConfig = GuardConfig()

    @field_validator("columns")
    @classmethod
    def _known_roles(cls, columns: dict[str, str | int] | None) -> dict[str, str | int] | None:
        for role in columns or ():
            if role not in vars(RECOGNISED):
                raise ValueError(f"unknown column '{role}'{nearest(role, vars(RECOGNISED))}")
        return columns

    @model_validator(mode="after")
    def _no_hidden_leak(self) -> Experiment:
        kept = self.split.repeats == "keep" and not self.split.next_basket
        if kept and self.protocol == "honest":
            raise ValueError(
                "split.repeats = 'keep' leaves held-out items among the training items; it needs "
                "protocol = 'published', or split.kind = 'next-basket' to predict what is bought "
                "again"
            )
        return self

    def resolved(self, data: Interactions | None) -> Experiment:
        """Return the same experiment with what the split leaves to the data decided.

        People's rows decide nothing where privacy is promised, and in a federation, of which no
        data is given. The papers' protocol takes the rows as they are.
        """
        in_order, has_baskets = True, False
        if data is not None and self.protocol == "honest":
            in_order = data.in_order
            has_baskets = not self.privacy.promises and data.has_baskets
        split = self.split.resolved(in_order, has_baskets)
        return self.model_copy(update={"split": split})

    def split_data(self, data: Interactions) -> Split:
        """Split data as configured; people's data stops no run that promises privacy."""
        streams, tolerant = Streams(self.seed), self.privacy.promises
        return make_split(data, self.split, streams, self.silos, tolerant=tolerant)

    def load_data(self, progress: OnProgress = no_progress) -> Interactions:
        """Load the data by its name or path, as it was loaded for the run."""
        named: Any = self.columns or {}
        return load(self.data, items=self.items, progress=progress, **named)

    @property
    def method_class(self) -> type[Method]:
        """The class of the configured method; under noise on sums, of its variant for noise."""
        return _class_for(self.method, self.privacy.mode)

    def make_method(self) -> Method:
        """Build the configured method."""
        found = self.method_class
        self.check_silos(found)
        return found(_validated(found.Config, self.options, f"option of {self.method}"))

    def check_silos(self, method: type[Method]) -> None:
        """Refuse silos with a method that trains one user per client."""
        if self.silos.kind != "none" and not method.traits.silos:
            raise ConfigError(
                f"{self.method} trains one user per client: use silos.kind = none, or a method "
                "for silos (lipm, pfedme)"
            )

    def without_paths(self) -> Experiment:
        """Return the same experiment without places on this machine: files by their names."""
        names = {
            key: Path(value).name
            for key in ("data", "items", "preset")
            if (value := getattr(self, key)) is not None
        }
        return self.model_copy(update={**names, "store": StoreConfig()})

    def to_toml(self) -> str:
        """Write as TOML; what is None is left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def from_toml(cls, text: str, source: str = "config.toml") -> Experiment:
        """Read what `to_toml` wrote."""
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: not valid TOML: {error}") from None
        return _validated(cls, values, f"key in {source}")


LARGEST_PRESET = 1 << 20
"""Bytes of a preset."""
NONE = "none"
ON_SUMS = ("central", "distributed")
"""Privacy modes that add noise to sums."""
SECTIONS = ("split", "cohort", "evaluation", "store", "privacy", "silos", "guard")


@dataclass(frozen=True)
class ExperimentRequest:
    """What somebody asks to be trained: names, and settings that differ from the defaults.

    The command line, Python, `hushrec tune` and a configuration file all make one; `experiment`
    completes it. None means not given.
    """

    data: str
    method: str | None = None
    """A name that `hushrec methods` lists.  [fedmix, and fednext where noise is added to sums]"""
    items: str | None = None
    """Path of the public list of items, for data that is a file."""
    columns: Mapping[str, str | int] | None = None
    """Columns of a file, by role; others are recognised by their usual names."""
    preset: str | None = None
    """A set of options that ships with the method, or a file of one's own."""
    protocol: Protocol | None = None
    rounds: int | None = None
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options of the method (``lr``), and dotted keys of the other sections (``cohort.size``)."""

    def of(self, data: Interactions) -> ExperimentRequest:
        """Return the request for this data, named so that a run finds it again."""
        return replace(self, data=data.name, items=data.items_file, columns=data.columns or None)

    def chosen(self) -> tuple[str, type[Method], dict[str, Any]]:
        """Return the method's name, its class under this privacy, and the values of the preset."""
        method = self.method or DEFAULT_METHOD
        given = read_preset(method, self.preset)
        mode = self.settings.get("privacy.mode") or given.get("privacy", {}).get("mode")
        if self.method is None and mode in ON_SUMS:
            method = DEFAULT_UNDER_NOISE
            given = read_preset(method, self.preset)
        return method, _class_for(method, mode), given

    def experiment(self) -> Experiment:
        """Return defaults, preset and settings as one experiment, later ones winning."""
        method, found, given = self.chosen()
        values: dict[str, Any] = {"options": {}}
        # Baselines do not converge; their last round is the result.
        every = found.traits.every if found.traits.learns else found.traits.rounds
        if every > 1:
            values["evaluation"] = {"every": every}
        for key, value in given.items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in self.settings.items():
            section, dot, name = key.partition(".")
            if not dot:
                values["options"][key] = value
            elif section in SECTIONS:
                values.setdefault(section, {})[name] = value
            else:
                hint = nearest(section, SECTIONS)
                raise ConfigError(f"unknown section '{section}' in '{key}'{hint}")
        named = {"protocol": self.protocol, "rounds": self.rounds, "seed": self.seed}
        values |= {name: value for name, value in named.items() if value is not None}
        for name in values["options"]:
            if name not in found.Config.model_fields:
                hint = option_hint(name, found.Config.model_fields)
                raise ConfigError(f"unknown option of {method}: '{cut(name)}'{hint}")
        config = _validated(found.Config, values["options"], f"option of {method}")
        values["options"] = _plain(config)
        values.setdefault("rounds", found(config).planned_rounds)
        names = {"data": self.data, "items": self.items, "columns": self.columns}
        names |= {"method": method, "preset": self.preset}
        experiment = _validated(Experiment, {**names, **values}, "setting")
        experiment.check_silos(found)
        return experiment


NAMED = {"privacy": "privacy.mode"} | {
    name: f"privacy.{name}"
    for name in ("epsilon", "delta", "scale", "clip", "budgets", "epsilon_min", "epsilon_max")
}
"""Settings with a keyword of `train` and an option of `hushrec train` of their own."""


def with_named(settings: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings and those that are `NAMED`; refuse two values of one setting."""
    given = {NAMED[name]: value for name, value in named.items() if value is not None}
    return merged(settings, given)


def merged(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings; refuse two values of one."""
    for key in settings.keys() & others.keys():
        if settings[key] != others[key]:
            raise ConfigError(
                f"{key} is given twice, as {settings[key]!r} and as {others[key]!r}: leave one out"
            )
    return {**settings, **others}


def option_hint(name: str, known: Iterable[str]) -> str:
    """Return which methods have an option of this name, or the nearest known name."""
    owners = []
    for method in method_names():
        with suppress(HushrecError):  # a method whose extra is missing
            found = method_class(method)
            forms = [found] if found.under_noise is None else [found, found.under_noise]
            if any(name in form.Config.model_fields for form in forms):
                owners.append(method)
    if owners:
        return f"; {listed(owners, quote='')} {'has' if len(owners) == 1 else 'have'} it"
    return nearest(name, known)


def _class_for(method: str, privacy_mode: str | None) -> type[Method]:
    """Find a method by name; under noise on sums, its variant for noise."""
    found = method_class(method)
    if privacy_mode not in ON_SUMS:
        return found
    if method == DEFAULT_METHOD:
        raise ConfigError(
            f"{method} learns its ensemble from exact sums, and privacy.mode = {privacy_mode} adds "
            f"noise to them: use the method {DEFAULT_UNDER_NOISE}"
        )
    return found.under_noise or found


def preset_names(method: str) -> list[str]:
    """Return the presets that ship for a method."""
    folder = resources.files("hushrec") / "presets" / method
    files = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def read_preset(method: str, preset: str | None) -> dict[str, Any]:
    """Read a preset: a small commented TOML file in the shape of an `Experiment`.

    A name that ends in ``.toml`` is a file of one's own, for example what `hushrec tune` wrote.
    """
    if preset is None:
        return {}
    if preset.endswith(".toml"):
        return _read_toml(Path(preset), "preset")
    known = preset_names(method)
    if preset not in known:
        hint = nearest(preset, known) if known else f"; {method} has no presets"
        raise ConfigError(f"unknown preset '{preset}' of {method}{hint}")
    file = resources.files("hushrec") / "presets" / method / f"{preset}.toml"
    return tomllib.loads(file.read_text("utf-8"))


def _read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read a file of one's own, whose sections are sections."""
    try:
        with path.open("rb") as own:
            text = own.read(LARGEST_PRESET + 1)
        if len(text) > LARGEST_PRESET:
            raise ConfigError(f"{path}: larger than a {what} can be")
        found = tomllib.loads(text.decode())
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for name in ("options", *SECTIONS):
        if not isinstance(found.get(name, {}), dict):
            raise ConfigError(f"{path}: '{name}' must be a section, [{name}]")
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Read a run's config.toml, or a file with a few keys of one, as fields of a request."""
    values = _read_toml(path, "configuration")
    for key in values:
        if key not in Experiment.model_fields:
            raise ConfigError(f"{path}: unknown key '{key}'{nearest(key, Experiment.model_fields)}")
    settings = values.pop("options", {})
    for section in SECTIONS:
        settings |= {f"{section}.{key}": at for key, at in values.pop(section, {}).items()}
    _validated(Experiment, {"data": "", "method": "", **values}, f"key in {path}")
    return {**values, "settings": settings}


def parse_settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parse ``key=value`` pairs of the command line; values are TOML, or text if they are not."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {pair}: expected key=value, for example --set lr=0.05")
        try:
            parsed = tomllib.loads(f"value = {text}")
        except (ValueError, RecursionError):
            parsed = {"value": text}
        if len(parsed) > 1:
            raise ConfigError(f"--set {key}=…: one value at a time")
        settings = merged(settings, {key: parsed["value"]})
    return settings


def _plain(config: BaseModel) -> dict[str, Any]:
    """Return all options as TOML can hold them: None, where it is no default, is "none"."""
    fields = type(config).model_fields
    values = config.model_dump(mode="json")
    kept = {k: v for k, v in values.items() if v is not None or fields[k].default is not None}
    return {name: NONE if value is None else value for name, value in kept.items()}


def _validated(model: type[Model], values: Mapping[str, Any], what: str) -> Model:
    """Validate, and turn pydantic's report into one sentence that says what to change."""
    try:
        return model.model_validate(_with_none(model, values))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            *sections, name = map(str, first["loc"])
            section: type[BaseModel] = model
            for each in sections:
                declared = section.model_fields[each].annotation
                if isinstance(declared, type) and issubclass(declared, BaseModel):
                    section = declared
            hint = nearest(name, section.model_fields)
            raise ConfigError(f"unknown {what}: '{path}'{hint}") from None
        if first["type"] == "value_error":  # a rule of ours says itself what to change
            raise ConfigError(first["msg"].removeprefix("Value error, ")) from None
        given = first.get("input")
        if first["type"] in ("less_than_equal", "less_than"):
            most = first["ctx"].get("le", first["ctx"].get("lt"))
            first["msg"] = f"use a smaller {first['loc'][-1]}, at most {most:,}"
        raise ConfigError(f"{what} '{path}' = {given!r}: {first['msg']}") from None


def _with_none(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Read "none" as None where None fits and the word does not: TOML has no None."""
    read = dict(values)
    for name, declared in model.model_fields.items():
        given, kind = values.get(name), cast(Any, declared.annotation)
        if given == NONE:
            accepts = TypeAdapter(kind).validator.isinstance_python
            read[name] = None if accepts(None) and not accepts(NONE) else given
        elif isinstance(given, Mapping) and isinstance(kind, type) and issubclass(kind, BaseModel):
            read[name] = _with_none(kind, given)
    return read
