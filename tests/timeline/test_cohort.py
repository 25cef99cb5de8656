"""Cohorts: who is asked, how often, what it costs, and timelines worked by hand."""

import collections
import functools
import itertools
import math
import tracemalloc
from time import perf_counter

import numpy as np
import pytest
import scipy

from tests.timeline.test_timeline import ALL
from tests.timeline.test_timeline import simulate as by_name
from tsfl_jax.config import Config, get, replace, value
from tsfl_jax.prepare import prepare, rule_settings, workload
from tsfl_jax.timeline import (
    FRAMEWORKS,
    cohort,
    crowd,
    deliveries,
    distributions,
    segments,
    ticks,
)
from tsfl_jax.timeline.cohort import (
    SAMPLERS,
    CohortConfig,
    draw_cohort,
    make_cohorts,
    own_sampler,
)
from tsfl_jax.timeline.fleet import Fleet
from tsfl_jax.timeline.measured import Measured
from tsfl_jax.types import UserError

ALWAYS = np.empty((0, 2))
# Samplers of as many clients as are asked for, for any framework.
DRAWN = [n for n in SAMPLERS if n not in (*cohort.CHOOSING, *cohort.VARYING)]


def make(
    N=6, K=2, sampler="uniform", own=None, seed=0, sizes=("constant(10)",), **more
):
    """Cohorts; `seconds` and `windows` are those of the clients from 0 on."""
    names = "ask", "candidates", "tiers", "tier_chances", "tier_credits"
    settings = {"tiers": 2} | {n: more.pop(n) for n in names if n in more}
    seconds, windows = more.pop("seconds", None), more.pop("windows", {})
    speed = {"speed": more.pop("speed", ("constant(1)",)), "download": (), "upload": ()}
    everyone = crowd.make_crowd(N, seed, sizes=sizes, seconds=speed, **more)
    means = None
    if seconds is not None:
        means = np.append(np.zeros((3, N)), np.full((4, N), np.inf), 0)
        means[:3][: np.ndim(seconds) * 2 - 1] = seconds
        means[6] = 0
    found = [(i, *pair, math.inf) for i in sorted(windows) for pair in windows[i]]
    traces = Measured(means, online=np.array(found, float).reshape(-1, 4), users=N)
    everyone = everyone._replace(traces=traces)
    cohorts = make_cohorts(everyone, CohortConfig(size=K, sampler=sampler, **settings))
    return cohorts._replace(sampler=own_sampler(own)) if own else cohorts


def rows(trace):
    """Per update: its time and the clients that deliver."""
    return [
        (float(t), [int(i) for i in c[(c >= 0) & (n > 0)]])
        for t, c, n in zip(trace.time, trace.client, trace.iterations, strict=True)
    ]


def follow(*sequence):
    """A sampler of cohorts known beforehand, over and over."""
    return lambda draw: np.array(sequence[draw.number % len(sequence)])[: draw.size]


# --- samplers ---------------------------------------------------------------------


def test_online_gives_all_cohorts_of_those_online_alike():
    away = {1: [(5, 9)], 2: [(0, 1)], 4: [(9, 10)]}
    cohorts, now = make(7, 2, "online", windows=away), ticks.of(7.0)
    drawn = (tuple(draw_cohort(cohorts, t, now)) for t in range(1500))
    count = collections.Counter(drawn)
    assert set(count) == set(itertools.combinations([0, 1, 3, 5, 6], 2))
    assert scipy.stats.chisquare(list(count.values())).pvalue > 1e-3
    # A window is without its end; too few are all that there are.
    few = make(3, 2, "online", windows={i: [(i, i + 2)] for i in range(3)})
    for second, there in ((0, [0]), (2, [1, 2]), (3, [2]), (4, [])):
        assert draw_cohort(few, 0, ticks.of(second)).tolist() == there


@pytest.mark.parametrize(("N", "K"), [(10, 3), (7, 7)])
def test_round_robin_asks_each_once_before_any_twice(N, K):
    cohorts, each = make(N, K, "round_robin"), -(-N // K)
    cycles = []
    for c in range(6):
        several = [draw_cohort(cohorts, c * each + g).tolist() for g in range(each)]
        assert sorted(sum(several, [])) == list(range(N))
        lengths = [len(ids) for ids in several]
        assert K >= max(lengths) >= min(lengths) >= max(lengths) - 1
        cycles.append(str(several))
    assert N == K or len(set(cycles)) > 1


@pytest.mark.parametrize("name", ["uniform", "by_size", "round_robin", "poisson"])
def test_inclusion_is_how_often_a_client_is_asked(name):
    cohorts, T = make(7, 3, name, sizes=("uniform(1,9)",)), 2000
    drawn = [draw_cohort(cohorts, t) for t in range(T)]
    count = np.bincount(np.concatenate(drawn), minlength=7)
    client = np.arange(7)[None]
    chance = cohort.inclusion(cohorts, client, True)
    assert np.allclose(chance, 3 / 7) == (name in ("uniform", "poisson"))
    # Within 5 standard deviations, which are at most those of independent draws.
    assert (np.abs(count / T - chance) < 5 * np.sqrt(chance / T)).all()
    assert np.isnan(cohort.inclusion(cohorts, client, False)).all()
    # Of each by itself: a binomial size.
    if name == "poisson":
        sizes = np.bincount([len(ids) for ids in drawn], minlength=8)
        expected = T * scipy.stats.binom.pmf(np.arange(8), 7, 3 / 7)
        assert scipy.stats.chisquare(sizes, expected).pvalue > 1e-3
    # With replacement.
    assert any(len(set(ids)) < len(ids) for ids in drawn) == (name == "by_size")


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_cohort_follows_from_seed_and_number_alone(name):
    more = {"candidates": 5} if name in cohort.CHOOSING else {}
    first, again, other = (
        [draw_cohort(cohorts, t).tolist() for t in (0, 1, 2, 40)]
        for cohorts in (make(50, 5, name, seed=s, **more) for s in (3, 3, 4))
    )
    assert first == again != other and first[0] != first[2]
    # As candidates 0 is all of them.
    if more:
        assert draw_cohort(make(50, 5, name), 7).tolist() == list(range(50))


FAST, SLOW = {1, 3, 4}, {0, 2, 5}  # by these seconds of an iteration
BY_TIER = {"sampler": "tifl", "seconds": [9.0, 1.0, 7.0, 2.0, 2.0, 7.0]}


def tiers_of(T, **options):
    """Which tier, 0 is the fast one, each of T cohorts is of; −1: nobody is asked."""
    cohorts = make(6, 2, **BY_TIER, **options)
    drawn = [draw_cohort(cohorts, t).tolist() for t in range(T)]
    assert all(len({*ids}) == len(ids) for ids in drawn)
    assert all({*ids} <= FAST or {*ids} <= SLOW for ids in drawn)
    tiers = [-1 if not ids else int({*ids} <= SLOW) for ids in drawn]
    return drawn, tiers


def test_tifl_draws_a_tier_and_a_cohort_of_it():
    """Chances 1 : 3, and all pairs of a tier alike."""
    drawn, tiers = tiers_of(2000, tier_chances=(1, 3))
    assert abs(np.mean(tiers) - 0.75) < 5 * np.sqrt(0.75 * 0.25 / 2000)
    pairs = collections.Counter(tuple(ids) for ids in drawn)
    for pool in (FAST, SLOW):
        count = [pairs[pair] for pair in itertools.combinations(sorted(pool), 2)]
        assert scipy.stats.chisquare(count).pvalue > 1e-3
    assert sum(pairs.values()) == 2000
    # The cohort of a round does not depend on how many there are.
    assert tiers_of(70, tier_chances=(1, 3))[0] == drawn[:70]
    assert set(tiers_of(70, tier_chances=(1, 0))[1]) == {0}


def test_tifl_stops_at_a_tiers_credits():
    """9 and 3 rounds, in the order of chance; then the other tier alone, then none."""
    tiers = tiers_of(20, tier_credits=(9, 3))[1]
    assert [tiers.count(m) for m in (0, 1)] == [9, 3] and tiers[12:] == [-1] * 8
    assert set(tiers[:10]) == {0, 1}


def test_tifl_goes_by_the_seconds_of_a_whole_task():
    """Client 0 uploads for 5 s: it is slow with tasks of one iteration, not of ten."""
    seconds = np.array([[1.0, 3.0], [0.0, 0.0], [5.0, 0.0]])
    everyone = make(2, 1, seconds=seconds).crowd
    config = CohortConfig(size=1, sampler="tifl", tiers=2, tier_chances=(1, 0))
    for iterations, fast in ((1, 1), (10, 0)):
        cohorts = make_cohorts(everyone, config, iterations=iterations)
        assert {*draw_cohort(cohorts, 0).tolist()} == {fast}


def test_a_round_of_tifl_is_of_one_tier_or_refused():
    settings = {"num_clients": 12, "num_intervals": 80, "algorithm": "fedavg"}
    settings |= {"cohort.size": 3, "cohort.sampler": "tifl", "cohort.tiers": 3}
    settings |= {"timeline.framework": "sfl"}
    drawn = workload.draw_workload(checked(settings))
    pace = [drawn.fleet.fleet.of(i).work[1] for i in range(12)]
    tier = np.argsort(np.argsort(pace)) // 4
    asked = [tier[ids] for _, ids in rows(drawn.trace)]
    assert all(np.ptp(t) == 0 for t in asked) and {t[0] for t in asked} == {0, 1, 2}
    wrong = {"cohort.tier_chances": (1, 2)}, {"cohort.tier_credits": (0, 0, 0)}
    for change, text in ((c, "each of --config.cohort.tiers=3") for c in wrong):
        with pytest.raises(UserError, match=text):
            checked(settings | change)
    for change, text in (
        ({"timeline.framework": "none"}, "sampler=tifl: .*no clock"),
        ({"cohort.tiers": 13}, "cohort.tiers=13: expected 1 to --config.num_clients"),
    ):
        with pytest.raises(UserError, match=text):
            workload.draw_workload(checked(settings | change))


def test_a_sampler_of_the_users_own():
    def custom(draw):
        assert draw.candidates == 6 and draw.size == 2 and draw.edges()[-1] == 60
        return [draw.number % 6, 5]

    assert draw_cohort(make(own=custom), 8).tolist() == [2, 5]
    twice = make(own=lambda draw: [3, 3])
    assert draw_cohort(twice, 0).tolist() == [3, 3]  # as by_size
    for wrong in ([6], [0, 1, 2], None):
        text = "<lambda>: fails in draw 4 .ValueError: it gives .*at most 2 whole"
        with pytest.raises(UserError, match=text):
            draw_cohort(make(own=lambda draw, wrong=wrong: wrong), 4)
    with pytest.raises(UserError, match="<lambda>: fails in draw 4 .KeyError: 4"):
        draw_cohort(make(own=lambda draw: {}[draw.number]), 4)


# --- draws by client id -----------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["normal(5,2)", "uniform(1,5)", "lognormal(4,0.5)", "constant(3)"]
)
def test_inverted_numbers_are_distributed_as_drawn_ones(text):
    uniform, flag = np.random.default_rng(0).random(4000), "--x"
    group, rng = np.zeros(4000, int), np.random.default_rng(1)
    real = distributions.quantiles((text,), group, uniform, flag=flag)
    drawn = distributions.draw((text,), group, rng, flag=flag)
    assert scipy.stats.ks_2samp(real, drawn).pvalue > 1e-3
    whole = distributions.quantiles((text,), group, uniform, least=2, flag=flag)
    drawn = distributions.draw((text,), group, rng, least=2, flag=flag)
    assert whole.dtype == drawn.dtype and whole.min() >= 2
    assert scipy.stats.ks_2samp(whole, drawn).pvalue > 1e-3


def several(N=1000, sizes=("lognormal(40,0.7)", "uniform(5,9)"), **more):
    times = {"speed": ("lognormal(1,0.5)",), "download": ()}
    times["upload"] = ("uniform(0,1)",)
    return crowd.make_crowd(
        N, 3, sizes=sizes, jitter=0.4, dropout=0.3, seconds=times, **more
    )


def test_a_clients_times_depend_on_nobody_else():
    """Not on who is asked with it, where it stands, or how many there are."""
    ids, order = np.array([5, 700, 3]), np.array([2, 0, 1])
    groups = ("constant(40)",)
    few, many = several(sizes=groups), several(10**6, sizes=groups)
    one, other = crowd.fleet_of(few, ids, 8), crowd.fleet_of(many, ids[order], 5)
    for a, b in zip(one[:4], other[:4], strict=True):
        assert (a[order][:, :5] == b).all()
    assert len(np.unique(one.iteration)) == one.iteration.size
    # The mean of its times is the client's.
    long = crowd.fleet_of(few, np.array([5]), 8000)
    speed, _, upload = crowd.means_of(few, np.array([5]))[:3, 0]
    assert abs(long.iteration.mean() / speed - 1) < 0.02
    assert abs(long.upload.mean() / upload - 1) < 0.03
    assert abs(long.lost.mean() - 0.3) < 0.03
    assert (long.download == 0).all()


def test_sizes_are_those_of_the_groups_and_speeds_follow_them():
    everyone, ids = several(), np.arange(1000)
    size = everyone.num_samples
    assert set(size[1::2]) == {5, 6, 7, 8, 9} and 30 < size[::2].mean() < 45
    assert (several(1500).num_samples[:1000] == size).all() and size.dtype == np.int32
    plain = crowd.means_of(everyone._replace(by_size=False), ids)[0]
    with_size = crowd.means_of(everyone, ids)[0]
    assert np.allclose(with_size / plain, size / size.mean())


@pytest.mark.parametrize("kind", ["case2", "explicit", "case3", "distribution"])
def test_cases_of_a_cohort(kind):
    settings = {"num_clients": 1000, "num_intervals": 30, "cohort.size": 20}
    settings |= {"schedule.kind": kind, "schedule.size_groups": "uniform(3,9)"}
    if kind == "explicit":
        settings |= {"schedule.tau": (2, 9)}
    if kind == "distribution":
        settings |= {"schedule.tau_groups": "constant(30); constant(0)"}
    drawn = workload.draw_workload(checked(settings))
    times, held = drawn.schedule, drawn.num_samples
    assert times.tau.shape == times.client.shape == times.size.shape == (30, 20)
    assert (times.size == held[times.client]).all() and held.shape == (1000,)
    assert times.snapshots == 0
    assert times.seconds.tolist() == [t + 1 for t in range(30)]
    if kind == "case3":
        means = [times.tau[times.client // 250 == g].mean() for g in range(4)]
        # Floored: about half less than 2, 3, 4, 5.
        assert np.allclose(means, [1.5, 2.5, 3.5, 4.5], atol=0.3)
        return
    tau = {"case2": [1, 2, 3, 4], "explicit": [2, 9]}
    groups = np.array(tau.get(kind, [30, 0]))
    assert (times.tau == groups[times.client * len(groups) // 1000]).all()


def checked(settings):
    config, own = prepare.accepted(replace(Config(), settings))
    rule_settings.check(config, rule_settings.rule_of(config, own), own)
    return config


def test_the_same_client_does_the_same_in_any_cohort():
    settings = {"num_clients": 40, "num_intervals": 12, "schedule.dropout": 0.3}
    tau_of = {}
    for size, sampler in ((5, "uniform"), (20, "uniform"), (11, "round_robin")):
        more = {"cohort.size": size, "cohort.sampler": sampler}
        times = workload.draw_workload(checked(settings | more)).schedule
        for (t, k), tau in np.ndenumerate(times.tau):
            if sampler == "uniform" or tau:
                assert tau_of.setdefault((t, times.client[t, k]), tau) == tau
    assert 0 in tau_of.values() and len(tau_of) > 300


# --- timelines --------------------------------------------------------------------

SECONDS = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # of client i's iteration
OF_COHORTS = [name for name, row in FRAMEWORKS.items() if row.cohorts]


@pytest.mark.parametrize("name", OF_COHORTS)
def test_a_cohort_of_all_is_the_fleet(name):
    """The same deliveries at the same times as without cohorts."""
    own = ALL[name] | ({"carry": False} if name == "tsfl" else {})
    several = SECONDS[[3, 0, 5, 1, 4, 2]], 0.3 + SECONDS / 16, 0.5 - SECONDS / 32
    times = np.array([a[:, None] for a in several])
    online = {0: [(1, 7), (9, math.inf)], 4: [(0, 5), (20, 30)]}
    windows = tuple(np.array(online.get(i, ALWAYS), float) for i in range(6))
    fleet = Fleet(*times, np.zeros((6, 1), bool), windows)
    cohorts = make(6, 6, seconds=times[:, :, 0], windows=online)
    simulate = functools.partial(by_name, name)
    expected, found = simulate(fleet, **own).trace, simulate(cohorts, **own).trace
    assert rows(found) == rows(expected) and len(rows(found)) > 1
    for field in ("time", "version", "iterations", "start", "arrival", "group"):
        a, b = getattr(expected, field), getattr(found, field)
        assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), field


def test_over_selection_takes_the_first_that_finish():
    own = follow([0, 1, 4, 5], [2, 3, 4, 5])
    cohorts = make(6, 2, own=own, ask=4, seconds=SECONDS)
    trace, tasks = FRAMEWORKS["sfl"].simulate(cohorts, horizon=12.0, iterations=1)
    # 0 and 1 by 2 s; 2 and 3 by 2 + 4 s; 0 and 1 by 8 s; 2 and 3 by 12 s.
    assert rows(trace) == [(2, [0, 1]), (6, [2, 3]), (8, [0, 1]), (12, [2, 3])]
    left = [(t.client, t.stop) for t in tasks if t.fate == "given up"]
    assert left == [(4, 2), (4, 6), (4, 8), (4, 12), (5, 2), (5, 6), (5, 8), (5, 12)]
    # Where K do not arrive, the round lasts as long as those that do.
    gone = {1: [(0, 1)], 4: [(0, 1)], 5: [(0, 1)]}
    cohorts = make(6, 2, own=own, ask=4, seconds=SECONDS, windows=gone)
    trace = FRAMEWORKS["sfl"].simulate(cohorts, horizon=6.0, iterations=1).trace
    assert rows(trace) == [(1, [0]), (5, [2, 3]), (6, [0])]


def random_windows(seed, whole, N=5):
    """Of all clients but the first; in whole seconds there are ties."""
    rng = np.random.default_rng(seed)
    gaps = rng.integers(1, 9, (N, 8)) if whole else rng.uniform(0.5, 9, (N, 8))
    ends = np.cumsum(gaps, axis=1).astype(float).round(3).reshape(N, 4, 2)
    ends[:, -1, 1] = math.inf
    times = rng.integers(1, 9, (3, N)) / 4 if whole else rng.uniform(0.1, 3, (3, N))
    return {i: ends[i] for i in range(1, N)}, times.round(3)


@pytest.mark.parametrize("name", OF_COHORTS)
def test_tasks_begin_after_their_versions_and_openings(name):
    for seed, sampler in itertools.product(range(2), DRAWN):
        windows, seconds = random_windows(seed, seed % 2)
        options = {"windows": windows, "seconds": seconds, "dropout": 0.2}
        cohorts = make(5, 4, sampler, seed=seed, **options)
        few = {"fraction": 0.2} if name in ("safa", "cached") else {}
        given = ALL[name] | few | ({"carry": False} if name == "tsfl" else {})
        trace, tasks = by_name(name, cohorts, **given)
        assert (np.diff(trace.time) >= 0).all()
        dates = np.append(0.0, trace.time)
        for task in (t for t in tasks if t.start < math.inf):
            assert dates[task.version] <= task.start
            # A round of a tier has one model, and clients begin when they are online.
            assert name == "fedat" or (dates[task.version + 1 :] >= task.start).all()


def test_too_few_online_are_taken():
    windows = {0: [(0, 9)], 1: [(0.5, 2), (5, 9)], 2: [(3, 9)]}
    cohorts = make(3, 2, "online", windows=windows, seconds=np.ones(3))
    take = rows(by_name("sfl", cohorts, horizon=20.0, iterations=1).trace)
    # All three are online from 5 s to 9 s, and two of them are asked.
    assert take[:5] == [(1, [0]), (2, [0, 1]), (3, [0]), (4, [0, 2]), (5, [0, 2])]
    assert [t for t, _ in take[5:]] == [6, 7, 8, 9]
    assert {len(ids) for _, ids in take[5:]} == {2}


def test_afl_with_two_at_work():
    # Who is drawn: 0, 1; then 2; 1 is at work, so 0; then 3, 0, …
    cohorts = make(6, 2, own=follow([0], [1], [2], [1], [0], [3]), seconds=SECONDS)
    trace, tasks = FRAMEWORKS["afl"].simulate(cohorts, horizon=8.0, iterations=1)
    # 0: 0 to 1. 1: 0 to 2. 2: 1 to 4. Draw 3 is 1, which is at work at no time after 2.
    assert rows(trace)[:3] == [(1, [0]), (2, [1]), (4, [1])]
    # 2 and 1 arrive at 4, ties by id; then 0 and 3 begin.
    assert rows(trace)[3:] == [(4, [2]), (5, [0]), (6, [0]), (8, [1]), (8, [3])]
    assert trace.version.ravel().tolist() == [0, 0, 2, 1, 3, 5, 6, 4]
    assert trace.task.ravel().tolist() == [0, 1, 3, 2, 4, 6, 7, 5]
    assert len({(t.client, t.number) for t in tasks}) == len(tasks)


@pytest.mark.parametrize("sampler", DRAWN)
@pytest.mark.parametrize("name", ["afl", "fedbuff"])
def test_at_most_k_are_at_work(name, sampler):
    own = {"buffer": 3} if name == "fedbuff" else {}
    windows = {i: [(0.0, 5.0), (7.0 + i, 90.0)] for i in range(9)}
    windows = windows if sampler == "online" else {}
    more = {"speed": ("uniform(0.2,1)",), "jitter": 0.5, "windows": windows}
    cohorts = make(9, 4, sampler, **more)
    trace, tasks = by_name(name, cohorts, horizon=40.0, iterations=3, **own)
    events = sorted(
        (ticks.of(second), begins, task.client)
        for task in tasks
        for begins, second in enumerate((task.arrival, task.start))
    )
    busy, most = set(), 0
    for _, begins, client in events:
        assert begins == (client not in busy)
        busy ^= {client}
        most = max(most, len(busy))
    assert most == 4 and len(trace.time) > 10
    assert len(np.unique(trace.client[trace.client >= 0])) == 9


def test_afl_draws_those_not_at_work_alike():
    # Without ties, of which the smaller id comes first.
    cohorts = make(5, 2, seconds=np.ones(5), jitter=0.3)
    tasks = FRAMEWORKS["afl"].simulate(cohorts, horizon=700.0, iterations=1).tasks
    count = collections.Counter(t.client for t in tasks)
    assert scipy.stats.chisquare([count[i] for i in range(5)]).pvalue > 1e-3


def test_safa_asks_a_cohort_per_round():
    # C·K = 1: a round ends with the first. 5 is asked at 0, delivers at 6.
    own = follow([0, 5], [1, 2], [0, 1])
    cohorts = make(6, 2, own=own, seconds=SECONDS)
    arguments = {"horizon": 7.0, "iterations": 1, "fraction": 0.5}
    trace = FRAMEWORKS["safa"].simulate(cohorts, lag=9, **arguments).trace
    # 0 at 1. From 1 on 1 (3) and 2 (4). 1 at 3; from 3 on 0 and 1. 0 and 2 at 4, of
    # which 2 waits; from 4 on 0 again: 2 counts at once, at 4. From 4 on 1 is at work.
    assert rows(trace)[:3] == [(1, [0]), (3, [1]), (4, [0])]
    assert trace.client.shape[1] == 1
    # With no lag what is under way is given up in the next round, whoever is asked.
    trace, tasks = FRAMEWORKS["safa"].simulate(cohorts, lag=0, **arguments)
    left = {(t.client, t.stop) for t in tasks if t.fate == "given up"}
    assert left >= {(5, 1), (2, 3)}


def test_fedcs_selects_within_the_cohort():
    own = follow([0, 1, 5], [5], [2])
    options = {"horizon": 14.0, "iterations": 1, "deadline": 4.0}
    trace, _ = by_name("fedcs", make(6, 3, own=own, seconds=SECONDS), **options)
    # 5 never meets 4 s: alone it leaves a round of 4 s without a delivery.
    assert rows(trace) == [(2, [0, 1]), (9, [2]), (11, [0, 1])]


@pytest.mark.parametrize("name", SAMPLERS)
def test_fedat_asks_within_its_tiers(name):
    windows = {4: [(0, 99)]} if name == "online" else {}
    cohorts = make(6, 2, name, seconds=SECONDS, windows=windows)
    trace, _ = by_name("fedat", cohorts, horizon=60.0, iterations=1, tiers=2)
    for group, ids in zip(trace.group, trace.client, strict=True):
        assert {i // 3 for i in ids[ids >= 0]} == {group}
    if name == "uniform":
        drawn = {tuple(ids) for ids in trace.client[trace.group == 0].tolist()}
        assert drawn == {(0, 1), (0, 2), (1, 2)}


def test_esync_goes_by_the_slowest_of_the_cohort():
    cohorts = make(6, 2, own=follow([0, 2], [0, 5]), seconds=SECONDS)
    trace = FRAMEWORKS["esync"].simulate(cohorts, horizon=18.0, iterations=2).trace
    assert trace.time.tolist() == [6, 18]
    assert trace.iterations.tolist() == [[6, 2], [12, 2]]


def test_tsfl_counts_what_fits_for_the_chosen():
    own = follow([0, 4], [1, 1], [])
    windows = {4: [(1, 9)]}
    cohorts = make(6, 2, own=own, seconds=SECONDS, windows=windows)
    trace, _ = by_name("tsfl", cohorts, num_intervals=4, interval=6.0, carry=False)
    assert trace.client.tolist() == [[0, 4], [1, 1], [-1, -1], [0, 4]]
    assert trace.iterations.tolist() == [[6, 1], [3, 3], [0, 0], [6, 0]]
    times = deliveries.schedule_of(trace, np.arange(6) + 1, cohorts=True)
    assert times.snapshots == 0 and times.client.tolist()[2] == [0, 0]
    assert times.tau.tolist() == trace.iterations.tolist()
    assert times.size.tolist() == [[1, 5], [2, 2], [1, 1], [1, 5]]


@pytest.mark.parametrize("name", sorted({*OF_COHORTS} - {"ttfed", "hysync", "cached"}))
def test_nobody_online_ends_in_one_line(name):
    settings = {"num_clients": 5, "num_intervals": 4, "cohort.size": 2}
    settings |= {"cohort.sampler": "online", "timeline.framework": name}
    late = {i: [(1e6, 2e6)] for i in range(5)}
    cohorts = make(5, 2, "online", windows=late)
    with pytest.raises(UserError) as error:
        workload.simulate_timeline(workload.plan_of(checked(settings)), cohorts)
    assert "\n" not in str(error.value)


# --- settings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cohort.size=21", "size=21: expected 1 to --config.num_clients=20"),
        ("cohort.size=3 cohort.ask=4", "framework=none; it belongs to sfl, fedat or e"),
        ("cohort.size=3 cohort.sampler=online", "sampler=online: cannot go with "),
        ("cohort.size=3 partition.noise=0.1", "partition.noise=0.1: cannot go with "),
        (
            "cohort.size=3 timeline.framework=sfl timeline.copula=seconds,size,0.5",
            "copula=seconds,size,0.5: cannot go with --config.cohort.size=3",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(text, words):
    pairs = [setting.split("=") for setting in text.split()]
    settings = {n: value(v, type(get(Config(), n)), n) for n, v in pairs}
    with pytest.raises(UserError) as error:
        workload.draw_workload(checked(settings))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["none", "afl"])
def test_a_million_clients_are_set_up_in_seconds(name):
    settings = {"num_clients": 10**6, "num_intervals": 10, "cohort.size": 100}
    config = checked(settings | {"timeline.framework": name})
    workload.draw_workload(replace(config, {"num_clients": 1000}))
    tracemalloc.start()
    start = perf_counter()
    times = workload.draw_workload(config).schedule
    seconds, most = perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Sizes of all are 4 bytes each; of a part of them more for a moment.
    assert seconds < 10 and most < 64 * 2**20
    assert times.tau.shape[1] == (1 if name == "afl" else 100)
    assert len(np.unique(times.client)) > 100


def test_who_is_not_asked_does_not_wait():
    # Rounds of 3 s: clients 0 and 1 work 1 s and 3 s, then 1 and 2 work 3 s and 2 s.
    options = {"own": follow([0, 1], [1, 2]), "seconds": np.array([1.0, 3, 2])}
    cohorts = make(3, 2, **options)
    trace, tasks = FRAMEWORKS["sfl"].simulate(cohorts, horizon=7.0, iterations=1)
    assert trace.time.tolist() == [3, 6]
    found = list(segments.segments(tasks, cohorts, 6.0))
    bars = [(s.client, s.kind[:2], s.start, s.end) for s in found]
    assert bars == [
        *[(0, "it", 0, 1), (0, "wa", 1, 3), (0, "id", 3, 6)],
        *[(1, "it", 0, 3), (1, "it", 3, 6)],
        *[(2, "id", 0, 3), (2, "it", 3, 5), (2, "wa", 5, 6)],
    ]
    shares = {kind: share for kind, share in segments.shares(found).items() if share}
    assert shares == {"iteration": 9 / 12, "waiting": 3 / 12}


@pytest.mark.parametrize("name", ["none", "all"])
def test_free_riders_of_cohorts_are_clients(name):
    settings = {"num_clients": 30, "num_intervals": 20, "cohort.size": 6}
    settings |= {"schedule.free_riders": 10, "schedule.free_riding": "echo"}
    if name == "all":
        settings |= {"dms.threshold": "all", "schedule.upload_above": 1}
    times = workload.draw_workload(checked(settings)).schedule
    lazy = set(times.client[(times.reported > 0) & (times.tau == 0)].tolist())
    assert 5 < len(lazy) <= 10
    assert (times.tau[np.isin(times.client, list(lazy))] == 0).all()
    assert np.isnan(times.threshold).all() == (name != "all")
