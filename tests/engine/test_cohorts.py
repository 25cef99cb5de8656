"""Cohorts: some of the clients in slots, all from the newest model."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

import tsfl_jax
from tests import problems
from tsfl_jax import trees
from tsfl_jax.engine import client, optimizers, scan
from tsfl_jax.engine.program_spec import Parts, ProgramSpec
from tsfl_jax.rules import base
from tsfl_jax.timeline.schedule import complete
from tsfl_jax.types import Schedule

DATA = problems.dataset()
PROBLEM = problems.problem(DATA, 8, 12)
TAU = np.array([2, 1, 3, 2, 1, 2, 4, 1], np.int32)  # of each client
SIZE = np.array([12, 5, 9, 7, 12, 8, 3, 10], np.int32)


def cohort(*ids, problem=PROBLEM) -> Schedule:
    """An interval with these clients in its slots; −1: an empty slot."""
    ids = np.array(ids)
    there = ids >= 0
    place = np.searchsorted(np.asarray(problem.client), np.where(there, ids, 0))
    tau = np.where(there, TAU[ids], 0).astype(np.int32)
    return complete(tau[None], SIZE[ids][None], client=place.astype(np.int32)[None])


def keeping(slots: int) -> base.Aggregator:
    """Equal weights, and the updates of all slots as the rule's state."""

    def combine(updates, state, received, hparams):
        rho = jnp.where(received.present, received.rho, 0.0)
        return trees.weighted(updates, rho), updates

    return tsfl_jax.rule(
        init=lambda params, counts: trees.repeated(params, slots), combine=combine
    )


@functools.cache
def compiled(slots: int):
    """A rule of `keeping`, and the function of its run."""
    rule = keeping(slots)
    parts = Parts(problems.mlp(), (rule,), optimizers.sgd, ProgramSpec(4, 4))
    return rule, jax.jit(scan.make_run(parts))


def updates_of(schedule, problem=PROBLEM):
    """The updates ``[K, ...]`` of a cohort in interval 3."""
    (rule, run), model = compiled(schedule.tau.shape[1]), problems.mlp()
    x = client.scaled(problem.samples, problem.samples.x[:1])
    counts = base.Counts(len(problem.client), 1)
    start = scan.init_state(model, (rule,), jax.random.key(0), x, counts)
    inputs = problems.scheduled(schedule)._replace(interval=jnp.array([3]))
    state, _ = run(start, jax.random.key(7), problems.hparams(), problem, inputs)
    return jax.tree.map(np.asarray, state.server)


def slot(updates, k):
    return jax.tree.map(lambda u: u[k], updates)


def test_an_update_depends_neither_on_the_others_nor_on_the_slot():
    alone = slot(updates_of(cohort(2, -1, -1)), 0)
    assert any(leaf.any() for leaf in jax.tree.leaves(alone))
    some = updates_of(cohort(5, 2, 7))
    many = updates_of(cohort(7, 0, -1, 5, 2, 2))
    for found in (slot(some, 1), slot(many, 4), slot(many, 5)):
        chex.assert_trees_all_equal(alone, found)
    chex.assert_trees_all_equal(slot(some, 0), slot(many, 3))
    assert not any(leaf.any() for leaf in jax.tree.leaves(slot(many, 2)))
    different = jax.tree.map(lambda a, b: (a != b).any(), alone, slot(some, 0))
    assert any(jax.tree.leaves(different))


def test_an_update_does_not_depend_on_how_many_clients_there_are():
    """Only those who are ever drawn are on the device; rows may be longer."""
    whole = updates_of(cohort(5, 2, 7))
    drawn = np.array([2, 5, 6, 7])
    rows = np.pad(np.asarray(PROBLEM.rows)[drawn], ((0, 0), (0, 5)))
    few = PROBLEM._replace(rows=jnp.asarray(rows), client=jnp.asarray(drawn))
    chex.assert_trees_all_equal(whole, updates_of(cohort(5, 2, 7, problem=few), few))


def test_an_empty_cohort_leaves_the_model():
    """And all states: that of a client, and the server's."""
    three, empty, others = cohort(5, 2, 7), cohort(-1, -1, -1), cohort(1, 2, 3)

    def run(*cohorts):
        fields = zip(*((c.tau, c.size, c.client) for c in cohorts), strict=True)
        tau, size, client = map(np.concatenate, fields)
        schedule, sizes = complete(tau, size, client=client), SIZE.tolist()
        return problems.replayed("scaffold", PROBLEM, schedule, sizes=sizes)[1:]

    state, history = run(three, empty, empty)
    assert (history.test_loss == history.test_loss[0]).all()
    assert not history.diverged.any() and history.rho[1:].sum() == 0
    moved, other = run(three, others, empty)
    assert other.test_loss[0] == history.test_loss[0] != other.test_loss[1]
    different = jax.tree.map(lambda a, b: (a != b).any(), state.params, moved.params)
    assert any(jax.tree.leaves(different))
