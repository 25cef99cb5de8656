"""Settings of JAX that a careful user switches on, or that would change results."""

import jax
import numpy as np
import pytest

import tsfl_jax
from tests.problems import small


def config_of(rule, framework="none", **changes):
    if framework != "none":
        changes |= {"timeline__framework": framework, "timeline__local_iterations": 2}
    shape = {"num_intervals": 2, "num_clients": 6, "schedule__data_size": 16}
    return small(algorithm=rule, **shape | changes)


@pytest.mark.parametrize(
    ("rule", "framework"),
    [
        ("fedavg", "none"),
        pytest.param("dms", "none", marks=pytest.mark.slow),
        pytest.param("fedasync", "afl", marks=pytest.mark.slow),
    ],
)
def test_strict_promotion_and_search_for_nans_change_nothing(rule, framework):
    plain = tsfl_jax.simulate(config_of(rule, framework))
    # Another default generator changes nothing either.
    strict, other = jax.numpy_dtype_promotion("strict"), jax.default_prng_impl("rbg")
    with strict, other, jax.debug_nans(True):
        searched = tsfl_jax.simulate(config_of(rule, framework))
    jax.tree.map(np.testing.assert_array_equal, plain.params, searched.params)


@pytest.mark.slow
def test_a_run_does_not_resume_under_another_arithmetic(tmp_path):
    config = config_of("fedavg")
    tsfl_jax.simulate(config, workdir=tmp_path)
    for setting in (
        lambda: jax.threefry_partitionable(False),
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.default_matmul_precision("bfloat16"),
    ):
        with setting(), pytest.raises(tsfl_jax.UserError, match="jax_"):
            tsfl_jax.simulate(config, workdir=tmp_path)
