"""Free riders: clients that report work they did not do, or that come and go.

The work of a client and the work it reports are two arrays, so that a rule may see
either.
"""

import numpy as np
from jaxtyping import Bool, Int

from tsfl_jax.timeline.timeline_settings import check


def make_free_riders(
    tau: Int[np.ndarray, "T K"],
    kind: str,
    number: int,
    rng: np.random.Generator,
    period: int = 5,
    client: Int[np.ndarray, "T K"] | None = None,
    num_clients: int = 0,
) -> tuple[Int[np.ndarray, "T K"], Int[np.ndarray, "T K"], Bool[np.ndarray, " N"]]:
    """Turn some clients into free riders.

    Args:
      tau: ``[T, N]`` local iterations of honest clients; ``[T, K]`` with `client`.
      kind: "claim": does one iteration and reports as many as the busiest client,
        H_t. "echo": does none, sends the global model back and reports H_t. "visit":
        honest, but away in every second period of `period` intervals.
      number: of free riders, in [0, N].
      rng: draws which clients.
      period: intervals ≥ 1, visit only.
      client: ``[T, K]`` int32 in [0, N), of each delivery; None: all N in order.
      num_clients: N, with `client` only.

    Returns:
      Iterations done and reported, int32 like `tau`, and free riders ``[N]`` bool.

    Raises:
      UserError: a value out of range.
    """
    intervals = len(tau)
    clients = tau.shape[1] if client is None else num_clients
    check("schedule.free_riding", kind)
    check("schedule.free_riders", number, clients, "num_clients")
    free_rider = np.zeros(clients, bool)
    free_rider[rng.permutation(clients)[:number]] = True
    here = free_rider if client is None else free_rider[client]
    if kind == "visit":
        away = (np.arange(intervals) // period) % 2 == 1
        tau = np.where(away[:, None] & here, 0, tau).astype(np.int32)
        return tau, tau, free_rider
    busiest = tau.max(axis=1, keepdims=True)
    idles = here & (tau > 0)  # an absent client reports nothing
    least = np.minimum(tau, 1) if kind == "claim" else 0
    reported = np.where(idles, busiest, tau).astype(np.int32)
    return np.where(idles, least, tau).astype(np.int32), reported, free_rider
