"""`PrivacyConfig`: what is asked for, and `check_privacy`: what cannot be given.

Everything that would make a guarantee false is an error here, before the first round, that says
what to change. Nothing is a warning.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hushrec.config import Seed, Settings
from hushrec.data.views import CohortConfig
from hushrec.errors import ConfigError
from hushrec.methods.base import Method
from hushrec.privacy.accountant import Neighbours

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Outside of this nothing is hidden, or everything."""


class PrivacyConfig(Settings):
    """What protects the uploads."""

    mode: Literal[
        "none", "central", "distributed", "local-laplace", "local-gaussian", "local-gradients"
    ] = "none"
    """Nothing; Gaussian noise on the sum; a share of it from every node; noise on every upload; or
    on the gradient of every step that uploads are made of (FedRKG, section 5.2)."""
    nodes: Annotated[int, Field(ge=2)] | None = None
    """Nodes that add noise, for `distributed`."""
    tolerated: Annotated[int, Field(ge=0)] | None = None
    """Nodes that may drop out of a round, or tell others their noise.  [a third of them, less one]
    """
    epsilon: Epsilon | None = None
    """The guarantee to keep over all rounds; the noise follows from it."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Probability with which the guarantee may fail; below 1 / clients.  [1e-5, or a tenth of
    1 / clients if that is less]"""
    noise: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """Noise multiplier of `central`, in place of epsilon."""
    scale: Positive | None = None
    """Scale of local noise, in place of epsilon: b of Laplace, deviation of Gaussian noise."""
    clipping: Literal["none", "flat", "row", "adaptive"] | None = None
    """What is bounded.  [flat where `clip` is given; else adaptive for `central`, none for local]
    """
    clip: Positive | None = None
    """The bound of a norm (L1 for Laplace noise, else L2); for `adaptive`, the first one."""
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of norms that adaptive clipping leaves alone.  [0.5]"""
    clip_rate: Positive | None = None
    """How fast an adaptive bound moves.  [0.2]"""
    bit_noise: Positive | None = None
    """Noise on the count behind an adaptive bound.  [a twentieth of the cohort, or more]"""
    bit_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of a round's budget that this count takes, in place of bit_noise: the h of DP-PrivRec,
    where the noises z / sqrt(1 - h) and z / sqrt(h) together cost what one of z does."""
    clip_steps: Literal["geometric", "arithmetic"] | None = None
    """Whether an adaptive bound moves by factors, or by differences as in DP-PrivRec.  [factors]"""
    neighbours: Neighbours | None = None
    """What changes between neighbours.  [what the cohort's analysis is valid for]"""
    sampling: Literal["poisson", "fixed", "none"] | None = None
    """The sampling to be analysed, if it is to be checked against the cohort's."""
    budgets: Literal["activity", "declared"] | None = None
    """Whose epsilon counts: everybody's is the same; by the rank of a client's interaction count;
    or as its user declared it (`local-gaussian` only)."""
    epsilon_min: Epsilon | None = None
    """Budget of the least active client, for budgets by activity."""
    epsilon_max: Epsilon | None = None
    """Budget of the most active client, for budgets by activity."""
    budget_feature: str | None = None
    """Numeric user feature that holds the declared budgets."""
    sigma: Literal["calibrated", "paper"] | None = None
    """Noise that keeps a budget over the run; or DPPS's own clip / epsilon, which keeps none, and
    of which the true epsilon is said.  [calibrated]"""
    noise_seed: Seed | None = None
    """Makes noise and hidden coins repeatable, for experiments: whoever knows the seed can remove
    the noise, and the statement says so.  [a secret key, drawn for each run]"""
    undeclared: bool = False
    """Accept a list of items, or categories of users, that was taken from the users' rows: it is
    not covered then, and the statement says so first."""
    selection_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of epsilon that noised looks at validation items take, one every `evaluation.every`
    rounds: the best one selects the round.  [no such look: the last round is shipped]"""
    layers: tuple[str, ...] = ()
    """Mechanisms of other packages, by entry point, that act on an upload before it is clipped and
    noised: whatever they make of it, the guarantee is that of the mode."""
    budget_uploads: Annotated[int, Field(ge=1)] | None = None
    """Uploads that a budget pays for; whoever made them stops.  [all that are planned]"""

    @property
    def promises(self) -> bool:
        """Whether anything is asked of privacy: then nobody's data may stop a run."""
        return self.mode != "none"

    @property
    def on_sums(self) -> bool:
        """Whether noise is on sums, and not on every upload."""
        return self.mode in ("central", "distributed")

    @property
    def most_tolerated(self) -> int:
        """Nodes that the noise of a round can do without."""
        assert self.nodes is not None, "checked"
        return (self.nodes - 1) // 3 if self.tolerated is None else self.tolerated


def clipping_of(config: PrivacyConfig) -> str:
    """Return the kind of clipping, which follows from the rest where it is not said."""
    if config.clipping is not None:
        return config.clipping
    if config.clip is not None:
        return "flat"
    return "adaptive" if config.on_sums else "none"


def check_privacy(
    config: PrivacyConfig, cohort: CohortConfig, method: type[Method], population: int
) -> None:
    """Refuse what cannot be given, whatever the method uploads."""
    given = config.model_dump(exclude_defaults=True, exclude={"mode", "layers"})
    if config.mode == "none":
        for name in given:
            raise ConfigError(
                f"privacy.{name} does nothing without a mode: use --privacy central (or "
                "local-laplace, local-gaussian)"
            )
        return
    if method.traits.pooled:
        raise ConfigError(
            f"{method.name} pools everybody's data: nothing protects it; use a federated method"
        )
    if method.traits.data_weighted:
        raise ConfigError(
            f"{method.name} weighs clients by their data, outside the clipped upload: their "
            "influence has no bound; use a method that weighs clients alike, or uploads its weights"
        )
    if config.delta is not None and config.delta >= 1 / population:
        raise ConfigError(
            f"privacy.delta = {config.delta:g} would allow giving one of {population} users away "
            f"entirely: use a delta below {1 / population:.3g}"
        )
    _check_clipping(config)
    _check_budgets(config)
    _check_nodes(config)
    if config.on_sums:
        _check_central(config, cohort)
        _check_distributed(config, cohort)
    else:
        _check_local(config)


def _check_nodes(config: PrivacyConfig) -> None:
    if config.mode != "distributed":
        for name in ("nodes", "tolerated"):
            if getattr(config, name) is not None:
                raise ConfigError(f"privacy.{name} needs privacy.mode = distributed")
    elif config.nodes is None:
        raise ConfigError("distributed noise comes from nodes: say how many with privacy.nodes = N")
    elif config.most_tolerated >= config.nodes - 1:
        raise ConfigError(
            f"privacy.tolerated = {config.tolerated} of {config.nodes} nodes leaves one to add all "
            f"the noise, which can tell it: use at most {config.nodes - 2}"
        )


def _check_clipping(config: PrivacyConfig) -> None:
    if clipping_of(config) != "adaptive":
        for name in ("quantile", "clip_rate", "bit_noise", "bit_share", "clip_steps"):
            if getattr(config, name) is not None:
                raise ConfigError(f"privacy.{name} needs privacy.clipping = adaptive")
    if config.clipping in ("flat", "row") and config.clip is None:
        raise ConfigError(f"privacy.clipping = {config.clipping} needs a bound: --clip 1.0")
    if config.bit_noise is not None and config.bit_share is not None:
        raise ConfigError("privacy.bit_noise and privacy.bit_share say the same thing: use one")
    if config.clipping == "none" and config.clip is not None:
        raise ConfigError("privacy.clip and privacy.clipping = none contradict each other")


def _check_budgets(config: PrivacyConfig) -> None:
    needed = {"activity": ("epsilon_min", "epsilon_max"), "declared": ("budget_feature",)}
    for kind, names in needed.items():
        for name in names:
            if config.budgets == kind and getattr(config, name) is None:
                raise ConfigError(f"privacy.budgets = {kind} needs privacy.{name}")
            if config.budgets != kind and getattr(config, name) is not None:
                raise ConfigError(f"privacy.{name} needs privacy.budgets = {kind}")
    if config.budgets is None:
        for name in ("budget_uploads", "sigma"):
            if getattr(config, name) is not None:
                raise ConfigError(f"privacy.{name} needs privacy.budgets")
        return
    if config.mode != "local-gaussian":
        raise ConfigError(
            "personal budgets need noise that each client adds by itself: use --privacy "
            "local-gaussian"
        )
    if config.epsilon is not None or config.scale is not None:
        raise ConfigError(
            "personal budgets decide the noise of each client: leave out --epsilon and --scale"
        )
    if clipping_of(config) == "none":
        raise ConfigError("without clipping no noise keeps a budget: add --clip 1.0")
    if config.epsilon_min and config.epsilon_max and config.epsilon_min > config.epsilon_max:
        raise ConfigError("privacy.epsilon_min is above privacy.epsilon_max: exchange them")


def _check_central(config: PrivacyConfig, cohort: CohortConfig) -> None:
    if clipping_of(config) == "none":
        raise ConfigError(
            "without clipping one user can move the sum without bound, and no noise hides that: "
            "use --clip 1.0 or privacy.clipping = adaptive"
        )
    if config.scale is not None:
        raise ConfigError(
            "--scale is for local noise: use --epsilon, or privacy.noise, for central"
        )
    if (config.epsilon is None) == (config.noise is None):
        raise ConfigError(
            "central noise follows from --epsilon, or is given as a multiplier with privacy.noise: "
            "use one of the two"
        )
    if config.selection_share is not None and config.epsilon is None:
        raise ConfigError("privacy.selection_share is a share of epsilon: use --epsilon")
    real = {"all": "none", "fixed": "fixed", "poisson": "poisson"}[cohort.kind]
    if config.sampling not in (None, real):
        raise ConfigError(
            f"cohort.kind = {cohort.kind} is not {config.sampling} sampling, so its amplification "
            f"cannot be claimed: use privacy.sampling = {real} or another cohort.kind"
        )
    if cohort.kind == "fixed" and config.neighbours == "zero-out-one":
        raise ConfigError(
            "fixed-size cohorts are accounted for under replace-one: use privacy.neighbours = "
            "replace-one, or cohort.kind = poisson"
        )
    if cohort.kind == "poisson" and config.neighbours == "replace-one":
        raise ConfigError(
            "Poisson cohorts are accounted for under zero-out-one: use privacy.neighbours = "
            "zero-out-one, or cohort.kind = fixed"
        )


def _check_distributed(config: PrivacyConfig, cohort: CohortConfig) -> None:
    """Refuse what holds against everybody but the server, where it is to hold against it too."""
    if config.mode != "distributed":
        return
    if cohort.kind != "all":
        raise ConfigError(
            "the server draws the cohorts and knows who takes part, so sampling amplifies nothing "
            "against it, and distributed noise is a promise against it: use cohort.kind = all"
        )
    if config.selection_share is not None:
        raise ConfigError(
            "the server would see everybody's scores before it adds noise to them, and distributed "
            "noise is a promise against it: leave out privacy.selection_share, and the last round "
            "is shipped"
        )


def _check_local(config: PrivacyConfig) -> None:
    clipping = clipping_of(config)
    if config.selection_share is not None:
        raise ConfigError(
            "a noised look needs somebody who is trusted with everybody's scores: use --privacy "
            "central for privacy.selection_share, or leave it out and ship the last round"
        )
    if config.noise is not None:
        raise ConfigError(
            "privacy.noise is for central noise: use --scale, or --epsilon and --clip"
        )
    if config.budgets is None and (config.epsilon is None) == (config.scale is None):
        raise ConfigError("local noise needs --scale, or --epsilon with --clip: use one of the two")
    if config.epsilon is not None and clipping == "none":
        raise ConfigError(
            "without clipping no local noise gives an epsilon: add --clip 1.0, or use --scale to "
            "have the noise without a guarantee"
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
            "the server sees who uploads, so local noise hides what is uploaded and not that it "
            "is: use privacy.neighbours = replace-one"
        )
    if config.sampling not in (None, "none"):
        raise ConfigError(
            "the server sees who uploads, so sampling amplifies nothing under local noise: use "
            "privacy.sampling = none"
        )
