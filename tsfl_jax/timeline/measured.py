"""What files say of clients: their speeds, and the windows in which they are online.

CSV files have the clients themselves; traces in JSON have users. FLASH's are read as
``models/timer.py`` of github.com/PKU-Chengxu/FLASH does (Yang et al., "Characterizing
Impacts of Heterogeneity in Federated Learning upon Large-Scale Smartphone Data", WWW
2021): a user is online while locked, charging and on Wi-Fi, and again after the length
of its trace. FedScale's, as ``cloud/internal/client_metadata.py`` of github.com/
SymbioticLab/FedScale (Lai et al., "FedScale: Benchmarking Model and System Performance
of Federated Learning at Scale", ICML 2022), as JSON: pickle files are not read.
"""

import itertools
import json
import math
import pathlib
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax import rng
from tsfl_jax.timeline import ticks
from tsfl_jax.timeline.csv_tables import CsvColumn, read_table
from tsfl_jax.types import UserError, user_code

# What is drawn of a client, as in `timeline` of the settings, and its unit.
UNITS = {"speed": "s", "download": "s", "upload": "s"}
UNITS |= {"bandwidth_down": "B/s", "bandwidth_up": "B/s"}
UNITS |= {"online": "h", "online_from": "h"}  # of each day
SLOWEST = 1e-9  # bytes per second
_HOUR, _DAY = 3600.0, 86400.0
_REFERENCE = datetime(2020, 1, 2)  # FLASH's second 0
# FLASH's messages and what they change; others say nothing of being online.
_EVENTS = {"battery_charged_on": ("charged", True), "wifi": ("wifi", True)}
_EVENTS |= {"battery_charged_off": ("charged", False), "screen_lock": ("locked", True)}
_EVENTS |= {"screen_unlock": ("locked", False)}
_EVENTS |= dict.fromkeys(("unknown", "2g", "3g", "4g", "5g"), ("wifi", False))
_TRAINING = 3.0  # of FedScale: a training step takes as long as three inferences
_FLAGS = {n: f"--config.timeline.{n}" for n in ("speeds", "availability")}
_JSON = "expected FLASH's state traces, or FedScale's capacity or behavior as JSON"

Windows = Float[np.ndarray, "W 2"]


class Measured(NamedTuple):
    """What files say of users, and which user each client is."""

    means: Float[np.ndarray, "7 V"] | None = None  # of each of `UNITS`; NaN: drawn
    by_size: bool = False  # whether their seconds are at the mean size
    # Rows of online windows, by user: user, start, end, seconds after which it repeats.
    online: Float[np.ndarray, "W 4"] = np.empty((0, 4))
    users: int = 0  # of `online`; those without a row are drawn
    seed: int | None = None  # clients are users drawn with replacement; None: in order
    until: float = 0.0  # seconds; windows that repeat are needed so long

    def rows(self, ids: Int[np.ndarray, "U"], users: int) -> Int[np.ndarray, "U"]:
        """Which of so many users each client is."""
        if self.seed is None:
            return ids
        return (rng.uniforms(self.seed, "client user", ids) * users).astype(np.int64)


def read(
    speeds_file: str,
    availability_file: str,
    num_clients: int,
    *,
    samples: float = 1.0,
    period: float = 0.0,
    until: float = 0.0,
    seed: int | None = None,
) -> Measured:
    """Read the files of a fleet.

    Args:
      speeds_file: "", CSV as in `fleet.draw_fleet`, or FedScale's capacity as JSON:
        "computation", ms of an inference per sample, and "communication", kbit/s.
      availability_file: "", CSV likewise, or as JSON FLASH's state traces, or
        FedScale's behavior: seconds "active", "inactive" and "finish_time".
      num_clients: N. Without a seed a file in JSON has at least N users.
      samples: of an iteration at the mean size.
      period: seconds after which the windows of CSV repeat; 0: never.
      until: seconds that windows are needed for.
      seed: of drawing users with replacement; None: client i is user i.

    Raises:
      UserError: a file that cannot be read, in one line.
    """
    N = num_clients if seed is None else None
    means, windows, users = None, {}, 0
    by_size = speeds_file.endswith(".json")
    if by_size:
        means = _capacity(_load("speeds", speeds_file, N), samples, speeds_file)
    elif speeds_file:
        means = _means(speeds_file, N)
    if availability_file.endswith(".json"):
        trace = _load("availability", availability_file, None)
        with user_code(f"{_FLAGS['availability']}={availability_file}: fails", _JSON):
            windows = dict(enumerate(filter(None, map(_windows_of, trace.values()))))
        users = len(windows)
        _check_users("availability", availability_file, users, N)
    elif availability_file:
        table, period = _windows(availability_file, N), period or math.inf
        windows = {user: (pairs, period) for user, pairs in table.items()}
        users = max(windows, default=-1) + 1
    rows = [np.empty((0, 4)), *(_rows(user, *windows[user]) for user in windows)]
    return Measured(means, by_size, np.concatenate(rows), users, seed, until)


def _load(name: str, path: str, N: int | None) -> dict[str, Any]:
    with user_code(f"{_FLAGS[name]}={path}: cannot be read", _JSON):
        users = json.loads(pathlib.Path(path).expanduser().read_text("utf-8"))
        assert isinstance(users, dict), "no users by name"
    _check_users(name, path, len(users), N)
    return users


def _check_users(name: str, path: str, users: int, N: int | None) -> None:
    if users < (N or 1):
        raise UserError(
            f"{_FLAGS[name]}={path}: {users} usable users for --config.num_clients="
            f"{N or 1}; --config.timeline.resample=True draws them with replacement"
        )


def _capacity(
    users: dict[str, Any], samples: float, path: str
) -> Float[np.ndarray, "7 V"]:
    """FedScale's speeds, whose kbit are 128 bytes as in its aggregator."""
    means = np.full((len(UNITS), len(users)), np.nan)
    with user_code(f"{_FLAGS['speeds']}={path}: cannot be used", _JSON):
        for column, (name, user) in enumerate(users.items()):
            milliseconds, kbits = user["computation"], user["communication"]
            assert min(milliseconds, kbits) > 0, f"user {name} has {user}, not > 0"
            means[0, column] = _TRAINING * samples * milliseconds / 1000
            means[3:5, column] = 128.0 * kbits
    return means


def _windows_of(user: Any) -> tuple[Windows, float] | None:
    """A user's windows and their period; None: it is never online."""
    if "messages" in user:
        return _flash(user["messages"])
    pairs = np.array([user["active"], user["inactive"]], float).T
    pairs, period = pairs[pairs[:, 1] > pairs[:, 0]], float(user["finish_time"])
    return (merged(pairs), period) if len(pairs) else None


def _flash(messages: str) -> tuple[Windows, float] | None:
    """Windows of FLASH's messages; None: as FLASH, users with malformed ones, too."""
    state = {"charged": False, "wifi": False, "locked": False}
    start, now, since, pairs = None, 0.0, None, []
    for line in filter(str.strip, messages.split("\n")):
        try:
            time, event = line.split("\t")
            now = (datetime.fromisoformat(time.strip()) - _REFERENCE).total_seconds()
        except ValueError:
            return None
        start = now if start is None else start
        if change := _EVENTS.get(event.strip().lower()):
            state[change[0]] = change[1]
        is_online = all(state.values())
        if is_online and since is None:
            since = now
        if not is_online and since is not None:
            pairs += [(since, now)] * (now > since)
            since = None
    period = now - (start or 0.0)
    return (merged(np.array(pairs)), period) if pairs and period > 0 else None


def merged(windows: Windows) -> Windows:
    """Disjoint sorted windows: those that touch are one, nothing is rounded there."""
    start, end = windows[np.argsort(windows[:, 0], kind="stable")].T
    end = np.maximum.accumulate(end)
    apart = start[1:] > end[:-1]
    first, last = start[np.append(True, apart)], end[np.append(apart, True)]
    return np.stack([first, last], axis=1)


def _rows(user: int, windows: Windows, period: float) -> Float[np.ndarray, "W 4"]:
    """Rows of `Measured.online`, whose windows start in the first period."""
    start, end = windows.T
    if period < math.inf:
        start = start % period
        end = start + np.minimum(np.ptp(windows, 1), period)
    ones = np.ones(len(windows))
    return np.stack([user * ones, start, end, period * ones], axis=1)


def rows_of(
    measured: Measured,
    ids: Int[np.ndarray, "U"],
    hours: Float[np.ndarray, "U"],
    start: Float[np.ndarray, "U"],
) -> Float[np.ndarray, "W 4"]:
    """Rows as of `Measured.online`, by place in `ids`; without one: always online.

    Clients without a row in the files are online `hours` of each day from `start` on.
    """
    table, users = measured.online, measured.rows(ids, measured.users)
    first, last = (np.searchsorted(table[:, 0], users, s) for s in ("left", "right"))
    counts = last - first
    place = np.repeat(np.arange(len(ids)), counts)
    offset = np.repeat(first - np.cumsum(counts) + counts, counts)
    rows = table[np.arange(len(place)) + offset]
    rows[:, 0] = place
    (drawn,) = np.nonzero((counts == 0) & (hours < _DAY / _HOUR))
    begin = _HOUR * start[drawn] % _DAY
    daily = [drawn, begin, begin + _HOUR * hours[drawn], np.full(len(drawn), _DAY)]
    rows = np.concatenate([rows, np.stack(daily, axis=1)])
    return rows[np.argsort(rows[:, 0], kind="stable")]


def online_of(
    measured: Measured, ids: Int[np.ndarray, "U"], *hours: Any
) -> tuple[Windows, ...]:
    """Windows of clients until the horizon, see `rows_of`; (): all always online."""
    rows, online = rows_of(measured, ids, *hours), []
    edges = np.searchsorted(rows[:, 0], np.arange(len(ids) + 1)).tolist()
    for a, b in itertools.pairwise(edges):
        windows, period = rows[a:b, 1:3], rows[a:b, 3].min(initial=math.inf)
        if period < math.inf:
            count = math.ceil(measured.until / period) + 1
            shifts = period * np.arange(-1, count)[:, None, None]
            windows = (windows + shifts).reshape(-1, 2)
            windows = merged(windows[windows[:, 1] > 0].clip(0))
        online.append(windows)
    return tuple(online) if len(rows) else ()


def _means(path: str, N: int | None) -> Float[np.ndarray, "7 V"]:
    """Means of each of `UNITS` in a CSV file; NaN: not given."""
    flag, longest = _FLAGS["speeds"], 1e300
    columns = {
        "client": CsvColumn(high=math.inf if N is None else N - 1, whole=True),
        "seconds": CsvColumn(1 / ticks.SECOND, longest),
    }
    lows = {"online": 1 / ticks.SECOND, "online_from": -longest}
    for name, unit in [*UNITS.items()][1:]:
        low = lows.get(name, SLOWEST if unit == "B/s" else 0)
        columns[name] = CsvColumn(low, longest, optional=True)
    table = read_table(path, columns, key=["client"], flag=flag).set_index("client")
    N = N or max(len(table), 1)
    missing = np.setdiff1d(np.arange(N), table.index)
    if len(missing):
        raise UserError(
            f"{flag}={path}: no row for client {missing[0]}; expected every client "
            f"from 0 to {N - 1} once"
        )
    return table.sort_index().to_numpy().T


def _windows(path: str, N: int | None) -> dict[int, Windows]:
    """Online windows by client, of the clients that a CSV file names."""
    client = CsvColumn(high=math.inf if N is None else N - 1, whole=True)
    columns = {"client": client, "start": CsvColumn(), "end": CsvColumn()}
    table = read_table(path, columns, flag=_FLAGS["availability"])
    online = {}
    for client, rows in table.sort_values(["start", "end"]).groupby("client"):
        start, end = rows["start"].to_numpy(), rows["end"].to_numpy()
        is_wrong = (end <= start) | np.append(False, start[1:] < end[:-1])
        if is_wrong.any():
            k = int(is_wrong.argmax())
            raise UserError(
                f"{path}, line {rows.index[k]}: client {client:.0f}'s window "
                f"[{start[k]:g}, {end[k]:g}): expected end > start, and windows of a "
                "client that do not overlap"
            )
        online[int(client)] = merged(np.stack([start, end], axis=1))
    return online
