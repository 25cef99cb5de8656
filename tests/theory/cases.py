"""What the tests of the theory share."""

import jax
import numpy as np

from tsfl_jax.theory.bounds import BoundConstants

DTYPES = (np.float32, np.float64)


def precision(dtype):
    """A context in which JAX computes in this dtype."""
    return jax.enable_x64(dtype == np.float64)


def cast(known, dtype):
    """Constants in this dtype."""
    return BoundConstants(*(np.asarray(x, dtype) for x in known))


def constants(n, default, **changes):
    """Constants of n clients; a number or a short list stands for all of them."""
    values = default | changes
    for name in ("grad_variance", "dissimilarity"):
        values[name] = np.resize(np.float64(values[name]), n)
    return BoundConstants(**values)


def averaged(gradients, rho, tau, w, lr):
    """w^T of T-SFL with exact gradients."""
    for shares, works in zip(rho, tau, strict=True):
        local = []
        for gradient, steps in zip(gradients, works, strict=True):
            x = w
            for _ in range(steps):
                x = x - lr * gradient(x)
            local.append(x)
        w = sum(r * x for r, x in zip(shares, local, strict=True))
    return w


def by_loops(rho, tau, known, repaired=False):
    """X, Y, Z, W of equation (3), client by client, in Python's numbers."""
    eta, L, G2, theta = map(float, known[:4])
    N, H = np.shape(tau)[1], int(np.max(tau))
    X = Y = Z = S = 0.0
    for t, i in np.ndindex(*np.shape(tau)):
        steps = sum(h < tau[t][i] for h in range(H))  # Σ_h α
        X += eta**3 * L * (H - 1) * G2 * rho[t][i] * steps * float(tau[t][i])
        Y += eta**2 * N * steps * rho[t][i] ** 2 * float(known.grad_variance[i])
        Z += rho[t][i] * steps * float(known.dissimilarity[i])
        S += rho[t][i] * steps
    drift = 2 * eta * L * (eta * L * (1 + theta) - 1)
    return X, Y, (drift + (1 if repaired else eta**2)) * Z, 1 - drift * S


def random_constants(rng, n, highest, clients=None):
    """ηL(1+θ) between 1 and `highest`; σ_i and Γ_i of so many clients, repeated."""
    lr, L = 10 ** rng.uniform(-2, -0.5), 10 ** rng.uniform(-1, 0.5)
    clients = clients or n
    return BoundConstants(
        lr=lr,
        smoothness=L,
        grad_sq_norm=rng.uniform(0, 4),
        weight_limit=max(1.0, rng.uniform(1, highest) / (lr * L) - 1 + 1e-9),
        distance=rng.uniform(0, 1),
        grad_variance=np.resize(rng.uniform(0.2, 2, clients), n),
        dissimilarity=np.resize(rng.uniform(0, 1, clients), n),
    )
