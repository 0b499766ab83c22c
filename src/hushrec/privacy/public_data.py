"""What a guarantee takes as public: the list of items, categories, counts, dates.

Noise covers what the rounds release. What a run is built from before the first of them, such as who
is on the list of items, is released as well, and no noise covers it: it must not come from people's
rows. So it is declared with the data, or refused.
"""

from __future__ import annotations

from collections.abc import Collection

from hushrec.data.interactions import Features, Interactions, Numeric
from hushrec.data.views import TrainView
from hushrec.errors import ConfigError
from hushrec.privacy.config import PrivacyConfig

NO_LIST = "the list of items is not covered: it was taken from the users' rows"
NO_CATEGORIES = "the categories of '{}' are not covered: they were taken from the users' rows"
ACCEPT = "or accept that they are not covered with privacy.undeclared = true"


def check_declared(config: PrivacyConfig, data: Interactions, people: Features) -> tuple[str, ...]:
    """Refuse what was taken from people's rows, or return what is not covered if that is accepted.

    ``people`` are the features of users as training sees them, their usual context among them.
    """
    found = [
        name
        for name, column in people.items()
        if not isinstance(column, Numeric) and not column.declared
    ]
    if config.undeclared:
        if data.items_declared and not found:
            raise ConfigError(
                "privacy.undeclared does nothing: the list of items and all categories are "
                "declared; leave it out"
            )
        items = () if data.items_declared else (NO_LIST,)
        return (*items, *(NO_CATEGORIES.format(name) for name in found))
    if not data.items_declared:
        raise ConfigError(
            f"{data.name}: the items were taken from the users' rows, and one that a single user "
            "touched shows that this user was there, whatever the noise: give a public list with "
            "--items FILE where the file is read (in Python, data.with_public_items(ids)), "
            f"{ACCEPT}"
        )
    if found:
        raise ConfigError(
            f"{data.name}: the categories of '{found[0]}' were taken from the users' rows, and one "
            "that a single user has shows that this user was there, whatever the noise: declare "
            f"them, as in --user-feature '{found[0]}:category:A|B|C' (in Python, "
            f"Categorical.of(entries, names)), {ACCEPT}"
        )
    return ()


def public_facts(nobody: TrainView, undeclared: Collection[str] = ()) -> tuple[str, ...]:
    """Say what is public of the data that a stack of ``nobody`` comes from."""
    people, described = nobody.user_features, " and what describes them"
    items = f"the list of {nobody.n_items:,} items{described if nobody.item_features else ''}"
    facts = [] if NO_LIST in undeclared else [items]
    ranges = [name for name, c in people.items() if isinstance(c, Numeric) and c.low is not None]
    named = [name for name, c in people.items() if not isinstance(c, Numeric) and c.declared]
    for what, names in (("categories", named), ("range", ranges)):
        if names:
            facts.append(f"the {what} of {', '.join(names)}")
    return tuple(facts)
