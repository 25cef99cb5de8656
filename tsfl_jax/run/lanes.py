"""Experiments that differ in arrays only, as lanes of one compiled program.

Seeds, splits, schedules, scalar hyper-parameters and aggregation rules are arrays or
arguments; what changes shapes or the network makes another group, with a program of
its own. A single run is a group of one.
"""

from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tsfl_jax.data import targets
from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices, evaluation, scan
from tsfl_jax.prepare.prepare import Prepared, counts_of
from tsfl_jax.prepare.rule_settings import arrays as settings_arrays
from tsfl_jax.run import initial_estimates
from tsfl_jax.run import program as programs
from tsfl_jax.run.identity import values_of
from tsfl_jax.timeline.attackers import AttackConfig

ONE_CALL = 4  # runs one after another: a killed call loses their work


def group(prepared_runs: Sequence[Prepared]) -> list[list[int]]:
    """Indices of the experiments that share a program, in order of appearance."""
    keys: list[Any] = []
    groups: list[list[int]] = []
    for index, key in enumerate(programs.sharing_keys(prepared_runs)):
        if key not in keys:  # a key need not be hashable
            keys.append(key)
            groups.append([])
        groups[keys.index(key)].append(index)
    return groups


def causes_of(groups: list[list[int]], prepared_runs: Sequence[Prepared]) -> str:
    """The settings that divide runs into groups, by name with their first values."""
    settings = [[values_of(prepared_runs[i]) for i in members] for members in groups]
    causes = []
    for name in settings[0][0]:
        texts = [{str(run.get(name)) for run in members} for members in settings]
        values = dict.fromkeys(text for group in texts for text in sorted(group))
        if len(values) > 1 and all(len(group) == 1 for group in texts):
            dots = ", …" * (len(values) > 4)
            causes.append(f"{name} ({', '.join([*values][:4])}{dots})")
    return " and ".join(causes) or "number of clients or updates that seeds draw"


class Group(NamedTuple):
    """The experiments of one program, and what all its lanes share."""

    members: list[Prepared]
    program: programs.Program
    samples: local.Samples
    test: evaluation.TestSet
    num_columns: int  # D, of the index tables
    num_clients: int  # U, rows of the index tables
    num_scored: int  # clients that are scored with layers of their own; 0: none


def make_group(members: list[Prepared], mesh: Mesh) -> Group:
    """The program of some experiments with the same key."""
    dataset, tested = members[0].dataset, members[0].tested
    train_targets, labels = targets.of(dataset)
    scale = [np.asarray(a, np.float32) for a in (dataset.mean, 1.0 / dataset.std)]
    arrays = dataset.x_train, train_targets, *scale
    groups = getattr(tested, "group", None)
    test = evaluation.make_test_set(dataset.x_test, labels, mesh.size, groups)
    num_scored = [len(p.tested.client) for p in members if p.tested and p.is_personal]
    return Group(
        members=members,
        program=programs.make_program(members, mesh),
        samples=local.Samples(*devices.place(mesh, arrays, scan.WHOLE)),
        test=devices.place(mesh, test, scan.DIVIDED),
        num_columns=max(p.partition.indices.shape[1] for p in members),
        num_clients=max(len(p.partition.indices) for p in members),
        num_scored=max(num_scored, default=0),
    )


def largest(members: Sequence[Prepared]) -> Prepared:
    """The one of a program's experiments that needs the most memory."""
    return max(members, key=lambda p: p.partition.indices.nbytes)


def runs_per_call(group: Group, stream: IO[str] | None = None) -> int:
    """Choose the number of runs of one compiled call.

    One after another: a few. Side by side (vmapped): what fits into 80 % of the
    device's memory, as the compiler reports the memory of one run.
    """
    members, stats = group.members, jax.devices()[0].memory_stats() or {}
    if members[0].mapping == "sequential" or "bytes_limit" not in stats:
        return min(ONE_CALL, len(members))
    one = make_arrays(group, members[:1], estimates=False)
    memory = group.program.compile(one, stream).memory()
    free = 0.8 * stats["bytes_limit"] - memory["arguments"]
    fits = int(free // max(memory["temporary"], 1))
    return max(1, min(fits, len(members)))


def make_arrays(
    group: Group, runs: list[Prepared], count: int = 0, *, estimates: bool = True
) -> programs.Arrays:
    """The arrays of some members of a group, ``[L, ...]``.

    Args:
      group: from `make_group`.
      runs: its members that are run.
      count: L; idle copies of the last run fill up to it. 0: as many as there are runs.
      estimates: whether initial estimates are made; without them the arrays are for
        compiling alone.
    """
    idle = max(count - len(runs), 0)
    lanes = runs + runs[-1:] * idle
    keys = [programs.keys_of(p) for p in lanes]
    init_keys, train_keys = (jnp.stack(part) for part in zip(*keys, strict=True))
    state = _first_states(group, lanes, init_keys)
    rules = programs.rules_of(group.members)
    kinds = tuple(dict.fromkeys(k for p in group.members for k in p.sections))
    hparams = []
    for i, p in enumerate(runs):
        scalars = p.hparams
        if estimates:
            params = jax.tree.map(lambda a, i=i: a[i], state.params)
            scalars = initial_estimates.fill(
                p, group.samples, params, keys[i][1], group.num_columns
            )
        # Those of a run may be found before training, see `prepare.privacy`.
        settings = settings_arrays(p.config, kinds)
        settings |= {n: v for n, v in p.hparams.settings.items() if n == "noise"}
        rule = np.int32(rules.index(p.rule))
        hparams.append(scalars._replace(rule=rule, settings=settings))
    return programs.Arrays(
        start=jax.device_get(state),
        key=train_keys,
        hparams=_stacked(hparams + hparams[-1:] * idle),
        problem=_make_problem(group, lanes),
        inputs=_make_inputs(group, lanes, len(runs)),
    )


def single(
    prepared: Prepared, mesh: Mesh, *, estimates: bool = True
) -> tuple[programs.Program, programs.Arrays]:
    """The program of one experiment, and its arrays, see `make_arrays`."""
    group = make_group([prepared], mesh)
    return group.program, make_arrays(group, [prepared], estimates=estimates)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees) if trees else None


def _first_states(group: Group, lanes: list[Prepared], keys: jax.Array) -> scan.State:
    """w^0 and the rules' states, ``[L, ...]`` on all devices."""
    first, rules = lanes[0], programs.rules_of(group.members)

    def init(keys: jax.Array, sizes: Any, samples: local.Samples) -> scan.State:
        def of_run(lane: Any) -> scan.State:
            key, (size, elsewhere) = lane
            counts = counts_of(first)._replace(clients=size.shape[0], size=size)
            return scan.init_state(
                first.network.model,
                rules,
                key,
                local.scaled(samples, samples.x[:1]),
                counts._replace(idle_size=elsewhere),
                first.workload.schedule.snapshots,
                first.config.cohort.choice,
                first.uplinks,
                first.hparams,
            )

        return scan.over_lanes(of_run, side_by_side=False)((keys, sizes))

    sizes = []  # samples of each client on the device, and of all others together
    for prepared in lanes:
        size = prepared.partition.capacity
        total = prepared.workload.num_samples.sum(dtype=np.int64)
        elsewhere = np.asarray(total - size.sum(dtype=np.int64), np.float32)
        sizes.append((_padded(group, size.astype(np.float32)), elsewhere))
    arguments = keys, _stacked(sizes)
    keys, sizes = devices.place(group.program.mesh, arguments, scan.WHOLE)
    return jax.jit(init)(keys, sizes, group.samples)


def _padded(group: Group, array: np.ndarray, *missing_columns: int) -> np.ndarray:
    """With rows of clients that are never drawn."""
    missing = group.num_clients - len(array), *missing_columns
    return np.pad(array, [(0, n) for n in missing]) if any(missing) else array


def _make_problem(group: Group, lanes: list[Prepared]) -> scan.Problem:
    """Samples and test set, which runs share, and the arrays of each run."""
    tables, width = [p.partition.indices for p in lanes], group.num_columns
    held_out = [p.held_out for p in lanes if len(p.held_out)]  # of all lanes, or none
    rows = [_padded(group, table, width - table.shape[1]) for table in tables]
    asks = any(link.section is AttackConfig for link in lanes[0].uplinks)
    attackers = [p.workload.attackers for p in lanes if asks]
    per_run = {
        "rows": np.stack(rows),
        "client": np.stack([_padded(group, p.workload.drawn) for p in lanes]),
        "validation": _stacked([evaluation.make_held_out(v) for v in held_out]),
        "class_index": _stacked([programs.class_index_of(p) for p in lanes]),
        "attacker": _stacked([_padded(group, a) for a in attackers]),
        "scored": _stacked([programs.scored_of(p, group.num_scored) for p in lanes]),
    }
    per_run["group_size"] = getattr(lanes[0].tested, "size", None)
    per_run = devices.place(group.program.mesh, per_run, scan.WHOLE)
    return scan.Problem(group.samples, group.test, **per_run)


def _make_inputs(group: Group, lanes: list[Prepared], busy: int) -> scan.Inputs:
    """Inputs ``[L, T, ...]``, what all runs share ``[T]``; idle from `busy` on."""
    sizes = group.program.mesh.size, group.program.chunk
    inputs = [programs.make_inputs(p, *sizes) for p in lanes]
    shared = {name: getattr(inputs[0], name) for name in scan.SHARED}
    stacked = _stacked([i._replace(**dict.fromkeys(scan.SHARED)) for i in inputs])
    stacked.tau[busy:] = 0
    stacked.reported[busy:] = -1
    return stacked._replace(**shared)


def arguments_of_run(arrays: programs.Arrays, updates: int, lane: int = 0) -> tuple:
    """What `scan.make_run` takes for one of the runs and its first updates."""
    inputs = programs.cut_inputs(arrays.inputs, lane, slice(updates))
    per_run = {name: getattr(arrays.problem, name) for name in scan.PER_RUN}
    trees = arrays.start, arrays.key, arrays.hparams, per_run
    *whole, per_run = jax.tree.map(lambda a: a[lane], trees)
    return *whole, arrays.problem._replace(**per_run), inputs
