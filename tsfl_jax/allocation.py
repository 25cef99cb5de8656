"""Tables of whole numbers with given row sums: how many samples of which class.

Rows are clients, columns classes. Every function ends after a known number of steps.
"""

import numpy as np

_FIT_ROUNDS = 100  # of scaling; what is still too much is settled sample by sample


def round_rows(real: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Whole numbers within 1 of the real ones, largest remainders first.

    Args:
      real: [N, C] float ≥ 0, row i sums to about totals[i].
      totals: [N] int.

    Returns:
      [N, C] int64, row i sums to totals[i].
    """
    whole = np.floor(real).astype(np.int64)
    missing = totals - whole.sum(axis=1)
    rank = np.argsort(np.argsort(whole - real, axis=1, kind="stable"), axis=1)
    return whole + (rank < missing[:, None])  # largest remainders first


def fit(real: np.ndarray, stock: np.ndarray) -> np.ndarray:
    """Scales rows and columns in turn until columns, nearly, fit into the stock.

    Zeros stay zero: a client is given more of its own other classes instead.

    Args:
      real: [N, C] float ≥ 0, rows sum to > 0.
      stock: [C] int, samples of each class.

    Returns:
      [N, C] float with the same row sums; unchanged where it fits already.
    """
    totals = real.sum(axis=1, keepdims=True)
    for _ in range(_FIT_ROUNDS):
        if (real.sum(axis=0) <= stock).all():
            break
        real = real * np.minimum(1, stock / np.maximum(real.sum(axis=0), 1))
        real = real * (totals / real.sum(axis=1, keepdims=True))
    return real


def settle(
    wanted: np.ndarray,
    shares: np.ndarray,
    stock: np.ndarray,
    sharing: bool,
    rng: np.random.Generator,
) -> np.ndarray:
    """Counts [N, C] near the wanted ones that the stock of each class allows.

    Where a class is asked for too often, all who ask get their part of what there
    is, and ask for other classes in the next round. A class once asked for too
    often is gone, so C + 1 rounds are enough.

    Args:
      wanted: [N, C] int ≥ 0, samples a client asks for.
      shares: [N, C] float ≥ 0, what it asks for next, in proportion.
      stock: [C] int, samples of each class; enough for all rows together, or if
        `sharing` for each row by itself.
      sharing: the stock is there for every client anew.
      rng: decides who gets what.

    Returns:
      [N, C] int64 with the row sums of `wanted`; column sums (if `sharing` entries)
      at most `stock`. As few samples as possible are not the wanted ones.
    """
    counts, request = np.zeros_like(wanted), wanted
    for _ in range(len(stock) + 1):
        if sharing:  # only within a client must samples differ
            given = np.minimum(request, stock - counts)
        else:
            given = request.copy()
            room = stock - counts.sum(axis=0)
            for c in np.flatnonzero(request.sum(axis=0) > room):
                given[:, c] = rng.multivariate_hypergeometric(
                    request[:, c], int(room[c]), method="marginals"
                )
        counts += given
        missing = (request - given).sum(axis=1)
        if not missing.any():
            break
        room = stock - (counts if sharing else counts.sum(axis=0))
        open_shares = np.where(room > 0, shares, 0.0)
        # Where none of its classes is left a client takes any, as there are left.
        none = open_shares.sum(axis=1, keepdims=True) == 0
        weights = np.where(none & (missing[:, None] > 0), room, open_shares)
        sums = weights.sum(axis=1, keepdims=True)
        weights = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
        request = rng.multinomial(missing, weights)
    return counts
