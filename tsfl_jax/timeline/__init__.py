"""The frameworks by name: functions from a `Fleet` to a `Simulation`."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

from tsfl_jax.components import Part
from tsfl_jax.timeline import events
from tsfl_jax.timeline.asynchronous import afl, fedbuff, tsfl
from tsfl_jax.timeline.caching import cached
from tsfl_jax.timeline.semi_async import safa
from tsfl_jax.timeline.settings import FleetConfig
from tsfl_jax.timeline.synchronous import esync, fedat, fedcs, sfl
from tsfl_jax.timeline.trace import Simulation
from tsfl_jax.timeline.triggered import ttfed
from tsfl_jax.timeline.windowed import hysync

# Arguments of a framework whose settings have other names.
_NAMES = {
    "iterations": "timeline.local_iterations",
    "interval": "schedule.interval_seconds",
}


class Framework(NamedTuple):
    """A framework, and what is known of it before it is simulated."""

    # Of a `Fleet`, or of `cohort.Cohorts` where it has `cohorts`, and what its
    # arguments name: settings of ``timeline``, and `horizon`, `iterations`,
    # `num_intervals`, `interval`, `rng`.
    simulate: Callable[..., Simulation]
    label: str = ""  # its name in figures and tables; "": that of its table
    # Of the same: about how many events it simulates; see `events`.
    events: Callable[..., float] = events.of_arrivals
    sections: tuple[type, ...] = (FleetConfig,)
    cohorts: tuple[str, ...] = ()  # settings of ``cohort`` that it reads
    all_count: bool = False  # whether all count that are asked and not lost

    @property
    def settings(self) -> tuple[str, ...]:
        """What its arguments name; settings, but for such as `horizon` and `rng`."""
        _, *arguments = inspect.signature(self.simulate).parameters
        return tuple(_NAMES.get(name, f"timeline.{name}") for name in arguments)

    @property
    def reads(self) -> tuple[str, ...]:
        """Those of ``timeline`` and ``cohort``; all frameworks read the others."""
        own = (name for name in self.settings if name.startswith("timeline."))
        return (*own, *self.cohorts)


# Without a framework: τ by cases.
NONE = Part(
    reads=(
        *("schedule.tau", "schedule.tau_groups", "schedule.trace"),
        *("schedule.upload_above", "cohort.size"),
    )
)
_ASKS = ("cohort.size",)
_WAITS = (*_ASKS, "cohort.short")
_ASKS_MORE = (*_WAITS, "cohort.ask")

FRAMEWORKS = {
    "sfl": Framework(sfl, "SFL", events.of_tiers, cohorts=_ASKS_MORE, all_count=True),
    "tsfl": Framework(tsfl, "T-SFL", events.of_clock, cohorts=_ASKS, all_count=True),
    "ttfed": Framework(ttfed, "TT-Fed", events.of_trigger, cohorts=_ASKS),
    "afl": Framework(afl, "AFL", cohorts=_ASKS),
    "fedbuff": Framework(fedbuff, "FedBuff", cohorts=_ASKS),
    "hysync": Framework(hysync, "HySync", cohorts=_ASKS),
    "fedat": Framework(fedat, "FedAT", events.of_tiers, cohorts=_ASKS_MORE),
    "fedcs": Framework(fedcs, "FedCS", events.of_selection, cohorts=_WAITS),
    "esync": Framework(
        esync, "ESync", events.of_tiers, cohorts=_ASKS_MORE, all_count=True
    ),
    "safa": Framework(safa, "SAFA", events.of_quota, cohorts=_WAITS),
    "cached": Framework(cached, "cached", events.of_quota, cohorts=_ASKS),
}
