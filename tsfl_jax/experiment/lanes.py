"""Experiments that differ in arrays only, as lanes of one compiled program.

Seeds, splits, schedules, scalar hyper-parameters and aggregation rules are arrays or
arguments; what changes shapes or the network makes another group, with a program of
its own.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices, scan
from tsfl_jax.experiment import assemble
from tsfl_jax.experiment.identity import signature
from tsfl_jax.experiment.prepare import Prepared, chunk_of, counts_of
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.types import HParams


def group(several: list[Prepared]) -> list[list[int]]:
    """Indices of the experiments that share a program, in order of appearance."""
    groups: dict[tuple, list[int]] = {}
    for index, prepared in enumerate(several):
        groups.setdefault(tuple(signature(prepared).items()), []).append(index)
    return list(groups.values())


def differences(several: list[Prepared], groups: list[list[int]]) -> list[str]:
    """Why there is more than one program: the settings that differ between groups."""
    signatures = [signature(several[indices[0]]) for indices in groups]
    return [
        f"{name}={', '.join(dict.fromkeys(s[name] for s in signatures))}"
        for name in signatures[0]
        if len({s[name] for s in signatures}) > 1
    ]


class Program(NamedTuple):
    """One group: a function to compile and what all its lanes share."""

    run: Callable  # (state[L], key[L], hparams[L], problem, inputs[R]) -> ...
    rules: tuple[Aggregator, ...]
    mesh: Mesh
    problem: scan.Problem  # rows of the first lane; `arguments` puts in all
    width: int  # D, columns of the index tables
    intervals: int  # T
    chunk: int  # R
    reports: bool  # clients of some lane report other than what they did


def make_program(several: list[Prepared], mesh: Mesh) -> Program:
    """The program of one group; lanes take turns on a CPU, and go abreast elsewhere."""
    rules = tuple(dict.fromkeys(p.rule for p in several))
    how = "sequential" if several[0].mapping == "sequential" else "vmap"
    return Program(
        run=assemble.make_run(several, rules, mesh, how),
        rules=rules,
        mesh=mesh,
        problem=assemble.make_problem(several[0], mesh),
        width=max(p.dealt.indices.shape[1] for p in several),
        intervals=len(several[0].times.tau),
        chunk=chunk_of(several[0]),
        reports=any(p.times.reported is not None for p in several),
    )


class Lanes(NamedTuple):
    """The arrays of L experiments, ``[L, ...]``."""

    state: scan.State
    key: jax.Array
    hparams: HParams
    rows: np.ndarray  # [L, N, D]
    inputs: scan.Inputs  # [L, T, ...], but interval and evaluate [T]; whole chunks


def _stacked(trees: list) -> NamedTuple:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def make_lanes(program: Program, several: list[Prepared], count: int) -> Lanes:
    """The arrays of these experiments; idle copies of the last fill up to `count`."""
    missing = count - len(several)
    several = several + several[-1:] * missing
    keys = [assemble.keys_of(p) for p in several]
    init_keys, train_keys = (jnp.stack(part) for part in zip(*keys, strict=True))
    first = several[0]

    def init(own, samples):
        x = local.scaled(samples, samples.x[:1])
        counts, places = counts_of(first), first.times.places
        return lax.map(
            lambda lane: scan.init_state(
                first.model, first.rule, lane[0], x, counts, places, lane[1]
            ),
            own,
        )

    sizes = np.stack([p.dealt.capacity.astype(np.float32) for p in several])
    own = devices.place(program.mesh, (init_keys, sizes), scan.WHOLE)
    state = jax.jit(init)(own, program.problem.samples)
    one = jax.tree.map(lambda a: a[0], state.params)
    classes = first.dataset.num_classes
    assemble.check_output(first.model, one, program.problem, classes)
    inputs = [assemble.make_inputs(p, program.mesh.size) for p in several]
    if program.reports:  # honest clients report what they did
        inputs = [
            i._replace(reported=i.tau.copy()) if i.reported is None else i
            for i in inputs
        ]
    same = {"interval": None, "evaluate": None}
    stacked = _stacked([i._replace(**same) for i in inputs])
    busy = np.arange(count) < count - missing
    stacked.tau[~busy] = 0
    if stacked.reported is not None:
        stacked.reported[~busy] = 0
    return Lanes(
        state=state,
        key=train_keys,
        hparams=_stacked(
            [
                p.hparams._replace(rule=np.int32(program.rules.index(p.rule)))
                for p in several
            ]
        ),
        rows=np.stack(
            [
                np.pad(r, ((0, 0), (0, program.width - r.shape[1])))
                for r in (p.dealt.indices for p in several)
            ]
        ),
        inputs=stacked._replace(
            interval=inputs[0].interval, evaluate=inputs[0].evaluate
        ),
    )


def arguments(program: Program, lanes: Lanes, state: scan.State, first: int) -> tuple:
    """What ``program.run`` takes for the intervals from `first` on, on the devices."""
    end = first + program.chunk
    whole, part = lanes.inputs, slice(first, end)
    own = whole._replace(interval=None, evaluate=None)
    inputs = jax.tree.map(lambda a: a[:, part], own)._replace(
        interval=whole.interval[part], evaluate=whole.evaluate[part]
    )
    placed = (state, lanes.key, lanes.hparams, lanes.rows)
    state, key, hparams, rows = devices.place(program.mesh, placed, scan.WHOLE)
    problem = program.problem._replace(rows=rows)
    inputs = devices.place(program.mesh, inputs, scan.LANES_INPUTS_SPEC)
    return state, key, hparams, problem, inputs
