"""--explain: bars and steps worked by hand, and a command line that trains nothing."""

import types

import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.test_launch import SMALL
from tests.timeline.test_timeline import ALL, fleet_of, random_fleet, simulate
from tsfl_jax import cli
from tsfl_jax.prepare import backend
from tsfl_jax.prepare.prepare import prepare
from tsfl_jax.run import explain, program
from tsfl_jax.timeline import FRAMEWORKS, segments, ticks
from tsfl_jax.timeline.fleet import exact, online_in
from tsfl_jax.timeline.trace import COUNTED, LOST, OPEN


def bars(name, fleet, end=None, **kwargs):
    """{client: [(kind, start, end), …]}, the kinds by their first letters."""
    trace, tasks = simulate(name, fleet, **kwargs)
    seen = {}
    for s in segments.segments(tasks, fleet, float(end or trace.time[-1])):
        cell = (s.kind[:2], round(float(s.start), 9), round(float(s.end), 9))
        seen.setdefault(s.client, []).append(cell)
    return seen


# As in test_timeline: 0.5 + 2·1 + 0.5 = 3 s for a task of two, and 0.25 + 6 + 0.75 = 7.
TWO = fleet_of([1.0, 3.0], [0.5, 0.25], [0.5, 0.75])


def test_a_synchronous_round():
    seen = bars("sfl", TWO, end=7.25, horizon=20, iterations=2)
    assert seen == {
        0: [
            *[("do", 0, 0.5), ("it", 0.5, 1.5), ("it", 1.5, 2.5), ("up", 2.5, 3)],
            *[("wa", 3, 7), ("do", 7, 7.25)],
        ],
        1: [
            *[("do", 0, 0.25), ("it", 0.25, 3.25), ("it", 3.25, 6.25)],
            *[("up", 6.25, 7), ("do", 7, 7.25)],
        ],
    }


def test_an_asynchronous_client_that_goes_offline_and_one_whose_delivery_is_lost():
    fleet = fleet_of(
        [1.0, 2.0], lost=[[False], [True]], online=[[(0, 1.5), (2, 9)], []]
    )
    trace, tasks = FRAMEWORKS["afl"].simulate(fleet, horizon=7, iterations=2)
    assert trace.time.tolist() == [2.5, 4.5, 6.5]
    assert [(t.client, t.start, t.arrival, t.fate) for t in tasks] == [
        (0, 0, 2.5, COUNTED),
        (0, 2.5, 4.5, COUNTED),
        (0, 4.5, 6.5, COUNTED),
        (1, 0, 4, LOST),
        (1, 4, 8, OPEN),
    ]
    seen = bars("afl", fleet, end=5, horizon=7, iterations=2)
    assert seen[0] == [
        *[("it", 0, 1), ("it", 1, 1.5), ("of", 1.5, 2), ("it", 2, 2.5)],
        *[("it", 2.5, 3.5), ("it", 3.5, 4.5), ("it", 4.5, 5)],
    ]
    assert seen[1] == [("it", 0, 2), ("it", 2, 4), ("it", 4, 5)]


def test_an_interval_ends_with_what_was_not_finished():
    # 4 − 0.5 − 0.5 = 3 s: two iterations of 1.25 s, and 0.5 s of a third.
    fleet = fleet_of([1.25], 0.5, 0.5)
    first = [("do", 0, 0.5), ("it", 0.5, 1.75), ("it", 1.75, 3), ("un", 3, 3.5)]
    first += [("up", 3.5, 4), ("do", 4, 4.5)]
    seen = bars("tsfl", fleet, num_intervals=2, interval=4.0, carry=False)
    assert seen[0] == [
        *first,
        *[("it", 4.5, 5.75), ("it", 5.75, 7), ("un", 7, 7.5), ("up", 7.5, 8)],
    ]
    # Carried over: 0.75 s are left of the third, then 1.25; 3 − 2 = 1 s of a fifth.
    seen = bars("tsfl", fleet, carry=True, num_intervals=2, interval=4.0)
    assert seen[0] == [
        *first,
        *[("it", 4.5, 5.25), ("it", 5.25, 6.5), ("un", 6.5, 7.5), ("up", 7.5, 8)],
    ]
    # Nothing fits: no upload; and the second interval is spent offline.
    fleet = fleet_of([1.0, 9.0], 0.5, 0.5, online=[[], [(0, 4), (8, 99)]])
    seen = bars("tsfl", fleet, num_intervals=2, interval=4.0, carry=False)
    assert seen[1] == [("do", 0, 0.5), ("un", 0.5, 3.5), ("wa", 3.5, 4), ("of", 4, 8)]


def test_uploads_one_after_another_wait_for_the_channel():
    seen = bars(
        "fedcs",
        fleet_of([1.0, 1.0], 0, [2.0, 2.0]),
        horizon=6,
        iterations=1,
        deadline=5.0,
    )
    assert seen[0] == [("it", 0, 1), ("up", 1, 3), ("wa", 3, 5)]
    assert seen[1] == [("it", 0, 1), ("wa", 1, 3), ("up", 3, 5)]


@pytest.mark.parametrize("name", ALL)
def test_bars_fill_the_time_of_every_client(name):
    for seed in range(4):
        fleet, options = random_fleet(seed), ALL[name]
        trace, tasks = simulate(name, fleet, **options)
        end = float(trace.time[-1])
        # The tasks that count are those of the trace.
        row, column = np.nonzero((trace.client >= 0) & (trace.iterations > 0))
        fields = ("client", "task", "version", "iterations", "start", "arrival")
        counted = zip(*(getattr(trace, f)[row, column] for f in fields), strict=True)
        assert sorted(counted) == sorted(
            (t.client, t.number, t.version, t.iterations, t.start, t.arrival)
            for t in tasks
            if t.fate == COUNTED
        )
        found = list(segments.segments(tasks, fleet, end))
        for i in range(5):
            mine = [s for s in found if s.client == i]
            np.testing.assert_allclose(mine[0].start, 0, atol=1e-6)
            np.testing.assert_allclose(mine[-1].end, end, rtol=1e-6)
            for a, b in zip(mine[:-1], mine[1:], strict=True):
                assert a.start < a.end and a.end == pytest.approx(b.start, abs=1e-6)
        total = segments.shares(found)
        assert sum(total.values()) == pytest.approx(1)
        until = ticks.of(end)
        windows = [online_in(exact(fleet), i, 0, until) for i in range(5)]
        offline = 5 * end - sum(b - a for w in windows for a, b in w) / ticks.SECOND
        idle = sum(s.end - s.start for s in found if s.kind == segments.IDLE)
        assert idle == 0 or name in ("tsfl", "fedcs")  # no time to upload, not chosen
        part = offline / (5 * end - idle)
        assert total[segments.OFFLINE] == pytest.approx(part, abs=1e-6)


def test_a_schedule_has_bars_of_tau():
    found = segments.of_schedule(np.array([[2, 0], [1, 4]]))
    kinds = [(s.client, s.kind[:2], s.start, s.end) for s in found]
    assert kinds == [
        *[(0, "it", 0, 0.25), (0, "it", 0.25, 0.5), (0, "wa", 0.5, 1)],
        *[(0, "it", 1, 1.25), (0, "wa", 1.25, 2), (1, "wa", 0, 1)],
        *[(1, "it", 1 + h / 4, 1.25 + h / 4) for h in range(4)],
    ]


def small(**changes):
    schedule = {"schedule__data_size": 20, "schedule__interval_seconds": 1.0}
    machine = {"compile_cache": "off", "devices": None}
    return problems.small(50, **schedule | machine | changes)


def test_numbers_of_an_asynchronous_run():
    known = tsfl_jax.explain(
        small(timeline__framework="afl", timeline__local_iterations=3, devices=1)
    )
    times, work = known.schedule, known.work
    updates = len(times.tau)
    assert updates == work.deliveries.sum()
    assert program._title_of(known.prepared) == "AFL update of 1 client"
    assert (work.iterations == 3 * work.deliveries).all()
    # 20 samples in 3 batches of 8, three passes each.
    assert work.samples == updates * 60 and work.steps == updates * 9
    model = 4 * (64 * 50 + 50 + 50 * 10 + 10)
    assert known.memory["global model"] == model
    assert known.memory["earlier models"] == times.snapshots * model


def test_samples_of_single_steps():
    schedule = {"kind": "explicit", "tau": (2, 3, 4, 0), "iteration": "step"}
    schedule = {f"schedule__{name}": value for name, value in schedule.items()}
    known = tsfl_jax.explain(small(**schedule))
    # Batches of 8, 8 and 4; the fourth step begins anew.
    assert known.work.samples == 6 * (16 + 20 + 28)
    assert known.work.deliveries.tolist() == [6, 6, 6, 0]


def test_an_experiment_is_explained_from_python():
    """What ``tsfl explain`` prints, the numbers behind it, and the figure."""
    timed = {"timeline__framework": "sfl", "timeline__speed": "constant(1)"}
    known = tsfl_jax.explain(small(**timed, timeline__local_iterations=2))
    assert known.schedule.tau.shape == (3, 4)
    assert (known.schedule.tau[known.schedule.tau > 0] == 2).all()
    np.testing.assert_array_equal(known.trace.time, 2.0 * np.arange(1, 4))
    words = repr(known)
    assert words == f"{explain.text(known)}\n\n{known.chart()}"
    assert known.timing is None and "\ntime " not in words
    for line in ("run            framework sfl", "memory         ≥ "):
        assert f"\n{line}" in f"\n{words}"
    assert "client 3 █" in words and "client 3 █" in known.chart(end=2, width=60)
    assert max(map(len, known.chart(end=2, width=60).splitlines())) <= 60
    assert max(map(len, words.splitlines())) <= 99
    axes = known.plot().axes[0]
    assert axes.get_xlabel() == "virtual time in seconds"


def test_the_time_of_a_run_is_extrapolated(monkeypatch):
    """By updates and by steps, without the first call; half of them are timed."""
    config = small(schedule__kind="explicit", schedule__tau=(2, 2, 2, 2))
    prepared = prepare(config)  # 6 updates of 4 clients, 2 passes of 3 steps
    steps = np.repeat([[8], [8], [2], [2], [4], [4]], 4, axis=1)
    first = [program.Chunk(i, i + 2, None, None, 6.0) for i in (0, 2, 4)]
    compiled = types.SimpleNamespace(chunks=lambda arrays: iter(first))
    compiles = types.SimpleNamespace(compile=lambda arrays, stream: compiled)
    monkeypatch.setattr(explain.lanes, "single", lambda *_: (compiles, None))
    mesh = backend.start_jax(config)
    timing = explain._timing_of(prepared._replace(steps=steps), mesh, None)
    # 12 s, and 2 updates more as 2 in 6 s, or 34 steps as 18 in 6 s.
    steps_left, steps_timed = (16 + 1) * 2, (8 + 1) * 2
    assert prepared.mapping == "sequential" and timing.updates == 4
    most = 12 + 6 * steps_left / steps_timed
    assert timing[1:3] == pytest.approx((18, most))


def test_the_command_line_says_times_and_notes_once(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    timing = explain.Timing(compiling=10.0, least=80.0, most=120.0, updates=1)
    monkeypatch.setattr(explain, "_timing_of", lambda *_: timing)
    settings = ["--config.batch_size=600", "--config.precision=bfloat16"]
    cli.main("tsfl run", [*SMALL, "--time", *settings])
    printed = capsys.readouterr()
    words = " ".join(printed.out.split())
    time = "time about 1.8 min: 10.0 s to compile, 80.0 s to 2.0 min to train; 1 of 2 "
    assert time in words and words.count(" note ") == 2 and "note" not in printed.err
    assert words.index("time about") < words.index("note 2 of 2 clients never hold")
    assert "note bfloat16 takes 2 to 3 times as long as float32 on a CPU" in words


def test_the_command_line_trains_nothing(tmp_path, launch):
    code, out, err = launch(
        *SMALL,
        "--explain",
        "--config.timeline.framework=tsfl",
        "--config.schedule.interval_seconds=3",
        cwd=tmp_path,
    )
    assert code == 0, err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("digits_case3-dms-seed0-explain-")
    assert {p.name for p in folder.iterdir()} == {"timeline.png", "timeline.pdf"}
    assert "client 1 " in out and "one after another" in out
    assert "digits" in out and str(folder.relative_to(tmp_path)) in out
    assert "interval 1" not in err and "accuracy" not in out
