"""Files between chunks: how often they are written, what a kill loses; their length."""

import pytest

from tests.problems import files, same, small
from tsfl_jax.prepare import backend, prepare
from tsfl_jax.report import files as report
from tsfl_jax.run import checkpoint, lanes, program, runner

T = 40


@pytest.fixture(scope="module")
def exp():
    return runner.build(small(algorithm="fedavg", num_intervals=T, report_every=1))


@pytest.fixture(scope="module")
def whole(exp, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    runner.run(exp, folder)
    return folder


@pytest.mark.parametrize("ended", ["finished", "killed", "stopped"])
def test_saves_take_their_share_of_the_time(exp, whole, tmp_path, monkeypatch, ended):
    """Seconds pass only in chunks, 1 each, and in saves, 0.2 each."""
    now, saved, save = [0.0], [], checkpoint.save

    def slow(folder, interval, *rest):
        save(folder, interval, *rest)
        saved.append(interval)
        now[0] += 0.2

    def stop():  # after each chunk, before what it leaves is written
        now[0] += 1
        if now[0] < 16 or ended == "finished":
            return False
        if ended == "killed":
            raise SystemError  # nothing is written after it
        return True

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(checkpoint, "now", lambda: now[0])
    if ended == "finished":
        runner.run(exp, tmp_path, stop=stop)
        # 0.2 s are 2 % of 10 s. The first chunk and the end are saved in any case.
        assert saved == [1, 11, 21, 31, T]
    else:
        with pytest.raises(SystemError if ended == "killed" else KeyboardInterrupt):
            runner.run(exp, tmp_path, stop=stop)
        assert saved == ([1, 11] if ended == "killed" else [1, 11, 16])
        rows = report.read_metrics(whole / "metrics.jsonl")
        written = report.read_metrics(tmp_path / "metrics.jsonl")
        assert written == rows[: saved[-1]]
        runner.run(exp, tmp_path)
    same(files(tmp_path), files(whole))


def chunk(**settings):
    config = small(**{"report_every": 0} | settings)
    return program.chunk_of(prepare.prepare(config))


def test_short_intervals_make_long_chunks():
    few, many = chunk(num_intervals=50), chunk(num_intervals=20_000)
    assert few == 5  # so that there are ten lines of progress
    assert 100 < many <= 2000 and 20_000 % many == 0
    # Four times the work, a quarter of the intervals.
    harder = chunk(num_intervals=20_000, num_clients=16)
    assert many / 6 < harder < many / 2
    images = {"data__name": "synthetic", "data__shape": (28, 28, 1)}
    assert chunk(num_intervals=1000, model__name="mnist_cnn", **images) == 5
    # Without divisors the last call is filled up, but as asked for.
    assert chunk(num_intervals=1009) > 50 and chunk(num_intervals=7) == 4
    assert chunk(num_intervals=7, report_every=5) == 1


def test_lanes_of_different_work_share_a_chunk():
    shape = {"num_intervals": 1009, "report_every": 0, "schedule__kind": "explicit"}
    configs = [small(schedule__tau=(tau,), **shape) for tau in (1, 40)]
    prepared = [prepare.prepare(config) for config in configs]
    first, second = map(program.chunk_of, prepared)
    assert first > second
    group = lanes.make_group(prepared, backend.start_jax(configs[0]))
    inputs = lanes.make_arrays(group, prepared).inputs
    filled = 1009 + second - 1
    assert inputs.tau.shape == (2, filled, 4) and inputs.interval.shape == (filled,)
    assert (inputs.assigned[:, 1009:] == 4).all()
