"""Assemble an experiment: its program, its arrays, and what its files say about it.

`runner` carries it out.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from tsfl_jax.config import Config
from tsfl_jax.data import quadratic
from tsfl_jax.experiment import backend, memory
from tsfl_jax.experiment.identity import identity_of, labels_of, unread
from tsfl_jax.experiment.network import bytes_per_delivery, curvature_of
from tsfl_jax.experiment.prepare import Prepared, accepted, prepare_validated
from tsfl_jax.experiment.program import Arrays, Program, make_arrays, make_program
from tsfl_jax.experiment.workload import Workload
from tsfl_jax.types import UserError


class Experiment(NamedTuple):
    """All that `runner` needs."""

    program: Program
    arrays: Arrays
    workload: Workload
    checkpoint: bool
    settings: dict[str, Any]  # the config as plain values, for config.json
    identity: dict[str, Any]  # what a checkpoint must agree on
    labels: dict[str, Any]  # algorithm, data, model, fingerprints: for summaries
    unread: frozenset[str]  # names of settings that it does not read
    notes: tuple[str, ...]  # what a user should know before the run
    metrics: tuple[str, ...] = ()  # names of the user's own


def build(config: Config, **own: Any) -> Experiment:
    """Assemble everything of an experiment.

    Args:
      config: all settings.
      **own: fields of `own_hooks.Own`.
    """
    config, parts = accepted(config, **own)
    mesh = backend.start_jax(config)
    prepared = prepare_validated(config, parts)
    memory.check(prepared, mesh.size)
    arrays = make_arrays(prepared, mesh)
    sizes = [a.size for a in jax.tree.leaves(arrays.start.params["params"])]
    identity = identity_of(prepared)
    depends = backend.depends_on_devices(config, parts.aggregator)
    if depends or prepared.mapping == "vmap":
        # The width of a block can change the last bit of a client's own training.
        identity["devices that share the clients"] = mesh.size
    return Experiment(
        program=make_program([prepared], mesh),
        arrays=arrays,
        workload=prepared.workload,
        checkpoint=config.checkpoint,
        settings=dataclasses.asdict(prepared.config),
        identity=identity,
        labels=labels_of(prepared)
        | {
            "num_parameters": sum(sizes),
            "num_devices": mesh.size,
            "bytes_per_delivery": bytes_per_delivery(sum(sizes), prepared.rule),
        },
        unread=unread(prepared),
        notes=prepared.notes,
        metrics=tuple(prepared.own.metrics or ()),
    )


def exact_of(prepared: Prepared) -> quadratic.Exact:
    """The true constants of quadratic data, with w⁰ = 0, as these clients hold them."""
    dataset, times = prepared.dataset, prepared.workload.schedule
    if prepared.network.name != "quadratic":
        raise UserError(
            f"model {prepared.network.name!r}: exact constants are known of "
            "--config.model.name=quadratic only"
        )
    client = slice(None) if times.delivery is None else times.delivery.client
    sizes = prepared.partition.capacity
    if ((times.size != sizes[client]) & (times.tau > 0)).any():
        raise UserError(
            "the clients' data sizes vary in time, so that there are no exact "
            "constants; use another --config.schedule.kind or size_groups"
        )
    curvature = curvature_of(prepared.config, dataset.x_train.shape[1:])
    return quadratic.exact(
        dataset.x_train,
        prepared.partition.indices,
        sizes,
        curvature,
        prepared.config.batch_size,
        np.zeros(len(curvature)),
    )
