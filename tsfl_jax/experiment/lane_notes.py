"""What a user should know of the lanes of a sweep: one line for many lanes.

Notes that differ in numbers only are merged; lanes with the same results are named.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tsfl_jax.config import SETTINGS, WITHOUT_EFFECT, Config, get
from tsfl_jax.experiment import grid

# A number, or several as in "classes 1, 4".
_NUMBERS = re.compile(
    r"((?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?:, \d+)*)(?!\w)"
)
# Before numbers that are names, which have no range.
_NAMES = ("class", "classes", "client", "clients", "interval", "labeled", "seed")
_MOST = 8  # names in a list


def merged(notes: Sequence[Sequence[str]], configs: Sequence[Config]) -> list[str]:
    """The notes of all lanes, each once; numbers that differ become a range.

    Args:
      notes: of each lane.
      configs: of each lane, for its seed.
    """
    alike: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for lane, own in enumerate(notes):
        for note in own:
            form = tuple(_NUMBERS.split(note)[::2])
            alike.setdefault(form, {}).setdefault(note, []).append(lane)
    found = []
    for texts in alike.values():
        lanes = sorted({lane for those in texts.values() for lane in those})
        where = _where(lanes, configs) if len(texts) > 1 else ""
        found.append(where + _one(list(texts)))
    return found


def _one(texts: list[str]) -> str:
    """One text of several that differ in numbers only."""
    parts = [_NUMBERS.split(text) for text in texts]
    whole = list(parts[0])
    for place in range(1, len(whole), 2):
        numbers = list(dict.fromkeys(part[place] for part in parts))
        if len(numbers) > 1:
            whole[place] = _several(whole[place - 1], numbers)
    return "".join(whole)


def _several(before: str, numbers: list[str]) -> str:
    """ "2 to 5"; of names "1, 4, 8"."""
    words = before.split()
    if any(", " in n for n in numbers) or (words and words[-1] in _NAMES):
        names = {int(name) for each in numbers for name in each.split(", ")}
        shown = list(map(str, sorted(names)))
        return ", ".join(shown[:_MOST]) + ", …" * (len(shown) > _MOST)
    order = sorted(numbers, key=lambda number: float(number.replace(",", "")))
    return f"{order[0]} to {order[-1]}"


def _where(lanes: list[int], configs: Sequence[Config]) -> str:
    """ "seeds 0–4: " if their seeds are what these lanes have in common."""
    seeds = sorted({configs[lane].seed for lane in lanes})
    if len(lanes) < sum(config.seed in seeds for config in configs):
        return f"{len(lanes)} of {len(configs)} lanes: "
    if len(seeds) == 1:
        return f"seed {seeds[0]}: "
    whole = seeds == list(range(seeds[0], seeds[-1] + 1))
    text = (
        f"{seeds[0]}–{seeds[-1]}" if whole else _several("seed", list(map(str, seeds)))
    )
    return f"seeds {text}: "


class Identical(NamedTuple):
    """Lanes that differ in settings and not in results."""

    lanes: tuple[int, ...]
    note: str


def identical(
    points: Sequence[Mapping[str, Any]],
    configs: Sequence[Config],
    histories: Sequence[Mapping[str, np.ndarray]],
) -> list[Identical]:
    """Find the settings without an effect: lanes with the same history to the last bit.

    What an own rule or loss reads cannot be known, but what came out can. Lanes that
    lost all models are left out: they may differ in how.

    Args:
      points: of all lanes.
      configs: of all lanes.
      histories: of all lanes, arrays by name.
    """
    same: dict[str, list[int]] = {}
    for lane, history in enumerate(histories):
        if not history["diverged"].any():
            same.setdefault(_digest(history), []).append(lane)
    swept = [name for name in grid.names_of(points) if name not in WITHOUT_EFFECT]
    values = [{n: str(get(config, n)) for n in swept} for config in configs]
    alike: dict[tuple, list[list[int]]] = {}
    for lanes in same.values():
        differing = {n: _distinct(values, lanes, n) for n in swept}
        key = tuple((n, found) for n, found in differing.items() if len(found) > 1)
        if key:
            alike.setdefault(key, []).append(lanes)
    found = []
    for key, sets in alike.items():
        lanes = tuple(sorted(lane for each in sets for lane in each))
        found.append(Identical(lanes, _identical_text(dict(key), sets, values)))
    return found


def _distinct(values: Sequence[Mapping], lanes: Sequence[int], name: str) -> tuple:
    return tuple(dict.fromkeys(values[lane][name] for lane in lanes))


def _digest(history: Mapping[str, np.ndarray]) -> str:
    """Of all that was computed; not of how long it took."""
    digest = hashlib.sha256()
    for name, array in sorted(history.items()):
        if name != "seconds":
            array = np.ascontiguousarray(array)
            digest.update(f"{name}{array.dtype}{array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _identical_text(
    differing: Mapping[str, tuple[str, ...]],
    sets: list[list[int]],
    values: Sequence[Mapping[str, str]],
) -> str:
    """One sentence on sets of identical lanes that differ in the same settings."""
    lanes = sorted(lane for each in sets for lane in each)
    everywhere = range(len(values))
    where = [
        f"{name}={', '.join(_distinct(values, lanes, name))}"
        for name in values[0]
        if name not in differing
        and len(_distinct(values, lanes, name))
        < len(_distinct(values, everywhere, name))
    ]
    changed = " and ".join(f"{n}={', '.join(v)}" for n, v in differing.items())
    under = f" with {', '.join(where)}" if where else ""
    which = f"lanes {', '.join(map(str, lanes[:_MOST]))}{', …' * (len(lanes) > _MOST)}"
    if len(sets) > 1:
        which = f"{len(sets)} times {len(sets[0])} lanes"
    about = ", ".join(f"{n} is: {SETTINGS[n][1].help}" for n in differing)
    about = about.replace(";", ",")  # which separates notes
    return (
        f"{changed} made no difference{under}: {which} have the same results to the "
        f"last bit ({about})"
    )
