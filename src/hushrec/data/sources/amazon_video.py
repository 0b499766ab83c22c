"""Amazon Instant Video: ratings, as two papers cut them."""

from __future__ import annotations

from functools import partial

from hushrec.data.sources import NO_TERMS, DataSet

_amazon_video = partial(
    DataSet,
    licence=NO_TERMS,
    citation="J. McAuley et al. 2015. Image-based Recommendations on Styles and Substitutes. "
    "SIGIR.",
    loader=lambda folder: folder.interactions("ratings.dat"),
)
PFEDREC = _amazon_video(
    name="amazon-video/pfedrec",
    title="Amazon Instant Video: ratings of users with at least 5, as PFedRec",
    users=8_072,
    items=11_830,
    rows=63_836,
    files={"ratings.dat": "a1292e4a4dba6c37be6ae5dc83d4404af96bf3eace4c8954e2f4e8360a3cdd76"},
)
FEDRKG = _amazon_video(
    name="amazon-video/fedrkg",
    title="Amazon Instant Video: ratings of users with at least 10, as FedRKG",
    users=1_372,
    items=7_957,
    rows=23_181,
    files={"ratings.dat": "82eb5856b173e8f52a93521b33a402429f81aa92645fdbb7bae6b78316738ba0"},
)
