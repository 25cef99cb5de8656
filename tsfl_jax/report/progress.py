"""Progress and results as text for a terminal or a log file."""

import contextlib
import logging
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import IO, Any

# How clients are mapped to a device, in words.
MAPPED = {"sequential": "one after another", "vmap": "side by side"}
# Takes what was finished since the last call: intervals, samples, seconds of training;
# and what to say of the results.
Advance = Callable[[int, int, float, str], None]


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
    if math.isfinite(s.get("final_client_accuracy_mean", math.nan)):
        mean, worst = (s[f"final_client_accuracy_{n}"] for n in ("mean", "worst"))
        table["clients"] = f"mean {_percent(mean)}, worst decile {_percent(worst)}"
    if math.isfinite(s.get("mean_regret", math.nan)):
        gap = s.get("mean_gap", math.nan)
        table["regret"] = f"{s['mean_regret']:.3g} of the validation loss per interval"
        table["regret"] += f", gap {gap:.3g}" if math.isfinite(gap) else ""
    if "train_seconds" in s:
        table["time"] = f"{s['train_seconds']:.1f} s training"
        table["time"] += f", {s.get('compile_seconds', 0):.1f} s compiling"
    if math.isfinite(s.get("samples_per_second", math.nan)):
        table["speed"] = f"{s['samples_per_second']:,.0f} samples/s"
    if s.get("num_discarded"):
        table["discarded"] = (
            f"{s['num_discarded']:,} client models that were not finite"
        )
    if "diverged_at" in s:
        table["stopped"] = f"no model was finite in interval {s['diverged_at']};"
        table["stopped"] += " the model before it is kept; try a smaller lr"
    if workdir is not None:
        table["files"] = str(workdir)
    return "\n".join(f"{name:<15}{text}" for name, text in table.items() if text)


def progress_line(
    done: int, total: int, spent: tuple[int, int, float], results: str
) -> str:
    """Format how far a run or sweep is, in one line.

    Args:
      done: finished intervals, of all runs of a sweep.
      total: intervals of the whole.
      spent: intervals, samples and seconds that speed and time left are taken from.
      results: text on the results so far.
    """
    intervals, samples, seconds = spent
    speed = f"{samples / seconds:,.0f}" if seconds else "–"
    left = f"{clock((total - done) * seconds / intervals)} left" if intervals else "–"
    left = left if done < total else f"done in {clock(seconds)}"
    return f"interval {done}/{total}, {results}, {speed} samples/s, {left}"


@contextlib.contextmanager
def bar(stream: IO[str] | None, total: int, first: int = 0) -> Iterator[Advance]:
    """Show how far a run or sweep is: a bar on a terminal, elsewhere lines.

    Args:
      stream: where it is shown; None: nowhere.
      total: intervals, of all runs of a sweep.
      first: those that finished before.

    Yields:
      A function to call after each call of the program, see `Advance`.
    """
    spent = (0, 0, 0.0)

    def line(intervals: int, samples: int, seconds: float, results: str) -> str:
        nonlocal spent
        spent = spent[0] + intervals, spent[1] + samples, spent[2] + seconds
        return progress_line(first + spent[0], total, spent, results)

    if stream is None or not stream.isatty():
        yield lambda *more: log(stream, line(*more))
        return
    from rich import console, progress, table

    one_row = table.Column(no_wrap=True, overflow="ellipsis")
    columns = (
        progress.BarColumn(10),
        progress.TextColumn("{task.description}", markup=False, table_column=one_row),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console.Console(file=stream)) as shown:
        task = shown.add_task(
            "waiting for the first intervals", total=total, completed=first
        )
        yield lambda *more: shown.update(
            task, description=line(*more), completed=first + spent[0]
        )


def results_text(accuracy: float, loss: float) -> str:
    """Accuracy in [0, 1] and loss as text; "–" for what was not evaluated."""
    form = ".3f" if 0.001 <= loss < 1000 else ".3g"
    shown = "–" if math.isnan(loss) else f"{loss:{form}}"
    return f"accuracy {_percent(accuracy)}, loss {shown}"


def log(stream: IO[str] | None, text: str) -> None:
    """Write a line; on a terminal above the bar, which is in the last row."""
    if stream is None:
        return
    erase = "\r\x1b[2K" if stream.isatty() else ""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(f"{erase}{text}\n".encode(encoding, "replace").decode(encoding))
    stream.flush()


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
