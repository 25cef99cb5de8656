"""``python -m studies.bounds``: do the bounds hold with exact constants?

Runs T-SFL on quadratic clients with one curvature L, so that the test loss F(w) − F(w*)
gives ‖w − w*‖² = 2(F(w) − F(w*))/L and ‖∇F(w)‖² = 2L(F(w) − F(w*)) exactly, and
compares both with Theorems 1 and 4 under their exact constants. θ is the smallest that
Definition 1.3 allows for the weights in use.
"""

import pathlib
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from studies import arguments, study
from tsfl_jax import config_files
from tsfl_jax.config import Config, get
from tsfl_jax.data.quadratic import Exact
from tsfl_jax.engine import devices
from tsfl_jax.prepare.network import exact_of
from tsfl_jax.prepare.prepare import load_dataset, prepare
from tsfl_jax.report import files
from tsfl_jax.report import style as plot_style
from tsfl_jax.run import grid, sweeps
from tsfl_jax.theory import bounds
from tsfl_jax.theory.bounds import BoundConstants, tightest_limit
from tsfl_jax.types import UserError

_WHOLE = {"batch_size": 64, "quadratic.grad_variance": "constant(0)"}
_NEAR = {"quadratic.distance": 1e-6}
_ONE = {"schedule.kind": "explicit", "schedule.tau": (1,)}
_UNEQUAL = {"schedule.kind": "explicit", "schedule.tau": (8, 1)}
# Groups of clients that do not coincide with those of τ.
_MIXED = {
    "quadratic.dissimilarity": "; ".join(["constant(0.2)", "constant(1.8)"] * 5),
    "quadratic.grad_variance": "; ".join(["constant(0.1)", "constant(0.9)"] * 5),
}
_FEDAVG = {"algorithm": "fedavg", "quadratic.convexity": 1.0}
# Label → settings that differ from configs/quadratic.py.
SETTINGS: dict[str, dict] = {
    "as in the config, FedAvg": _FEDAVG,
    "as in the config, DMS": _FEDAVG | {"algorithm": "dms"},
    "as in the config, minimizer": _FEDAVG | {"algorithm": "bound_optimal"},
    "unequal Γ_i and σ_i², FedAvg": _FEDAVG | _MIXED,
    "unequal Γ_i and σ_i², DMS": _FEDAVG | _MIXED | {"algorithm": "dms"},
    "no dissimilarity": _FEDAVG | {"quadratic.dissimilarity": "constant(0)"},
    "η = 0.5": _FEDAVG | {"lr": 0.5},
    "from the optimum, τ = 8 or 1": _FEDAVG | _NEAR | _UNEQUAL,
    "the same, whole batches, η = 0.01": _FEDAVG
    | _NEAR
    | _UNEQUAL
    | _WHOLE
    | {"lr": 0.01},
    "gradient descent: τ = 1, whole batches": _FEDAVG
    | _ONE
    | _WHOLE
    | {"quadratic.dissimilarity": "constant(0)"},
    "the same, unlike clients": _FEDAVG | _ONE | _WHOLE,
}


class SettingResult(NamedTuple):
    """One setting; bounds and measurements after 1 … T intervals, mean over seeds."""

    label: str
    distance: Float[np.ndarray, "T"]  # mean of ‖w^t − w*‖²
    error: Float[np.ndarray, "T"]  # its standard error over the seeds
    printed: Float[np.ndarray, "T"]  # Theorem 1; inf where void
    repaired: Float[np.ndarray, "T"]  # with 1 for η² in Z
    valid: bool  # W > 0 and Definition 1.3 for all t
    gradient: float  # (1/T) Σ_t ‖∇F(w^t)‖², t = 0 … T−1
    # None where it does not apply: H > 1, mini-batches, or weights other than F's.
    theorem4: bounds.GradientBound | None


@jax.jit
def _bounds(
    rho: Float[Array, "T N"], tau: Int[Array, "T N"], constants: BoundConstants
) -> tuple[Float[Array, "T"], Float[Array, "T"], Bool[Array, "T"]]:
    """Theorem 1's totals and flags after 1 … T intervals, as printed and repaired."""

    def both(rho: Array, tau: Array) -> tuple[Array, ...]:
        printed = bounds.theorem1_bound(rho, tau, constants)
        repaired = bounds.theorem1_bound(rho, tau, constants, repaired=True)
        return printed.total, repaired.total, printed.valid

    return study.so_far(both, rho, tau)


def bounds_of(
    known: Exact,
    lr: float,
    rho: Float[np.ndarray, "T N"],
    tau: Int[np.ndarray, "T N"],
) -> tuple[Float[np.ndarray, "T"], Float[np.ndarray, "T"], Bool[np.ndarray, "T"]]:
    """Theorem 1 after 1 … T intervals: as printed, with 1 for η², if valid."""
    num_clients, L = tau.shape[1], known.smoothness
    used = max(1.0, num_clients * float(rho.max()))
    constants = BoundConstants(
        lr,
        L,
        known.grad_sq_norm,
        tightest_limit(used, num_clients, lr, L),
        known.distance,
        known.grad_variance,
        known.dissimilarity,
    )
    constants = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), constants)
    return jax.device_get(_bounds(jnp.asarray(rho), jnp.asarray(tau), constants))


def theorem4_of(
    known: Exact, lr: float, excess: Float[np.ndarray, "T"]
) -> tuple[float, bounds.GradientBound]:
    """(1/T) Σ ‖∇F(w^t)‖² and its bounds, with the smallest V² that fits these models.

    Weights are the shares in F, so ε = 1.

    Args:
      known: the constants; one curvature L.
      lr: η.
      excess: F(w^t) − F(w*), t = 0 … T−1.
    """
    L = known.smoothness
    square = 2 * L * excess
    own = square + L**2 * (known.shares @ known.dissimilarity)  # E_i‖∇F_i(w^t)‖²
    own, some = own[square > 0], square[square > 0]  # at w* there is nothing to bound
    gap = 0.5 * L * known.distance
    bound = bounds.theorem4_bound(
        len(excess),
        gap,
        lr=lr,
        smoothness=L,
        epsilon=1.0,
        dissimilarity_sq=float((own / some).max(initial=1.0)),
    )
    return float(square.mean()), bound


def run_setting(label: str, config: Config, seeds: int) -> SettingResult:
    """Run one setting; seeds differ in mini-batches and selection, not in clients."""
    dataset = load_dataset(config)
    prepared = prepare(config, dataset=dataset)
    known, lr = exact_of(prepared), get(config, "lr")
    if known.curvature.min() < known.smoothness:
        raise UserError("the study needs one curvature: quadratic.convexity = L")
    swept = {"seed": range(seeds)}
    history = sweeps.run(config, swept, dataset=dataset).history
    after = np.asarray(history["test_loss"], np.float64)  # [S, T]
    away = 2 * after / known.smoothness
    tau = prepared.workload.schedule.tau
    several = [bounds_of(known, lr, np.asarray(rho), tau) for rho in history["rho"]]
    printed, repaired, valid = (np.stack(part) for part in zip(*several, strict=True))
    start = np.full((seeds, 1), 0.5 * known.smoothness * known.distance)
    excess = np.concatenate([start, after[:, :-1]], axis=1).mean(0)
    gradient, theorem4 = theorem4_of(known, lr, excess)
    strict = get(config, "algorithm") == "fedavg" and (tau == 1).all()
    if not strict or known.grad_variance.any():
        theorem4 = None
    return SettingResult(
        label,
        away.mean(0),
        away.std(0, ddof=1) / np.sqrt(seeds) if seeds > 1 else 0 * away[0],
        printed.mean(0),
        repaired.mean(0),
        bool(valid.all()),
        gradient,
        theorem4,
    )


def ratio(result: SettingResult, bound: Float[np.ndarray, "T"]) -> tuple[float, float]:
    """The largest of measured over bound in any interval, and its standard error."""
    worst = int((result.distance / bound).argmax())
    distance, error = result.distance[worst], result.error[worst]
    return float(distance / bound[worst]), float(error / bound[worst])


def _with_error(value: float, error: float) -> str:
    return f"{value:.2g} ± {error:.1g}"


def setting_row(result: SettingResult) -> dict[str, str]:
    """A row of the table."""
    four, shown = result.theorem4, ("–", "–")
    if four is not None and not four.valid:
        shown = ("no bound", "no bound")
    elif four is not None:
        both = (four.printed, four.derived)
        shown = tuple(f"{float(result.gradient / x):.3g}" for x in both)
    return {
        "setting": result.label,
        "conditions hold": "yes" if result.valid else "no",
        "Theorem 1": _with_error(*ratio(result, result.printed)),
        "with 1 for η²": _with_error(*ratio(result, result.repaired)),
        "at the end": f"{result.distance[-1] / result.printed[-1]:.2g}",
        "Theorem 4": shown[0],
        "with η below": shown[1],
    }


@plot_style.styled
def plot_bounds(
    results: list[SettingResult], path: pathlib.Path, title: str
) -> list[pathlib.Path]:
    """Plot distance and bound against the interval, a panel per setting."""
    columns = 3
    rows = -(-len(results) // columns)
    figure, panels = plot_style.figure_of(
        1.9 * rows, nrows=rows, ncols=columns, squeeze=False
    )
    for panel, one in zip(panels.flat, results, strict=False):
        interval = np.arange(1, len(one.distance) + 1)
        for label, values, look in (
            ("measured", one.distance, ("#0072B2", "-", "o")),
            ("Theorem 1", one.printed, ("#D55E00", "--", "s")),
        ):
            style = plot_style.line_style(*look)
            plot_style.plot_line(panel, interval, values, style, label=label)
        panel.set_yscale("log")
        panel.set_title(one.label, fontsize="x-small")
        plot_style.interval_axis(panel, interval)
    for panel in panels[:, 0]:
        panel.set_ylabel("‖w − w*‖²")
    panels[0, 0].legend(fontsize="x-small", handlelength=2)
    for panel in panels.flat[len(results) :]:
        panel.set_visible(False)
    figure.suptitle(plot_style.title(title))
    return plot_style.save_both(figure, path)


def main(texts: list[str]) -> None:
    """Run all settings, write table and figure."""
    parser = arguments.make_parser("bounds", __doc__, 32)
    given = arguments.parse(parser, texts)
    out = files.prepare_workdir(given.out, "--out")
    devices.start(1)
    base = config_files.load("quadratic")
    results = []
    for label, changes in SETTINGS.items():
        print(label, file=sys.stderr)
        results.append(run_setting(label, grid.changed(base, changes), given.seeds))
    about = f"quadratic clients, {arguments.seeds_text(given.seeds)}"
    text = f"{about}. Largest of measured over bound in any interval, ± its standard"
    text += " error; above 1 the bound is violated. Theorem 1 as printed, with 1 for"
    text += " η² in Z, and as printed in the last interval; Theorem 4 as printed and as"
    text += " its proof has it, where it applies."
    rows = [setting_row(result) for result in results]
    for path in files.write_table(out, "bounds", rows, text):
        print(path)
    for path in plot_bounds(results, out / "bounds", about):
        print(path)


if __name__ == "__main__":
    arguments.start("bounds", main)
