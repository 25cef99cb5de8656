"""The workload of an experiment: which client works how much and when.

Local iterations τ are drawn by cases, or simulated in virtual seconds under a
framework. The workload is drawn once, in `prepare`, and carried.
"""

import inspect
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax import rng, timeline
from tsfl_jax.config import Config, seed_of
from tsfl_jax.rules import SECTIONS
from tsfl_jax.timeline import copula, free_riders, replay, schedule, ticks
from tsfl_jax.timeline.fleet import Fleet, draw_fleet
from tsfl_jax.timeline.trace import Simulation, Task, Trace
from tsfl_jax.types import Schedule, UserError

_MOST_EVENTS = 2e7  # of a simulated timeline: minutes


class Workload(NamedTuple):
    """Which client works how much and when, drawn before training, on the host."""

    schedule: Schedule  # what the compiled program replays
    fleet: Fleet | None = None  # speeds in seconds; None: τ by cases
    trace: Trace | None = None  # deliveries in seconds; None: τ by cases
    tasks: list[Task] | None = None  # all that were begun; None: τ by cases
    held: Int[np.ndarray, "N"] | None = None  # samples of each client; None: τ by cases

    @property
    def seconds(self) -> Float[np.ndarray, "T"]:
        """Virtual time ``[T]`` float64 of each update."""
        assert self.schedule.seconds is not None  # only tests leave them out
        return self.schedule.seconds


def groups(text: str) -> tuple[str, ...]:
    """Split "constant(1); constant(2)" into its parts, one per group of clients."""
    return tuple(part.strip() for part in text.split(";") if part.strip())


def draw_workload(
    config: Config,
    held: Int[np.ndarray, "N"] | None = None,
    ties: copula.Scores | None = None,
) -> Workload:
    """Draw the workload of a validated config.

    Args:
      config: all settings.
      held: samples of each client, where they are given and not drawn.
      ties: scores of `copula`, of what goes together in a client.

    Returns:
      `Workload`; its schedule has notes on idle intervals and clients.

    Raises:
      UserError: a setting that cannot work, in one line.
    """
    if config.timeline.framework == "none":
        drawn = _draw_by_cases(config)
        if held is not None:
            size = np.broadcast_to(held.astype(np.int32), drawn.tau.shape)
            drawn = drawn._replace(size=size)
        workload = Workload(drawn)
    else:
        size, notes = _draw_sizes(config)
        ties = ties or {}
        if held is not None:
            size = held.astype(size.dtype)
        elif "size" in ties:
            size = size[copula.order(size, ties["size"])]
        fleet = _draw_fleet(config, size, ties)
        missing = sum(len(windows) == 0 for windows in fleet.online)
        if config.timeline.availability and missing:
            notes += (
                f"{config.timeline.availability}: {missing} of {len(fleet.online)} "
                "clients have no row and are always online",
            )
        trace, tasks = simulate_timeline(config, fleet)
        times = replay.schedule_of(trace, size)._replace(notes=notes)
        workload = Workload(times, fleet, trace, tasks, size)
    times = workload.schedule
    if config.schedule.free_riders:
        times = _with_free_riders(config, times)
    times = times._replace(notes=times.notes + _idle_notes(config, times))
    return workload._replace(schedule=times)


def _with_free_riders(config: Config, drawn: Schedule) -> Schedule:
    s = config.schedule
    clients = {}
    if drawn.delivery is not None:
        clients = {"client": drawn.delivery.client, "num_clients": config.num_clients}

    def make(tau: Int[np.ndarray, "T K"]) -> tuple[Int[np.ndarray, "T K"], ...]:
        chance = rng.generator(seed_of(config, "fleet"), "free riders")
        kind, number = s.free_riding, s.free_riders
        return free_riders.make_free_riders(tau, kind, number, chance, **clients)[:2]

    done, reported = make(drawn.tau)
    found = drawn._replace(tau=done, reported=reported)
    if drawn.threshold is None:
        return found
    # K counts what clients report, and what those have done that cannot upload.
    of_all, _ = make(_draw_by_cases(config, upload_above=0).tau)
    known = np.where(drawn.tau > 0, reported, of_all)
    return found._replace(threshold=known.mean(axis=1))


def _idle_notes(config: Config, drawn: Schedule) -> tuple[str, ...]:
    """A note on intervals and clients without work.

    Raises:
      UserError: no client works in any interval.
    """
    s, works = config.schedule, drawn.tau > 0
    if not works.any():
        names = ("tau", "tau_groups", "trace", "upload_above", "dropout", "free_riders")
        given = {n: getattr(s, n) for n in ("kind", *names) if getattr(s, n)}
        shown = ", ".join(f"--config.schedule.{n}={v}" for n, v in given.items())
        raise UserError(
            f"{shown}: no client does a local iteration in any of {len(works)} "
            "intervals; let some clients have τ >= 1 that is not lost"
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


def _draw_by_cases(config: Config, upload_above: int | None = None) -> Schedule:
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
        upload_above=s.upload_above if upload_above is None else upload_above,
        dropout=s.dropout,
        all_work=_counts_all_work(config),
        rng=rng.generator(seed_of(config, "fleet"), "schedule"),
    )
    ends = ticks.multiples(config.num_intervals, s.interval_seconds)
    return drawn._replace(seconds=ends)


def _counts_all_work(config: Config) -> bool:
    """Whether the settings of some rule ask for K of all work."""
    return any(
        getattr(getattr(config, section), "counts_all_work", False)
        for section in SECTIONS
    )


def _draw_sizes(config: Config) -> tuple[Int[np.ndarray, "N"], tuple[str, ...]]:
    """Samples of each client, constant on a timeline, and notes."""
    s = config.schedule
    drawn = schedule.make_schedule(
        "distribution",
        num_intervals=1,
        num_clients=config.num_clients,
        data_size=s.data_size,
        tau_groups=("constant(1)",),
        size_groups=groups(s.size_groups),
        rng=rng.generator(seed_of(config, "fleet"), "schedule"),
    )
    return drawn.size[0], drawn.notes


def _draw_fleet(
    config: Config, size: Int[np.ndarray, "N"], ties: copula.Scores
) -> Fleet:
    """Speeds of the clients; they do not depend on the framework."""
    t = config.timeline
    if config.schedule.iteration == "step":  # of a mini-batch, however many there are
        size = np.ones_like(size)
    fleet = draw_fleet(
        config.num_clients,
        size,
        speed=groups(t.speed),
        jitter=t.jitter,
        download=groups(t.download),
        upload=groups(t.upload),
        dropout=config.schedule.dropout,
        speeds_file=t.speeds,
        availability_file=t.availability,
        rng=rng.generator(seed_of(config, "fleet"), "fleet"),
    )
    share = np.ones(len(size)) if t.speeds else size / size.mean()
    horizon = config.num_intervals * config.schedule.interval_seconds
    return copula.tied(fleet, ties, share, horizon)


def simulate_timeline(config: Config, fleet: Fleet) -> Simulation:
    """Simulate all tasks and updates of T·Δ virtual seconds under the framework."""
    t, interval = config.timeline, config.schedule.interval_seconds
    intervals = config.num_intervals
    # A framework gets what its arguments name, also settings of its own.
    given = vars(t) | {"num_intervals": intervals, "interval": interval}
    given |= {"horizon": intervals * interval, "iterations": t.local_iterations}
    framework = timeline.FRAMEWORKS[t.framework]
    _, *arguments = inspect.signature(framework.simulate).parameters.values()
    if any(argument.name == "rng" for argument in arguments):
        given["rng"] = rng.generator(seed_of(config, "fleet"), "framework")
    own = {a.name: given[a.name] for a in arguments if a.name in given}
    for argument in arguments:
        if argument.name not in own and argument.default is argument.empty:
            raise TypeError(
                f"{framework.simulate.__name__} of framework {t.framework!r} takes "
                f"{argument.name!r}: expected {', '.join(given)}, rng, or a default"
            )
    _check_events(config, framework.events(fleet, **own))
    return framework.simulate(fleet, **own)


def _check_events(config: Config, events: float) -> None:
    """Refuse a timeline that takes too long to simulate."""
    t, seconds = config.timeline, config.schedule.interval_seconds
    if not events <= _MOST_EVENTS:
        given = f"speeds={t.speeds}" if t.speeds else f"speed={t.speed}"
        raise UserError(
            f"--config.timeline.{given}: {t.framework} would have to simulate about "
            f"{events:.2g} tasks and iterations in {config.num_intervals * seconds:g} "
            f"virtual seconds, expected at most {_MOST_EVENTS:.0g}; choose slower "
            "clients, or fewer or shorter intervals"
        )
