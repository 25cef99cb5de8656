"""Progress and results as text for a terminal or a log file."""

import contextlib
import logging
import math
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

_BAR = 10  # characters
# How clients are mapped to a device, in words.
MAPPED = {"sequential": "one after another", "vmap": "side by side"}
BEAT = 10.0  # seconds of silence before a line says what is being done


def summary_text(
    summary: dict[str, Any], workdir: str | pathlib.Path | None = None
) -> str:
    """Format the results of a run; what `summary` lacks is left out.

    Args:
      summary: the dict of summary.json.
      workdir: folder of the files, None if there are none.
    """
    s = {key: value for key, value in summary.items() if value is not None}
    title = [str(s[key]) for key in ("data", "algorithm") if key in s]
    title += [f"seed {s['seed']}"] if "seed" in s else []
    best, final = s.get("best_test_accuracy"), s.get("final_test_accuracy")
    table = {
        "run": ", ".join(title),
        "test accuracy": f"best {_percent(best)}, final {_percent(final)}",
        "test loss": "",
        "intervals": f"{s['num_intervals']:,}" if "num_intervals" in s else "",
    }
    if _percent(final) == "–" and "final_test_loss" in s:  # of a regression
        table |= {"test accuracy": "", "test loss": f"final {s['final_test_loss']:.4g}"}
    if math.isfinite(s.get("mean_regret", math.nan)):
        gap = s.get("mean_gap", math.nan)
        table["regret"] = f"{s['mean_regret']:.3g} of the validation loss per interval"
        table["regret"] += f", gap {gap:.3g}" if math.isfinite(gap) else ""
    if "train_seconds" in s:
        table["time"] = f"{s['train_seconds']:.1f} s training"
        table["time"] += f", {s.get('compile_seconds', 0):.1f} s compiling"
    if math.isfinite(s.get("samples_per_second", math.nan)):
        table["speed"] = f"{s['samples_per_second']:,.0f} samples/s"
    if s.get("num_dropped"):
        table["dropped"] = f"{s['num_dropped']:,} client models that were not finite"
    if "diverged_at" in s:
        table["stopped"] = f"no model was finite in interval {s['diverged_at']};"
        table["stopped"] += " the model before it is kept; try a smaller lr"
    if workdir is not None:
        table["files"] = str(workdir)
    return "\n".join(f"{name:<15}{text}" for name, text in table.items() if text)


def progress_line(
    done: int,
    total: int,
    accuracy: float | None,
    loss: float | None,
    elapsed_s: float,
    started_at: int = 0,
) -> str:
    """Format how far a run is, in one line.

    Args:
      done: finished intervals.
      total: intervals of the whole run.
      accuracy: in [0, 1]; None or NaN if not evaluated.
      loss: mean over samples; None or NaN if not evaluated.
      elapsed_s: seconds this process has trained.
      started_at: finished intervals when this process began; its speed counts only
        those after them.
    """
    here = done - started_at
    rate, left = "–", "–"
    if here > 0 and elapsed_s > 0:
        speed = here / elapsed_s
        rate = f"{speed:.1f}" if speed >= 1 else f"{speed:.2g}"
        left = clock((total - done) / speed)
    line = f"interval {done}/{total}, accuracy {_percent(accuracy)}, loss "
    if loss is None or math.isnan(loss):
        line += "–"
    else:
        line += f"{loss:{'.3f' if 0.001 <= loss < 1000 else '.3g'}}"
    line += f", {rate} intervals/s"
    if done >= total:
        return f"{line}, done in {clock(elapsed_s)}"
    full = _BAR * done // total
    return f"{line}, {left} left [{'#' * full}{'-' * (_BAR - full)}]"


def update_line(line: str, stream: IO[str] | None, last: bool = False) -> None:
    """Write a line: on a terminal in place of the previous one, elsewhere below it.

    Args:
      line: as from `progress_line`.
      stream: of the output; None: no output.
      last: the line stays; later ones are written below it.
    """
    if stream is None:
        return
    if stream.isatty():
        # A full row would scroll some terminals.
        width = shutil.get_terminal_size().columns - 1
        if len(line) > width and not last:
            line = line.split(" [")[0][:width]  # the bar can be omitted
        line = f"\r{line:<{width}}"
    end = "" if stream.isatty() and not last else "\n"
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(f"{line}{end}".encode(encoding, "replace").decode(encoding))
    stream.flush()


def log(stream: IO[str] | None, text: str) -> None:
    """Write a line that later ones do not replace."""
    update_line(text, stream, last=True)


@contextlib.contextmanager
def heartbeat(
    stream: IO[str] | None, every: float = BEAT
) -> Iterator[Callable[[str], None]]:
    """Write a line whenever the same thing has been done for a while.

    A thread writes them: compiling and a call of a compiled program hold up this one.

    Args:
      stream: of the lines; None: none.
      every: seconds between them.

    Yields:
      A function that takes what is being done from now on.
    """
    now = [("", time.perf_counter())]  # one element, replaced as a whole

    def doing(text: str) -> None:
        now[0] = text, time.perf_counter()

    if stream is None:
        yield doing
        return
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(stream, now, ended, every))
    thread.daemon = True  # it must not keep a process that ends
    thread.start()
    try:
        yield doing
    finally:
        ended.set()
        thread.join()


def watched(
    chunks: Iterable[Any], stream: IO[str] | None, first: int, total: int
) -> Iterator[Any]:
    """Pass on the chunks of a run, with a `heartbeat` while one takes long.

    Args:
      chunks: with the number of finished intervals, ``last``.
      stream: of the lines; None: none.
      first: intervals that have finished before.
      total: intervals of the run.
    """
    with heartbeat(stream) as doing:
        doing(f"training, after interval {first} of {total}")
        for chunk in chunks:
            doing(f"training, after interval {chunk.last} of {total}")
            yield chunk


def _beat(
    stream: IO[str],
    now: list[tuple[str, float]],
    ended: threading.Event,
    every: float,
) -> None:
    """What the thread of `heartbeat` does."""
    wait = every
    while not ended.wait(wait):
        text, since = now[0]
        passed = time.perf_counter() - since
        if text and passed >= every:
            update_line(f"{text}: {clock(passed)} so far", stream)
        wait = every - passed % every


def warn_to(stream: IO[str] | None) -> Callable[[str], None]:
    """A function that writes warnings; without a stream it passes them to `logging`."""
    if stream is None:
        return logging.getLogger("tsfl_jax").warning
    return lambda text: log(stream, text)


def _percent(share: float | None) -> str:
    """ "93.4 %"; "–" if not evaluated."""
    return "–" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any."""
    minutes, s = divmod(round(seconds), 60)
    h, m = divmod(minutes, 60)
    return f"{h}:{m:02d}:{s:02d}" if h else f"{m}:{s:02d}"
