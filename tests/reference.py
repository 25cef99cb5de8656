"""A slow reference of one interval in plain Python and NumPy, float64.

Written from the paper and independent of the package: an MLP with its gradient by
hand, a loop over clients, a loop over steps. Only the random draws are shared, through
the same `jax.random` keys.
"""

import jax
import numpy as np


def order_of_pass(key, h, size, capacity):
    """Random order of 0..size−1 in pass h."""
    key = jax.random.fold_in(jax.random.fold_in(key, 0), h)
    scores = np.asarray(jax.random.uniform(key, (capacity,)))
    return np.argsort(scores[:size], kind="stable")


def loss_and_gradient(w, x, y):
    """Mean cross-entropy of a ReLU network with one hidden layer, and its gradient."""
    z = x @ w["w1"] + w["b1"]
    a = np.maximum(z, 0)
    logits = a @ w["w2"] + w["b2"]
    logits = logits - logits.max(axis=1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    n = len(y)
    losses = -np.log(p[np.arange(n), y])
    d = p.copy()
    d[np.arange(n), y] -= 1
    d /= n
    dz = (d @ w["w2"].T) * (z > 0)
    gradient = {
        "w1": x.T @ dz,
        "b1": dz.sum(0),
        "w2": a.T @ d,
        "b2": d.sum(0),
    }
    return losses.sum(), gradient


def local_training(w0, x, y, row, tau, size, key, hp, batch_size, iteration):
    """τ local iterations of SGD with momentum, proximal term and clipping."""
    w = {k: v.copy() for k, v in w0.items()}
    velocity = {k: np.zeros_like(v) for k, v in w0.items()}
    batches = -(-size // batch_size)
    steps = tau * batches if iteration == "pass" else tau
    total, count = 0.0, 0
    for k in range(steps):
        order = order_of_pass(key, k // batches, size, len(row))
        start = (k % batches) * batch_size
        chosen = row[order[start : min(start + batch_size, size)]]
        loss, g = loss_and_gradient(w, x[chosen], y[chosen])
        total, count = total + loss, count + len(chosen)
        g = {n: g[n] + hp["mu"] * (w[n] - w0[n]) for n in g}
        norm = np.sqrt(sum((v**2).sum() for v in g.values()))
        if norm > hp["clip_norm"]:
            g = {n: v * hp["clip_norm"] / norm for n, v in g.items()}
        for n in w:
            velocity[n] = hp["momentum"] * velocity[n] + g[n]
            w[n] = w[n] - hp["lr"] * velocity[n]
    return w, total, count


def project_simplex(v, upper):
    """Projection onto {ρ ≥ 0, Σρ = 1, ρ ≤ upper} by bisection of the level."""
    low, high = v.min() - 1.0, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        if np.clip(v - middle, 0, upper).sum() > 1:
            low = middle
        else:
            high = middle
    return np.clip(v - high, 0, upper)


def dms(key, ids, tau, hp):
    """Algorithm 1 with given constants; returns weights and selection."""
    n, most, mean = len(tau), tau.max(), tau.mean()
    chosen = []
    for i in range(n):
        drop = (mean - tau[i]) / most if tau[i] < mean else 0.0
        draw = float(jax.random.uniform(jax.random.fold_in(key, int(ids[i]))))
        chosen.append(bool(draw >= drop and tau[i] > 0))
    chosen = np.array(chosen)
    rho = np.zeros(n)
    if chosen.any():
        c = hp["lr"] * hp["smoothness"] * (most - 1) * hp["grad_sq_norm"]
        c /= 2 * n * hp["grad_variance"]
        upper = min(1.0, hp["weight_limit"] / n)
        part = tau[chosen].astype(float)
        if chosen.sum() * upper <= 1:
            rho[chosen] = 1 / chosen.sum()
        else:
            affine = 1 / len(part) + c * (part - part.mean())
            rho[chosen] = project_simplex(affine, upper)
    return rho, chosen


def interval(w, x, y, rows, ids, tau, size, key, t, hp, algorithm, batch_size, unit):
    """One interval of T-SFL; returns the new model and what was seen on the way."""

    def stream(purpose):
        return jax.random.fold_in(jax.random.fold_in(key, purpose), t)

    share = tau > 0
    if algorithm == "dms":
        rho, selected = dms(stream(2), ids, tau, hp)
    else:
        raw = share * (1.0 if algorithm == "fedasync" else size)
        rho, selected = raw / raw.sum() if raw.sum() else raw * 1.0, share
    local_hp = dict(hp, mu=hp["mu"] if algorithm == "fedprox" else 0.0)
    models, loss, count = [], 0.0, 0
    for i in range(len(tau)):
        client_key = jax.random.fold_in(stream(0), int(ids[i]))
        model, total, samples = local_training(
            w, x, y, rows[i], tau[i], size[i], client_key, local_hp, batch_size, unit
        )
        models.append(model)
        loss, count = loss + total, count + samples
    new = {k: v.copy() for k, v in w.items()}
    if rho.sum() > 0:
        new = {k: sum(r * m[k] for r, m in zip(rho, models, strict=True)) for k in w}
        if algorithm == "fedasync":
            new = {k: hp["gamma"] * w[k] + (1 - hp["gamma"]) * new[k] for k in w}
    return new, rho, selected, loss / max(count, 1)
