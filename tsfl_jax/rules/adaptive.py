"""DMS whose c and filter probability follow the loss on validation samples.

DMS gains early, as clients with many iterations have made more progress, and loses
late, as it leaves out the data of the others. Here c and P_i are the paper's times a
factor s in (0, 1], which is 1 at first. After training, the server tries s·κ and s/κ on
its validation samples and keeps the better: s moves against the sign of dF_val/ds.
Where c is so large that s·κ and s/κ give the same weights, s falls until they do not.
As s falls, all clients are kept, and the weights become those of FedAvg, which is why
they are times |D_i| here unless ``dms_adaptive.by_size=False``. NOT in the paper.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from tsfl_jax.components import component, setting
from tsfl_jax.rules import base
from tsfl_jax.rules.apply import of_present
from tsfl_jax.rules.dms_rule import DMS, RULE, check_sizes, scaled_dms
from tsfl_jax.types import HParams


@component("dms_adaptive")
class DMSAdaptive:
    """DMS with a factor on c and P_i that follows the loss on validation samples."""

    adapt: float = setting(4.0, "κ, change of that factor per interval", above=1)
    by_size: bool = setting(True, "weights times |D_i|")

    def check(self, config: Any, rule: base.Aggregator) -> None:
        """Refuse what weights by size cannot have."""
        if self.by_size:
            check_sizes(config.dms, "--config.dms_adaptive.by_size=True")


LEAST = 1e-3  # of s: FedAvg but for a thousandth of the paper's c


def _differ(one: Float[Array, "N"], other: Float[Array, "N"]) -> Bool[Array, ""]:
    """Whether weights differ by more than rounding."""
    return jnp.abs(one - other).max() > 1e-6


def adaptive_weights(
    outputs: base.ClientOutputs, scale: Any, received: base.Received, hparams: HParams
) -> tuple[base.Weights, Float[Array, ""]]:
    """Weights of DMS with s·κ or s/κ, whichever has the smaller F_val, and that s.

    Where both give the same weights, s falls, which costs nothing in this interval:
    with a large c, s would otherwise stay at 1 for good. It stays where no s makes a
    difference, as with one client or equal τ.
    """
    objective = outputs.validation
    assert objective is not None, "the rule declares that it uses it"
    settings = hparams.of(DMSAdaptive)
    factor = jnp.asarray(settings.adapt)

    def weights(scale: Float[Array, ""]) -> base.Weights:
        scaled = scaled_dms(received.info, hparams, scale, settings.by_size)
        return scaled._replace(rho=of_present(scaled.rho, received.present))

    tried = jnp.clip(jnp.stack([scale / factor, scale * factor]), LEAST, 1.0)
    rho = lax.map(lambda scale: weights(scale).rho, tried)
    loss = lax.map(lambda rho: objective(rho)[0], rho)
    loss = jnp.where(jnp.isfinite(loss), loss, jnp.inf)
    matters = _differ(rho[0], weights(jnp.float32(LEAST)).rho)
    flat = matters & ~_differ(rho[0], rho[1])
    lower, higher = (loss[0] < loss[1]) | flat, (loss[1] < loss[0]) & ~flat
    scale = jnp.where(lower, tried[0], jnp.where(higher, tried[1], scale))
    return weights(scale), scale


DMS_ADAPTIVE = base.Aggregator(
    RULE.mixing._replace(from_updates=adaptive_weights, uses_validation=True),
    server=base.ServerSide(init=lambda *_: jnp.float32(1.0)),  # the paper's DMS
    sections=(DMS, DMSAdaptive),
    label="adaptive DMS",
)
