"""Sweeps from a file, ``--sweep_file``: a grid, a list of points, random points.

```yaml
grid: {seed: "0:3"}                # all combinations
list:                              # points as they stand, each with its own settings
  - {algorithm: fedprox, mu: 0.1}
  - {algorithm: dms}
random: {lr: "log(1e-3,1e-1)"}     # drawn, `samples` times
samples: 10
seed: 0                            # of the drawing
```

The sweep is the product of the parts that are there. JSON is read as well.
"""

import itertools
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from tsfl_jax import rng
from tsfl_jax.config import flat
from tsfl_jax.experiment import grid, sweep_values
from tsfl_jax.types import UserError, nearest, one_line

_KEYS = ("grid", "list", "random", "samples", "seed")
Points = list[dict[str, Any]]


def read(path: str) -> dict[str, Any]:
    """The content of a sweep file, with its keys checked.

    Raises:
      UserError: it cannot be read, or is no sweep.
    """
    import yaml  # JSON is YAML, too

    shown = f"--sweep_file={path}"
    try:
        text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _keep_texts(node, set())
        found = None if node is None else loader.construct_document(node)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{shown}: cannot be read ({reason})") from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = one_line(error)
        raise UserError(f"{shown}: neither YAML nor JSON ({reason})") from error
    found = {"list": found} if isinstance(found, list) else found
    if not isinstance(found, dict) or not found:
        raise UserError(f"{shown}: expected {', '.join(_KEYS)}, or a list of points")
    for key in found:
        if key not in _KEYS:
            hint = nearest(str(key), _KEYS)
            raise UserError(f"{shown}: {key}: expected one of {', '.join(_KEYS)}{hint}")
    for key, kind in (("grid", dict), ("list", list), ("random", dict)):
        if key in found and (not isinstance(found[key], kind) or not found[key]):
            form = "a list of points" if kind is list else "settings and their values"
            raise UserError(f"{shown}: {key}: expected {form}, got {found[key]!r}")
    return found


def _keep_texts(node: Any, seen: set[int]) -> None:
    """Keep 1:5, yes and off as texts, as in YAML 1.2; YAML 1.1 has 65, true and false.

    Args:
      node: of PyYAML, changed in place; None: an empty file.
      seen: ids of the nodes that are done, as aliases can lead back to one.
    """
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if node.id == "scalar":
        kind = node.tag.rpartition(":")[2]
        minutes = kind in ("int", "float") and ":" in node.value
        if minutes or (kind == "bool" and node.value.lower() not in ("true", "false")):
            node.tag = "tag:yaml.org,2002:str"
        return
    for part in node.value:
        for each in part if isinstance(part, tuple) else (part,):
            _keep_texts(each, seen)


def _flat(given: Any, shown: str) -> dict[str, Any]:
    """Nested settings as one dict; their names are texts."""
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(name, str):
                raise UserError(f"{shown}: {name!r}: expected the name of a setting")
            if isinstance(value, dict):
                _flat(value, shown)
    return flat(given)


def _whole(number: Any, low: int, shown: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < low:
        raise UserError(f"{shown}: expected a whole number >= {low}, got {number!r}")
    return number


def _values(name: str, given: Any, shown: str) -> list:
    """The values of one setting: a text as on the command line, a list, or one."""
    kind = grid.kind_of(name, shown)
    if isinstance(given, str):
        return sweep_values.values(given, kind, f"{shown}: {name}={given}")
    several = isinstance(given, list)
    if kind is tuple and several and not isinstance(given[0] if given else 0, list):
        several = False  # [1, 4] is one tuple
    return [_one(name, v, shown) for v in (given if several else [given])]


def _one(name: str, given: Any, shown: str) -> Any:
    """One value; YAML takes 1e-3 for a text."""
    kind = grid.kind_of(name, shown)
    if isinstance(given, str) and kind is not str:
        return sweep_values.value(given, kind, f"{shown}: {name}={given}")
    return tuple(given) if kind is tuple and isinstance(given, list) else given


def _random(found: dict[str, Any], samples: int, shown: str) -> Points:
    """The random points, each once: more of them begin with the same ones."""
    if "random" not in found:
        if samples or "samples" in found:
            raise UserError(f"{shown}: samples: would be ignored without random")
        return [{}]
    count = _whole(samples or found.get("samples", 0), 1, f"{shown}: samples")
    sweep_values.check_lanes(count, shown)
    seed = _whole(found.get("seed", 0), 0, f"{shown}: seed")
    draws = {}
    for name, given in _flat(found["random"], shown).items():
        if isinstance(given, str):
            kind, text = grid.kind_of(name, shown), f"{shown}: {name}={given}"
            draws[name] = sweep_values.distribution(given, kind, text)
        else:
            draws[name] = sweep_values.one_of(_values(name, given, shown))
    stream = rng.generator(seed, "sweep points")
    drawn = [{n: draw(stream) for n, draw in draws.items()} for _ in range(count)]
    return list({_as_key(point): point for point in drawn}.values())


def _as_key(point: Mapping) -> str:
    """The same text for the same settings, in whichever order they stand."""
    return repr(sorted(point.items()))


def points(path: str, samples: int, swept: Mapping[str, list]) -> Points:
    """All points of a sweep file.

    Args:
      path: of the file.
      samples: random points; 0: as many as the file says.
      swept: further settings and their values, from ``--sweep``.

    Raises:
      UserError: what cannot be swept, in one line.
    """
    shown, found = f"--sweep_file={path}", read(path)
    axes = {
        n: _values(n, v, shown) for n, v in _flat(found.get("grid", {}), shown).items()
    }
    listed: Points = [{}]
    if "list" in found:
        for point in found["list"]:
            if not isinstance(point, dict):
                raise UserError(f"{shown}: list: expected settings, got {point!r}")
        listed = [
            {n: _one(n, v, shown) for n, v in _flat(p, shown).items()}
            for p in found["list"]
        ]
    parts = [listed, _random(found, samples, shown)]
    parts += [[{n: v} for v in values] for n, values in axes.items()]
    parts += [[{n: v} for v in values] for n, values in swept.items()]
    sweep_values.check_lanes(math.prod(map(len, parts)), shown)
    seen: set[str] = set()
    for part in parts:
        names = {name for point in part for name in point}
        if seen & names:
            raise UserError(f"{shown}: {min(seen & names)} is swept twice")
        seen |= names
    product = itertools.product(*parts)
    merged = [{k: v for p in each for k, v in p.items()} for each in product]
    several, known = grid.points(merged), set[str]()
    for point in several:
        if _as_key(point) in known:
            raise UserError(f"{shown}: {point} is there twice; leave one out")
        known.add(_as_key(point))
    return several
