"""The adapter for a user's own module of Flax's newer API, nnx.

The functional form of `nnx.split` and `nnx.merge`: a network is its structure, which is
fixed, and its variables, which are trained. NOT done here: linen modules, which
`networks.from_flax` takes. Importing nnx takes a second, so this file is imported when
it is used.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from tsfl_jax import rng, trees
from tsfl_jax.models import switches, tracing
from tsfl_jax.models.model import Model
from tsfl_jax.types import Array as AnyArray
from tsfl_jax.types import Params, PRNGKey, UserError, user_code


def _named(state: Any) -> Params:
    """The leaves of a state, as nested dicts of text keys."""
    return traverse_util.unflatten_dict(trees.named(state), sep="/")


def _unnamed(variables: Params, like: Any) -> Any:
    """The nnx state of `_named`, with the structure of another one."""
    leaves = traverse_util.flatten_dict(variables, sep="/")
    return jax.tree.structure(like).unflatten(leaves[n] for n in trees.named(like))


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
    _, _, state = nnx.split(module, nnx.RngState, ...)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def _modules(network: Any) -> list[Any]:
    """An nnx module and all modules in it."""
    return [part for _, part in nnx.iter_graph(network) if isinstance(part, nnx.Module)]


def _set_training(network: Any, train: bool) -> None:
    """Set all switches of a module and of those in it, whatever their names."""
    # Methods of the class: an attribute of the instance may have the name.
    (type(network).train if train else type(network).eval)(network)
    for layer in _modules(network):
        for name, value in switches.in_fields(vars(layer), train).items():
            setattr(layer, name, value)


def _with_mask(network: Any, mask: AnyArray) -> tuple[Any, Callable[[Any], Any]]:
    """A network whose normalizations get the mini-batch's mask, and the way back."""

    class Masked(nnx.Module):
        def __init__(self, layer: nnx.Module) -> None:
            self.layer = layer

        def __getattr__(self, name: str) -> Any:
            return getattr(vars(self).get("layer"), name)

        def __call__(self, x: AnyArray, *args: Any, **named: Any) -> Any:
            return self.layer(
                x, *args, **switches.with_mask(self.layer, x, named, mask)
            )

    def replaced(_: Any, part: Any) -> Any:
        norms = nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm
        return Masked(part) if isinstance(part, norms) else part

    def restored(_: Any, part: Any) -> Any:
        return part.layer if isinstance(part, Masked) else part

    try:
        masked = nnx.recursive_map(replaced, network)
    except ValueError:  # modules that hold each other; a note speaks of their rows
        return network, lambda network: network
    return masked, functools.partial(nnx.recursive_map, restored)


def _variables(params: Params, state: Any) -> Params:
    """The collections "params" and, where there is any, "state"."""
    collections = {"params": params, "state": _named(state)}
    return {name: c for name, c in collections.items() if c or name == "params"}


class _Form(NamedTuple):
    """What is fixed of a network: its structure, and the shapes of its variables."""

    split: Callable[[PRNGKey], Any]  # -> (structure, parameters, streams, other state)
    network: Any  # traced, for its classes
    structure: Any
    shapes: Any  # of parameters, streams and other state

    def merged(self, variables: Params, key: PRNGKey, train: bool) -> Any:
        """The module with these variables and fresh random streams."""
        params, streams, state = self.shapes
        params = _unnamed(variables["params"], params)
        state = _unnamed(variables.get("state", {}), state)
        network = nnx.merge(self.structure, params, _streams(streams, key), state)
        _set_training(network, train)
        return network


def _form_of(module: Any) -> _Form:
    networks: list[Any] = []

    def split(key: PRNGKey) -> tuple[Any, Any, Any, Any]:
        params, dropout, default = rng.keys(
            key, "initial parameters", "initial dropout", "initial streams"
        )
        rngs = nnx.Rngs(default, params=params, dropout=dropout)
        network = nnx.clone(module) if isinstance(module, nnx.Module) else module(rngs)
        if not isinstance(network, nnx.Module):
            raise TypeError(f"it makes a {type(network).__name__}")
        nnx.pop(network, nnx.Intermediate)
        networks.append(network)
        structure, weights, random, *state = nnx.split(
            network, nnx.Param, nnx.RngState, ...
        )
        return structure, weights, random, state[0]

    _, (structure, *shapes) = tracing.attempt(
        f"model={' '.join(repr(module).split())[:60]}: makes no network of nnx.Rngs",
        "expected an instance of a flax.linen.Module or flax.nnx.Module, or a function "
        "like lambda rngs: Net(rngs=rngs)",
        split,
        rng.key(0),
    )
    network = networks[0]
    if callable(getattr(network, "loss", None)):
        raise UserError(
            f"model: the loss method of the nnx module {type(network).__name__} would "
            "not be used; give the function as loss="
        )
    return _Form(split, network, structure, shapes)


def module_of(module: Any, variables: Params) -> Any:
    """The nnx module of `from_nnx` with trained variables, switched to evaluation."""
    form, arrays = _form_of(module), jax.tree.map(jnp.asarray, variables)
    with user_code("module: has other parameters", "expected that of the training"):
        return form.merged(arrays, rng.key(0), train=False)


def from_nnx(module: Any) -> Model:
    """Adapt an nnx module, or a function that makes one, to `Model`.

    Switches and ``mask=`` are those of `networks.from_flax`; attributes of these names
    are set, as `nnx.Module.train` and `nnx.Module.eval` do. `nnx.Param` are trained;
    other variables are the collection "state". Random streams get new keys in each
    step.

    Args:
      module: ``lambda rngs: Net(..., rngs=rngs)``, for w^0 from the seed; or a module,
        whose own parameters are w^0 for every seed.

    Raises:
      UserError: the function makes no nnx module.
    """
    form = _form_of(module)
    kind = type(form.network)
    arguments = switches.caller(inspect.signature(kind.__call__).parameters)

    def call(network: Any, x: AnyArray, train: bool, mask: Any = None) -> Any:
        args, named = arguments(train, mask)
        outputs = network(x, *args, **named)
        nnx.pop(network, nnx.Intermediate)  # what it sows
        return outputs

    def init(key: PRNGKey, x: AnyArray) -> Params:
        del x
        _, params, _, state = form.split(key)
        return _variables(_named(params), state)

    def train(
        variables: Params, x: AnyArray, mask: AnyArray, key: PRNGKey
    ) -> tuple[Any, Params]:
        network, restored = _with_mask(form.merged(variables, key, True), mask)
        outputs = call(network, x, True, mask)
        _, _, state = nnx.split(restored(network), (nnx.Param, nnx.RngState), ...)
        return outputs, _variables(variables["params"], state)

    def predict(variables: Params, x: AnyArray) -> Any:
        network = form.merged(variables, rng.key(0), False)
        before = jax.tree.leaves(nnx.state(network))
        outputs = call(network, x, False)
        after = jax.tree.leaves(nnx.state(network))
        if list(map(id, before)) != list(map(id, after)):
            raise ValueError("it draws random numbers or changes variables")
        return outputs

    layers = tuple(tracing.switched_layers(_modules(form.network)).items())
    model = Model(init, train, predict, name=kind.__name__, layers=layers)
    # It may say that it is a regression, with the loss of `simulate`.
    return model._replace(classifies=getattr(kind, "classifies", None) is not False)
