"""Which training samples each client holds: IID, Dirichlet over labels, shards, labels.

First a table ``counts[N, C]`` is made, how many samples of each of the C classes a
client gets, then the samples are assigned. There is no rejection sampling: the number
of steps is bounded. Not here: sizes that vary in time; a client uses the first |D_i|
entries of its row.

Dirichlet split: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution
for Federated Visual Classification" (2019); shards: McMahan et al.,
"Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017).
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy.random import Generator

from tsfl_jax import host_memory
from tsfl_jax import rng as streams
from tsfl_jax.components import Part, component, setting
from tsfl_jax.data import whole_splits
from tsfl_jax.data.inputs import require
from tsfl_jax.timeline import copula
from tsfl_jax.types import Partition

Labels = Shaped[np.ndarray, "M"]  # classes of the training samples
Sizes = Int[np.ndarray, "N"]  # samples of each client
Stock = Int[np.ndarray, "C"]  # samples of each class
Shares = Float[np.ndarray, "N C"]  # of the classes; rows sum to 1
Counts = Int[np.ndarray, "N C"]  # samples of each class
Scores = Float[np.ndarray, "N"]  # of the clients, see `timeline.copula`
Rows = Int[np.ndarray, "_"]  # indices of samples
_FIT_ROUNDS = 100  # of scaling; `_settle` moves the samples that still do not fit


@component("partition")
class PartitionConfig:
    """Which training samples each client gets."""

    kind: str = setting("dirichlet", "the split; client: as the data set says")
    alpha: float = setting(
        0.5, "dirichlet, quantity: concentration; small values skew more", above=0
    )
    classes_per_client: int = setting(2, "shards: classes of a client", low=1)
    replacement: bool = setting(False, "let clients share samples if there are too few")
    iid_share: float = setting(
        0.0, "share of each client's samples that is drawn IID", low=0, below=1
    )
    common: bool = setting(
        False,
        "the IID share is the same samples for all clients",
        used_by=("iid_share", ()),
    )
    online: bool = setting(
        False,
        "in every interval new samples of the same classes, drawn from all",
    )

    def check(self, config: Any, rule: Any) -> None:
        """Refuse what says twice which samples a client has."""
        del config, rule
        for pair in (("common", "online"), ("iid_share", "replacement")):
            a, b = (f"--config.partition.{n}={getattr(self, n)}" for n in pair)
            both = all(getattr(self, name) for name in pair)
            require(not both, f"{a}: cannot go with {b}; leave out one of them")


def make_partition(
    labels: Labels,
    capacity: Sizes,
    settings: PartitionConfig,
    rng: Generator,
    rarity: Scores | None = None,
) -> Partition:
    """Divide training samples among clients, capacity[i] to client i.

    The kinds are those of `PARTITIONS`, but "client" and those of `whole_splits`.

    With `iid_share` that share of every client's samples is drawn IID instead, and the
    rest as above from what is left; with `common` it is the same samples for all.

    No client holds a sample twice, and no two clients hold the same sample unless
    Σ capacity > M and `replacement` allows it. Where a class has too few samples, the
    shortage is spread over all clients that request it. Each of them takes other
    classes that it requested, then any; ``notes`` reports how many samples. Before
    that, `shards` shifts the shares among a client's own k classes.

    Args:
      labels: classes of the training samples.
      capacity: most samples that each client needs in any interval, ≥ 1.
      settings: the kind, α of dirichlet, k of shards, and whether clients may share
        samples if there are too few.
      rng: random number generator.
      rarity: scores by which clients get shares of classes, see `timeline.copula`.

    Returns:
      A `Partition`. Rows are in random order, so that the beginning of a row is an
      unbiased sample of the client's data; beyond capacity[i] a row repeats.

    Raises:
      UserError: a value out of range, or more samples requested than there are.
    """
    capacity = capacity.astype(np.int64)
    if settings.iid_share > 0:
        return _partly_iid(labels, capacity, settings, rng, rarity)
    total = int(capacity.sum())
    _check_stock(len(labels), capacity, total, settings.replacement)
    _check_memory(capacity, len(np.unique(labels)), settings.kind)
    if PARTITIONS[settings.kind].make is None:
        class_index, counts = [rng.permutation(len(labels))], capacity[:, None]
        notes = ()
    else:
        class_index, counts, notes = _by_class(labels, capacity, settings, rng, rarity)
    if total > len(labels):
        notes += (
            f"the clients hold {total} samples and there are {len(labels)}: some are "
            "held by several clients, as --config.partition.replacement=True allows",
        )
    return _partition(counts, class_index, notes, rng)


def _partly_iid(
    labels: Labels,
    capacity: Sizes,
    settings: PartitionConfig,
    rng: Generator,
    rarity: Scores | None,
) -> Partition:
    """A share of every client's samples drawn IID, the rest by kind.

    As in Karimireddy et al., "SCAFFOLD", ICML 2020 (s % similarity), or with samples
    that all clients have in Zhao et al., "Federated Learning with Non-IID Data" (2018).
    """
    N, most, common = len(capacity), int(capacity.max()), settings.common
    iid_size = np.minimum(np.rint(capacity * settings.iid_share), capacity - 1)
    iid_size = iid_size.astype(np.int64)
    num_iid = int(iid_size.max() if common else iid_size.sum())
    total = num_iid + int((capacity - iid_size).sum())
    _check_stock(len(labels), capacity, total, False)
    order = rng.permutation(len(labels))
    pool = np.sort(order[num_iid:])
    skewed = make_partition(
        labels[pool],
        capacity - iid_size,
        dataclasses.replace(settings, iid_share=0.0),
        rng,
        rarity,
    )
    start = np.zeros(N, np.int64) if common else np.cumsum(iid_size) - iid_size
    indices = np.empty((N, most), np.int32)
    for i in range(N):
        iid = order[start[i] + np.arange(iid_size[i])]
        by_kind = pool[skewed.indices[i, : capacity[i] - iid_size[i]]]
        row = np.concatenate([iid, by_kind])
        indices[i] = np.resize(rng.permutation(row), most)
    return Partition(indices, capacity.astype(np.int32), skewed.notes)


def _by_class(
    labels: Labels,
    capacity: Sizes,
    settings: PartitionConfig,
    rng: Generator,
    rarity: Scores | None,
) -> tuple[list[Rows], Counts, tuple[str, ...]]:
    """The samples of each class in random order, the counts, and notes."""
    kind = settings.kind
    sharing = int(capacity.sum()) > len(labels)
    classes, inverse = np.unique(labels, return_inverse=True)
    members = [np.flatnonzero(inverse == c) for c in range(len(classes))]
    class_index = [rng.permutation(samples) for samples in members]
    stock = np.array([len(rows) for rows in class_index])
    shares = np.asarray(PARTITIONS[kind].make(settings, capacity, stock, rng), float)
    fits = shares.shape == (len(capacity), len(stock)) and (shares >= 0).all()
    expected = f"--config.partition.kind={kind}: expected [N, C] >= 0, rows of sum 1"
    require(fits and np.allclose(shares.sum(axis=1), 1), expected)
    if rarity is not None:
        shares = shares[copula.order(copula.rarity(shares, stock), rarity)]
    real = shares * capacity[:, None]
    requested = fitted = _round_rows(real, capacity)
    if kind == "shards" and not sharing:
        fitted = _round_rows(_fit(real, stock), capacity)
    counts = _settle(fitted, shares, stock, sharing, rng)
    return class_index, counts, _notes(requested, counts, classes)


def _round_rows(real: Float[np.ndarray, "N C"], totals: Sizes) -> Counts:
    """Integers with the given row sums by largest remainders, within 1 of `real`."""
    whole = np.floor(real).astype(np.int64)
    missing = totals - whole.sum(axis=1)
    rank = np.argsort(np.argsort(whole - real, axis=1, kind="stable"), axis=1)
    return whole + (rank < missing[:, None])


def _fit(real: Float[np.ndarray, "N C"], stock: Stock) -> Float[np.ndarray, "N C"]:
    """Scale columns and rows alternately until the columns nearly fit into the stock.

    Zeros stay zero: a client gets more samples of its other classes instead.
    """
    totals = real.sum(axis=1, keepdims=True)
    for _ in range(_FIT_ROUNDS):
        if (real.sum(axis=0) <= stock).all():
            break
        real = real * np.minimum(1, stock / np.maximum(real.sum(axis=0), 1))
        real = real * (totals / real.sum(axis=1, keepdims=True))
    return real


def _settle(
    requested: Counts, shares: Shares, stock: Stock, sharing: bool, rng: Generator
) -> Counts:
    """Find counts near the requested ones that the stock of each class allows.

    Where the clients request more samples of a class than there are, they divide its
    stock at random and request samples of other classes in the next round, in
    proportion to their shares. Such a class is used up, so C + 1 rounds are enough. If
    `sharing`, clients may hold the same samples, and the stock limits each entry. Row
    sums stay; as few samples as possible are not of the requested class.
    """
    counts, request = np.zeros_like(requested), requested
    for _ in range(len(stock) + 1):
        if sharing:  # samples must differ only within a client
            granted = np.minimum(request, stock - counts)
        else:
            granted = request.copy()
            room = stock - counts.sum(axis=0)
            for c in np.flatnonzero(request.sum(axis=0) > room):
                granted[:, c] = rng.multivariate_hypergeometric(
                    request[:, c], int(room[c]), method="marginals"
                )
        counts += granted
        missing = (request - granted).sum(axis=1)
        if not missing.any():
            break
        room = stock - (counts if sharing else counts.sum(axis=0))
        open_shares = np.where(room > 0, shares, 0.0)
        # A client takes any class that is left if none of its own classes is.
        none = open_shares.sum(axis=1, keepdims=True) == 0
        weights = np.where(none & (missing[:, None] > 0), room, open_shares)
        sums = weights.sum(axis=1, keepdims=True)
        weights = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
        request = rng.multinomial(missing, weights)
    return counts


def _check_stock(samples: int, capacity: Sizes, total: int, replacement: bool) -> None:
    """Raise `UserError` if the clients request more samples than there are."""
    require(
        capacity.size and capacity.min() >= 1,
        "--config.num_clients and --config.schedule.data_size: every client needs at "
        "least one sample",
    )
    largest = int(capacity.max())
    needed = largest if replacement else max(total, largest)
    cure = f"about {max(int(100 * samples / needed), 1)} % of this"
    ways = ", fewer --config.num_clients, or --config.partition.replacement=True"
    require(
        needed <= samples,
        f"the clients need {total} training samples in all, client {capacity.argmax()} "
        f"{largest} of them, but there are only {samples}; sizes may be drawn; use "
        f"{cure} --config.schedule.data_size{ways * (largest <= samples)}",
    )


def _check_memory(capacity: Sizes, num_classes: int, kind: str) -> None:
    """Raise `UserError` if the partition does not fit into memory."""
    clients, total = len(capacity), int(capacity.sum())
    shares = 0 if kind in ("iid", "label") else 24 * clients * num_classes
    host_memory.require(
        f"--config.num_clients={clients}",
        # Owner, sample and a random number of each entry, their order, the table.
        36 * total + 4 * clients * int(capacity.max()) + shares,
        f"the split of {total:,} samples",
    )


def _label(
    settings: PartitionConfig, capacity: Sizes, stock: Stock, rng: Generator
) -> Shares:
    """Samples of the i-th class only for client i; as many clients as classes."""
    del settings, rng
    require(
        len(capacity) == len(stock),
        "--config.partition.kind=label: needs as many classes as clients, but there "
        f"are {len(stock)} classes and --config.num_clients={len(capacity)}",
    )
    return np.eye(len(capacity))


def _dirichlet(
    settings: PartitionConfig, capacity: Sizes, stock: Stock, rng: Generator
) -> Shares:
    """Shares q_i ~ Dir(α) of the classes for client i."""
    alpha, num_clients, num_classes = settings.alpha, len(capacity), len(stock)
    shares = rng.dirichlet(np.full(num_classes, alpha), num_clients)
    # If all gamma variables underflow or overflow, the shares are 0/0: use the limit.
    lost = ~np.isfinite(shares).all(axis=1) | (shares.sum(axis=1) < 0.5)
    if alpha < 1:
        limit = np.eye(num_classes)[rng.integers(num_classes, size=num_clients)]
    else:
        limit = np.full((num_clients, num_classes), 1 / num_classes)
    return np.where(lost[:, None], limit, shares)


def _shards(
    settings: PartitionConfig, capacity: Sizes, stock: Stock, rng: Generator
) -> Shares:
    """1/k for each of a client's k classes; a class has about N k n_c / M clients."""
    k = settings.classes_per_client
    require(
        1 <= k <= len(stock),
        f"--config.partition.classes_per_client={k}: the training data have "
        f"{len(stock)} classes; expected 1..{len(stock)}",
    )
    # Samples that each class gives if all classes are used in proportion to their size;
    # a client takes the classes with the most samples left. The dither decides only
    # between classes that differ by less than one shard, and makes the pairs random.
    left = stock * (capacity.sum() / stock.sum())
    dither = capacity.mean() / k
    shares = np.zeros((len(capacity), len(stock)))
    for i in rng.permutation(len(capacity)):
        order = np.argsort(-(left + dither * rng.random(len(stock))))
        chosen = order[:k]
        left[chosen] -= capacity[i] / k
        shares[i, chosen] = 1 / k
    return shares


DRAWN = (
    *("schedule.data_size", "schedule.size_groups", "partition.replacement"),
    *("partition.iid_share", "partition.common", "partition.online"),
)
# By `PartitionConfig.kind`: functions of settings, the clients' samples ``[N]``, those
# of each class ``[C]`` and a generator, to shares of the classes ``[N, C]`` ≥ 0 whose
# rows sum to 1. None: of all samples at random; client: as the data set says; of
# `whole_splits`: see there.
PARTITIONS = {
    "iid": Part(reads=DRAWN),
    "dirichlet": Part(_dirichlet, (*DRAWN, "partition.alpha")),
    "shards": Part(_shards, (*DRAWN, "partition.classes_per_client")),
    "label": Part(_label, DRAWN),
    "client": Part(),
} | whole_splits.KINDS


_FEW = 0.1  # share of replaced samples that hardly changes a split


def _notes(
    requested: Counts, counts: Counts, classes: Shaped[np.ndarray, "C"]
) -> tuple[str, ...]:
    """Report where the request could not be met exactly."""
    moved = np.maximum(requested - counts, 0)
    short = ", ".join(str(c) for c in classes[moved.any(axis=0)])
    share = moved.sum() / counts.sum()
    note = f"{100 * share:.2g} % of samples are of other classes than drawn"
    if share <= _FEW:
        note += ", since the data set has too few of some (harmless)"
    else:
        note += (
            f", since too few are labeled {short}: the split is less skewed than its "
            "settings say; a smaller --config.schedule.data_size avoids that"
        )
    return (note,) if share else ()


def _partition(
    counts: Counts, class_index: list[Rows], notes: tuple[str, ...], rng: Generator
) -> Partition:
    """Assign samples: client i gets counts[i, c] of class_index[c]."""
    N = len(counts)
    owner, sample = [], []
    for c, rows in enumerate(class_index):
        # The clients in random order take the next samples of the class, starting again
        # at its end: no client gets one twice, and all are used equally often.
        order = rng.permutation(N)
        owner.append(np.repeat(order, counts[order, c]))
        sample.append(np.resize(rows, len(owner[-1])))
    owner, sample = np.concatenate(owner), np.concatenate(sample)
    mixed = np.lexsort((rng.random(len(owner)), owner))  # by owner, then at random
    capacity = counts.sum(axis=1)
    start = np.cumsum(capacity) - capacity
    column = np.arange(capacity.max()) % capacity[:, None]
    indices = sample[mixed][start[:, None] + column].astype(np.int32)
    return Partition(indices, capacity.astype(np.int32), notes)


def views(
    ids: Int[np.ndarray, "U"], size: Int[np.ndarray, "U"], samples: int, seed: int
) -> Int[np.ndarray, "U D"]:
    """The samples of some clients, as rows of `types.Partition`.

    The table has all samples in random order, so that pieces are IID. A client's piece
    starts at a place that depends on (seed, id) alone, uniform over the table; after
    the table's last place comes its first. Clients share samples.

    Args:
      ids: ≥ 0, in any order, also repeated.
      size: samples that each holds, in [1, M].
      samples: M ≥ 1.
      seed: in [0, 2**32).

    Returns:
      int32 indices of samples: all that a client holds, and from its first one again
      up to D, the most that one of these holds.

    Raises:
      UserError: the rows do not fit into memory.
    """
    width = int(size.max(initial=1))
    host_memory.require(
        f"{len(ids):,} clients of up to {width:,} samples",
        12 * len(ids) * width,
        "the index table",
    )
    order = streams.generator(seed, "table order").permutation(samples).astype(np.int32)
    # The upper 32 bits times M: within M/2³² of uniform.
    bits = streams.hashed(seed, "views", ids) >> np.uint64(32)
    start = (bits * np.uint64(samples) >> np.uint64(32)).astype(np.int64)
    place = np.arange(width) % size.astype(np.int64)[:, None] + start[:, None]
    return order[place % samples]


def hold_out(labels: Labels, count: int, rng: Generator) -> Int[np.ndarray, "V"]:
    """Draw validation samples, the same share of each class up to rounding.

    What a server might own beside its test set; no client trains on them.

    Args:
      labels: classes of the training samples.
      count: V ≥ 0.
      rng: random number generator.

    Returns:
      Indices of V samples, ascending.

    Raises:
      UserError: nothing would be left to train on.
    """
    require(
        count < len(labels),
        f"--config.data.validation={count}: there are only {len(labels)} training "
        "samples, and clients need some; use fewer",
    )
    classes, inverse = np.unique(labels, return_inverse=True)
    stock = np.bincount(inverse, minlength=len(classes))
    real = count * stock[None] / stock.sum()
    class_sizes = _round_rows(real, np.array([count]))[0]
    drawn = [
        rng.permutation(np.flatnonzero(inverse == c))[:number]
        for c, number in enumerate(class_sizes)
    ]
    return np.sort(np.concatenate(drawn))
