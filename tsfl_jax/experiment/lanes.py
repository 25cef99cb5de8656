"""Experiments that differ in arrays only, as lanes of one compiled program.

Seeds, splits, schedules, scalar hyper-parameters and aggregation rules are arrays or
arguments; what changes shapes or the network makes another group, with a program of
its own.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices, scan
from tsfl_jax.experiment import initial_estimates
from tsfl_jax.experiment import program as programs
from tsfl_jax.experiment.identity import signature
from tsfl_jax.experiment.prepare import Prepared
from tsfl_jax.experiment.rule_settings import arrays

ONE_CALL = 4  # runs one after another: a killed call loses their work


def group(
    several: list[Prepared], finished: Collection[int] = ()
) -> tuple[list[list[int]], list[str]]:
    """Group experiments that share a program.

    A group in which all have finished is left out. The finished ones of a group belong
    to it all the same, so that an interrupted call goes on in its program.

    Returns:
      Indices of each group, in order of appearance; and why there is more than one
      group: the settings that differ between them.
    """
    groups: dict[tuple, list[int]] = {}
    for index, prepared in enumerate(several):
        groups.setdefault(tuple(signature(prepared).items()), []).append(index)
    groups = {s: found for s, found in groups.items() if not {*found} <= {*finished}}
    signatures = [dict(items) for items in groups]
    causes = [
        f"{name}={', '.join(dict.fromkeys(s[name] for s in signatures))}"
        for name in (signatures[0] if signatures else ())
        if len({s[name] for s in signatures}) > 1
    ]
    return list(groups.values()), causes


class Group(NamedTuple):
    """The experiments of one program, and what all its lanes share."""

    members: list[Prepared]
    program: programs.Program
    problem: scan.Problem  # split of the first lane; `make_lanes` puts in all
    width: int  # D, columns of the index tables
    clients: int  # U, their rows
    scored: int  # clients that are scored with layers of their own; 0: none


def make_group(members: list[Prepared], mesh: Mesh) -> Group:
    """The program of some experiments; lanes are mapped as their clients are.

    On a CPU whose clients were put side by side by choice of `prepare`, lanes run one
    after another: they fit into its cache, and a lane has the bits of a single run.
    """
    first, cpu = members[0], jax.default_backend() == "cpu"
    by_choice = cpu and first.config.mapping == "auto"
    how = "sequential" if first.mapping == "sequential" or by_choice else "vmap"
    return Group(
        members=members,
        program=programs.make_program(members, mesh, how),
        problem=programs.make_problem(members[0], mesh),
        width=max(p.partition.indices.shape[1] for p in members),
        clients=max(len(p.partition.indices) for p in members),
        scored=max(programs.number_scored(p) for p in members),
    )


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def lanes_of_call(group: Group) -> int:
    """Choose the number of runs of one compiled call.

    One after another: a few. Side by side (vmapped): what fits into 80 % of the
    device's memory, as the compiler reports the memory of one lane.
    """
    members, stats = group.members, jax.devices()[0].memory_stats() or {}
    if members[0].mapping == "sequential" or "bytes_limit" not in stats:
        return min(ONE_CALL, len(members))
    one = make_lanes(group, members[:1], 1, runs=False)
    memory = group.program.compile(one).memory()
    free = 0.8 * stats["bytes_limit"] - memory["arguments"]
    fits = int(free // max(memory["temporary"], 1))
    return max(1, min(fits, len(members)))


def make_lanes(
    group: Group, several: list[Prepared], count: int, *, runs: bool = True
) -> programs.Arrays:
    """The arrays of some members; idle copies of the last one fill up to `count`.

    With `runs` false they are for compiling alone, so that no initial estimate is run.
    """
    busy = len(several)
    several = several + several[-1:] * (count - busy)
    first, mesh = several[0], group.program.mesh
    keys = [programs.keys_of(p) for p in several]
    init_keys, train_keys = (jnp.stack(part) for part in zip(*keys, strict=True))

    rules = programs.rules_of(group.members)
    kinds = tuple(dict.fromkeys(k for p in group.members for k in p.sections))

    def init(own: tuple, samples: local.Samples) -> scan.State:
        return lax.map(
            lambda lane: programs.initial_state(
                first, rules, lane[0], lane[1], samples
            ),
            own,
        )

    sizes = [programs.sizes_of(p) for p in several]
    sizes = _stacked([(_padded(group, own), others) for own, others in sizes])
    own = devices.place(mesh, (init_keys, sizes), scan.WHOLE)
    state = jax.jit(init)(own, group.problem.samples)
    start = state.params
    hparams = []
    for i, p in enumerate(several[:busy]):
        found = p.hparams
        if runs:
            own = jax.tree.map(lambda a, i=i: a[i], start)
            known = p, group.problem.samples, own, keys[i][1]
            found = initial_estimates.fill(*known, group.members[0], group.width)
        number, settings = np.int32(rules.index(p.rule)), arrays(p.config, kinds)
        hparams.append(found._replace(rule=number, settings=settings))
    hparams += hparams[-1:] * (count - busy)
    return programs.Arrays(
        start=jax.device_get(state),
        key=train_keys,
        hparams=_stacked(hparams),
        problem=_make_lanes_problem(group, several),
        inputs=_make_lanes_inputs(group, several, busy),
    )


def _padded(group: Group, array: np.ndarray, *more: int) -> np.ndarray:
    """With rows of clients that are never drawn."""
    missing = group.clients - len(array), *more
    return np.pad(array, [(0, n) for n in missing])


def _make_lanes_problem(group: Group, several: list[Prepared]) -> scan.Problem:
    """The problem with what each lane has of its own, `scan.OF_A_LANE`."""
    tables = [p.partition.indices for p in several]
    width = group.width
    rows = [_padded(group, r, width - r.shape[1]) for r in tables]
    own = {
        "rows": np.stack(rows),
        "client": np.stack([_padded(group, p.workload.drawn) for p in several]),
        "validation": _stacked([programs.held_out_of(p) for p in several]),
        "class_index": _stacked([programs.class_index_of(p) for p in several]),
        "scored": _stacked([programs.scored_of(p, group.scored) for p in several]),
    }
    own = devices.place(group.program.mesh, own, scan.WHOLE)
    return group.problem._replace(**own)


def _make_lanes_inputs(group: Group, several: list[Prepared], busy: int) -> scan.Inputs:
    """Inputs ``[L, T, ...]``, interval and evaluate ``[T]``; idle from `busy` on."""
    sizes = group.program.mesh.size, group.program.chunk
    inputs = [programs.make_inputs(p, *sizes) for p in several]
    shared = {"interval": inputs[0].interval, "evaluate": inputs[0].evaluate}
    own = [i._replace(interval=None, evaluate=None) for i in inputs]
    stacked = _stacked(own)
    stacked.tau[busy:], stacked.reported[busy:] = 0, -1
    return stacked._replace(**shared)
