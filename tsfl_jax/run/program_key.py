"""Which experiments share a compiled program, computed from its parts.

Two experiments share one if their specs agree but for fields that can be merged, if the
same functions are put in, and if their arrays have the same structure and shapes. No
list of settings decides it.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

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
from tsfl_jax.uplink.chain import Chain

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


class ProgramKey(NamedTuple):
    """What experiments must agree on to be runs of one program."""

    spec: ProgramSpec  # without its fields that are merged
    settings: tuple[tuple[str, Any], ...]  # that shape a program in no other field
    model: tuple[Any, ...]  # without the function that draws w^0, the first field
    optimizer: tuple[optimizers.Factory, optimizers.SGDTerms | None]
    hooks: tuple[int, ...]  # the functions' identities: they need not be hashable
    uplinks: Chain
    rule: Any  # what rules that are chosen inside the program must have in common
    lacks_constants: bool  # that other runs of its rule estimate in every interval
    arrays: Any  # structure and shapes of the schedule and of samples
    shared: tuple[str | None, ...]  # digests of what all runs of a program share


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


def keys_of(prepared_runs: Sequence[Prepared]) -> list[ProgramKey]:
    """What experiments must agree on to share a program, of each."""
    measured = {p.rule for p in prepared_runs if _when_estimated(p) == "interval"}
    return [_key_of(p, measured) for p in prepared_runs]


def _key_of(prepared: Prepared, measured: Collection[Aggregator]) -> ProgramKey:
    """One of the keys; of rules in `measured` runs estimate L, G² and σ²."""
    spec, values = spec_of(prepared), values_of(prepared)
    estimates = Estimates((), (), spec.estimates.method)
    declared = [d for k in prepared.sections for d in components.declared(k).items()]
    static = [name for name, (_, setting) in declared if setting.static]
    is_sgd = prepared.optimizer is optimizers.sgd
    terms = optimizers.terms_of(prepared.hparams) if is_sgd else None
    digests = prepared.fingerprints
    return ProgramKey(
        spec=dataclasses.replace(spec, estimates=estimates, **dict.fromkeys(_MERGED)),
        settings=tuple(
            (n, values[n]) for n in ("batch_size", "measure_clients", *static)
        ),
        model=tuple(prepared.network.model)[1:],
        optimizer=(prepared.optimizer, terms),
        hooks=tuple(map(id, prepared.hooks)),
        uplinks=prepared.uplinks,
        rule=_key_of_rule(prepared),
        lacks_constants=prepared.rule in measured and not _when_estimated(prepared),
        arrays=_shapes_of(prepared),
        shared=(*map(digests.get, _SHARED), data.fingerprint(evaluated(prepared))),
    )


def _key_of_rule(prepared: Prepared) -> Any:
    """A rule that stacks has a program of its own.

    Among earlier models, rules share the state that goes with these, and what their
    updates are measured against.
    """
    rule, snapshots = prepared.rule, prepared.workload.schedule.snapshots
    if rule.stacks:
        return rule
    return (rule.server.init, rule.mixing.deltas) if snapshots else ()


def _shapes_of(prepared: Prepared) -> Any:
    """Structure, shapes and types of a run's arrays.

    Without the numbers of clients and of their samples, which are filled up.
    """
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


def causes_of(
    groups: Sequence[Sequence[int]], prepared_runs: Sequence[Prepared]
) -> list[str]:
    """Why there is more than one program.

    Returns:
      The settings that differ between the groups and are constant within each, as
      "batch_size=8, 16".
    """
    if len(groups) < 2:
        return []
    values = [[values_of(prepared_runs[i]) for i in group] for group in groups]
    causes = []
    for name in values[0][0]:
        texts = [{str(run.get(name)) for run in group} for group in values]
        different = dict.fromkeys(text for group in texts for text in group)
        if len(different) > 1 and all(len(group) == 1 for group in texts):
            causes.append(f"{name}={', '.join(different)}")
    return causes or ["what their seeds draw"]
