"""DMS as a rule: the weights of Algorithm 1, and settings where the paper is silent.

Shao et al., "Robust Model Aggregation for Heterogeneous Federated Learning: Analysis
and Optimizations". The equations are in `dms`.

NOT in the paper is DMS whose c and filter probability follow the loss on validation
samples: DMS gains early, as clients with many iterations have made more progress, and
loses late, as it leaves out the data of the others. There c and P_i are the paper's
times a factor s in (0, 1], which is 1 at first. After training, the server tries s·κ
and s/κ on its validation samples and keeps the better. As s falls, all clients are
kept, and the weights become those of FedAvg, which is why they are times |D_i| there
unless ``dms_adaptive.by_size=False``.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from tsfl_jax.components import changed, component, setting
from tsfl_jax.rules import dms
from tsfl_jax.rules.apply import of_present
from tsfl_jax.rules.base import (
    Aggregator,
    ClientOutputs,
    Mixing,
    Received,
    RoundInfo,
    ServerSide,
    Weights,
    normalized,
)
from tsfl_jax.types import Array as AnyArray
from tsfl_jax.types import HParams, UserError

DECAYS = ("none", "exponential", "inverse")
LEAST = 1e-3  # of s: FedAvg but for a thousandth of the paper's c


@component("dms")
class DMS:
    """DMS (Algorithm 1) and its variants."""

    coupling: float = setting(
        -1.0, "c in ρ_i − ρ_j = c(τ_i − τ_j); negative: of L, G², σ²"
    )
    unit: str = setting(
        "iteration",
        "what τ counts in c(τ_i − τ_j) and in c itself",
        ("iteration", "step"),
    )
    threshold: str = setting(
        "uploads",
        "K is the mean τ of uploads (0 of others), or of all work",
        ("uploads", "all"),
    )
    drop: float = setting(1.0, "factor on P_i, the filter probability", low=0, high=1)
    late: int = setting(0, "intervals before the two factors below; 0: never", low=0)
    drop_late: float = setting(
        1.0, "factor on P_i from then on", low=0, high=1, used_by=("late", ())
    )
    coupling_late: float = setting(
        1.0, "factor on c from then on", low=0, used_by=("late", ())
    )
    decay: str = setting(
        "none", "factor on c and P_i; e^(−t/T_c), or 1/(1 + t/T_c)", DECAYS
    )
    decay_time: float = setting(
        10.0, "T_c, intervals", above=0, used_by=("decay", DECAYS[1:])
    )
    project: bool = setting(
        True, "weights below 0 or above θ/N are projected; False: used as they are"
    )
    weight_limit: float = setting(0.0, "θ ≥ 1 in ρ_i ≤ θ/N; 0: no limit")
    by_size: bool = setting(False, "weights times |D_i|")

    def resolved(self) -> "DMS":
        """NaN for a c of L, G² and σ², infinite for no limit."""
        return changed(
            self,
            coupling=self.coupling if self.coupling >= 0 else math.nan,
            late=self.late or math.inf,
            weight_limit=self.weight_limit or math.inf,
        )

    @property
    def counts_all_work(self) -> bool:
        """Whether K is of all work, also of what is not uploaded."""
        return self.threshold == "all"

    def check(self, config: Any, rule: Aggregator) -> None:
        """Refuse weights that cannot sum to 1."""
        check_limit("dms.weight_limit", self.weight_limit)
        if self.by_size:
            check_sizes(self, "--config.dms.by_size=True")


@component("dms_adaptive")
class DMSAdaptive:
    """DMS with a factor on c and P_i that follows the loss on validation samples."""

    adapt: float = setting(4.0, "κ, change of that factor per interval", above=1)
    by_size: bool = setting(True, "weights times |D_i|")

    def check(self, config: Any, rule: Aggregator) -> None:
        """Refuse what weights by size cannot have."""
        if self.by_size:
            check_sizes(config.dms, "--config.dms_adaptive.by_size=True")


def check_limit(name: str, limit: float) -> None:
    """Raise `UserError` for a θ under which weights cannot sum to 1."""
    if limit != 0 and limit < 1:
        raise UserError(
            f"--config.{name}={limit}: θ in ρ ≤ θ/N must be at least 1 (or 0 for no "
            "limit), else the weights cannot sum to 1"
        )


def check_sizes(settings: DMS, flag: str) -> None:
    """Weights times |D_i| keep no limit, and need a positive sum."""
    if settings.weight_limit or not settings.project:
        raise UserError(
            f"{flag}: weights times the clients' samples have no limit and are "
            "projected; leave out dms.weight_limit and dms.project, or use False"
        )


def decay_factor(info: RoundInfo, settings: DMS) -> Float[Array, ""]:
    """What is left of c and P_i in interval t: 1, e^(−t/T_c) or 1/(1 + t/T_c)."""
    age = jnp.asarray(info.interval) / settings.decay_time
    factors = jnp.stack([jnp.ones_like(age), jnp.exp(-age), 1 / (1 + age)])
    return factors[jnp.asarray(settings.decay)]


def dms_rule(info: RoundInfo, hparams: HParams) -> Weights:
    """Weights of DMS: Algorithm 1, equations (6)–(9); the parts are in `dms`.

    The settings ``dms.*`` depart from the paper where it is silent: c as a number, in
    steps, or falling; P_i times a factor; K given; no projection; ρ_i times |D_i|.
    """
    factor = decay_factor(info, hparams.of(DMS))
    return scaled_dms(info, hparams, factor, hparams.of(DMS).by_size)


def scaled_dms(
    info: RoundInfo,
    hparams: HParams,
    factor: Float[Array, ""],
    by_size: AnyArray | float,
) -> Weights:
    """Weights of DMS with c and P_i times a factor in [0, 1]; 0: equal weights.

    `by_size` 1: times |D_i|.
    """
    settings = hparams.of(DMS)
    key, tau, constants = info.key, info.tau, info.constants
    late = info.interval >= jnp.asarray(settings.late)
    drop = jnp.where(late, settings.drop_late, settings.drop) * factor
    selected = dms.select(
        key, tau, info.client, threshold_value=info.threshold, drop=drop
    )
    work = jnp.where(jnp.asarray(settings.unit) > 0, info.steps, tau)
    coupling = dms.coupling(work, lr=hparams.lr, **constants._asdict())
    chosen = jnp.asarray(settings.coupling)
    coupling = jnp.where(jnp.isnan(chosen), coupling, chosen)
    # A gradient that overflowed in the estimate must not spoil every weight.
    coupling = jnp.where(jnp.isnan(coupling), 0.0, coupling)
    coupling = coupling * jnp.where(late, settings.coupling_late, 1.0) * factor
    raw = jnp.asarray(settings.project) == 0
    rho = dms.affine_weights(work, selected, coupling, settings.weight_limit, raw)
    sized = normalized(rho * info.size, tau)
    rho = jnp.where(jnp.asarray(by_size) == 1, sized, rho.astype(jnp.float32))
    threshold = jnp.asarray(info.threshold, jnp.float32)
    threshold = jnp.where(jnp.isnan(threshold), dms.threshold(tau), threshold)
    threshold = threshold.astype(jnp.float32)
    return Weights(rho, selected, threshold, coupling)


def _has_coupling(hparams: HParams) -> bool:
    return not math.isnan(hparams.of(DMS).coupling)


DMS_RULE = Aggregator(
    Mixing(dms_rule, uses_constants=True, skips_constants=_has_coupling),
    sections=(DMS,),
    label="DMS",
)


def _differ(one: Float[Array, "N"], other: Float[Array, "N"]) -> Bool[Array, ""]:
    """Whether weights differ by more than rounding."""
    return jnp.abs(one - other).max() > 1e-6


def adaptive_weights(
    outputs: ClientOutputs, scale: Any, received: Received, hparams: HParams
) -> tuple[Weights, Float[Array, ""]]:
    """Weights of DMS with s·κ or s/κ, whichever has the smaller F_val, and that s.

    Where both give the same weights, s falls, which costs nothing in this interval:
    with a large c, s would otherwise stay at 1 for good. It stays where no s makes a
    difference, as with one client or equal τ.
    """
    objective = outputs.validation
    assert objective is not None, "the rule declares that it uses it"
    settings = hparams.of(DMSAdaptive)
    factor = jnp.asarray(settings.adapt)

    def weights(scale: Float[Array, ""]) -> Weights:
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


DMS_ADAPTIVE = Aggregator(
    DMS_RULE.mixing._replace(from_updates=adaptive_weights, uses_validation=True),
    server=ServerSide(init=lambda *_: jnp.float32(1.0)),  # the paper's DMS
    sections=(DMS, DMSAdaptive),
    label="adaptive DMS",
)
