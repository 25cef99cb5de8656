"""Schedules: the paper's cases, distributions, traces, free riders."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import problems
from tests.engine.test_scan import PROBLEM, as_reference
from tests.problems import small
from tests.rules.test_rules import HP, TAU, in_step
from tests.timeline.test_deliveries import SIZES, reference_of
from tsfl_jax.config import Config, replace
from tsfl_jax.prepare import prepare, workload
from tsfl_jax.theory import bounds
from tsfl_jax.timeline import schedule
from tsfl_jax.timeline.schedule import complete
from tsfl_jax.types import UserError


def make(kind, T=3, N=20, size=1024, seed=0, **kwargs):
    return schedule.make_schedule(
        kind,
        num_intervals=T,
        num_clients=N,
        data_size=size,
        rng=np.random.default_rng(seed),
        **kwargs,
    )


def test_case1_and_case2():
    for kind, tau, degree in (
        ("case1", [1] * 10 + [4] * 10, 2.25),
        ("case2", [1] * 5 + [2] * 5 + [3] * 5 + [4] * 5, 1.25),
    ):
        made = make(kind)
        assert made.tau.dtype == made.size.dtype == np.int32
        assert made.tau.tolist() == [tau] * 3
        assert (made.size == 1024).all() and made.size.shape == (3, 20)
        assert bounds.heterogeneity_degree(made.tau[0]) == degree
        assert bounds.heterogeneity_degree(made.tau).tolist() == [degree] * 3


def test_case3_has_the_moments_of_the_paper():
    T = 4000
    made = make("case3", T=T)
    # Quarters of contiguous clients. 20,000 draws: 5 standard errors of frequencies.
    tau = made.tau.reshape(T, 4, 5).transpose(1, 0, 2).reshape(4, -1)
    for drawn, mean, std in zip(tau, (2, 3, 4, 5), (0.4, 0.6, 0.8, 1.0), strict=True):
        below = [math.erf((k - mean) / std / 2**0.5) / 2 for k in range(12)]
        found = np.bincount(drawn, minlength=11)[:11] / drawn.size
        np.testing.assert_allclose(found, np.diff(below), atol=0.018)
    # Fifths of interleaved clients.
    size = made.size.reshape(T, 4, 5).transpose(2, 0, 1).reshape(5, -1)
    mean, std = np.array([512, 768, 1024, 1280, 1536]), np.arange(100, 301, 50)
    np.testing.assert_allclose(size.mean(1), mean - 0.5, atol=5 * 300 / 126)
    np.testing.assert_allclose(size.std(1), std, rtol=0.04)
    assert (made.tau[0] != made.tau[1]).any() and (made.size[0] != made.size[1]).any()
    # Nearly independent of each other: every quarter has the same mix of sizes.
    assert np.ptp(made.size.reshape(T, 4, 5).mean((0, 2))) < 15


def test_explicit():
    assert make("explicit", N=4, tau=(3, 0, 2, 5)).tau[1].tolist() == [3, 0, 2, 5]
    assert make("explicit", N=5, tau=(7, 1)).tau[0].tolist() == [7, 7, 7, 1, 1]


def test_distributions():
    made = make(
        "distribution",
        T=5000,
        N=5,
        tau_groups=(
            "normal(10,2)",
            " Uniform( 2, 4 )",
            "lognormal(20,0.5)",
            "constant(6.9)",
            "normal(0.2,5)",
        ),
        size_groups=("uniform(-3,2)", "constant(9)"),
    )
    normal, uniform, lognormal, constant, clipped = made.tau.T
    assert abs(normal.mean() - 9.5) < 0.15 and abs(normal.std() - 2.02) < 0.1
    shares = np.bincount(uniform, minlength=6) / 5000
    np.testing.assert_allclose(shares[2:5], 1 / 3, atol=0.035)
    assert shares[2:5].sum() == 1
    # The mean is the distribution's own: 20, less half a step for the floor.
    assert abs(lognormal.mean() - 19.5) < 0.8
    assert abs(np.median(lognormal) - 20 * np.exp(-0.125)) < 1
    assert (constant == 6).all()
    assert clipped.min() == 0 and 0.4 < (clipped == 0).mean() < 0.7
    assert set(made.size[:, 0::2].ravel()) == {1, 2}  # interleaved, at least 1
    assert (made.size[:, 1::2] == 9).all()


MIXED = ("uniform(1,6)", "lognormal(3,1)", "normal(4,2)")


@settings(deadline=None, max_examples=5)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 9))
def test_a_longer_run_extends_a_shorter_one(T, more, seed):
    for kind, kwargs in (
        ("case3", {}),
        ("distribution", {"tau_groups": MIXED, "size_groups": MIXED}),
    ):
        short, long = (
            make(kind, T=t, N=7, seed=seed, dropout=0.3, **kwargs)
            for t in (T, T + more)
        )
        np.testing.assert_array_equal(long.tau[:T], short.tau)
        np.testing.assert_array_equal(long.size[:T], short.size)


def test_upload_above():
    for above, tau in ((2, [0] * 10 + [3] * 5 + [4] * 5), (3, [0] * 15 + [4] * 5)):
        settings = {"schedule.kind": "case2", "schedule.upload_above": above}
        times = workload.draw_workload(replace(Config(), settings)).schedule
        assert times.tau[0].tolist() == tau


def test_dropout_only_takes_away():
    whole, thin = make("case3", T=500), make("case3", T=500, dropout=0.3)
    np.testing.assert_array_equal(thin.size, whole.size)
    stays = thin.tau != 0
    np.testing.assert_array_equal(thin.tau[stays], whole.tau[stays])
    # 10,000 independent draws: 5 standard errors. Any client, at any time.
    away = (thin.tau == 0) & (whole.tau > 0)
    rate = away.sum() / (whole.tau > 0).sum()
    assert abs(rate - 0.3) < 0.025
    assert away.mean(0).min() > 0.15 and away.mean(1).max() < 0.9


def trace(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode(encoding))
    return str(path)


def test_trace(tmp_path):
    text = "interval,client,tau,size\r\n0,0,4,100\r\n\r\n 2 , 0 ,0, 300\r\n0,2,5,\r\n"
    for encoding in ("utf-8", "utf-8-sig"):
        made = make("trace", N=4, size=64, trace=trace(tmp_path, text, encoding))
        assert made.tau.tolist() == [[4, 0, 5, 0], [0] * 4, [0] * 4]
        # Away: the client's largest size, data_size where the file has none.
        assert made.size[:, 0].tolist() == [100, 300, 300]
        assert (made.size[:, 1:] == 64).all()
        assert made.tau.dtype == made.size.dtype == np.int32
    path = trace(tmp_path, "tau,Client,interval\n3,1,1")  # any order, no sizes
    made = make("trace", N=2, size=7, trace=path)
    assert made.tau.tolist() == [[0, 0], [0, 3], [0, 0]] and (made.size == 7).all()
    away = make("trace", T=300, N=2, trace=trace(tmp_path, text[:37]), dropout=0.5)
    assert set(away.tau[:, 0]) <= {0, 4}


@pytest.mark.parametrize("text", ["norml(2,1)", "normal(2,-1)", "uniform(1,2.5)"])
def test_malformed_distribution(text):
    with pytest.raises(UserError, match="uniform.low,high") as error:
        make("distribution", tau_groups=(text,))
    message = str(error.value)
    assert f"--config.schedule.tau_groups: {text!r}" in message
    assert "\n" not in message and ("mean 'normal'" in message) == ("norml" in text)


def two_clients(**changes):
    config = Config(algorithm="fedavg", num_intervals=3, num_clients=2, batch_size=8)
    config.schedule.data_size, config.model.hidden = 44, 4
    for name, value in changes.items():
        where = config if hasattr(config, name) else config.schedule
        setattr(where, name, value)
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "explicit", "tau": (0, 0)}, r"schedule.tau=\(0, 0\): no client does"),
        ({"free_riders": 2, "free_riding": "echo"}, "free_riders=2: no"),
    ],
)
def test_a_run_in_which_no_client_trains_is_refused(changes, message):
    with pytest.raises(UserError, match=message) as error:
        prepare.prepare(two_clients(**changes))
    assert "\n" not in str(error.value)


def test_intervals_and_clients_without_work_are_noted(tmp_path):
    path = trace(tmp_path, "interval,client,tau\n0,0,1\n3,1,2\n")
    config = two_clients(kind="trace", trace=path, num_intervals=5, num_clients=3)
    pairs, idle, *_ = prepare.prepare(config).notes
    assert "13 of 15 pairs of interval and client have no row" in pairs
    assert "in 3 of 5 intervals; 1 of 3 clients never train (2)" in idle


def test_drawn_sizes_are_bounded_however_long_a_run_is():
    """Case 3 on digits, the default experiment, in 20,000 intervals."""
    config = two_clients(kind="case3", num_intervals=20_000, num_clients=20)
    prepared = prepare.prepare(config)
    # 1,384 of the 1,438 samples: 880 and three times 168.
    assert prepared.partition.capacity.sum() <= 1438
    cut = int(prepared.notes[0].split()[0])
    assert "cut off at three standard deviations" in prepared.notes[0]
    # Φ(−3) of 400,000, and a little more as sizes are floored.
    assert 400 < cut < 700
    fifth = prepared.workload.schedule.size[:, 0]
    assert fifth.max() == int(22 + 3 * 100 / 1024 * 44)
    # A longer run still extends a shorter one.
    short = prepare.prepare(two_clients(kind="case3", num_intervals=50, num_clients=20))
    np.testing.assert_array_equal(
        prepared.workload.schedule.size[:50], short.workload.schedule.size
    )


def test_more_samples_than_a_client_can_count_are_refused():
    for tau in (2**31 - 1, 2**31 // 44 + 1):
        with pytest.raises(UserError, match=f"client 0 does τ = {tau} local"):
            prepare.prepare(two_clients(kind="explicit", tau=(tau, 1)))
    config = two_clients(kind="explicit", tau=(2**31 - 1, 1), iteration="step")
    with pytest.raises(UserError, match="17179869176 samples"):
        prepare.prepare(config)
    steps = prepare.prepare(two_clients(kind="explicit", tau=(2**31 // 44, 1))).steps
    assert steps.dtype == np.int64 and (steps[:, 0] == 2**31 // 44 * 6).all()


# ---- Free riders ----

HONEST = np.array([[1, 4, 2], [0, 2, 3], [5, 1, 0]])


class Order(np.random.Generator):
    """A generator that chooses free riders in this order."""

    def __init__(self, *order):
        super().__init__(np.random.PCG64())
        self.order = np.array(order)

    def permutation(self, count):
        assert count == len(self.order)
        return self.order


@pytest.mark.parametrize(
    ("kind", "order", "number", "done", "reported"),
    [
        # One iteration where there would be some; the most of any client is 4, 3, 5.
        (
            "claim",
            (0, 2, 1),
            2,
            [[1, 4, 1], [0, 2, 1], [1, 1, 0]],
            [[4, 4, 4], [0, 2, 3], [5, 1, 0]],
        ),
        (
            "echo",
            (1, 0, 2),
            1,
            [[1, 0, 2], [0, 0, 3], [5, 0, 0]],
            [[1, 4, 2], [0, 3, 3], [5, 5, 0]],
        ),
        # Blocks of two: there in 0 and 1, away in 2.
        ("visit", (2, 0, 1), 1, [[1, 4, 2], [0, 2, 3], [5, 1, 0]], None),
        ("visit", (0, 1, 2), 1, [[1, 4, 2], [0, 2, 3], [0, 1, 0]], None),
        *((kind, (0, 1, 2), 0, HONEST.tolist(), None) for kind in ("claim", "echo")),
    ],
)
def test_free_riders_by_hand(kind, order, number, done, reported):
    arguments = HONEST, kind, number, Order(*order)
    work, claims, is_rider = schedule.make_free_riders(*arguments, period=2)
    assert np.flatnonzero(is_rider).tolist() == sorted(order[:number])
    assert work.tolist() == done and claims.tolist() == (reported or done)
    assert work.dtype == claims.dtype == np.int32


def test_slots_of_deliveries_by_hand():
    # Client 2 of 4 is chosen, whatever its slots; an empty slot names client 0.
    tau = np.array([[2, 3, 0], [4, 2, 1]])
    client = np.array([[2, 1, 0], [3, 2, 2]])
    slots = {"client": client, "num_clients": 4}
    done, reported, chosen = schedule.make_free_riders(
        tau, "claim", 1, Order(2, 0, 1, 3), **slots
    )
    assert chosen.tolist() == [False, False, True, False]
    assert done.tolist() == [[1, 3, 0], [4, 1, 1]]
    assert reported.tolist() == [[3, 3, 0], [4, 4, 4]]
    with pytest.raises(UserError, match="4 = --config.num_clients"):
        schedule.make_free_riders(tau, "echo", 5, Order(0, 1, 2, 3), **slots)


def riding(kind, algorithm, settings=None, number=1):
    settings = settings or small(algorithm=algorithm, num_intervals=4)
    settings.schedule.free_riders = number
    settings.schedule.free_riding = kind
    return settings


def test_an_echo_is_the_global_model():
    """FedAvg, all but client 2 honest, against the slow reference."""
    done, reported, _ = schedule.make_free_riders(TAU, "echo", 1, Order(2, 0, 1, 3, 4))
    size = np.broadcast_to(SIZES, TAU.shape).astype(np.int32)
    echo = complete(done, size, reported=reported)
    hp = HP._replace(mu=HP.mu * 0)
    start, state, history = problems.replayed(
        "fedavg", PROBLEM, echo, hp=hp, iteration="step"
    )
    trace = in_step(TAU)
    trace.iterations, trace.reported = done, reported
    versions = reference_of(start, "fedavg", hp, trace)
    for n, value in versions[-1].items():
        assert np.abs(value - versions[0][n]).max() > 1e-2
        got = as_reference(state.params)[n]
        np.testing.assert_allclose(got, value, rtol=2e-4, atol=2e-5)
    # Its weight is what its samples are worth: 7 of 10 + 12 + 7 + 9.
    np.testing.assert_allclose(history.rho[0, 2], 7 / 38, rtol=1e-6)
    assert history.num_discarded.sum() == 0
    # An interval by echoes alone leaves the model as it is, but for rounding.
    alone = np.array([[0, 0, 4, 0, 0]] * 3, np.int32)
    echoes = complete(alone * 0, size, reported=alone)
    start, state, history = problems.replayed(
        "fedavg", PROBLEM, echoes, hp=HP, iteration="step"
    )
    for n, value in as_reference(start.params).items():
        np.testing.assert_allclose(as_reference(state.params)[n], value, rtol=1e-6)
    assert not history.diverged.any() and history.samples.sum() == 0


def test_k_of_all_work_is_of_what_clients_report(monkeypatch):
    settings = small(num_intervals=6)
    settings.schedule.kind, settings.schedule.tau = "explicit", (1, 3, 4, 2)
    settings.schedule.upload_above = 1
    settings.dms.threshold = "all"
    assert (workload.draw_workload(settings).schedule.threshold == 2.5).all()
    # Client 0 cannot upload: it does one iteration of its one, or none.
    for kind, least in (("claim", 1), ("echo", 0)):
        riders = riding(kind, "", settings, 4)
        # Four echoes do nothing, which is refused.
        monkeypatch.setattr(workload, "_idle_notes", lambda plan, times: ())
        times = workload.draw_workload(riders).schedule
        assert (times.reported == [0, 4, 4, 4]).all()
        assert (times.threshold == (12 + least) / 4).all()
    # All are away in the second five intervals.
    times = workload.draw_workload(riding("visit", "", settings, 4)).schedule
    assert times.threshold.tolist() == [2.5] * 5 + [0]
