"""Writers: what gets the record of each interval while a run goes on.

A record is a line of metrics.jsonl with ``wall_time``, seconds of training so far. A
run's records come after each call of the compiled program. A new writer by name is a
function ``folder → Writer`` in a file of its own, and a line of `WRITERS`.
"""

import csv
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tsfl_jax.report import files, mlflow, runs, tensorboard, wandb
from tsfl_jax.report.writer import Record, Writer
from tsfl_jax.types import UserError, nearest, user_code


def csv_writer(folder: pathlib.Path) -> Writer:
    """Lines of metrics.csv, with the columns of the first record."""
    path = folder / "metrics.csv"

    def start(settings: dict[str, Any], finished: int) -> None:
        del settings
        text = files.read_bytes(path).decode() if finished and path.exists() else ""
        lines = text.splitlines()[: finished + 1]  # with the heading
        files.write_text(path, "".join(f"{line}\n" for line in lines))

    def report(record: Record) -> None:
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if not file.tell():
                writer.writerow(record)
            writer.writerow(record.values())

    return Writer(report, start)


WRITERS: dict[str, Callable[[pathlib.Path], Writer]] = {
    "csv": csv_writer,
    "mlflow": mlflow.writer,
    "tensorboard": tensorboard.writer,
    "wandb": wandb.writer,
}
Given = str | Writer | Callable[[Record], bool | None]


class Open(NamedTuple):
    """The writers of a run."""

    several: tuple[Writer, ...]

    def report(self, records: Iterable[Record]) -> bool:
        """Hand over records in their order; whether a writer ends the run."""
        # All get all of them, also after one said no.
        said = [w.report(record) for record in records for w in self.several]
        return any(answer is False for answer in said)

    def end(self, summary: dict[str, Any], folder: pathlib.Path | None) -> None:
        """Hand over the summary and the figures of a folder."""
        figures = [folder / name for name in runs.FIGURES] if folder else []
        for writer in self.several:
            writer.end(summary, figures)


def opened(
    given: Iterable[Given],
    folder: pathlib.Path | None,
    settings: dict[str, Any],
    finished: int,
) -> Open:
    """Start the writers of a run.

    Args:
      given: names of `WRITERS`, a `Writer`, or a function of a record.
      folder: the run's; None: it has none.
      settings: by flat name.
      finished: intervals that an earlier process has finished.

    Raises:
      UserError: no such writer, its library is not installed, or it needs a folder.
    """
    several = tuple(writer_of(each, folder) for each in given)
    for writer in several:
        writer.start(settings, finished)
    return Open(several)


def check(given: Iterable[Given]) -> None:
    """Refuse what is no writer, before the work."""
    for each in given:
        if isinstance(each, str) and each not in WRITERS:
            raise UserError(
                f"writer {each!r}: unknown{nearest(each, WRITERS)}; known: "
                + ", ".join(WRITERS)
            )
        if not isinstance(each, str | Writer) and not callable(each):
            raise UserError(
                f"writers: {each!r} is no writer; expected a name ("
                f"{', '.join(WRITERS)}), a Writer or a function of a record"
            )


def writer_of(given: Given, folder: pathlib.Path | None) -> Writer:
    """The writer of a run in this folder, before it starts."""
    if isinstance(given, Writer):
        return given
    if not isinstance(given, str):
        return Writer(given)
    if folder is None:
        raise UserError(f"writer {given!r}: it writes beside a run; set workdir")
    way_out = "mend that, or leave the writer out"
    guarded = user_code(f"writer {given!r}: failed in {folder}", way_out)
    report, start, end = guarded(WRITERS[given])(folder)
    return Writer(guarded(report), guarded(start), guarded(end))
