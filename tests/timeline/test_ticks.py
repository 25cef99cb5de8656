"""Decimal times: every framework against the same in whole seconds, which float64 adds
exactly.
"""

import functools
import math

import numpy as np
import pytest

from tests.timeline.test_timeline import ALL, fleet_of, run
from tests.timeline.test_timeline import simulate as by_name
from tsfl_jax.timeline import FRAMEWORKS
from tsfl_jax.timeline.fleet import Fleet

# Settings in tenths of a second; those that are times are divided with the fleet's.
TIMES = ("horizon", "interval", "deadline", "window")
OPTIONS = {
    name: {n: 4 * value if n in TIMES else value for n, value in options.items()}
    for name, options in ALL.items()
}
SEEDS = range(6)


def tenths(seed):
    """Five clients with times in tenths; after the last window all are online."""
    rng = np.random.default_rng(seed)
    N, J = 5, int(rng.integers(1, 5))
    online = []
    for i in range(N):
        windows = np.cumsum(rng.integers(1, 60, 8)).reshape(4, 2).astype(float)
        windows[-1, 1] = math.inf
        online.append(windows if i % 3 else np.empty((0, 2)))
    return Fleet(
        rng.integers(1, 13, (N, J)).astype(float),
        rng.integers(0, 5, (N, J)).astype(float),
        rng.integers(1, 5, (N, J)).astype(float),
        rng.random((N, J)) < 0.15,
        tuple(online) if seed % 2 else (),
    )


def divided(fleet, options, by=10):
    """The same fleet and settings in decimal seconds."""
    shorter = [a / by for a in fleet[:3]]
    online = tuple(windows / by for windows in fleet.online)
    return (
        Fleet(*shorter, fleet.lost, online),
        {n: v / by if n in TIMES else v for n, v in options.items()},
    )


def same(decimal, whole, by=10, rtol=0.0):
    for name, a, b in zip(decimal._fields, decimal, whole, strict=True):
        b = b / by if b.dtype == np.float64 else b
        np.testing.assert_allclose(a, b, rtol, err_msg=name)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_decimal_times_are_exact(name):
    """Clients, versions, iterations, order and times are those of whole seconds."""
    for seed in SEEDS:
        fleet, options = tenths(seed), dict(OPTIONS[name])
        if name == "tsfl":
            options["carry"] = seed % 3 > 0
        simulate = functools.partial(by_name, name)
        shorter, fewer = divided(fleet, options)
        whole, decimal = simulate(fleet, **options), simulate(shorter, **fewer)
        same(decimal.trace, whole.trace)
        for a, b in zip(decimal.tasks, whole.tasks, strict=True):
            times = b.arrival / 10, b.start / 10, b.stop / 10, b.spent / 10
            assert (a.arrival, a.start, a.stop, a.spent) == times
            assert a.fate == b.fate and a.first == b.first
        # Where a float64 no longer holds a nanosecond, and 63 bits hold no time.
        for by in (1e-8, 1e-25):
            far, more = divided(fleet, options, by)
            same(simulate(far, **more).trace, whole.trace, by, 1e-15)


def test_a_client_that_leaves_as_a_round_begins_is_not_selected():
    # Eight rounds of 0.1 s end at 0.8, when client 1 leaves; the ninth at 0.9.
    fleet = fleet_of([0.1, 0.1], online=[[], [(0, 0.8)]])
    trace = run("fedcs", fleet, horizon=1.0, deadline=1.0)
    assert trace.time.tolist() == [k / 10 for k in range(1, 11)]
    assert trace.client[:, 1].tolist() == [1] * 8 + [-1] * 2


def test_equal_means_are_a_tie():
    # Of three draws, 1/3 + 7/3 + 1/3 and 3 s; in float64 the first is more.
    fleet = fleet_of([[1, 1, 5], [3, 3, 3]], [[0, 0, 1], [0] * 3], [[0, 0, 1], [0] * 3])
    trace = run("fedat", fleet, horizon=9, tiers=2)
    assert trace.group.tolist() == trace.client[:, 0].tolist()
