"""Clients that hold fewer samples than a mini-batch train on what they have."""

import jax
import numpy as np
import pytest

import tsfl_jax
from tests import problems


def trained(parts, batch_size, **changes):
    """A run of one pass over given samples; `parts` are the clients' indices."""
    config = tsfl_jax.Config(
        num_intervals=2, num_clients=len(parts), batch_size=batch_size, lr=0.1
    )
    config.algorithm, config.momentum = "fedavg", 0.0
    config.schedule.kind, config.schedule.tau = "explicit", (1,)
    for name, value in changes.items():
        setattr(config, name, value)
    return tsfl_jax.simulate(
        config, dataset=problems.dataset(samples=300), partition=parts
    )


@pytest.mark.parametrize(
    "mapping", ["sequential", pytest.param("vmap", marks=pytest.mark.slow)]
)
def test_a_short_batch_is_the_whole_of_a_small_client(mapping):
    """Two samples in a batch of up to 10 or 1,000 are as in a batch of two."""
    parts = [[3, 7]]
    exact = trained(parts, 2, mapping=mapping)
    assert not any("short mini-batch" in note for note in exact.summary["notes"])
    for batch_size in (10, 1000):
        found = trained(parts, batch_size, mapping=mapping)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            found.params,
            exact.params,
        )
        assert found.history["samples"].tolist() == [2, 2]
        assert any("1 of 1 clients" in note for note in found.summary["notes"])


@pytest.mark.slow
def test_a_natural_split_runs():
    """Sizes 70, 68 and 2 with B = 10: 7 + 7 + 1 steps, every sample once."""
    parts = [range(70), range(70, 138), [150, 151]]
    for algorithm in ("fedavg", "dms", "bound_optimal"):
        result = trained([list(p) for p in parts], 10, algorithm=algorithm)
        assert result.history["samples"].tolist() == [140, 140]
        assert np.isfinite(result.history["train_loss"]).all()
        if algorithm == "bound_optimal":
            assert np.isfinite(result.history["client_variance"]).all()
