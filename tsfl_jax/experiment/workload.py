"""Who works how much and when, of a config: τ by cases, or from speeds in seconds."""

import inspect
import sys

import numpy as np

from tsfl_jax import rng, timeline
from tsfl_jax.config import Config
from tsfl_jax.report import progress
from tsfl_jax.timeline import fleet, free_riders, replay, schedule
from tsfl_jax.timeline.trace import Simulation
from tsfl_jax.types import Schedule, UserError

# Of a timeline's simulation in Python: refused, announced, and how long one takes.
_MOST_EVENTS, _MANY_EVENTS, _EVENT_SECONDS = 2e7, 1e6, 2e-5


def groups(text: str) -> tuple[str, ...]:
    """The parts of "constant(1); constant(2)", one for each group of clients."""
    return tuple(part.strip() for part in text.split(";") if part.strip())


def draw_schedule(config: Config) -> Schedule:
    """τ, sizes and deliveries of a config, before training.

    Raises:
      UserError: a setting that cannot work, in one line.
    """
    timed = config.timeline.framework != "none"
    drawn = _timed(config) if timed else _by_cases(config)
    s = config.schedule
    if s.free_riders:
        drawn = _with_riders(config, drawn)
    return drawn._replace(notes=drawn.notes + _idle(config, drawn))


def _with_riders(config: Config, drawn: Schedule) -> Schedule:
    s = config.schedule
    places = {}
    if drawn.delivery is not None:
        places = {"client": drawn.delivery.client, "num_clients": config.num_clients}
    done, reported, _ = free_riders.ride(
        drawn.tau,
        s.free_riding,
        s.free_riders,
        rng.generator(config.seed, "free riders"),
        **places,
    )
    return drawn._replace(tau=done, reported=reported)


def _idle(config: Config, drawn: Schedule) -> tuple[str, ...]:
    """A note on intervals and clients without work.

    Raises:
      UserError: nobody ever works.
    """
    s, works = config.schedule, drawn.tau > 0
    if not works.any():
        causes = {
            "tau": str(tuple(s.tau)) if s.tau else "",
            "tau_groups": s.tau_groups,
            "trace": s.trace,
            "upload_above": s.upload_above,
            "dropout": s.dropout,
            "free_riders": s.free_riders,
        }
        given = [f"--config.schedule.{n}={v}" for n, v in causes.items() if v]
        raise UserError(
            f"{', '.join(given) or f'--config.schedule.kind={s.kind}'}: no client does "
            f"a local iteration in any of {len(works)} intervals; let some clients "
            "have τ >= 1 that is not lost"
        )
    client = np.arange(works.shape[1])
    if drawn.delivery is not None:
        client = drawn.delivery.client
    worked = np.zeros(config.num_clients, bool)
    worked[np.broadcast_to(client, works.shape)[works]] = True
    missing, empty = np.flatnonzero(~worked), int((~works.any(axis=1)).sum())
    parts = []
    if empty:
        parts.append(f"no client trains in {empty} of {len(works)} intervals")
    if len(missing):
        first = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        parts.append(
            f"{len(missing)} of {config.num_clients} clients never train ({first})"
        )
    return ("; ".join(parts),) if parts else ()


def _by_cases(config: Config) -> Schedule:
    s = config.schedule
    drawn = schedule.make_schedule(
        s.kind,
        num_intervals=config.num_intervals,
        num_clients=config.num_clients,
        data_size=s.data_size,
        tau=tuple(s.tau),
        tau_groups=groups(s.tau_groups),
        size_groups=groups(s.size_groups),
        trace=s.trace,
        upload_above=s.upload_above,
        dropout=s.dropout,
        rng=rng.generator(config.seed, "schedule"),
    )
    ends = np.arange(1, config.num_intervals + 1, dtype=np.float64)
    return drawn._replace(seconds=ends * s.interval_seconds)


def sizes_of(config: Config) -> np.ndarray:
    """``[N]`` samples of each client, the same all the time: of a timeline."""
    return _sizes(config)[0]


def _sizes(config: Config) -> tuple[np.ndarray, tuple[str, ...]]:
    s = config.schedule
    drawn = schedule.make_schedule(
        "distribution",
        num_intervals=1,
        num_clients=config.num_clients,
        data_size=s.data_size,
        tau_groups=("constant(1)",),
        size_groups=groups(s.size_groups),
        rng=rng.generator(config.seed, "schedule"),
    )
    return drawn.size[0], drawn.notes


def fleet_of(config: Config, size: np.ndarray) -> fleet.Fleet:
    """How fast the clients are; does not depend on the framework."""
    t = config.timeline
    return fleet.draw_fleet(
        config.num_clients,
        size,
        speed=groups(t.speed),
        jitter=t.jitter,
        download=groups(t.download),
        upload=groups(t.upload),
        dropout=config.schedule.dropout,
        speeds_file=t.speeds,
        availability_file=t.availability,
        rng=rng.generator(config.seed, "fleet"),
    )


def simulate_timeline(config: Config, clients: fleet.Fleet) -> Simulation:
    """All tasks and updates of T·Δ virtual seconds, under the framework."""
    t, interval = config.timeline, config.schedule.interval_seconds
    intervals = config.num_intervals
    # A framework gets what its arguments name, also settings of its own.
    given = vars(t) | {"num_intervals": intervals, "interval": interval}
    given |= {"horizon": intervals * interval, "iterations": t.local_iterations}
    arguments = inspect.signature(timeline.FRAMEWORKS[t.framework]).parameters
    own = {name: given[name] for name in arguments if name in given}
    _check_events(config, timeline.expected_events(t.framework, clients, **own))
    return timeline.FRAMEWORKS[t.framework](clients, **own)


def _check_events(config: Config, events: float) -> None:
    """Refuses a timeline that takes too long to simulate, announces a long one."""
    t, seconds = config.timeline, config.schedule.interval_seconds
    if not events <= _MOST_EVENTS:
        given = f"speeds={t.speeds}" if t.speeds else f"speed={t.speed}"
        raise UserError(
            f"--config.timeline.{given}: {t.framework} would have to simulate about "
            f"{events:.2g} tasks and iterations in {config.num_intervals * seconds:g} "
            f"virtual seconds, expected at most {_MOST_EVENTS:.0g}; choose slower "
            "clients, or fewer or shorter intervals"
        )
    if events > _MANY_EVENTS:
        progress.log(
            sys.stderr,
            f"simulating about {events:.2g} tasks and iterations of the timeline, "
            f"roughly {events * _EVENT_SECONDS:.0f} s …",
        )


def _timed(config: Config) -> Schedule:
    size, notes = _sizes(config)
    trace = simulate_timeline(config, fleet_of(config, size)).trace
    return replay.schedule_of(trace, size)._replace(notes=notes)
