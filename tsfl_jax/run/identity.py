"""What an experiment is, as text and digests: labels, and what makes two the same.

A user's own part is a name and a digest. A function or class is its source text; a
function also its defaults and what it closes over; an object its class and attributes.
The source of Python, installed packages and tsfl_jax is left out, so that those may be
upgraded.

NOT seen: what a function reads from its module, such as a global number or a helper
function; attributes in C or in slots; files. Functions typed into a prompt have no
source: of them the byte code counts.
"""

import dataclasses
import functools
import hashlib
import inspect
import pathlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import data
from tsfl_jax.config import SETTINGS, flat, own_parts
from tsfl_jax.prepare import rule_settings
from tsfl_jax.prepare.prepare import Prepared
from tsfl_jax.run import costs

# Of `identity_of`: a folder of another version is refused.
_VERSION = 4

# JAX's own configuration that can change a result, and its default; a run under another
# value is another experiment. 64-bit numbers are refused.
_JAX = {
    "jax_threefry_partitionable": True,
    "jax_default_prng_impl": "threefry2x32",  # of keys that a user's own parts make
    "jax_random_seed_offset": 0,
    "jax_default_matmul_precision": None,
}


def labels_of(prepared: Prepared) -> dict[str, Any]:
    """What summaries and figures call an experiment."""
    config, network = prepared.config, prepared.network
    return {
        "algorithm": config.algorithm,
        "data": prepared.dataset.name,
        "model": network.name,
        "mapping": prepared.mapping,
        "convolution": network.convolution,
        "seed": config.seed,
        "fingerprints": prepared.fingerprints,
        "num_parameters": network.size,
        "bytes_per_delivery": round(float(costs.traffic_of(prepared, 1).sum())),
    } | custom_values(prepared)


def custom_values(prepared: Prepared) -> dict[str, str]:
    """What files say of parts given from Python: ``{"custom loss": digest}``.

    And "custom" as the algorithm, of a rule that has no name.
    Metrics are left out: they change no result.
    """
    custom, digests = prepared.custom._asdict(), prepared.fingerprints
    indices, _ = custom.pop("partition"), custom.pop("metrics")
    parts = _described(custom | own_parts(prepared.config))
    if prepared.custom_data:
        parts["dataset"] = f"{prepared.custom_data} {digests['scale']}"
    if indices is not None:
        parts["partition"] = data.fingerprint(*indices)
    if "first parameters" in digests and not prepared.config.model.params:
        parts["params"] = digests["first parameters"]
    values = {f"custom {name}": digest for name, digest in parts.items()}
    if prepared.custom.aggregator is not None:
        values["algorithm"] = "custom"
    return values


def _described(parts: dict[str, Any]) -> dict[str, str]:
    """The digests of the parts that are given."""
    return {name: describe(part) for name, part in parts.items() if part is not None}


def values_of(prepared: Prepared) -> dict[str, Any]:
    """All settings by name, ``{"data.name": "mnist"}``."""
    return flat(dataclasses.asdict(prepared.config))


def depends_on_devices(prepared: Prepared) -> bool:
    """Whether the last bits of a run depend on how many devices share the clients.

    Clients one after another give the same bits on any number of devices, except where
    the bound is minimized or weights come from the updates: XLA rounds the weights of
    these solvers, and L by power iteration in every interval, by the program around.
    Side by side, the width of a block can change a client's own training.
    """
    mixing, constants = prepared.rule.mixing, prepared.config.constants
    iterates = constants.when == "interval" and constants.estimator != "quotient"
    solves = mixing.uses_gradients or mixing.from_updates is not None
    solves = solves or (mixing.uses_constants and iterates)
    return solves or prepared.config.measure_regret or prepared.mapping == "vmap"


def identity_of(prepared: Prepared) -> dict[str, Any]:
    """What a checkpoint must agree on: all settings that can change a result."""
    custom = prepared.custom._asdict()
    for name in ("dataset", "partition", "params"):
        del custom[name]  # among the fingerprints
    config = prepared.config
    described = _described(custom | own_parts(config))
    described = {f"own {name}": text for name, text in described.items()}
    # Data is compared by its fingerprint.
    without = {name for name, (_, s) in SETTINGS.items() if not s.effect}
    without |= rule_settings.unread(config, prepared.custom).keys()
    settings = {n: v for n, v in values_of(prepared).items() if n not in without}
    options = {name: getattr(jax.config, name) for name in _JAX}
    changed = {n: str(v) for n, v in options.items() if v != _JAX[n]}
    version = {"identity version": _VERSION}
    if prepared.network.algorithm:
        changed["products of the network"] = prepared.network.algorithm.name
    return version | settings | prepared.fingerprints | described | changed


_PLAIN = (bool, bytes, complex, float, int, str, type(None), type(...))
_ARRAYS = (np.ndarray, np.generic, jax.Array)
# What JAX and Flax keep in objects for themselves.
_PRIVATE = {"_jit_info", "_object__state", "_pytree__state", "_trace_state"}
_PRIVATE |= {"_id", "_parent_ref", "_state", "parent", "scope"}


def describe(thing: Any) -> str:
    """Name a thing so that two are equal if their texts are, in every process.

    Args:
      thing: a function, a class, an object, an array, or a collection of those.

    Returns:
      Its name, and 16 hex digits of a digest of its parts if it has any.
    """
    return _text(thing, {})


def _text(thing: Any, texts: dict[int, tuple[Any, str]]) -> str:
    if type(thing) in _PLAIN:
        return repr(thing)
    if id(thing) not in texts:
        texts[id(thing)] = thing, "itself"  # kept, so that no other has its address
        parts = [_text(part, texts) for part in _parts(thing)]
        parts = sorted(parts) if isinstance(thing, frozenset | set) else parts
        digest = hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass"))
        named: Any = thing if hasattr(thing, "__qualname__") else type(thing)
        words = [f"{_module(named)}.{named.__qualname__}"]
        words += [digest.hexdigest()[:16]] if parts else []
        texts[id(thing)] = thing, " ".join(words)
    return texts[id(thing)][1]


def _module(thing: Any) -> str:
    # A user's wrapper of a library's function has the module of that in `__module__`.
    space = thing.__globals__ if isinstance(thing, types.FunctionType) else {}
    return space.get("__name__") or getattr(thing, "__module__", None) or ""


def _source(thing: Any) -> str:
    """The text of a user's function or class; of a library's the name is enough."""
    top = _module(thing).partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    installed = {"dist-packages", "site-packages"} & {*pathlib.Path(file).parts}
    if installed or top == "tsfl_jax" or top in sys.stdlib_module_names:
        return ""
    try:
        return inspect.getsource(getattr(thing, "__code__", thing))
    except (OSError, TypeError):
        code = getattr(thing, "__code__", None)
        return "" if code is None else f"{code.co_code.hex()} {code.co_consts}"


def _parts(thing: Any) -> list[Any]:
    """What tells a thing from others of its name."""
    if isinstance(thing, _ARRAYS):
        key = jnp.issubdtype(thing.dtype, jax.dtypes.prng_key)
        plain: Any = jax.random.key_data(jnp.asarray(thing)) if key else thing
        return [data.fingerprint(plain)]
    if isinstance(thing, types.FunctionType):
        closure = [c.cell_contents for c in thing.__closure__ or ()]
        return [_source(thing), *closure, thing.__defaults__, thing.__kwdefaults__]
    if isinstance(thing, type):
        return [_source(thing), *thing.__bases__] if thing is not object else []
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, dict | types.MappingProxyType):
        return [*thing.items()]
    if isinstance(thing, frozenset | list | set | tuple):
        return [type(thing), *thing]
    state = {"__wrapped__": getattr(thing, "__wrapped__", None)}  # by jax.jit
    state |= {n: v for n, v in getattr(thing, "__dict__", {}).items() if n[:2] != "__"}
    return [type(thing), *((n, state[n]) for n in sorted(state.keys() - _PRIVATE))]
