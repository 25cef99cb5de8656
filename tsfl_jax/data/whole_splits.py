"""Splits of all training samples, where sizes follow: by class, or by quantity.

Both are of Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study"
(2022, NIID-Bench), drawn as in its code; Flower's DirichletPartitioner is the first.
The Dirichlet split of `partition` is Hsu et al.'s, by client and with given sizes.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from tsfl_jax.components import Part, component, setting
from tsfl_jax.types import UserError

_ATTEMPTS = 100  # draws for the least size
_Lists = list[Int[np.ndarray, "_"]]


@component("partition")
class WholeConfig:
    """Of splits of all samples."""

    least_size: int = setting(
        10, "class_dirichlet, quantity: samples of the smallest client", low=1
    )


def lists(
    labels: Shaped[np.ndarray, "M"],
    num_clients: int,
    settings: Any,
    rng: np.random.Generator,
) -> _Lists:
    """Divide all samples among N clients; each sample has one client.

    - class_dirichlet: of each class client i gets the share p_i, p ~ Dir(α 1_N), and
      none of a class once it has M/N samples.
    - quantity: client i gets the share p_i of all, IID, p ~ Dir(α 1_N).

    Drawn again, at most 100 times, while a client has fewer than `least_size`.

    Args:
      labels: classes of the training samples.
      num_clients: N.
      settings: `kind`, a key of `KINDS`; `alpha`, `least_size`.
      rng: random number generator.

    Returns:
      Sorted indices of each client's samples.

    Raises:
      UserError: no draw gives each client that many.
    """
    least, M = settings.least_size, len(labels)
    best = 0
    for _ in range(_ATTEMPTS if num_clients * least <= M else 0):
        owner = KINDS[settings.kind].make(labels, num_clients, settings.alpha, rng)
        size = np.bincount(owner, minlength=num_clients)
        if size.min() >= least:
            order = np.argsort(owner, kind="stable")
            return np.split(order, np.cumsum(size)[:-1])
        best = max(best, int(size.min()))
    raise UserError(
        f"--config.partition.least_size={least}: {M} samples of {num_clients} clients "
        f"with alpha={settings.alpha:g} leave the smallest with {best} or fewer in "
        f"{_ATTEMPTS} draws; use a smaller least_size, a larger alpha or fewer clients"
    )


def _by_class(
    labels: Shaped[np.ndarray, "M"], N: int, alpha: float, rng: np.random.Generator
) -> Int[np.ndarray, "M"]:
    """The client of each sample, class after class."""
    owner, size = np.empty(len(labels), np.int64), np.zeros(N)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        is_open = size < len(labels) / N
        owner[members] = _random_owners(len(members), N, alpha, is_open, rng)
        size += np.bincount(owner[members], minlength=N)
    return owner


def _by_quantity(
    labels: Shaped[np.ndarray, "M"], N: int, alpha: float, rng: np.random.Generator
) -> Int[np.ndarray, "M"]:
    """The client of each sample, whatever its class."""
    return rng.permutation(_random_owners(len(labels), N, alpha, np.ones(N, bool), rng))


def _random_owners(
    count: int, N: int, alpha: float, is_open: np.ndarray, rng: np.random.Generator
) -> Int[np.ndarray, "count"]:
    """The clients of so many samples in a row, in shares of Dir(α) of the open ones."""
    share: Float[np.ndarray, N] = np.where(is_open, rng.dirichlet(np.full(N, alpha)), 0)
    if not share.sum() > 0:  # underflow: its limit, one client
        share = np.eye(N)[rng.choice(np.flatnonzero(is_open))]
    cuts = np.floor(np.cumsum(share / share.sum()) * count + 1e-9).astype(np.int64)
    cuts[-1] = count
    return np.repeat(np.arange(N), np.diff(cuts, prepend=0))


# By `PartitionConfig.kind`: functions of labels, N, α and a generator, to the client of
# each sample.
KINDS = {
    "class_dirichlet": Part(_by_class, ("partition.alpha",), (WholeConfig,)),
    "quantity": Part(_by_quantity, ("partition.alpha",), (WholeConfig,)),
}
