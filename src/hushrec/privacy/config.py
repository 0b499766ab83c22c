"""`PrivacyConfig`, and checks that refuse a configuration whose guarantee would be false.

The checks run before the first round; each error says what to change. There are no warnings.
`check_privacy` checks the options. `check_declared` checks the data: noise covers only what the
rounds release, so data that a run is built from, such as the list of items, must be declared public
and must not be derived from the users' rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field

from hushrec.config import Seed, Settings
from hushrec.data.interactions import Features, Interactions, Numeric
from hushrec.data.views import CohortConfig, TrainView
from hushrec.errors import ConfigError
from hushrec.methods.base import Method
from hushrec.methods.relations import Relates
from hushrec.privacy.accountant import Neighbours

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Range of useful epsilons."""
NO_LIST = "the list of items is not covered: it was taken from the users' rows"
NO_CATEGORIES = "the categories of '{}' are not covered: they were taken from the users' rows"
ACCOUNTED_UNDER: dict[str, Neighbours] = {"fixed": "replace-one", "poisson": "zero-out-one"}
"""The neighbour relation under which cohorts of a kind are accounted for."""
ACCEPT = "or accept that they are not covered with privacy.undeclared = true"


class PrivacyConfig(Settings):
    """Differential privacy of a run."""

    mode: Literal[
        "none",
        "central",
        "distributed",
        "local-laplace",
        "local-gaussian",
        "local-gradients",
        "mechanism",
    ] = "none"
    """No noise; Gaussian noise on the sum; a share of it from every node; noise on every upload;
    noise on the gradient of every step (FedRKG, section 5.2); or a mechanism of another package
    that states its own guarantee."""
    mechanism: str | None = None
    """Entry point of that mechanism, for `mechanism`."""
    nodes: Annotated[int, Field(ge=2)] | None = None
    """Number of nodes that add noise, for `distributed`."""
    tolerated: Annotated[int, Field(ge=0)] | None = None
    """Nodes that may drop out of a round, or reveal their noise.  [(nodes - 1) // 3]"""
    epsilon: Epsilon | None = None
    """Epsilon of the whole run; the noise is calibrated to it."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Probability with which the guarantee may fail; below 1 / clients.  [1e-5, or a tenth of
    1 / clients if that is less]"""
    noise: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """Noise multiplier of `central`, in place of epsilon."""
    scale: Positive | None = None
    """Scale of local noise, in place of epsilon: b of Laplace, deviation of Gaussian noise."""
    clipping: Literal["none", "flat", "row", "adaptive"] | None = None
    """Kind of clipping.  [flat if `clip` is given; else adaptive for `central`, none for local]"""
    clip: Positive | None = None
    """Norm bound of an upload (L1 for Laplace noise, else L2); initial bound of `adaptive`."""
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Quantile of the clients' norms that an adaptive bound follows.  [0.5]"""
    clip_rate: Positive | None = None
    """Learning rate of an adaptive bound.  [0.2]"""
    bit_noise: Positive | None = None
    """Noise on the count of norms within an adaptive bound.  [1/20 of the cohort, or more]"""
    bit_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of a round's budget for this count, in place of bit_noise: h of DP-PrivRec, where noise
    of z / sqrt(1 - h) and z / sqrt(h) together cost what noise of z does."""
    clip_steps: Literal["geometric", "arithmetic"] | None = None
    """Update of an adaptive bound: by factors, or by differences as in DP-PrivRec.  [geometric]"""
    neighbours: Neighbours | None = None
    """Neighbour relation.  [the one for which the cohort's analysis is valid]"""
    sampling: Literal["poisson", "fixed", "none"] | None = None
    """Expected sampling; an error if it is not the sampling of the cohort."""
    budgets: Literal["activity", "declared"] | None = None
    """Personal budgets, by the rank of a client's interaction count or as users declare them
    (`local-gaussian` only).  [the same epsilon for all]"""
    epsilon_min: Epsilon | None = None
    """Budget of the least active client, for budgets by activity."""
    epsilon_max: Epsilon | None = None
    """Budget of the most active client, for budgets by activity."""
    budget_feature: str | None = None
    """Numeric user feature that holds the declared budgets."""
    sigma: Literal["calibrated", "paper"] | None = None
    """Noise calibrated to the budgets, or DPPS's own clip / epsilon, which exceeds them; the
    statement then gives the true epsilon.  [calibrated]"""
    noise_seed: Seed | None = None
    """Seed of reproducible noise and secret cohorts, for experiments: anyone who knows it can
    remove the noise, and the statement says so.  [a secret key, drawn for each run]"""
    undeclared: bool = False
    """Accept a list of items, or categories of users, that was taken from the users' rows; the
    statement then says that it is not covered."""
    selection_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of epsilon for noisy validation queries, one every `evaluation.every` rounds, of which
    the best selects the round.  [no queries: the last round is released]"""
    layers: tuple[str, ...] = ()
    """Mechanisms of other packages, by entry point, applied to an upload before it is clipped and
    noised; they do not change the guarantee."""
    budget_uploads: Annotated[int, Field(ge=1)] | None = None
    """Number of uploads that a personal budget allows; a client then stops.  [all planned ones]"""

    @property
    def promises(self) -> bool:
        """Whether a privacy mode is set; a run then never stops because of one client's data."""
        return self.mode != "none"

    @property
    def on_sums(self) -> bool:
        """Whether noise is added to sums, and not to every upload."""
        return self.mode in ("central", "distributed")

    @property
    def most_tolerated(self) -> int:
        """Number of nodes without whose noise a round is still private."""
        assert self.nodes is not None, "checked"
        return (self.nodes - 1) // 3 if self.tolerated is None else self.tolerated


def clipping_of(config: PrivacyConfig) -> str:
    """Return the kind of clipping, or its default."""
    if config.clipping is not None:
        return config.clipping
    if config.clip is not None:
        return "flat"
    return "adaptive" if config.on_sums else "none"


def check_privacy(
    config: PrivacyConfig, cohort: CohortConfig, method: type[Method], population: int
) -> None:
    """Refuse options that are invalid whatever the method uploads."""
    given = config.model_dump(exclude_defaults=True, exclude={"mode", "layers"})
    if config.mode == "none":
        for name in given:
            raise ConfigError(
                f"privacy.{name} does nothing without a mode: use privacy.mode = central (or "
                "local-laplace, local-gaussian)"
            )
        return
    if method.traits.pooled:
        raise ConfigError(
            f"{method.name} pools everybody's data, which no noise protects; use a federated method"
        )
    if method.traits.data_weighted:
        raise ConfigError(
            f"{method.name} weights clients by their data, outside the clipped upload: their "
            "influence has no bound; use a method that weights clients equally, or uploads weights"
        )
    if method.traits.exact_sums:
        central = "privacy.mode = central, " if method.under_noise and not config.on_sums else ""
        raise ConfigError(
            f"{method.name} sums over all pairs of items, and noise cannot cover every pair: use "
            f"{central}another method, or privacy.mode = none"
        )
    if config.on_sums and issubclass(method, Relates):
        raise ConfigError(
            f"{method.name} relates clients by their single uploads, and noise on a sum protects "
            "none of those: use privacy.mode = local-gaussian, which adds noise to every upload, "
            "or another method"
        )
    if config.delta is not None and config.delta >= 1 / population:
        raise ConfigError(
            f"privacy.delta = {config.delta:g} would allow publishing all data of one of "
            f"{population} users: use a delta below {1 / population:.3g}"
        )
    if config.mode == "mechanism":
        _check_mechanism(config)
        return
    _need("privacy.mode = mechanism", config, "mechanism")
    _check_clipping(config)
    _check_budgets(config)
    _check_nodes(config)
    if config.on_sums:
        _check_central(config, cohort)
    else:
        _check_local(config)


def _need(what: str, config: PrivacyConfig, *names: str) -> None:
    """Refuse options that have no effect without another one."""
    for name in names:
        if getattr(config, name) is not None:
            raise ConfigError(f"privacy.{name} needs {what}")


def _check_mechanism(config: PrivacyConfig) -> None:
    if config.mechanism is None or config.epsilon is None:
        raise ConfigError("privacy.mode = mechanism needs privacy.mechanism and privacy.epsilon")
    taken = {"mode", "mechanism", "epsilon", "delta", "clip", "noise_seed", "undeclared", "layers"}
    for name in config.model_dump(exclude_defaults=True, exclude=taken):
        raise ConfigError(
            f"privacy.{name} does nothing with privacy.mode = mechanism: leave it out"
        )


def _check_nodes(config: PrivacyConfig) -> None:
    if config.mode != "distributed":
        _need("privacy.mode = distributed", config, "nodes", "tolerated")
    elif config.nodes is None:
        raise ConfigError("distributed noise comes from nodes: say how many with privacy.nodes = N")
    elif config.most_tolerated >= config.nodes - 1:
        raise ConfigError(
            f"privacy.tolerated = {config.tolerated} of {config.nodes} nodes leaves one node that "
            f"knows all the noise: use at most {config.nodes - 2}"
        )


def _check_clipping(config: PrivacyConfig) -> None:
    if clipping_of(config) != "adaptive":
        names = "quantile", "clip_rate", "bit_noise", "bit_share", "clip_steps"
        _need("privacy.clipping = adaptive", config, *names)
    if config.clipping in ("flat", "row") and config.clip is None:
        raise ConfigError(f"privacy.clipping = {config.clipping} needs a bound: privacy.clip = 1.0")
    if config.bit_noise is not None and config.bit_share is not None:
        raise ConfigError("privacy.bit_noise and privacy.bit_share say the same thing: use one")
    if config.clipping == "none" and config.clip is not None:
        raise ConfigError("privacy.clip and privacy.clipping = none contradict each other")


def _check_budgets(config: PrivacyConfig) -> None:
    needed = {"activity": ("epsilon_min", "epsilon_max"), "declared": ("budget_feature",)}
    for kind, names in needed.items():
        if config.budgets != kind:
            _need(f"privacy.budgets = {kind}", config, *names)
            continue
        for name in names:
            if getattr(config, name) is None:
                raise ConfigError(f"privacy.budgets = {kind} needs privacy.{name}")
    if config.budgets is None:
        _need("privacy.budgets", config, "budget_uploads", "sigma")
        return
    if config.mode != "local-gaussian":
        raise ConfigError("personal budgets need local noise: use privacy.mode = local-gaussian")
    if config.epsilon is not None or config.scale is not None:
        raise ConfigError(
            "personal budgets decide the noise: leave out privacy.epsilon and privacy.scale"
        )
    if clipping_of(config) == "none":
        raise ConfigError("without clipping no noise keeps a budget: add privacy.clip = 1.0")
    if config.epsilon_min and config.epsilon_max and config.epsilon_min > config.epsilon_max:
        raise ConfigError("privacy.epsilon_min is above privacy.epsilon_max: exchange them")


def _check_central(config: PrivacyConfig, cohort: CohortConfig) -> None:
    if clipping_of(config) == "none":
        raise ConfigError(
            "without clipping one user can move the sum without bound, and no noise hides that: "
            "use privacy.clip = 1.0 or privacy.clipping = adaptive"
        )
    if config.scale is not None:
        raise ConfigError(
            "privacy.scale is for local noise: use privacy.epsilon or privacy.noise for central"
        )
    if (config.epsilon is None) == (config.noise is None):
        raise ConfigError(
            "central noise follows from privacy.epsilon, or is given as a multiplier with "
            "privacy.noise: use one of the two"
        )
    if config.selection_share is not None and config.epsilon is None:
        raise ConfigError("privacy.selection_share is a share of epsilon: use privacy.epsilon")
    real = {"all": "none", "fixed": "fixed", "poisson": "poisson"}[cohort.kind]
    if config.sampling not in (None, real):
        raise ConfigError(
            f"cohort.kind = {cohort.kind} is not {config.sampling} sampling, so its amplification "
            f"cannot be claimed: use privacy.sampling = {real} or another cohort.kind"
        )
    fits = ACCOUNTED_UNDER.get(cohort.kind)
    if fits is not None and config.neighbours not in (None, fits):
        (other,) = ACCOUNTED_UNDER.keys() - {cohort.kind}
        raise ConfigError(
            f"cohort.kind = {cohort.kind} is accounted for under {fits}: use privacy.neighbours = "
            f"{fits}, or cohort.kind = {other}"
        )
    if config.mode != "distributed":
        return
    if cohort.kind != "all":
        raise ConfigError(
            "distributed noise protects against the server, which draws the cohorts and knows who "
            "takes part, so sampling amplifies nothing: use cohort.kind = all"
        )
    if config.selection_share is not None:
        raise ConfigError(
            "distributed noise protects against the server, which would see all validation scores "
            "before it adds noise to them: leave out privacy.selection_share, and the last round "
            "is released"
        )


def _check_local(config: PrivacyConfig) -> None:
    clipping = clipping_of(config)
    if config.selection_share is not None:
        raise ConfigError(
            "a validation query needs a server that is trusted with all users' scores: use "
            "privacy.mode = central for privacy.selection_share, or leave it out to release the "
            "last round"
        )
    if config.noise is not None:
        raise ConfigError(
            "privacy.noise is for central: use privacy.scale, or privacy.epsilon and privacy.clip"
        )
    if config.budgets is None and (config.epsilon is None) == (config.scale is None):
        raise ConfigError(
            "local noise needs privacy.scale, or privacy.epsilon with privacy.clip: use one of the "
            "two"
        )
    if config.epsilon is not None and clipping == "none":
        raise ConfigError(
            "without clipping no local noise gives an epsilon: add privacy.clip = 1.0, or use "
            "privacy.scale for noise without a guarantee"
        )
    if config.mode == "local-gradients" and clipping == "row":
        raise ConfigError("gradients are clipped whole: use privacy.clipping = flat")
    if clipping == "adaptive":
        raise ConfigError(
            "adaptive clipping needs a trusted count over the clients: use privacy.clipping = flat "
            "for local noise"
        )
    if config.neighbours == "zero-out-one":
        raise ConfigError(
            "the server sees who uploads, so local noise does not hide who takes part: use "
            "privacy.neighbours = replace-one"
        )
    if config.sampling not in (None, "none"):
        raise ConfigError(
            "the server sees who uploads, so sampling amplifies nothing under local noise: use "
            "privacy.sampling = none"
        )


def check_declared(config: PrivacyConfig, data: Interactions, people: Features) -> tuple[str, ...]:
    """Refuse undeclared data taken from users' rows, or return what is not covered if accepted.

    ``people`` are the users' features in training, including their usual context.
    """
    named = {name: c for name, c in people.items() if not isinstance(c, Numeric)}
    undeclared = [name for name, column in named.items() if not column.declared]
    if config.undeclared:
        if data.items_declared and not undeclared:
            raise ConfigError(
                "privacy.undeclared does nothing: the list of items and all categories are "
                "declared; leave it out"
            )
        items = () if data.items_declared else (NO_LIST,)
        return (*items, *(NO_CATEGORIES.format(name) for name in undeclared))
    if not data.items_declared:
        raise ConfigError(
            f"{data.name}: the items were taken from the users' rows, and an item of a single user "
            "reveals that this user took part, whatever the noise: give a public list with "
            "--items FILE where the file is read (in Python, data.with_public_items(ids)), "
            f"{ACCEPT}"
        )
    if undeclared:
        raise ConfigError(
            f"{data.name}: the categories of '{undeclared[0]}' were taken from the users' rows, "
            "and a category of a single user reveals that this user took part, whatever the noise: "
            f"declare them, as in --user-feature '{undeclared[0]}:category:A|B|C' (in Python, "
            f"Categorical.of(entries, names)), {ACCEPT}"
        )
    return ()


def public_facts(public: TrainView, undeclared: Collection[str] = ()) -> tuple[str, ...]:
    """Return descriptions of the public data of a public view."""
    people, described = public.user_features, " and their features"
    items = f"the list of {public.n_items:,} items{described if public.item_features else ''}"
    facts = [] if NO_LIST in undeclared else [items]
    ranges = [name for name, c in people.items() if isinstance(c, Numeric) and c.low is not None]
    named = [name for name, c in people.items() if not isinstance(c, Numeric) and c.declared]
    for what, names in (("categories", named), ("range", ranges)):
        if names:
            facts.append(f"the {what} of {', '.join(names)}")
    return tuple(facts)
