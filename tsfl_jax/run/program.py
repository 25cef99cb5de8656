"""The program of one or more experiments: the only place that compiles.

`Program` is the function, `Arrays` what it runs on, `Compiled` what XLA made of both.
The same generator of chunks serves runs and sweeps.
"""

import functools
import time
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tsfl_jax import rng
from tsfl_jax.config import seeds_of
from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices, evaluation, optimizers, scan
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.prepare.prepare import Prepared, evaluated
from tsfl_jax.report import progress
from tsfl_jax.run.call_length import chunk_of
from tsfl_jax.run.program_key import merged_spec, rules_of
from tsfl_jax.types import HParams, PRNGKey


class Arrays(NamedTuple):
    """What a program runs on: L experiments, see `scan.make_lanes_run`."""

    start: scan.State  # w^0 and the rule's state, on the host: a call takes its own
    key: PRNGKey  # of the seed; the run folds its streams from it
    hparams: HParams
    problem: scan.Problem  # on the devices
    inputs: scan.Inputs  # on the host, [L, T, ...] filled up to whole chunks


class Chunk(NamedTuple):
    """What one call has computed."""

    first: int  # interval before which it began
    last: int  # intervals that have finished after it
    state: scan.State  # on the devices, until the next chunk takes its memory
    history: scan.History  # on the host, [L, last − first, ...]
    seconds: float  # of the call


def cut_inputs(inputs: scan.Inputs, runs: Any, intervals: slice) -> scan.Inputs:
    """Some runs and intervals of inputs ``[L, T, ...]``; what all runs share is [T]."""
    shared = {name: getattr(inputs, name)[intervals] for name in scan.SHARED}
    laned = inputs._replace(**dict.fromkeys(scan.SHARED))
    return jax.tree.map(lambda a: a[runs, intervals], laned)._replace(**shared)


class Program(NamedTuple):
    """A function for the experiments of a group, which differ in arrays only."""

    run: scan.Run
    parts: Parts
    mesh: Mesh
    intervals: int  # T, intervals or updates of a whole run
    chunk: int  # R, of one call

    @property
    def spec(self) -> ProgramSpec:
        """What shapes the program."""
        return self.parts.spec

    def chunk_of_arrays(self, arrays: Arrays, state: scan.State, first: int) -> tuple:
        """What `run` takes for the chunk from interval `first` on, wherever it is."""
        part = slice(first, first + self.chunk)
        inputs = cut_inputs(arrays.inputs, slice(None), part)
        return state, arrays.key, arrays.hparams, arrays.problem, inputs

    def arguments(self, arrays: Arrays, state: scan.State, first: int) -> tuple:
        """What `run` takes for the chunk from interval `first` on, on the devices."""
        *whole, problem, inputs = self.chunk_of_arrays(arrays, state, first)
        whole = devices.place(self.mesh, whole, scan.WHOLE)
        return *whole, problem, devices.place(self.mesh, inputs, scan.INPUTS_SPEC)

    def history_shapes(self, arrays: Arrays) -> scan.History:
        """Shapes and types of a call's history ``[L, R, ...]``; nothing is compiled."""
        arguments = self.arguments(arrays, arrays.start, 0)
        return jax.eval_shape(self.run, *arguments)[1]

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Trace for arrays or shapes; the state is donated."""
        return jax.jit(self.run, donate_argnums=0).lower(*arguments)

    def compile(
        self,
        arrays: Arrays,
        state: scan.State | None = None,
        stream: IO[str] | None = None,
    ) -> "Compiled":
        """Lower and compile for arrays of these shapes, with lines on a stream.

        `state` None: their start.
        """
        arguments = self.arguments(arrays, state or arrays.start, 0)
        progress.log(stream, "compiling …")
        begun = time.perf_counter()
        lowered = self.lower(*arguments)
        middle = time.perf_counter()
        call = lowered.compile(devices.compiler_options(self.mesh))
        end = time.perf_counter()
        progress.log(stream, f"compiled in {end - begun:.1f} s")
        return Compiled(self, call, middle - begun, end - begun)


class Compiled(NamedTuple):
    """A compiled program."""

    program: Program
    call: jax.stages.Compiled
    lower_seconds: float  # of tracing and lowering
    seconds: float  # of tracing, lowering and compiling

    def chunks(
        self, arrays: Arrays, state: scan.State | None = None, first: int = 0
    ) -> Iterator[Chunk]:
        """Run from interval `first` and `state` to the end; None: ``arrays.start``."""
        program = self.program
        now: scan.State = state or arrays.start
        # Once, not for each call; the state is on the devices after the first one.
        whole = arrays.key, arrays.hparams
        key, hparams = devices.place(program.mesh, whole, scan.WHOLE)
        arrays = arrays._replace(key=key, hparams=hparams)
        while first < program.intervals:
            arguments = program.arguments(arrays, now, first)
            begun = time.perf_counter()
            # In a history NaN stands for "not measured", whatever jax_debug_nans says.
            with jax.debug_nans(False):
                now, history = jax.block_until_ready(self.call(*arguments))
            seconds = time.perf_counter() - begun
            length = min(program.chunk, program.intervals - first)  # without padding
            history = jax.tree.map(
                lambda a, length=length: a[:, :length], jax.device_get(history)
            )
            yield Chunk(first, first + length, now, history, seconds)
            first += length

    def memory(self) -> dict[str, int]:
        """Bytes on every device as the compiler reports them; {} where it does not."""
        return memory_of(self.call)


def memory_of(call: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of a compiled call on every device; {} where the compiler is silent."""
    analysis = call.memory_analysis()
    if not analysis:
        return {}
    return {
        "arguments": analysis.argument_size_in_bytes,
        "temporary": analysis.temp_size_in_bytes,
        # The new state takes the place of the old one.
        "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    }


def make_program(members: list[Prepared], mesh: Mesh) -> Program:
    """The program of experiments with the same key, see `program_key`.

    Runs take turns where their clients do, else they go side by side. On a CPU whose
    clients were put side by side by choice of `prepare`, runs take turns, too: they fit
    into its cache, and each has the bits of a single run.
    """
    any_member, rules, spec = members[0], rules_of(members), merged_spec(members)
    optimizer = any_member.optimizer
    if optimizer is optimizers.sgd:
        terms = optimizers.terms_of(any_member.hparams)
        optimizer = functools.partial(optimizers.sgd, terms=terms)
    custom = any_member.hooks, any_member.uplinks
    parts = Parts(any_member.network.model, rules, optimizer, spec, *custom)
    is_cpu = jax.default_backend() == "cpu"
    by_choice = is_cpu and any(p.config.mapping == "auto" for p in members)
    run = scan.make_run(parts, devices.AXIS)
    side_by_side = spec.mapping == "vmap" and not by_choice
    return Program(
        run=scan.make_lanes_run(run, mesh, side_by_side=side_by_side),
        parts=parts,
        mesh=mesh,
        intervals=len(any_member.steps),
        chunk=min(map(chunk_of, members)),
    )


def held_out_of(prepared: Prepared) -> evaluation.HeldOut | None:
    """The validation samples in batches, None if there are none."""
    rows = prepared.held_out
    return None if rows is None else evaluation.make_held_out(rows)


def scored_of(prepared: Prepared, number: int) -> evaluation.Scored | None:
    """Whose own models are tested, filled up to `number`; 0: none stays with them."""
    tested = prepared.tested
    if not number or not tested:
        return None
    num_scored = len(tested.client)
    share = np.eye(num_scored) if tested.share is None else tested.share
    missing = number - num_scored
    return evaluation.Scored(
        np.pad(tested.client, (0, missing), constant_values=-1),
        np.pad(share, ((0, missing), (0, 0))).astype(np.float32),
    )


def class_index_of(prepared: Prepared) -> local.ClassIndex | None:
    """All training samples by class, without those for validation; None: not online."""
    if not prepared.config.partition.online:
        return None
    labels, held_out = prepared.dataset.y_train, prepared.held_out
    rows = np.arange(len(labels))
    rows = rows if held_out is None else np.setdiff1d(rows, held_out)
    count = np.bincount(labels[rows]).astype(np.int32)
    first = np.cumsum(count, dtype=np.int32) - count
    order = rows[np.argsort(labels[rows], kind="stable")].astype(np.int32)
    return local.ClassIndex(first, count, order, labels)


def make_inputs(prepared: Prepared, num_devices: int, chunk: int) -> scan.Inputs:
    """Inputs of all intervals on the host, ``[T + R − 1, ...]``; `chunk` is R.

    The last R − 1 fill up the last chunk, in whatever interval a run goes on.
    """
    times = prepared.workload.schedule
    inputs = scan.Inputs(
        interval=np.arange(len(times.tau), dtype=np.int32),
        tau=times.tau,
        size=times.size,
        evaluate=evaluated(prepared),
        assigned=devices.assign(
            prepared.steps, num_devices, grouped=prepared.mapping == "sequential"
        ),
        reported=times.reported,
        client=prepared.workload.places,
        delivery=times.delivery,
        threshold=times.threshold.astype(np.float32),
        share=times.share,
        lots=times.lots,
    )
    # The padding has no clients, no evaluations and no snapshots: it changes nothing.
    filled = jax.tree.map(
        lambda a: np.concatenate([a, a[-1:].repeat(chunk - 1, 0)]), inputs
    )
    end = len(times.tau)
    filled.tau[end:], filled.evaluate[end:] = 0, False
    filled.assigned[end:] = times.tau.shape[1]
    filled.reported[end:], filled.delivery.keep[end:] = -1, times.snapshots
    return filled


def keys_of(prepared: Prepared) -> tuple[PRNGKey, PRNGKey]:
    """(of the initial model, of training, which the run folds its streams from)."""
    seeds = seeds_of(prepared.config)
    model, batches = rng.key(seeds.model), rng.key(seeds.batches)
    return rng.fold(model, "initial model"), batches
