"""The adapter for a user's own module of Flax's newer API, nnx.

The functional form of `nnx.split` and `nnx.merge`: a network is its structure, which is
fixed, and its variables, which are trained. NOT done here: linen modules, which
`networks.from_flax` takes.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Array

from tsfl_jax import rng
from tsfl_jax.models.model import Model
from tsfl_jax.types import Array as AnyArray
from tsfl_jax.types import Params, PRNGKey, UserError


def is_nnx(module: Any) -> bool:
    """Whether it is an nnx module; importing nnx is left to those who use it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(module, nnx.Module)


def _by_path(state: Any) -> dict[tuple[str, ...], Any]:
    """The leaves of an nnx state by path."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if len(names) > 1 and names[-1] == "value":  # of the variable itself
            names.pop()
        found[tuple(names)] = leaf
    return found


def _named(state: Any, like: Any) -> Params:
    """The leaves of a state that another one has, as nested dicts of text keys."""
    leaves = _by_path(state)
    return traverse_util.unflatten_dict({path: leaves[path] for path in _by_path(like)})


def _unnamed(named: Params, like: Any) -> Any:
    """The nnx state of `_named`, with the structure of another one."""
    leaves = traverse_util.flatten_dict(named)
    return jax.tree.unflatten(
        jax.tree.structure(like), [leaves[path] for path in _by_path(like)]
    )


def _streams(like: Any, key: PRNGKey) -> Any:
    """Random streams of a structure: a key each, nothing drawn yet."""
    leaves, form = jax.tree.flatten(like)
    fresh = [
        jnp.broadcast_to(jax.random.fold_in(key, number), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for number, leaf in enumerate(leaves)
    ]
    return form.unflatten(fresh)


def arrays_of(module: Any) -> list[np.ndarray]:
    """What a module instance starts from, to tell two instances apart."""
    from flax import nnx

    _, _, state = nnx.split(module, nnx.RngState, ...)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


class _Form(NamedTuple):
    """What is fixed of a network: its structure, and the shapes of its variables."""

    split: Callable[[PRNGKey], Any]  # -> (structure, parameters, streams, other state)
    structure: Any
    params: Any
    streams: Any
    state: Any
    accepted: frozenset[str]  # arguments of its call
    regression: bool  # as its attribute ``classifies = False`` says

    def variables(self, params: Params, state: Any) -> Params:
        """The collections "params" and, where there is any, "state"."""
        held = _named(state, self.state)
        return {"params": params} | ({"state": held} if held else {})

    def merged(self, variables: Params, key: PRNGKey) -> Any:
        """The module with these variables and fresh random streams."""
        from flax import nnx

        params = _unnamed(variables["params"], self.params)
        state = _unnamed(variables.get("state", {}), self.state)
        streams = _streams(self.streams, key)
        return nnx.merge(self.structure, params, streams, state)

    def call(self, network: Any, x: AnyArray, train: bool, **more: Any) -> Any:
        """Its outputs, with those arguments that its call has."""
        values = {"train": train, "deterministic": not train, **more}
        return network(x, **{n: v for n, v in values.items() if n in self.accepted})


def _form_of(module: Any) -> _Form:
    from flax import nnx

    make: Callable[[Any], Any] = (lambda rngs: module) if is_nnx(module) else module
    kinds: list[type] = []

    def split(key: PRNGKey) -> tuple[Any, Any, Any, Any]:
        params, dropout, default = rng.keys(
            key, "initial parameters", "initial dropout", "initial streams"
        )
        made = make(nnx.Rngs(default, params=params, dropout=dropout))
        if not isinstance(made, nnx.Module):
            raise TypeError(f"it makes a {type(made).__name__}")
        kinds.append(type(made))
        structure, weights, random, *state = nnx.split(
            made, nnx.Param, nnx.RngState, ...
        )
        return structure, weights, random, state[0]

    shapes = _shapes(module, split)
    if callable(getattr(kinds[0], "loss", None)):
        raise UserError(
            f"model: the loss method of the nnx module {kinds[0].__name__} would not "
            "be used; give the function as loss="
        )
    accepted = inspect.signature(kinds[0].__call__).parameters
    structure, *rest = shapes
    params, streams, state = rest
    # It may say that it is a regression, with the loss of `simulate`.
    regression = getattr(kinds[0], "classifies", None) is False
    accepts = frozenset(accepted)
    return _Form(split, structure, params, streams, state, accepts, regression)


def from_nnx(module: Any) -> Model:
    """Adapt an nnx module, or a function that makes one, to `Model`.

    ``train=``, ``deterministic=`` and ``mask=`` are passed if the module's ``__call__``
    takes them; besides, `nnx.Module.train` and `nnx.Module.eval` switch dropout and
    batch statistics. `nnx.Param` are trained; all other variables (collection "state",
    such as batch statistics) are carried and aggregated like weights. Random streams
    of the module, such as dropout's, get new keys in each step.

    Args:
      module: ``lambda rngs: Net(..., rngs=rngs)``, for w^0 from the seed; or a module,
        whose own parameters are w^0 for every seed.

    Raises:
      UserError: the function makes no nnx module.
    """
    from flax import nnx

    form = _form_of(module)

    def init(key: PRNGKey, x: AnyArray) -> Params:
        del x
        _, params, _, state = form.split(key)
        return form.variables(_named(params, form.params), state)

    def train(
        variables: Params, x: AnyArray, mask: AnyArray, key: PRNGKey
    ) -> tuple[Array, Params]:
        network = form.merged(variables, key)
        network.train()
        outputs = form.call(network, x, True, mask=mask)
        _, _, state = nnx.split(network, (nnx.Param, nnx.RngState), ...)
        return outputs, form.variables(variables["params"], state)

    def predict(variables: Params, x: AnyArray) -> Array:
        network = form.merged(variables, rng.key(0))
        network.eval()
        return form.call(network, x, False)

    return Model(init, train, predict, classifies=not form.regression)


def _shapes(module: Any, split: Callable[[PRNGKey], Any]) -> Any:
    """Structure and shapes of a module's parts."""
    try:
        return jax.eval_shape(split, rng.key(0))
    except Exception as error:  # a user's function may raise anything
        name = " ".join(repr(module).split())[:60]
        first = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"model={name}: makes no network of nnx.Rngs ({type(error).__name__}: "
            f"{first}); expected an instance of a flax.linen.Module or "
            "flax.nnx.Module, or a function like lambda rngs: Net(rngs=rngs)"
        ) from error
