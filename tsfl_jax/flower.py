"""Any rule of this package as the strategy of a Flower server, for real devices.

Flower (https://flower.ai) moves models and runs clients; which model comes of theirs is
decided here. Needs the extra ``flower``.
"""

import importlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from tsfl_jax import rng
from tsfl_jax.components import check_name
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import Aggregator, with_defaults
from tsfl_jax.rules.custom import aggregate, init_rule, weights
from tsfl_jax.types import HParams, UserError

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"
TAU, SIZE, SECONDS = "tau", "num-examples", "seconds"


class Round(NamedTuple):
    """What the strategy did in one round, by client that was asked."""

    nodes: list[int]  # Flower's ids
    tau: np.ndarray  # int32 [N], τ as reported; 0: no model came in time
    size: np.ndarray  # int32 [N], |D_i| as reported; 1 where τ = 0
    rho: np.ndarray | None  # float32 [N]; None: the rule is more than weights


def strategy(
    rule: str | Aggregator = "dms",
    *,
    seconds: float,
    hparams: HParams = HParams(),  # noqa: B008
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Make a Flower strategy that aggregates with a rule of this package.

    A round is an interval of T-SFL: each client is sent the model and Δ, trains as many
    local iterations as it completes in that time, and replies with its model, τ_i and
    |D_i|. w^{t+1} = update(w^t + Σ_i ρ_i (w_i − w^t), w^t), as `aggregate` has it; who
    has not replied by Flower's ``timeout`` has τ_i = 0, as a client that is away.

    Args:
      rule: name of a rule, or one from `tsfl_jax.rule`.
      seconds: Δ > 0, sent to the clients as ``message.content["config"]["seconds"]``.
      hparams: η and what the rule reads; DMS: L, G², σ² as `constants`, such as those
        in the history of a simulation.
      seed: of the rule's random numbers.
      **settings: of Flower's ``FedAvg``, such as ``min_train_nodes``.

    Returns:
      A ``flwr.serverapp.strategy.Strategy``; ``start(..., timeout=Δ + slack)`` runs it,
      and ``rounds`` is a list of what it did. A reply has ``ArrayRecord`` "arrays" with
      the names of those sent, and ``MetricRecord`` "metrics" with "tau" and
      "num-examples".

    Raises:
      UserError: flwr is not installed, no such rule, or one that needs more than the
        clients' models.

    Source: Shao et al., "Robust Model Aggregation for Heterogeneous Federated
    Learning", Algorithm 1.
    """
    try:
        flower = importlib.import_module("flwr.serverapp.strategy")
    except ImportError as error:
        raise UserError(
            "flwr is not installed; pip install 'tsfl_jax[flower]'"
        ) from error
    if not isinstance(rule, Aggregator):
        check_name("rule", rule, AGGREGATORS)
        rule = AGGREGATORS[rule]
    used = _checked(rule, hparams)
    if not (math.isfinite(seconds) and seconds > 0):
        raise UserError(f"seconds={seconds}: expected Δ > 0, in seconds")

    return _made(flower.FedAvg, used, seconds, {"hparams": hparams}, seed, settings)


def _made(
    base: Any,
    used: Aggregator,
    seconds: float,
    given: dict[str, Any],
    seed: int,
    settings: dict[str, Any],
) -> Any:
    """The strategy; `base` is Flower's ``FedAvg``."""

    class Strategy(base):
        """Flower's choice of clients and metrics, with our aggregation."""

        def __init__(self) -> None:
            super().__init__(**settings)
            self.rounds: list[Round] = []
            self._model, self._state, self._nodes = {}, None, []

        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Any
        ) -> Iterable[Any]:
            self._model = {name: array.numpy() for name, array in arrays.items()}
            config[SECONDS] = float(seconds)
            asked = list(super().configure_train(server_round, arrays, config, grid))
            self._nodes = [message.metadata.dst_node_id for message in asked]
            return asked

        def aggregate_train(
            self, server_round: int, replies: Iterable[Any]
        ) -> tuple[Any, Any]:
            valid, _ = self._check_and_log_replies(replies, is_train=True)
            replied = {m.metadata.src_node_id: m.content for m in valid}
            if self._state is None:
                self._state = init_rule(used, self._model, len(self._nodes))
            key = jax.random.fold_in(rng.fold(rng.key(seed), "rule"), server_round)
            known = self._nodes, replied, self._model
            new, self._state, done = _aggregated(
                used, *known, self._state, given | {"key": key}
            )
            self.rounds.append(done)
            contents = list(replied.values())
            metrics = None
            if contents:
                metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
            return _record(new), metrics

    return Strategy()


def _checked(rule: Aggregator, hparams: HParams) -> Aggregator:
    """The rule, if what clients send is enough for it."""
    if rule.gradient_correction or rule.uses_gradients or rule.uses_validation:
        raise UserError(
            "rule: needs more than the models that clients send (control variates, "
            "gradients or validation samples); choose another, such as dms"
        )
    unknown = any(math.isnan(value) for value in hparams.constants)
    filled = with_defaults(rule, hparams)
    if rule.uses_constants and not rule.needs_none(filled) and unknown:
        raise UserError(
            "rule: its weights depend on L, G² and σ²; give "
            "hparams=tsfl_jax.HParams(lr=…, constants=tsfl_jax.types.Constants(…)), "
            "as a simulation of the fleet has them in its history"
        )
    return rule


def _record(model: dict[str, np.ndarray]) -> Any:
    app = importlib.import_module("flwr.app")
    return app.ArrayRecord({name: app.Array(array) for name, array in model.items()})


def _aggregated(
    rule: Aggregator,
    nodes: list[int],
    replied: dict[int, Any],
    model: dict[str, np.ndarray],
    state: Any,
    given: dict[str, Any],
) -> tuple[dict[str, np.ndarray], Any, Round]:
    """The new model and state of the rule, and the record of the round."""

    def reported(name: str, missing: int) -> np.ndarray:
        found = [replied[n][METRICS][name] if n in replied else missing for n in nodes]
        return np.asarray(found, np.int32)

    tau, size = reported(TAU, 0), reported(SIZE, 1)

    def updates(name: str, old: np.ndarray) -> np.ndarray:
        own = [replied[n][ARRAYS][name].numpy() if n in replied else old for n in nodes]
        return np.stack(own) - old

    moved = {name: updates(name, old) for name, old in model.items()}
    counts = {"tau": tau, "size": size, **given}
    new, state = aggregate(rule, moved, model, state, **counts)
    new = {name: np.asarray(new[name], old.dtype) for name, old in model.items()}
    rho = None if rule.stacks else weights(rule, **counts)
    return new, state, Round(nodes, tau, size, rho)
