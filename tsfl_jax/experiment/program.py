"""The program of an experiment, or of several as lanes: the only place that compiles.

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
from jaxtyping import Float

from tsfl_jax import rng, trees
from tsfl_jax.config import seed_of
from tsfl_jax.data import targets, validation
from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices, evaluation, optimizers, personal, scan
from tsfl_jax.engine.program_spec import Estimates, Parts, ProgramSpec
from tsfl_jax.experiment import initial_estimates
from tsfl_jax.experiment.call_length import chunk_of
from tsfl_jax.experiment.prepare import Prepared, counts_of, evaluated
from tsfl_jax.report import progress
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.types import Array, HParams, PRNGKey


class Arrays(NamedTuple):
    """What a program runs on; lanes have a leading axis ``[L]``, see `ProgramSpec`."""

    start: scan.State  # w^0 and the rule's state, on the host: a call takes its own
    key: PRNGKey  # of the seed; the run folds its streams from it
    hparams: HParams
    problem: scan.Problem  # on the devices
    inputs: scan.Inputs  # on the host, [T, ...] filled up to whole chunks


class Chunk(NamedTuple):
    """What one call has computed."""

    first: int  # interval before which it began
    last: int  # intervals that have finished after it
    state: scan.State  # on the devices, until the next chunk takes its memory
    history: scan.History  # on the host, [last − first, ...]; lanes [L, ...]
    seconds: float  # of the call


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
        part, lanes = slice(first, first + self.chunk), bool(self.spec.lanes)
        shared = arrays.inputs.interval[part], arrays.inputs.evaluate[part]
        own = arrays.inputs._replace(interval=None, evaluate=None)
        inputs = jax.tree.map(lambda a: a[:, part] if lanes else a[part], own)
        inputs = inputs._replace(interval=shared[0], evaluate=shared[1])
        return state, arrays.key, arrays.hparams, arrays.problem, inputs

    def specs(self) -> tuple:
        """How the devices share the arguments of `run`."""
        inputs = scan.LANES_INPUTS_SPEC if self.spec.lanes else scan.INPUTS_SPEC
        return scan.WHOLE, scan.WHOLE, scan.WHOLE, scan.PROBLEM_SPEC, inputs

    def arguments(self, arrays: Arrays, state: scan.State, first: int) -> tuple:
        """What `run` takes for the chunk from interval `first` on, on the devices."""
        *whole, problem, inputs = self.chunk_of_arrays(arrays, state, first)
        whole = devices.place(self.mesh, whole, scan.WHOLE)
        return *whole, problem, devices.place(self.mesh, inputs, self.specs()[-1])

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
        arguments = self.arguments(arrays, arrays.start if state is None else state, 0)
        progress.log(stream, "compiling …")
        begun = time.perf_counter()
        lowered = self.lower(*arguments)
        middle = time.perf_counter()
        call = lowered.compile(devices.compiler_options(self.mesh))
        end = time.perf_counter()
        progress.log(stream, f"compiled in {end - begun:.1f} s")
        devices.meet()  # one process may compile what another finds in its cache
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
        now: scan.State = arrays.start if state is None else state
        # Once, not for each call; the state is on the devices after the first one.
        given = devices.place(program.mesh, (arrays.key, arrays.hparams), scan.WHOLE)
        arrays = arrays._replace(key=given[0], hparams=given[1])
        while first < program.intervals:
            arguments = program.arguments(arrays, now, first)
            begun = time.perf_counter()
            # In a history NaN stands for "not measured", whatever jax_debug_nans says.
            with jax.debug_nans(False):
                now, history = jax.block_until_ready(self.call(*arguments))
            seconds = time.perf_counter() - begun
            length = min(program.chunk, program.intervals - first)  # without padding
            at = (slice(None),) * bool(program.spec.lanes) + (slice(length),)
            history = jax.tree.map(lambda a, at=at: a[at], jax.device_get(history))
            yield Chunk(first, first + length, now, history, seconds)
            first += length

    def memory(self) -> dict[str, int]:
        """Bytes on every device as the compiler reports them; {} where it does not."""
        return memory_of(self.call)


def memory_of(call: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of a compiled call on every device; {} where the compiler is silent."""
    found = call.memory_analysis()
    if found is None:
        return {}
    return {
        "arguments": found.argument_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
        # The new state takes the place of the old one.
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
    }


def spec_of(
    several: list[Prepared], rules: tuple[Aggregator, ...], lanes: str = ""
) -> ProgramSpec:
    """What shapes a program for experiments that differ in arrays only.

    `rules` are theirs, each once; `lanes` is "" for one experiment, else how lanes run:
    "sequential" or "vmap".
    """
    config, measures = several[0].config, several[0].config.measure_clients
    # A mini-batch has no more rows than the largest client holds samples.
    most = max(int(p.partition.capacity.max()) for p in several)
    batch_size, iteration = min(config.batch_size, most), config.schedule.iteration
    schedules, first = [p.workload.schedule for p in several], several[0].steps.flat[0]
    slots, waves = several[0].slots, several[0].waves
    even = config.train_all and waves == 1  # else some clients stop at 0 steps
    estimating = {p.rule for p in several if initial_estimates.when(p) == "interval"}
    return ProgramSpec(
        batch_size=batch_size,
        iteration=iteration,
        passes=max(
            local.most_passes(s.tau, s.size, batch_size, iteration) for s in schedules
        ),
        mapping=several[0].mapping,
        block=min(config.client_block or slots, slots),
        longest=max(int(p.steps.max()) for p in several),
        even=even and all((p.steps == first).all() for p in several),
        proximal=optimizers.terms_of(several[0].hparams).mu,
        lr_varies=any(p.config.lr_schedule != "constant" for p in several),
        estimates=Estimates(
            constants=tuple(rule in estimating for rule in rules),
            gradients=tuple(bool(r.mixing.uses_gradients or measures) for r in rules),
            method=config.constants.estimator if estimating else "quotient",
        ),
        choice=config.cohort.choice,
        regret=config.measure_regret,
        train_all=config.train_all,
        frozen=trees.parts_of(config.model.frozen),
        snapshots=max(s.snapshots for s in schedules),
        waves=waves,
        lanes=lanes,
    )


def rules_of(several: list[Prepared]) -> tuple[Aggregator, ...]:
    """The rules of some experiments, each once, in order of appearance."""
    return tuple(dict.fromkeys(p.rule for p in several))


def make_program(several: list[Prepared], mesh: Mesh, lanes: str = "") -> Program:
    """The program of experiments that differ in arrays only; see `spec_of`."""
    first, rules = several[0], rules_of(several)
    spec = spec_of(several, rules, lanes)
    optimizer = first.optimizer
    if optimizer is optimizers.sgd:
        terms = optimizers.terms_of(first.hparams)
        optimizer = functools.partial(optimizers.sgd, terms=terms)
    network, hooks = first.network.model, first.hooks
    return Program(
        run=scan.make_run(network, rules, optimizer, spec, mesh, hooks, first.uplinks),
        parts=Parts(network, rules, optimizer, spec, hooks, first.uplinks),
        mesh=mesh,
        intervals=len(first.steps),
        chunk=chunk_of(first),
    )


def make_arrays(prepared: Prepared, mesh: Mesh, *, runs: bool = True) -> Arrays:
    """The arrays of one experiment; without `runs` only for compiling."""
    problem = make_problem(prepared, mesh)
    init_key, key = keys_of(prepared)
    rules, sizes = (prepared.rule,), sizes_of(prepared)
    start = jax.jit(
        lambda key, samples: initial_state(prepared, rules, key, sizes, samples)
    )(init_key, problem.samples)
    inputs = make_inputs(prepared, mesh.size)
    hparams = prepared.hparams
    if runs:
        hparams = initial_estimates.fill(prepared, problem.samples, start.params, key)
    return Arrays(jax.device_get(start), key, hparams, problem, inputs)


def make_problem(prepared: Prepared, mesh: Mesh) -> scan.Problem:
    """Samples, test set and index table on the devices."""
    dataset, tested = prepared.dataset, prepared.tested
    y_train, y_test = targets.of(dataset)
    group, group_size = (None, None) if tested is None else tested[:2]
    samples = (
        dataset.x_train,
        y_train,
        np.asarray(dataset.mean, np.float32),
        np.asarray(1.0 / dataset.std, np.float32),
    )
    problem = scan.Problem(
        samples=local.Samples(*devices.place(mesh, samples, scan.WHOLE)),
        test=evaluation.make_test_set(dataset.x_test, y_test, mesh.size, group),
        rows=prepared.partition.indices,
        client=prepared.workload.drawn,
        class_index=class_index_of(prepared),
        validation=held_out_of(prepared),
        group_size=group_size,
        scored=scored_of(prepared),
    )
    return devices.place(mesh, problem, scan.PROBLEM_SPEC)


def sizes_of(
    prepared: Prepared,
) -> tuple[Float[np.ndarray, "U"], Float[np.ndarray, ""]]:
    """Samples of each client on the device, and of all others together."""
    own, held = prepared.partition.capacity, prepared.workload.held
    others = held.sum(dtype=np.int64) - own.sum(dtype=np.int64)
    return own.astype(np.float32), np.asarray(others, np.float32)


def held_out_of(prepared: Prepared) -> evaluation.HeldOut | None:
    """The validation samples in batches, None if there are none."""
    rows = prepared.held_out
    return None if rows is None else evaluation.make_held_out(rows)


def number_scored(prepared: Prepared) -> int:
    """Clients whose own models are tested; 0: no layers stay with the clients."""
    tested = prepared.tested
    return len(tested.client) if prepared.is_personal and tested is not None else 0


def scored_of(prepared: Prepared, number: int = 0) -> personal.Scored | None:
    """Whose own models are tested, filled up to `number`; None: no one's."""
    tested, known = prepared.tested, number_scored(prepared)
    if tested is None or not known:
        return None
    share = np.eye(known) if tested.share is None else tested.share
    more = max(number - known, 0)
    return personal.Scored(
        np.pad(tested.client, (0, more), constant_values=-1),
        np.pad(share, ((0, more), (0, 0))).astype(np.float32),
    )


def class_index_of(prepared: Prepared) -> local.ClassIndex | None:
    """All training samples by class, without those for validation; None: not online."""
    if not prepared.config.partition.online:
        return None
    labels, held_out = prepared.dataset.y_train, prepared.held_out
    rest = np.arange(len(labels))
    rest = rest if held_out is None else validation.left(len(labels), held_out)
    every, labels = labels, labels[rest]
    count = np.bincount(labels).astype(np.int32)
    first = np.cumsum(count, dtype=np.int32) - count
    order = rest[np.argsort(labels, kind="stable")].astype(np.int32)
    return local.ClassIndex(first, count, order, every)


def make_inputs(
    prepared: Prepared, num_devices: int, chunk: int | None = None
) -> scan.Inputs:
    """Inputs of all intervals on the host, ``[T + R − 1, ...]``.

    The last R − 1 fill up the last chunk, in whatever interval a run goes on.
    `chunk` is R; None: as `chunk_of` chooses for this experiment.
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
    missing = (chunk or chunk_of(prepared)) - 1
    if not missing:
        return inputs
    # The padding has no clients, no evaluations and no snapshots: it changes nothing.
    filled = jax.tree.map(
        lambda a: np.concatenate([a, a[-1:].repeat(missing, 0)]), inputs
    )
    end = len(times.tau)
    filled.tau[end:], filled.evaluate[end:] = 0, False
    filled.assigned[end:] = times.tau.shape[1]
    filled.reported[end:], filled.delivery.keep[end:] = -1, times.snapshots
    return filled


def keys_of(prepared: Prepared) -> tuple[PRNGKey, PRNGKey]:
    """(of the initial model, of training, which the run folds its streams from)."""
    model = rng.key(seed_of(prepared.config, "model"))
    return rng.fold(model, "initial model"), rng.key(
        seed_of(prepared.config, "batches")
    )


def initial_state(
    prepared: Prepared,
    rules: tuple[Aggregator, ...],
    key: PRNGKey,
    sizes: tuple[Float[Array, "U"], Float[Array, ""]],
    samples: local.Samples,
) -> scan.State:
    """w^0 and the rule's state; `sizes` as of `sizes_of`."""
    size, idle_size = sizes
    counts = counts_of(prepared)._replace(clients=size.shape[0], size=size)
    return scan.init_state(
        prepared.network.model,
        rules,
        key,
        local.scaled(samples, samples.x[:1]),
        counts._replace(idle_size=idle_size),
        prepared.workload.schedule.snapshots,
        prepared.config.cohort.choice,
        prepared.uplinks,
        prepared.hparams,
    )
