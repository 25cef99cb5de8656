"""Paired tests and Holm's correction, by hand."""

import numpy as np
import pytest

from tsfl_jax.report import statistics


def test_paired_p_by_hand():
    # Differences 1, 2, 3: mean 2, error 1/√3, t = 2√3 with 2 degrees of freedom.
    assert statistics.paired_p([1.0, 2.0, 3.0]) == pytest.approx(0.0741799, abs=1e-6)
    assert statistics.paired_p([0.0, 0.0, 0.0]) == 1.0
    # Two equal gaps of one test sample: no error to divide by, rounding or not.
    for gaps in ([1 / 360, 1 / 360], [0.3, 0.1 + 0.2], [1.0], [1.0, np.nan]):
        assert np.isnan(statistics.paired_p(gaps))


def test_holm_by_hand():
    # 3·0.01, 2·0.03, 1·0.04 but not below the one before it.
    corrected = statistics.holm([0.04, 0.01, np.nan, 0.03])
    np.testing.assert_allclose(corrected, [0.06, 0.03, np.nan, 0.06])
    assert statistics.holm([[0.6], [0.7]]).tolist() == [[1.0], [1.0]]


def test_a_mean_has_the_decimals_of_its_interval():
    """Student's t(0.975; 2) = 4.3027: half is 2.4841 of the standard deviation."""
    values = np.array([-1.0, 0.0, 1.0])
    for scale, center, text in (
        (0.01, 0.3, "0.300 ± 0.025"),
        (1.0, 12.0, "12.0 ± 2.5"),
        (100.0, 12345.0, "12345 ± 248"),
        (0.0, 0.5, "0.5 ± 0"),
    ):
        assert statistics.spread(center + scale * values, ".4g") == text
    assert statistics.spread([48000.0], ".4g") == "48000"
    assert statistics.spread_of_known([0.5, 0.5, 0.5]) == "0.50 ± 0.00"
    some, never = [np.inf, 2.0, np.nan], [np.inf, np.inf]
    assert statistics.spread_of_known(some) == "inf (1 of 2)"
    assert statistics.spread_of_known(some, is_time=True) == "reached by 1 of 2"
    assert statistics.spread_of_known(never, is_time=True) == "never"
