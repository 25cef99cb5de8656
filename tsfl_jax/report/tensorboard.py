"""TensorBoard: event files in a run's folder ``tensorboard/``, live or afterwards.

``tsfl tensorboard runs/a runs/b`` reads metrics.jsonl of each workdir, of a finished or
a running run, and replaces its event files; then ``tensorboard --logdir runs``.
Needs the extra ``[tensorboard]``.
"""

import pathlib
import shutil
import sys
from typing import Any

from tsfl_jax import command
from tsfl_jax.report import files
from tsfl_jax.report.writer import Record, Writer, library, measured
from tsfl_jax.types import UserError


def writer(folder: pathlib.Path) -> Writer:
    """Scalars by interval in the folder ``tensorboard/``, and figures at the end."""
    made = library("tensorboardX", "tensorboard").SummaryWriter
    open_files: list[Any] = []

    def start(settings: dict[str, Any], finished: int) -> None:
        path = str(folder / "tensorboard")
        events = made(path, purge_step=finished + 1 if finished else None)
        open_files.append(events)
        if settings:
            text = "\n".join(f"    {name}={value}" for name, value in settings.items())
            events.add_text("settings", text)

    def report(record: Record) -> None:
        for name, value in measured(record).items():
            open_files[0].add_scalar(name, value, record["interval"])

    def end(summary: dict[str, Any], figures: list[pathlib.Path]) -> None:
        for path in figures:
            from matplotlib.image import imread  # takes as long as JAX to import

            pixels = imread(path)[..., :3]
            step = summary["num_intervals"]
            open_files[0].add_image(path.stem, pixels, step, dataformats="HWC")
        open_files[0].close()

    return Writer(report, start, end)


def write_events(workdir: str | pathlib.Path) -> pathlib.Path:
    """Write the scalars of a run; returns the folder of its event files.

    Args:
      workdir: folder with metrics.jsonl; the interval is the step; values that were not
        measured in it are left out.

    Raises:
      UserError: no tensorboardX, or metrics.jsonl is missing or unreadable.
    """
    folder = files.prepare_workdir(workdir)
    rows = files.read_metrics(folder / "metrics.jsonl")
    unfinished = folder / ".tensorboard"
    shutil.rmtree(unfinished, ignore_errors=True)
    events = writer(unfinished)
    events.start({}, 0)
    for row in rows:
        events.report(row)
    events.end({}, [])
    made = folder / "tensorboard"
    shutil.rmtree(made, ignore_errors=True)
    with files.user_errors(made):
        (unfinished / "tensorboard").rename(made)
        unfinished.rmdir()
    return made


def main(arguments: list[str]) -> None:
    """Write the event files of each run and print their folders."""
    parser = command.make_parser(
        "tensorboard", "Write event files of runs for TensorBoard."
    )
    parser.add_argument("workdirs", nargs="+", help="of finished or running runs")
    workdirs = parser.parse_args(arguments).workdirs
    runs = [w for w in workdirs if (pathlib.Path(w) / "metrics.jsonl").is_file()]
    for workdir in workdirs:
        if workdir not in runs:
            print(f"{workdir}: no metrics.jsonl there, left out", file=sys.stderr)
    if not runs:
        raise UserError("no run among the folders; expected one with metrics.jsonl")
    for workdir in runs:
        print(write_events(workdir))
