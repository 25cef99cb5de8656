"""Files between chunks: how often they are written, and what a kill can lose."""

import jax
import numpy as np
import pytest

import tsfl_jax
from tests.experiment.test_runner import files, same, small
from tsfl_jax.engine import scan, structures
from tsfl_jax.experiment import (
    backend,
    call_length,
    checkpoint,
    lanes,
    prepare,
    runner,
    summary,
)
from tsfl_jax.report import files as report

T = 40


def plain(**changes):
    """By a rule that compiles quickly: what is written is the same for all."""
    return small(algorithm="fedavg", **changes)


@pytest.fixture(scope="module")
def exp():
    return runner.build(plain(num_intervals=T, report_every=1))


@pytest.fixture(scope="module")
def whole(exp, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    runner.run(exp, folder)
    return folder


class Clock:
    """Seconds that pass only in chunks and saves."""

    def __init__(self, monkeypatch, chunk, save):
        self.now, self.chunk, self.saved = 0.0, chunk, []
        real = checkpoint.save

        def slow(folder, interval, *rest):
            real(folder, interval, *rest)
            self.saved.append(interval)
            self.now += save

        monkeypatch.setattr(checkpoint, "save", slow)
        monkeypatch.setattr(checkpoint, "now", self)

    def __call__(self):
        return self.now

    def stop(self):
        """After each chunk, before what it leaves is written."""
        self.now += self.chunk
        return False


def test_saving_takes_its_share_of_the_time(exp, whole, tmp_path, monkeypatch):
    clock = Clock(monkeypatch, chunk=1.0, save=0.2)
    runner.run(exp, tmp_path, stop=clock.stop)
    # 0.2 s are 2 % of 10 s. The first chunk and the end are saved in any case.
    assert clock.saved == [1, 11, 21, 31, T]
    same(files(tmp_path), files(whole))


def test_rows_are_plain_numbers(exp, whole):
    """So that each one is encoded at once: for short intervals that takes a while."""
    always = [n for n in scan.History._fields if n not in structures.OPTIONAL]
    history = scan.History(**{n: np.full((T, 4), np.nan, np.float32) for n in always})
    history = jax.tree.map(lambda a: a[:, 0], history)
    found = summary.rows_of(exp.prepared, history)
    read = report.read_metrics(whole / "metrics.jsonl")
    assert [row.keys() for row in found] == [row.keys() for row in read]
    assert found == [report.plain(row) for row in found]
    assert found[3]["test_loss"] is None and type(found[3]["interval"]) is int


@pytest.mark.parametrize("killed", [True, False])
def test_an_end_between_two_saves(exp, whole, tmp_path, monkeypatch, killed):
    """Killed: from the last save; stopped: from there. Both to the same bits."""
    clock = Clock(monkeypatch, chunk=1.0, save=0.2)

    def stop():
        clock.stop()
        if clock.now < 16:
            return False
        if killed:
            raise SystemError  # nothing is written after it
        return True

    with pytest.raises(SystemError if killed else KeyboardInterrupt):
        runner.run(exp, tmp_path, stop=stop)
    written = report.read_metrics(tmp_path / "metrics.jsonl")
    assert clock.saved == ([1, 11] if killed else [1, 11, 16])
    rows = report.read_metrics(whole / "metrics.jsonl")
    assert written == rows[: clock.saved[-1]]
    runner.run(exp, tmp_path)
    same(files(tmp_path), files(whole))


# The length of a chunk


def chunk(**settings):
    chosen = small(**{"report_every": 0, **settings})
    return call_length.chunk_of(prepare.prepare(chosen))


def test_short_intervals_make_long_chunks():
    few, many = chunk(num_intervals=50), chunk(num_intervals=20_000)
    assert few == 5  # so that there are ten lines of progress
    assert 100 < many <= 2000 and 20_000 % many == 0
    # Four times the work, a quarter of the intervals.
    harder = chunk(num_intervals=20_000, num_clients=16)
    assert many / 6 < harder < many / 2


def test_long_intervals_make_short_chunks():
    settings = small(num_intervals=1000, report_every=0)
    settings.data.name, settings.data.shape = "synthetic", (28, 28, 1)
    settings.model.name = "mnist_cnn"
    assert call_length.chunk_of(prepare.prepare(settings)) == 5


def test_a_number_of_intervals_without_divisors():
    assert chunk(num_intervals=1009) > 50
    assert chunk(num_intervals=7) == 4
    assert chunk(num_intervals=7, report_every=5) == 1  # as asked for: no padding


def test_padding_does_not_change_a_bit():
    settings = small(num_intervals=7, report_every=0, algorithm="scaffold")
    settings.schedule.kind, settings.schedule.tau = "explicit", (0, 1, 2, 3)
    padded = tsfl_jax.simulate(settings)
    settings.report_every = 7
    whole = tsfl_jax.simulate(settings)
    jax.tree.map(np.testing.assert_array_equal, padded.params, whole.params)
    for name, values in whole.history.items():
        np.testing.assert_array_equal(values, padded.history[name], err_msg=name)


def test_lanes_of_different_work_share_a_chunk():
    several = []
    for tau in (1, 40):
        settings = small(num_intervals=1009, report_every=0)
        settings.schedule.kind, settings.schedule.tau = "explicit", (tau,)
        several.append(prepare.prepare(settings))
    first, second = map(call_length.chunk_of, several)
    assert first > second
    group = lanes.make_group(several, backend.start_jax(settings))
    inputs = lanes.make_arrays(group, several).inputs
    filled = 1009 + second - 1
    assert inputs.tau.shape == (2, filled, 4) and inputs.interval.shape == (filled,)
    assert (inputs.assigned[:, 1009:] == 4).all()
