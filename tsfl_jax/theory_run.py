"""What the files of a finished run tell the theory: τ, ρ, and estimated constants."""

import pathlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tsfl_jax import report
from tsfl_jax.bound_constants import BoundConstants, tightest_limit
from tsfl_jax.types import UserError

MEASURES = "bound_optimal"  # a rule that measures its clients unasked
WEIGHTED_MEANS = ("dms", MEASURES, "fedavg", "fedprox")


class Run(NamedTuple):
    """What the files of a run say; T' intervals in which somebody worked."""

    about: str
    notes: tuple[str, ...]  # what sets the run apart from the theory
    interval: np.ndarray  # [T'] from 1
    lr: float
    weight_limit: float  # θ, inf where the run had none
    tau: np.ndarray  # [T', N]
    rho: np.ndarray  # [T', N]
    smoothness: np.ndarray  # [T'] L
    grad_sq_norm: np.ndarray  # [T'] G²
    grad_square: np.ndarray  # [T'] ‖∇F(w^t)‖²
    variance: np.ndarray  # [T', N] σ_i², NaN for the absent
    dissimilarity: np.ndarray  # [T', N] ‖∇F_i − ∇F‖², likewise


def read(workdir: pathlib.Path) -> Run:
    """The run of a folder.

    Raises:
      UserError: no finished run there, or it has not measured its clients.
    """
    try:
        return _read(workdir)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{workdir}: its files are damaged ({type(error).__name__}: {error}); "
            "repeat the run"
        ) from error


def _read(workdir: pathlib.Path) -> Run:
    settings = report.read_json(workdir / "config.json")
    summary = report.read_json(workdir / "summary.json")
    if settings is None or summary is None:
        raise UserError(f"{workdir}: no finished run there; give the --workdir of one")
    if not settings.get("measure_clients") and settings.get("algorithm") != MEASURES:
        raise UserError(
            f"{workdir}: this run has not measured its clients; repeat it with "
            "--config.measure_clients=true and another --workdir"
        )
    if settings["timeline"]["framework"] not in ("none", "tsfl"):
        raise UserError(
            f"{workdir}: {settings['timeline']['framework']} is not in step; the "
            "theorems are about T-SFL"
        )
    clients = report.read_arrays(workdir / "clients.npz")
    rows = report.read_metrics(workdir / "metrics.jsonl")

    def column(name: str) -> np.ndarray:
        return np.array(
            [np.nan if row[name] is None else row[name] for row in rows], float
        )

    if "variance" not in clients or len(rows) != len(clients["tau"]):
        raise UserError(f"{workdir}: its files do not belong together; repeat the run")
    square, smoothness = column("grad_square"), column("smoothness")
    square_norm, present = column("grad_sq_norm"), clients["tau"] > 0
    worked = np.isfinite(square) & np.isfinite(square_norm) & np.isfinite(smoothness)
    worked &= (smoothness > 0) & present.any(axis=1)
    for name in ("variance", "dissimilarity"):
        worked &= (np.isfinite(clients[name]) | ~present).all(axis=1)
    if not worked.any():
        raise UserError(
            f"{workdir}: no interval with clients at work and finite gradients, L > 0"
        )
    return Run(
        about=f"{summary['data']}, {summary['algorithm']}, seed {summary['seed']}",
        notes=_notes(settings),
        interval=np.flatnonzero(worked) + 1,
        lr=settings["lr"],
        weight_limit=settings["dms"]["weight_limit"] or np.inf,
        tau=clients["tau"][worked],
        rho=clients["rho"][worked],
        smoothness=smoothness[worked],
        grad_sq_norm=square_norm[worked],
        grad_square=square[worked],
        variance=clients["variance"][worked],
        dissimilarity=clients["dissimilarity"][worked],
    )


def _notes(settings: dict) -> tuple[str, ...]:
    """What the theorems do not know of."""
    found = []
    if settings["momentum"]:
        found.append(f"momentum {settings['momentum']}; the theorems are for plain SGD")
    if settings["schedule"]["iteration"] == "pass":
        found.append(
            "an iteration is a pass over the data; in the theorems it is one step"
        )
    if settings["algorithm"] not in WEIGHTED_MEANS:
        found.append(f"{settings['algorithm']} does more than w⁺ = Σ ρ_i w_i")
    if settings["algorithm"] == "fedprox" or settings["proximal"]:
        found.append(f"a proximal term, μ = {settings['mu']}")
    if settings["clip_norm"]:
        found.append(f"gradients clipped to {settings['clip_norm']}")
    if settings["schedule"]["free_riders"]:
        found.append(f"{settings['schedule']['free_riders']} free riders")
    return tuple(found)


def constants_of(run: Run) -> BoundConstants:
    """Of the whole run, from w⁰.

    Bounds must hold always, so L, G² and σ_i² are the largest of any interval; ‖w⁰ −
    w*‖² is of the first, and θ the tightest for the weights that were used.
    """
    L, num_clients = run.smoothness.max(), run.tau.shape[1]
    used = min(run.weight_limit, max(1.0, num_clients * run.rho.max()))
    return BoundConstants(
        lr=jnp.float32(run.lr),
        smoothness=jnp.float32(L),
        grad_sq_norm=jnp.float32(run.grad_sq_norm.max()),
        weight_limit=tightest_limit(used, num_clients, run.lr, L),
        distance=jnp.float32(max(run.grad_square[0], 0) / run.smoothness[0] ** 2),
        grad_variance=jnp.nanmax(_known(run.variance), axis=0),
        dissimilarity=jnp.maximum(jnp.nanmean(_known(run.dissimilarity), axis=0), 0)
        / L**2,
    )


def _known(values: np.ndarray) -> np.ndarray:
    """A client that is never there counts as 0: it has no weight."""
    return np.where(np.isnan(values).all(axis=0), 0.0, values)
