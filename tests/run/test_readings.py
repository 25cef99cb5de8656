"""Readings of the paper as settings: constants, c, selection, weights, splits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import problems
from tests.problems import small
from tsfl_jax.config import Config, replace
from tsfl_jax.data import partition
from tsfl_jax.data.partition import PartitionConfig
from tsfl_jax.engine import client as local
from tsfl_jax.engine import interval
from tsfl_jax.prepare import prepare
from tsfl_jax.prepare.workload import draw_workload
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import RoundInfo
from tsfl_jax.run.identity import identity_of
from tsfl_jax.types import Constants, UserError

TAU, SIZE = [1, 3, 4, 4], [64, 64, 32, 96]


@functools.cache
def compiled(algorithm):
    return jax.jit(AGGREGATORS[algorithm].mixing.weights)


def weights(algorithm="dms", tau=TAU, t=0, seed=0, threshold=np.nan, **changes):
    """A rule's decision; two mini-batch steps in a local iteration."""
    tau = jnp.array(tau)
    info = RoundInfo(
        key=jax.random.key(seed),
        client=jnp.arange(len(tau)),
        tau=tau,
        size=jnp.array(SIZE[: len(tau)]),
        steps=2 * tau,
        lag=jnp.zeros_like(tau),
        group=jnp.int32(0),
        constants=Constants(1.0, 1.0, 1.0),
        interval=jnp.int32(t),
        threshold=jnp.float32(threshold),
    )
    return compiled(algorithm)(info, problems.hparams(lr=0.04, **changes))


def test_coupling_in_both_units():
    # c = 0.04 · 3/(2 · 4) = 0.015 per iteration; per step 0.04 · 7/8 = 0.035.
    centered = np.array(TAU) - 3
    found = weights(drop=0.0)
    np.testing.assert_allclose(found.rho, 0.25 + 0.015 * centered, rtol=1e-6)
    found = weights(drop=0.0, unit=1.0)
    np.testing.assert_allclose(found.rho, 0.25 + 0.035 * 2 * centered, rtol=1e-5)
    for units, factor in ((0.0, 1), (1.0, 2)):
        found = weights(drop=0.0, unit=units, coupling=0.02)
        np.testing.assert_allclose(found.coupling, 0.02)
        np.testing.assert_allclose(found.rho, 0.25 + 0.02 * factor * centered)


def test_late_factors_hold_from_their_interval_on():
    steps = dict(coupling=0.02, drop=0.0, late=3.0, coupling_late=0.5, drop_late=1.0)
    early, late = (weights(t=t, **steps) for t in (2, 3))
    np.testing.assert_allclose([early.coupling, late.coupling], [0.02, 0.01])
    # P_0 = (3 − 1)/4 = 1/2.
    kept = [
        [weights(t=t, seed=s, **steps).selected[0] for s in range(30)] for t in (2, 3)
    ]
    assert all(kept[0]) and 0 < sum(kept[1]) < 30


def test_raw_weights_are_the_formula_even_below_zero():
    found = weights(drop=0.0, coupling=0.3, project=0.0)
    np.testing.assert_allclose(found.rho, 0.25 + 0.3 * (np.array(TAU) - 3), rtol=1e-5)
    assert found.rho.min() < 0
    assert weights(drop=0.0, coupling=0.3).rho.min() == 0
    # Beyond what the projection needs, too: c·(τ − mean) = −8.
    np.testing.assert_allclose(
        weights(drop=0.0, coupling=4.0, project=0.0).rho[0], -7.75, rtol=1e-6
    )


def test_by_size():
    even = weights("fedavg", by_size=0.0).rho
    np.testing.assert_allclose(even, 0.25)
    found = weights("fedavg", by_size=1.0).rho
    np.testing.assert_allclose(found, np.array(SIZE) / 256)
    plain = np.asarray(weights(drop=0.0, by_size=0.0).rho)
    np.testing.assert_array_equal(plain, weights(drop=0.0).rho)
    share = plain * np.array(SIZE)
    found = weights(drop=0.0, by_size=1.0).rho
    np.testing.assert_allclose(found, share / share.sum(), rtol=1e-6)


def test_threshold_of_all_work():
    # K = 4 instead of 3: client 1, with τ = 3, may be dropped too.
    for value, certain in ((np.nan, True), (4.0, False)):
        kept = [weights(seed=s, threshold=value).selected[1] for s in range(60)]
        assert all(kept) is certain
        expected = 3.0 if certain else 4.0
        assert float(weights(threshold=value).threshold) == expected
    # Above H it is H, so that a client is always left.
    assert weights(threshold=9.0).selected[2:].all()
    settings = {"num_intervals": 3, "num_clients": 4, "schedule.kind": "case2"}
    for value, threshold in (("uploads", np.nan), ("all", 2.5)):
        settings |= {"schedule.upload_above": 2, "dms.threshold": value}
        times = draw_workload(replace(Config(), settings)).schedule
        assert times.tau.tolist() == [[0, 0, 3, 4]] * 3
        np.testing.assert_array_equal(times.threshold, [threshold] * 3)


LABELS = np.repeat(np.arange(10), 40)


def split(**settings):
    return partition.make_partition(
        LABELS, np.full(8, 32), PartitionConfig(**settings), np.random.default_rng(3)
    )


def test_a_share_drawn_iid():
    pure = split(kind="shards", classes_per_client=1)
    mixed = split(kind="shards", classes_per_client=1, iid_share=0.5)
    assert (mixed.capacity == 32).all() and mixed.indices.shape == (8, 32)
    assert len(np.unique(mixed.indices)) == 8 * 32  # no sample twice
    most = [np.bincount(LABELS[row], minlength=10).max() for row in mixed.indices]
    assert [len(np.unique(LABELS[row])) for row in pure.indices] == [1] * 8
    assert min(most) >= 16 and max(most) < 26
    # A client's own class is not only at the end of its row.
    assert any(len(np.unique(LABELS[row[:8]])) > 2 for row in mixed.indices)


def test_a_common_share():
    mixed = split(kind="shards", classes_per_client=1, iid_share=0.25, common=True)
    assert all(len(np.unique(row)) == 32 for row in mixed.indices)
    assert len(set.intersection(*map(set, mixed.indices))) == 8


def test_new_samples_have_the_classes_of_the_old_ones():
    data = problems.dataset(samples=120)
    problem = problems.problem(data, 3, 20)
    labels = data.y_train
    order = np.argsort(labels, kind="stable")
    count = np.bincount(labels)
    class_index = local.ClassIndex(np.cumsum(count) - count, count, order, labels)
    key = jax.random.key(0)
    ones = jnp.ones(3, jnp.int32)
    clients = problems.members(problem.client, ones, 20 * ones, problem.rows)
    same = interval.renewed(problem, key, jnp.int32(0), clients)
    assert same is clients
    changing = problem._replace(class_index=class_index)
    rows = [
        np.asarray(interval.renewed(changing, key, jnp.int32(t), clients).row)
        for t in range(40)
    ]
    for new in rows:
        np.testing.assert_array_equal(labels[new], labels[problem.rows])
    assert len(np.unique(np.stack(rows))) == 120  # all samples, not those of the rows
    assert (rows[0] != rows[1]).mean() > 0.8
    moved = clients._replace(id=clients.id[::-1])
    other = np.asarray(interval.renewed(changing, key, jnp.int32(0), moved).row)
    assert (other[1] == rows[0][1]).all() and (other[0] != rows[0][0]).any()


def config_of(**changes):
    settings = {"num_intervals": 2, "schedule__kind": "case1"}
    return small(**settings | {"schedule__data_size": 32} | changes)


def test_how_constants_are_estimated_belongs_to_rules_that_use_them():
    def identity(**changes):
        return identity_of(prepare.prepare(config_of(**changes)))

    other = {"constants__when": "interval", "constants__estimator": "power"}
    with pytest.raises(UserError, match="when=interval: would be ignored .*fedavg"):
        identity(algorithm="fedavg", **other)
    fedavg = identity(algorithm="fedavg")
    assert not any(name.startswith("constants.") for name in fedavg)
    assert identity() != identity(**other)
    measured = {"algorithm": "fedavg", "measure_clients": True}
    assert identity(**measured) != identity(**measured, **other)
