"""``tsfl tensorboard runs/a runs/b``: event files in each run's ``tensorboard/``.

Reads metrics.jsonl, of a finished or a running run, and replaces its event files; then
``tensorboard --logdir runs``. Needs the extra ``[tensorboard]``.
"""

import pathlib
import shutil
import sys

from tsfl_jax import command
from tsfl_jax.report import files, writers
from tsfl_jax.types import UserError


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
    events, path = writers.tensorboard_writer(folder), folder / "tensorboard"
    shutil.rmtree(path, ignore_errors=True)
    with files.user_errors(path):
        events.start({}, 0)
        for row in rows:
            events.report(row)
        events.end({}, [])
    return path


def main(arguments: list[str]) -> None:
    """Write the event files of each run and print their folders."""
    text = "Write event files of runs for TensorBoard."
    parser = command.make_parser("tensorboard", text)
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
