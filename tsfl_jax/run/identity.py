"""What an experiment is, as text and digests: labels, and what makes two the same.

A user's own functions are in it as `source_digest` describes them.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from tsfl_jax import data
from tsfl_jax.components import section_of
from tsfl_jax.config import WITHOUT_EFFECT, Config, flat
from tsfl_jax.prepare import rule_settings
from tsfl_jax.prepare.network import bytes_per_delivery
from tsfl_jax.prepare.prepare import Prepared
from tsfl_jax.run.source_digest import describe
from tsfl_jax.uplink import chain

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
        "bytes_per_delivery": round(float(_bytes_per_delivery(prepared, 1)[0])),
    } | custom_values(prepared)


def custom_values(prepared: Prepared) -> dict[str, str]:
    """What files say of parts given from Python: ``{"custom loss": digest}``.

    And the rule's name as the algorithm: its component's section, else "custom".
    Metrics are left out: they change no result.
    """
    custom, digests = prepared.custom._asdict(), prepared.fingerprints
    indices, _ = custom.pop("partition"), custom.pop("metrics")
    parts = _described(custom)
    if prepared.custom_data:
        parts["dataset"] = f"{prepared.custom_data} {digests['scale']}"
    if indices is not None:
        parts["partition"] = data.fingerprint(*indices)
    if "first parameters" in digests and not prepared.config.model.params:
        parts["params"] = digests["first parameters"]
    values = {f"custom {name}": digest for name, digest in parts.items()}
    if (rule := prepared.custom.aggregator) is not None:
        sections = (section_of(kind) for kind in rule.sections)
        names = [name for name in sections if not hasattr(Config(), name)]
        values["algorithm"] = "+".join(names) or "custom"
    return values


def _described(parts: dict[str, Any]) -> dict[str, str]:
    """The digests of the parts that are given."""
    return {name: describe(part) for name, part in parts.items() if part is not None}


def _bytes_per_delivery(prepared: Prepared, intervals: int) -> Float[np.ndarray, "T"]:
    """Bytes of a delivery in each interval, down and up."""
    sizes = prepared.network.params, prepared.hparams, intervals
    download, upload = chain.traffic(prepared.uplinks, *sizes)
    return (download + upload) / 64 * bytes_per_delivery(1, prepared.rule)


def bytes_moved(prepared: Prepared, delivered: Bool[np.ndarray, "T N"]) -> int:
    """Bytes of all deliveries ``[T, N]``."""
    per_delivery = _bytes_per_delivery(prepared, len(delivered))
    return round(float((per_delivery * delivered.sum(axis=1)).sum()))


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
    for name in ("dataset", "partition", "sampler", "params"):
        del custom[name]  # among the fingerprints
    described = {f"own {name}": text for name, text in _described(custom).items()}
    config = prepared.config
    without = WITHOUT_EFFECT.union(rule_settings.unread(config, prepared.custom))
    settings = {n: v for n, v in values_of(prepared).items() if n not in without}
    options = {name: getattr(jax.config, name) for name in _JAX}
    changed = {n: str(v) for n, v in options.items() if v != _JAX[n]}
    version = {"identity version": _VERSION}
    return version | settings | prepared.fingerprints | described | changed
