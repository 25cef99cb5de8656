"""Weights & Biases: a run of the project ``tsfl_jax``, or of WANDB_PROJECT.

WANDB_MODE=offline writes to the run's folder. Needs the extra ``[wandb]``.
"""

import os
import pathlib
import uuid
from typing import Any

from tsfl_jax.report.writer import Record, Writer, library, measured, remembered


def writer(folder: pathlib.Path) -> Writer:
    """The settings as its config, metrics by interval, figures and summary."""
    wandb = library("wandb", "wandb")
    runs: list[Any] = []

    def start(settings: dict[str, Any], finished: int) -> None:
        del finished  # the service leaves out steps that it has
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tsfl_jax"),
            name=folder.name,
            id=remembered(folder / "wandb.id", lambda: uuid.uuid4().hex[:8]),
            dir=str(folder),
            config=settings,
            resume="allow",
        )
        runs.append(run)

    def report(record: Record) -> None:
        runs[0].log(measured(record), step=record["interval"])

    def end(summary: dict[str, Any], figures: list[pathlib.Path]) -> None:
        runs[0].summary.update(summary)
        runs[0].log({path.stem: wandb.Image(str(path)) for path in figures})
        runs[0].finish()

    return Writer(report, start, end)
