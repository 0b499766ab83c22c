"""FilmTrust: film ratings of users with at least ten."""

from __future__ import annotations

from hushrec.data.sources import NO_TERMS, DataSet

FILMTRUST = DataSet(
    name="filmtrust",
    title="FilmTrust: film ratings of users with at least 10, as FedRKG's table",
    licence=NO_TERMS,
    citation="G. Guo, J. Zhang, N. Yorke-Smith. 2013. A Novel Bayesian Similarity Measure for "
    "Recommender Systems. IJCAI.",
    users=1_002,
    items=2_042,
    rows=33_372,
    loader=lambda folder: folder.interactions("ratings.txt").users_with_at_least(10),
    files={"ratings.txt": "dac8ad6cefc94ec9be782c0de4659d7ca2fa9189991df72353042f5dfeadf1b1"},
)
