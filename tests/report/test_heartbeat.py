"""No long silence: lines while compiling or a long call, and what they announce."""

import io
import time

from tsfl_jax.config import Config
from tsfl_jax.experiment import backend, prepare, program
from tsfl_jax.report import progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


class Clock:
    """Seconds that pass in waiting only, and what happens at a time; ends at `end`."""

    def __init__(self, happens, end):
        self.now, self.happens, self.end = 0.0, happens, end

    def perf_counter(self):
        return self.now

    def wait(self, seconds):
        self.now = round(self.now + seconds, 6)
        for at, happening in self.happens:
            if self.now - seconds < at <= self.now:
                happening()
        return self.now >= self.end


def test_the_lines_of_a_clock(monkeypatch):
    """Every 10 s from the beginning of what is done; none before it has a name."""
    stream, now = io.StringIO(), [("", 0.0)]
    clock = Clock(
        [
            (12.0, lambda: now.__setitem__(0, ("compiling", 12.0))),
            (45.0, lambda: now.__setitem__(0, ("training", 45.0))),
        ],
        end=54.0,
    )
    monkeypatch.setattr(progress.time, "perf_counter", clock.perf_counter)
    progress._beat(stream, now, clock, 10.0)
    assert stream.getvalue().splitlines() == [
        "compiling: 0:10 so far",
        "compiling: 0:20 so far",
        "compiling: 0:30 so far",
    ]


def test_a_line_while_something_takes_long():
    stream = io.StringIO()
    with progress.heartbeat(stream, every=0.05) as doing:
        time.sleep(0.12)
        assert stream.getvalue() == ""  # nothing has been named yet
        doing("compiling")
        time.sleep(0.18)
    lines = stream.getvalue().splitlines()
    assert lines and set(lines) == {"compiling: 0:00 so far"}
    time.sleep(0.1)
    assert len(stream.getvalue().splitlines()) == len(lines), "it must end"


def test_on_a_terminal_one_line_in_place():
    stream = Terminal()
    with progress.heartbeat(stream, every=0.03) as doing:
        doing("compiling")
        time.sleep(0.1)
    assert "\r" in stream.getvalue() and "\n" not in stream.getvalue()


def test_without_a_stream_there_is_no_thread():
    import threading

    count = threading.active_count()
    with progress.heartbeat(None) as doing:
        doing("compiling")
        assert threading.active_count() == count


def test_a_chunk_that_takes_long_is_named(monkeypatch):
    def chunks():
        yield program.Chunk(0, 5, None, None, 0.0)
        time.sleep(0.1)
        yield program.Chunk(5, 10, None, None, 0.0)

    stream, beat = io.StringIO(), progress.heartbeat
    monkeypatch.setattr(progress, "heartbeat", lambda s: beat(s, every=0.03))
    assert [c.last for c in progress.watched(chunks(), stream, 0, 10)] == [5, 10]
    assert "training, after interval 5 of 10: 0:00 so far" in stream.getvalue()


def test_compiling_is_announced_without_a_guess_of_how_long_it_takes():
    config = Config(num_intervals=1, num_clients=2, batch_size=4, devices=1)
    config.schedule.data_size = 16
    mesh, prepared = backend.start_jax(config), prepare.prepare(config)
    stream, made = io.StringIO(), program.make_program([prepared], mesh)
    compiled = made.compile(program.make_arrays(prepared, mesh), stream=stream)
    after = f"compiled in {compiled.seconds:.1f} s"
    assert stream.getvalue().splitlines() == ["compiling …", after]
