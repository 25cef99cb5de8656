"""``python -m benchmarks.smoothness``: estimates of L against Lanczos iteration.

The largest |eigenvalue| of the Hessian of each client's F_i at w^t, by
`scipy.sparse.linalg.eigsh` with Hessian-vector products over all of the client's
samples, and what every ``constants.estimator`` says there: mean and standard deviation
of its ratio to the largest of the estimated clients, for w⁰ and models after intervals
of FedAvg. ``--set data.name=idx data.dir=FOLDER model.name=mnist_cnn …`` measures
another experiment than that of the digits.
"""

import argparse
import dataclasses
import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from scipy.sparse import linalg

import tsfl_jax
from benchmarks import common
from tsfl_jax.config import SETTINGS
from tsfl_jax.engine import client as local
from tsfl_jax.engine import estimates
from tsfl_jax.engine.program_spec import Estimates, Parts, ProgramSpec
from tsfl_jax.prepare import backend, prepare
from tsfl_jax.run import grid, initial_estimates, lanes

_PILOT = ("bounds", initial_estimates.DRAWS)


def largest_curvatures(model, variables, problem, sizes) -> np.ndarray:
    """Largest |eigenvalue| of every client's Hessian, to 1 %."""
    flat, unravel = jax.flatten_util.ravel_pytree(variables["params"])

    def gradient(flat, rows):
        drawn = local.batch_of(
            problem.samples, rows, jnp.ones(rows.shape, bool), jax.random.key(0)
        )
        here = {**variables, "params": unravel(flat)}
        return jax.flatten_util.ravel_pytree(
            local.batch_gradient(model, here, drawn)[1]
        )[0]

    @jax.jit
    def product(rows, vector):
        # Reverse over reverse: some layers have no forward mode.
        return jax.grad(lambda w: jnp.vdot(gradient(w, rows), vector))(flat)

    found = []
    for rows, size in zip(np.asarray(problem.rows), sizes, strict=True):
        of_client = functools.partial(product, jnp.asarray(rows[:size]))
        operator = linalg.LinearOperator(
            (flat.size, flat.size),
            matvec=lambda v, f=of_client: np.asarray(f(jnp.asarray(v, jnp.float32))),
            dtype=np.float32,
        )
        start = np.random.default_rng(0).standard_normal(flat.size)
        top = linalg.eigsh(
            operator, 1, which="LM", tol=0.01, v0=start, return_eigenvectors=False
        )
        found.append(abs(float(top[0])))
    return np.array(found)


def estimated(prepared, variables, problem, repeats: int) -> dict[str, np.ndarray]:
    """L, G² and σ² by estimator, ``[repeats]`` each; the last is the initial one."""
    clients = initial_estimates.clients_of(prepared)
    keys = jax.random.split(jax.random.key(1), repeats)
    found = {}
    for method, draws in [
        (m, 1) for m in SETTINGS["constants.estimator"][1].choices
    ] + [_PILOT]:
        spec = ProgramSpec(
            prepared.config.batch_size, 1, estimates=Estimates(method=method)
        )
        parts = Parts(
            prepared.network.model, (prepared.rule,), prepared.optimizer, spec
        )

        def one(key, parts=parts, draws=draws):
            return estimates.estimate_constants(
                parts, variables, key, clients, problem.samples, prepared.hparams, draws
            )

        name = f"{method}, mean of {draws} per client" if draws > 1 else method
        found[name] = jax.device_get(jax.jit(lambda k, f=one: jax.lax.map(f, k))(keys))
    return found


def rows_of(config: tsfl_jax.Config, after: list[int], repeats: int) -> list[dict]:
    """A row for each model and estimator."""
    prepared = prepare.prepare(config)
    mesh = backend.start_jax(prepared.config)
    _, arrays = lanes.single(prepared, mesh, estimates=False)
    start, _, _, problem, _ = lanes.arguments_of_run(arrays, 1)
    rows = []
    for intervals in after:
        variables = start.params
        if intervals:
            trained = dataclasses.replace(config, num_intervals=intervals)
            variables = tsfl_jax.simulate(trained, verbose=True).params
        exact = largest_curvatures(
            prepared.network.model,
            variables,
            problem,
            prepared.partition.capacity,
        )
        for method, found in estimated(prepared, variables, problem, repeats).items():
            ratio = found.smoothness / exact.max()
            rows.append(
                {
                    "after intervals": intervals,
                    "max L_i (Lanczos)": f"{exact.max():.2f}",
                    "mean L_i": f"{exact.mean():.2f}",
                    "constants.estimator": method,
                    "estimated / max L_i": f"{ratio.mean():.2f} ± {ratio.std():.2f}",
                    "G²": f"{found.grad_sq_norm.mean():.3g}",
                    "σ²": f"{found.grad_variance.mean():.3g}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--after", nargs="+", type=int, default=[0, 5, 30])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    config = tsfl_jax.Config(algorithm="fedavg", num_intervals=1)
    config.schedule.kind, config.schedule.tau = "explicit", (2,)
    config.schedule.data_size, config.batch_size = 64, 16
    config = grid.changed(config, grid.parse_settings(options.set))
    print(common.machine())
    common.show(rows_of(config, options.after, options.repeats))


if __name__ == "__main__":
    main()
