"""Explain a sweep before it runs: its programs, lanes and memory."""

import textwrap
from typing import Any

from jax.sharding import Mesh

from tsfl_jax.experiment import explain, grid, lanes, sweeps
from tsfl_jax.experiment.prepare import Prepared
from tsfl_jax.report import progress

_SHARED = ("training samples", "test samples")  # by all lanes of a call
_COLUMNS, _NAME = 99, 15


def _points_text(points: list[dict[str, Any]]) -> str:
    """ "12 lanes: algorithm (4 values), seed (3 values)"."""
    counts = []
    for name in grid.names_of(points):
        values = {str(point[name]) for point in points if name in point}
        counts.append(f"{name} ({len(values)} value{'s' * (len(values) > 1)})")
    return f"{len(points):,} lanes: {', '.join(counts)}"


def _memory(prepared: Prepared, mesh: Mesh, count: int) -> int:
    """Bytes of a call of `count` lanes on a device, without activations."""
    block = prepared.config.client_chunk or prepared.config.num_clients
    width = 1 if prepared.mapping == "sequential" else -(-block // mesh.size)
    rows = explain.estimate_memory(prepared, mesh.size, width)
    return sum(b if name in _SHARED else count * b for name, b in rows.items())


def text(
    points: list[dict[str, Any]],
    several: list[Prepared],
    mesh: Mesh,
    lanes_per_call: int,
) -> str:
    """What a sweep would do.

    Args:
      points: of all lanes.
      several: all lanes.
      mesh: the devices.
      lanes_per_call: as for `sweeps.run`.

    Returns:
      Lines of at most 99 characters, without the last newline.
    """
    groups, causes = lanes.group(several)
    why = f", because of {'; '.join(causes)}" if causes else ""
    table = {
        "sweep": _points_text(points),
        "programs": f"{len(groups)}{why}",
    }
    for number, members in enumerate(groups, start=1):
        first = several[members[0]]
        count = min(lanes_per_call or sweeps.most_lanes(first), len(members))
        table[f"  program {number}"] = (
            f"{len(members)} lanes in {-(-len(members) // count)} calls of {count}, "
            f"clients {progress.MAPPED[first.mapping]}, "
            f"≥ {explain.size_text(_memory(first, mesh, count))} on a device without "
            "activations"
        )
    table["devices"] = f"{mesh.size} × {mesh.devices.flat[0].platform.upper()}"
    return "\n".join(
        textwrap.fill(f"{n:<{_NAME}}{words}", _COLUMNS, subsequent_indent=" " * _NAME)
        for n, words in table.items()
    )
