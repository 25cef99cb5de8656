"""Decimal times: every framework against the same in whole seconds, which float64 adds
exactly, and against models that let the time pass tick by tick.
"""

import math

import numpy as np
import pytest

from tests.timeline.test_timeline import fleet_of, rows, run
from tsfl_jax.timeline import FRAMEWORKS
from tsfl_jax.timeline.fleet import Fleet

# Settings in tenths of a second; those that are times are divided with the fleet's.
TIMES = ("horizon", "interval", "deadline")
OPTIONS = {
    "sfl": {"horizon": 300, "iterations": 3},
    "tsfl": {"num_intervals": 20, "interval": 13, "carry": True},
    "afl": {"horizon": 300, "iterations": 3},
    "fedbuff": {"horizon": 300, "iterations": 3, "buffer": 3},
    "fedat": {"horizon": 300, "iterations": 3, "tiers": 2},
    "fedcs": {"horizon": 300, "iterations": 3, "deadline": 34},
    "esync": {"horizon": 300, "iterations": 2},
    "safa": {"horizon": 300, "iterations": 3, "fraction": 0.6, "lag": 1},
}
SEEDS = range(60)


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
        simulate = FRAMEWORKS[name].simulate
        shorter, fewer = divided(fleet, options)
        whole, decimal = simulate(fleet, **options), simulate(shorter, **fewer)
        same(decimal.trace, whole.trace)
        for a, b in zip(decimal.tasks, whole.tasks, strict=True):
            times = b.arrival / 10, b.start / 10, b.stop / 10, b.spent / 10
            assert (a.arrival, a.start, a.stop, a.spent) == times
            assert a.fate == b.fate and a.first == b.first
        # Where a float64 no longer holds a nanosecond, and 63 bits hold no time.
        for by in (1e-8, 1e-200):
            far, more = divided(fleet, options, by)
            same(simulate(far, **more).trace, whole.trace, by, 1e-15)


class Ticked:
    """Clients that do one tick of work at a time, while online. Whole numbers only."""

    def __init__(self, fleet):
        self.fleet, self.J = fleet, fleet.iteration.shape[1]
        self.N, self.now, self.updates = len(fleet.iteration), 0, []
        self.left, self.tasks = {}, [0] * self.N  # ticks to go; numbers of tasks
        self.version = 0  # of the round's model

    def online(self, i):
        windows = self.fleet.online[i] if self.fleet.online else ()
        return not len(windows) or any(a <= self.now < b for a, b in windows)

    def work(self, i, H, upload=True):
        k, f = self.tasks[i], self.fleet
        steps = sum(f.iteration[i, j % self.J] for j in range(k * H, k * H + H))
        parts = (f.download, steps, f.upload if upload else None)
        return sum(
            p if np.isscalar(p) else p[i, k % self.J] for p in parts if p is not None
        )

    def lost(self, i):
        return self.fleet.lost[i, self.tasks[i] % self.J]

    def tick(self, active=None):
        """A tick of those that are online; they are done when nothing is left."""
        for i in self.left if active is None else active:
            self.left[i] -= self.online(i) and self.left[i] > 0
        self.now += 1

    def arrivals(self, horizon, H, buffer):
        """fedbuff, and afl with a buffer of one."""
        version, held = {}, []
        while self.now <= horizon:
            for i in range(self.N):
                if self.left.get(i) == 0:
                    if not self.lost(i):
                        held.append((i, version[i], self.tasks[i]))
                    if len(held) == buffer:
                        self.updates.append((self.now, held))
                        held = []
                    self.tasks[i] += 1
                    del self.left[i]
                if i not in self.left and self.online(i):
                    self.left[i], version[i] = self.work(i, H), len(self.updates)
            self.tick()
        return self.updates

    def rounds(self, horizon, H):
        """sfl."""
        while self.now <= horizon:
            if not any(self.left.values()):
                if self.left:
                    done = [i for i in range(self.N) if not self.lost(i)]
                    if done:
                        row = [(i, self.version, self.tasks[i]) for i in done]
                        self.updates.append((self.now, row))
                    self.tasks = [k + 1 for k in self.tasks]
                self.version = len(self.updates)
                self.left = {i: self.work(i, H) for i in range(self.N)}
            self.tick()
        return self.updates

    def selection(self, horizon, H, deadline):
        """fedcs: means times J are whole numbers, too."""
        f, J = self.fleet, self.J
        ready = (f.download + H * f.iteration).sum(1)
        upload = f.upload.sum(1)
        while self.now <= horizon:
            left = {
                i
                for i in range(self.N)
                if self.online(i) and ready[i] + upload[i] <= deadline * J
            }
            picked, time = [], 0
            while left:
                end, i = min((max(time, ready[i]) + upload[i], i) for i in left)
                if end > deadline * J:
                    break
                time, left = end, left - {i}
                picked.append(i)
            if not picked:
                self.tick()
                continue
            self.round(sorted(picked), H, horizon, self.now + deadline)
        return self.updates

    def round(self, picked, H, horizon, limit):
        self.left = {i: self.work(i, H, upload=False) for i in picked}
        uploads = {i: self.fleet.upload[i, self.tasks[i] % self.J] for i in picked}
        queue, done = [], []
        while len(done) < len(picked) and self.now < limit:
            computing = [i for i in picked if self.left[i] and i not in queue + done]
            self.tick([*computing, *queue[:1]])
            if queue and not self.left[queue[0]]:
                done.append(queue.pop(0))
            for i in computing:
                if not self.left[i]:
                    queue.append(i)
                    self.left[i] = uploads[i]
        if self.now <= horizon:
            row = [(i, len(self.updates), self.tasks[i]) for i in sorted(done)]
            row = [cell for cell in row if not self.lost(cell[0])]
            if row:
                self.updates.append((self.now, row))
        for i in picked:
            self.tasks[i] += 1


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("afl", lambda m, o: m.arrivals(o["horizon"], o["iterations"], 1)),
        ("fedbuff", lambda m, o: m.arrivals(o["horizon"], o["iterations"], 3)),
        ("sfl", lambda m, o: m.rounds(o["horizon"], o["iterations"])),
        ("fedcs", lambda m, o: m.selection(*o.values())),
    ],
)
def test_decimal_times_agree_with_ticks_one_by_one(name, model):
    for seed in SEEDS:
        fleet, options = tenths(seed), OPTIONS[name]
        shorter, fewer = divided(fleet, options)
        seen = rows(run(name, shorter, **fewer), "client", "version", "task")
        expected = model(Ticked(fleet), options)
        assert seen == [(time / 10, row) for time, row in expected], seed


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
