"""Verdicts of paired tests, by hand."""

import numpy as np
import xarray

from studies import verdicts


def test_five_pairs_cannot_be_told_apart_by_ranks():
    assert verdicts.signed_rank_p([1, 2, 3, 4, 5]) == 0.0625
    assert np.isnan(verdicts.signed_rank_p([0.0, 0.0]))


def test_holm_counts_the_tests_of_a_family():
    """Both tests of a cell, not the four of both cells."""
    gains = xarray.DataArray(
        [[[1.0, 2, 3], [np.nan] * 3], [[1, 2, 3], [-1, -2, -3]]],
        dims=("cell", "rule", "seed"),
    )
    p, words = verdicts.tested(gains, "rule")
    assert p.values.tolist() == [["0.074", "–"], ["0.148", "0.148"]]
    assert set(words.values.ravel()) == {"inconclusive", "–"}
    assert verdicts.tested(gains, "cell", "rule")[0].values[0, 0] == "0.223"
