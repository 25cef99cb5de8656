"""Files of finished lanes, each named by a digest of its settings."""

import contextlib
import pathlib
from collections.abc import Callable, Collection

import numpy as np

from tsfl_jax.engine import scan
from tsfl_jax.report import files
from tsfl_jax.types import UserError

Notice = Callable[[str], None]

OF_LANE = ("tau", "virtual_time", "seconds")  # beside the engine's history
CLIENT = "client"  # who delivers, in lanes whose clients do not start together
_NAME = "lane"  # the digest again: a file's name is not proof of its content


def finished_lanes(
    folder: pathlib.Path,
    names: list[str],
    notice: Notice,
    metrics: Collection[str] = (),
) -> dict[str, dict]:
    """Lanes that are whole on the disk, as {digest: arrays}; others get a notice.

    `metrics` are names of the user's own, and of what else was asked for.
    """
    always = {*scan.History._fields} - {*scan.OPTIONAL}
    wanted = always | {*OF_LANE, *metrics}
    found = {}
    for name in names:
        path = folder / f"{name}.npz"
        if not path.exists():
            continue
        with contextlib.suppress(UserError):
            lane = files.read_arrays(path)
            if str(lane.pop(_NAME, "")) == name and wanted == set(lane) - {CLIENT}:
                found[name] = lane
        if name not in found:
            notice(f"{path} is damaged or of an earlier version; that lane runs again")
    return found


def write_lane(folder: pathlib.Path, name: str, history: dict[str, np.ndarray]) -> None:
    """Write the file of a finished lane."""
    arrays = history | {_NAME: np.array(name)}
    files.write_arrays(folder / f"{name}.npz", arrays, compress=True)
