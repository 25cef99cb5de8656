"""Which experiments share a compiled program, computed from its parts.

Two experiments share one if their specs agree but for fields that can be merged, if the
same functions are put in, and if their arrays have the same structure and shapes. No
list of settings decides it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tsfl_jax import components, data, trees
from tsfl_jax.engine import client as local
from tsfl_jax.engine import optimizers
from tsfl_jax.engine.program_spec import Estimates, ProgramSpec
from tsfl_jax.experiment import initial_estimates
from tsfl_jax.experiment.identity import values_of
from tsfl_jax.experiment.prepare import Prepared, counts_of, evaluated
from tsfl_jax.rules.base import Aggregator
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
    batch_size: int  # as asked for; the spec's is at most what a client holds
    measure_clients: bool
    model: tuple[Any, ...]  # without the function that draws w^0, the first field
    optimizer: tuple[optimizers.Factory, optimizers.Terms | None]
    hooks: tuple[int, ...]  # the functions' identities: they need not be hashable
    uplinks: Chain
    rule: Any  # what rules that are chosen inside the program must have in common
    settings: tuple[tuple[str, Any], ...]  # of the rule, those that shape a program
    arrays: Any  # structure and shapes of the schedule and of samples
    shared: tuple[str | None, ...]  # digests of what all runs of a program share


def spec_of(prepared: Prepared) -> ProgramSpec:
    """What shapes the program of one experiment."""
    config, times = prepared.config, prepared.workload.schedule
    # A mini-batch has no more rows than the largest client holds samples.
    batch_size = min(config.batch_size, int(prepared.partition.capacity.max()))
    iteration, longest = config.schedule.iteration, int(prepared.steps.max())
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
        lr_varies=config.lr_schedule != "constant",
        estimates=Estimates(
            constants=(estimated,),
            gradients=(prepared.rule.mixing.uses_gradients or config.measure_clients,),
            method=config.constants.estimator,
        ),
        choice=config.cohort.choice,
        regret=config.measure_regret,
        train_all=config.train_all,
        frozen=trees.parts_of(config.model.frozen),
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


def key_of(prepared: Prepared) -> ProgramKey:
    """What other experiments must agree on to share this one's program."""
    config, spec, values = prepared.config, spec_of(prepared), values_of(prepared)
    neutral = dict.fromkeys(_MERGED) | {
        "estimates": Estimates((), (), spec.estimates.method)
    }
    terms = optimizers.terms_of(prepared.hparams)
    of_sgd = prepared.optimizer is optimizers.sgd
    declared = {
        n: s for k in prepared.sections for n, s in components.declared(k).items()
    }
    return ProgramKey(
        spec=dataclasses.replace(spec, **neutral),
        batch_size=config.batch_size,
        measure_clients=config.measure_clients,
        model=tuple(prepared.network.model)[1:],
        optimizer=(prepared.optimizer, terms if of_sgd else None),
        hooks=tuple(map(id, prepared.hooks)),
        uplinks=prepared.uplinks,
        rule=_key_of_rule(prepared),
        settings=tuple((n, values[n]) for n, (_, s) in declared.items() if s.static),
        arrays=_shapes_of(prepared),
        shared=(
            *map(prepared.fingerprints.get, _SHARED),
            data.fingerprint(evaluated(prepared)),
        ),
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
        tested is not None and tested.share is not None,
    )


def causes_of(
    groups: Sequence[Sequence[int]], prepared: Sequence[Prepared]
) -> list[str]:
    """Why there is more than one program.

    Returns:
      The settings that differ between the groups and are constant within each, as
      "batch_size=8, 16"; where there are none, the parts of the keys that differ.
    """
    if len(groups) < 2:
        return []
    values = [[_texts(values_of(prepared[i])) for i in group] for group in groups]
    causes = []
    for name in values[0][0]:
        texts = [{run.get(name) for run in group} for group in values]
        if all(len(t) == 1 for t in texts) and len(set().union(*texts)) > 1:
            causes.append(_cause(name, [t.pop() for t in texts]))
    keys = [_parts_of(key_of(prepared[group[0]])) for group in groups]
    return causes or [
        _cause(name, [str(key[name]) for key in keys])
        for name in keys[0]
        if any(key[name] != keys[0][name] for key in keys)
    ]


def _texts(values: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _parts_of(key: ProgramKey) -> dict[str, Any]:
    spec = {f.name: getattr(key.spec, f.name) for f in dataclasses.fields(key.spec)}
    return spec | {"shapes of arrays": key.arrays, "data": key.shared}


def _cause(name: str, texts: Sequence[Any]) -> str:
    return f"{name}={', '.join(dict.fromkeys(texts))}"
