"""Writers: what gets the record of each interval while a run goes on.

A record is a line of metrics.jsonl with ``wall_time``, seconds of training so far. A
run's records come after each call of the compiled program. A new writer by name is a
function ``folder → Writer`` and a line of `WRITERS`.
"""

import csv
import functools
import os
import pathlib
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tsfl_jax.data.inputs import package
from tsfl_jax.report import files, runs
from tsfl_jax.types import UserError, nearest, user_code

Record = dict[str, Any]  # of an interval: numbers by name, None where not measured


class Writer(NamedTuple):
    """Three functions that follow a run."""

    # An interval's record; False ends the run after the intervals of this call.
    report: Callable[[Record], bool | None]
    # Settings by flat name; intervals that an earlier process has reported.
    start: Callable[[dict[str, Any], int], None] = lambda settings, finished: None
    # summary.json and the run's figures, paths of .png files.
    end: Callable[[dict[str, Any], list[pathlib.Path]], None] = lambda *results: None


def _measured(record: Record) -> dict[str, float]:
    """The numbers of a record but the interval, which is the step."""
    return {n: v for n, v in record.items() if v is not None and n != "interval"}


def _remembered(path: pathlib.Path, make_name: Callable[[], str]) -> str:
    """A name that a run keeps in a file, so that a resumed one goes on under it."""
    if not path.exists():
        files.write_text(path, make_name())
    return files.read_bytes(path).decode()


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


def tensorboard_writer(folder: pathlib.Path) -> Writer:
    """TensorBoard: scalars by interval in ``tensorboard/``, and figures at the end."""
    event_writer = package("tensorboardX", "tensorboard").SummaryWriter
    open_files: list[Any] = []

    def start(settings: dict[str, Any], finished: int) -> None:
        first = finished + 1 if finished else None
        open_files.append(event_writer(str(folder / "tensorboard"), purge_step=first))
        if settings:
            text = "\n".join(f"    {name}={value}" for name, value in settings.items())
            open_files[0].add_text("settings", text)

    def report(record: Record) -> None:
        for name, value in _measured(record).items():
            open_files[0].add_scalar(name, value, record["interval"])

    def end(summary: dict[str, Any], figures: list[pathlib.Path]) -> None:
        for path in figures:
            from matplotlib.image import imread  # takes as long as JAX to import

            pixels, step = imread(path)[..., :3], summary["num_intervals"]
            open_files[0].add_image(path.stem, pixels, step, dataformats="HWC")
        open_files[0].close()

    return Writer(report, start, end)


def wandb_writer(folder: pathlib.Path) -> Writer:
    """Weights & Biases: a run of the project ``tsfl_jax``, or of WANDB_PROJECT.

    WANDB_MODE=offline writes to the run's folder.
    """
    wandb = package("wandb", "wandb")
    opened: list[Any] = []

    def start(settings: dict[str, Any], finished: int) -> None:
        del finished  # the service leaves out steps that it has
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tsfl_jax"),
            name=folder.name,
            id=_remembered(folder / "wandb.id", lambda: uuid.uuid4().hex[:8]),
            dir=str(folder),
            config=settings,
            resume="allow",
        )
        opened.append(run)

    def report(record: Record) -> None:
        opened[0].log(_measured(record), step=record["interval"])

    def end(summary: dict[str, Any], figures: list[pathlib.Path]) -> None:
        opened[0].summary.update(summary)
        opened[0].log({path.stem: wandb.Image(str(path)) for path in figures})
        opened[0].finish()

    return Writer(report, start, end)


def mlflow_writer(folder: pathlib.Path) -> Writer:
    """MLflow: a run of the experiment ``tsfl_jax``, or of MLFLOW_EXPERIMENT_NAME.

    Where the tracking URI says, or in mlflow.db and mlruns/ of the run's folder.
    """
    mlflow, place = package("mlflow", "mlflow"), folder.absolute()
    is_set = mlflow.is_tracking_uri_set()
    client = mlflow.MlflowClient(None if is_set else f"sqlite:///{place / 'mlflow.db'}")

    def make_run() -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tsfl_jax")
        experiment = client.get_experiment_by_name(name)
        number = experiment and experiment.experiment_id
        artifacts = None if is_set else (place / "mlruns").as_uri()
        number = number or client.create_experiment(name, artifacts)
        return client.create_run(number, run_name=folder.name).info.run_id

    @functools.cache
    def run() -> str:
        return _remembered(folder / "mlflow.id", make_run)

    def start(settings: dict[str, Any], finished: int) -> None:
        for name, value in settings.items() if not finished else ():
            client.log_param(run(), name, value)

    def report(record: Record) -> None:
        for name, value in _measured(record).items():
            client.log_metric(run(), name, value, step=record["interval"])

    def end(summary: dict[str, Any], figures: list[pathlib.Path]) -> None:
        client.log_dict(run(), summary, "summary.json")
        for figure in figures:
            client.log_artifact(run(), str(figure))
        client.set_terminated(run())

    return Writer(report, start, end)


WRITERS: dict[str, Callable[[pathlib.Path], Writer]] = {
    "csv": csv_writer,
    "mlflow": mlflow_writer,
    "tensorboard": tensorboard_writer,
    "wandb": wandb_writer,
}
Choice = str | Writer | Callable[[Record], bool | None]  # what `simulate` takes


class Open(NamedTuple):
    """The writers of a run."""

    writers: Sequence[Writer]

    def start(self, settings: dict[str, Any], finished: int) -> None:
        """Hand over settings by flat name, and how many intervals have finished."""
        for writer in self.writers:
            writer.start(settings, finished)

    def report(self, records: Iterable[Record]) -> bool:
        """Hand over records in their order; whether a writer ends the run."""
        # All get all of them, also after one said no.
        answers = [w.report(record) for record in records for w in self.writers]
        return any(answer is False for answer in answers)

    def end(self, summary: dict[str, Any], folder: pathlib.Path | None) -> None:
        """Hand over the summary and the figures of a folder."""
        figures = [folder / name for name in runs.FIGURES] if folder else []
        for writer in self.writers:
            writer.end(summary, figures)


def check(choices: Iterable[Choice]) -> None:
    """Refuse what is no writer, before the work."""
    for choice in choices:
        is_writer = isinstance(choice, Writer) or callable(choice)
        if not (choice in WRITERS if isinstance(choice, str) else is_writer):
            raise UserError(
                f"writer {choice!r}: unknown{nearest(str(choice), WRITERS)}; expected "
                f"{', '.join(WRITERS)}, a Writer or a function of a record"
            )


def writer_of(choice: Choice, folder: pathlib.Path | None) -> Writer:
    """The writer of a run in this folder, before it starts.

    Raises:
      UserError: its library is not installed, or it needs a folder.
    """
    if not isinstance(choice, str):
        return choice if isinstance(choice, Writer) else Writer(choice)
    if folder is None:
        raise UserError(f"writer {choice!r}: it writes beside a run; set workdir")
    way_out = "mend that, or leave the writer out"
    guarded = user_code(f"writer {choice!r}: failed in {folder}", way_out)
    report, start, end = guarded(WRITERS[choice])(folder)
    return Writer(guarded(report), guarded(start), guarded(end))
