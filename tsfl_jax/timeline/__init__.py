"""The frameworks by name: functions from a `Fleet` to a `Simulation`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tsfl_jax.components import Part
from tsfl_jax.timeline.asynchronous import afl, fedbuff, hysync, tsfl
from tsfl_jax.timeline.fleet import Seconds
from tsfl_jax.timeline.semi_async import cached, safa, ttfed
from tsfl_jax.timeline.synchronous import esync, fedat, fedcs, sfl
from tsfl_jax.timeline.timeline_settings import FleetConfig
from tsfl_jax.timeline.trace import Simulation

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
    # From the mean seconds of each client's task, of T-SFL's iteration, and by name
    # what the arguments name: about how many pass from one of its tasks to the next.
    pace: Callable[[Seconds, dict[str, Any]], Any] = lambda task, settings: task
    sections: tuple[type, ...] = (FleetConfig,)
    cohorts: tuple[str, ...] = ()  # settings of ``cohort`` that it reads
    all_count: bool = False  # whether all count that are asked and not lost

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its arguments, without the fleet."""
        return tuple(inspect.signature(self.simulate).parameters)[1:]

    @property
    def settings(self) -> tuple[str, ...]:
        """What its arguments name; settings, but for such as `horizon` and `rng`."""
        return tuple(_NAMES.get(name, f"timeline.{name}") for name in self.parameters)

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those of the values by name that its arguments name."""
        return {name: values[name] for name in self.parameters if name in values}

    @property
    def reads(self) -> tuple[str, ...]:
        """Those of ``timeline`` and ``cohort``; all frameworks read the others."""
        timeline = (name for name in self.settings if name.startswith("timeline."))
        return (*timeline, *self.cohorts)


# Without a framework: τ by cases.
NONE = Part(
    reads=(
        *("schedule.tau", "schedule.tau_groups", "schedule.trace"),
        *("schedule.upload_above", "cohort.size"),
    )
)
_ASKS = ("cohort.size",)
_ASKS_MORE = (*_ASKS, "cohort.ask")


def _rounds(task: Seconds, settings: dict[str, Any]) -> float:
    """Of the client that ends a round: of all, of those asked for, or of a tier."""
    share = settings.get("fraction", 1 / settings.get("tiers", 1))
    return np.quantile(task, share, method="inverted_cdf")


def _selection(task: Seconds, settings: dict[str, Any]) -> float:
    """Of the fastest; each round compares all clients for every one it selects."""
    return task.min() / (1 + len(task) / 100)


def _clock(task: Seconds, settings: dict[str, Any]) -> Seconds:
    """At most a task per client and interval."""
    return np.maximum(task, settings["interval"])


FRAMEWORKS = {
    "sfl": Framework(sfl, "SFL", _rounds, cohorts=_ASKS_MORE, all_count=True),
    "tsfl": Framework(tsfl, "T-SFL", cohorts=_ASKS, all_count=True),
    "ttfed": Framework(ttfed, "TT-Fed", _clock, cohorts=_ASKS),
    "afl": Framework(afl, "AFL", cohorts=_ASKS),
    "fedbuff": Framework(fedbuff, "FedBuff", cohorts=_ASKS),
    "hysync": Framework(hysync, "HySync", cohorts=_ASKS),
    "fedat": Framework(fedat, "FedAT", _rounds, cohorts=_ASKS_MORE),
    "fedcs": Framework(fedcs, "FedCS", _selection, cohorts=_ASKS),
    "esync": Framework(esync, "ESync", _rounds, cohorts=_ASKS_MORE, all_count=True),
    "safa": Framework(safa, "SAFA", _rounds, cohorts=_ASKS),
    "cached": Framework(cached, "cached", _rounds, cohorts=_ASKS),
}
