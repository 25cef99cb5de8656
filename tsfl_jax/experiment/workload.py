"""The workload of an experiment: which client works how much and when.

Local iterations τ are drawn by cases, or simulated in virtual seconds under a
framework. The workload is drawn once, in `prepare`, and carried.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tsfl_jax import rng, timeline
from tsfl_jax.config import Config, seed_of
from tsfl_jax.engine import client as local
from tsfl_jax.experiment import weighting
from tsfl_jax.rules import SECTIONS
from tsfl_jax.timeline import (
    arrival,
    cohort,
    copula,
    crowd,
    deliveries,
    feedback,
    free_riders,
    schedule,
    ticks,
)
from tsfl_jax.timeline.cohort import Cohorts
from tsfl_jax.timeline.fleet import Fleet, draw_fleet
from tsfl_jax.timeline.trace import Simulation, Task, Trace
from tsfl_jax.types import Schedule, UserError

_MOST_EVENTS = 2e7  # of a simulated timeline: minutes


class Workload(NamedTuple):
    """Which client works how much and when, drawn before training, on the host."""

    schedule: Schedule  # what the compiled program replays
    # Speeds in seconds, or how those of cohorts are drawn; None: τ by cases.
    fleet: Fleet | Cohorts | None = None
    trace: Trace | None = None  # deliveries in seconds; None: τ by cases
    tasks: list[Task] | None = None  # all that were begun; None: τ by cases
    # The most samples that each client ever holds; on a timeline also of clients that
    # never deliver, since the split must not depend on framework and horizon.
    held: Int[np.ndarray, "N"] = np.zeros(0, np.int32)
    # Ids of those on the device, sorted: all, of cohorts those that ever work.
    drawn: Int[np.ndarray, "U"] = np.zeros(0, np.int32)

    @property
    def places(self) -> Int[np.ndarray, "T K"]:
        """Where `drawn` has the client of each slot."""
        client, last = self.schedule.client, len(self.drawn) - 1
        if self.schedule.in_order:
            return client
        # Nobody works in a slot of another client.
        return np.minimum(np.searchsorted(self.drawn, client), last).astype(np.int32)

    @property
    def seconds(self) -> Float[np.ndarray, "T"]:
        """Virtual time ``[T]`` float64 of each update."""
        return self.schedule.seconds


def groups(text: str) -> tuple[str, ...]:
    """Split "constant(1); constant(2)" into its parts, one per group of clients."""
    return tuple(part.strip() for part in text.split(";") if part.strip())


def draw_workload(
    config: Config,
    held: Int[np.ndarray, "N"] | None = None,
    sampler: Callable[[cohort.Draw], Int[np.ndarray, "K"]] | None = None,
    ties: copula.Scores | None = None,
) -> Workload:
    """Draw the workload of a validated config.

    Args:
      config: all settings.
      held: samples of each client, where they are given and not drawn.
      sampler: of cohorts, the user's own, in place of that of the settings.
      ties: scores of `copula`, of what goes together in a client.

    Returns:
      `Workload`; its schedule has notes on idle intervals and clients.

    Raises:
      UserError: a setting that cannot work, in one line.
    """
    if config.cohort.size:
        return _with_arrivals(config, _draw_cohorts(config, held, sampler))
    if sampler is not None:
        raise UserError(
            "sampler=: would be ignored with --config.cohort.size=0; say how many "
            "clients it draws"
        )
    if config.timeline.framework == "none":
        drawn = _draw_by_cases(config)
        if held is not None:
            size = np.broadcast_to(held.astype(np.int32), drawn.tau.shape)
            drawn = drawn._replace(size=size)
        workload = Workload(drawn, held=drawn.size.max(axis=0))
    else:
        constant = {"kind": "distribution", "tau_groups": ("constant(1)",)}
        constant |= {"num_intervals": 1, "upload_above": 0, "dropout": 0.0}
        drawn, ties = _draw_by_cases(config, **constant), ties or {}
        size, notes = drawn.size[0], drawn.notes
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
        times = deliveries.schedule_of(trace, size)._replace(notes=notes)
        workload = Workload(times, fleet, trace, tasks, size)
    times = _checked(
        config, workload.schedule, lambda: _draw_by_cases(config, upload_above=0)
    )
    everyone = np.arange(config.num_clients, dtype=np.int32)
    return _with_arrivals(config, workload._replace(schedule=times, drawn=everyone))


def _with_arrivals(config: Config, workload: Workload) -> Workload:
    """The workload where samples arrive during the run, if they do."""
    first, times = config.schedule.arrive_from, workload.schedule
    end = config.num_intervals * config.schedule.interval_seconds
    times = arrival.arriving(times, workload.trace, first, end)
    return workload._replace(schedule=times)


def _draw_cohorts(
    config: Config,
    held: Int[np.ndarray, "N"] | None,
    sampler: Callable[[cohort.Draw], Int[np.ndarray, "K"]] | None,
) -> Workload:
    """The workload where some clients are asked at a time, and only those are drawn."""
    s, framework = config.schedule, config.timeline.framework
    everyone = _crowd_of(config, held)
    cohorts = cohort.make_cohorts(everyone, config.cohort, sampler)
    held = everyone.num_samples
    if framework == "none":
        client, there = cohort.all_asked(cohorts, config.num_intervals)
        by_cases = functools.partial(_by_cases, config, everyone, client, there)
        ends = ticks.multiples(config.num_intervals, s.interval_seconds)
        times = by_cases(upload_above=s.upload_above)._replace(seconds=ends)
        workload, all_count = Workload(times, held=held), True
        times = _checked(config, times, lambda: by_cases(upload_above=0))
    else:
        trace, tasks = simulate_timeline(config, cohorts)
        times, there = (
            deliveries.schedule_of(trace, held, cohorts=True),
            trace.client >= 0,
        )
        workload = Workload(times, cohorts, trace, tasks, held)
        all_count = timeline.FRAMEWORKS[framework].all_count
        times = _checked(config, times)
    if config.cohort.choice is not None:
        return _with_candidates(config, everyone, workload, times)
    if np.isnan(times.threshold).all() and not there.all():  # a mean of those asked
        known = deliveries.claimed(times).sum(1) / np.maximum(there.sum(1), 1)
        times = times._replace(threshold=known)
    chance = cohort.inclusion(cohorts, times.client, all_count)
    times = times._replace(share=weighting.shares(config, times, held, chance))
    return workload._replace(schedule=times, drawn=deliveries.drawn(times))


def _by_cases(
    config: Config,
    everyone: crowd.Crowd,
    client: Int[np.ndarray, "T K"],
    there: Bool[np.ndarray, "T K"],
    upload_above: int = 0,
) -> Schedule:
    """τ by cases of those who are asked."""
    s = config.schedule
    return crowd.schedule_of(
        everyone,
        client,
        there,
        kind=s.kind,
        tau=tuple(s.tau),
        tau_groups=groups(s.tau_groups),
        upload_above=upload_above,
        all_work=_counts_all_work(config),
    )


def _with_candidates(
    config: Config, everyone: crowd.Crowd, workload: Workload, times: Schedule
) -> Workload:
    """The workload of candidates, of whom the cohort is chosen while training."""
    c, client = config.cohort, times.client
    note = (
        f"who is asked depends on training: {c.sampler} chooses {c.size} of "
        f"{client.shape[1]} candidates in each interval; work that is known before "
        "training is that of all candidates"
    )
    times = times._replace(notes=(*times.notes, note))
    if c.sampler == "oort":
        # As if all would deliver: the server does not know who will not.
        sure = everyone._replace(dropout=0.0)
        whole = _by_cases(config, sure, client, np.ones(client.shape, bool))
        steps = whole.tau * local.steps_per_iteration(
            whole.size, config.batch_size, config.schedule.iteration
        )
        lots = feedback.draw_lots(everyone.seed, client, steps, c.preferred, c.penalty)
        times = times._replace(lots=lots)
    # Also who never works: what its data say is asked for.
    return workload._replace(schedule=times, drawn=np.unique(client))


def _crowd_of(config: Config, held: Int[np.ndarray, "N"] | None) -> crowd.Crowd:
    s, t, N = config.schedule, config.timeline, config.num_clients
    kind = s.kind if t.framework == "none" else "distribution"
    return crowd.make_crowd(
        N,
        seed_of(config, "fleet"),
        sizes=schedule.size_texts(kind, groups(s.size_groups), s.data_size, N),
        num_samples=held,
        seconds={n: groups(getattr(t, n)) for n in ("speed", "download", "upload")},
        speeds_file=t.speeds,
        availability_file=t.availability,
        jitter=t.jitter,
        dropout=s.dropout,
        by_size=s.iteration == "pass",
    )


def _checked(
    config: Config, drawn: Schedule, honest: Callable[[], Schedule] | None = None
) -> Schedule:
    """The schedule with free riders, and with notes on idle intervals and clients.

    honest: draws τ by cases once more, also of those that cannot upload.
    """
    if config.schedule.free_riders:
        drawn = _with_free_riders(config, drawn, honest)
    return drawn._replace(notes=drawn.notes + _idle_notes(config, drawn))


def _with_free_riders(
    config: Config, drawn: Schedule, honest: Callable[[], Schedule] | None
) -> Schedule:
    s = config.schedule
    clients = {}
    if not drawn.in_order:
        clients = {"client": drawn.client, "num_clients": config.num_clients}

    def make(tau: Int[np.ndarray, "T K"]) -> tuple[Int[np.ndarray, "T K"], ...]:
        chance = rng.generator(seed_of(config, "fleet"), "free riders")
        kind, number = s.free_riding, s.free_riders
        return free_riders.make_free_riders(tau, kind, number, chance, **clients)[:2]

    done, reported = make(drawn.tau)
    found = drawn._replace(tau=done, reported=reported)
    if np.isnan(drawn.threshold).all() or honest is None:
        return found
    # K counts what clients report, and what those have done that cannot upload.
    of_all, _ = make(honest().tau)
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
    worked = np.zeros(config.num_clients, bool)
    worked[drawn.client[works]] = True
    missing, empty = np.flatnonzero(~worked), int((~works.any(axis=1)).sum())
    missing = missing[: 0 if config.cohort.size else None]  # most are never asked
    parts = []
    if empty:
        parts.append(f"no client trains in {empty} of {len(works)} intervals")
    if len(missing):
        first = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        parts.append(
            f"{len(missing)} of {config.num_clients} clients never train ({first})"
        )
    return ("; ".join(parts),) if parts else ()


def _draw_by_cases(config: Config, **changes: Any) -> Schedule:
    """τ and samples by the settings, but for the changed arguments."""
    s = config.schedule
    arguments: dict[str, Any] = {
        "kind": s.kind,
        "num_intervals": config.num_intervals,
        "num_clients": config.num_clients,
        "data_size": s.data_size,
        "tau": tuple(s.tau),
        "tau_groups": groups(s.tau_groups),
        "size_groups": groups(s.size_groups),
        "trace": s.trace,
        "upload_above": s.upload_above,
        "dropout": s.dropout,
        "all_work": _counts_all_work(config),
    }
    arguments |= {"rng": rng.generator(seed_of(config, "fleet"), "schedule")} | changes
    drawn = schedule.make_schedule(**arguments)
    ends = ticks.multiples(len(drawn.tau), s.interval_seconds)
    return drawn._replace(seconds=ends)


def _counts_all_work(config: Config) -> bool:
    """Whether the settings of some rule ask for K of all work."""
    return any(
        getattr(getattr(config, section), "counts_all_work", False)
        for section in SECTIONS
    )


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


def simulate_timeline(config: Config, fleet: Fleet | Cohorts) -> Simulation:
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
    # A cohort is as fast as the others, about.
    some = cohort.first_fleet(fleet) if isinstance(fleet, Cohorts) else fleet
    _check_events(config, some, own)
    return framework.simulate(fleet, **own)


def _check_events(config: Config, fleet: Fleet, settings: dict[str, Any]) -> None:
    """Refuse a timeline that takes too long to simulate, as if all were online."""
    t, end = config.timeline, config.num_intervals * config.schedule.interval_seconds
    task = fleet.iteration
    with np.errstate(over="ignore", divide="ignore"):
        if "iterations" in settings:
            task = fleet.download + settings["iterations"] * task + fleet.upload
        pace = timeline.FRAMEWORKS[t.framework].pace(task.mean(1), settings)
        events = len(task) * (1 + np.mean(end / pace))
    if not events <= _MOST_EVENTS:
        given = f"speeds={t.speeds}" if t.speeds else f"speed={t.speed}"
        raise UserError(
            f"--config.timeline.{given}: {t.framework} would have to simulate about "
            f"{events:.2g} tasks and iterations in {end:g} "
            f"virtual seconds, expected at most {_MOST_EVENTS:.0g}; choose slower "
            "clients, or fewer or shorter intervals"
        )
