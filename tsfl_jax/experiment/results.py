"""What a run leaves behind: rows, summary, files."""

import pathlib

import jax
import numpy as np

from tsfl_jax.engine import scan
from tsfl_jax.experiment import assemble
from tsfl_jax.report import files, runs
from tsfl_jax.timeline import replay
from tsfl_jax.types import Params


def rows_of(
    history: scan.History, first: int, last: int, seconds: np.ndarray
) -> list[dict]:
    """One plain dict per interval of ``[first, last)``, as in metrics.jsonl."""
    names = [
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
        "num_dropped",
    ]
    return [
        {"interval": t + 1, "virtual_time": seconds[t].item()}
        | {name: getattr(history, name)[t].item() for name in names}
        for t in range(first, last)
    ]


def last(values: np.ndarray) -> float:
    """The last that was measured, NaN where none was."""
    measured = values[~np.isnan(values)]
    return float(measured[-1]) if len(measured) else float("nan")


def summary(
    exp: assemble.Experiment,
    history: scan.History,
    seconds: float,
    compile_seconds: float,
) -> dict:
    """What summary.json holds; `history` of the finished intervals only."""
    accuracy = history.test_accuracy
    diverged = np.flatnonzero(history.diverged)
    samples = int(history.samples.sum(dtype=np.int64))
    return exp.labels | {
        "num_intervals": len(accuracy),
        "best_test_accuracy": float(np.nanmax(accuracy, initial=-np.inf))
        if not np.isnan(accuracy).all()
        else float("nan"),
        "final_test_accuracy": last(accuracy),
        "final_test_loss": last(history.test_loss),
        "compile_seconds": compile_seconds,
        "train_seconds": seconds,
        "samples_trained": samples,
        "samples_per_second": samples / seconds if seconds else float("nan"),
        "num_dropped": int(history.num_dropped.sum()),
        "diverged_at": int(diverged[0]) + 1 if len(diverged) else None,
        "notes": list(exp.notes),
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "versions": files.versions(),
    }


def provenance(old: dict) -> dict:
    """Of an old summary what only the process that trained knew, where it is intact.

    All results are computed from the history instead: a summary may be edited.
    """
    kinds = {"compile_seconds": float, "device": str, "backend": str, "versions": dict}
    return {n: old[n] for n, kind in kinds.items() if isinstance(old.get(n), kind)}


def write(
    folder: pathlib.Path,
    exp: assemble.Experiment,
    history: scan.History,
    params: Params,
    summary: dict,
) -> None:
    """Everything but the metrics; `history` of the finished intervals only."""
    finished, times = len(history.rho), exp.times
    clients = exp.problem.client.shape[0]
    sizes = replay.dense(times.size[:finished], times, clients, np.maximum)
    tau, rho, selected = (
        replay.dense(a[:finished], times, clients)
        for a in (times.tau, history.rho, history.selected)
    )
    more = {}
    if times.delivery is None and not np.isnan(history.grad_square).all():
        more = {
            "variance": history.client_variance,
            "dissimilarity": history.client_dissimilarity,
        }
    files.write_clients(folder / "clients.npz", tau, sizes, rho, selected, **more)
    files.write_arrays(folder / "model.npz", named_arrays(params))
    files.write_json(folder / "summary.json", summary)
    runs.plot_curves(folder)
    runs.plot_participation(folder)


def named_arrays(params: Params) -> dict[str, np.ndarray]:
    """Flax variables as one flat dict, ``{"params/Dense_0/kernel": array}``."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in flat
    }
