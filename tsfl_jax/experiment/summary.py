"""What a run's files and a sweep's rows say of a history: results, notes, rows."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tsfl_jax import trees
from tsfl_jax.data import client_test
from tsfl_jax.engine import scan
from tsfl_jax.experiment.identity import bytes_moved
from tsfl_jax.experiment.network import delivers
from tsfl_jax.experiment.prepare import Prepared
from tsfl_jax.report import files as report
from tsfl_jax.report import runs
from tsfl_jax.timeline import deliveries
from tsfl_jax.types import Array, Params, Schedule

# Columns of metrics.jsonl beside the interval and its virtual time.
_COLUMNS = (
    "test_accuracy",
    "test_loss",
    "train_loss",
    "threshold",
    "num_selected",
    "weight_entropy",
    "smoothness",
    "grad_sq_norm",
    "grad_variance",
    "grad_square",
    "coupling",
    "num_discarded",
)
_OF_SLOTS = ("tau", "size", "client", "reported")  # arrays of a `Schedule`
# And those that are there only if asked for.
_ASKED = ("validation_loss", "regret", "gap", *client_test.SERIES)


def done_of(prepared: Prepared, history: scan.History) -> Schedule:
    """What the clients did in the finished intervals, with those that were chosen."""
    times, finished = prepared.workload.schedule, len(history.rho)
    fields = {n: getattr(times, n)[:finished] for n in _OF_SLOTS}
    if history.chosen is not None:
        chosen = np.asarray(history.chosen)
        fields = {n: np.take_along_axis(a, chosen, 1) for n, a in fields.items()}
    return times._replace(**fields)


def named_of(prepared: Prepared, history: scan.History) -> dict[str, Any]:
    """All fields of a run's history by name, its further metrics, scores of clients."""
    metrics = tuple(prepared.own.metrics or ())
    asked = None
    if prepared.config.evaluation.over == "cohort":
        times = done_of(prepared, history)
        asked = np.where(deliveries.claimed(times) > 0, times.client, -1)
    return client_test.named(_tested(prepared), history.named(metrics), asked)


def _tested(prepared: Prepared) -> client_test.ClientTest | None:
    """The clients that are scored; by their own layers each has one score already."""
    if prepared.tested is None or not prepared.is_personal:
        return prepared.tested
    return prepared.tested._replace(share=None)


def last_measured(values: Array | np.ndarray) -> float:
    """The last value that is not NaN; NaN if there is none."""
    values = np.asarray(values)
    measured = values[~np.isnan(values)]
    return float(measured[-1]) if len(measured) else float("nan")


def where_run() -> dict[str, Any]:
    """What this process runs on."""
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "processor": report.processor(),
        "versions": report.versions(),
    }


def summarize(
    prepared: Prepared,
    labels: dict[str, Any],
    history: scan.History,
    seconds: float,
    compile_seconds: float,
) -> dict[str, Any]:
    """The content of summary.json; `history` has the finished intervals only."""
    samples = int(history.samples.sum(dtype=np.int64))
    tau, named = done_of(prepared, history).tau, named_of(prepared, history)
    delivered = delivers(tau, history.rho)
    return (
        labels
        | {"num_intervals": len(history.diverged)}
        | scores_of(named)
        | {
            "compile_seconds": compile_seconds,
            "train_seconds": seconds,
            "samples_trained": samples,
            "samples_per_second": samples / seconds if seconds else float("nan"),
            "bytes_moved": bytes_moved(prepared, delivered),
            "num_discarded": int(history.num_discarded.sum()),
            "notes": [*prepared.notes, *history_notes(named)],
        }
        | where_run()
    )


def scores_of(history: dict[str, Any]) -> dict[str, Any]:
    """Best and last accuracy, last loss, interval of a total loss, mean regret."""
    accuracy, lost = history["test_accuracy"], np.flatnonzero(history["diverged"])
    measured = accuracy[~np.isnan(accuracy)]
    found = {
        "best_test_accuracy": float(measured.max()) if len(measured) else float("nan"),
        "final_test_accuracy": last_measured(accuracy),
        "final_test_loss": last_measured(history["test_loss"]),
        "diverged_at": int(lost[0]) + 1 if len(lost) else None,
    }
    for name in ("client_accuracy_mean", "client_accuracy_worst"):
        if name in history:
            found[f"final_{name}"] = last_measured(history[name])
    for name in ("regret", "gap"):
        values = history.get(name)
        if values is not None:  # over the measured intervals
            known = np.asarray(values, np.float64)[~np.isnan(values)]
            found[f"mean_{name}"] = float(known.mean()) if len(known) else float("nan")
    return found


def history_notes(history: dict[str, Any]) -> list[str]:
    """Notes on what a run's numbers alone do not say."""
    found, lost = [], np.asarray(history["diverged"])
    endless = np.isinf(np.asarray(history["test_loss"]))
    if endless.any():
        found.append(
            f"the test loss was infinite or NaN in {endless.sum()} tested intervals, "
            f"first in interval {np.argmax(endless) + 1}, although the weights were "
            "finite"
        )
    worked = (np.asarray(history["samples"]) > 0).any(axis=1) & ~lost
    total = np.asarray(history["rho"], np.float64).sum(axis=1)
    count = int((worked & ~(total > 0)).sum())  # NaN is not > 0
    if count:
        found.append(
            f"in {count} of {len(worked)} intervals the rule's weights were NaN or "
            "their sum was not positive, so that the model stayed as it was"
        )
    return found


def negative_variances(variables: Params) -> list[str]:
    """A note where a running variance of the model is negative, infinite or NaN."""
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(trees.parted(variables)[1])
        if "var" in jax.tree_util.keystr(path[-1:])
    }
    wrong = [n for n, a in names.items() if not ((a >= 0) & np.isfinite(a)).all()]
    start = "negative or infinite at the end of the run: "
    return [start + ", ".join(wrong)] if wrong else []


def rows_of(
    prepared: Prepared, history: scan.History, first: int = 0
) -> list[dict[str, Any]]:
    """One plain dict per finished interval from `first` on, as in metrics.jsonl."""
    finished, own = len(history.rho), tuple(prepared.own.metrics or ())
    columns: dict[str, Sequence] = {"interval": range(first + 1, finished + 1)}
    columns["virtual_time"] = prepared.workload.seconds[first:finished].tolist()
    named = named_of(prepared, history)
    for name in (*_COLUMNS, *(n for n in _ASKED if n in named), *own):
        columns[name] = _plain(named[name][first:])
    return [
        dict(zip(columns, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


def _plain(values: np.ndarray) -> list:
    """Numbers as JSON has them: None for NaN and ±inf."""
    plain = values.tolist()
    if np.isfinite(values).all():
        return plain
    return [v if math.isfinite(v) else None for v in plain]


def write_results(
    folder: pathlib.Path,
    prepared: Prepared,
    history: scan.History,
    params: Params,
    summary: dict[str, Any],
) -> None:
    """Write all files but the metrics; `history` has the finished intervals only."""
    times = done_of(prepared, history)
    arrays = {
        "tau": times.tau,
        "size": times.size,
        "rho": np.asarray(history.rho),
        "selected": np.asarray(history.selected),
    }
    if not times.in_order:
        arrays["client"] = times.client
    if history.slope is not None:
        arrays["slope"] = np.nan_to_num(np.asarray(history.slope))  # 0: not there
    if (tested := _tested(prepared)) is not None:
        scores = {"accuracy": history.group_accuracy, "loss": history.group_loss}
        last = {n: np.asarray(values)[-1:] for n, values in scores.items()}
        arrays |= {
            f"final_{name}": client_test.by_client(tested, values)[0]
            for name, values in last.items()
        } | {"tested_client": tested.client}
    if not np.isnan(history.grad_square).all():
        arrays |= {
            "variance": np.asarray(history.client_variance),
            "dissimilarity": np.asarray(history.client_dissimilarity),
        }
    report.write_arrays(folder / "clients.npz", arrays, compress=True)
    report.write_arrays(folder / "model.npz", named_arrays(params))
    report.write_json(folder / "summary.json", summary)
    about = summary | {"num_clients": prepared.config.num_clients}
    runs.write_figures(folder, named_of(prepared, history) | arrays, about)


def own_layers(prepared: Prepared, state: scan.State) -> dict[str, np.ndarray] | None:
    """Layers that stay with the clients, by path; None: none do."""
    layers = {
        path: np.asarray(leaf)
        for link, leaves in zip(prepared.uplinks, state.uplinks, strict=True)
        for path, leaf in (leaves.items() if link.keeps_variables else ())
    }
    return {"client": prepared.workload.drawn} | layers if layers else None


def named_arrays(params: Params) -> dict[str, np.ndarray]:
    """Flax variables as one flat dict, ``{"params/Dense_0/kernel": array}``."""
    leaves = jax.tree.leaves_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in leaves
    }
