"""A slow reference of one interval in plain Python and NumPy, float64.

Written from the paper and independent of the package: an MLP with its gradient by
hand, a loop over clients, a loop over steps. Only the random draws are shared, through
the same `jax.random` keys.
"""

import jax
import numpy as np

from tsfl_jax import rng


def order_of_pass(key, h, size, capacity):
    """Random order of 0..size−1 in pass h."""
    key = jax.random.fold_in(rng.fold(key, "sample order"), h)
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
    gradient = {"w1": x.T @ dz, "b1": dz.sum(0), "w2": a.T @ d, "b2": d.sum(0)}
    return losses.sum(), gradient


def local_training(
    w0, x, y, row, tau, size, key, hp, batch_size, unit, correction=None, gradient=None
):
    """τ local iterations of SGD with momentum, proximal term and clipping."""
    w = {k: v.copy() for k, v in w0.items()}
    velocity = {k: np.zeros_like(v) for k, v in w0.items()}
    batches = -(-size // batch_size)
    steps = tau * batches if unit == "pass" else tau
    gradient = gradient or loss_and_gradient
    total, count = 0.0, 0
    for k in range(steps):
        order = order_of_pass(key, k // batches, size, len(row))
        start = (k % batches) * batch_size
        chosen = row[order[start : min(start + batch_size, size)]]
        loss, g = gradient(w, x[chosen], y[chosen])
        total, count = total + loss, count + len(chosen)
        g = {n: g[n] + hp["mu"] * (w[n] - w0[n]) for n in g}
        if correction is not None:
            g = {n: g[n] + correction[n] for n in g}
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
        upper = min(1.0, hp["dms__weight_limit"] / n)
        part = tau[chosen].astype(float)
        if chosen.sum() * upper <= 1:
            rho[chosen] = 1 / chosen.sum()
        else:
            affine = 1 / len(part) + c * (part - part.mean())
            rho[chosen] = project_simplex(affine, upper)
    return rho, chosen


def interval(
    w, x, y, rows, ids, tau, size, key, t, hp, name, batch_size, unit, gradient=None
):
    """One interval of T-SFL; returns the new model and what was seen on the way."""

    def stream(purpose):
        return jax.random.fold_in(rng.fold(key, purpose), t)

    share = tau > 0
    if name == "dms":
        rho, selected = dms(stream("rule"), ids, tau, hp)
    else:
        raw = share * (1.0 if name == "fedasync" else size)
        rho, selected = raw / raw.sum() if raw.sum() else raw * 1.0, share
    local_hp = dict(hp, mu=hp["mu"] if name == "fedprox" else 0.0)
    trained = []
    for i, client in enumerate(ids):
        client_key = jax.random.fold_in(stream("training"), int(client))
        work = tau[i], size[i], client_key, local_hp, batch_size, unit
        trained.append(local_training(w, x, y, rows[i], *work, gradient=gradient))
    models, losses, counts = zip(*trained, strict=True)
    new = w
    if rho.sum() > 0:
        new = {k: sum(r * m[k] for r, m in zip(rho, models, strict=True)) for k in w}
        if name == "fedasync":
            gamma = hp["fedasync__gamma"]
            new = {k: gamma * w[k] + (1 - gamma) * new[k] for k in w}
    return new, rho, selected, sum(losses) / max(sum(counts), 1)


def vector(w):
    """All parameters in one row, by name."""
    return np.concatenate([w[n].ravel() for n in sorted(w)])


def unvector(flat, like):
    """What `vector` made a row of."""
    found, at = {}, 0
    for n in sorted(like):
        found[n] = flat[at : at + like[n].size].reshape(like[n].shape)
        at += like[n].size
    return found


def staleness(lag, hp):
    """s(lag) of one delivery."""
    a, b = hp["staleness__a"], hp["staleness__b"]
    kind = int(hp["staleness__kind"])
    if kind == 0:
        return 1.0
    if kind == 1:
        return (lag + 1.0) ** -a
    if kind == 2:
        return 1.0 if lag <= b else 1 / (a * (lag - b) + 1)
    return (np.e / 2) ** -lag


def times_counted(steps, momentum, alpha=0.0):
    """How often gradients count in an update of SGD with heavy-ball momentum.

    `alpha` is η times the coefficient of a proximal term.
    """
    total, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - alpha * total
        total += velocity
    return total


def krum_order(rows, trim):
    """Rows by their sums of squared distances, and how many Multi-Krum takes."""
    n = len(rows)
    left_out = min(int(np.floor(trim * n + 1e-9)), (n - 1) // 2)
    near = max(n - left_out - 2, 1)
    sums = []
    for i in range(n):
        others = [((rows[i] - rows[j]) ** 2).sum() for j in range(n) if j != i]
        sums.append((sum(sorted(others)[:near]), i))
    return [i for _, i in sorted(sums)], min(near, n)


def robust_mean(name, rows, trim, smoothing=1e-6):
    """One row of several, ``[n, D]``."""
    n = len(rows)
    if name == "median":
        return np.median(rows, axis=0)
    if name == "trimmed_mean":
        left_out = min(int(np.floor(trim * n + 1e-9)), (n - 1) // 2)
        return np.sort(rows, axis=0)[left_out : n - left_out].mean(axis=0)
    if name == "geometric_median":
        w = rows.mean(axis=0)
        for _ in range(8):
            near = [1 / max(np.sqrt(((w - r) ** 2).sum()), smoothing) for r in rows]
            w = sum(b * r for b, r in zip(near, rows, strict=True)) / sum(near)
        return w
    if name == "geometric_mean":
        s = np.median(np.abs(rows), axis=0)
        logs = np.sign(rows) * np.log1p(np.abs(rows) / np.where(s > 0, s, 1))
        g = logs.mean(axis=0)
        return np.sign(g) * np.expm1(np.abs(g)) * s
    order, count = krum_order(rows, trim)
    return rows[order[: 1 if name == "krum" else count]].mean(axis=0)


def serve(name, w, starts, ends, share, lags, steps, who, sent, group, server, hp):
    """w^{t+1} of those who deliver, by the papers' formulas, as rows of numbers.

    `starts` and `ends` are the models that they began with and have made, `share` is
    |D_i|, `sent` the c of their downloads, `server` a dict that lasts. All are float64
    rows ``[D]``.
    """
    n = len(ends)
    late = np.array([staleness(lag, hp) for lag in lags])
    delta = [e - s for e, s in zip(ends, starts, strict=True)]
    p = share * late / (share * late).sum()
    if name in ("fedavg", "fedprox"):
        return sum(a * e for a, e in zip(p, ends, strict=True))
    if name == "fedasync":
        moved = sum(a / n * (e - w) for a, e in zip(late, ends, strict=True))
        return w + (1 - hp["fedasync__gamma"]) * moved
    if name == "fedbuff":
        moved = sum(a / n * d for a, d in zip(late, delta, strict=True))
        return w + hp["server__lr"] * moved
    if name == "aso_fed":
        delays = server.setdefault("delays", [[] for _ in server["size"]])
        moved = 0.0
        for i, size, lag in zip(who, share, lags, strict=True):
            delays[i].append(1 + lag)
            server["size"][i] = size
        for i, size, d in zip(who, share, delta, strict=True):
            longer = max(1.0, np.log(np.mean(delays[i])))
            moved = moved + longer * size / server["size"].sum() * d
        return w + hp["server__lr"] * moved
    if name == "safa":
        cache = server.setdefault("cache", [server["first"]] * len(server["size"]))
        age = server.setdefault("age", [0] * len(cache))
        for i in range(len(cache)):
            age[i] += 1
        for i, end in zip(who, ends, strict=True):
            cache[i], age[i] = end, 0
        for i in range(len(cache)):
            if age[i] > hp["safa__lag"]:
                cache[i], age[i] = w, 0
        part = server["size"] / server["size"].sum()
        return sum(a * v for a, v in zip(part, cache, strict=True))
    if name == "secure_buffer":  # but for its rounding
        moved = sum(a * d for a, d in zip(late / late.sum(), delta, strict=True))
        return w + hp["server__lr"] * moved
    if name == "fedat":
        models, counts = server["models"], server["counts"]
        models[group] = sum(a * e for a, e in zip(p, ends, strict=True))
        counts[group] += 1
        M, total = len(models), sum(counts)
        return sum(counts[M - 1 - m] / total * models[m] for m in range(M))
    if name == "fednova":
        p = share / share.sum()
        alpha = hp["lr"] * hp["mu"]
        work = np.array([times_counted(s, hp["momentum"], alpha) for s in steps])
        effective = (p * work).sum()
        moved = sum(a / v * d for a, v, d in zip(p, work, delta, strict=True))
        return w + effective * moved
    if name == "flexible":
        tau = np.array(steps)  # a local iteration is a step where this is called
        target = hp["flexible__target"] or tau.max()
        done = tau >= target
        complete = done * len(server["size"]) / max(done.sum(), 1)
        factor = (complete, np.ones(n), target / tau)[int(hp["flexible__scheme"])]
        p = share / server["size"].sum()
        return w + sum(a * d for a, d in zip(p * factor, delta, strict=True))
    if name == "scaffold":
        before = [c.copy() for c in server["own"]]
        for i, s, d, size, c in zip(who, steps, delta, share, sent, strict=True):
            work = times_counted(s, hp["momentum"], hp["lr"] * hp["mu"])
            server["own"][i] = before[i] - c - d / (hp["lr"] * work)
            server["size"][i] = size
        part = server["size"] / server["size"].sum()
        server["c"] = sum(a * c for a, c in zip(part, server["own"], strict=True))
        moved = sum(a * d for a, d in zip(p, delta, strict=True))
        return w + hp["server__lr"] * moved
    if name in ("feddyn", "ca2fl"):
        memory = server.setdefault("memory", [0 * w for _ in server["size"]])
        before = list(memory)
        for i, d, size in zip(who, delta, share, strict=True):
            memory[i] = before[i] + d if name == "feddyn" else d
            server["size"][i] = size
        part = server["size"] / server["size"].sum()
        if name == "feddyn":  # θ = mean − h/α of the paper, h = −α Σ p_i drift_i
            drift = sum(a * m for a, m in zip(part, memory, strict=True))
            return w + sum(a * d for a, d in zip(p, delta, strict=True)) + drift
        cached = sum(a * m for a, m in zip(part, before, strict=True))
        news = [d - before[i] for i, d in zip(who, delta, strict=True)]
        p = share / share.sum()
        moved = sum(a * d for a, d in zip(p, news, strict=True))
        return w + hp["server__lr"] * (cached + moved)
    if name == "fedexp":
        mean = sum(a * d for a, d in zip(p, delta, strict=True))
        squares = sum(a * (d**2).sum() for a, d in zip(p, delta, strict=True))
        step = squares / (2 * ((mean**2).sum() + hp["fedexp__epsilon"]))
        return w + max(1.0, step) * mean
    if name == "qfedavg":  # the paper's Δ_k and h_k
        q, L = hp["qfedavg__q"], hp["qfedavg__smoothness"]
        work = [times_counted(s, hp["momentum"]) for s in steps]
        L = L or (p * steps).sum() / (hp["lr"] * (p * work).sum())
        up, down = 0.0, 0.0
        for a, F, d in zip(p, server["losses"], delta, strict=True):
            up = up + a * F**q * L * d
            down += a * (q * F ** (q - 1) * L**2 * (d**2).sum() + L * F**q)
        return w + up / down
    if name in ("fedavgm", "fedadam", "fedyogi", "fadas"):
        p = np.full(n, 1 / n) if name == "fadas" else p
        g = -sum(a * d for a, d in zip(p, delta, strict=True))
        first = 1e-6 if name == "fedyogi" else 0.0  # optax's start of both moments
        m, v, t = server.get("moments", (first, first, 0))
        if name == "fedavgm":
            b1 = hp["fedavgm__momentum"]
            m = b1 * m + g
            server["moments"] = m, v, t
            return w - hp["fedavgm__lr"] * m
        b1, b2, t = hp["fedopt__momentum"], hp["fedopt__second"], t + 1
        m = b1 * m + (1 - b1) * g
        if name in ("fedadam", "fadas"):
            v = b2 * v + (1 - b2) * g**2
        else:
            v = v - (1 - b2) * np.sign(v - g**2) * g**2
        server["moments"] = m, v, t
        first, second = m / (1 - b1**t), v / (1 - b2**t)
        if name == "fadas":
            second = server["most"] = np.maximum(second, server.get("most", 0.0))
            first = first / max(1.0, max(lags) / hp["fadas__delay"])
        return w - hp["fedopt__lr"] * first / (np.sqrt(second) + hp["fedopt__floor"])
    return w + hp["server__lr"] * robust_mean(name, np.array(delta), hp["krum__trim"])


def replay(w, x, y, rows, trace, size, key, hp, name, batch_size, unit, groups=1):
    """Any timeline; every version of the global model is kept for ever.

    `trace` holds client, version, iterations, task ``[R, K]`` and group ``[R]``; a
    place with client −1 or without iterations is empty, one with `reported` in it a
    client that has made no iterations but says so. Returns the versions ``[R + 1]``.
    """
    versions, like = [vector(w)], w
    server = {
        "first": versions[0],
        "models": [versions[0]] * groups,
        "counts": [0] * groups,
        "c": np.zeros_like(versions[0]),
        "own": [np.zeros_like(versions[0]) for _ in rows],
        "size": np.array(size, float),
    }
    variates = [server["c"]]  # c of every version
    reported = getattr(trace, "reported", trace.iterations)
    stream = rng.fold(key, "training")
    if name not in ("fedprox", "fednova", "scaffold", "aso_fed", "feddyn"):
        hp = dict(hp, mu=0.0)
    for r in range(len(trace.client)):
        starts, ends, share, lags, steps, who, sent = [], [], [], [], [], [], []
        losses = server["losses"] = []
        for k, i in enumerate(trace.client[r]):
            if i < 0 or reported[r, k] == 0:
                continue
            start = versions[trace.version[r, k]]
            task_key = jax.random.fold_in(stream, int(trace.task[r, k]))
            correction = None
            if name == "scaffold":
                c = variates[trace.version[r, k]]
                correction = unvector(c - server["own"][i], like)
            if name == "feddyn" and "memory" in server:
                correction = unvector(hp["mu"] * server["memory"][i], like)
            work = trace.iterations[r, k], size[i], jax.random.fold_in(task_key, int(i))
            w_start, work = unvector(start, like), (*work, hp, batch_size, unit)
            end, *loss = local_training(w_start, x, y, rows[i], *work, correction)
            losses.append(loss[0] / max(loss[1], 1))
            batches = -(-size[i] // batch_size) if unit == "pass" else 1
            starts.append(start)
            ends.append(vector(end))
            share.append(size[i])
            lags.append(r - trace.version[r, k])
            steps.append(int(reported[r, k]) * batches)
            who.append(i)
            sent.append(variates[trace.version[r, k]])
        new = versions[-1]
        if who:
            share, group = np.array(share, float), trace.group[r]
            args = starts, ends, share, lags, steps, who, sent, group, server, hp
            new = serve(name, versions[-1], *args)
        versions.append(new)
        variates.append(server["c"])
    return [unvector(v, like) for v in versions]


def at_quadratic(known, w):
    """Of a `quadratic.Exact` at models w [..., d]: three quantities in closed form.

    E‖g_i(w)‖² of a mini-batch [..., N], F(w) − F(w*) [...], ‖∇F(w)‖² [...].
    """
    w, lam = np.asarray(w, np.float64), known.curvature
    own = ((lam * (w[..., None, :] - known.optima)) ** 2).sum(-1)
    away = w - known.optimum
    excess, square = 0.5 * (lam * away**2).sum(-1), ((lam * away) ** 2).sum(-1)
    return own + known.grad_variance, excess, square
