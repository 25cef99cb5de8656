"""How many samples of each class a client gets, or validation: tables of integers.

Rows are clients, columns are the C classes. Every function ends after a bounded number
of steps.
"""

import numpy as np
from jaxtyping import Float, Int, Shaped

from tsfl_jax.data.inputs import require

_FIT_ROUNDS = 100  # of scaling; `settle` moves the samples that still do not fit


def round_rows(
    real: Float[np.ndarray, "N C"], totals: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "N C"]:
    """Round to integers with the given row sums, by largest remainders.

    Args:
      real: ≥ 0, row i sums to about totals[i].
      totals: row sums.

    Returns:
      int64, each entry within 1 of `real`.
    """
    whole = np.floor(real).astype(np.int64)
    missing = totals - whole.sum(axis=1)
    rank = np.argsort(np.argsort(whole - real, axis=1, kind="stable"), axis=1)
    return whole + (rank < missing[:, None])


def fit(
    real: Float[np.ndarray, "N C"], stock: Int[np.ndarray, "C"]
) -> Float[np.ndarray, "N C"]:
    """Scale columns and rows alternately until the columns nearly fit into the stock.

    Zeros stay zero: a client gets more samples of its other classes instead.

    Args:
      real: ≥ 0, rows sum to > 0.
      stock: samples of each class.

    Returns:
      The table with the same row sums; unchanged if it fits already.
    """
    totals = real.sum(axis=1, keepdims=True)
    for _ in range(_FIT_ROUNDS):
        if (real.sum(axis=0) <= stock).all():
            break
        real = real * np.minimum(1, stock / np.maximum(real.sum(axis=0), 1))
        real = real * (totals / real.sum(axis=1, keepdims=True))
    return real


def settle(
    requested: Int[np.ndarray, "N C"],
    shares: Float[np.ndarray, "N C"],
    stock: Int[np.ndarray, "C"],
    sharing: bool,
    rng: np.random.Generator,
) -> Int[np.ndarray, "N C"]:
    """Find counts near the requested ones that the stock of each class allows.

    Where the clients request more samples of a class than there are, they divide its
    stock at random and request samples of other classes in the next round. Such a class
    is used up, so C + 1 rounds are enough.

    Args:
      requested: ≥ 0, samples that each client requests.
      shares: ≥ 0, proportions of the classes in later requests.
      stock: samples of each class; enough for all rows together, or if `sharing` for
        each row.
      sharing: clients may hold the same samples.
      rng: random number generator.

    Returns:
      int64 with the row sums of `requested`; column sums (if `sharing` entries) at most
      `stock`. Minimizes the number of samples that are not of the requested class.
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


def hold_out(
    labels: Shaped[np.ndarray, "M"], count: int, rng: np.random.Generator
) -> Int[np.ndarray, "V"]:
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
    class_sizes = round_rows(real, np.array([count]))[0]
    drawn = [
        rng.permutation(np.flatnonzero(inverse == c))[:number]
        for c, number in enumerate(class_sizes)
    ]
    return np.sort(np.concatenate(drawn))
