"""``python -m studies.theory WORKDIR``: a run compared with the theory.

From the files of a run that measured its clients (``--config.measure_clients=true``):
the four items of Theorem 1's bound after every interval, and the weights that the run
used beside those of Corollary 1, of Theorem 2 as printed and of the bound's minimizer.

Γ_i and ‖w⁰ − w*‖² are estimated from gradients, see `engine.estimates`.
"""

import pathlib
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from studies import arguments, study
from tsfl_jax import rng
from tsfl_jax.report import files
from tsfl_jax.report import style as plot_style
from tsfl_jax.rules import dms
from tsfl_jax.theory import bounds as theory
from tsfl_jax.theory.bounds import BoundConstants, estimated, tightest_limit
from tsfl_jax.theory.fixed_point import theorem2_weights
from tsfl_jax.theory.minimum import bound_optimal_weights
from tsfl_jax.types import ClientGradients, PRNGKey, UserError

if TYPE_CHECKING:
    import matplotlib.axes

MEASURES = "bound_optimal"  # a rule that always measures its clients
WEIGHTED_MEANS = ("dms", MEASURES, "fedavg", "fedprox")

# Weights that are compared: label in tables and figures.
NAMES = RUN, DMS, COROLLARY, PRINTED, MINIMUM, EQUAL = (
    "this run",
    "DMS, expected",
    "Corollary 1",
    "Theorem 2 as printed",
    "minimizer of the bound",
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


class Run(NamedTuple):
    """The T intervals of a finished run with active clients and finite gradients."""

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


def read_run(workdir: pathlib.Path) -> Run:
    """Read the run of a folder.

    Raises:
      UserError: no finished run there, or it has not measured its clients.
    """
    try:
        return _read_run(workdir)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{workdir}: its files are damaged ({type(error).__name__}: {error}); "
            "repeat the run"
        ) from error


def _read_run(workdir: pathlib.Path) -> Run:
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
        name: np.array([row[name] for row in rows], float)  # None becomes NaN
        for name in ("grad_square", "grad_sq_norm", "smoothness")
    }
    used = _usable(clients, measured)
    if not used.any():
        raise UserError(
            f"{workdir}: no interval with active clients and finite gradients, L > 0"
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
    """Which intervals had active clients, finite measurements and L > 0."""
    present = clients["tau"] > 0
    used = np.all([np.isfinite(values) for values in measured.values()], axis=0)
    used &= (measured["smoothness"] > 0) & present.any(axis=1)
    for name in ("variance", "dissimilarity"):
        used &= (np.isfinite(clients[name]) | ~present).all(axis=1)
    return used


def _notes(settings: dict) -> tuple[str, ...]:
    """List the settings that the theorems do not cover."""
    found = []
    schedule = settings.get("lr_schedule", "constant")  # earlier versions had none
    if schedule != "constant":
        found.append(
            f"a learning rate that varies, {schedule}; the terms are of "
            f"η = {settings['lr']} in all intervals"
        )
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


class Items(NamedTuple):
    """After 1, 2, …, T intervals of the run, each field of both ``[T]``."""

    terms: theory.Terms
    bound: theory.Bound


def items(run: Run) -> Items:
    """Theorem 1 after 1, 2, …, T intervals, from w⁰."""
    known = constants_of(run)

    def found(rho: Array, tau: Array) -> Items:
        terms = theory.theorem1_terms(rho, tau, known)
        return Items(terms, theory.theorem1_bound(rho, tau, known))

    rho, tau = jnp.asarray(run.rho), jnp.asarray(run.tau)
    return jax.jit(lambda: study.so_far(found, rho, tau))()


class Weights(NamedTuple):
    """Weights of every interval by name, and how their solvers ended."""

    rho: dict[str, Float[np.ndarray, "T N"]]  # NaN where there are none
    bound: dict[str, Float[np.ndarray, "T"]]  # of each interval alone
    converged: Bool[np.ndarray, "T"]  # Theorem 2's fixed point was found
    valid: Bool[np.ndarray, "T"]  # the bound of the interval is not void
    residual: Float[np.ndarray, "T"]  # KKT residual of the minimizer, inf where void


class _Interval(NamedTuple):
    """What one interval measured; of all intervals: a leading axis T."""

    tau: Int[Array, "N"]
    rho: Float[Array, "N"]  # of the run
    smoothness: Float[Array, ""]  # L
    grad_sq_norm: Float[Array, ""]  # G²
    gradients: ClientGradients


def _affine_weights(
    one: _Interval, known: BoundConstants, lr: float, limit: float, keys: PRNGKey
) -> dict[str, Float[Array, "N"]]:
    """Weights of Corollary 1, and of DMS as the mean over its random selections."""
    present = one.tau > 0
    slope = dms.coupling(
        one.tau,
        lr=lr,
        smoothness=one.smoothness,
        grad_sq_norm=one.grad_sq_norm,
        grad_variance=jnp.sum(
            present / present.sum() * jnp.asarray(known.grad_variance)
        ),
    )

    def selected(key: PRNGKey) -> Float[Array, "N"]:
        kept = dms.select(key, one.tau)
        return dms.affine_weights(one.tau, kept, slope, limit)

    return {
        COROLLARY: dms.affine_weights(one.tau, present, slope, limit),
        DMS: jax.vmap(selected)(keys).mean(0),
    }


def _bounds_of(
    rhos: Float[Array, "W N"], tau: Int[Array, "N"], known: BoundConstants, limit: float
) -> Float[Array, "W"]:
    """Bound of each row of `rhos`, NaN where the minimizer may not choose it."""
    slack = 1e-5
    allowed = (rhos > -slack) & (rhos < limit / tau.shape[0] + slack)
    allowed = allowed.all(1) & (jnp.abs(rhos.sum(1) - 1) < slack)
    usable = jnp.where(allowed[:, None], rhos, 0.0)
    bounds = jax.vmap(lambda r: theory.theorem1_bound(r, tau, known).total)(usable)
    return jnp.where(allowed, bounds, jnp.nan)


def weights(run: Run) -> Weights:
    """All weights for the bound of each interval alone: T = 1, from w^t."""
    limit = float(min(run.weight_limit, run.tau.shape[1]))
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
    arrays = (run.tau, run.rho, run.smoothness, run.grad_sq_norm, gradients)
    measured = _Interval(*jax.tree.map(jnp.asarray, arrays))
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
        "mean σ_i²": known.grad_variance,
        "mean Γ_i": known.dissimilarity,
    }
    values = ", ".join(f"{n} = {np.mean(value):.3g}" for n, value in scalars.items())
    total, finite = len(run.interval), found.residual[np.isfinite(found.residual)]
    lines = [f"{run.about}. {values}."]
    lines += [f"Outside the theory: {'; '.join(run.notes)}."] if run.notes else []
    lines += [
        f"Theorem 1 from w⁰: W > 0 in {int((bound.W > 0).sum())} of {total} intervals, "
        f"Definition 1.3 holds in {int(bound.limit_holds.sum())}.",
        f"Interval by interval, from w^t: the bound is not void in {found.valid.sum()} "
        f"of {total}, the printed weights of Theorem 2 have a fixed point in "
        f"{found.converged.sum()}, the minimizer's largest KKT residual is "
        f"{np.max(finite, initial=0.0):.1g}.",
        "Mean weight in % of the clients that did τ iterations:",
    ]
    return "\n\n".join(lines)


def item_rows(run: Run, found: Items) -> list[dict[str, Any]]:
    """Terms and items after each interval, as in theory_items.csv."""
    columns = {"interval": run.interval}
    columns |= found.terms._asdict() | found.bound._asdict()
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


# Legends stand below their axes, outside of the data.
_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
_BELOW |= {"ncols": 2, "fontsize": "x-small", "handlelength": 3}


@plot_style.styled
def plot_theory(
    run: Run, after: Items, found: Weights, path: pathlib.Path
) -> list[pathlib.Path]:
    """Plot the terms of Theorem 1, and weights against τ, as PNG and PDF.

    Args:
      run: from `read_run`.
      after: from `items`.
      found: from `weights`; shown is the mean over all clients with the same τ.
      path: without a suffix.
    """
    figure, (left, right) = plot_style.figure_of(3.6, ncols=2)
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
    right.legend(**_BELOW)
    figure.suptitle(plot_style.title(run.about))
    return plot_style.save_both(figure, path)


def _plot_terms(axes: "matplotlib.axes.Axes", run: Run, after: Items) -> None:
    """Plot X, Y, Z, the distance and their bound, where it is not void."""
    void = ~(np.asarray(after.terms.W) > 0)
    distance = np.full(len(run.interval), constants_of(run).distance, float)
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
        axes.legend(**_BELOW)
    if void.any():
        first = run.interval[void][0]
        axes.axvspan(first - 0.5, run.interval[-1] + 0.5, color="#EEEEEE", zorder=0)
        where = axes.get_xaxis_transform()
        axes.text(first, 0.02, "W ≤ 0: no bound", fontsize="small", transform=where)
    axes.set_ylabel("terms of Theorem 1")
    plot_style.interval_axis(axes, run.interval)


def write_theory(
    workdir: pathlib.Path, out: pathlib.Path, weight_limit: float | None = None
) -> list[pathlib.Path]:
    """Write theory.md and .csv, theory_items.csv, theory.png and .pdf.

    Args:
      workdir: folder of the run.
      out: folder of the files.
      weight_limit: θ ≥ 1 of the comparison; None: the run's own, if it had one.
    """
    run = read_run(workdir)
    if weight_limit is not None:
        if not 1 <= weight_limit < np.inf:
            raise UserError(f"--weight_limit={weight_limit}: expected 1 ≤ θ < ∞")
        run = run._replace(weight_limit=weight_limit)
    out = files.prepare_workdir(out, "--out")
    found, after = weights(run), jax.device_get(items(run))
    rows = [*by_tau(run, found), bound_row(found)]
    paths = files.write_table(out, "theory", rows, _text(run, found, after.bound))
    items_path = out / "theory_items.csv"
    files.write_csv(items_path, item_rows(run, after))
    return [*paths, items_path, *plot_theory(run, after, found, out / "theory")]


def main(texts: list[str]) -> None:
    """Write the files and print the table."""
    parser = arguments.make_parser("theory", __doc__, None)
    parser.add_argument("workdir", type=pathlib.Path, help="folder of a finished run")
    parser.add_argument("--weight_limit", type=float, help="θ instead of the run's own")
    parser.set_defaults(out=None)
    given = parser.parse_args(texts)
    out = given.out or given.workdir
    for path in write_theory(given.workdir, out, given.weight_limit):
        print(path)
    print((files.folder_of(out) / "theory.md").read_text())


if __name__ == "__main__":
    arguments.start("theory", main)
