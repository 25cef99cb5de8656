"""Differential privacy of a run before it is trained: ε(δ) of the link `noise`.

Who delivers when, with which weight, is drawn before training. In update t client i has
s_it = Σ_k |ρ_k| over its deliveries, and S_t is the largest: by composition of
Gaussians μ_i² = Σ_t (s_it/S_t)²/z², or n_i/z² of n_i deliveries with noise of the
clients, and the largest μ counts. Cohorts of equal weights, each drawn anew, are also
accounted as sampled, if they stay secret, and the smaller ε counts: `poisson` as such,
`uniform` as without replacement, whose bound is of one client in place of another,
2 ρ C: z/2. The accountant is `dp-accounting`: exact for Gaussians, Rényi divergences
(moments) for sampled ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from tsfl_jax import rng, trees
from tsfl_jax.components import changed
from tsfl_jax.config import Config, get, seeds_of
from tsfl_jax.data.inputs import package
from tsfl_jax.engine import client as local
from tsfl_jax.engine import optimizers
from tsfl_jax.prepare import rule_settings
from tsfl_jax.prepare.network import Network
from tsfl_jax.prepare.workload import Workload
from tsfl_jax.rules.apply import decide
from tsfl_jax.rules.base import Aggregator, RoundInfo
from tsfl_jax.timeline import FRAMEWORKS, deliveries
from tsfl_jax.types import HParams, Params, UserError, parts_of
from tsfl_jax.uplink.clip import COUNT_SHARE

_POINTS = 200, 12  # of the curve of ε over intervals; the second where it takes long
_LEAST, _TOLERANCE = 0.2, 1e-3  # of z, searched where cohorts are sampled


class Privacy(NamedTuple):
    """What the noise of a run gives."""

    multiplier: float  # z
    delta: float
    epsilon: Float[np.ndarray, "T"]  # after some of the intervals and the last, or NaN
    method: str  # how it is accounted, in words


def check(config: Config, rule: Aggregator, params: Params) -> None:
    """Raise `UserError` where the influence of one client has no known bound."""
    names, is_central = parts_of(config.uplink.chain), config.noise.where == "server"
    chain = ",".join(names[-2:] if is_central else names)
    local_parts = () if config.model.local_period else parts_of(config.model.local)
    paths = trees.named(trees.parted(params)[1])
    sent = [path for path in paths if not any(part in path for part in local_parts)]
    estimates = rule.mixing.uses_constants and config.constants.when != "given"
    estimates = estimates and rule_settings.needs_constants(config, rule)
    learned = "this depends on what clients learn; choose what is known before training"
    for name, is_conflict, reason in (
        ("uplink.chain", ",clip,noise," not in f",{chain},", "end it in clip,noise"),
        ("algorithm", rule.stacks or rule.mixing.uses_gradients, learned),
        ("constants.when", estimates, learned),
        ("cohort.sampler", config.cohort.choice is not None, learned),
        ("clip.quantile", config.clip.quantile and not is_central, "choose 0"),
        ("model.name", sent, f"{sent[:1]} gets no noise; keep it by model.local"),
    ):
        if is_conflict:
            flag = f"--config.{name}={get(config, name)}"
            raise UserError(f"{flag}: noise needs a bound on each client; {reason}")


def account(
    config: Config,
    rule: Aggregator,
    workload: Workload,
    network: Network,
    hparams: HParams,
) -> tuple[Privacy | None, HParams]:
    """What the noise of a run gives, None without; and the hyper-parameters with its z.

    Raises:
      UserError: the influence of one client has no bound, or the library is missing.
    """
    if "noise" not in parts_of(config.uplink.chain):
        return None, hparams
    check(config, rule, network.params)
    dp = package("dp_accounting", "privacy")
    rho, last = _weights(config, rule, workload, hparams), len(workload.places) - 1
    units, target = _units(config, workload, rho), config.noise.epsilon
    sampled = _sampled(dp, config, workload, rho)
    z, delta = config.noise.multiplier, config.noise.delta

    def epsilon(z: float, t: int) -> tuple[float, str]:
        words = f"exact participation, at most {units[t]:,.4g} deliveries of a client"
        exact = dp.get_epsilon_gaussian(z / units[t] ** 0.5, delta), words
        if sampled is None or z == 0:
            return exact
        words = f"{t + 1:,} secret cohorts drawn by {config.cohort.sampler}"
        return min(exact, (sampled(z, t + 1), words))

    if target:
        z = dp.get_sigma_gaussian(target, delta) * units[last] ** 0.5
        if sampled and epsilon(_LEAST, last)[0] > target:
            from scipy import optimize  # takes a while to import

            z = (
                _TOLERANCE
                + optimize.root_scalar(
                    lambda z: epsilon(z, last)[0] - target,
                    bracket=(_LEAST, z + _TOLERANCE),
                    xtol=_TOLERANCE,
                ).root
            )
        z *= 1 + 1e-6  # float32
    z, curve = float(np.float32(z)), np.full(last + 1, np.nan)
    points = np.linspace(0, last, _POINTS[bool(sampled)]).astype(int)
    for t in np.unique(points).tolist():
        curve[t], method = epsilon(z, t)
    noise = changed(hparams.settings["noise"], multiplier=np.float32(z))
    hparams = hparams._replace(settings={**hparams.settings, "noise": noise})
    return Privacy(z, delta, curve, method), hparams


def _weights(
    config: Config, rule: Aggregator, workload: Workload, hparams: HParams
) -> Float[np.ndarray, "T K"]:
    """ρ of all updates, as the program will decide them."""
    times, delivery = workload.schedule, workload.schedule.delivery
    tau, iteration = deliveries.claimed(times), config.schedule.iteration
    steps = tau * local.steps_per_iteration(times.size, config.batch_size, iteration)
    key = rng.fold(rng.key(seeds_of(config).batches), "rule")

    def of_update(t: Any, columns: dict[str, Any]) -> Any:
        columns |= {"key": jax.random.fold_in(key, t), "interval": t}
        info = RoundInfo(constants=hparams.constants, **columns)
        now = optimizers.in_interval(hparams, t, optimizers.lr_factors())
        return decide((rule,), info, now).rho

    columns = {"client": times.client, "tau": tau, "size": times.size, "steps": steps}
    columns |= {"lag": delivery.lag, "group": delivery.group, "share": times.share}
    columns |= {"threshold": times.threshold, "place": workload.places}
    arrays = jax.tree.map(jnp.asarray, columns)
    return np.asarray(jax.jit(jax.vmap(of_update))(jnp.arange(len(tau)), arrays))


def _units(
    config: Config, workload: Workload, rho: Float[np.ndarray, "T K"]
) -> Float[np.ndarray, "T"]:
    """max_i μ_i² z² after each update: full deliveries of the client with most."""
    delivers, places = deliveries.claimed(workload.schedule) > 0, workload.places
    counted = COUNT_SHARE * bool(config.clip.quantile)
    total, units = np.zeros(len(workload.drawn)), np.full(len(rho), 1e-30)
    for t, is_in in enumerate(delivers):
        ids, slots = np.unique(places[t, is_in], return_inverse=True)
        if config.noise.where == "client":
            total[ids] += np.bincount(slots)
        elif len(ids):
            share = np.bincount(slots, np.abs(rho[t, is_in]))
            part = (share / max(share.max(), 1e-30)) ** 2
            total[ids] += (1 - counted) * part + counted
        units[t] = max(units[t - 1], total[ids].max(initial=0.0))
    return units


def _sampled(
    dp: Any, config: Config, workload: Workload, rho: Float[np.ndarray, "T K"]
) -> Callable[[float, int], float] | None:
    """(z, updates) → ε of sampled cohorts; None: no event of the library fits."""
    cohort, n, framework = config.cohort, config.num_clients, config.timeline.framework
    is_anew = framework == "none" or FRAMEWORKS[framework].all_count
    delivers = deliveries.claimed(workload.schedule) > 0
    count, weights, k = delivers.sum(axis=1), np.abs(rho[delivers]), cohort.size
    is_even = count.all() and np.ptp(weights) <= 1e-6 * weights.max()
    # The number of clients that an adaptive norm divides by would tell who is there.
    is_whole = (count == k).all() and cohort.ask <= k
    fits = {"poisson": not config.clip.quantile, "uniform": is_whole}
    is_central = config.noise.where == "server"
    if not (k and is_anew and is_even and is_central and fits.get(cohort.sampler)):
        return None

    def epsilon(z: float, updates: int) -> float:
        relation, gaussian = dp.NeighboringRelation, dp.GaussianDpEvent
        if cohort.sampler == "poisson":
            event = dp.PoissonSampledDpEvent(k / n, gaussian(z))
            accountant = dp.rdp.RdpAccountant(None, relation.REPLACE_SPECIAL)
        else:
            event = dp.SampledWithoutReplacementDpEvent(n, k, gaussian(z / 2))
            accountant = dp.rdp.RdpAccountant(None, relation.REPLACE_ONE)
        return float(accountant.compose(event, updates).get_epsilon(config.noise.delta))

    return epsilon
