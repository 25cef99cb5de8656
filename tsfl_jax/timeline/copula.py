"""Speed, size, labels and availability of a client that go together: a Gaussian copula.

Each has a standard normal score z per client, and the scores have the correlations that
the setting names: "seconds rarity 0.8; seconds online -0.5". What was drawn of each is
then put into the order of its scores, so that every distribution stays as it was, and
the rank correlation of two is (6/π) arcsin(r/2) (Nelsen, "An Introduction to Copulas",
2006, section 5.1). What is given, such as the labels of natural clients, keeps its
clients, and the others are drawn on that condition.

- seconds: of an iteration at the mean size; large is slow
- size: number of samples
- rarity: of its labels, see `rarity`; large is rare
- online: seconds online
"""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax import rng
from tsfl_jax.timeline.fleet import Fleet
from tsfl_jax.types import UserError, nearest

NAMES = ("seconds", "size", "rarity", "online")
Scores = Mapping[str, Float[np.ndarray, "N"]]


def correlations(text: str) -> tuple[list[str], Float[np.ndarray, "k k"]]:
    """The names in a setting "NAME NAME r; …", and their correlations.

    Raises:
      UserError: another form, or numbers that no correlations can be.
    """
    flag, pairs = f"--config.timeline.copula={text!r}", {}
    for part in filter(str.strip, text.split(";")):
        words = part.split()
        wrong = [word for word in words[:2] if word not in NAMES]
        try:
            number = float(words[2]) if len(words) == 3 else math.nan
        except ValueError:
            number = math.nan
        if wrong or not abs(number) <= 1 or len(set(words[:2])) < 2:
            hint = nearest(wrong[0], NAMES) if wrong else ""
            raise UserError(
                f"{flag}: {part.strip()!r}: expected NAME NAME r with two of "
                f"{', '.join(NAMES)} and r in [-1, 1]{hint}"
            )
        pairs[words[0], words[1]] = number
    names = [name for name in NAMES if any(name in pair for pair in pairs)]
    matrix = np.eye(len(names))
    for (a, b), number in pairs.items():
        i, j = names.index(a), names.index(b)
        matrix[i, j] = matrix[j, i] = number
    if names and np.linalg.eigvalsh(matrix)[0] < -1e-9:
        raise UserError(f"{flag}: nothing is so correlated; use smaller numbers")
    return names, matrix


def scores(text: str, num_clients: int, seed: int, fixed: Scores) -> Scores:
    """z of each name in the setting, per client.

    Args:
      text: the setting.
      num_clients: N. Where nothing is fixed z depends on (seed, client) alone.
      seed: ≥ 0.
      fixed: values of clients that are given, not drawn, by name.

    Raises:
      UserError: as `correlations`; a correlation of two that are given.
    """
    from scipy import special, stats  # slow to import

    names, R = correlations(text)
    fixed_names = [i for i, name in enumerate(names) if name in fixed]
    free = [i for i in range(len(names)) if i not in fixed_names]
    between = R[np.ix_(fixed_names, fixed_names)]
    if (between != np.eye(len(fixed_names))).any():
        pair = " and ".join(names[i] for i in fixed_names)
        raise UserError(
            f"--config.timeline.copula={text!r}: {pair} of each client are given by "
            "its samples; leave out their correlation"
        )
    z = np.zeros((num_clients, len(names)))
    for i in fixed_names:
        z[:, i] = special.ndtri((stats.rankdata(fixed[names[i]]) - 0.5) / num_clients)
        z[:, i] /= max(z[:, i].std(), 1e-9)
    # As they are in these clients, so that those of the others with them are as asked.
    between = z[:, fixed_names].T @ z[:, fixed_names] / num_clients
    slope = R[np.ix_(free, fixed_names)] @ np.linalg.pinv(between)
    variance = R[np.ix_(free, free)] - slope @ R[np.ix_(fixed_names, free)]
    values, vectors = np.linalg.eigh(variance)
    root = vectors * np.sqrt(values.clip(0))
    numbers = np.array(free, np.int64)[None]
    ids = np.arange(num_clients)[:, None]
    noise = special.ndtri(rng.uniforms(seed, "copula", ids, numbers))
    z[:, free] = z[:, fixed_names] @ slope.T + noise @ root.T
    return dict(zip(names, z.T, strict=True))


def order(
    value: Float[np.ndarray, "N"] | Int[np.ndarray, "N"], z: Float[np.ndarray, "N"]
) -> Int[np.ndarray, "N"]:
    """Indices that put values into the order of scores: value[order] ascends with z."""
    indices = np.empty(len(z), np.int64)
    indices[np.argsort(z, kind="stable")] = np.argsort(value, kind="stable")
    return indices


def rarity(
    shares: Float[np.ndarray, "N C"], stock: Int[np.ndarray, "C"]
) -> Float[np.ndarray, "N"]:
    """How rare a client's labels are: Σ_c p_i(c) · rank of c from frequent to rare.

    Args:
      shares: p_i(c), of each class among a client's samples, or in proportion to it.
      stock: samples of each class; of equally many the larger number is rarer.
    """
    rank = np.empty(len(stock))
    rank[np.argsort(-np.asarray(stock), kind="stable")] = np.arange(len(stock))
    return shares @ rank / shares.sum(axis=1)


def tied(
    fleet: Fleet, z: Scores, share: Float[np.ndarray, "N"], horizon: float
) -> Fleet:
    """A fleet with its speeds and online windows in the order of their scores.

    Args:
      fleet: as drawn.
      z: from `scores`.
      share: |D_i| over its mean, which drawn speeds are times; 1 for measured ones.
      horizon: virtual seconds of the run, > 0.

    Raises:
      UserError: windows are to be ordered, and all clients are always online.
    """
    if "seconds" in z:
        relative = fleet.iteration / share[:, None]
        chosen = order(relative.mean(axis=1), z["seconds"])
        fleet = fleet._replace(iteration=relative[chosen] * share[:, None])
    if "online" in z:
        if not fleet.online:
            raise UserError(
                "--config.timeline.copula: online needs --config.timeline.online, or "
                "--config.timeline.availability"
            )
        # A client without windows is always online.
        seconds = [
            np.clip(w, 0, horizon).dot((-1, 1)).sum() if len(w) else horizon
            for w in fleet.online
        ]
        chosen = order(np.array(seconds), z["online"])
        fleet = fleet._replace(online=tuple(fleet.online[i] for i in chosen))
    return fleet
