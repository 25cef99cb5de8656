"""The program of one or more experiments: the only place that compiles.

`Program` is the function, `Arrays` what it runs on, `Compiled` what XLA made of both.
The same generator of chunks serves runs and sweeps.

Two experiments share a program if their specs agree but for fields that can be merged,
if the same functions are put in, and if their arrays have the same structure and
shapes. No list of settings decides it.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import IO, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tsfl_jax import components, data, rng
from tsfl_jax.config import own_parts, seeds_of
from tsfl_jax.engine import client as local
from tsfl_jax.engine import devices, evaluation, optimizers, scan
from tsfl_jax.engine.program_spec import Estimates, Parts, ProgramSpec
from tsfl_jax.models import flop, precision
from tsfl_jax.prepare import backend
from tsfl_jax.prepare.custom_hooks import input_dtype
from tsfl_jax.prepare.prepare import Prepared, counts_of, evaluated
from tsfl_jax.report import progress
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.run import initial_estimates
from tsfl_jax.run.identity import values_of
from tsfl_jax.timeline import FRAMEWORKS
from tsfl_jax.types import HParams, PRNGKey, parts_of


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
    title: str  # what it trains, "T-SFL interval of 20 clients"

    @property
    def spec(self) -> ProgramSpec:
        """What shapes the program."""
        return self.parts.spec

    def arguments(self, arrays: Arrays, state: scan.State, first: int) -> tuple:
        """What `run` takes for the chunk from interval `first` on, on the devices."""
        part = slice(first, first + self.chunk)
        inputs = cut_inputs(arrays.inputs, slice(None), part)
        whole = state, arrays.key, arrays.hparams
        whole = devices.place(self.mesh, whole, scan.WHOLE)
        inputs = devices.place(self.mesh, inputs, scan.INPUTS_SPEC)
        return *whole, arrays.problem, inputs

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Trace for arrays or shapes, or take JAX's trace; the state is donated."""
        options = devices.compiler_options(self.mesh)
        run = jax.jit(self.run, donate_argnums=0, compiler_options=options)
        return run.lower(*arguments)

    def compile(self, arrays: Arrays, stream: IO[str] | None = None) -> "Compiled":
        """Lower and compile for arrays of these shapes, with lines on a stream."""
        arguments = self.arguments(arrays, arrays.start, 0)
        progress.log(stream, f"compiling … ({self.title})")
        if note := backend.autotuning_note(self.mesh.devices.flat[0]):
            progress.log(stream, note)
        begun = time.perf_counter()
        with progress.ticking(stream, "compiling", f" ({self.title})"):
            lowered = self.lower(*arguments)
            middle = time.perf_counter()
            call = lowered.compile()
        end = time.perf_counter()
        progress.log(stream, f"compiled in {end - begun:.1f} s")
        return Compiled(self, call, middle - begun, end - begun)


class Compiled(NamedTuple):
    """A compiled program."""

    program: Program
    call: jax.stages.Compiled
    lower_seconds: float  # of tracing and lowering
    seconds: float  # of tracing, lowering and compiling

    def chunks(self, arrays: Arrays, first: int = 0) -> Iterator[Chunk]:
        """Run from interval `first` and ``arrays.start`` to the end."""
        program, now = self.program, arrays.start
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
        analysis = self.call.memory_analysis()
        if not analysis:
            return {}
        return {
            "arguments": analysis.argument_size_in_bytes,
            "temporary": analysis.temp_size_in_bytes,
            # The new state takes the place of the old one.
            "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        }


def chunk_of(prepared: Prepared) -> int:
    """R, the intervals or updates of one compiled call; all calls have the same shape.

    On a timeline R is the number of updates that happen in R intervals on average. The
    last call is filled up: on a timeline, or where no divisor of T is near R. A run
    that may end early does so after a call, which then ends with a test.
    """
    config, updates = prepared.config, len(prepared.steps)
    if config.stop.at or config.stop.patience:
        period = min(config.eval_every, config.num_intervals)
        return 1 if config.timeline.framework != "none" else period
    most = min(config.report_every or _by_work(prepared), config.num_intervals)
    if config.timeline.framework != "none":
        return -(-updates * most // config.num_intervals)
    divisor = max(r for r in range(1, most + 1) if updates % r == 0)
    if 2 * divisor >= most or config.report_every:
        return divisor
    return -(-updates // -(-updates // most))


_FEW_INTERVALS = 5  # of a call, whatever they cost
_CALLS = 10  # at least, if there are enough intervals: each has a line of progress
# A small network on one CPU core: FLOP per second, and seconds that an interval and a
# mini-batch step take at least. Calls are of about a second.
FLOP_RATE, INTERVAL_SECONDS, STEP_SECONDS = 5e9, 1e-4, 5e-6


def _by_work(prepared: Prepared) -> int:
    """Intervals of a call that takes about a second; more where they are short.

    The host's part in a call does not depend on its length: for small networks calls of
    a few intervals would be mostly that. The choice depends on the settings only, never
    on the machine.
    """
    config, network = prepared.config, prepared.network
    steps = prepared.steps.sum(dtype=np.int64) / config.num_intervals
    samples = 3 * config.batch_size * steps  # forward once, backward about twice
    samples += len(prepared.dataset.x_test) / config.eval_every
    seconds = INTERVAL_SECONDS + STEP_SECONDS * steps
    most = max(_FEW_INTERVALS, -(-config.num_intervals // _CALLS))
    weights = sum(math.prod(p.shape) for p in jax.tree.leaves(network.params))
    # A lower bound first: to count the FLOP of a large network takes a while.
    if seconds + samples * 2 * weights / FLOP_RATE > 1 / _FEW_INTERVALS:
        return _FEW_INTERVALS
    shape = (1, *prepared.dataset.x_test.shape[1:])
    x = jax.ShapeDtypeStruct(shape, input_dtype(prepared.dataset))
    flop_per_sample = flop.count(network.model.predict, network.params, x)
    seconds += samples * flop_per_sample / FLOP_RATE
    return int(np.clip(1 / seconds, _FEW_INTERVALS, most))


@functools.lru_cache(maxsize=16)
def _lanes_run(parts: Parts, mesh: Mesh, side_by_side: bool) -> scan.Run:
    """The same function for the same parts, so that it is compiled once."""
    run = scan.make_run(parts, devices.AXIS)
    return scan.make_lanes_run(run, mesh, side_by_side=side_by_side)


@functools.cache
def _sgd_with(terms: optimizers.SGDTerms) -> optimizers.Factory:
    return functools.partial(optimizers.sgd, terms=terms)


def make_program(members: list[Prepared], mesh: Mesh) -> Program:
    """The program of experiments with the same key, see `sharing_keys`.

    Runs take turns where their clients do, else they go side by side. On a CPU whose
    clients were put side by side by choice of `prepare`, runs take turns, too: they fit
    into its cache, and each has the bits of a single run.
    """
    any_member, rules, spec = members[0], rules_of(members), merged_spec(members)
    optimizer = any_member.optimizer
    if optimizer is optimizers.sgd:
        optimizer = _sgd_with(optimizers.terms_of(any_member.hparams))
    custom = any_member.hooks, any_member.uplinks
    is_cpu = jax.default_backend() == "cpu"
    by_choice = is_cpu and any(p.config.mapping == "auto" for p in members)
    side_by_side = spec.mapping == "vmap" and not by_choice
    network = any_member.network
    # With an axis of runs beside that of clients XLA has no kernel for the algorithm:
    # six products and their sums one by one, four times the bytes.
    algorithm = None if side_by_side and len(members) > 1 else network.algorithm
    model = network.model._replace(init=None)  # w^0 is an argument
    model = precision.with_precision(model, "float32", algorithm)
    parts = Parts(model, rules, optimizer, spec, *custom)
    # A user's function is traced anew: what it reads from around may have changed.
    traced = any_member.custom._replace(partition=None)
    is_ours = all(part is None or part == {} for part in traced)
    is_ours = is_ours and not any(own_parts(p.config) for p in members)
    make = _lanes_run if is_ours else _lanes_run.__wrapped__
    run = make(parts, mesh, side_by_side)
    chunk = min(map(chunk_of, members))
    length, title = len(any_member.steps), _title_of(any_member)
    return Program(run, parts, mesh, length, chunk, title)


def _title_of(prepared: Prepared) -> str:
    """What a program trains, in words."""
    name, count = prepared.config.timeline.framework, prepared.slots
    label = f"{FRAMEWORKS[name].label or name} " if name in FRAMEWORKS else ""
    unit = "interval" if prepared.workload.schedule.in_order else "update"
    return f"{label}{unit} of {count:,} client{'s' * (count != 1)}"


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
    labels = prepared.dataset.y_train
    rows = np.setdiff1d(np.arange(len(labels)), prepared.held_out)
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


# Digests of arrays that all runs of a program share.
_SHARED = ("data", "scale", "first parameters", "client tests")
# Fields of a spec in which runs of one program may differ → the program's value.
_MERGED: dict[str, Callable[[Sequence[Any]], Any]] = {
    "batch_size": max,  # of the largest client, if that holds less than a mini-batch
    "passes": max,
    "longest": max,
    "even": all,
    "lr_factors": max,  # all, or none where η is constant in all runs
}


def spec_of(prepared: Prepared) -> ProgramSpec:
    """What shapes the program of one experiment."""
    config, times = prepared.config, prepared.workload.schedule
    # A mini-batch has no more rows than the largest client holds samples.
    batch_size = min(config.batch_size, int(prepared.partition.capacity.max()))
    iteration, longest = config.schedule.iteration, int(prepared.steps.max())
    varies = config.lr_schedule != "constant" or config.lr_warmup > 0
    waves, estimated = prepared.waves, initial_estimates.when(prepared) == "interval"
    return ProgramSpec(
        batch_size=batch_size,
        iteration=iteration,
        passes=local.most_passes(times.tau, times.size, batch_size, iteration),
        mapping=prepared.mapping,
        block=min(config.client_block or prepared.slots, prepared.slots),
        longest=longest,
        # Else some clients stop at 0 steps.
        even=config.train_all
        and waves == 1
        and bool((prepared.steps == longest).all()),
        proximal=optimizers.terms_of(prepared.hparams).mu,
        lr_factors=optimizers.lr_factors() if varies else (),
        estimates=Estimates(
            constants=(estimated,),
            gradients=(prepared.rule.mixing.uses_gradients or config.measure_clients,),
            method=config.constants.estimator,
        ),
        choice=config.cohort.choice,
        regret=config.measure_regret,
        train_all=config.train_all,
        frozen=parts_of(config.model.frozen),
        snapshots=times.snapshots,
        waves=waves,
        renormalizes=not any(link.multiplier for link in prepared.uplinks),
    )


def rules_of(members: Sequence[Prepared]) -> tuple[Aggregator, ...]:
    """The rules of some experiments, each once, in order of appearance."""
    return tuple(dict.fromkeys(p.rule for p in members))


def merged_spec(members: Sequence[Prepared]) -> ProgramSpec:
    """What shapes the program of experiments with the same key."""
    specs = [spec_of(p) for p in members]
    fields = {n: merge([getattr(s, n) for s in specs]) for n, merge in _MERGED.items()}
    fields["even"] &= len({s.longest for s in specs}) == 1
    of_rules: dict[Aggregator, list[Estimates]] = {}
    for prepared, spec in zip(members, specs, strict=True):
        of_rules.setdefault(prepared.rule, []).append(spec.estimates)
    estimates = Estimates(
        constants=tuple(any(e.constants[0] for e in es) for es in of_rules.values()),
        gradients=tuple(any(e.gradients[0] for e in es) for es in of_rules.values()),
        method=specs[0].estimates.method,
    )
    return dataclasses.replace(specs[0], estimates=estimates, **fields)


def sharing_keys(members: Sequence[Prepared]) -> list[tuple[Any, ...]]:
    """What experiments must agree on to share a program, of each."""
    measured = {p.rule for p in members if initial_estimates.when(p) == "interval"}
    return [_key_of(p, measured) for p in members]


def _key_of(prepared: Prepared, measured: Collection[Aggregator]) -> tuple[Any, ...]:
    """One of the keys; of rules in `measured` runs estimate L, G² and σ²."""
    spec, values = spec_of(prepared), values_of(prepared)
    estimates = Estimates((), (), spec.estimates.method)
    declared = [d for k in prepared.sections for d in components.declared(k).items()]
    static = [name for name, (_, setting) in declared if setting.static]
    is_sgd = prepared.optimizer is optimizers.sgd
    rule, snapshots = prepared.rule, prepared.workload.schedule.snapshots
    # Among earlier models, rules share the state that goes with these, and what their
    # updates are measured against.
    shared = (rule.server.init, rule.mixing.deltas) if snapshots else ()
    return (
        dataclasses.replace(spec, estimates=estimates, **dict.fromkeys(_MERGED)),
        [values[name] for name in ("batch_size", "measure_clients", *static)],
        prepared.network.model[1:],  # without the function that draws w^0
        prepared.optimizer,
        optimizers.terms_of(prepared.hparams) if is_sgd else None,
        [*map(id, prepared.hooks)],  # the functions need not be hashable
        prepared.uplinks,
        rule if rule.stacks else shared,  # one that stacks has a program of its own
        rule in measured
        and not initial_estimates.when(prepared),  # lacks what others have
        _shapes_of(prepared),
        [*map(prepared.fingerprints.get, _SHARED)],
        data.fingerprint(evaluated(prepared)),
    )


def _shapes_of(prepared: Prepared) -> Any:
    """Of a run's arrays; numbers of clients and samples are filled up and left out."""
    times = prepared.workload.schedule
    schedule = times._replace(notes=())
    leaves, structure = jax.tree.flatten((schedule, prepared.held_out))
    tested, online = prepared.tested, prepared.config.partition.online
    return (
        structure,
        tuple((np.shape(a), str(np.asarray(a).dtype)) for a in leaves),
        counts_of(prepared).groups,
        online,  # has an index of samples by class
        getattr(tested, "share", None) is not None,
    )
