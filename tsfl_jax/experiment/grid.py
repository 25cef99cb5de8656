"""What a sweep varies: ``seed=0:10`` → values, and their product → configs."""

import importlib.util
import itertools
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tsfl_jax import config_files, host_memory
from tsfl_jax.components import Settings
from tsfl_jax.config import SETTINGS, Config, replace
from tsfl_jax.experiment import sweep_values
from tsfl_jax.types import UserError
from tsfl_jax.validate import suggestion, validate

Axes = dict[str, list]  # setting → the values it takes, in order


def kind_of(name: str, shown: str, settings: Settings = SETTINGS) -> type:
    """The type of a setting; UserError for an unknown one."""
    if name not in settings:
        raise UserError(f"{shown}: there is no such setting{suggestion(name)}")
    return settings[name][0]


def parse(texts: Iterable[str]) -> Axes:
    """Parse command-line sweeps, such as ``["seed=0:10", "lr=log(1e-3,1e-1,5)"]``.

    Raises:
      UserError: an unknown setting, a value that is not of its type, none or twice.
    """
    axes: Axes = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name, shown = name.strip(), f"--sweep={text}"
        if not equals:
            raise UserError(f"{shown}: expected setting=values, such as seed=0:10")
        if name in axes:
            raise UserError(f"{shown}: {name} is swept twice; give all values at once")
        kind = kind_of(name, shown)
        axes[name] = sweep_values.values(values.strip(), kind, shown)
    check(axes)
    return axes


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Parse command-line settings, such as ``["lr=0.01"]``, one value each.

    Raises:
      UserError: as in `parse`; several values; the algorithm or the seed.
    """
    try:
        found = parse(texts)
        for name, values in found.items():
            if len(values) > 1 or name in ("algorithm", "seed"):
                raise UserError(f"--sweep={name}: cannot be set to one value here")
    except UserError as error:
        raise UserError(str(error).replace("--sweep", "--set")) from error
    return {name: values[0] for name, values in found.items()}


def wrong_value(message: str) -> str:
    """Say that a setting's value is not of its type, in the words of a sweep.

    Args:
      message: of the flag library, which has Python's words for it.

    Returns:
      The message in plain words; the same one if it is about something else.
    """
    found = re.match(r"flag --config\.([\w.]+)=(.*?): ", message)
    if found and found[1] in SETTINGS:
        shown = f"--config.{found[1]}={found[2]}"
        try:
            sweep_values.value(found[2], kind_of(found[1], shown), shown)
        except UserError as error:
            return str(error)
    return message


def config_at(path: pathlib.Path) -> Config:
    """Load what ``get_config()`` of a config file returns.

    Args:
      path: of the file; ``afl.py:digits`` passes the argument "digits".

    Raises:
      UserError: no such file, an error in it, or no config in it.
    """
    name, argument = config_files.split(str(path))
    path = pathlib.Path(name)
    try:
        found = path.is_file()
    except (OSError, ValueError):  # a name too long, or a zero byte in it
        found = False
    if not found:
        raise UserError(f"{path}: no such config file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file; expected get_config() in a .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        arguments = (argument,) if argument else ()
        config = None
        if hasattr(module, "get_config"):
            config = module.get_config(*arguments)
    except Exception as error:  # a config file is any Python
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}: cannot be read ({reason})") from error
    if not isinstance(config, Config):
        raise UserError(f"{path}: get_config() must return a Config")
    return config


def data_settings(data_dir: str) -> dict[str, Any]:
    """Settings of ``--data_dir``: read prepared data there; none for "".

    Raises:
      UserError: there is no such folder.
    """
    if not data_dir:
        return {}
    try:
        path = pathlib.Path(data_dir).expanduser()
        found = path.is_dir()
    except (OSError, RuntimeError, ValueError):  # too long, unknown ~user, zero byte
        found = False
    if not found:
        raise UserError(f"--data_dir={data_dir}: no such folder")
    return {"data.dir": data_dir, "data.download": False}


def check(axes: Mapping[str, Sequence], settings: Settings = SETTINGS) -> Axes:
    """Convert axes to lists of plain values; UserError for what cannot be swept."""
    found = {}
    for name, values in axes.items():
        kind = kind_of(name, f"sweep {name}", settings)
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise UserError(f"sweep {name}: expected a list of values, got {values!r}")
        # Neither a generator without end nor range(10**10) is turned into a list.
        most = host_memory.total() // sweep_values.LANE_BYTES
        values = list(itertools.islice(values, most + 1))
        if len(values) > most:
            sweep_values.check_lanes(len(values), f"sweep {name}")
        if not values:
            raise UserError(f"sweep {name}: no values; a range is first:end")
        # NumPy's and JAX's numbers as plain ones, and an int where a float is meant.
        plain = [v.item() if hasattr(v, "item") else v for v in values]
        if kind is float:
            for value in plain:
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise UserError(f"sweep {name}: {value!r} is not a number")
            plain = [float(value) for value in plain]
        if kind is tuple:
            plain = [tuple(v) if isinstance(v, list) else v for v in plain]
        if len(set(map(str, plain))) < len(plain):
            raise UserError(f"sweep {name}: a value is given twice in {plain}")
        found[name] = plain
    return found


def points(
    swept: Mapping[str, Sequence] | Sequence[Mapping], settings: Settings = SETTINGS
) -> list[dict[str, Any]]:
    """Make the sweep points: the product of axes, or the points of a list.

    The points of a list may name different settings, as a setting that only one rule
    reads: one that a point lacks keeps the config's value.

    Returns:
      {setting: value} of every lane.

    Raises:
      UserError: what cannot be swept, or no points.
    """
    if isinstance(swept, Mapping):
        if not swept:
            raise UserError(
                "sweep: no setting; expected for example {'seed': range(5)}"
            )
        return product(check(swept, settings))
    if isinstance(swept, str) or not isinstance(swept, Iterable):
        raise UserError(
            f"sweep: expected {{setting: values}}, or a list of such points, got "
            f"{swept!r}"
        )
    found = []
    for point in swept:
        if not isinstance(point, Mapping):
            raise UserError(f"sweep: expected settings as a dict, got {point!r}")
        axes = check({k: [v] for k, v in point.items()}, settings)
        found.append({k: v for k, (v,) in axes.items()})
    if not found:
        raise UserError("sweep: no points")
    return found


def names_of(points: Iterable[Mapping[str, Any]]) -> list[str]:
    """The settings that some point names, each once."""
    return list(dict.fromkeys(name for point in points for name in point))


def product(axes: Axes) -> list[dict[str, Any]]:
    """Combine all values, the last axis fastest, as {setting: value}.

    Raises:
      UserError: more lanes than memory holds.
    """
    sweep_values.check_lanes(
        math.prod(map(len, axes.values())), f"sweep {', '.join(axes)}"
    )
    return [
        dict(zip(axes, values, strict=True))
        for values in itertools.product(*axes.values())
    ]


def changed(config: Config, values: dict[str, Any]) -> Config:
    """A copy of a config with settings changed, validated."""
    config = replace(config, values)
    try:
        validate(config)
    except UserError as error:
        where = ", ".join(f"{k}={v}" for k, v in values.items())
        raise UserError(f"lane {where}: {error}") from error
    return config
