"""Arithmetic on trees of arrays that optax.tree does not have.

A model's variables are its parameters (the collection "params") and other collections,
such as batch statistics and counters. Rules combine parameters; of the others a mean of
the clients' own values is taken, see `values`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Int

from tsfl_jax.types import Array, Params, UserError, parts_of


def inexact(leaf: Array) -> bool:
    """Whether a leaf holds floating-point or complex numbers."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def map_inexact(function: Callable[..., Array], *trees: Params) -> Params:
    """`jax.tree.map`, but integer leaves of the first tree are left unchanged."""

    def leaf(first: Array, *leaves: Array) -> Array:
        return function(first, *leaves) if inexact(first) else first

    return jax.tree.map(leaf, *trees)


@contextlib.contextmanager
def arithmetic() -> Iterator[None]:
    """JAX's arithmetic as this package means it, whatever a user has set.

    float32 is multiplied in float32, where a GPU of 2020 or later would by default take
    the 10 bits of TF32; types are promoted as usual. A user's functions were traced
    under the user's own settings before. Also a decorator.
    """
    promotion = jax.numpy_dtype_promotion("standard")
    with jax.default_matmul_precision("float32"), promotion:
        yield


def parted(variables: Params) -> tuple[Params, dict[str, Any]]:
    """The parameters, {"params": …}, and all other collections.

    A tree without a collection "params" is all parameters.
    """
    if not (isinstance(variables, Mapping) and "params" in variables):
        return variables, {}
    collections = {n: values for n, values in variables.items() if n != "params"}
    return {"params": variables["params"]}, collections


def _has_mean(leaf: Array) -> bool:
    """Floats, and signed integers as counters; no flags, unsigned integers and keys."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.issubdtype(
        leaf.dtype, jnp.signedinteger
    )


def values(collections: Params) -> list[Array]:
    """The leaves of other collections that have a mean, in float32."""
    leaves = jax.tree.leaves(collections)
    return [leaf.astype(jnp.float32) for leaf in leaves if _has_mean(leaf)]


def with_values(collections: Params, means: list[Array]) -> Any:
    """Other collections with means in place of their `values`; integers rounded."""
    remaining = iter(means)

    def leaf(old: Array) -> Array:
        if not _has_mean(old):
            return old
        new = next(remaining)
        return (new if inexact(old) else jnp.round(new)).astype(old.dtype)

    return jax.tree.map(leaf, collections)


def folded(tree: Any, key: Any) -> Any:
    """The tree with each random key in it folded with bits of `key`.

    Random keys are JAX's typed ones, and raw ones: uint32 leaves ``[..., 2]``.
    """

    def leaf(number: int, w: Any) -> Any:
        typed = jnp.issubdtype(w.dtype, jax.dtypes.prng_key)
        if not typed and not (w.dtype == jnp.uint32 and w.shape[-1:] == (2,)):
            return w
        keys = w if typed else jax.random.wrap_key_data(w, impl="threefry2x32")
        bits = jax.random.bits(jax.random.fold_in(key, number))
        flat = jax.vmap(lambda k: jax.random.fold_in(k, bits))(keys.reshape(-1))
        new = flat.reshape(keys.shape)
        return new if typed else jax.random.key_data(new)

    leaves, form = jax.tree.flatten(tree)
    return form.unflatten([leaf(number, w) for number, w in enumerate(leaves)])


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path; those of nnx without their last part, "value"."""
    leaves = jax.tree.leaves_with_path(tree)
    return {path_of(path).removesuffix("/value"): leaf for path, leaf in leaves}


def path_of(path: Any) -> str:
    """The path of a leaf as text, ``Dense_0/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_parts(name: str, text: str, tree: Any, verb: str) -> None:
    """Check the parts of paths in the setting `name`, of leaves not to `verb`.

    Raises:
      UserError: a part of a path that no leaf has, or parts that cover all of them.
    """
    paths, parts = named(tree), parts_of(text)
    for part in parts:
        if not any(part in path for path in paths):
            raise UserError(
                f"--config.{name}={text}: no parameter has {part} in its path; there "
                f"are {', '.join(paths)}"
            )
    if parts and all(any(part in path for part in parts) for path in paths):
        raise UserError(f"--config.{name}={text}: none is left to {verb}")


def marked(tree: Any, parts: Sequence[str]) -> Any:
    """For each leaf whether its path, ``Dense_0/kernel``, has one of these parts."""
    return jax.tree.map_with_path(
        lambda path, _: any(part in path_of(path) for part in parts), tree
    )


def without(tree: Any, parts: Sequence[str]) -> Any:
    """The tree with None for each leaf that is `marked`."""
    return jax.tree.map(lambda a, f: None if f else a, tree, marked(tree, parts))


def where_none(tree: Any, missing: Any, present: Any) -> Any:
    """Leaves of `missing` where those of `tree` are None, else those of `present`."""
    return jax.tree.map(
        lambda leaf, *pair: pair[leaf is not None],
        *(tree, missing, present),
        is_leaf=lambda leaf: leaf is None,
    )


def take(tree: Any, index: Any) -> Any:
    """``leaf[index]`` of every leaf: one entry of a leading axis, or several."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def put(tree: Any, index: Any, entries: Any) -> Any:
    """The tree with `entries` at `index` of the leading axis; beyond its end: left out.

    Args:
      tree: leaves ``[n, ...]``.
      index: int32, a scalar or ``[k]``.
      entries: leaves ``[...]`` or ``[k, ...]``.
    """
    return jax.tree.map(
        lambda leaf, entry: leaf.at[index].set(entry, mode="drop"), tree, entries
    )


def scattered(entries: Any, index: Any, count: int) -> Any:
    """Leaves ``[count, ...]`` with `entries` ``[k, ...]`` at `index`, 0 elsewhere."""
    zeros = jax.tree.map(lambda e: jnp.zeros((count, *e.shape[1:]), e.dtype), entries)
    return put(zeros, index, entries)


def last_of(
    index: Int[Array, "n"], counts: Bool[Array, "n"], count: int
) -> Int[Array, "n"]:
    """The index of each entry that counts and is the last one with it; else `count`.

    For `put`: of several entries for one place the last is written.
    """
    turn = jnp.arange(index.shape[0])
    latest = jnp.full(count, -1).at[index].max(jnp.where(counts, turn, -1))
    return jnp.where(counts & (latest[index] == turn), index, count)


def weighted(tree: Any, weights: Float[Array, "n"]) -> Any:
    """Σ_i weights_i · leaf[i] of leaves ``[n, ...]``; integer leaves are 0."""

    def leaf(entries: Array) -> Array:
        if not inexact(entries):
            return jnp.zeros(entries.shape[1:], entries.dtype)
        return jnp.tensordot(weights.astype(entries.dtype), entries, 1)

    return jax.tree.map(leaf, tree)


def square_norms(tree: Any) -> Float[jax.Array, "n"]:
    """‖·‖² of each entry of leaves ``[n, ...]``, of all that are floats, in float32."""
    leaves = [jnp.float32(leaf) for leaf in jax.tree.leaves(tree) if inexact(leaf)]
    return jax.vmap(lambda entry: optax.tree.norm(entry, squared=True))(leaves)


def repeated(tree: Any, count: int) -> Any:
    """Leaves ``[count, ...]``, every entry a copy of the tree."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], count, 0), tree)


@jax.custom_jvp
def with_tangent_of(
    value: Float[jax.Array, "..."], other: Float[jax.Array, "..."]
) -> Float[jax.Array, "..."]:
    """`value`, with the derivatives of `other`."""
    del other
    return value


@with_tangent_of.defjvp
def _with_tangent_of_jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    return primals[0], tangents[1]


def settled(total: Float[Array, ""]) -> Float[jax.Array, ""]:
    """A sum of weights, 1 where it is that but for rounding; its derivatives stay."""
    total = jnp.asarray(total)
    return with_tangent_of(jnp.where(jnp.abs(total - 1) < 1e-5, 1.0, total), total)
