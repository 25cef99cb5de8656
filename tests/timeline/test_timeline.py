"""Timelines of all frameworks: schedules worked by hand, SimPy, properties, errors."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsfl_jax.config import Config, replace
from tsfl_jax.prepare import workload
from tsfl_jax.timeline import FRAMEWORKS, deliveries, segments, trace
from tsfl_jax.timeline.fleet import Fleet, draw_fleet, exact
from tsfl_jax.timeline.ticks import SECOND
from tsfl_jax.timeline.trace import Trace
from tsfl_jax.types import UserError


def fleet_of(iteration, download=0, upload=0, lost=False, online=()):
    """Times of each client, [N] or [N, J]; windows as lists of pairs."""
    N = len(iteration)
    arrays = [np.asarray(a) for a in (iteration, download, upload, lost)]
    J = max([a.shape[1] for a in arrays if a.ndim == 2], default=1)

    def full(a, dtype):
        a = a[:, None] if a.ndim == 1 else a
        return np.broadcast_to(a, (N, J)).astype(dtype)

    return Fleet(
        *(full(a, np.float64) for a in arrays[:3]),
        full(arrays[3], bool),
        tuple(np.array(w, np.float64).reshape(-1, 2) for w in online),
    )


def run(name, fleet, **kwargs):
    if name != "tsfl":
        kwargs = {"iterations": 1} | kwargs
    return simulate(name, fleet, **kwargs).trace


def rows(trace, *fields):
    """Per update: its time and a tuple of the fields of each delivery."""
    out = []
    for r, time in enumerate(trace.time):
        there = np.flatnonzero(trace.client[r] >= 0)
        cells = [tuple(getattr(trace, f)[r, k].item() for f in fields) for k in there]
        out.append((time.item(), cells))
    return out


# Client 0 takes 0.5 + 2·1 + 0.5 = 3 s for two iterations, client 1 0.25 + 6 + 0.75 = 7.
TWO = fleet_of([1.0, 3.0], [0.5, 0.25], [0.5, 0.75])


def test_sfl():
    trace = run("sfl", TWO, horizon=20, iterations=2)
    # Rounds end at 7 and 14; 21 is after the horizon.
    assert rows(trace, "client", "version", "iterations", "task", "start") == [
        (7, [(0, 0, 2, 0, 0), (1, 0, 2, 0, 0)]),
        (14, [(0, 1, 2, 1, 7), (1, 1, 2, 1, 7)]),
    ]
    assert trace.arrival.tolist() == [[3, 7], [10, 14]]
    assert trace.group.tolist() == [0, 0]
    assert [a.dtype for a in trace] == [
        np.dtype(t) for t in ("f8", "i4", "i4", "i4", "i4", "f8", "f8", "i4")
    ]
    # The horizon belongs to the timeline.
    assert len(run("sfl", TWO, horizon=21, iterations=2).time) == 3
    assert len(run("sfl", TWO, horizon=20.999, iterations=2).time) == 2


def test_draws_count_on_and_wrap():
    # Iterations 1, 2, 4 and again; two a round: 1 + 2, 4 + 1, 2 + 4, 1 + 2.
    fleet = fleet_of([[1, 2, 4]], [[0.5, 0.25, 0]])
    trace = run("sfl", fleet, horizon=18.25, iterations=2)
    # With downloads: 3.5, then + 5.25, + 6, + 3.5.
    assert trace.time.tolist() == [3.5, 8.75, 14.75, 18.25]


def test_lost_deliveries_are_waited_for():
    # Client 1's first is lost; so are both second ones: no update, but time passes.
    fleet = fleet_of([1, 2], lost=[[False, True, False], [True, True, False]])
    trace = run("sfl", fleet, horizon=6)
    assert rows(trace, "client", "version", "task") == [
        (2, [(0, 0, 0)]),
        (6, [(0, 1, 2), (1, 1, 2)]),
    ]
    # Padding at the end of the row.
    assert trace.client[0].tolist() == [0, -1] and trace.task[0, 1] == 0
    assert math.isnan(trace.start[0, 1]) and math.isnan(trace.arrival[0, 1])
    # afl: 0 arrives at 1, is lost at 2, at 3; 1 is lost at 2 and 4, arrives at 6.
    assert rows(run("afl", fleet, horizon=6), "client", "version", "task") == [
        (1, [(0, 0, 0)]),
        (3, [(0, 1, 2)]),
        (4, [(0, 2, 3)]),
        (6, [(0, 3, 5)]),
        (6, [(1, 3, 2)]),
    ]


def test_offline_clients():
    # 0 is online in [1, 2) and from 3 on: 0.25 s download, then 1 s, pausing at 2.
    fleet = fleet_of([1, 0.5], [0.25, 0.25], online=[[(1, 2), (3, math.inf)], []])
    trace = run("sfl", fleet, horizon=5)
    # Round 0: client 0 from 1 to 2, then 0.25 s from 3. Round 1: 3.25 + 1.25.
    assert trace.time.tolist() == [3.25, 4.5]
    assert trace.start.tolist() == [[1, 0], [3.25, 3.25]]
    assert trace.arrival.tolist() == [[3.25, 0.75], [4.5, 4.0]]
    # The server does not wait for a client that never returns.
    gone = fleet_of([1, 0.5], online=[[(0, 1.5)], []])
    assert rows(run("sfl", gone, horizon=2), "client") == [
        (1, [(0,), (1,)]),
        (1.5, [(1,)]),
        (2, [(1,)]),
    ]
    # afl: the version is that of the moment when the download begins.
    trace = run("afl", fleet, horizon=3.25)
    # 1 arrives at .75, 1.5, 2.25, 3; 0 began at 1, after one update.
    assert rows(trace, "client", "version", "start")[-1] == (3.25, [(0, 1, 1)])


def test_a_client_that_never_finishes_gives_up_at_the_end_of_each_round():
    # Client 1 is gone from 3 s on, in the middle of its first task of 4 s; client 2 is
    # there for half a second, in the fifth round.
    fleet = fleet_of([0.5, 2.0, 2.0], online=[[], [(0, 3.0)], [(4.25, 4.75)]])
    made = FRAMEWORKS["sfl"].simulate(fleet, horizon=10.0, iterations=2)
    end = float(made.trace.time[-1])
    assert made.trace.client.tolist() == [[0, -1, -1]] * len(made.trace.time)
    mine = [t for t in made.tasks if t.client == 1]
    length = float(made.trace.time[0])
    assert [t.start for t in mine] == [t.number * length for t in mine]
    assert [t.stop for t in mine] == [t.start + length for t in mine]
    assert {t.fate for t in made.tasks if t.client > 0} == {trace.GIVEN_UP}
    # What it was given before it came was replaced then.
    (late,) = (t for t in made.tasks if t.client == 2)
    assert late.start == 4.25 and late.number == math.floor(4.25 / length)
    seen = list(segments.segments(made.tasks, fleet, end))
    for i in range(3):
        bars = [s for s in seen if s.client == i]
        assert sum(s.end - s.start for s in bars) == pytest.approx(end)
        assert [s.end for s in bars[:-1]] == [s.start for s in bars[1:]]
    work = sum(s.end - s.start for s in seen if s.client == 1 and s.kind != "offline")
    assert work == pytest.approx(3.0)


def test_afl():
    trace = run("afl", TWO, horizon=10, iterations=2)
    # Client 0 arrives at 3, 6, 9, client 1 at 7.
    assert rows(trace, "client", "version", "iterations", "task", "start") == [
        (3, [(0, 0, 2, 0, 0)]),
        (6, [(0, 1, 2, 1, 3)]),
        (7, [(1, 0, 2, 0, 0)]),
        (9, [(0, 2, 2, 2, 6)]),
    ]
    assert (trace.arrival[:, 0] == trace.time).all()
    # Staleness r − version: 0, 0, 2, 1.
    times = deliveries.schedule_of(trace, np.ones(2, int))
    assert deliveries.staleness(times).tolist() == [0, 0, 2, 1]


def test_ties_go_to_the_smaller_id():
    trace = run("afl", fleet_of([1, 1, 1]), horizon=2)
    assert trace.client[:, 0].tolist() == [0, 1, 2] * 2
    # A client that delivers goes on at once, before other arrivals of the moment.
    assert trace.version[:, 0].tolist() == [0, 0, 0, 1, 2, 3]


def test_fedbuff():
    trace = run("fedbuff", TWO, horizon=14, iterations=2, buffer=2)
    # Arrivals: 0 at 3, 6 | 1 at 7, 0 at 9 | 0 at 12, 1 at 14.
    assert rows(trace, "client", "version", "task", "start", "arrival") == [
        (6, [(0, 0, 0, 0, 3), (0, 0, 1, 3, 6)]),
        (9, [(1, 0, 0, 0, 7), (0, 1, 2, 6, 9)]),
        (14, [(0, 2, 3, 9, 12), (1, 1, 1, 7, 14)]),
    ]


def test_fedat():
    # Tier 0: clients 0 and 3, rounds of 3 s; tier 1: 1 and 2, rounds of 5 s.
    fleet = fleet_of([2, 4, 5, 3])
    trace = run("fedat", fleet, horizon=10, tiers=2)
    assert rows(trace, "client", "version", "task") == [
        (3, [(0, 0, 0), (3, 0, 0)]),
        (5, [(1, 0, 0), (2, 0, 0)]),
        (6, [(0, 1, 1), (3, 1, 1)]),
        (9, [(0, 3, 2), (3, 3, 2)]),
        (10, [(1, 2, 1), (2, 2, 1)]),
    ]
    assert trace.group.tolist() == [0, 1, 0, 0, 1]
    # At 15 both end: the faster tier first.
    assert run("fedat", fleet, horizon=15, tiers=2).group.tolist()[-2:] == [0, 1]
    # Five clients in two tiers: three and two.
    assert run("fedat", fleet_of([1] * 5), horizon=1, tiers=2).client.tolist() == [
        [0, 1, 2],
        [3, 4, -1],
    ]


def test_esync():
    # Client 1 takes 7 s; in that time client 0 does (7 − 1)/1 = 6 iterations.
    trace = run("esync", TWO, horizon=14, iterations=2)
    assert trace.time.tolist() == [7, 14]
    assert trace.iterations.tolist() == [[6, 2]] * 2
    assert trace.arrival.tolist() == [[7, 7], [14, 14]]
    # 0.1 s ten times is 1 s in spite of rounding.
    trace = run("esync", fleet_of([0.1, 1.0]), horizon=1)
    assert trace.iterations.tolist() == [[10, 1]]
    # Means decide, draws happen: client 0, mean 2 s, plans 2 in 4 s; does 3 + 3.
    trace = run("esync", fleet_of([[3, 3, 1, 1], [4, 4, 4, 4]]), horizon=6)
    assert trace.time.tolist() == [6] and trace.iterations.tolist() == [[2, 1]]


def test_fedcs():
    # Ready at 1, 2, 4; uploads 2, 1, 3. Greedy: client 0 would end at 3, 1 at 3
    # (tie: 0); then 1 at 4; then 2 at 7.
    fleet = fleet_of([1, 2, 4], upload=[2, 1, 3])
    trace = run("fedcs", fleet, horizon=8, deadline=5)
    assert rows(trace, "client", "version", "task", "arrival") == [
        (4, [(0, 0, 0, 3), (1, 0, 0, 4)]),
        (8, [(0, 1, 1, 7), (1, 1, 1, 8)]),
    ]
    trace = run("fedcs", fleet, horizon=7, deadline=7)
    assert trace.time.tolist() == [7] and trace.arrival.tolist() == [[3, 4, 7]]


def test_fedcs_deadline():
    # Client 1's uploads take 0.5 and 1.5, expected 1: round 0 is 1–3, 3–3.5. Round 1
    # from 3.5: 4.5–6.5, then 6.5–8 would be after 7.5 and is dropped.
    fleet = fleet_of([1, 1], upload=[[2, 2], [0.5, 1.5]])
    trace = run("fedcs", fleet, horizon=7.5, deadline=4)
    assert rows(trace, "client", "task") == [(3.5, [(0, 0), (1, 0)]), (7.5, [(0, 1)])]
    # Picked 0 then 1, but 1 is ready first in round 0: uploads 1–3, then 3–4.
    fleet = fleet_of([[2, 1], [1, 5]], upload=[1, 2])
    trace = run("fedcs", fleet, horizon=4, deadline=5)
    assert trace.client.tolist() == [[0, 1]] and trace.arrival.tolist() == [[4, 3]]
    # Lost: the channel is used, nothing arrives.
    fleet = fleet_of([1, 1], upload=1, lost=[True, False])
    trace = run("fedcs", fleet, horizon=3, deadline=4)
    assert rows(trace, "client", "arrival") == [(3, [(1, 3)])]
    # Offline clients are not picked; a round waits until a client is online.
    fleet = fleet_of([1, 1], upload=1, online=[[(2, 99)], [(5, 99)]])
    trace = run("fedcs", fleet, horizon=9, deadline=4)
    # 2–4 and 4–6 with client 0; 6–9 with both, one upload after the other.
    assert rows(trace, "client") == [(4, [(0,)]), (6, [(0,)]), (9, [(0,), (1,)])]
    # Ready as it goes offline, and nothing to upload: in time, as in sfl.
    fleet = fleet_of([1], online=[[(0, 1), (5, 99)]])
    trace = run("fedcs", fleet, horizon=9, deadline=3)
    assert trace.time.tolist() == [1, 6, 7, 8, 9]
    # Three times 0.1 is more than 0.3 in float64: no round ends before its arrivals.
    fleet = fleet_of([0.1, 0.1], online=[[], [(0, 0.15), (5, 99)]])
    trace = run("fedcs", fleet, iterations=3, horizon=0.5, deadline=0.3)
    assert trace.client.tolist() == [[0]] and trace.arrival[0, 0] == trace.time[0]


def test_safa():
    fleet = fleet_of([1, 2, 5])
    # Quota ⌈0.6·3⌉ = 2. Round 0 ends at 2 with 0 and 1. In round 1 these have arrived
    # by 4, and wait for 2, which was not picked: it arrives at 5, and 0 fills the
    # quota. In round 2 client 1 arrives at 7, again, so that its bypassed model does
    # not count; 0 at 6 and 2 at 10 were picked before, and the first of them is.
    trace = run("safa", fleet, horizon=10, fraction=0.6, lag=1)
    assert rows(trace, "client", "version", "task", "start") == [
        (2, [(0, 0, 0, 0), (1, 0, 0, 0)]),
        (5, [(0, 1, 1, 2), (2, 0, 0, 0)]),
        (10, [(0, 2, 2, 5), (1, 2, 2, 5)]),
    ]
    # Round 3, from 10: 2 is not among those of round 2, and arrives last. 1 is not
    # picked this time, and what 2 delivered at 10 counts by the bypass, until 15.
    trace = run("safa", fleet_of([1, 2, 5, 3]), horizon=8, fraction=0.5, lag=9)
    assert rows(trace, "client", "version", "task", "start") == [
        (2, [(0, 0, 0, 0), (1, 0, 0, 0)]),
        # 0 at 3 and 1 at 4 wait; 3 at 3 and 2 at 5 fill the quota.
        (5, [(2, 0, 0, 0), (3, 0, 0, 0)]),
        # The bypassed 0 delivers again at 6, and 1 at 7.
        (7, [(0, 2, 2, 5), (1, 2, 2, 5)]),
    ]
    # With lag 0 who is behind begins anew: only 0 and 1 ever arrive.
    trace = run("safa", fleet, horizon=6, fraction=0.3, lag=0)
    assert rows(trace, "client", "version") == [
        (1, [(0, 0)]),
        (3, [(1, 1)]),  # 0 has arrived at 2, and was picked before
        (4, [(0, 2)]),
        (6, [(1, 3)]),  # and 0 at 5, which will count later
    ]
    # 0.1 · 30 is more than 3 in float64, but three deliveries are enough.
    trace = run("safa", fleet_of([1] * 30), horizon=1, fraction=0.1, lag=0)
    assert trace.client.shape[1] == 3


def test_safa_keeps_what_arrives_as_a_round_ends():
    # All arrive at 1, a round ends with the first of them: the others, though behind by
    # more than the lag, have arrived and end the next two rounds at the same moment.
    trace = run("safa", fleet_of([1] * 3), horizon=2, fraction=0.3, lag=0)
    assert rows(trace, "client", "version", "task") == [
        (1, [(0, 0, 0)]),
        (1, [(1, 0, 0)]),
        (1, [(2, 0, 0)]),
        # Under way, not arrived: given up twice and begun anew.
        (2, [(0, 3, 3)]),
        (2, [(1, 3, 2)]),
        (2, [(2, 3, 1)]),
    ]
    # A tie that is lost is known to be lost: its client begins anew at once.
    fleet = fleet_of([1] * 3, lost=[[0] * 3, [1, 0, 0], [0] * 3])
    trace = run("safa", fleet, horizon=2, fraction=0.3, lag=0)
    assert rows(trace, "client", "version", "task")[:4] == [
        (1, [(0, 0, 0)]),
        (1, [(2, 0, 0)]),
        (2, [(0, 2, 2)]),
        (2, [(1, 2, 2)]),
    ]


def test_ttfed():
    # Δ = 3 and tasks of 2, 4 and 3 s: tiers 1, 2 and 1 (a task that ends with the
    # interval is in time).
    fleet = fleet_of([1, 2, 1.5])
    arguments = {"num_intervals": 4, "interval": 3.0, "iterations": 2}
    trace = run("ttfed", fleet, **arguments)
    assert rows(trace, "client", "version", "task", "start") == [
        (3, [(0, 0, 0, 0), (2, 0, 0, 0)]),
        (6, [(0, 1, 1, 3), (1, 0, 0, 0), (2, 1, 1, 3)]),
        (9, [(0, 2, 2, 6), (2, 2, 2, 6)]),
        (12, [(0, 3, 3, 9), (1, 2, 1, 6), (2, 3, 3, 9)]),
    ]
    # An interval without an arrival is no update; a lost upload ends a task.
    fleet = fleet_of([4.0, 7.0], lost=[[0, 1], [0, 0]])
    trace = run("ttfed", fleet, num_intervals=6, interval=3.0)
    assert rows(trace, "client", "version", "task") == [
        (6, [(0, 0, 0)]),  # 6 s = 2 Δ
        (9, [(1, 0, 0)]),  # 3 Δ; the task of client 0 that ends at 10 is lost
        (18, [(0, 2, 2), (1, 2, 1)]),
    ]
    # Offline in [0, 3.5): it begins then, with the model of the interval's beginning.
    fleet = fleet_of([1.0, 1.0], online=[[(0, 99)], [(3.5, 99)]])
    trace = run("ttfed", fleet, num_intervals=2, interval=3.0)
    assert rows(trace, "client", "version", "start") == [
        (3, [(0, 0, 0)]),
        (6, [(0, 1, 3), (1, 1, 3.5)]),
    ]


def test_hysync():
    # Tasks of 2, 3 and 7 s; the window is open from 2 to 3, at whose end 1 is in.
    fleet = fleet_of([2, 3, 7])
    trace = run("hysync", fleet, horizon=9, window=1.0)
    assert rows(trace, "client", "version", "task", "start") == [
        (3, [(0, 0, 0, 0), (1, 0, 0, 0)]),
        (6, [(0, 1, 1, 3), (1, 1, 1, 3)]),  # open from 5
        (8, [(0, 2, 2, 6), (2, 0, 0, 0)]),  # 2 opens it at 7, 0 arrives at 8
    ]
    # Without a window it is AFL, but that ties are one update.
    fleet = fleet_of([2.0, 3.1, 7.3])
    alone = run("hysync", fleet, horizon=30, window=0.0)
    equal(alone, run("afl", fleet, horizon=30))
    # A window that all fit into makes rounds of all.
    rounds = run("hysync", fleet, horizon=40, window=6.0)
    assert rows(rounds, "client", "version") == [
        (8 * r + 8.0, [(0, r), (1, r), (2, r)]) for r in range(5)
    ]


class Order:
    """A generator whose permutations are given."""

    def __init__(self, *orders):
        self.orders = iter(orders)

    def permutation(self, n):
        return np.array(next(self.orders))


def test_cached():
    # Two of four clients upload in a round; tasks of 1, 2, 4 and 8 s.
    fleet = fleet_of([0.5, 1, 3, 7], upload=[0.5, 1, 1, 1])
    drawn = [[0, 1, 2, 3], [2, 0, 1, 3], [2, 1, 0, 3], [0, 2, 1, 3], [0, 1, 2, 3]]
    arguments = {"fraction": 0.5, "lag": 2, "rng": Order(*drawn, drawn[0])}
    trace = run("cached", fleet, horizon=10, **arguments)
    assert rows(trace, "client", "version", "task", "arrival") == [
        (2, [(0, 0, 0, 1), (1, 0, 0, 2)]),
        (4, [(0, 1, 1, 3), (2, 0, 0, 4)]),  # 2 has worked since 0
        # 1 has waited since 3 and uploads from 4 on; 2 has begun anew.
        (8, [(1, 1, 1, 5), (2, 2, 1, 8)]),
        # 3 is 3 > 2 versions behind; it has waited since 7, and 0 since 4.5.
        (9, [(0, 2, 2, 8.5), (3, 0, 0, 9)]),
        (10, [(0, 4, 3, 10), (1, 3, 2, 10)]),
    ]


def test_tsfl():
    # Δ = 3. Client 0: (3 − 0.5)/0.5 = 5; client 1: (3 − 1)/2 = 1; client 2: 4 s.
    fleet = fleet_of([0.5, 2, 4], [0.25, 0.5, 0], [0.25, 0.5, 0])
    trace = run("tsfl", fleet, num_intervals=5, interval=3.0, carry=False)
    assert trace.time.tolist() == [3, 6, 9, 12, 15]
    assert trace.iterations.tolist() == [[5, 1, 0]] * 5
    assert trace.client.tolist() == [[0, 1, 2]] * 5
    for field in (trace.task, trace.version):
        assert field.tolist() == [[t] * 3 for t in range(5)]
    assert trace.start[1].tolist() == [3, 3, 3]
    np.testing.assert_array_equal(trace.arrival[1], [6, 6, np.nan])
    # With carry client 2 has 3, 6 → 1 done and 2 left, 5 → 1, 4 → 0, 3 seconds.
    trace = run("tsfl", fleet, num_intervals=5, interval=3.0, carry=True)
    assert trace.iterations.T.tolist() == [[5] * 5, [1] * 5, [0, 1, 1, 1, 0]]
    # Counts and slots with nothing delivered.
    times = deliveries.schedule_of(trace, np.ones(3, int))
    assert (times.tau > 0).sum(axis=0).tolist() == [5, 5, 3]
    assert deliveries.staleness(times).tolist() == [0] * 13


def test_tsfl_offline_and_lost():
    # Online in [1, 2.5) and from 4: 1.5 − 0.5 = 1 s is 2 iterations; 2 − 0.5 is 3.
    fleet = fleet_of([0.5], 0.25, 0.25, online=[[(1, 2.5), (4, 7.75)]])
    trace = run("tsfl", fleet, num_intervals=4, interval=3.0, carry=False)
    # [6, 9): online until 7.75, 1.75 − 0.5 = 1.25 s is 2; then never again.
    assert trace.iterations[:, 0].tolist() == [2, 3, 2, 0]
    np.testing.assert_array_equal(trace.start[:, 0], [1, 4, 6, np.nan])
    np.testing.assert_array_equal(trace.arrival[:, 0], [2.5, 6, 7.75, np.nan])
    # Carry passes an interval too short to communicate: draws of 1.2 s; [0, 3) leaves
    # 1 s, [3, 6) none (0.35 s online), [6, 9) 2.5 s: 3.5 is 2 iterations.
    fleet = fleet_of([1.2], 0.25, 0.25, online=[[(1.5, 3.25), (5.9, 9)]])
    trace = run("tsfl", fleet, num_intervals=3, interval=3.0, carry=True)
    assert trace.iterations[:, 0].tolist() == [0, 0, 2]
    # A lost delivery has used its draws: 1 + 2 | 3 (lost) | 1 + 2.
    fleet = fleet_of([[1, 2, 3]], lost=[[False, True, False]])
    trace = run("tsfl", fleet, num_intervals=3, interval=3.0, carry=False)
    assert trace.iterations[:, 0].tolist() == [2, 0, 2]
    assert np.isnan(trace.arrival[1, 0])


def simulate(name, fleet, **given):
    """A framework by its name; one that draws has a generator of its own."""
    if "rng" in FRAMEWORKS[name].parameters:
        given = {"rng": np.random.default_rng(0)} | given
    return FRAMEWORKS[name].simulate(fleet, **given)


# Arguments of frameworks on fleets of five. A new one has a value here, one in seconds
# also a place in TIMES of test_ticks.
USUAL = {"horizon": 60.0, "iterations": 3, "num_intervals": 12, "interval": 5.0}
USUAL |= {"carry": True, "buffer": 3, "tiers": 2, "deadline": 9.0, "window": 1.5}
USUAL |= {"fraction": 0.5, "lag": 1}
OTHERS = {"esync": {"horizon": 150.0}, "cached": {"lag": 2}}
ALL = {
    name: {n: USUAL[n] for n in row.parameters if n in USUAL} | OTHERS.get(name, {})
    for name, row in FRAMEWORKS.items()
}


def random_fleet(seed, dropout=0.2, offline=True, N=5):
    """J = 7, so that draws wrap; some clients come and go, all are there at the end."""
    rng = np.random.default_rng(seed)
    fleet = draw_fleet(
        N,
        rng.integers(50, 150, N),
        speed=("lognormal(1,0.8)",),
        jitter=0.4,
        download=("uniform(0.1,0.6)",),
        upload=("uniform(0.1,0.9)",),
        dropout=dropout,
        speeds_file="",
        availability_file="",
        draws=7,
        rng=rng,
    )
    if not offline:
        return fleet
    online = []
    for i in range(N):
        windows = np.cumsum(rng.uniform(0.5, 9, 8)).reshape(4, 2)
        windows[-1, 1] = math.inf
        online.append(windows if i % 3 else np.empty((0, 2)))
    return fleet._replace(online=tuple(online))


def equal(a: Trace, b: Trace):
    for field, x, y in zip(Trace._fields, a, b, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=field)


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_limit_cases(seed, H, offline):
    def traces(*frameworks):
        options = {"horizon": 100.0, "iterations": H}
        return [simulate(n, fleet, **options, **more).trace for n, more in frameworks]

    fleet = random_fleet(seed, offline=offline)
    safa = {"fraction": 1.0, "lag": 10**6}
    sfl, *others = traces(("sfl", {}), ("fedat", {"tiers": 1}), ("safa", safa))
    for other in others:
        equal(other, sfl)
    equal(*traces(("afl", {}), ("fedbuff", {"buffer": 1})))
    # One client alone: every framework with tasks of H iterations is the same.
    fleet = random_fleet(seed, dropout=0.0, offline=offline, N=1)
    safa, fedcs = ("safa", {"fraction": 0.5, "lag": 0}), ("fedcs", {"deadline": 1e9})
    sfl, *others = traces(("sfl", {}), ("afl", {}), ("esync", {}), safa, fedcs)
    for other in others:
        assert len(other.time) == len(sfl.time)
        for a, b in zip(other, sfl, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_nothing_delivered():
    # The fastest client takes 0.25 + 2 + 0.25 s.
    fleet = fleet_of([2, 3], 0.25, 0.25)
    short = {"num_intervals": 9, "interval": 2.4, "carry": False}
    for name, options, message in (
        ("tsfl", short, "interval_seconds=2.4: no client delivers"),
        ("fedcs", {"horizon": 99, "deadline": 2.4}, "is 99 s: no global update"),
        ("afl", {"horizon": 2.4}, "is 2.4 s: .*first task ends at 2.5 s"),
        ("fedat", {"horizon": 9, "tiers": 6}, "tiers=6: .*2 = --config.num_clients"),
    ):
        with pytest.raises(UserError, match=message):
            run(name, fleet, **options)
    some = run("tsfl", fleet, num_intervals=9, interval=2.5, carry=False)
    assert some.iterations[0].tolist() == [1, 0]
    # All is lost, or no client is ever online: they end with an error.
    gone = (np.array([[0, 1.0]]),) * 2
    for bad in (fleet._replace(lost=~fleet.lost), fleet._replace(online=gone)):
        for name, options in ALL.items():
            fewer = {"buffer": 2} if name == "fedbuff" else {}
            with pytest.raises(UserError, match="no global update|no client delivers"):
                simulate(name, bad, **options | fewer)


# An independent simulation: processes of clients and servers in SimPy. Nothing of
# `tsfl_jax` is used but the fleet's arrays.


class Sim:
    """Clients that work while online; `updates` is (time, [row], group), growing."""

    def __init__(self, simpy, fleet):
        self.simpy, self.env, self.fleet = simpy, simpy.Environment(), fleet
        self.updates = []

    def windows(self, i):
        mine = self.fleet.online[i] if self.fleet.online else []
        return list(mine) if len(mine) else [(0.0, math.inf)]

    def come_online(self, i):
        for start, end in self.windows(i):
            if self.env.now < end - 1e-9:
                yield self.env.timeout(max(0.0, start - self.env.now))
                return

    def work(self, i, seconds, spent=None):
        """Works while online; `spent` collects the seconds, also if interrupted."""
        while seconds > 1e-9:  # less is a rounding error
            yield from self.come_online(i)
            now = self.env.now
            end = next(e for s, e in self.windows(i) if now < e - 1e-9)
            piece = min(seconds, end - now)
            try:
                yield self.env.timeout(piece)
            finally:
                if spent is not None:
                    spent.append(self.env.now - now)
            seconds -= piece

    def task(self, i, k, H, version, channel=None):
        """All clients upload at the same time, or waits for the channel."""
        J = self.fleet.iteration.shape[1]
        yield from self.come_online(i)
        start = self.env.now
        if version is None:  # the newest when the download begins
            version = len(self.updates)
        yield from self.work(i, self.fleet.download[i, k % J])
        for j in range(k * H, (k + 1) * H):
            yield from self.work(i, self.fleet.iteration[i, j % J])
        with channel.request() if channel else contextlib.nullcontext() as turn:
            if turn:
                yield turn
            yield from self.work(i, self.fleet.upload[i, k % J])
        row = (i, version, H, k, start, self.env.now)
        return None if self.fleet.lost[i, k % J] else row

    def tier(self, members, counts, group):
        k = 0
        while True:
            version = len(self.updates)
            done = yield self.env.all_of(
                [self.env.process(self.task(i, k, counts[i], version)) for i in members]
            )
            arrived = [row for row in done.values() if row]
            if arrived:
                self.updates.append((self.env.now, arrived, group))
            k += 1

    def sfl(self, iterations):
        N = len(self.fleet.iteration)
        self.env.process(self.tier(range(N), [iterations] * N, 0))

    def esync(self, iterations):
        step, *rest = (np.mean(a, axis=1) for a in self.fleet[:3])
        slowest = max(sum(rest) + iterations * step)
        counts = [
            max(h for h in range(iterations, 10**4) if h * s + r <= slowest + 1e-9)
            for s, r in zip(step, sum(rest), strict=True)
        ]
        self.env.process(self.tier(range(len(counts)), counts, 0))

    def fedat(self, iterations, tiers):
        step, *rest = (np.mean(a, axis=1) for a in self.fleet[:3])
        total = sum(rest) + iterations * step
        N = len(total)
        order = sorted(range(N), key=lambda i: total[i])
        for m in range(tiers):
            members = [i for p, i in enumerate(order) if p * tiers // N == m]
            self.env.process(self.tier(sorted(members), [iterations] * N, m))

    def ttfed(self, num_intervals, interval, iterations):
        held, tick = [], [self.env.event()]

        def client(i):
            for k in range(10**6):
                row = yield self.env.process(self.task(i, k, iterations, None))
                held.extend([row] if row else [])
                yield tick[0]

        def server():
            for _ in range(num_intervals):
                yield self.env.timeout(interval)
                if held:
                    self.updates.append((self.env.now, sorted(held), 0))
                held.clear()
                before, tick[0] = tick[0], self.env.event()
                before.succeed()

        self.env.process(server())
        for i in range(len(self.fleet.iteration)):
            self.env.process(client(i))

    def hysync(self, iterations, window):
        held, closed = [], [self.env.event()]

        def client(i):
            for k in range(10**6):
                row = yield self.env.process(self.task(i, k, iterations, None))
                if row:
                    held.append(row)
                    if len(held) == 1:
                        self.env.process(wait())
                    yield closed[0]

        def wait():
            yield self.env.timeout(window)
            self.updates.append((self.env.now, sorted(held), 0))
            held.clear()
            before, closed[0] = closed[0], self.env.event()
            before.succeed()

        for i in range(len(self.fleet.iteration)):
            self.env.process(client(i))

    def cached(self, iterations, fraction, lag, rng):
        N, J = self.fleet.iteration.shape
        ready, base, begun = [None] * N, [math.inf] * N, [0.0] * N
        tasks = [0] * N

        def train(i, k):
            yield from self.come_online(i)
            base[i], begun[i] = len(self.updates), self.env.now
            yield from self.work(i, self.fleet.download[i, k % J])
            for j in range(k * iterations, (k + 1) * iterations):
                yield from self.work(i, self.fleet.iteration[i, j % J])

        def upload(i):
            yield ready[i]
            yield from self.work(i, self.fleet.upload[i, tasks[i] % J])
            return i, self.env.now

        def server():
            while True:
                version = len(self.updates)
                for i in range(N):
                    if ready[i] is None:
                        ready[i] = self.env.process(train(i, tasks[i]))
                late = [i for i in range(N) if base[i] < version - lag]
                late.sort(key=lambda i: base[i])
                others = [i for i in rng.permutation(N).tolist() if i not in late]
                picked = (late + others)[: math.ceil(fraction * N)]
                works = [self.env.process(upload(i)) for i in picked]
                done = yield self.env.all_of(works)
                rows = []
                for i, arrival in done.values():
                    k = tasks[i]
                    if not self.fleet.lost[i, k % J]:
                        rows.append((i, base[i], iterations, k, begun[i], arrival))
                    ready[i], base[i], tasks[i] = None, math.inf, k + 1
                if rows:
                    self.updates.append((self.env.now, sorted(rows), 0))

        self.env.process(server())

    def afl(self, iterations):
        self.fedbuff(iterations, 1)

    def fedbuff(self, iterations, buffer):
        held = []

        def client(i):
            k = 0
            while True:
                row = yield self.env.process(self.task(i, k, iterations, None))
                k += 1
                if row:
                    held.append(row)
                if len(held) == buffer:
                    self.updates.append((self.env.now, held.copy(), 0))
                    held.clear()

        for i in range(len(self.fleet.iteration)):
            self.env.process(client(i))

    def fedcs(self, iterations, deadline):
        step, download, upload = (np.mean(a, axis=1) for a in self.fleet[:3])
        ready = download + iterations * step
        able = [i for i, t in enumerate(ready + upload) if t <= deadline]

        def there(i):
            now = self.env.now
            return any(s - 1e-9 <= now < e - 1e-9 for s, e in self.windows(i))

        def select(left):
            picked, total = [], 0.0
            while left:
                more, i = min((max(0.0, ready[i] - total) + upload[i], i) for i in left)
                total += more
                if total > deadline:
                    break
                picked.append(i)
                left = left - {i}
            return sorted(picked)

        def server():
            tasks = [0] * len(ready)
            while True:
                yield self.env.any_of(
                    [self.env.process(self.come_online(i)) for i in able]
                )
                # Rounds are independent: a dropped upload does not delay the next.
                channel = self.simpy.Resource(self.env, capacity=1)
                version, works = len(self.updates), []
                for i in select({i for i in able if there(i)}):
                    work = self.task(i, tasks[i], iterations, version, channel)
                    works.append(self.env.process(work))
                    tasks[i] += 1
                done = yield self.env.all_of(works) | self.env.timeout(deadline)
                arrived = [done[w] for w in works if w in done and done[w]]
                if arrived:
                    self.updates.append((self.env.now, arrived, 0))

        self.env.process(server())

    def safa(self, iterations, fraction, lag):
        N = len(self.fleet.iteration)
        mailbox, base = self.simpy.Store(self.env), [math.inf] * N

        def client(i, k):
            try:
                yield from self.come_online(i)
                base[i] = len(self.updates)
                row = yield from self.task(i, k, iterations, base[i])
            except self.simpy.Interrupt:
                return
            yield mailbox.put((i, row))

        def server():
            tasks, running, last, late = [0] * N, {}, set(), []
            while True:
                version = len(self.updates)
                for i in range(N):
                    if i in running and version - base[i] > lag:
                        running.pop(i).interrupt()
                    if i not in running:
                        running[i] = self.env.process(client(i, tasks[i]))
                        tasks[i], base[i] = tasks[i] + 1, math.inf  # no model yet
                new, old = [], []  # clients that were not picked last, and others
                while running and len(new) < fraction * N:
                    i, row = yield mailbox.get()
                    del running[i]
                    if row:
                        (old if i in last else new).append(row)
                while old and len(new) < fraction * N:
                    new.append(old.pop(0))
                if new:
                    last = {row[0] for row in new}
                    both = new + [row for row in late if row[0] not in last]
                    self.updates.append((self.env.now, both, 0))
                    late = old

        self.env.process(server())

    def tsfl(self, num_intervals, interval, carry):
        N, J = self.fleet.iteration.shape
        table = [[None] * N for _ in range(num_intervals)]

        def latest(i, end, seconds):
            """The last moment to begin so many online seconds."""
            for start, stop in reversed(self.windows(i)):
                stop = min(stop, end)
                if start < stop:
                    if seconds <= stop - start:
                        return stop - seconds
                    seconds -= stop - start
            return -1.0

        def body(i, t, state, begun):
            yield from self.come_online(i)
            begun.append(self.env.now)
            yield from self.work(i, self.fleet.download[i, t % J])
            while True:
                spent = []
                try:
                    left = self.fleet.iteration[i, state["j"] % J] - state["spent"]
                    yield from self.work(i, left, spent)
                except self.simpy.Interrupt:
                    state["spent"] += sum(spent) if carry else 0.0
                    raise
                state["j"], state["spent"] = state["j"] + 1, 0.0

        def guarded(*args):
            try:
                yield from body(*args)
            except self.simpy.Interrupt:
                return

        def client(i):
            state = {"j": 0, "spent": 0.0}
            for t in range(num_intervals):
                start, end = t * interval, (t + 1) * interval
                upload = self.fleet.upload[i, t % J]
                before, begun = state["j"], []
                stop = latest(i, end, upload)
                if stop > start:
                    worker = self.env.process(guarded(i, t, state, begun))
                    yield self.env.timeout(stop - self.env.now)
                    worker.interrupt()
                    yield worker
                count = state["j"] - before
                if count:
                    yield from self.work(i, upload)
                if count and not self.fleet.lost[i, t % J]:
                    table[t][i] = (i, t, count, t, begun[0], self.env.now)
                else:
                    table[t][i] = (i, t, 0, t, None, math.nan)
                yield self.env.timeout(max(0.0, end - self.env.now))

        def server():
            # A little after the clients, who end their intervals at the same moment.
            yield self.env.timeout(1e-6)
            for t in range(num_intervals):
                yield self.env.timeout(interval)
                self.updates.append(((t + 1) * interval, table[t], 0))

        for i in range(N):
            self.env.process(client(i))
        self.env.process(server())


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_agrees_with_simpy(name):
    simpy = pytest.importorskip("simpy")
    for seed in range(4):
        for options in ({}, {"dropout": 0.0}, {"offline": False}):
            fleet = random_fleet(seed, **options)
            kwargs = dict(ALL[name])
            if name == "tsfl":
                kwargs["carry"] = seed % 2 == 0
            if name == "fedcs":  # the channel is busy, not all that are able fit
                fleet = fleet._replace(upload=4 * fleet.upload)
                kwargs["deadline"] = (9.0, 8.0, 7.0)[seed % 3]
            trace = simulate(name, fleet, **kwargs).trace
            sim = Sim(simpy, fleet)
            assert hasattr(sim, name), f"write {name} in SimPy, as a method of Sim"
            horizon = kwargs.pop("horizon", 61.0)
            if "rng" in FRAMEWORKS[name].parameters:
                kwargs["rng"] = np.random.default_rng(0)
            getattr(sim, name)(**kwargs)
            sim.env.run(until=horizon)
            assert len(sim.updates) == len(trace.time)
            if name == "fedcs":
                most = max(len(tasks) for _, tasks, _ in sim.updates)
                assert trace.client.shape[1] == most
            for r, (time, tasks, group) in enumerate(sim.updates):
                assert trace.time[r] == pytest.approx(time) and trace.group[r] == group
                if name != "fedbuff":  # which keeps the order of arrival
                    tasks = sorted(tasks)
                # Empty slots are at the end of a row.
                empty = [(-1, 0, 0, 0, math.nan, math.nan)]
                tasks += empty * (trace.client.shape[1] - len(tasks))
                rows = zip(*(column[r] for column in trace[1:7]), strict=True)
                for row, task in zip(rows, tasks, strict=True):
                    assert row[:4] == task[:4]
                    assert row[5] == pytest.approx(task[5], nan_ok=True)
                    if task[4] is not None:
                        assert row[4] == pytest.approx(task[4], nan_ok=True)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_number_of_events_is_known_beforehand(name, monkeypatch):
    settings = {"num_intervals": 200, "num_clients": 6, "timeline.framework": name}
    settings |= {"timeline.buffer": 3, "timeline.download": "uniform(0.01,0.3)"}
    config = replace(Config(), settings)
    plan, drawn = workload.plan_of(config), workload.draw_workload(config)
    fleet, trace = drawn.fleet, drawn.trace
    work = trace.iterations[trace.client >= 0]
    # Of T-SFL, whose time is not all for them, iterations, of others tasks.
    known = work.sum() if name == "tsfl" else (work > 0).sum()
    monkeypatch.setattr(workload, "_MOST_EVENTS", 6 * known)
    workload.simulate_timeline(plan, fleet)  # else it would be refused at once
    monkeypatch.setattr(workload, "_MOST_EVENTS", 0.9 * known)
    with pytest.raises(UserError, match="choose slower clients"):
        workload.simulate_timeline(plan, fleet)


def test_very_many_iterations_of_a_task():
    fleet = fleet_of([[1.0, 3.0]])._replace(upload=np.zeros((1, 2)))
    many = 2**21 + 1
    task = trace.begin(exact(fleet), 0, 0, version=0, now=0, iterations=many)
    assert task.arrival == (2 * 2**21 + 1) * SECOND
    fleet = fleet_of([10.0, 1e-9])
    with pytest.raises(UserError, match="client 1 does 4e.10 iterations"):
        run("esync", fleet, horizon=9, iterations=4)
