"""Read a finished run's files for the theory: τ, ρ, and estimated constants."""

import pathlib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from tsfl_jax.report import files
from tsfl_jax.theory.bounds import BoundConstants, tightest_limit
from tsfl_jax.types import UserError

MEASURES = "bound_optimal"  # a rule that always measures its clients
WEIGHTED_MEANS = ("dms", MEASURES, "fedavg", "fedprox")


class Run(NamedTuple):
    """A finished run; T of its intervals had clients at work and finite gradients."""

    about: str
    notes: tuple[str, ...]  # where the run differs from the theory's assumptions
    interval: Int[np.ndarray, "T"]  # from 1
    lr: float
    weight_limit: float  # θ, inf where the run had none
    tau: Int[np.ndarray, "T N"]
    rho: Float[np.ndarray, "T N"]
    smoothness: Float[np.ndarray, "T"]  # L
    grad_sq_norm: Float[np.ndarray, "T"]  # G²
    grad_square: Float[np.ndarray, "T"]  # ‖∇F(w^t)‖²
    variance: Float[np.ndarray, "T N"]  # σ_i², NaN for absent clients
    dissimilarity: Float[np.ndarray, "T N"]  # ‖∇F_i − ∇F‖², likewise


def read(workdir: pathlib.Path) -> Run:
    """Read the run of a folder.

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
    settings = files.read_json(workdir / "config.json")
    summary = files.read_json(workdir / "summary.json")
    if settings is None or summary is None:
        raise UserError(f"{workdir}: no finished run there; give the --workdir of one")
    if not settings.get("measure_clients") and settings.get("algorithm") != MEASURES:
        raise UserError(
            f"{workdir}: this run has not measured its clients; repeat it with "
            "--config.measure_clients=true and another --workdir"
        )
    framework = settings["timeline"]["framework"]
    if framework not in ("none", "tsfl"):
        raise UserError(
            f"{workdir}: the theorems are about T-SFL, whose clients are in step; "
            f"{framework} is not in step"
        )
    clients = files.read_arrays(workdir / "clients.npz")
    rows = files.read_metrics(workdir / "metrics.jsonl")
    if "variance" not in clients or len(rows) != len(clients["tau"]):
        raise UserError(f"{workdir}: its files do not belong together; repeat the run")
    measured = {
        name: np.array(
            [np.nan if row[name] is None else row[name] for row in rows], float
        )
        for name in ("grad_square", "grad_sq_norm", "smoothness")
    }
    used = _usable(clients, measured)
    if not used.any():
        raise UserError(
            f"{workdir}: no interval with clients at work and finite gradients, L > 0"
        )
    names = "tau", "rho", "variance", "dissimilarity"
    return Run(
        about=f"{summary['data']}, {summary['algorithm']}, seed {summary['seed']}",
        notes=_notes(settings),
        interval=np.flatnonzero(used) + 1,
        lr=settings["lr"],
        weight_limit=settings["dms"]["weight_limit"] or np.inf,
        **{name: values[used] for name, values in measured.items()},
        **{name: clients[name][used] for name in names},
    )


def _usable(
    clients: dict[str, np.ndarray], measured: dict[str, np.ndarray]
) -> Bool[np.ndarray, "T"]:
    """Which intervals had clients at work, finite measurements and L > 0."""
    present = clients["tau"] > 0
    used = np.all([np.isfinite(values) for values in measured.values()], axis=0)
    used &= (measured["smoothness"] > 0) & present.any(axis=1)
    for name in ("variance", "dissimilarity"):
        used &= (np.isfinite(clients[name]) | ~present).all(axis=1)
    return used


def _notes(settings: dict) -> tuple[str, ...]:
    """List the settings that the theorems do not cover."""
    found = []
    if settings["momentum"]:
        found.append(f"momentum {settings['momentum']}; the theorems are for plain SGD")
    if settings["schedule"]["iteration"] == "pass":
        found.append(
            "a local iteration is a pass over the data; in the theorems it is a step"
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
    """The constants of Theorem 1 for the whole run, from w⁰.

    Bounds must hold in all intervals, so L, G² and σ_i² are the largest of any
    interval; ‖w⁰ − w*‖² is of the first, and θ the tightest for the weights that were
    used.
    """
    L, num_clients = run.smoothness.max(), run.tau.shape[1]
    used = min(run.weight_limit, max(1.0, num_clients * run.rho.max()))
    apart = jnp.nanmean(_zero_if_absent(run.dissimilarity), axis=0)
    return BoundConstants(
        lr=jnp.float32(run.lr),
        smoothness=jnp.float32(L),
        grad_sq_norm=jnp.float32(run.grad_sq_norm.max()),
        weight_limit=tightest_limit(used, num_clients, run.lr, L),
        distance=jnp.float32(max(run.grad_square[0], 0) / run.smoothness[0] ** 2),
        grad_variance=jnp.nanmax(_zero_if_absent(run.variance), axis=0),
        dissimilarity=jnp.maximum(apart, 0) / L**2,
    )


def _zero_if_absent(values: Float[np.ndarray, "T N"]) -> Float[np.ndarray, "T N"]:
    """Replace the values of clients that never participate, and so have no weight."""
    return np.where(np.isnan(values).all(axis=0), 0.0, values)
