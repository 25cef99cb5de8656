"""``python -m tsfl_jax.theory_report WORKDIR``: what the theory says of a finished run.

From the files of a run that measured its clients (``--config.measure_clients=true``):
the four items of Theorem 1's bound after every interval, and the weights that the run
used beside those of Corollary 1, of Theorem 2 as printed and of the true minimiser.

Γ_i and ‖w⁰ − w*‖² are what gradients let one say, see `client_gradients`.
"""

import argparse
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import command, dms, report, rng, theory, theory_plots
from tsfl_jax.bound_minimum import bound_optimal_weights
from tsfl_jax.fixed_point import theorem2_weights
from tsfl_jax.theory import estimated
from tsfl_jax.theory_run import Run, constants_of, read
from tsfl_jax.types import ClientGradients, UserError

# Weights that are compared: label in tables and figures.
NAMES = RUN, DMS, COROLLARY, PRINTED, MINIMUM, EQUAL = (
    "this run",
    "DMS, expected",
    "Corollary 1",
    "Theorem 2 as printed",
    "minimiser of the bound",
    "equal",
)

_DRAWS = 256  # of DMS's selection, for its expectation


class Items(NamedTuple):
    """After 1, 2, …, T' intervals of the run, each field of both ``[T']``."""

    terms: theory.Terms
    bound: theory.Bound


def items(run: Run) -> Items:
    """Theorem 1 after 1, 2, …, T' intervals, from w⁰."""
    known = constants_of(run)

    def found(rho, tau):
        terms = theory.theorem1_terms(rho, tau, known)
        return Items(terms, theory.theorem1_bound(rho, tau, known))

    rho, tau = jnp.asarray(run.rho), jnp.asarray(run.tau)
    return jax.jit(lambda: theory.so_far(found, rho, tau))()


class Weights(NamedTuple):
    """Weights of every interval by name ``[T', N]``, and what became of them."""

    rho: dict[str, np.ndarray]  # NaN where there are none
    bound: dict[str, np.ndarray]  # [T'] the interval's own bound
    converged: np.ndarray  # [T'] bool, Theorem 2's fixed point was found
    valid: np.ndarray  # [T'] bool, the bound of the interval is not void
    residual: np.ndarray  # [T'] KKT residual of the minimiser, inf where void


def weights(run: Run) -> Weights:
    """All weights for the bound of each interval alone: T = 1, from w^t."""
    limit = min(run.weight_limit, run.tau.shape[1])
    keys = jax.random.split(rng.fold(rng.key(0), "theory report"), _DRAWS)

    def one(tau, rho, L, square_norm, square, variance, dissimilarity):
        present = tau > 0
        measured = ClientGradients(variance, dissimilarity, square)
        known = estimated(run.lr, run.weight_limit, L, square_norm, measured, present)
        share = present / present.sum()
        slope = dms.coupling(
            tau,
            lr=run.lr,
            smoothness=L,
            grad_sq_norm=square_norm,
            grad_variance=jnp.sum(share * known.grad_variance),
        )
        fixed = theorem2_weights(tau, known, present)
        total = fixed.rho.sum()
        found = bound_optimal_weights(tau, known, limit=limit)

        def drawn(key):
            kept = dms.select(key, tau)
            return dms.affine_weights(tau, kept, slope, run.weight_limit)

        rhos = {  # in the order of a table's columns
            RUN: rho,
            COROLLARY: dms.affine_weights(tau, present, slope, run.weight_limit),
            DMS: jax.vmap(drawn)(keys).mean(0),
            # No multiplier in the print, so its weights need not sum to 1.
            PRINTED: jnp.where(fixed.converged & (total > 0), fixed.rho, jnp.nan)
            / total,
            MINIMUM: jnp.where(found.valid, found.rho, jnp.nan),
            EQUAL: share,
        }
        rhos = jnp.stack([rhos[name] for name in NAMES])
        # Only weights that the minimiser might have chosen can be compared with it.
        slack = 1e-5
        allowed = (rhos > -slack) & (rhos < limit / tau.shape[0] + slack)
        allowed = allowed.all(1) & (jnp.abs(rhos.sum(1) - 1) < slack)
        usable = jnp.where(allowed[:, None], rhos, 0.0)
        bounds = jax.vmap(lambda r: theory.theorem1_bound(r, tau, known).total)(usable)
        bounds = jnp.where(allowed & found.limit_holds, bounds, jnp.nan)
        return rhos, bounds, fixed.converged, found.valid, found.kkt_residual

    columns = [run.tau, run.rho, run.smoothness, run.grad_sq_norm, run.grad_square]
    columns += [run.variance, run.dissimilarity]
    rhos, bounds, *rest = jax.device_get(
        jax.jit(jax.vmap(one))(*map(jnp.asarray, columns))
    )
    return Weights(
        {name: rhos[:, i] for i, name in enumerate(NAMES)},
        {name: bounds[:, i] for i, name in enumerate(NAMES)},
        *rest,
    )


def by_tau(run: Run, found: Weights) -> list[dict[str, str]]:
    """Mean weight of the clients that did so many iterations, in %."""
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
    """What stands above the table."""
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
    columns = found.terms._asdict() | found.bound._asdict()
    columns = {"interval": run.interval} | columns
    return [
        {name: values[t].item() for name, values in columns.items()}
        for t in range(len(run.interval))
    ]


def write(
    workdir: pathlib.Path, out: pathlib.Path, weight_limit: float | None = None
) -> list[pathlib.Path]:
    """Writes theory.md and .csv, theory_items.csv, theory.png and .pdf.

    Args:
      workdir: folder of the run.
      out: where to.
      weight_limit: θ ≥ 1 to judge by; None: the run's own, if it had one.
    """
    run = read(workdir)
    if weight_limit is not None:
        if not 1 <= weight_limit < np.inf:
            raise UserError(f"--weight_limit={weight_limit}: expected 1 ≤ θ < ∞")
        run = run._replace(weight_limit=weight_limit)
    out = report.prepare_workdir(out)
    found, after = weights(run), jax.device_get(items(run))
    rows = [*by_tau(run, found), bound_row(found)]
    paths = report.write_table(out, "theory", rows, _text(run, found, after.bound))
    items_path = out / "theory_items.csv"
    report.write_csv(items_path, item_rows(run, after))
    distance = float(constants_of(run).distance)
    curves = {name: (run.tau, rho) for name, rho in found.rho.items() if name != EQUAL}
    return [
        *paths,
        items_path,
        *theory_plots.draw(
            run.interval, *after, distance, curves, out / "theory", run.about
        ),
    ]


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tsfl_jax.theory_report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("workdir", type=pathlib.Path, help="folder of a finished run")
    parser.add_argument("--weight_limit", type=float, help="θ instead of the run's own")
    parser.add_argument("--out", type=pathlib.Path, help="where to write; the workdir")
    given = parser.parse_args(arguments)
    out = given.out or given.workdir
    for path in write(given.workdir, out, given.weight_limit):
        print(path)
    print((out / "theory.md").read_text())


if __name__ == "__main__":
    command.run("theory_report", main)
