"""Fleets: what is drawn, what files say, when a client is online."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsfl_jax.timeline import schedule, ticks
from tsfl_jax.timeline.fleet import Fleet, draw_fleet, exact, finish, online_in
from tsfl_jax.timeline.ticks import SECOND
from tsfl_jax.types import UserError


def draw(N=6, size=None, seed=0, **kwargs):
    values = {
        "speed": ("constant(0.5)",),
        "jitter": 0.0,
        "download": (),
        "upload": (),
        "dropout": 0.0,
        "speeds_file": "",
        "availability_file": "",
        "draws": 8,
    } | kwargs
    size = [100] * N if size is None else size
    return draw_fleet(N, np.array(size), rng=np.random.default_rng(seed), **values)


def file(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def windows(*pairs):
    empty = np.zeros((1, 1))
    online = (np.array(pairs, np.float64).reshape(-1, 2),)
    return exact(Fleet(empty + 1, empty, empty, empty > 0, online))


def finished(fleet, start, seconds):
    return finish(fleet, 0, ticks.of(start), ticks.of(seconds)) / SECOND


def online_seconds(fleet, start, end):
    found = online_in(fleet, 0, ticks.of(start), ticks.of(end))
    return sum(last - first for first, last in found) / SECOND


def test_groups_are_contiguous_and_real():
    fleet = draw(
        speed=("constant(0.25)", "uniform(0.2,0.9)"),
        download=("constant(0.1)", "constant(0.2)", "constant(0.3)"),
    )
    assert fleet.iteration.shape == fleet.lost.shape == (6, 8)
    assert all(a.dtype == np.float64 for a in fleet[:3]) and fleet.lost.dtype == bool
    # Without jitter every draw is exactly the mean.
    assert (fleet.iteration[:3] == 0.25).all()
    second = fleet.iteration[3:]
    assert (second == second[:, :1]).all() and len(set(second[:, 0])) == 3
    assert ((second >= 0.2) & (second < 0.9)).all()
    assert fleet.download[:, 0].tolist() == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
    assert (fleet.upload == 0).all() and not fleet.lost.any() and fleet.online == ()


def test_seconds_grow_with_the_data():
    # Mean size 200: factors 0.5, 1, 1.5.
    fleet = draw(3, [100, 200, 300], download=("constant(2)",))
    assert fleet.iteration[:, 0].tolist() == [0.25, 0.5, 0.75]
    assert (fleet.download == 2).all()


def test_jitter_has_mean_one():
    fleet = draw(4, draws=20000, jitter=0.5, download=("constant(2)",))
    factors = fleet.iteration / 0.5
    # Variance exp(σ²) − 1 = 0.284; 80,000 draws: 5 standard errors are 0.0095.
    assert abs(factors.mean() - 1) < 0.0095 and abs(factors.var() - 0.284) < 0.03
    assert abs(np.log(factors).mean() + 0.125) < 0.01  # median exp(−σ²/2)
    assert (fleet.download[:, 0] != fleet.download[:, 1]).all()


def test_changing_one_kind_of_draw_leaves_the_others():
    plain = {
        "speed": ("lognormal(1,0.5)",),
        "download": ("uniform(0,1)",),
        "upload": ("uniform(0,1)",),
        "jitter": 0.3,
        "dropout": 0.5,
    }
    fleet = draw(**plain)
    for changed, same in (
        ({"speed": ("constant(1)", "constant(2)")}, ("download", "upload", "lost")),
        ({"download": ()}, ("iteration", "upload", "lost")),
        ({"upload": ("normal(5,1)",)}, ("iteration", "download", "lost")),
        ({"dropout": 0.1}, ("iteration", "download", "upload")),
        ({"jitter": 0.0}, ("lost",)),
    ):
        other = draw(**plain | changed)
        for field in fleet._fields[:4]:
            equal = np.array_equal(getattr(other, field), getattr(fleet, field))
            assert equal == (field in same), (changed, field)
    np.testing.assert_array_equal(
        draw(**plain | {"dropout": 0.9}).lost | fleet.lost,
        draw(**plain | {"dropout": 0.9}).lost,
    )
    for a, b in zip(fleet[:4], draw(**plain)[:4], strict=True):
        np.testing.assert_array_equal(a, b)
    assert (draw(seed=1, **plain).iteration != fleet.iteration).all()
    longer = draw(draws=20, **plain)
    for a, b in zip(fleet[:4], longer[:4], strict=True):
        np.testing.assert_array_equal(a, b[:, :8])


def test_speeds_file_replaces_the_means(tmp_path):
    path = file(tmp_path, "Client,seconds,upload\n1,0.25,\n\n0, 4 ,0.5\n")
    fleet = draw(2, [100, 300], speeds_file=path, upload=("constant(7)",))
    # As measured, for whatever data a client has; an empty cell keeps the draw.
    assert fleet.iteration[:, 0].tolist() == [4.0, 0.25]
    assert fleet.upload[:, 0].tolist() == [0.5, 7.0]
    assert (fleet.download == 0).all()


def test_availability_file(tmp_path):
    text = "client,start,end\n2,7.5,inf\n0,3,4\n2,1,2\n2,2,3\n"
    online = draw(3, availability_file=file(tmp_path, text)).online
    # Sorted, and windows that touch are one; client 1 is always online.
    assert [w.tolist() for w in online] == [[[3, 4]], [], [[1, 3], [7.5, math.inf]]]
    assert all(w.dtype == np.float64 and w.shape[1] == 2 for w in online)


def test_finish():
    fleet = windows((1, 3), (5, 6), (8, math.inf))
    for start, seconds, end in (
        (0, 0, 1),  # comes online at 1
        (0, 1.5, 2.5),
        (0, 2, 3),  # exactly to the end of a window
        (0, 2.5, 5.5),  # 2 s in the first window, 0.5 s in the second
        (0, 4, 9),  # 2 + 1 + 1
        (2, 0, 2),
        (3, 0, 5),  # a window does not contain its end
        (6.5, 0.25, 8.25),
        (100, 7, 107),
        (math.inf, 1, math.inf),
    ):
        assert finished(fleet, start, seconds) == end
    fleet = windows((1, 3))
    assert finished(fleet, 0, 2) == 3
    assert finished(fleet, 0, 2.1) == finished(fleet, 3, 0) == math.inf
    none = np.zeros((1, 1))
    for always in (windows(), exact(Fleet(none + 1, none, none, none > 0, ()))):
        assert finished(always, 2.5, 0) == 2.5 and finished(always, 2.5, 1) == 3.5
        assert online_seconds(always, 2, 5) == 3


def test_times_are_whole_nanoseconds():
    # 0.1 + 0.1 + 0.1 is more than 0.3 in float64, in which it has to fit.
    fleet, now = windows((0, 0.3), (100, 200)), 0
    for _ in range(3):
        now = finish(fleet, 0, now, ticks.of(0.1))
    assert ticks.seconds(now) == 0.3
    # Sums are what the decimals say, far from 0, too; quarters keep their bits.
    for start in (0, 1, 10**6, 10**7, 10**9, 10**12):
        decimals = np.array([start + k / 10 for k in range(11)])
        assert (np.diff(ticks.of_array(decimals)) == SECOND // 10).all()
        assert [ticks.of(d) for d in decimals] == ticks.of_array(decimals).tolist()
        assert [ticks.seconds(ticks.of(d)) for d in decimals] == decimals.tolist()
        assert ticks.seconds(ticks.of(start + 0.25)) == start + 0.25
    assert ticks.seconds(ticks.of(1e300)) == 1e300 and ticks.of(math.inf) == math.inf
    assert ticks.multiples(3, 0.1).tolist() == [0.1, 0.2, 0.3]
    # What rounds to nothing is refused; a window of no length is none.
    one = np.ones((2, 1))
    with pytest.raises(UserError, match="client 1 takes 1e-12 s; .* 1e-09 s") as error:
        exact(Fleet(one * [[1], [1e-12]], one, one, one < 0, ()))
    assert "\n" not in str(error.value)
    assert finished(windows((5, 5 + 1e-12)), 0, 0) == math.inf


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=8).filter(
        lambda x: not len(x) % 2
    ),
    st.integers(0, 40),
    st.integers(0, 30),
)
def test_finish_agrees_with_online_seconds(gaps, start, seconds):
    """In whole numbers of quarters nothing is rounded."""
    start, seconds = start / 4, seconds / 4
    fleet = windows(*(np.cumsum(gaps).reshape(-1, 2) / 4).tolist())
    end = finished(fleet, start, seconds)
    if end == math.inf:
        left = online_seconds(fleet, start, 1e6)
        assert left < seconds or (left == seconds == 0)
    else:
        assert end >= start and online_seconds(fleet, start, end) == seconds


SPEEDS, ONLINE, TRACE = "client,seconds\n", "client,start,end\n", "interval,client,tau"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("speeds", None, "--config.timeline.speeds=.*No such file"),
        ("speeds", "client,second\n", "line 1: .*did you mean 'seconds'"),
        ("speeds", SPEEDS + "0,1\n", "no row for client 1; .*from 0 to 1 once"),
        ("speeds", SPEEDS + "0,1\n0,2\n", "line 3: client 0 for the second time"),
        ("speeds", SPEEDS + "0,0\n", "line 2: seconds is '0'; .* from 1e-09"),
        ("online", ONLINE + "0,4,9\n1,0,9\n0,1,5\n", r"line 2: client 0's .*\[4, 9\)"),
        ("trace", TRACE + "\n\n1,1,1\n1,1,1\n", "line 4: interval 1, client 1 for"),
    ],
)
def test_malformed_files(tmp_path, kind, text, message):
    path = tmp_path / "table.csv"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=message) as error:
        if kind == "trace":
            sizes = {"num_intervals": 3, "num_clients": 2, "data_size": 9}
            rng = np.random.default_rng(0)
            schedule.make_schedule("trace", trace=str(path), rng=rng, **sizes)
        name = "availability" if kind == "online" else kind
        draw(2, **{f"{name}_file": str(path)})
    assert str(path) in str(error.value) and "\n" not in str(error.value)
