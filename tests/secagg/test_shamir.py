"""Any t shares recover a secret; t - 1 fit every secret equally well."""

from collections import Counter
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushrec.secagg.keys import PRIME, SHARE_BYTES, recover, share, weights_at_zero


@st.composite
def shared(draw):
    count = draw(st.integers(1, 9))
    threshold = draw(st.integers(1, count))
    number = st.integers(0, PRIME - 1)
    secret = draw(st.one_of(st.integers(0, 2**256 - 1), st.just(2**256 - 1), st.just(0)))
    coefficients = draw(st.lists(number, min_size=threshold - 1, max_size=threshold - 1))
    who = draw(st.permutations(range(1, count + 1)))
    return secret, coefficients, who


@given(shared())
def test_any_t_of_n_recover(case):
    secret, coefficients, who = case
    shares = {point: share(secret, coefficients, point) for point in who}
    assert all(0 <= value < 2 ** (8 * SHARE_BYTES) for value in shares.values())
    few = dict(list(shares.items())[: len(coefficients) + 1])
    assert recover(few, weights_at_zero(list(few))) == secret
    assert recover(shares, weights_at_zero(who)) == secret  # more fit as well


@pytest.mark.parametrize("threshold", [2, 3])
def test_fewer_tell_nothing(threshold):
    """All polynomials over a small field: t - 1 shares take every value as often for any secret."""
    prime, points = 7, (1, 2, 3, 4)
    for seen in combinations(points, threshold - 1):
        by_secret = [
            Counter(
                tuple(share(secret, coefficients, point, prime) for point in seen)
                for coefficients in product(range(prime), repeat=threshold - 1)
            )
            for secret in range(prime)
        ]
        assert len(by_secret[0]) == prime ** (threshold - 1)
        assert all(counts == by_secret[0] for counts in by_secret)
    # The check bites: one share more tells the secret.
    whole = {
        tuple(share(secret, coefficients, point, prime) for point in points[:threshold]): secret
        for secret in range(prime)
        for coefficients in product(range(prime), repeat=threshold - 1)
    }
    assert len(whole) == prime**threshold


def test_the_field_is_one():
    """A composite modulus would leave shares without inverses (Fermat, to four bases)."""
    assert PRIME > 2**256
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7))
