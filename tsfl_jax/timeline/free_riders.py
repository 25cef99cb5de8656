"""Clients that do not keep to the rules: free riders, and those who come and go.

What a client did and what it reports are two arrays, so any rule can be shown both.
"""

import numpy as np

from tsfl_jax.validate import check


def ride(
    tau: np.ndarray,
    kind: str,
    number: int,
    rng: np.random.Generator,
    period: int = 5,
    client: np.ndarray | None = None,
    num_clients: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Turns some clients into free riders.

    Args:
      tau: ``[T, N]`` local iterations of honest clients; ``[T, K]`` with `client`.
      kind: "claim": does one iteration and reports as many as the busiest client,
        H_t. "echo": does none, sends the global model back and reports H_t. "visit":
        honest, but away in every other block of `period` intervals.
      number: of free riders, in [0, N].
      rng: decides which clients.
      period: intervals ≥ 1, visit only.
      client: ``[T, K]`` int32 in [0, N), whose places they are; None: N in order.
      num_clients: N, with `client` only.

    Returns:
      done, reported int32 as `tau`, and who rides ``[N]`` bool.

    Raises:
      UserError: a value out of range.
    """
    intervals = len(tau)
    clients = tau.shape[1] if client is None else num_clients
    check("schedule.free_riding", kind)
    check("schedule.free_riders", number, clients, "num_clients")
    rides = np.zeros(clients, bool)
    rides[rng.permutation(clients)[:number]] = True
    here = rides if client is None else rides[client]
    if kind == "visit":
        away = (np.arange(intervals) // period) % 2 == 1
        done = np.where(away[:, None] & here, 0, tau).astype(np.int32)
        return done, done, rides
    busiest = tau.max(axis=1, keepdims=True)
    there = here & (tau > 0)  # an absent one reports nothing
    least = np.minimum(tau, 1) if kind == "claim" else 0
    done = np.where(there, least, tau).astype(np.int32)
    return done, np.where(there, busiest, tau).astype(np.int32), rides
