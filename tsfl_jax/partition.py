"""Which training samples each client holds: IID, Dirichlet over labels, shards, labels.

First a table ``counts[N, C]``, how many samples of which class a client gets, then
the samples themselves. Everything ends after a known number of steps: nothing is
drawn again until it fits. NOT done here: sizes that vary in time; a client uses the
first |D_i| entries of its row.

Dirichlet split: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution
for Federated Visual Classification" (2019); shards: McMahan et al.,
"Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017).
"""

import numpy as np

from tsfl_jax import allocation, host_memory
from tsfl_jax.types import Partition, UserError, nearest

_KINDS = ("iid", "dirichlet", "shards", "label")


def make_partition(
    labels: np.ndarray,
    capacity: np.ndarray,
    *,
    kind: str,
    alpha: float = 0.5,
    classes_per_client: int = 2,
    replacement: bool = False,
    rng: np.random.Generator,
) -> Partition:
    """Deals training samples to clients, capacity[i] to client i.

    - iid: any samples.
    - dirichlet: client i's shares of the classes are q_i ~ Dir(α), rounded to whole
      samples.
    - shards: equal shares of k classes, every class for about N k n_c / M clients.
    - label: samples of the i-th class only, for client i of as many as there are.

    No client ever holds a sample twice, and no two hold the same one unless
    Σ capacity > M and `replacement` allows it. Where a class runs out, the shortage
    is spread over all who want it, and each of them takes other classes that it
    wants, then any; ``notes`` says how many samples. Shards first shift the shares
    among a client's own k classes.

    Args:
      labels: [M] int, classes of the training samples.
      capacity: [N] int ≥ 1, most samples a client ever needs.
      kind: iid, dirichlet, shards or label.
      alpha: α > 0, dirichlet only; small = skewed, large = every class alike.
      classes_per_client: k ≥ 1, shards only.
      replacement: let clients share samples if there are too few.
      rng: decides every draw.

    Returns:
      A `Partition`. Rows are in random order, so that the beginning of a row is a
      fair sample of the client's data; beyond capacity[i] a row starts again.

    Raises:
      UserError: a value out of range, or more samples asked for than there are.
    """
    labels = np.asarray(labels)
    capacity = np.asarray(capacity).astype(np.int64)
    _check(labels, capacity, kind, alpha, replacement)
    _check_memory(capacity, len(np.unique(labels)), kind)
    sharing = int(capacity.sum()) > len(labels)
    if kind == "iid":
        pools = [rng.permutation(len(labels))]
        counts, notes = capacity[:, None], ()
    else:
        classes, inverse = np.unique(labels, return_inverse=True)
        pools = [
            rng.permutation(np.flatnonzero(inverse == c)) for c in range(len(classes))
        ]
        stock = np.array([len(pool) for pool in pools])
        if kind == "label":
            _check_label(capacity, stock, classes)
            indices = _deal(np.diag(capacity), pools, rng)
            return Partition(indices, capacity.astype(np.int32), ())
        if kind == "dirichlet":
            shares = _dirichlet(alpha, len(capacity), len(stock), rng)
        else:
            shares = _shards(classes_per_client, capacity, stock, rng)
        real = shares * capacity[:, None]
        wanted = allocation.round_rows(real, capacity)
        fitted = wanted
        if kind == "shards" and not sharing:
            fitted = allocation.round_rows(allocation.fit(real, stock), capacity)
        counts = allocation.settle(fitted, shares, stock, sharing, rng)
        chosen = shares > 0 if kind == "shards" else True
        notes = _notes(wanted, counts, classes, chosen, classes_per_client)
    if sharing:
        notes += (
            f"The clients ask for {capacity.sum()} samples of {len(labels)}: they "
            "share samples (--config.partition.replacement=True).",
        )
    indices = _deal(counts, pools, rng)
    return Partition(indices, capacity.astype(np.int32), notes)


def _check(labels, capacity, kind, alpha, replacement) -> None:
    if kind not in _KINDS:
        raise UserError(
            f"--config.partition.kind={kind}: unknown kind{nearest(kind, _KINDS)} "
            f"(one of: {', '.join(_KINDS)})"
        )
    if not 0 < alpha < np.inf:
        raise UserError(f"--config.partition.alpha={alpha}: must be finite and > 0")
    if capacity.size == 0 or capacity.min() < 1:
        raise UserError(
            "--config.num_clients and --config.schedule.data_size: every client needs "
            "at least one sample"
        )
    samples, total = len(labels), int(capacity.sum())
    if capacity.max() > samples:
        raise UserError(
            f"client {capacity.argmax()} needs {capacity.max()} training samples, but "
            f"there are only {samples}; use a smaller --config.schedule.data_size"
        )
    if total > samples and not replacement:
        raise UserError(
            f"the clients need {total} training samples in all, but there are only "
            f"{samples}; use a smaller --config.schedule.data_size, fewer "
            "--config.num_clients, or --config.partition.replacement=True"
        )


def _check_memory(capacity, num_classes, kind) -> None:
    clients, total = len(capacity), int(capacity.sum())
    shares = 0 if kind in ("iid", "label") else 24 * clients * num_classes
    host_memory.require(
        f"--config.num_clients={clients}",
        # Owner, sample and a random number of each entry, their order, the table.
        36 * total + 4 * clients * int(capacity.max()) + shares,
        f"the split of {total:,} samples",
    )


def _check_label(capacity, stock, classes) -> None:
    if len(capacity) != len(stock):
        raise UserError(
            "--config.partition.kind=label: needs as many classes as clients, but "
            f"there are {len(stock)} classes and --config.num_clients={len(capacity)}"
        )
    short = np.flatnonzero(capacity > stock)
    if len(short):
        i = short[0]
        raise UserError(
            f"--config.partition.kind=label: client {i} needs {capacity[i]} samples of "
            f"class {classes[i]}, but there are only {stock[i]}; use a smaller "
            "--config.schedule.data_size"
        )


def _dirichlet(alpha, num_clients, num_classes, rng) -> np.ndarray:
    """Shares [N, C] of the classes, rows sum to 1."""
    shares = rng.dirichlet(np.full(num_classes, alpha), num_clients)
    # Gamma variables that all underflow or overflow leave 0/0: take the limit.
    lost = ~np.isfinite(shares).all(axis=1) | (shares.sum(axis=1) < 0.5)
    if alpha < 1:
        limit = np.eye(num_classes)[rng.integers(num_classes, size=num_clients)]
    else:
        limit = np.full((num_clients, num_classes), 1 / num_classes)
    return np.where(lost[:, None], limit, shares)


def _shards(k, capacity, stock, rng) -> np.ndarray:
    """Shares [N, C]: 1/k for each of a client's k classes."""
    if not 1 <= k <= len(stock):
        raise UserError(
            f"--config.partition.classes_per_client={k}: the training data have "
            f"{len(stock)} classes; expected 1..{len(stock)}"
        )
    # What a class would give if all were used up alike; a client takes the classes
    # with the most left. The dither only decides between nearly equal ones: it
    # makes the pairs random, yet no class falls behind by more than one shard.
    left = stock * (capacity.sum() / stock.sum())
    dither = capacity.mean() / k
    shares = np.zeros((len(capacity), len(stock)))
    for i in rng.permutation(len(capacity)):
        order = np.argsort(-(left + dither * rng.random(len(stock))))
        chosen = order[:k]
        left[chosen] -= capacity[i] / k
        shares[i, chosen] = 1 / k
    return shares


def _notes(wanted, counts, classes, chosen, k) -> tuple[str, ...]:
    """What could not be had as asked for."""
    notes, moved = (), np.maximum(wanted - counts, 0)
    if moved.any():
        short = ", ".join(str(c) for c in classes[moved.any(axis=0)])
        notes += (
            f"Not enough samples of class {short}: {moved.sum()} of {counts.sum()} "
            f"samples, at {moved.any(axis=1).sum()} of {len(counts)} clients, are of "
            "other classes than asked for.",
        )
    # With few samples, one of another class need not make more classes than k.
    many = (counts > 0).sum(axis=1, keepdims=True) > k
    extra = np.where(chosen | ~many, 0, counts)
    if extra.any():
        notes += (
            f"{extra.any(axis=1).sum()} of {len(counts)} clients hold more than {k} "
            f"classes, for {extra.sum()} samples.",
        )
    return notes


def _deal(counts, pools, rng) -> np.ndarray:
    """Samples [N, max capacity] int32: row i has counts[i, c] of pools[c]."""
    N = len(counts)
    owner, sample = [], []
    for c, pool in enumerate(pools):
        # One client after another takes the next samples of its class, around and
        # around: never the same twice for one client, all used equally often.
        order = rng.permutation(N)
        owner.append(np.repeat(order, counts[order, c]))
        sample.append(np.resize(pool, len(owner[-1])))
    owner, sample = np.concatenate(owner), np.concatenate(sample)
    mixed = np.lexsort((rng.random(len(owner)), owner))  # by owner, then at random
    capacity = counts.sum(axis=1)
    start = np.cumsum(capacity) - capacity
    column = np.arange(capacity.max()) % capacity[:, None]
    return sample[mixed][start[:, None] + column].astype(np.int32)
