"""The workload of an experiment: which client works how much and when.

Local iterations τ are drawn by cases, or simulated in virtual seconds under a
framework. The workload is drawn once, in `prepare`, and carried.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from tsfl_jax import rng, timeline
from tsfl_jax.config import Config, seeds_of
from tsfl_jax.engine import client as local
from tsfl_jax.prepare import weighting
from tsfl_jax.rules import SECTIONS
from tsfl_jax.timeline import (
    attackers,
    cohort,
    copula,
    crowd,
    deliveries,
    feedback,
    schedule,
    ticks,
)
from tsfl_jax.timeline.cohort import Cohorts
from tsfl_jax.timeline.fleet import UNITS, Fleet, draw_fleet, watts
from tsfl_jax.timeline.trace import Simulation, Task, Trace
from tsfl_jax.types import Schedule, UserError, parts_of

_MOST_EVENTS = 2e7  # of a simulated timeline: minutes
Bytes = tuple[float, float]  # of a download and an upload


class Workload(NamedTuple):
    """Which client works how much and when, drawn before training, on the host."""

    schedule: Schedule  # what the compiled program replays
    # Speeds in seconds, or how those of cohorts are drawn; None: τ by cases.
    fleet: Fleet | Cohorts | None = None
    trace: Trace | None = None  # deliveries in seconds; None: τ by cases
    tasks: list[Task] | None = None  # all that were begun; None: τ by cases
    # The most samples that each client ever has; on a timeline also of clients that
    # never deliver, since the split must not depend on framework and horizon.
    num_samples: Int[np.ndarray, "N"] = np.zeros(0, np.int32)
    # Ids of those on the device, sorted: all, of cohorts those that ever work.
    drawn: Int[np.ndarray, "U"] = np.zeros(0, np.int32)
    transfer_bytes: Bytes = (0.0, 0.0)
    attackers: Bool[np.ndarray, "U"] = np.zeros(0, bool)  # whether each attacks

    @property
    def places(self) -> Int[np.ndarray, "T K"]:
        """Where `drawn` has the client of each slot."""
        client, last = self.schedule.client, len(self.drawn) - 1
        if self.schedule.in_order:
            return client
        # An empty slot may name a client that is not drawn; its τ is 0.
        return np.minimum(np.searchsorted(self.drawn, client), last).astype(np.int32)


class Plan(NamedTuple):
    """What a workload follows from."""

    config: Config
    seed: int  # of the fleet
    is_attacker: Bool[np.ndarray, "N"]
    transfer_bytes: Bytes | None  # None: not known

    @property
    def by_cases(self) -> bool:
        """Whether there is no clock, and τ is drawn."""
        return self.config.timeline.framework == "none"

    @property
    def horizon(self) -> float:
        """Virtual seconds of the run, T·Δ."""
        return self.config.num_intervals * self.config.schedule.interval_seconds


def plan_of(config: Config, transfer_bytes: Bytes | None = None) -> Plan:
    """What of a config decides who works when."""
    seed = seeds_of(config).fleet
    is_attacker = attackers.draw(seed, config.num_clients, config.attack)
    return Plan(config, seed, is_attacker, transfer_bytes)


def groups(text: str) -> tuple[str, ...]:
    """The parts of "constant(1); constant(2)", one per group of clients."""
    return parts_of(text, ";")


def draw_workload(
    config: Config,
    num_samples: Int[np.ndarray, "N"] | None = None,
    scores: copula.Scores | None = None,
    transfer_bytes: Bytes | None = None,
) -> Workload:
    """Draw the workload of a validated config.

    Args:
      config: all settings.
      num_samples: of each client, where they are given and not drawn.
      scores: of `copula`, of what goes together in a client.
      transfer_bytes: of a download and an upload; None: not known, and no bandwidth.

    Returns:
      `Workload`; its schedule has notes on idle intervals and clients.

    Raises:
      UserError: a setting that cannot work, in one line.
    """
    plan = plan_of(config, transfer_bytes)
    if config.cohort.size:
        workload = _of_cohorts(plan, num_samples)
    else:
        workload = _of_all(plan, num_samples, scores or {})
    share, times = config.schedule.arrive_from, workload.schedule
    times = deliveries.arriving(times, workload.trace, share, plan.horizon)
    lines = attackers.notes(plan.is_attacker, config.attack)
    times = times._replace(notes=(*times.notes, *lines))
    watts(config.timeline.power, config.num_clients, workload.drawn)  # refuses others
    is_attacker, sent = plan.is_attacker[workload.drawn], transfer_bytes or (0.0, 0.0)
    return workload._replace(schedule=times, attackers=is_attacker, transfer_bytes=sent)


def _of_all(
    plan: Plan, num_samples: Int[np.ndarray, "N"] | None, scores: copula.Scores
) -> Workload:
    """The workload where all clients take part in each interval or update."""
    everyone = np.arange(plan.config.num_clients, dtype=np.int32)
    if plan.by_cases:
        times = _draw_by_cases(plan)
        if num_samples is not None:
            size = np.broadcast_to(num_samples.astype(np.int32), times.tau.shape)
            times = times._replace(size=size)
        most = times.size.max(axis=0)
        return Workload(_complete(plan, times), num_samples=most, drawn=everyone)
    constant = {"kind": "distribution", "tau_groups": ("constant(1)",), "dropout": 0.0}
    first = _draw_by_cases(plan, num_intervals=1, **constant)
    size, notes = first.size[0], first.notes
    if num_samples is not None:
        size = num_samples.astype(size.dtype)
    elif "size" in scores:
        size = size[copula.order(size, scores["size"])]
    fleet = _draw_fleet(plan, size, scores)
    missing = sum(len(windows) == 0 for windows in fleet.online)
    if plan.config.timeline.availability and missing:
        notes += (
            f"{plan.config.timeline.availability}: {missing} of {len(fleet.online)} "
            "clients have no row and are always online",
        )
    trace, tasks = simulate_timeline(plan, fleet)
    times = deliveries.schedule_of(trace, size)._replace(notes=notes)
    return Workload(_complete(plan, times), fleet, trace, tasks, size, everyone)


def _of_cohorts(plan: Plan, num_samples: Int[np.ndarray, "N"] | None) -> Workload:
    """The workload where some clients are asked at a time, and only those are drawn."""
    config, everyone = plan.config, _make_crowd(plan, num_samples)
    iterations = config.timeline.local_iterations
    cohorts = cohort.make_cohorts(everyone, config.cohort, iterations)
    num_samples, all_count = everyone.num_samples, True
    if plan.by_cases:
        client, is_asked = cohort.all_asked(cohorts, config.num_intervals)
        times = crowd.schedule_of(everyone, client, is_asked, **_cases_of(plan))
        workload = Workload(times, num_samples=num_samples)
    else:
        trace, tasks = simulate_timeline(plan, cohorts)
        times = deliveries.schedule_of(trace, num_samples, cohorts=True)
        workload = Workload(times, cohorts, trace, tasks, num_samples)
        is_asked = trace.client >= 0
        all_count = timeline.FRAMEWORKS[config.timeline.framework].all_count
    times = _complete(plan, times, is_asked)
    if config.cohort.choice is not None:
        times = _with_candidates(plan, everyone, times)
        # Also who never works: what its data say is asked for.
        return workload._replace(schedule=times, drawn=np.unique(times.client))
    chance = cohort.inclusion(cohorts, times.client, all_count)
    share = weighting.shares(
        config.cohort.weighting, times, num_samples, chance, config.schedule.dropout
    )
    times = times._replace(share=share)
    return workload._replace(schedule=times, drawn=deliveries.drawn(times))


def _make_crowd(plan: Plan, num_samples: Int[np.ndarray, "N"] | None) -> crowd.Crowd:
    s, t, N = plan.config.schedule, plan.config.timeline, plan.config.num_clients
    kind = s.kind if plan.by_cases else "distribution"
    size_groups = groups(s.size_groups)
    return crowd.make_crowd(
        N,
        plan.seed,
        sizes=schedule.size_texts(kind, size_groups, s.data_size, N),
        num_samples=num_samples,
        seconds={name: groups(getattr(t, name)) for name in UNITS},
        speeds_file=t.speeds,
        availability_file=t.availability,
        files=_files_of(plan),
        jitter=t.jitter,
        dropout=s.dropout,
        by_size=s.iteration == "pass",
        transfer_bytes=plan.transfer_bytes,
    )


def _files_of(plan: Plan) -> dict[str, Any]:
    """How files of clients are read, see `measured.read`."""
    t, by_step = plan.config.timeline, plan.config.schedule.iteration == "step"
    samples = {"samples": float(plan.config.batch_size)} if by_step else {}
    seed = plan.seed if t.resample else None
    return samples | {"period": t.period, "until": plan.horizon, "seed": seed}


def _cases_of(plan: Plan) -> dict[str, Any]:
    """How τ is drawn by cases."""
    s = plan.config.schedule
    texts = {"tau": tuple(s.tau), "tau_groups": groups(s.tau_groups)}
    return {"kind": s.kind} | texts


def _draw_by_cases(plan: Plan, **changes: Any) -> Schedule:
    """τ and samples of all clients by the settings, but for the changed arguments."""
    s = plan.config.schedule
    arguments = _cases_of(plan) | {
        "num_intervals": plan.config.num_intervals,
        "num_clients": plan.config.num_clients,
        "data_size": s.data_size,
        "size_groups": groups(s.size_groups),
        "trace": s.trace,
        "dropout": s.dropout,
        "rng": rng.generator(plan.seed, "schedule"),
    }
    return schedule.make_schedule(**arguments | changes)


def _complete(
    plan: Plan, times: Schedule, is_asked: Bool[np.ndarray, "T K"] | None = None
) -> Schedule:
    """The schedule with client selection, free riders, K of DMS, times and notes.

    K is a mean over the clients that are asked, None: all. That of all work counts what
    clients report, and what those have done that cannot upload.
    """
    s, least, by_cases = plan.config.schedule, 0, plan.by_cases
    if by_cases:
        seconds = ticks.multiples(len(times.tau), s.interval_seconds)
        least, times = s.upload_above, times._replace(seconds=seconds)
    sent = times._replace(tau=np.where(times.tau > least, times.tau, 0))
    uploads = sent.tau > 0
    rules = (getattr(plan.config, section) for section in SECTIONS)
    counts_all = by_cases and any(getattr(r, "counts_all_work", False) for r in rules)
    if s.free_riders:
        sent = _with_free_riders(plan, sent)
        times = _with_free_riders(plan, times) if counts_all else times
    if claim := plan.config.attack.claim:
        claims = plan.is_attacker[sent.client] & (sent.tau > 0)
        reported = np.where(claims, claim, sent.reported).astype(np.int32)
        sent = sent._replace(reported=reported)
    is_asked = np.broadcast_to(True, uploads.shape) if is_asked is None else is_asked
    if counts_all or not is_asked.all():
        work = deliveries.claimed(sent)
        if counts_all:
            work = np.where(uploads, work, times.tau)
        threshold = work.sum(axis=1) / np.maximum(is_asked.sum(axis=1), 1)
        sent = sent._replace(threshold=threshold)
    return sent._replace(notes=sent.notes + _idle_notes(plan, sent))


def _with_free_riders(plan: Plan, times: Schedule) -> Schedule:
    s, client = plan.config.schedule, None if times.in_order else times.client
    stream, N = rng.generator(plan.seed, "free riders"), plan.config.num_clients
    clients = {"client": client, "num_clients": N}
    tau, reported, _ = schedule.make_free_riders(
        times.tau, s.free_riding, s.free_riders, stream, **clients
    )
    return times._replace(tau=tau, reported=reported)


def _with_candidates(plan: Plan, everyone: crowd.Crowd, times: Schedule) -> Schedule:
    """The schedule of candidates, of whom the cohort is chosen while training."""
    c, client = plan.config.cohort, times.client
    note = (
        f"who is asked depends on training: {c.sampler} chooses {c.size} of "
        f"{client.shape[1]} candidates in each interval; work that is known before "
        "training is that of all candidates"
    )
    times = times._replace(notes=(*times.notes, note))
    if c.sampler != "oort":
        return times
    # As if all would deliver: the server does not know who will not.
    sure = everyone._replace(dropout=0.0)
    is_asked = np.ones(client.shape, bool)
    whole = crowd.schedule_of(sure, client, is_asked, **_cases_of(plan))
    steps = whole.tau * local.steps_per_iteration(
        whole.size, plan.config.batch_size, plan.config.schedule.iteration
    )
    lots = feedback.draw_lots(everyone.seed, client, steps, c.preferred, c.penalty)
    return times._replace(lots=lots)


def _idle_notes(plan: Plan, times: Schedule) -> tuple[str, ...]:
    """A note on intervals and clients without work.

    Raises:
      UserError: no client works in any interval.
    """
    s, works = plan.config.schedule, times.tau > 0
    if not works.any():
        names = ("tau", "tau_groups", "trace", "upload_above", "dropout", "free_riders")
        settings = {n: getattr(s, n) for n in ("kind", *names) if getattr(s, n)}
        flags = ", ".join(f"--config.schedule.{n}={v}" for n, v in settings.items())
        raise UserError(
            f"{flags}: no client does a local iteration in any of {len(works)} "
            "intervals; let some clients have τ >= 1 that is not lost"
        )
    has_worked = np.zeros(plan.config.num_clients, bool)
    has_worked[times.client[works]] = True
    missing, empty = np.flatnonzero(~has_worked), int((~works.any(axis=1)).sum())
    missing = missing[: 0 if plan.config.cohort.size else None]  # most are never asked
    parts = []
    if empty:
        parts.append(f"no client trains in {empty} of {len(works)} intervals")
    if len(missing):
        first = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        parts.append(
            f"{len(missing)} of {plan.config.num_clients} clients never train ({first})"
        )
    return ("; ".join(parts),) if parts else ()


def _draw_fleet(
    plan: Plan, num_samples: Int[np.ndarray, "N"], scores: copula.Scores
) -> Fleet:
    """Speeds of the clients; they do not depend on the framework."""
    s, t = plan.config.schedule, plan.config.timeline
    if s.iteration == "step":  # of a mini-batch, however many there are
        num_samples = np.ones_like(num_samples)
    texts: dict[str, Any] = {name: groups(getattr(t, name)) for name in UNITS}
    fleet = draw_fleet(
        plan.config.num_clients,
        num_samples,
        **texts,
        transfer_bytes=plan.transfer_bytes,
        jitter=t.jitter,
        dropout=s.dropout,
        speeds_file=t.speeds,
        availability_file=t.availability,
        files=_files_of(plan),
        rng=rng.generator(plan.seed, "fleet"),
    )
    share = num_samples / num_samples.mean()
    # Seconds of CSV are those with the client's samples, those of JSON per sample.
    is_measured = t.speeds and not t.speeds.endswith(".json")
    share = np.ones(len(share)) if is_measured else share
    return copula.tied(fleet, scores, share, plan.horizon)


def simulate_timeline(plan: Plan, fleet: Fleet | Cohorts) -> Simulation:
    """Simulate all tasks and updates of T·Δ virtual seconds under the framework."""
    config, t = plan.config, plan.config.timeline
    framework = timeline.FRAMEWORKS[t.framework]
    values = vars(t) | {
        "num_intervals": config.num_intervals,
        "interval": config.schedule.interval_seconds,
        "horizon": plan.horizon,
        "iterations": t.local_iterations,
        "rng": rng.generator(plan.seed, "framework"),
    }
    arguments = framework.arguments(values)
    # A cohort is as fast as the others, about.
    sample = cohort.first_fleet(fleet) if isinstance(fleet, Cohorts) else fleet
    # How many events there are, as if all were online.
    task = sample.iteration
    with np.errstate(over="ignore", divide="ignore"):
        if "iterations" in arguments:
            task = sample.download + arguments["iterations"] * task + sample.upload
        pace = framework.pace(task.mean(1), arguments)
        events = len(task) * (1 + np.mean(plan.horizon / pace))
    if not events <= _MOST_EVENTS:
        speed = f"speeds={t.speeds}" if t.speeds else f"speed={t.speed}"
        raise UserError(
            f"--config.timeline.{speed}: {t.framework} would have to simulate about "
            f"{events:.2g} tasks and iterations in {plan.horizon:g} "
            f"virtual seconds, expected at most {_MOST_EVENTS:.0g}; choose slower "
            "clients, or fewer or shorter intervals"
        )
    return framework.simulate(fleet, **arguments)
