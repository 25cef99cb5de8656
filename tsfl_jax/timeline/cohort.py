"""Cohorts: which clients are asked in an interval or a round, before training.

A cohort follows from the seed, the number of the interval or round and, of `online`,
the virtual time; never from a client's position or from training. Samplers are pure
functions of a `Draw`; without cohorts all clients are asked. Those of `CHOOSING` draw
candidates, of whom the cohort is chosen while training, see `feedback`.

NOT done here: what clients do, see `crowd`; how updates are weighted.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tsfl_jax import rng
from tsfl_jax.components import component, setting
from tsfl_jax.timeline import crowd as crowds
from tsfl_jax.timeline import feedback, measured, ticks, tifl
from tsfl_jax.timeline.crowd import Crowd
from tsfl_jax.timeline.fleet import ExactFleet, Fleet, exact
from tsfl_jax.timeline.ticks import Ticks
from tsfl_jax.types import UserError, user_code

Ids = Int[np.ndarray, " K"]
_NEVER = np.iinfo(np.int64).max  # ticks
NO_CLIENTS = np.zeros(0, np.int64)


class Draw(NamedTuple):
    """What a sampler may know. Candidates are numbered from 0 to n − 1."""

    rng: np.random.Generator  # of (seed, tier, number), for this draw alone
    seed: int
    tier: int  # whose round it is; 0 without tiers
    number: int  # t, of the interval or round; of AFL and FedBuff that of the client
    size: int  # K, how many to ask, 1 ≤ K ≤ n
    candidates: int  # n, clients to choose from
    away: Ids  # sorted; cannot be asked now: at work, or offline where this is known
    seconds: float  # virtual time
    edges: Callable[[], Ids]  # samples of the first 1, 2, …, n candidates together
    by_speed: Callable[[], Ids]  # all candidates, the fastest first
    settings: Any  # a `CohortConfig`; None without cohorts


class Sampler(NamedTuple):
    """How a cohort is drawn."""

    draw: Callable[[Draw], Ids]  # at most K candidates
    # (a Draw, ids) -> how often each is in a cohort on average; None: unknown.
    chance: Callable[[Draw, Ids], Float[np.ndarray, " K"]] | None = None
    online: bool = False  # whether `away` are also those offline
    around: bool = False  # whether it draws among the others alike
    reads: tuple[str, ...] = ()  # settings that it reads and others do not
    sections: tuple[type, ...] = ()


def uniform(draw: Draw) -> Ids:
    """Without replacement, all candidates that are not away alike."""
    left = draw.candidates - len(draw.away)
    # Floyd's algorithm where K is small beside n: O(K).
    places = draw.rng.choice(left, min(draw.size, left), replace=False)
    return places + np.searchsorted(
        draw.away - np.arange(len(draw.away)), places, side="right"
    )


def by_size(draw: Draw) -> Ids:
    """With replacement, in proportion to |D_i|; O(n) memory, O(K log n) time."""
    edges = draw.edges()
    return np.searchsorted(edges, draw.rng.integers(edges[-1], size=draw.size), "right")


def by_size_once(draw: Draw) -> Ids:
    """One after another in proportion to |D_i|, each at most once; O(n) memory."""
    num_samples = np.diff(draw.edges(), prepend=0)
    chance = num_samples / num_samples.sum()
    return draw.rng.choice(len(chance), draw.size, replace=False, p=chance)


def round_robin(draw: Draw) -> Ids:
    """Each client once before any twice, in another order each time.

    ⌈n/K⌉ cohorts as equal as possible are a cycle: where K does not divide n some are
    smaller than K.
    """
    n = draw.candidates
    cohorts = -(-n // draw.size)
    cycle, place = divmod(draw.number, cohorts)
    order = _order(draw.seed, draw.tier, cycle, n)
    return order[place * n // cohorts : (place + 1) * n // cohorts]


@functools.lru_cache(maxsize=8)
def _order(seed: int, tier: int, cycle: int, n: int) -> Ids:
    """Of a cycle; takes 0.2 s and 80 MB for ten million clients."""
    return rng.generator(seed, "cohort", tier, cycle, 0).permutation(n)


def poisson(draw: Draw) -> Ids:
    """Each candidate by itself, with chance K/n."""
    number = draw.rng.binomial(draw.candidates, draw.size / draw.candidates)
    return draw.rng.choice(draw.candidates, number, replace=False)


def _share_of_all(draw: Draw, ids: Ids) -> Float[np.ndarray, " K"]:
    return np.full(len(ids), draw.size / draw.candidates)


SAMPLERS = {
    "uniform": Sampler(uniform, _share_of_all, around=True),
    "by_size": Sampler(
        by_size,
        lambda draw, ids: (
            np.diff(draw.edges(), prepend=0)[ids] * draw.size / draw.edges()[-1]
        ),
    ),
    "round_robin": Sampler(
        round_robin,
        lambda draw, ids: np.full(len(ids), 1 / -(-draw.candidates // draw.size)),
    ),
    "online": Sampler(uniform, online=True),
    "tifl": Sampler(
        tifl.from_tier,
        reads=("cohort.tiers", "cohort.tier_chances", "cohort.tier_credits"),
    ),
    "power_of_choice": Sampler(by_size_once, reads=("cohort.candidates",)),
    "oort": Sampler(
        uniform, reads=("cohort.candidates", "cohort.preferred", "cohort.penalty")
    ),
    "poisson": Sampler(poisson, _share_of_all),
}
# Of candidates, of whom the cohort is chosen while training.
CHOOSING = ("power_of_choice", "oort")
VARYING = ("poisson",)  # cohorts whose size varies: only where there is no clock
WEIGHTINGS = ("ratio", "unbiased", "mean", "inverse")
SKEWS = ("noise", "rotation", "label_noise")
_ASKED = "size", ()  # what is read only where some are asked


@component("cohort")
class CohortConfig:
    """Which clients are asked in each interval or round."""

    size: int = setting(0, "K, clients asked at a time; 0: all", low=0)
    sampler: str = setting("uniform", "how they are drawn", used_by=_ASKED)
    candidates: int = setting(
        0, "d, of whom K are chosen while training; 0: all clients", low=0
    )
    preferred: float = setting(
        100.0, "T, a percentile of the candidates' steps; 100: none", above=0, high=100
    )
    penalty: float = setting(
        2.0,
        "α of the factor (T/t)^α of candidates with t > T steps",
        low=0,
        used_by=("preferred", ()),
    )
    tiers: int = setting(5, "m, tiers of similar speed", low=1)
    tier_chances: tuple[int, ...] = setting(
        (), "chance of each tier, the fastest first, in proportion; (): equal", low=0
    )
    tier_credits: tuple[int, ...] = setting(
        (), "rounds that each tier may be asked in; (): any number", low=0
    )
    ask: int = setting(0, "ask so many, use the first K; 0: K", low=0, used_by=_ASKED)
    weighting: str = setting(
        "ratio", "how updates are weighted", WEIGHTINGS, used_by=_ASKED
    )

    @property
    def choice(self) -> feedback.Choice | None:
        """How the cohort is chosen while training; None: it is drawn before."""
        chooses = self.size and self.sampler in CHOOSING
        return feedback.Choice(self.sampler, self.size) if chooses else None

    def slots(self, num_clients: int) -> int:
        """Members of a cohort, or candidates; N where all are asked."""
        if self.choice is not None:
            return self.candidates or num_clients
        if self.size and self.sampler in VARYING:
            # Of a mean K; 1 of 3·10⁶ is larger, see `all_asked`.
            return min(num_clients, self.size + math.ceil(5 * self.size**0.5))
        return self.size or num_clients

    def check(self, config: Any, rule: Any) -> None:
        """Refuse what knows no cohorts, or none that are chosen while training."""
        del rule
        framework, kind = config.timeline.framework, config.schedule.kind
        chooses = self.choice is not None and f"{self.sampler} chooses while training"
        varies = self.sampler in VARYING and f"the size of {self.sampler} varies"
        no_clock = framework == "none" and "without a framework is no clock"
        for_all = "it is drawn for all clients"
        for path, is_in_conflict, reason in (
            ("timeline.framework", framework != "none", chooses),
            ("timeline.framework", framework != "none", varies),
            ("cohort.ask", self.ask, varies),
            ("cohort.weighting", self.weighting != "ratio", chooses),
            ("schedule.upload_above", config.schedule.upload_above, chooses),
            ("cohort.sampler", self.sampler in ("online", "tifl"), no_clock),
            ("schedule.kind", framework == "none" and kind == "trace", for_all),
            ("timeline.carry", config.timeline.carry, "the next interval asks others"),
            ("timeline.copula", config.timeline.copula, for_all),
            *((f"partition.{n}", getattr(config.partition, n), for_all) for n in SKEWS),
        ):
            if self.size and reason and is_in_conflict:
                section, name = path.split(".")
                value = getattr(getattr(config, section), name)
                raise UserError(
                    f"--config.{path}={value}: cannot go with --config.cohort.size="
                    f"{self.size}, since {reason}; leave out one"
                )
        for name in ("tier_chances", "tier_credits"):
            numbers = tuple(getattr(self, name))
            if numbers and (len(numbers) != self.tiers or not any(numbers)):
                raise UserError(
                    f"--config.cohort.{name}={numbers}: expected a number for each of "
                    f"--config.cohort.tiers={self.tiers}, not all of them 0"
                )


class Online(NamedTuple):
    """Windows of those clients that are not always online, in ticks, int64."""

    listed: Ids = NO_CLIENTS  # sorted, each once
    client: Int[np.ndarray, " W"] = NO_CLIENTS  # whose window it is
    start: Int[np.ndarray, " W"] = NO_CLIENTS
    end: Int[np.ndarray, " W"] = NO_CLIENTS  # `_NEVER` where it has none
    period: Int[np.ndarray, " W"] = NO_CLIENTS  # after which it is again, or `_NEVER`

    def wait(self, now: Ticks) -> tuple[Bool[np.ndarray, " W"], Int[np.ndarray, " W"]]:
        """Whether each window is now, and ticks until its next start."""
        phase = (now - self.start) % self.period
        return phase < self.end - self.start, self.period - phase


class Cohorts(NamedTuple):
    """N clients, and how cohorts of them are drawn."""

    fleet: ExactFleet  # the clients' times
    crowd: Crowd | None  # the clients; None: all are asked
    size: int  # K, most clients that count in a round; d, candidates
    num_asked: int  # K' ≥ K, clients that are asked
    sampler: Sampler
    seed: int = 0
    online: Online = Online()
    members: Sequence[Ids | None] = (None,)  # sorted ids of each tier; None: all
    edges: Callable[[int], Ids] = lambda tier: NO_CLIENTS  # of a tier, as in `Draw`
    by_speed: Callable[[int], Ids] = lambda tier: NO_CLIENTS  # likewise
    settings: CohortConfig | None = None
    iterations: int = 1  # of a task, for its mean seconds

    @property
    def patience(self) -> int:
        """Rounds in succession that may end without a delivery."""
        return 1 if self.crowd is None else 1000


def make_cohorts(crowd: Crowd, settings: CohortConfig, iterations: int = 1) -> Cohorts:
    """Cohorts of a crowd.

    Args:
      crowd: N clients.
      settings: with a size K ≥ 1.
      iterations: of a task, for a sampler that goes by its mean seconds.

    Raises:
      UserError: more clients or groups than there are.
    """
    N = crowd.num_clients
    slots = settings.slots(N)
    for name, value, low in (
        ("size", settings.size, 1),
        ("candidates", slots, settings.size),
        ("ask", settings.ask or settings.size, settings.size),
        ("tiers", settings.tiers if settings.sampler == "tifl" else 1, 1),
    ):
        if not low <= value <= N:
            raise UserError(
                f"--config.cohort.{name}={value}: expected {low} to "
                f"--config.num_clients={N}"
            )
    cohorts = Cohorts(
        crowds.exact_of(crowd),
        crowd,
        slots,
        settings.size if settings.sampler in VARYING else settings.ask or slots,
        SAMPLERS[settings.sampler],
        crowd.seed,
        _online(crowd) if SAMPLERS[settings.sampler].online else Online(),
        settings=settings,
        iterations=iterations,
    )
    return with_tiers(cohorts, [None])


def _online(crowd: Crowd) -> Online:
    """Windows of all clients that are not always online."""
    tables = [np.empty((0, 4))]
    for ids in crowds.parts(crowd.num_clients):
        rows = measured.rows_of(crowd.traces, ids, *crowds.means_of(crowd, ids)[3:])
        rows[:, 0] += ids[0]
        tables.append(rows)
    client, *seconds = np.concatenate(tables).T
    client, times = client.astype(np.int64), []
    for values in seconds:
        is_finite = values < _NEVER / ticks.SECOND
        finite = ticks.of_array(np.where(is_finite, values, 0.0)[:, None])[:, 0]
        times.append(np.where(is_finite, finite, _NEVER))
    return Online(np.unique(client), client, *times)


def own_sampler(draw: Callable[[Draw], Any]) -> Sampler:
    """A sampler of a user's function, whose ids are checked."""
    return Sampler(functools.partial(_custom_draw, draw))


def _custom_draw(custom: Callable[[Draw], Any], draw: Draw) -> Ids:
    """The ids that a user's sampler gives, checked."""
    name = f"sampler={getattr(custom, '__name__', custom)}"
    most, last = draw.size, draw.candidates - 1
    expected = f"expected at most {most} whole numbers from 0 to {last}"
    with user_code(f"{name}: fails in draw {draw.number}", expected):
        ids = np.asarray(custom(draw))
        is_whole = ids.dtype.kind in "iu"
        are_ids = not ids.size or (is_whole and 0 <= ids.min() <= ids.max() <= last)
        if ids.shape != (ids.size,) or ids.size > most or not are_ids:
            raise ValueError(f"it gives {' '.join(str(ids).split())[:60]}")
    return ids


def in_ticks(fleet: Fleet | Cohorts, horizon: float) -> tuple[Cohorts, Ticks]:
    """Who is asked, and the horizon in ticks."""
    if isinstance(fleet, Cohorts):
        return fleet, ticks.of(horizon)
    clients, everyone = exact(fleet), Sampler(lambda draw: np.arange(draw.candidates))
    cohorts = Cohorts(clients, None, clients.clients, clients.clients, everyone)
    return cohorts, ticks.of(horizon)


def with_tiers(cohorts: Cohorts, members: Sequence[Ids | None]) -> Cohorts:
    """Cohorts of tiers, of which these are the sorted ids; None: all clients."""
    most = max(cohorts.fleet.clients if ids is None else len(ids) for ids in members)
    crowd: Any = cohorts.crowd
    rows = [slice(None) if ids is None else ids for ids in members]

    @functools.cache
    def edges(tier: int) -> Ids:
        return crowd.num_samples[rows[tier]].cumsum(dtype=np.int64)

    @functools.cache
    def by_speed(tier: int) -> Ids:
        seconds = crowds.task_seconds(crowd, cohorts.iterations)
        return np.argsort(seconds[rows[tier]], kind="stable")

    totals = {"edges": edges, "by_speed": by_speed}
    return cohorts._replace(size=min(cohorts.size, most), members=members, **totals)


def draw_of(
    cohorts: Cohorts,
    number: int,
    now: Ticks = 0,
    *,
    size: int = 0,
    tier: int = 0,
    busy: Ids = NO_CLIENTS,
) -> Draw:
    """What the sampler may know of a draw; arguments as of `draw_cohort`."""
    members = cohorts.members[tier]
    n = cohorts.fleet.clients if members is None else len(members)
    away = busy
    if cohorts.sampler.online:
        away = offline(cohorts.online, now)
        new = busy[~np.isin(busy, away)]  # few; a union sorts all of them
        away = np.sort(np.append(away, new), kind="stable") if len(new) else away
        if members is not None:
            away = np.flatnonzero(np.isin(members, away))
    return Draw(
        rng.generator(cohorts.seed, "cohort", tier, number),
        cohorts.seed,
        tier,
        number,
        min(size or cohorts.num_asked, n),
        n,
        away,
        ticks.seconds(now),
        functools.partial(cohorts.edges, tier),
        functools.partial(cohorts.by_speed, tier),
        cohorts.settings,
    )


def draw_cohort(
    cohorts: Cohorts, number: int, now: Ticks = 0, **options: Any
) -> Int[np.ndarray, " K"]:
    """The clients asked in an interval or a round.

    Args:
      cohorts: whose.
      number: ≥ 0, of the interval or round.
      now: ticks, when it begins; of `online` only.
      **options: `size` K instead of K'; `tier`, of FedAT; `busy`, sorted ids of those
        who cannot be asked.

    Returns:
      At most K' ids in [0, N), int64, sorted; one may be there several times.

    Raises:
      UserError: a sampler of the user's own fails or gives something else.
    """
    draw = draw_of(cohorts, number, now, **options)
    ids = np.sort(cohorts.sampler.draw(draw).astype(np.int64))
    ids = ids[~np.isin(ids, draw.away)] if len(draw.away) else ids
    members = cohorts.members[draw.tier]
    return ids if members is None else members[ids]


def ask(cohorts: Cohorts, number: int, now: Ticks, tier: int = 0) -> list[int]:
    """Those asked, whose times are needed."""
    ids = draw_cohort(cohorts, number, now, tier=tier).tolist()
    cohorts.fleet.need(ids)
    return ids


def all_asked(
    cohorts: Cohorts, num_intervals: int
) -> tuple[Int[np.ndarray, "T K"], Bool[np.ndarray, "T K"]]:
    """Who is asked in each interval without a clock, and which slots have someone."""
    drawn = [draw_cohort(cohorts, t) for t in range(num_intervals)]
    shape = num_intervals, max(cohorts.size, *map(len, drawn))
    client, is_asked = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for t, ids in enumerate(drawn):
        client[t, : len(ids)], is_asked[t, : len(ids)] = ids, True
    return np.where(is_asked, client, client[is_asked].min(initial=0)), is_asked


def first_fleet(cohorts: Cohorts) -> Fleet:
    """Mean times of the first clients that are asked, or if none is, of client 0."""
    assert cohorts.crowd is not None
    steady, ids = cohorts.crowd._replace(jitter=0.0), draw_cohort(cohorts, 0)
    return crowds.fleet_of(steady, ids if len(ids) else np.zeros(1, int), 1)


def inclusion(
    cohorts: Cohorts, client: Int[np.ndarray, "T K"], all_count: bool
) -> Float[np.ndarray, "T K"]:
    """How often the client of each slot is in a cohort, on average over the intervals.

    Args:
      cohorts: how they are drawn.
      client: ids in [0, N).
      all_count: whether all that are asked count.

    Returns:
      float64; NaN: unknown.
    """
    chance = cohorts.sampler.chance
    if chance is None or not all_count or cohorts.num_asked > cohorts.size:
        return np.full(client.shape, np.nan)
    return chance(draw_of(cohorts, 0), client.reshape(-1)).reshape(client.shape)


def offline(online: Online, now: Ticks) -> Ids:
    """Clients that are offline at a moment, sorted."""
    here = online.client[online.wait(now)[0]]
    return online.listed[~np.isin(online.listed, here)]


def next_start(online: Online, now: Ticks) -> Ticks:
    """When the next client comes online after a moment; inf: none does."""
    wait = online.wait(now)[1].min(initial=_NEVER)
    return now + int(wait) if wait < _NEVER - now else math.inf


def opening(cohorts: Cohorts, now: Ticks, tier: int = 0) -> Ticks:
    """The first moment from now on when a client of the tier is online; inf: never."""
    if not cohorts.sampler.online:
        return now
    online, members = cohorts.online, cohorts.members[tier]
    always, in_tier = cohorts.fleet.clients - len(online.listed), slice(None)
    if members is not None:
        always = len(np.setdiff1d(members, online.listed))
        in_tier = np.isin(online.client, members)
    is_on, wait = online.wait(now)
    if always or is_on[in_tier].any():
        return now
    first = wait[in_tier].min(initial=_NEVER)
    return now + int(first) if first < _NEVER - now else math.inf
