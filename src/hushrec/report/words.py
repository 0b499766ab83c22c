"""What the page says in words rather than figures."""

from __future__ import annotations

from typing import Any

from hushrec.run import Run


def metric_name(metric: str) -> str:
    """Write a metric's name as people do: HR@10."""
    return metric.upper() if metric[:2] in ("hr", "nd", "mr", "au") else metric.capitalize()


def marked(run: Run, label: str) -> str:
    """Mark the spoken label of a drawing too."""
    mark = run.summary["protocol_mark"]
    return f"{label}, {mark}" if mark else label


def options(run: Run) -> list[tuple[str, Any, str]]:
    """Return each option of the method with its value and its meaning."""
    described = type(run.method).Config.model_fields
    return [
        (name, value, (described[name].description or "") if name in described else "")
        for name, value in run.summary["options"].items()
    ]


def split_words(run: Run) -> str:
    """Say how the rows were divided, and by which order."""
    config, data = run.experiment.split, run.split.data
    order = (
        "time, ties by the order of the file"
        if data.has_time
        else "the order of the file (no times)"
    )
    shares = f"{100 * config.test:g} % test, {100 * config.valid:g} % validation"
    if config.order == "random" and config.kind in ("ratio", "unseen-users"):
        order = "a random order drawn from the seed"
    words = {
        "leave-one-out": f"Each user’s last item tests, the one before validates, by {order}.",
        "ratio": f"Each user’s rows: {shares}; ordered by {order}.",
        "time": f"One date for everybody: {shares}; later rows test.",
        "unseen-users": f"Whole users: {shares}. They adapt on the first half of their rows and "
        f"are tested on the second, ordered by {order}.",
    }
    repeats = {
        "merge": "Repeated (user, item) rows are merged before the split.",
        "keep": "Repeated (user, item) rows are kept: a held-out item can be a training item too.",
    }
    return f"{words[config.kind]} {repeats[config.repeats]}"
