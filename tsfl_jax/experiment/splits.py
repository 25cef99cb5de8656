"""Which samples are for validation and which each client holds, by the settings."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tsfl_jax import rng
from tsfl_jax.config import Config, seed_of
from tsfl_jax.data import client_test as tests
from tsfl_jax.data import (
    fixed_partition,
    partition,
    population,
    skew,
    validation,
    whole_splits,
)
from tsfl_jax.experiment.network import Network
from tsfl_jax.timeline import copula
from tsfl_jax.types import Dataset, Partition, UserError
from tsfl_jax.uplink import chain_of


def held_out(config: Config, dataset: Dataset) -> Int[np.ndarray, "V"] | None:
    """The validation samples, None if there are none."""
    if not config.data.validation:
        return None
    generator = rng.generator(seed_of(config, "split"), "validation")
    return validation.hold_out(dataset.y_train, config.data.validation, generator)


def given(
    config: Config, own: Any, dataset: Dataset
) -> tuple[Int[np.ndarray, "V"] | None, fixed_partition.Lists | None]:
    """The validation samples, and each client's samples where they are not drawn.

    `own` are lists of indices per client; None: as the settings say.
    """
    held = held_out(config, dataset)
    kind, clients = config.partition.kind, config.num_clients
    if own is None and kind in whole_splits.KINDS:
        generator = rng.generator(seed_of(config, "split"), "whole split")
        lists = whole_splits.lists(
            dataset.y_train, clients, config.partition, generator
        )
    else:
        lists = fixed_partition.client_lists(own, kind, dataset, clients)
    if lists is not None:
        lists = lists if held is None else validation.without(lists, held)
    return held, lists


def ties(
    config: Config, lists: fixed_partition.Lists | None, dataset: Dataset
) -> tuple[Int[np.ndarray, "N"] | None, copula.Scores]:
    """Each client's number of samples where it is given, and scores of `copula`."""
    text, known, held = config.timeline.copula, {}, None
    if lists is not None:
        held = np.array([len(rows) for rows in lists])
    if not text:
        return held, {}
    if lists is not None:
        C, y = dataset.num_classes, dataset.y_train
        table = np.stack([np.bincount(y[rows], minlength=C) for rows in lists])
        rare = copula.rarity(table.astype(float), np.bincount(y, minlength=C))
        known = {"size": held, "rarity": rare}
    seed = seed_of(config, "fleet")
    return held, copula.scores(text, config.num_clients, seed, known)


def draw_split(
    config: Config,
    dataset: Dataset,
    capacity: Int[np.ndarray, "N"],
    lists: fixed_partition.Lists | None,
    held_out: Int[np.ndarray, "V"] | None,
    tied: copula.Scores,
    drawn: Int[np.ndarray, "U"] | None = None,
) -> Partition:
    """The samples of each client, drawn or given; under cohorts of some clients.

    What a client holds does not depend on who else is `drawn`. `tied` are scores of
    `copula`.
    """
    drawn = drawn if config.cohort.size else None
    generator = rng.generator(seed_of(config, "split"), "partition")
    if lists is not None:
        if drawn is None:
            return fixed_partition.as_partition(lists, generator)
        return fixed_partition.as_partition([lists[i] for i in drawn], None)
    labels, given = dataset.y_train, (capacity, drawn, generator, tied.get("rarity"))
    if held_out is None:
        return _drawn_split(config, labels, *given)
    rest = validation.left(len(labels), held_out)
    try:
        found = _drawn_split(config, labels[rest], *given)
    except UserError as error:
        taken = f"--config.data.validation={len(held_out)} leaves {len(rest)} samples"
        raise UserError(f"{taken}: {error}") from error
    return found._replace(indices=rest[found.indices].astype(np.int32))


def _drawn_split(
    config: Config,
    labels: Int[np.ndarray, "M"],
    capacity: Int[np.ndarray, "N"],
    drawn: Int[np.ndarray, "U"] | None,
    generator: np.random.Generator,
    rare: Float[np.ndarray, "N"] | None,
) -> Partition:
    """A drawn split, of the clients `drawn`; None: all.

    Only where clients share samples at random the others cost nothing.
    """
    if rare is not None and config.partition.kind not in ("dirichlet", "shards"):
        raise UserError(
            f"--config.partition.kind={config.partition.kind}: rarity of labels, in "
            "--config.timeline.copula, needs dirichlet, shards or a given split"
        )
    p, total = config.partition, int(capacity.sum(dtype=np.int64))
    sharing = p.replacement and total > len(labels) >= capacity.max()
    if drawn is None:
        return partition.make_partition(labels, capacity, p, generator, rare)
    own = capacity[drawn]
    if not sharing or p.kind != "iid":
        found = partition.make_partition(labels, capacity, p, generator, rare)
        return Partition(found.indices[drawn, : own.max()], own, found.notes)
    rows = population.views(drawn, own, len(labels), seed_of(config, "split"))
    note = (
        f"the clients hold {total:,} samples and there are {len(labels):,}: each holds "
        "a piece of them in random order, as --config.partition.replacement=True allows"
    )
    return Partition(rows, own, (note,))


def skewed(
    config: Config, dataset: Dataset, split: Partition, digest: str
) -> tuple[Dataset, str]:
    """The data set as its clients have it, and its digest; "": not known."""
    found = skew.skewed(dataset, split, config.partition, seed_of(config, "split"))
    return found, digest if found is dataset else ""


def client_test(
    config: Config,
    own: Any,
    dataset: Dataset,
    split: Partition,
    drawn: Int[np.ndarray, "U"],
    network: Network,
) -> tests.ClientTest | None:
    """The clients that are scored, by the settings; None: none."""
    how, number = config.evaluation.clients, config.evaluation.number
    if how == "labels":
        return tests.by_labels(dataset, split, drawn, network.model.classifies, number)
    if how == "none":
        return None
    if config.partition.kind != "client" and own.partition is None:
        raise UserError(
            f"--config.evaluation.clients=own: with --config.partition.kind="
            f"{config.partition.kind} clients train on other samples than those that "
            "belong to them; choose --config.partition.kind=client, or labels"
        )
    # Clients that never work have no layers of their own.
    among = drawn if any(link.is_personal for link in chain_of(config)) else None
    return tests.by_owner(dataset, config.num_clients, number, among)


def small_clients(batch_size: int, capacity: Int[np.ndarray, "N"]) -> tuple[str, ...]:
    """A note on clients that never hold a whole mini-batch."""
    few = capacity < batch_size
    if not few.any():
        return ()
    return (
        f"{few.sum()} of {few.size} clients never hold batch_size = {batch_size} "
        f"samples (the smallest {capacity.min()}): they train on one short mini-batch "
        "of all that they hold",
    )
