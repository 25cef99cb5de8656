"""Schedules: the paper's cases, distributions, traces, and every mistake."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tsfl_jax
from tsfl_jax.config import Config, replace
from tsfl_jax.prepare import prepare
from tsfl_jax.prepare.workload import draw_workload
from tsfl_jax.run import runner, summary
from tsfl_jax.theory import bounds
from tsfl_jax.timeline import distributions, schedule
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


def test_case3_sizes_scale_and_stay_positive():
    large, small = make("case3", T=50), make("case3", T=50, size=256)
    np.testing.assert_allclose(small.size, large.size / 4, atol=1)
    np.testing.assert_array_equal(small.tau, large.tau)
    tiny = make("case3", T=50, size=1)
    assert tiny.size.min() == 1 and tiny.size.max() <= 4


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
        times = draw_workload(replace(Config(), settings)).schedule
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
        assert made.size.tolist() == [
            [100, 64, 64, 64],
            [300, 64, 64, 64],
            [300, 64, 64, 64],
        ]
        assert made.tau.dtype == made.size.dtype == np.int32
    path = trace(tmp_path, "tau,Client,interval\n3,1,1")  # any order, no sizes
    made = make("trace", N=2, size=7, trace=path)
    assert made.tau.tolist() == [[0, 0], [0, 3], [0, 0]] and (made.size == 7).all()
    away = make("trace", T=300, N=2, trace=trace(tmp_path, text[:37]), dropout=0.5)
    assert set(away.tau[:, 0]) <= {0, 4}


@pytest.mark.parametrize(
    "text",
    [
        *("norml(2,1)", "normal(2)", "normal(2,x)", "normal(2,-1)", "lognormal(0,1)"),
        *("uniform(3,1)", "uniform(1,2.5)", "normal(nan,1)", "normal(1,1);normal(2,1)"),
    ],
)
def test_malformed_distribution(text):
    with pytest.raises(UserError, match="uniform.low,high") as error:
        make("distribution", tau_groups=(text,))
    message = str(error.value)
    assert f"--config.schedule.tau_groups: {text!r}" in message
    assert "\n" not in message and ("mean 'normal'" in message) == ("norml" in text)


def small(**changes):
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
        ({"kind": "distribution", "tau_groups": "constant(-3)"}, "tau_groups=constant"),
        ({"kind": "case1", "dropout": 0.999999}, "dropout=0.999999: no client"),
        ({"kind": "case2", "upload_above": 4}, "upload_above=4: no client"),
        ({"free_riders": 2, "free_riding": "echo"}, "free_riders=2: no"),
    ],
)
def test_a_run_in_which_no_client_trains_is_refused(changes, message):
    with pytest.raises(UserError, match=message) as error:
        prepare.prepare(small(**changes))
    assert "\n" not in str(error.value)


def test_intervals_and_clients_without_work_are_noted(tmp_path):
    config = small(kind="explicit", tau=(0, 1))
    assert prepare.prepare(config).notes == ("1 of 2 clients never train (0)",)
    path = tmp_path / "trace.csv"
    path.write_text("interval,client,tau\n0,0,1\n3,1,2\n")
    config = small(kind="trace", trace=str(path), num_intervals=5, num_clients=3)
    trace, idle, *_ = prepare.prepare(config).notes
    assert "13 of 15 pairs of interval and client have no row" in trace
    assert idle == (
        "no client trains in 3 of 5 intervals; 1 of 3 clients never train (2)"
    )
    path.write_text("interval,client,tau\n0,0,0\n")
    with pytest.raises(UserError, match="schedule.trace=.*no client does a local"):
        prepare.prepare(config)
    assert prepare.prepare(small(kind="case1")).notes == ()


def test_drawn_sizes_are_bounded_however_long_a_run_is():
    """Case 3 on digits, the default experiment, in 20,000 intervals."""
    config = small(kind="case3", num_intervals=20_000, num_clients=20)
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
    short = prepare.prepare(small(kind="case3", num_intervals=50, num_clients=20))
    np.testing.assert_array_equal(
        prepared.workload.schedule.size[:50], short.workload.schedule.size
    )


def test_bounds_of_the_distributions():
    texts = ["normal(10,2)", "uniform(1,9)", "constant(4)", "lognormal(2,0.5)"]
    got = distributions.limits(texts, flag="sizes")
    np.testing.assert_allclose(got, [16, np.inf, np.inf, 2 * np.exp(1.5 - 0.125)])


def test_more_samples_than_a_client_can_count_are_refused():
    for tau in (2**31 - 1, 2**31 // 44 + 1):
        with pytest.raises(UserError, match=f"client 0 does τ = {tau} local"):
            prepare.prepare(small(kind="explicit", tau=(tau, 1)))
    config = small(kind="explicit", tau=(2**31 - 1, 1), iteration="step")
    with pytest.raises(UserError, match="17179869176 samples"):
        prepare.prepare(config)
    steps = prepare.prepare(small(kind="explicit", tau=(2**31 // 44, 1))).steps
    assert steps.dtype == np.int64 and (steps[:, 0] == 2**31 // 44 * 6).all()


@pytest.mark.slow
def test_samples_are_counted_in_64_bits():
    config = small(kind="explicit", tau=(2, 1))
    result = tsfl_jax.simulate(config)
    assert result.history["samples"].dtype == np.int64
    assert result.history["samples"].tolist() == [132] * 3
    # As many as clients may train on, each of them: more than 32 bits hold.
    exp = runner.build(config)
    history = exp.program.history_shapes(exp.arrays)
    assert history.samples.shape == (1, 3, 2)
    filled = jax.tree.map(lambda a: np.zeros(a.shape[1:], a.dtype), history)
    filled = filled._replace(samples=np.full((3, 2), 2**31 - 1, np.int32))
    named = summary.named_of(exp.prepared, filled)
    found = summary.summarize(exp.prepared, exp.labels, named, 1.0, 1.0)
    assert found["samples_trained"] == 6 * (2**31 - 1)
