"""How far what is to be found lies from what a device has, under one date for everybody.

python experiments/winning/gaps.py ml-1m ml-100k
"""

from __future__ import annotations

import sys

import numpy as np

from hushrec.data.catalog import load
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.streams import Streams

DAY = 86_400


def main(names: list[str]) -> None:
    """Print medians over the users that have test items; times are seconds in these data sets."""
    for name in names:
        split = make_split(load(name), SplitConfig(kind="time"), Streams(0))
        data, past, to_find, span = split.data, split.train.times, [], []
        time_of = dict(zip(zip(data.user, data.item, strict=True), data.time, strict=True))
        for user in np.flatnonzero(np.diff(split.test.indptr)):
            known = past[user]
            if len(known):
                found = [time_of[user, item] for item in split.test[user]]
                to_find.append(min(found) - known[-1])
                span.append(known[-1] - known[-3:][0])
        print(
            f"{name}: {len(to_find)} users; from the last training item to the first test item "
            f"{np.median(to_find) / DAY:.0f} days; the last three training items span "
            f"{np.median(span):.0f} seconds"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
