"""Measured fleets: daily windows, traces in JSON, users drawn anew, presets."""

import dataclasses
import json
import math

import numpy as np
import pytest

import tsfl_jax
from tsfl_jax import config as configs
from tsfl_jax.components import Part
from tsfl_jax.config import Config, filled, get, replace
from tsfl_jax.prepare import workload
from tsfl_jax.run import grid
from tsfl_jax.timeline import FRAMEWORKS, cohort, crowd, measured, ticks
from tsfl_jax.timeline.fleet import draw_fleet
from tsfl_jax.timeline.presets import PRESETS
from tsfl_jax.timeline.timeline_settings import FleetConfig
from tsfl_jax.types import UserError

HOUR, DAY = 3600.0, 86400.0


def draw(N, speeds="", availability="", size=None, dropout=0.0, **options):
    names = {"samples", "period", "until", "seed"} & {*options}
    files = {"until": 2 * DAY} | {n: options.pop(n) for n in names}
    options = {"speed": ("constant(1)",), "jitter": 0.0, "draws": 2} | options
    size = np.full(N, 10) if size is None else np.array(size)
    rng = np.random.default_rng(0)
    paths = {"speeds_file": str(speeds), "availability_file": str(availability)}
    return draw_fleet(
        N, size, rng=rng, dropout=dropout, files=files, **paths, **options
    )


def hours_of(windows):
    return (np.asarray(windows) / HOUR).tolist()


def written(tmp_path, name, content):
    path = tmp_path / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def test_windows_repeat_each_day_over_midnight():
    fleet = draw(
        3,
        online=("constant(8)", "constant(2)", "constant(24)"),
        online_from=("constant(22)", "constant(-1)", "constant(5)"),
    )
    # What began the day before is there; a day more than the two of the run.
    night, short, always = fleet.online
    assert hours_of(night) == [[0, 6], [22, 30], [46, 54], [70, 78]]
    assert hours_of(short) == [[0, 1], [23, 25], [47, 49], [71, 73]]
    assert len(always) == 0


def test_24_hours_a_day_are_always_to_the_bit():
    settings = {"speed": ("lognormal(1,0.5)",), "jitter": 0.3, "dropout": 0.4}
    plain, daily = draw(5, **settings), draw(5, **settings, online=("constant(24)",))
    assert plain.online == daily.online == ()
    for one, other in zip(plain[:4], daily[:4], strict=True):
        np.testing.assert_array_equal(one, other)
    # Hours have streams of their own.
    part = draw(5, **settings, online=("uniform(1,9)",), online_from=("uniform(0,9)",))
    assert len(part.online) == 5
    for one, other in zip(plain[:4], part[:4], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"online": ("constant(0)",)}, "online=constant.0.: client 0 gets 0 h.*> 0"),
        ({"online": ("normal(1,9)",)}, "online=normal.1,9.: client . gets -.* h"),
        ({"online": ("week",)}, "online: 'week': expected normal"),
    ],
)
def test_hours_that_are_none(texts, message):
    with pytest.raises(UserError, match=message):
        draw(9, **texts)


def test_a_period_repeats_the_windows_of_a_file(tmp_path):
    path = written(tmp_path, "a.csv", "client,start,end\n0,2,3\n0,5,7\n1,0,1\n")
    fleet = draw(3, availability=path, period=6.0, until=10.0)
    # The window [5, 7) goes on into the next period.
    assert fleet.online[0].tolist()[:5] == [[0, 1], [2, 3], [5, 7], [8, 9], [11, 13]]
    assert fleet.online[1].tolist()[:2] == [[0, 1], [6, 7]]
    assert len(fleet.online[2]) == 0
    once = draw(3, availability=path, until=10.0)
    assert once.online[0].tolist() == [[2, 3], [5, 7]]


def test_hours_in_the_csv_of_speeds(tmp_path):
    text = "client,seconds,online,online_from\n0,1,6,3\n1,1,,\n"
    fleet = draw(2, speeds=written(tmp_path, "s.csv", text), online=("constant(1)",))
    assert hours_of(fleet.online[0])[0] == [3, 9]
    assert hours_of(fleet.online[1])[0] == [0, 1]


def test_costs_of_daily_windows():
    """6 of 24 hours online; 2 tasks of 2 h compute, the rest idles at 0.5 W."""
    config = replace(Config(), CLOCK | {"schedule.interval_seconds": DAY})
    changes = {"timeline.framework": "sfl", "algorithm": "fedavg", "num_intervals": 1}
    changes |= {"timeline.local_iterations": 2, "timeline.speed": "constant(3600)"}
    changes |= {"timeline.online": "constant(6)", "timeline.online_from": "constant(4)"}
    changes |= {"timeline.power": "5,1,0.5", "num_clients": 1}
    plan = tsfl_jax.explain(replace(config, changes))
    assert plan.schedule.seconds.tolist() == [6 * HOUR, 8 * HOUR, 10 * HOUR]
    costs = plan.costs
    assert costs.compute.tolist() == [6 * HOUR] and costs.idle.tolist() == [0]
    assert costs.offline.tolist() == [4 * HOUR]
    assert costs.joules.tolist() == [5 * 6 * HOUR]
    # A task of 7 h ends on the next day, at 4 + 1: 6 h, 18 h offline, 1 h.
    long = replace(config, changes | {"timeline.local_iterations": 7})
    long = tsfl_jax.explain(replace(long, {"num_intervals": 2}))
    assert long.schedule.seconds.tolist() == [29 * HOUR]
    assert long.costs.offline.tolist() == [4 * HOUR + 18 * HOUR]


CLOCK = {"num_clients": 6, "num_intervals": 4, "batch_size": 8, "model.hidden": 4}
CLOCK |= {"schedule.data_size": 16, "data.name": "synthetic", "data.shape": (4, 4, 1)}
CLOCK |= {"data.train_size": 300, "data.test_size": 50}
CLOCK |= {"schedule.interval_seconds": 10.0}


# ---- Traces in JSON ----


def flash(*events, day="2020-01-02"):
    lines = [f"{day} {time}\t{event}" for time, event in events]
    return {"guid": "x", "model": "SM-A520F", "messages": "\n".join([*lines, ""])}


READY = [("01:00:00", "WIFI"), ("01:30:00", "screen_lock")]
READY += [("02:00:00", "battery_charged_on")]
USERS = {
    # Ready from 2 h to 5 h, and from 6 h to 7 h; the trace is from 1 h to 9 h.
    "a": flash(
        *READY,
        *[("03:00:00", "81.0%"), ("05:00:00", "4G"), ("06:00:00", "wifi")],
        *[("07:00:00", "screen_unlock"), ("09:00:00", "screen_off")],
    ),
    "never": flash(*READY[:2], ("05:00:00", "screen_on")),
    "malformed": flash(*READY) | {"messages": "yesterday\twifi\n"},
    "b": flash(*READY, ("03:00:00", "battery_charged_off"), ("13:00:00", "2g")),
}


def test_states_of_flash(tmp_path):
    path = written(tmp_path, "state_traces.json", USERS)
    fleet = draw(2, availability=path, until=20 * HOUR)
    # As in FLASH those that are never ready are left out, and a trace of 8 h is again
    # after 8 h: what is at 2 h is at 10 h, 18 h, 26 h.
    first = [[2, 5], [6, 7], [10, 13], [14, 15], [18, 21], [22, 23]]
    assert hours_of(fleet.online[0])[:6] == first
    assert hours_of(fleet.online[1])[:2] == [[2, 3], [14, 15]]
    with pytest.raises(
        UserError, match="2 usable users .*num_clients=3; .*resample"
    ) as error:
        draw(3, availability=path)
    assert str(path) in str(error.value)


def test_behavior_of_fedscale(tmp_path):
    user = {
        "duration": 55,
        "active": [10, 70],
        "inactive": [30, 95],
        "model": "CPH1801",
    }
    users = {"17": user | {"finish_time": 100}, "4": user | {"finish_time": 90}}
    path = written(tmp_path, "behavior.json", users)
    fleet = draw(2, availability=path, until=180.0)
    first = [[10, 30], [70, 95], [110, 130], [170, 195]]
    assert fleet.online[0].tolist()[:4] == first
    # The second window goes on at the start of the next period of 90 s.
    second = [[0, 5], [10, 30], [70, 95], [100, 120], [160, 185]]
    assert fleet.online[1].tolist()[:5] == second


def test_capacity_of_fedscale(tmp_path):
    users = {"9": {"computation": 50.0, "communication": 1000.0}}
    users["3"] = {"computation": 20.0, "communication": 8.0}
    path, sent = written(tmp_path, "capacity.json", users), (256000.0, 1024.0)
    # 3 × 50 ms of a sample: a pass over 30 and over 10 samples.
    fleet = draw(2, speeds=path, size=[30, 10], samples=20.0, transfer_bytes=sent)
    assert fleet.iteration[:, 0].tolist() == pytest.approx([4.5, 0.6])
    # 1000 kbit/s are 128,000 bytes per second both ways.
    assert fleet.download[:, 0].tolist() == pytest.approx([2, 250])
    assert fleet.upload[:, 0].tolist() == pytest.approx([0.008, 1])
    # In a run: of steps those of a mini-batch, of passes those of a client's samples.
    settings = CLOCK | {"num_clients": 2, "timeline.speeds": str(path)}
    settings |= {"timeline.framework": "sfl", "schedule.interval_seconds": 100.0}
    for iteration, samples in (("step", 8), ("pass", 16)):
        config = replace(Config(), settings | {"schedule.iteration": iteration})
        fleet = workload.draw_workload(config, transfer_bytes=sent).fleet
        expected = [0.15 * samples, 0.06 * samples]
        assert fleet.iteration[:, 0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("speeds", "{", "JSONDecodeError"),
        ("speeds", [1], "no users by name"),
        ("speeds", {"a": {"computation": 1}, "b": {}}, "communication"),
        ("speeds", {"a": {"computation": 0, "communication": 1}}, "user a has"),
        ("availability", {"a": {"active": [1], "inactive": [2]}}, "finish_time"),
        ("availability", {"a": flash(*READY)}, "0 usable users"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, name, content, message):
    path = written(tmp_path, "other.json", content)
    with pytest.raises(UserError, match=message) as error:
        draw(1, **{name: path})
    text = str(error.value)
    assert str(path) in text and "\n" not in text and f"timeline.{name}" in text


# ---- Users drawn with replacement ----


def test_clients_are_users_drawn_with_replacement_of_both_files_alike(tmp_path):
    seconds = "client,seconds\n" + "".join(f"{i},{i + 1}\n" for i in range(5))
    hours = "client,start,end\n" + "".join(f"{i},{i},{i + 1}\n" for i in range(5))
    paths = {"speeds": written(tmp_path, "s.csv", seconds)}
    paths["availability"] = written(tmp_path, "a.csv", hours)
    fleet, other = (draw(4000, **paths, seed=3) for _ in range(2))
    user = fleet.iteration[:, 0] - 1
    # Multinomial: 800 of each, five standard deviations are 127.
    assert (abs(np.bincount(user.astype(int), minlength=5) - 800) < 127).all()
    assert [w[0, 0] for w in fleet.online] == user.tolist()
    np.testing.assert_array_equal(fleet.iteration, other.iteration)
    # A client of a crowd is the same user, and however many there are.
    names = {f"{n}_file": str(path) for n, path in paths.items()}
    many = crowd.make_crowd(
        10**6, 3, sizes=("constant(9)",), **names, files={"seed": 3}
    )
    some = crowd.fleet_of(many, np.arange(50), 1)
    assert some.iteration[:, 0].tolist() == fleet.iteration[:50, 0].tolist()
    for one, two in zip(some.online, fleet.online, strict=False):
        np.testing.assert_array_equal(one, two)


def test_another_seed_is_another_fleet_of_a_trace(tmp_path):
    path = written(tmp_path, "s.csv", "client,seconds\n0,1\n1,2\n2,4\n")
    config = replace(Config(), CLOCK | {"timeline.speeds": str(path)})
    config = replace(config, {"timeline.framework": "sfl", "timeline.resample": True})
    fleets = set()
    for seed in range(5):
        drawn = workload.draw_workload(replace(config, {"seeds.fleet": seed})).fleet
        assert {*drawn.iteration[:, 0]} <= {1, 2, 4}
        fleets.add(tuple(drawn.iteration[:, 0]))
    assert len(fleets) > 3


# ---- Populations ----


def test_the_online_sampler_knows_each_day():
    """A million clients from whom only those in their hours are asked."""
    seconds = {"speed": ("constant(1)",), "online": ("constant(6)", "constant(24)")}
    seconds |= {"online_from": ("uniform(0,24)", "constant(0)")}
    options = {"sizes": ("constant(9)",), "files": {"until": 3 * DAY}}
    many = crowd.make_crowd(10**5, 0, seconds=seconds, **options)
    settings = cohort.CohortConfig(size=100, sampler="online")
    cohorts = cohort.make_cohorts(many, settings)
    for number, hours in enumerate((0.5, 13.25, 49.75)):
        now = ticks.of(hours * HOUR)
        away = cohort.offline(cohorts.online, now)
        # Three quarters of the first half.
        assert abs(len(away) - 37_500) < 5 * math.sqrt(50_000 * 3 / 16)
        ids = cohort.draw_cohort(cohorts, number, now)
        assert len(ids) == 100 and not np.isin(ids, away).any()
        windows = crowd.fleet_of(many, ids, 1).online
        for w in windows:
            is_on = (w[:, 0] <= hours * HOUR) & (hours * HOUR < w[:, 1])
            assert len(w) == 0 or is_on.any()


def test_cohorts_of_a_trace_drawn_anew(tmp_path):
    user = {"active": [0, 70], "inactive": [30, 95], "finish_time": 100}
    users = {"a": user, "b": user | {"active": [40, 60], "inactive": [50, 65]}}
    path = written(tmp_path, "behavior.json", users)
    options = {"sizes": ("constant(9)",), "files": {"until": 500.0, "seed": 7}}
    many = crowd.make_crowd(10**4, 7, availability_file=str(path), **options)
    settings = cohort.CohortConfig(size=50, sampler="online")
    cohorts, is_a = cohort.make_cohorts(many, settings), []
    for number, now in enumerate((10, 110, 45, 362)):
        ids = cohort.draw_cohort(cohorts, number, ticks.of(now))
        windows = crowd.fleet_of(many, ids, 1).online
        is_a.append([w[0, 0] == 0 for w in windows])
    assert all(map(all, (is_a[0], is_a[1]))) and not any(is_a[2] + is_a[3])
    # Both users are half of the clients.
    away = cohort.offline(cohorts.online, ticks.of(10.0))
    assert abs(len(away) - 5000) < 250


def test_the_next_start_is_on_the_next_day():
    seconds = {"speed": ("constant(1)",), "online": ("constant(2)",)}
    seconds |= {"online_from": ("constant(3)", "constant(5)")}
    few = crowd.make_crowd(2, 0, seconds=seconds, sizes=("constant(9)",))
    settings = cohort.CohortConfig(size=1, sampler="online")
    cohorts = cohort.make_cohorts(few, settings)
    for now, start, opening in ((0, 3, 3), (3, 5, 3), (6.5, 27, 6.5), (7, 27, 27)):
        now, start, opening = (ticks.of(h * HOUR) for h in (now, start, opening))
        assert cohort.next_start(cohorts.online, now) == start
        assert cohort.opening(cohorts, now) == opening


# ---- Presets ----


def test_a_preset_fills_what_is_at_its_default():
    config = replace(Config(), CLOCK | {"timeline.fleet": "mobile"})
    config = replace(config, {"timeline.framework": "tsfl", "timeline.power": "1,1,1"})
    config = replace(config, {"schedule.interval_seconds": HOUR})
    plan = tsfl_jax.explain(config)
    values = PRESETS["mobile"].make
    for name, value in values.items():
        expected = "1,1,1" if name == "timeline.power" else value
        assert get(plan.prepared.config, name) == expected
        assert name == "timeline.power" or get(config, name) != value
    words = " ".join(str(plan).split())
    assert "fleet mobile (timeline.speed=lognormal(1.16,0.52), " in words
    assert "timeline.power=1,1,1, schedule.dropout=0.08)" in words
    again = filled(plan.prepared.config)
    assert again == plan.prepared.config
    assert filled(replace(Config(), CLOCK)) == replace(Config(), CLOCK)


def test_a_preset_does_not_replace_what_is_swept():
    config = replace(Config(), CLOCK | {"timeline.fleet": "mobile"})
    assert grid.changed(config, {"schedule.dropout": 0.1}).schedule.dropout == 0.1
    with pytest.raises(UserError, match=r"schedule.dropout=0.0: .* puts 0.08; "):
        grid.changed(config, {"schedule.dropout": 0.0})
    grid.changed(replace(Config(), CLOCK), {"schedule.dropout": 0.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"online_from": "constant(3)"}, "online_from=.*without .*online;"),
        ({"resample": True}, "resample=True: .*without .*availability"),
        ({"period": 60.0, "availability": "a.json"}, "period=60.0: .*FILE.csv"),
    ],
)
def test_what_would_be_ignored_is_refused(changes, message):
    settings = FleetConfig(**changes)
    with pytest.raises(UserError, match=message):
        settings.check(None, None)
    used = {"online": "constant(3)", "availability": "a.csv"}
    dataclasses.replace(settings, **used).check(None, None)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "none"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_preset_runs_in_each_framework(name, framework):
    changes = {"timeline.fleet": name, "timeline.framework": framework}
    interval = 1.0 if name == "cross_silo" else 60.0
    changes |= {"schedule.interval_seconds": interval, "timeline.deadline": interval}
    changes |= {"timeline.local_iterations": 4, "cohort.sampler": "online"}
    if framework == "tsfl":
        del changes["timeline.local_iterations"]
    if framework != "fedcs":
        del changes["timeline.deadline"]
    config = replace(Config(algorithm="fedavg"), CLOCK | changes)
    population = {"num_clients": 1000, "cohort.size": 6}
    config = replace(config, population | {"partition.replacement": True})
    drawn = workload.draw_workload(filled(config), transfer_bytes=(1e6, 1e6))
    assert len(drawn.schedule.tau)


def test_a_fleet_of_the_users_own(monkeypatch):
    monkeypatch.setattr(configs, "OWN", {by: {} for by in configs.OWN})
    monkeypatch.setitem(PRESETS, "lab", PRESETS["none"])  # removed at the end
    monkeypatch.delitem(PRESETS, "lab")
    tsfl_jax.register("timeline.fleet", "lab", Part({"timeline.speed": "constant(2)"}))
    monkeypatch.setitem(PRESETS, "wrong", Part({"timeline.sped": "constant(2)"}))
    config = replace(Config(), {"timeline.fleet": "lab"})
    assert filled(config).timeline.speed == "constant(2)"
    with pytest.raises(UserError, match="timeline.fleet=wrong .*flat names"):
        filled(replace(config, {"timeline.fleet": "wrong"}))
    message = "fleet=mobil: unknown name; did you mean 'mobile'"
    with pytest.raises(UserError, match=message):
        configs.validate(replace(config, {"timeline.fleet": "mobil"}))


def test_merged_windows():
    pairs = np.array([[4, 6], [0, 2], [2, 3], [5, 5.5], [8, math.inf]])
    assert measured.merged(pairs).tolist() == [[0, 3], [4, 6], [8, math.inf]]
