"""The frameworks by name: functions from a `Fleet` to a `Simulation`."""

from collections.abc import Callable
from typing import NamedTuple

from tsfl_jax.timeline import events
from tsfl_jax.timeline.asynchronous import afl, fedbuff, tsfl
from tsfl_jax.timeline.synchronous import esync, fedat, fedcs, safa, sfl
from tsfl_jax.timeline.trace import Simulation

_H = "timeline.local_iterations"


class Framework(NamedTuple):
    """A framework, and what is known of it before it is simulated."""

    # Of a `Fleet` and what its arguments name: settings of ``timeline``, and
    # `horizon`, `iterations`, `num_intervals`, `interval`, `rng`.
    simulate: Callable[..., Simulation]
    # Of the same: about how many events it simulates; see `events`.
    events: Callable[..., float] = events.of_arrivals
    settings: tuple[str, ...] = (_H,)  # those that shape its timeline
    late: bool = False  # whether a delivery can be of an earlier global model


FRAMEWORKS = {
    "sfl": Framework(sfl, events.of_tiers),
    "tsfl": Framework(
        tsfl, events.of_clock, ("schedule.interval_seconds", "timeline.carry")
    ),
    "afl": Framework(afl, late=True),
    "fedbuff": Framework(fedbuff, settings=(_H, "timeline.buffer"), late=True),
    "fedat": Framework(fedat, events.of_tiers, (_H, "timeline.tiers"), late=True),
    "fedcs": Framework(fedcs, events.of_selection, (_H, "timeline.deadline")),
    "esync": Framework(esync, events.of_tiers),
    "safa": Framework(
        safa, events.of_quota, (_H, "timeline.fraction", "timeline.lag"), late=True
    ),
}
