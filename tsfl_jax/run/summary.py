"""What a run's files and a sweep's rows say of a history: results, notes, rows."""

import pathlib
import shlex
from typing import Any

import jax
import numpy as np

from tsfl_jax import command, trees
from tsfl_jax.data import client_test
from tsfl_jax.engine import scan, structures
from tsfl_jax.prepare.network import delivers
from tsfl_jax.prepare.prepare import Prepared
from tsfl_jax.report import files as report
from tsfl_jax.report import runs
from tsfl_jax.run import costs
from tsfl_jax.types import Array, Params, Schedule

# Columns of metrics.jsonl beside the interval and its virtual time.
_COLUMNS = ("test_accuracy", "test_loss", "train_loss", "threshold", "num_selected")
_COLUMNS += ("weight_entropy", "smoothness", "grad_sq_norm", "grad_variance")
_COLUMNS += ("grad_square", "coupling", "num_discarded")
_OF_SLOTS = ("tau", "size", "client", "reported")  # arrays of a `Schedule`


def work_of(prepared: Prepared, history: scan.History) -> Schedule:
    """What the clients did in a history's intervals, with those that were chosen."""
    times, finished = prepared.workload.schedule, len(history.rho)
    arrays = {n: getattr(times, n)[:finished] for n in _OF_SLOTS}
    if history.chosen is not None:
        chosen = np.asarray(history.chosen)
        arrays = {n: np.take_along_axis(a, chosen, 1) for n, a in arrays.items()}
    return times._replace(**arrays)


def named_of(prepared: Prepared, history: scan.History) -> dict[str, Any]:
    """All fields of a history by name, with metrics and scores of clients.

    And "tau", "virtual_time" and, where clients are in slots, the "client" of each.
    """
    work = work_of(prepared, history)
    fields = history.named(tuple(prepared.custom.metrics))
    fields = client_test.named(_tested(prepared), fields) | {
        "tau": work.tau,
        "virtual_time": prepared.workload.schedule.seconds[: len(history.rho)],
    }
    if prepared.privacy:
        fields["spent_epsilon"] = prepared.privacy.epsilon[: len(history.rho)]
    return fields if work.in_order else fields | {"client": work.client}


def measured(prepared: Prepared) -> tuple[str, ...]:
    """Names in the history of what not every run measures."""
    names = structures.REGRET if prepared.config.measure_regret else ()
    names += ("spent_epsilon",) if prepared.privacy else ()
    names += client_test.SERIES if prepared.tested else ()
    return names + tuple(prepared.custom.metrics)


def _tested(prepared: Prepared) -> client_test.ClientTest | None:
    """The clients that are scored; by their own layers each has one score already."""
    if prepared.tested and prepared.is_personal:
        return prepared.tested._replace(share=None)
    return prepared.tested


def last_measured(values: Array | np.ndarray) -> float:
    """The last value that is not NaN; NaN if there is none."""
    return (_measured(values) or [float("nan")])[-1]


def _measured(values: Array | np.ndarray) -> list[float]:
    """The values that are not NaN."""
    numbers = np.asarray(values, np.float64)
    return numbers[~np.isnan(numbers)].tolist()


def where_run() -> dict[str, Any]:
    """What this process runs on."""
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "processor": report.processor(),
        "versions": report.versions(),
        "command": shlex.join(command.started),
    }


def results_of(prepared: Prepared, history: dict[str, Any]) -> dict[str, Any]:
    """What summary.json and a row of results.csv say of a history by name."""
    scores = scores_of(history)
    delivered = delivers(history["tau"], history["rho"])[: scores["diverged_at"]]
    client = history.get("client", np.arange(delivered.shape[1]))
    if privacy := prepared.privacy:
        scores |= {"epsilon": privacy.epsilon[-1], "delta": privacy.delta}
    return scores | {
        "samples_trained": int(history["samples"].sum(dtype=np.int64)),
        "bytes_moved": costs.bytes_moved(prepared, delivered),
        **costs.costs_of(prepared, delivered, client).totals,
        "notes": [*prepared.notes, *history_notes(history)],
    }


def summarize(
    prepared: Prepared,
    labels: dict[str, Any],
    history: dict[str, Any],
    seconds: float,
    compile_seconds: float,
) -> dict[str, Any]:
    """The content of summary.json; `history` has the finished intervals only."""
    results = labels | {"num_intervals": len(history["diverged"])}
    results |= results_of(prepared, history)
    speed = results["samples_trained"] / seconds if seconds else float("nan")
    results |= {"compile_seconds": compile_seconds, "train_seconds": seconds}
    results |= {"num_discarded": int(history["num_discarded"].sum())}
    return results | {"samples_per_second": speed} | where_run()


def scores_of(history: dict[str, Any]) -> dict[str, Any]:
    """Best and last accuracy, last loss, interval of a total loss, mean regret."""
    accuracy, lost = history["test_accuracy"], np.flatnonzero(history["diverged"])
    scores = {
        "best_test_accuracy": max(_measured(accuracy), default=float("nan")),
        "final_test_accuracy": last_measured(accuracy),
        "final_test_loss": last_measured(history["test_loss"]),
        "diverged_at": int(lost[0]) + 1 if len(lost) else None,
    }
    for name in (*client_test.SERIES, "attack_success"):
        if name in history and "loss" not in name:
            scores[f"final_{name}"] = last_measured(history[name])
    for name in ("regret", "gap"):
        if name in history:  # over the measured intervals
            values = _measured(history[name])
            scores[f"mean_{name}"] = float(np.mean(values)) if values else np.nan
    return scores


def history_notes(history: dict[str, Any]) -> list[str]:
    """Notes on what a run's numbers alone do not say."""
    lost = np.asarray(history["diverged"])
    worked = (np.asarray(history["samples"]) > 0).any(axis=1) & ~lost
    total = np.asarray(history["rho"], np.float64).sum(axis=1)
    count = int((worked & ~(total > 0)).sum())  # NaN is not > 0
    if not count:
        return []
    return [
        f"in {count} of {len(worked)} intervals the rule's weights were NaN or "
        "their sum was not positive, so that the model stayed as it was"
    ]


def rows_of(
    prepared: Prepared, history: scan.History, first: int = 0
) -> list[dict[str, Any]]:
    """One plain dict per finished interval from `first` on, as in metrics.jsonl."""
    named = named_of(prepared, history)
    names = "virtual_time", *_COLUMNS, *measured(prepared)
    names = [name for name in names if named[name].ndim == 1]
    columns = [report.plain(named[name][first:]) for name in names]
    intervals = range(first + 1, len(history.rho) + 1)
    rows = zip(intervals, *columns, strict=True)
    return [dict(zip(("interval", *names), row, strict=True)) for row in rows]


def write_results(
    folder: pathlib.Path,
    prepared: Prepared,
    history: scan.History,
    params: Params,
    summary: dict[str, Any],
) -> None:
    """Write all files but the metrics; `history` has the finished intervals only."""
    named = named_of(prepared, history)
    names = ("tau", "rho", "selected", "client")
    arrays = {n: np.asarray(named[n]) for n in names if n in named}
    arrays["size"] = work_of(prepared, history).size
    if history.slope is not None:
        arrays["slope"] = np.nan_to_num(np.asarray(history.slope))  # 0: not there
    if tested := _tested(prepared):
        scores = {"accuracy": history.group_accuracy, "loss": history.group_loss}
        for name, values in scores.items():
            (last,) = client_test.by_client(tested, np.asarray(values)[-1:])
            arrays[f"final_{name}"] = last
        arrays["tested_client"] = tested.client
    if not np.isnan(history.grad_square).all():
        arrays["variance"] = np.asarray(history.client_variance)
        arrays["dissimilarity"] = np.asarray(history.client_dissimilarity)
    report.write_arrays(folder / "clients.npz", arrays, compress=True)
    report.write_arrays(folder / "model.npz", trees.named(params))
    report.write_json(folder / "summary.json", summary)
    labels = summary | {"num_clients": prepared.config.num_clients}
    runs.write_figures(folder, named | arrays, labels)


def local_layers(prepared: Prepared, state: scan.State) -> dict[str, np.ndarray] | None:
    """Layers that stay with the clients of a run, by path; None: none do."""
    links = zip(prepared.uplinks, state.uplinks, strict=True)
    kept = [leaves for link, leaves in links if link.keeps_variables]
    layers = {
        path: np.asarray(leaf) for leaves in kept for path, leaf in leaves.items()
    }
    return {"client": prepared.workload.drawn} | layers if layers else None
