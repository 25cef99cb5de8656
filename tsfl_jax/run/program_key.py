"""Which experiments share a compiled program, computed from its parts.

Two experiments share one if their specs agree but for fields that can be merged, if the
same functions are put in, and if their arrays have the same structure and shapes. No
list of settings decides it.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from tsfl_jax import components, data
from tsfl_jax.engine import client as local
from tsfl_jax.engine import optimizers
from tsfl_jax.engine.program_spec import Estimates, ProgramSpec
from tsfl_jax.prepare.prepare import Prepared, counts_of, evaluated
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.run.identity import values_of
from tsfl_jax.run.initial_estimates import when as _when_estimated
from tsfl_jax.types import parts_of

# Digests of arrays that all runs of a program share.
_SHARED = ("data", "scale", "first parameters", "client tests")
# Fields of a spec in which runs of one program may differ → the program's value.
_MERGED: dict[str, Callable[[Sequence[Any]], Any]] = {
    "batch_size": max,  # of the largest client, if that holds less than a mini-batch
    "passes": max,
    "longest": max,
    "even": all,
    "lr_varies": any,
}


def spec_of(prepared: Prepared) -> ProgramSpec:
    """What shapes the program of one experiment."""
    config, times = prepared.config, prepared.workload.schedule
    # A mini-batch has no more rows than the largest client holds samples.
    batch_size = min(config.batch_size, int(prepared.partition.capacity.max()))
    iteration, longest = config.schedule.iteration, int(prepared.steps.max())
    waves, estimated = prepared.waves, _when_estimated(prepared) == "interval"
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
        lr_varies=config.lr_schedule != "constant",
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


def keys_of(prepared_runs: Sequence[Prepared]) -> list[tuple[Any, ...]]:
    """What experiments must agree on to share a program, of each."""
    measured = {p.rule for p in prepared_runs if _when_estimated(p) == "interval"}
    return [_key_of(p, measured) for p in prepared_runs]


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
        rule in measured and not _when_estimated(prepared),  # lacks what others have
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
