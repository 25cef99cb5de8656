"""The frameworks by name: functions from a `Fleet` to a `Simulation`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from tsfl_jax.sections import SETTINGS
from tsfl_jax.timeline import events
from tsfl_jax.timeline.asynchronous import afl, fedbuff, tsfl
from tsfl_jax.timeline.synchronous import esync, fedat, fedcs, safa, sfl
from tsfl_jax.timeline.trace import Simulation

# Arguments of a framework whose settings have other names.
_NAMES = {
    "iterations": "timeline.local_iterations",
    "interval": "schedule.interval_seconds",
}


class Framework(NamedTuple):
    """A framework, and what is known of it before it is simulated."""

    # Of a `Fleet` and what its arguments name: settings of ``timeline``, and
    # `horizon`, `iterations`, `num_intervals`, `interval`, `rng`.
    simulate: Callable[..., Simulation]
    label: str = ""  # its name in figures and tables; "": that of its table
    # Of the same: about how many events it simulates; see `events`.
    events: Callable[..., float] = events.of_arrivals

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that shape its timeline: those that its arguments name."""
        _, *arguments = inspect.signature(self.simulate).parameters
        names = (_NAMES.get(name, f"timeline.{name}") for name in arguments)
        return tuple(name for name in names if name in SETTINGS)


FRAMEWORKS = {
    "sfl": Framework(sfl, "SFL", events.of_tiers),
    "tsfl": Framework(tsfl, "T-SFL", events.of_clock),
    "afl": Framework(afl, "AFL"),
    "fedbuff": Framework(fedbuff, "FedBuff"),
    "fedat": Framework(fedat, "FedAT", events.of_tiers),
    "fedcs": Framework(fedcs, "FedCS", events.of_selection),
    "esync": Framework(esync, "ESync", events.of_tiers),
    "safa": Framework(safa, "SAFA", events.of_quota),
}


def readers() -> dict[str, list[str]]:
    """Setting of ``timeline`` that only some frameworks read → names of those."""
    found: dict[str, list[str]] = {}
    for name, each in FRAMEWORKS.items():
        for setting in each.settings:
            if setting.startswith("timeline."):
                found.setdefault(setting, []).append(name)
    return found


def read(values: dict[str, Any]) -> dict[str, Any]:
    """Settings by flat name, without those that only other frameworks read."""
    mine = values["timeline.framework"]
    return {n: v for n, v in values.items() if mine in readers().get(n, [mine])}
