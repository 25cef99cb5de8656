"""FedBuff with sums in a finite field, against Python's integers and the float sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import problems
from tests.rules.test_rules import received
from tsfl_jax.rules import secure_buffer as sb

RESIDUES = st.integers(0, sb.PRIME - 1)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(RESIDUES, st.integers(0, 1024)), min_size=1, max_size=6))
def test_sums_modulo_p_are_those_of_big_integers(terms):
    total = jnp.zeros((), jnp.uint32)
    for k, count in terms:
        total = sb.add(total, sb.times(jnp.int32(count), jnp.uint32(k)))
    assert int(total) == sum(k * count for k, count in terms) % sb.PRIME


@settings(deadline=None)
@given(st.integers(-(2**31) + 128, 2**31 - 128))
def test_the_field_holds_negative_numbers(k):
    assert int(sb.to_field(jnp.int32(k))) == k % sb.PRIME
    assert float(sb.from_field(sb.to_field(jnp.int32(k)))) == np.float32(k)


def test_rounding_goes_to_a_neighbor_and_is_right_in_the_mean():
    x = jnp.array([0.3, -0.3, 2.0, -1.75])
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = np.asarray(jax.vmap(lambda key: sb.rounded(x, 2, key))(keys))
    assert (np.abs(drawn - 2 * np.asarray(x)) < 1).all()
    np.testing.assert_allclose(drawn.mean(axis=0), 2 * x, atol=0.02)
    assert (drawn[:, 2] == 4).all()


@pytest.mark.parametrize("levels", [2**8, 2**16])
def test_the_sum_is_the_mean_update_but_for_the_rounding(levels):
    rng = np.random.default_rng(0)
    happened = received([2, 1, 3, 0], lag=[0, 3, 8, 0])
    hp = problems.hparams(
        secure_buffer__levels=levels,
        secure_buffer__weight_levels=64,
        staleness__kind=1,
        staleness__a=0.5,
    )
    u = rng.normal(size=(4, 50)).astype(np.float32)
    u[3] = np.nan  # absent
    found, _ = sb.secure_sum({"w": jnp.asarray(u)}, (), happened, hp)
    rho = np.asarray(sb.secure_weights(happened.info, hp).rho, np.float64)
    assert rho[3] == 0 and rho.sum() == pytest.approx(1)
    # s = 1, 1/2, 1/3 in steps of 1/64: the last is rounded to 21 or 22 of them.
    assert rho[0] / rho[1] == pytest.approx(2)
    assert rho[0] / rho[2] in (pytest.approx(64 / 21), pytest.approx(64 / 22))
    error = np.asarray(found["w"]) - rho[:3] @ u[:3].astype(np.float64)
    assert 0 < np.abs(error).max() < 1 / levels


def test_a_sum_beyond_half_of_p_wraps_around():
    happened = received([1, 1])
    hp = problems.hparams(secure_buffer__levels=2**16, secure_buffer__weight_levels=64)
    fits = {"w": jnp.array([[200.0], [200.0]])}
    wraps = {"w": jnp.array([[300.0], [300.0]])}
    assert float(sb.secure_sum(fits, (), happened, hp)[0]["w"][0]) == 200
    expected = (600 * 2**22 - sb.PRIME) / (2 * 2**22)
    found = float(sb.secure_sum(wraps, (), happened, hp)[0]["w"][0])
    assert found == pytest.approx(expected, rel=1e-6)
