"""Cohorts that are chosen while training: K of d candidates, by what their data say.

Candidates and all random numbers are drawn before training, from the seed and the
interval; these pure functions choose among them inside of the compiled program, see
`engine.choosing`.

Power-of-Choice: of d candidates, drawn in proportion to |D_i| without replacement, the
K with the largest loss F_i(w^t) of all samples that they hold. Source: Cho, Wang and
Joshi, "Towards Understanding Biased Client Selection in Federated Learning", AISTATS
2022, π_pow-d; NOT done: its cheaper variants with a part of the samples or old losses.

Oort: see `oort`. Source: Lai et al., "Oort: Efficient Federated Learning via Guided
Participant Selection", OSDI 2021, Algorithm 1, read with the authors' program in
FedScale (thirdparty/oort/oort.py) where it says more: utilities are scaled to [0, 1]
before the term of staleness is added, and who was never heard of is drawn in proportion
to |D_i| times the penalty. Simplified:

- losses are those of all samples at w^t, the model that a client begins with, instead
  of those that it meets while it trains;
- without a framework there is no clock: the duration t_i is the mini-batch steps that
  the client has in the interval;
- where too few were never heard of, others that were take their places, and K are asked
  in any case;
- NOT done: the pacer, which moves T; the blacklist; noise on utilities.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tsfl_jax import rng
from tsfl_jax.types import Array as AnyArray
from tsfl_jax.types import Lots

EXPLORED, DECAY, LEAST = 0.9, 0.98, 0.2  # ε of the first round, per round, at last
CUT_OFF = 0.95  # c, of the utility of the last one that would be taken
STALE = 0.1  # in √(0.1 ln R / L_i)


class Choice(NamedTuple):
    """How a program chooses; static."""

    sampler: str
    size: int  # K


class Known(NamedTuple):
    """What Oort has heard of each client."""

    utility: Float[Array, "..."]  # |D_i| √(mean of the squared sample losses), ≥ 0
    last: Int[Array, "..."]  # L_i, round of the last time, from 1; 0: never


def nothing_known(clients: int) -> Known:
    """Before the first round."""
    return Known(jnp.zeros(clients, jnp.float32), jnp.zeros(clients, jnp.int32))


def draw_lots(
    seed: int,
    client: Int[np.ndarray, "T d"],
    steps: Int[np.ndarray, "T d"],
    preferred: float,
    penalty: float,
) -> Lots:
    """What Oort's choice needs besides training: random numbers and penalties.

    (T/t_i)^α where t_i > T, else 1, T being the percentile of the candidates' steps.

    Args:
      seed: of the draws.
      client: ids, which with the interval name the random numbers.
      steps: t_i ≥ 0, of each candidate in each interval.
      preferred: percentile in (0, 100]; 100: no T, no penalty.
      penalty: α ≥ 0.
    """
    number = np.arange(len(client))[:, None]
    gumbel = -np.log(-np.log(rng.uniforms(seed, "cohort lots", client, number)))
    factor = np.ones(client.shape)
    if preferred < 100:
        d = client.shape[1]
        place = min(int(d * preferred / 100), d - 1)
        limit = np.sort(steps, axis=1)[:, place, None]
        late = (limit / np.maximum(steps, 1)) ** penalty
        factor = np.where(steps > limit, late, 1.0)
    return Lots(gumbel.astype(np.float32), factor.astype(np.float32))


def _first(key: Float[Array, "d"], number: AnyArray | int) -> Bool[Array, "d"]:
    """The so many largest; of equal ones those in front."""
    rank = jnp.argsort(jnp.argsort(-key))
    return rank < number


def power_of_choice(loss: Float[Array, "d"], size: int) -> Int[Array, "K"]:
    """The K candidates with the largest losses.

    >>> print(power_of_choice(jnp.array([0.5, 2.0, 1.0, 2.0]), 2))
    [1 3]

    Args:
      loss: F_i(w^t) of each candidate; NaN counts as infinite.
      size: K ≤ d.

    Returns:
      Places among the candidates, int32, ascending; of equal losses the first.
    """
    chosen = _first(jnp.where(jnp.isnan(loss), jnp.inf, loss), size)
    return jnp.flatnonzero(chosen, size=size).astype(jnp.int32)


def exploration(number: Int[AnyArray, ""] | int) -> Float[Array, ""]:
    """ε of round R ≥ 1, max(0.9 · 0.98^(R − 1), 0.2)."""
    age = jnp.asarray(number, jnp.float32) - 1
    return jnp.maximum(EXPLORED * DECAY**age, LEAST)


def utilities(
    history: Known, factor: Float[AnyArray, "d"], number: Int[AnyArray, ""] | int
) -> Float[Array, "d"]:
    """Oort's utilities: ((U_i − U_min)/(U_max − U_min) + √(0.1 ln R / L_i)) (T/t_i)^α.

    U_i is cut off at the 95th percentile, and U_min is 0.999 times the least utility.

    Args:
      history: of the candidates.
      factor: (T/t_i)^α where t_i > T, else 1.
      number: R ≥ 1, of this round.

    Returns:
      ≥ 0; 0 of candidates who were never heard of.
    """
    is_known = history.last > 0
    count = is_known.sum()
    low = 0.999 * jnp.where(is_known, history.utility, jnp.inf).min()
    high = jnp.where(is_known, history.utility, 0.0).max()
    ascending = jnp.sort(jnp.where(is_known, history.utility, jnp.inf))
    most = ascending[jnp.maximum(jnp.minimum(count * 19 // 20, count - 1), 0)]
    scaled = (jnp.minimum(history.utility, most) - low) / jnp.maximum(high - low, 1e-4)
    log = jnp.log(jnp.asarray(number, jnp.float32))
    stale = jnp.sqrt(STALE * log / jnp.maximum(history.last, 1))
    return jnp.where(is_known, (scaled + stale) * factor, 0.0)


def oort(
    history: Known,
    num_samples: Int[Array, "d"],
    lots: Lots,
    number: Int[AnyArray, ""] | int,
    size: int,
) -> Int[Array, "K"]:
    """Oort's choice: Algorithm 1, see the module docstring.

    ⌊ε_R K⌋ are explored: drawn from those who were never heard of, in proportion to
    |D_i| times the penalty. The others are drawn in proportion to `utilities` from
    those with at least 95 % of the utility of the last one that would be taken. Both
    without replacement, by the largest ln(weight) + Gumbel number.

    Args:
      history: of the d candidates.
      num_samples: |D_i| ≥ 1.
      lots: Gumbel numbers and penalties ``[d]``.
      number: R ≥ 1, of this round.
      size: K ≤ d.

    Returns:
      Places among the candidates, int32, ascending.
    """
    is_known = history.last > 0
    count, log = is_known.sum(), lambda x: jnp.log(jnp.maximum(x, 1e-30))
    explored = jnp.floor(size * exploration(number)).astype(jnp.int32)
    explored = jnp.minimum(explored, is_known.size - count)
    number_again = jnp.minimum(size - explored, count)
    utility = utilities(history, lots.factor, number)
    descending = jnp.sort(jnp.where(is_known, utility, -jnp.inf))[::-1]
    cut = CUT_OFF * descending[jnp.maximum(number_again - 1, 0)]
    again = jnp.where(is_known & (utility >= cut), log(utility) + lots.gumbel, -jnp.inf)
    new = jnp.where(is_known, -jnp.inf, log(num_samples * lots.factor) + lots.gumbel)
    chosen = _first(again, number_again) | _first(new, size - number_again)
    return jnp.flatnonzero(chosen, size=size).astype(jnp.int32)
