"""``tsfl tensorboard runs/a runs/b``: event files for TensorBoard.

Reads metrics.jsonl of each workdir, of a finished or a running run, and replaces the
event files in its folder ``tensorboard/``; then ``tensorboard --logdir runs``.
Needs the extra ``[tensorboard]``.
"""

import pathlib
import shutil
import sys

from tsfl_jax import command
from tsfl_jax.report import files
from tsfl_jax.types import UserError


def write_events(workdir: str | pathlib.Path) -> pathlib.Path:
    """Write the scalars of a run; returns the folder of its event files.

    Args:
      workdir: folder with metrics.jsonl; the interval is the step; values that were not
        measured in it are left out.

    Raises:
      UserError: no tensorboardX, or metrics.jsonl is missing or unreadable.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise UserError(
            "tensorboardX is not installed; pip install 'tsfl_jax[tensorboard]'"
        ) from error
    folder = files.prepare_workdir(workdir)
    rows = files.read_metrics(folder / "metrics.jsonl")
    unfinished = folder / ".tensorboard"
    shutil.rmtree(unfinished, ignore_errors=True)
    with SummaryWriter(str(unfinished)) as writer:
        for row in rows:
            for name, value in row.items():
                if value is not None and name != "interval":
                    writer.add_scalar(name, value, row["interval"])
    events = folder / "tensorboard"
    shutil.rmtree(events, ignore_errors=True)
    unfinished.rename(events)
    return events


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
