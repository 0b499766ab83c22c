"""The public surface by section; ``python tests/surface.py > docs/api.md`` writes its page."""

import inspect
from dataclasses import dataclass, field
from importlib import import_module

INTRODUCTION = """# Python

<!-- Written by `python tests/surface.py > docs/api.md`. -->

`import hushrec` has the names that a user needs, `hushrec.extend` those that an extension needs
([how](extend.md)), `hushrec.testing` the contracts that an extension passes. Modules with a section
of their own below are public too. Everything else may change without a word in the
[changes](../CHANGELOG.md).
"""


@dataclass(frozen=True)
class Section:
    """Names of one module that a reader looks for together."""

    title: str
    module: str
    names: tuple[str, ...]
    values: dict[str, str] = field(default_factory=dict)
    """What names without a docstring of their own are: aliases of types."""


SECTIONS = (
    Section(
        "Train and use",
        "hushrec",
        ("train", "Run", "SeedRuns", "Model", "Recommendation", "Machine", "HushrecError"),
    ),
    Section("Compare runs", "hushrec", ("compare", "Comparison")),
    Section("Data", "hushrec", ("load", "Interactions")),
    Section("Write a callback", "hushrec", ("Callback",)),
    Section(
        "What callbacks receive",
        "hushrec.extend",
        ("Experiment", "RoundRecord", "EvaluationRecord", "TrainingResult"),
    ),
    Section(
        "Write a method",
        "hushrec.extend",
        (
            *(
                "Method",
                "MethodConfig",
                "Phase",
                "Traits",
                "TrainView",
                "Ragged",
                "Round",
                "Streams",
            ),
            *("Fitted", "Update", "ClientRows", "KeyedRows", "FixedPoint", "Total", "UploadShape"),
            *("PerClient", "PerClientRows", "PerClientTable"),
        ),
        {
            "Shared": "The shared parameters by name: a mapping of arrays.",
            "Private": "The private parameters of a batch of clients by name.",
            "PrivateFields": "What a method keeps on a client: fields by name.",
        },
    ),
    Section(
        "Say how devices score",
        "hushrec.extend",
        (
            *("Exports", "ExportsUser", "ItemCounts", "ItemFactors", "ItemNetworks"),
            *("ItemWeights", "RowNetwork"),
        ),
    ),
    Section("Write an expert", "hushrec.extend", ("Expert", "ExpertsConfig", "Part")),
    Section("Write a metric", "hushrec.extend", ("Metric", "ListMetric", "Ranks", "expected_gain")),
    Section(
        "Write a data set",
        "hushrec.extend",
        ("DataSet", "DataFolder", "Interactions", "Categorical", "MultiCategorical", "Numeric"),
    ),
    Section(
        "Write a mechanism",
        "hushrec.extend",
        (
            *("Mechanism", "LocalMechanism", "PrivacyTarget", "Release", "SecretRound", "Steps"),
            *("Pure", "Gaussian", "Everybody", "Grid", "sensitivity"),
        ),
    ),
    Section("Write a backend", "hushrec.extend", ("InProcess", "Protection")),
    Section("Refuse what cannot be", "hushrec.extend", ("ConfigError", "DataError")),
    Section(
        "Contract tests for your own parts",
        "hushrec.testing",
        (
            *(
                "MethodContract",
                "ExpertContract",
                "MetricContract",
                "MechanismContract",
                "BackendContract",
            ),
            *("Federation", "clients_of", "taste_world"),
        ),
    ),
    Section(
        "Results of a run",
        "hushrec.runs.schema",
        ("Summary", "Baselines", "UserCounts", "PrivacyStatement", "RoundLine"),
    ),
    Section("Rows of a comparison", "hushrec.runs.compared", ("ComparedRun",)),
    Section("Explain one user's list", "hushrec.analysis.run", ("one_user", "OneUser", "Listed")),
    Section(
        "Account for privacy",
        "hushrec.privacy.accountant",
        (
            *("Accountant", "Gaussian", "Pure", "Poisson", "FixedSize", "Everybody"),
            *("epsilon_of", "noise_for"),
        ),
    ),
    Section("Attack a run", "hushrec.audit", ("audit",)),
    Section("Serve on a device", "hushrec.serving.recommender", ("Recommender", "Suggestion")),
    Section(
        "Errors",
        "hushrec.errors",
        (
            *("HushrecError", "InputError", "DataError", "ConfigError", "RunError", "DiskError"),
            *("DivergedError", "MessageError", "TooFewError", "FederationError", "StoppedError"),
            "MissingExtraError",
        ),
    ),
)


def names_of(module: str) -> set[str]:
    """Return the pinned names of a module."""
    sections = [section for section in SECTIONS if section.module == module]
    return {name for section in sections for name in (*section.names, *section.values)}


def page() -> str:
    """Return docs/api.md: a table of each section, and the details that the site expands."""
    detailed: set[int] = set()
    return INTRODUCTION + "".join(_part(section, detailed) for section in SECTIONS)


def _part(section: Section, detailed: set[int]) -> str:
    """Return a section; what an earlier one has in detail stands in the table alone."""
    module = import_module(section.module)
    things = {name: getattr(module, name) for name in section.names}
    rows = {name: _first_sentence(thing) for name, thing in things.items()} | section.values
    new = [name for name, thing in things.items() if id(thing) not in detailed]
    detailed |= {id(thing) for thing in things.values()}
    return "\n".join(
        [
            *(
                "",
                f"## {section.title}",
                "",
                f"From `{section.module}`:",
                "",
                "| name | |",
                "|---|---|",
            ),
            *(f"| `{name}` | {text} |" for name, text in rows.items()),
            "",
            *(f"::: {section.module}.{name}" for name in new),
            *([""] if new else []),
        ]
    )


def _first_sentence(thing: object) -> str:
    """Return the first paragraph of a docstring, as one line of a table."""
    first = (inspect.getdoc(thing) or "").split("\n\n")[0]
    assert first, f"{thing} has no docstring"
    return " ".join(first.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
