"""Progress and results as text for a terminal or a log file."""

import contextlib
import datetime
import logging
import math
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import IO, Any

# How clients are mapped to a device, in words.
MAPPED = {"sequential": "one after another", "vmap": "side by side"}
# Takes what was finished since the last call: intervals, samples, seconds of training;
# and what to say of the results.
Advance = Callable[[int, int, float, str], None]
PERIOD = 10.0  # seconds between the lines of a long task


# The lines of `summary_text`; one whose values are not known is left out.
_LINES = {
    "run": "{data}, {algorithm}, seed {seed}",
    "test accuracy": "best {best_test_accuracy}, final {final_test_accuracy}",
    "test loss": "final {final_test_loss:.4g}",
    "intervals": "{num_intervals:,}",
    "clients": "mean {final_client_accuracy_mean}, worst decile "
    "{final_client_accuracy_worst}",
    "regret": "{mean_regret:.3g} of the validation loss per interval",
    "gap": "{mean_gap:.3g}",
    "time": "{train_seconds:.1f} s training, {compile_seconds:.1f} s compiling",
    "speed": "{samples_per_second:,.0f} samples/s",
    "discarded": "{num_discarded:,} client models that were not finite",
    "stopped": "no model was finite in interval {diverged_at}; the model before it is "
    "kept; try a smaller lr",
    "files": "{workdir}",
}


def summary_text(
    summary: dict[str, Any], workdir: str | pathlib.Path | None = None
) -> str:
    """Format the results of a run; what `summary` lacks is left out.

    Args:
      summary: the dict of summary.json.
      workdir: folder of the files, None if there are none.
    """
    values = {"workdir": workdir, **summary}
    values["num_discarded"] = values.get("num_discarded") or None
    texts = {
        key: f"{100 * value:.1f} %" if "accuracy" in key else value
        for key, value in values.items()
        if value is not None and value == value  # neither missing nor NaN
    }
    if "final_test_accuracy" in texts:  # the loss is for regressions
        texts.pop("final_test_loss", None)
    lines = []
    for name, form in _LINES.items():
        with contextlib.suppress(KeyError):
            lines.append(f"{name:<15}{form.format_map(texts)}")
    return "\n".join(lines)


@contextlib.contextmanager
def ticking(stream: IO[str] | None, task: str, details: str = "") -> Iterator[None]:
    """Say every `PERIOD` seconds how long a task has taken; without a stream, never."""
    ended, begun = threading.Event(), time.monotonic()

    def tick() -> None:
        while stream is not None and not ended.wait(PERIOD):
            _transient(stream, f"{task} … {time.monotonic() - begun:.0f} s{details}")

    with futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(ended.set)
        pool.submit(tick)
        yield


def bar(
    stream: IO[str] | None, total: int, first: int, later: Callable[[], float] = float
) -> Advance:
    """Show how far a run or sweep is: a line for each call, on a terminal the last one.

    Args:
      stream: where it is shown; None: nowhere.
      total: intervals, of all runs of a sweep.
      first: those that finished before.
      later: gives the seconds of compiles to come; by default zero.

    Returns:
      A function to call after each call of the program, see `Advance`.
    """
    spent = (0, 0, 0.0)

    def advance(intervals: int, samples: int, seconds: float, results: str) -> None:
        nonlocal spent
        spent = spent[0] + intervals, spent[1] + samples, spent[2] + seconds
        intervals, samples, seconds = spent
        finished, is_last = first + intervals, first + intervals >= total
        speed = f"{samples / seconds:,.0f}" if seconds else "–"
        remaining = later() + (total - finished) * seconds / intervals
        clock = datetime.timedelta(seconds=round(seconds if is_last else remaining))
        text = f"interval {finished}/{total}, {results}, {speed} samples/s, "
        text += f"done in {clock}" if is_last else f"{clock} left"
        (log if is_last else _transient)(stream, text)

    return advance


def _transient(stream: IO[str] | None, text: str) -> None:
    """Write a line that the next one replaces on a terminal."""
    is_terminal = stream is not None and stream.isatty()
    width = shutil.get_terminal_size().columns - 1 if is_terminal else None
    log(stream, text[:width], end="" if is_terminal else "\n")


def results_text(accuracy: float, loss: float) -> str:
    """Accuracy in [0, 1] and loss as text; "–" for what was not evaluated."""
    form = ".3f" if 0.001 <= loss < 1000 else ".3g"
    percent = "–" if math.isnan(accuracy) else f"{100 * accuracy:.1f} %"
    return f"accuracy {percent}, loss {'–' if math.isnan(loss) else f'{loss:{form}}'}"


def log(stream: IO[str] | None, text: str, end: str = "\n") -> None:
    """Write a line; on a terminal in place of the last one, if that has no end yet."""
    if stream is None:
        return
    erase = "\r\x1b[2K" if stream.isatty() else ""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(f"{erase}{text}{end}".encode(encoding, "replace").decode(encoding))
    stream.flush()


def warn_to(stream: IO[str] | None) -> Callable[[str], None]:
    """A function that writes warnings; without a stream it passes them to `logging`."""
    if stream is None:
        return logging.getLogger("tsfl_jax").warning
    return lambda text: log(stream, text)
