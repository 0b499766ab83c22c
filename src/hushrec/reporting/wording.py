"""Numbers, units and names as people read them; the space before a unit does not break."""

from __future__ import annotations

from typing import Any

from hushrec.api import Run
from hushrec.methods.base import Method
from hushrec.runs.schema import Summary

NO_BREAK = "\N{NO-BREAK SPACE}"


def human_size(size: float) -> str:
    """Write a number of bytes for people, in units of 1,000."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while abs(size) >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    digits = 0 if units[0] == "bytes" or size >= 100 else 1
    return f"{size:.{digits}f}{NO_BREAK}{units[0]}"


def human_duration(seconds: float) -> str:
    """Write a duration for people."""
    if seconds < 1:
        return f"{1000 * seconds:.0f}{NO_BREAK}ms"
    if seconds < 90:
        return f"{seconds:.1f}{NO_BREAK}s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f}{NO_BREAK}min"
    return f"{seconds / 3600:.1f}{NO_BREAK}h"


def figure(value: float) -> str:
    """Write a metric or a loss: four digits behind the point, fewer before it is large."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"


def signed(difference: float) -> str:
    """Write a difference of two metrics, with a real minus; nothing is +0.0000."""
    return f"{round(difference, 4) + 0.0:+.4f}".replace("-", "−")


def percent(share: float) -> str:
    """Write a share in per cent."""
    return f"{100 * share:.1f} %"


def metric_name(metric: str) -> str:
    """Write a metric's name as people do: HR@10."""
    return metric.upper() if metric[:2] in ("hr", "nd", "mr", "au") else metric.capitalize()


def marked(summary: Summary, label: str) -> str:
    """Return the accessible label of a plot, with the mark of a protocol that leaks."""
    return f"{label}, {summary.protocol_mark}" if summary.protocol_mark else label


def options(method: Method, summary: Summary) -> list[tuple[str, Any, str]]:
    """Return each option of the method with its value and its description."""
    described = type(method).Config.model_fields
    return [
        (name, value, (described[name].description or "") if name in described else "")
        for name, value in summary.options.items()
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
