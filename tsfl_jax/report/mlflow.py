"""MLflow: a run of the experiment ``tsfl_jax``, or of MLFLOW_EXPERIMENT_NAME.

MLFLOW_TRACKING_URI says where. Needs the extra ``[mlflow]``.
"""

import os
import pathlib
from typing import Any

from tsfl_jax.report.writer import Record, Writer, library, measured, remembered


def writer(folder: pathlib.Path) -> Writer:
    """The settings as its parameters, metrics by interval, figures and summary."""
    client = library("mlflow", "mlflow").MlflowClient()
    runs: list[str] = []

    def made() -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tsfl_jax")
        known = client.get_experiment_by_name(name)
        number = known.experiment_id if known else client.create_experiment(name)
        return client.create_run(number, run_name=folder.name).info.run_id

    def start(settings: dict[str, Any], finished: int) -> None:
        runs.append(remembered(folder / "mlflow.id", made))
        for name, value in settings.items() if not finished else ():
            client.log_param(runs[0], name, value)

    def report(record: Record) -> None:
        for name, value in measured(record).items():
            client.log_metric(runs[0], name, value, step=record["interval"])

    def end(summary: dict[str, Any], figures: list[pathlib.Path]) -> None:
        client.log_dict(runs[0], summary, "summary.json")
        for path in figures:
            client.log_artifact(runs[0], str(path))
        client.set_terminated(runs[0])

    return Writer(report, start, end)
