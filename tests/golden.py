"""What every method and noise form came to before a redesign: digests that must not change.

    python tests/golden.py            # compute everything and write this machine's digests anew
    python tests/golden.py NAME …     # compute some cases, print what differs, write nothing

A case is a short run. Its digest covers the shared parameters and the rank of every held-out item,
so private parameters as well. Rounding differs from one kind of processor to another, so the file
has digests for each kind that it was written on; elsewhere its metrics must hold.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import hushrec

FILE = Path(__file__).with_name("golden.json")
LIBRARIES = ("numpy", "numba", "scipy", "torch")
METRICS = ("hr@10", "ndcg@10", "auc")

SEEDED = {"privacy.noise_seed": 0}
CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 8.0, **SEEDED}
LOCAL = {"privacy.mode": "local-gaussian", "privacy.epsilon": 8.0, "privacy.clip": 1.0, **SEEDED}
LAPLACE = {"privacy.mode": "local-laplace", "privacy.epsilon": 8.0, "privacy.clip": 1.0, **SEEDED}
BUDGETS = {
    "privacy.mode": "local-gaussian",
    "privacy.clip": 1.0,
    "privacy.budgets": "activity",
    "privacy.epsilon_min": 1.0,
    "privacy.epsilon_max": 8.0,
    **SEEDED,
}
SILOS = {"silos.kind": "dirichlet", "silos.count": 12}
FIXED = {"cohort.kind": "fixed", "cohort.size": 60}
REPLACED = {"privacy.neighbours": "replace-one"}
POISSON = {"cohort.kind": "poisson", "cohort.probability": 0.3}
SMALL = {"d": 8, "hidden": [8, 4]}
DUAL = {"dual": True}
META = {"memory": 8, "hidden": 8, "rank": 2}
GUIDED = {"interval": 2, "d": 8}


def case(method: str, *groups: dict[str, Any], rounds: int | None = 3) -> dict[str, Any]:
    """Describe a case on the embedded data from groups of settings."""
    merged = {key: value for group in groups for key, value in group.items()}
    return {"data": "demo", "method": method, "rounds": rounds, "settings": merged}


def paper(
    data: str, method: str, rounds: int, *groups: dict[str, Any], preset: str | None = "paper"
) -> dict[str, Any]:
    """Describe a short cell of a paper on real data."""
    merged = {key: value for group in groups for key, value in group.items()}
    return {
        "data": data,
        "method": method,
        "rounds": rounds,
        "preset": preset,
        "settings": {"evaluation.every": rounds, **merged},
    }


CASES: dict[str, dict[str, Any]] = {
    "central-mf": case("central-mf"),
    "ease": case("ease", rounds=None),
    "cofedrec": case("cofedrec", {"d": 8, "clusters": 8, "evaluation.every": 4}, rounds=8),
    "cofedrec all": case("cofedrec", {"d": 8, "clusters": 8, "contrast": "all"}, FIXED, rounds=6),
    "cofedrec central": case("cofedrec", {"d": 8, "clusters": 8}, CENTRAL, rounds=4),
    "fcf": case("fcf"),
    "fedals": case("fedals"),
    "fedals central": case("fedals", CENTRAL, rounds=None),
    "feddae": case("feddae", {"d": 8}, FIXED),
    "feddae authors": case("feddae", {"d": 8, "personal": False, "epochs": 2}, FIXED),
    "feddae central": case("feddae", {"d": 8}, CENTRAL),
    "fedease": case("fedease", rounds=None),
    "fedease central": case("fedease", CENTRAL, rounds=None),
    "fedmf": case("fedmf", FIXED),
    "fedmix": case("fedmix", {"network_rounds": 8, "evaluation.every": 4}, rounds=None),
    "fedmf dual": case("fedmf", DUAL, POISSON),
    "fedmf central adaptive": case("fedmf", CENTRAL, POISSON),
    "fedmf central flat": case("fedmf", CENTRAL, {"privacy.clip": 1.0}),
    "fedmf central row": case(
        "fedmf", CENTRAL, REPLACED, {"privacy.clipping": "row", "privacy.clip": 0.1}
    ),
    "fedmf gaussian": case("fedmf", LOCAL),
    "fedmf laplace": case("fedmf", LAPLACE),
    "fedmf budgets": case("fedmf", BUDGETS, {"privacy.budget_uploads": 2}),
    "fedncf": case("fedncf", SMALL),
    "fedncf dual": case("fedncf", SMALL, DUAL),
    "fedncf central": case("fedncf", SMALL, CENTRAL),
    "fednext": case("fednext", rounds=None),
    "fednext central": case("fednext", CENTRAL, rounds=None),
    "fedpergnn": case("fedpergnn", {"d": 8}, FIXED),
    "fedpergnn central": case("fedpergnn", {"d": 8, "expand_after": 1}, CENTRAL),
    "fedrap": case("fedrap", FIXED),
    "fedrap l2 central": case("fedrap", CENTRAL, {"penalty": "l2", "d": 8}),
    "fedrec": case("fedrec"),
    "fedrecon": case("fedrecon"),
    "fedrecon dual": case("fedrecon", DUAL),
    "fedrkg": case("fedrkg", GUIDED, rounds=5),
    "fedrkg fedncf": case("fedrkg", GUIDED, {"backbone": "fedncf", "hidden": [8]}, rounds=4),
    "fedrkg fedmf fixed": case(
        "fedrkg", GUIDED, FIXED, {"backbone": "fedmf", "guidance": "fixed"}, rounds=4
    ),
    "fedrkg replace": case("fedrkg", GUIDED, {"guidance": "replace"}),
    "fedrkg gradients": case(
        "fedrkg",
        GUIDED,
        {"guidance": "fixed", "privacy.mode": "local-gradients", "privacy.epsilon": 8.0},
        {"privacy.clip": 0.1, **SEEDED},
    ),
    "fedrkg central": case("fedrkg", GUIDED, CENTRAL, rounds=5),
    "fofl-self": case("fofl-self", SMALL, FIXED),
    "gru4rec": case("gru4rec", {"d": 8, "length": 10, "evaluation.every": 3}),
    "itemknn": case("itemknn", rounds=None),
    "gpfedrec": case("gpfedrec", SMALL, {"item_rate": 5.0, "threshold": 1.0}),
    "gpfedrec dissimilar": case(
        "gpfedrec", SMALL, FIXED, {"item_rate": 5.0, "threshold": 1.0, "graph": "dissimilar"}
    ),
    "gpfedrec gaussian": case("gpfedrec", SMALL, LOCAL, {"item_rate": 5.0}),
    "lipm": case("lipm", SMALL, SILOS),
    "lipm averages": case("lipm", SMALL, SILOS, {"averages": 3, "matching": 0.5}),
    "lipm users": case("lipm", SMALL, FIXED),
    "lipm dpps": case("lipm", SMALL, SILOS, BUDGETS, {"guidance": 0.5}),
    "lipm central": case("lipm", SMALL, SILOS, CENTRAL, {"lipm": False}),
    "local-only": case("local-only"),
    "markov": case("markov", rounds=None),
    "metamf": case("metamf", META, FIXED),
    "metamf central": case("metamf", META, CENTRAL),
    "negative-counter": case("negative-counter"),
    "negative-counter published": {**case("negative-counter"), "protocol": "published"},
    "neumf": case("neumf"),
    "nn-self": case("nn-self", SMALL, FIXED),
    "pfedme": case("pfedme", SMALL, SILOS),
    "pfedrec": case("pfedrec"),
    "pfedrec mlp": case("pfedrec", {"score_function": "mlp", "d": 8}),
    "pfedrec central": case("pfedrec", CENTRAL, REPLACED),
    "pfedrec gaussian": case("pfedrec", LOCAL, {"d": 8}),
    "popularity": case("popularity", rounds=None),
    "popularity central": case("popularity", CENTRAL, rounds=None),
    "privrec": case("privrec", SMALL, FIXED),
    "privrec shares": case("privrec", SMALL, FIXED, {"shares": True}),
    "privrec unseen": case("privrec", SMALL, FIXED, {"split.kind": "unseen-users"}),
    "privrec central": case("privrec", SMALL, FIXED, CENTRAL),
    "privrec-cen": case("privrec-cen", SMALL),
    "recent-popularity": case("recent-popularity", rounds=None),
    "sasrec": case("sasrec", {"d": 8, "length": 10, "evaluation.every": 3}),
    "000 LIPM ml-100k": paper(
        "ml-100k",
        "lipm",
        2,
        SMALL,
        {"silos.kind": "dirichlet", "silos.count": 50},
        SEEDED,
        preset="dpps",
    ),
    "001 PFedRec ml-100k": {**paper("ml-100k", "pfedrec", 10), "protocol": "published"},
    "002 DP-PrivRec ml-100k": paper("ml-100k", "privrec", 10, SEEDED, preset="dp-paper"),
    "003 FedRAP ml-100k": {**paper("ml-100k", "fedrap", 3), "protocol": "published"},
    "004 FedRKG filmtrust": {
        **paper("filmtrust", "fedrkg", 12, {"interval": 5}),
        "protocol": "published",
    },
    "winning FedNext ml-100k": paper("ml-100k", "fednext", 6, preset=None),
}


def machine() -> dict[str, str]:
    """Say what rounding depends on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        wanted = ("vendor_id", "cpu family", "model\t", "flags")
        found = [next((x for x in lines if x.startswith(name)), "") for name in wanted]
        cpu = hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
    return {"cpu": cpu, **{name: version(name) for name in LIBRARIES}}


def digest(run: hushrec.Run) -> str:
    """Return one digest of the shared parameters and of everybody's ranks."""
    found = hashlib.sha256()
    for name, array in sorted(run.model.shared.items()):
        found.update(f"{name}{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    for part, by_candidates in sorted(run.ranks.items()):
        for candidates, ranks in sorted(by_candidates.items()):
            for name, array in sorted(ranks.to_arrays(f"{part}/{candidates}/").items()):
                found.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:32]


def outcome(name: str) -> dict[str, Any]:
    """Run a case; return its digest, and metrics that hold on any machine."""
    given = dict(CASES[name])
    run = hushrec.train(given.pop("data"), given.pop("method"), **given)
    metrics = {key: round(run.metrics["full"][key], 6) for key in METRICS}
    told = run.summary.communication
    return {
        "digest": digest(run),
        **metrics,
        "bytes": [told.up_bytes, told.down_bytes],
        "epsilon": run.summary.privacy.epsilon,
    }


def known_outcome(name: str) -> dict[str, Any]:
    """Return what the file has of a case; without a digest where no machine was like this one."""
    stored, here = json.loads(FILE.read_text()), machine()
    digests = [each["digests"] for each in stored["machines"] if each["machine"] == here]
    known = dict(stored["cases"][name])
    return {"digest": digests[0][name], **known} if digests and name in digests[0] else known


def main(names: list[str]) -> None:
    """Write the file, or compare some cases with it."""
    if names:
        for name in names:
            new, known = outcome(name), known_outcome(name)
            print(name, "unchanged" if new == known else f"{known} -> {new}")
        return
    cases = {}
    for name in CASES:
        cases[name] = outcome(name)
        print(name, cases[name], flush=True)
    here = {"machine": machine(), "digests": {name: c.pop("digest") for name, c in cases.items()}}
    stored = json.loads(FILE.read_text())["machines"]
    others = [each for each in stored if each["machine"] != here["machine"]]
    # Another machine's digests stand only while its metrics do.
    FILE.write_text(json.dumps({"machines": [*others, here], "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
