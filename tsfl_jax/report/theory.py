"""``python -m tsfl_jax.theory_report WORKDIR``: a run compared with the theory.

From the files of a run that measured its clients (``--config.measure_clients=true``):
the four items of Theorem 1's bound after every interval, and the weights that the run
used beside those of Corollary 1, of Theorem 2 as printed and of the true minimiser.

Γ_i and ‖w⁰ − w*‖² are estimated from gradients, see `client_gradients`.
"""

import argparse
import pathlib
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import rng
from tsfl_jax.report import files
from tsfl_jax.report import style as plot_style
from tsfl_jax.report.theory_run import Run, constants_of, read
from tsfl_jax.rules import dms
from tsfl_jax.theory import bounds as theory
from tsfl_jax.theory.bounds import BoundConstants, estimated
from tsfl_jax.theory.fixed_point import theorem2_weights
from tsfl_jax.theory.minimum import bound_optimal_weights
from tsfl_jax.types import Array, ClientGradients, PRNGKey, UserError

if TYPE_CHECKING:
    import matplotlib.axes

# Weights that are compared: label in tables and figures.
NAMES = RUN, DMS, COROLLARY, PRINTED, MINIMUM, EQUAL = (
    "this run",
    "DMS, expected",
    "Corollary 1",
    "Theorem 2 as printed",
    "minimiser of the bound",
    "equal",
)

_DRAWS = 256  # random selections of DMS, whose mean estimates its expected weights
# Field of Terms → label and style.
_TERMS = {
    "X": ("X, gradient", plot_style.line_style("#D55E00", "--", "s")),
    "Y": ("Y, mini-batch", plot_style.line_style("#009E73", "-.", "^")),
    "Z": ("Z, data distribution", plot_style.line_style("#CC79A7", ":", "D")),
}
_WEIGHTS = {  # all but the equal weights
    RUN: plot_style.line_style("#009E73", "-", "^"),
    DMS: plot_style.line_style("#0072B2", "-", "o"),
    COROLLARY: plot_style.line_style("#56B4E9", "-", "v"),
    PRINTED: plot_style.line_style("#D55E00", "-", "s"),
    MINIMUM: plot_style.line_style("#CC79A7", "-", "D"),
}


class Items(NamedTuple):
    """After 1, 2, …, T' intervals of the run, each field of both ``[T']``."""

    terms: theory.Terms
    bound: theory.Bound


def items(run: Run) -> Items:
    """Theorem 1 after 1, 2, …, T' intervals, from w⁰."""
    known = constants_of(run)

    def found(rho: jax.Array, tau: jax.Array) -> Items:
        terms = theory.theorem1_terms(rho, tau, known)
        return Items(terms, theory.theorem1_bound(rho, tau, known))

    rho, tau = jnp.asarray(run.rho), jnp.asarray(run.tau)
    return jax.jit(lambda: theory.so_far(found, rho, tau))()


class Weights(NamedTuple):
    """Weights of every interval by name ``[T', N]``, and how their solvers ended."""

    rho: dict[str, np.ndarray]  # NaN where there are none
    bound: dict[str, np.ndarray]  # [T'] the interval's own bound
    converged: np.ndarray  # [T'] bool, Theorem 2's fixed point was found
    valid: np.ndarray  # [T'] bool, the bound of the interval is not void
    residual: np.ndarray  # [T'] KKT residual of the minimiser, inf where void


class _Interval(NamedTuple):
    """What one interval measured; of all intervals: a leading axis ``[T']``."""

    tau: Array  # [N]
    rho: Array  # [N] of the run
    smoothness: Array  # L
    grad_sq_norm: Array  # G²
    gradients: ClientGradients


def _affine_weights(
    one: _Interval, known: BoundConstants, lr: float, limit: float, keys: PRNGKey
) -> dict[str, Array]:
    """Weights of Corollary 1, and of DMS as the mean over its random selections."""
    present = one.tau > 0
    slope = dms.coupling(
        one.tau,
        lr=lr,
        smoothness=one.smoothness,
        grad_sq_norm=one.grad_sq_norm,
        grad_variance=jnp.sum(present / present.sum() * known.grad_variance),
    )

    def selected(key: PRNGKey) -> Array:
        kept = dms.select(key, one.tau)
        return dms.affine_weights(one.tau, kept, slope, limit)

    return {
        COROLLARY: dms.affine_weights(one.tau, present, slope, limit),
        DMS: jax.vmap(selected)(keys).mean(0),
    }


def _bounds_of(rhos: Array, tau: Array, known: BoundConstants, limit: float) -> Array:
    """Bound of each row of `rhos`, NaN where the minimiser may not choose it."""
    slack = 1e-5
    allowed = (rhos > -slack) & (rhos < limit / tau.shape[0] + slack)
    allowed = allowed.all(1) & (jnp.abs(rhos.sum(1) - 1) < slack)
    usable = jnp.where(allowed[:, None], rhos, 0.0)
    bounds = jax.vmap(lambda r: theory.theorem1_bound(r, tau, known).total)(usable)
    return jnp.where(allowed, bounds, jnp.nan)


def weights(run: Run) -> Weights:
    """All weights for the bound of each interval alone: T = 1, from w^t."""
    limit = min(run.weight_limit, run.tau.shape[1])
    keys = jax.random.split(rng.fold(rng.key(0), "theory report"), _DRAWS)

    def weights_of(one: _Interval) -> tuple[Array, ...]:
        tau, present = one.tau, one.tau > 0
        known = estimated(
            run.lr,
            run.weight_limit,
            one.smoothness,
            one.grad_sq_norm,
            one.gradients,
            present,
        )
        fixed = theorem2_weights(tau, known, present)
        total = fixed.rho.sum()
        found = bound_optimal_weights(tau, known, limit=limit)
        rhos = _affine_weights(one, known, run.lr, run.weight_limit, keys) | {
            RUN: one.rho,
            # As printed there is no multiplier, so the weights need not sum to 1.
            PRINTED: jnp.where(fixed.converged & (total > 0), fixed.rho, jnp.nan)
            / total,
            MINIMUM: jnp.where(found.valid, found.rho, jnp.nan),
            EQUAL: present / present.sum(),
        }
        rhos = jnp.stack([rhos[name] for name in NAMES])
        bounds = _bounds_of(rhos, tau, known, limit)
        bounds = jnp.where(found.limit_holds, bounds, jnp.nan)
        return rhos, bounds, fixed.converged, found.valid, found.kkt_residual

    gradients = ClientGradients(run.variance, run.dissimilarity, run.grad_square)
    measured = _Interval(run.tau, run.rho, run.smoothness, run.grad_sq_norm, gradients)
    measured = jax.tree.map(jnp.asarray, measured)
    rhos, bounds, *rest = jax.device_get(jax.jit(jax.vmap(weights_of))(measured))
    return Weights(
        {name: rhos[:, i] for i, name in enumerate(NAMES)},
        {name: bounds[:, i] for i, name in enumerate(NAMES)},
        *rest,
    )


def by_tau(run: Run, found: Weights) -> list[dict[str, str]]:
    """Mean weight in %, for each number of local iterations."""
    rows = []
    for tau in np.unique(run.tau[run.tau > 0]):
        there = run.tau == tau
        row = {"τ": f"{tau}", "times": f"{there.sum()}"}
        for name, rho in found.rho.items():
            known = rho[there][np.isfinite(rho[there])]
            row[name] = f"{100 * known.mean():.2f}" if known.size else "–"
        rows.append(row)
    return rows


def bound_row(found: Weights) -> dict[str, str]:
    """How far above the minimum the bound is, median over intervals, in %."""
    row = {"τ": "bound above its minimum", "times": f"{found.valid.sum()}"}
    least = found.bound[MINIMUM]
    there = found.valid & (least > 0)
    for name, bound in found.bound.items():
        excess = 100 * (bound[there] / least[there] - 1)
        excess = excess[np.isfinite(excess)]
        row[name] = f"{np.median(excess):+.2g} %" if excess.size else "–"
    return row


def _text(run: Run, found: Weights, bound: theory.Bound) -> str:
    """The paragraphs above the table."""
    known = constants_of(run)
    scalars = {
        "η": run.lr,
        "L": known.smoothness,
        "G²": known.grad_sq_norm,
        "θ": known.weight_limit,
        "‖w⁰ − w*‖²": known.distance,
        "mean σ_i²": known.grad_variance.mean(),
        "mean Γ_i": known.dissimilarity.mean(),
    }
    values = ", ".join(f"{n} = {float(value):.3g}" for n, value in scalars.items())
    total = len(run.interval)
    lines = [f"{run.about}. {values}."]
    lines += [f"Outside the theory: {'; '.join(run.notes)}."] if run.notes else []
    lines += [
        f"Theorem 1 from w⁰: W > 0 in {int((bound.W > 0).sum())} of {total} intervals, "
        f"Definition 1.3 holds in {int(bound.limit_holds.sum())}.",
        f"Interval by interval, from w^t: the bound is not void in {found.valid.sum()} "
        f"of {total}, the printed weights of Theorem 2 have a fixed point in "
        f"{found.converged.sum()}, the minimiser's largest KKT residual is "
        f"{_largest(found.residual):.1g}.",
        "Mean weight in % of the clients that did τ iterations:",
    ]
    return "\n\n".join(lines)


def _largest(values: np.ndarray) -> float:
    return float(np.max(values[np.isfinite(values)], initial=0.0))


def item_rows(run: Run, found: Items) -> list[dict[str, Any]]:
    """Terms and items after each interval, as in theory_items.csv."""
    columns = {"interval": run.interval}
    columns |= found.terms._asdict() | found.bound._asdict()
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


@plot_style.styled
def plot_theory(
    run: Run, after: Items, found: Weights, path: pathlib.Path
) -> list[pathlib.Path]:
    """Plot the terms of Theorem 1, and weights against τ, as PNG and PDF.

    Args:
      run: from `theory_run.read`.
      after: from `items`.
      found: from `weights`; shown is the mean over all clients with the same τ.
      path: without a suffix.
    """
    figure, (left, right) = plot_style.figure_of(3.0, ncols=2)
    _plot_terms(left, run, after)
    for name, style in _WEIGHTS.items():
        rho = found.rho[name]
        known = np.isfinite(rho) & (run.tau > 0)
        levels = np.unique(run.tau[known])
        mean = [100 * rho[known & (run.tau == level)].mean() for level in levels]
        look = style | {"label": name, "linewidth": 1.2, "markersize": 6}
        right.plot(levels, mean, **look)
    right.set_xlabel("local iterations τ")
    right.set_ylabel("mean weight ρ in %")
    right.xaxis.set_major_locator(plot_style.whole_numbers())
    right.legend(fontsize="x-small", handlelength=2)
    figure.suptitle(plot_style.title(run.about))
    return plot_style.save_both(figure, path)


def _plot_terms(axes: "matplotlib.axes.Axes", run: Run, after: Items) -> None:
    """Plot X, Y, Z, the distance and their bound, where it is not void."""
    void = ~(np.asarray(after.terms.W) > 0)
    distance = np.full(len(run.interval), float(constants_of(run).distance))
    blue = plot_style.line_style("#0072B2", "-", "o")
    curves = {"‖w⁰ − w*‖²": (distance, blue)}
    for name, (label, style) in _TERMS.items():
        curves[label] = (np.asarray(getattr(after.terms, name), float), style)
    total = np.where(void, np.nan, np.asarray(after.bound.total, float))
    curves["bound"] = (total, plot_style.line_style("#000000", (0, (5, 1)), "v"))
    for label, (values, style) in curves.items():
        values = np.where(values > 0, values, np.nan)  # a logarithmic axis
        plot_style.plot_line(axes, run.interval, values, style, label=label)
    if axes.lines:
        axes.set_yscale("log")
        axes.legend(fontsize="x-small", handlelength=3)
    if void.any():
        first = run.interval[void][0]
        axes.axvspan(first - 0.5, run.interval[-1] + 0.5, color="#EEEEEE", zorder=0)
        place = axes.get_xaxis_transform()
        axes.text(first, 0.02, "W ≤ 0: no bound", fontsize="small", transform=place)
    axes.set_ylabel("terms of Theorem 1")
    plot_style.interval_axis(axes, run.interval)


def write(
    workdir: pathlib.Path, out: pathlib.Path, weight_limit: float | None = None
) -> list[pathlib.Path]:
    """Write theory.md and .csv, theory_items.csv, theory.png and .pdf.

    Args:
      workdir: folder of the run.
      out: folder of the files.
      weight_limit: θ ≥ 1 of the comparison; None: the run's own, if it had one.
    """
    run = read(workdir)
    if weight_limit is not None:
        if not 1 <= weight_limit < np.inf:
            raise UserError(f"--weight_limit={weight_limit}: expected 1 ≤ θ < ∞")
        run = run._replace(weight_limit=weight_limit)
    out = files.prepare_workdir(out)
    found, after = weights(run), jax.device_get(items(run))
    rows = [*by_tau(run, found), bound_row(found)]
    paths = files.write_table(out, "theory", rows, _text(run, found, after.bound))
    items_path = out / "theory_items.csv"
    files.write_csv(items_path, item_rows(run, after))
    return [*paths, items_path, *plot_theory(run, after, found, out / "theory")]


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tsfl_jax.theory_report",
        description=str(__doc__).splitlines()[0],
    )
    parser.add_argument("workdir", type=pathlib.Path, help="folder of a finished run")
    parser.add_argument("--weight_limit", type=float, help="θ instead of the run's own")
    parser.add_argument("--out", type=pathlib.Path, help="where to write; the workdir")
    given = parser.parse_args(arguments)
    out = given.out or given.workdir
    for path in write(given.workdir, out, given.weight_limit):
        print(path)
    print((out / "theory.md").read_text())
