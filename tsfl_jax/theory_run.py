"""What the files of a finished run tell the theory: τ, ρ, and estimated constants."""

import pathlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tsfl_jax import report
from tsfl_jax.bound_constants import BoundConstants
from tsfl_jax.types import UserError


class Run(NamedTuple):
    """What the files of a run say; T' intervals in which somebody worked."""

    about: str
    notes: tuple[str, ...]  # what sets the run apart from the theory
    interval: np.ndarray  # [T'] from 1
    lr: float
    weight_limit: float  # θ; N where the run had none
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
    settings = report.read_json(workdir / "config.json")
    summary = report.read_json(workdir / "summary.json")
    if settings is None or summary is None:
        raise UserError(f"{workdir}: no finished run there; give the --workdir of one")
    if settings["timeline"]["framework"] not in ("none", "tsfl"):
        raise UserError(
            f"{workdir}: {settings['timeline']['framework']} is not in step; the "
            "theorems are about T-SFL"
        )
    try:
        with np.load(workdir / "clients.npz") as file:
            clients = dict(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{workdir / 'clients.npz'}: cannot be read: {error}") from None
    if "variance" not in clients:
        raise UserError(
            f"{workdir}: this run has not measured its clients; repeat it with "
            "--config.measure_clients=true and another --workdir"
        )
    rows = report.read_metrics(workdir / "metrics.jsonl")

    def column(name: str) -> np.ndarray:
        return np.array(
            [np.nan if row[name] is None else row[name] for row in rows], float
        )

    square, smoothness = column("grad_square"), column("smoothness")
    worked = np.isfinite(square) & (smoothness > 0)
    if not worked.any():
        raise UserError(f"{workdir}: nobody did an iteration in any interval")
    num_clients = clients["tau"].shape[1]
    return Run(
        about=f"{summary['data']}, {summary['algorithm']}, seed {summary['seed']}",
        notes=_notes(settings),
        interval=np.flatnonzero(worked) + 1,
        lr=settings["lr"],
        weight_limit=settings["dms"]["weight_limit"] or float(num_clients),
        tau=clients["tau"][worked],
        rho=clients["rho"][worked],
        smoothness=smoothness[worked],
        grad_sq_norm=column("grad_sq_norm")[worked],
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
    if settings["dms"]["weight_limit"] == 0:
        found.append("no weight limit, so θ = N")
    return tuple(found)


def constants_of(run: Run) -> BoundConstants:
    """Of the whole run, from w⁰.

    Bounds must hold always, so L, G² and σ_i² are the largest of any interval.
    """
    return constants(
        run,
        run.smoothness.max(),
        run.grad_sq_norm.max(),
        run.grad_square[0],
        np.nanmax(_known(run.variance), axis=0),
        np.nanmean(_known(run.dissimilarity), axis=0),
    )


def _known(values: np.ndarray) -> np.ndarray:
    """A client that is never there counts as 0: it has no weight."""
    return np.where(np.isnan(values).all(axis=0), 0.0, values)


def constants(
    run: Run, L, square_norm, square, variance, dissimilarity
) -> BoundConstants:
    """From estimates at one w; where an unbiased one of what is ≥ 0 is below, 0.

    Args:
      run: for η and θ.
      L, square_norm, square: L, G² and ‖∇F‖² ``[]``.
      variance, dissimilarity: σ_i² and ‖∇F_i − ∇F‖² ``[N]``.
    """
    return BoundConstants(
        lr=jnp.asarray(run.lr),
        smoothness=jnp.asarray(L),
        grad_sq_norm=jnp.asarray(square_norm),
        weight_limit=jnp.asarray(run.weight_limit),
        distance=jnp.maximum(square, 0) / L**2,
        grad_variance=jnp.asarray(variance),
        dissimilarity=jnp.maximum(dissimilarity, 0) / L**2,
    )
