"""Arithmetic on trees with integer leaves."""

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import trees

TREE = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "count": jnp.array([5, 6])}


def equal(tree, **leaves):
    assert tree.keys() == leaves.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(tree[name], leaf)
        assert tree[name].dtype == TREE[name].dtype


def test_integer_leaves_are_left_unchanged():
    new = trees.map_inexact(lambda a, b: a + 10 * b, TREE, TREE)
    equal(new, w=[[11, 22], [33, 44]], count=[5, 6])


def test_entries_of_the_leading_axis():
    equal(trees.take(TREE, 1), w=[3, 4], count=6)
    new = trees.take(TREE, jnp.array([1]))
    put = trees.put(TREE, jnp.array([0]), new)
    equal(put, w=[[3, 4], [3, 4]], count=[6, 6])
    # Beyond the end: dropped.
    jax.tree.map(
        np.testing.assert_array_equal, trees.put(TREE, jnp.array([2]), new), TREE
    )
    equal(trees.scattered(new, jnp.array([1]), 2), w=[[0, 0], [3, 4]], count=[0, 6])
    equal(trees.repeated(trees.take(TREE, 0), 2), w=[[1, 2]] * 2, count=[5, 5])
