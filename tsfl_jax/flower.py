"""Any rule of this package as the strategy of a Flower server, for real devices.

Flower (https://flower.ai) moves models and runs clients; which model comes of theirs is
decided here. Needs the extra ``flower``.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tsfl_jax import rng, trees
from tsfl_jax.components import check_name
from tsfl_jax.data.inputs import package
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import Aggregator, with_defaults
from tsfl_jax.rules.custom import aggregate, init_rule, resized, weights
from tsfl_jax.types import HParams, Params, PRNGKey, UserError, one_line

_Base: Any = object  # Flower's FedAvg, by `strategy`: it need not be installed
_LOG = logging.getLogger("tsfl_jax")
TAU, SECONDS = "tau", "seconds"
# Parts of the names of batch statistics in PyTorch, Keras and Flax.
BUFFERS = ("running_mean", "running_var", "moving_", "batch_stats")
# w_i − w^t, τ_i and |D_i|
Reply = tuple[dict[str, np.ndarray], int, int]


class Round(NamedTuple):
    """What the strategy did in one round, by client that was asked."""

    nodes: list[int]  # Flower's ids
    tau: np.ndarray  # int32 [N], τ as reported; 0: no model that fits came in time
    size: np.ndarray  # int32 [N], |D_i| as last reported; 1 until then
    rho: np.ndarray | None  # float32 [N]; None: the rule is more than weights
    rejected: int = 0  # replies that were left out


def strategy(
    rule: str | Aggregator = "dms",
    *,
    seconds: float,
    hparams: HParams = HParams(),  # noqa: B008
    seed: int = 0,
    buffers: str | Iterable[str] = BUFFERS,
    **settings: Any,
) -> Any:
    """Make a Flower strategy that aggregates with a rule of this package.

    A round is an interval of T-SFL: each client is sent the model and Δ, trains as many
    local iterations as it completes in that time, and replies with its model, τ_i and
    |D_i|. w^{t+1} = update(w^t + Σ_i ρ_i (w_i − w^t), w^t), as `aggregate` has it; who
    has not replied by Flower's ``timeout`` has τ_i = 0, as a client that is away. So
    has one whose reply does not fit, which a warning says: other names, shapes or
    kinds, or not finite; τ_i or |D_i| not whole, negative, |D_i| = 0, or from 2³¹ on.

    The rule acts on the floating-point arrays, in float32 (float64 models, too); each
    keeps its type. Buffers and signed integers become the clients' mean, the latter
    rounded; other arrays stay. A client is a node, whichever order Flower asks in.

    Args:
      rule: name of a rule, or one from `tsfl_jax.rule`.
      seconds: Δ > 0, sent to the clients as ``message.content["config"]["seconds"]``.
      hparams: η and what the rule reads; DMS: L, G², σ² as `constants`, such as those
        in the history of a simulation.
      seed: of the rule's random numbers.
      buffers: parts of the names of arrays that are no parameters.
      **settings: of Flower's ``FedAvg``, such as ``min_train_nodes``.

    Returns:
      A ``flwr.serverapp.strategy.Strategy``; ``start(..., timeout=Δ + slack)`` runs it,
      and ``rounds`` is a list of what it did. A reply has one ``ArrayRecord`` with the
      names of those sent, and one ``MetricRecord`` with "tau" and "num-examples".

    Raises:
      UserError: flwr is not installed, no such rule, or one that needs more than the
        clients' models.

    Source: Shao et al., "Robust Model Aggregation for Heterogeneous Federated
    Learning", Algorithm 1.
    """
    flower = package("flwr.serverapp.strategy", "flower")
    if not isinstance(rule, Aggregator):
        check_name("rule", rule, AGGREGATORS)
        rule = AGGREGATORS[rule]
    _check(rule, hparams, seconds)
    parts = (buffers,) if isinstance(buffers, str) else tuple(buffers)
    kind = type("Strategy", (_Strategy, flower.FedAvg), {})
    return kind(rule, float(seconds), hparams, rng.key(seed), parts, settings)


class _Strategy(_Base):
    """Flower's choice of clients and metrics, with our aggregation."""

    def __init__(
        self,
        rule: Aggregator,
        seconds: float,
        hparams: HParams,
        key: PRNGKey,
        buffers: tuple[str, ...],
        settings: dict[str, Any],
    ) -> None:
        super().__init__(**settings)
        self._rule, self._seconds, self._buffers = rule, seconds, buffers
        self._hparams, self._key = hparams, rng.fold(key, "rule")
        self._model, self._nodes = {}, []
        # The rule's state; |D_i| as last reported, by node in order of appearance.
        self._state, self._sizes = None, {}
        self.rounds: list[Round] = []

    def configure_train(
        self, server_round: int, arrays: Any, config: Any, grid: Any
    ) -> Iterable[Any]:
        self._model = {name: array.numpy() for name, array in arrays.items()}
        config[SECONDS] = self._seconds
        messages = [*super().configure_train(server_round, arrays, config, grid)]
        self._nodes = [message.metadata.dst_node_id for message in messages]
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Any]
    ) -> tuple[Any, Any]:
        if not self._nodes:
            return None, None
        valid, _ = self._check_and_log_replies(replies, True, validate=False)
        old, size_name = self._model, self.weighted_by_key
        fitting = _fitting(valid, lambda reply: _read(reply, old, size_name))
        key = jax.random.fold_in(self._key, server_round)
        updates = {node: update for node, (update, _) in fitting.items()}
        new, record = self._aggregated(updates, key)
        rejected = len(valid) - len(fitting)
        self.rounds.append(record._replace(rejected=rejected))
        mean = _mean_metrics(self.train_metrics_aggr_fn, fitting, size_name)
        app = package("flwr.app", "flower")
        return app.ArrayRecord({name: app.Array(w) for name, w in new.items()}), mean

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        valid, _ = self._check_and_log_replies(replies, False, validate=False)
        size_name = self.weighted_by_key
        fitting = _fitting(valid, lambda reply: _count(reply, size_name, 1))
        return _mean_metrics(self.evaluate_metrics_aggr_fn, fitting, size_name)

    def _aggregated(
        self, replies: dict[int, Reply], key: PRNGKey
    ) -> tuple[dict[str, np.ndarray], Round]:
        """The new model and the round's record."""
        rule, model, nodes = self._rule, self._model, self._nodes
        zeros = {name: np.zeros_like(w) for name, w in model.items()}
        answers = {n: replies.get(n, (zeros, 0, self._sizes.get(n, 0))) for n in nodes}
        self._sizes |= {node: size for node, (_, _, size) in answers.items()}
        old = _variables(model, self._buffers)
        size, ids = np.array([*self._sizes.values()], np.float32), [*self._sizes]
        if self._state is None:
            self._state = init_rule(rule, old, len(size), size=size)
        counts = {
            "tau": np.array([tau for _, tau, _ in answers.values()], np.int32),
            "size": np.array([max(self._sizes[n], 1) for n in nodes], np.int32),
            "client": np.array([ids.index(node) for node in nodes], np.int32),
        }
        stacked = {n: np.stack([u[n] for u, _, _ in answers.values()]) for n in model}
        updates = _variables(stacked, self._buffers)
        settings = {"hparams": self._hparams, "key": key}
        state = resized(rule, old, self._state, size)
        new, self._state = aggregate(rule, updates, old, state, **counts, **settings)
        new = new["params"] | new["buffers"]
        new = {name: np.asarray(new[name], w.dtype) for name, w in model.items()}
        rho = None if rule.stacks else weights(rule, **counts, **settings)
        return new, Round(nodes, counts["tau"], counts["size"], rho)


def _fitting(
    messages: Sequence[Any], read: Callable[[Any], Any]
) -> dict[int, tuple[Any, Any]]:
    """What `read` makes of each reply that fits, and the reply, by node."""
    fitting = {}
    for message in messages:
        node, content = message.metadata.src_node_id, message.content
        try:
            fitting[node] = read(content), content
        except Exception as error:  # whatever a client sends: the server goes on
            reason = f"{type(error).__name__}: {one_line(error, 200)}"
            _LOG.warning("reply of node %d left out: %s", node, reason)
    return fitting


def _mean_metrics(function: Callable, fitting: dict[int, Any], size_name: str) -> Any:
    """Flower's mean of the metrics; None where there is none, which is logged."""
    contents = [content for _, content in fitting.values()]
    try:
        return function(contents, size_name) if contents else None
    except Exception as error:  # such as lists of several lengths
        _LOG.warning("no mean of the clients' metrics: %s", one_line(error, 200))
        return None


def _expect(is_so: Any, reason: str) -> None:
    if not is_so:
        raise ValueError(reason)


def _count(content: Any, name: str, least: int) -> int:
    """A whole number of a reply's only MetricRecord, of the range of int32."""
    (metrics,) = content.metric_records.values()
    value = metrics[name]
    is_count = least <= value < 2**31 and value == int(value)
    _expect(is_count, f"{name}={value}; expected a whole number from {least} on")
    return int(value)


def _read(content: Any, model: dict[str, np.ndarray], size_name: str) -> Reply:
    """A client's w_i − w^t, τ_i and |D_i|; an exception: the reply does not fit."""
    (arrays,), update = content.array_records.values(), {}
    names = f"arrays {sorted(arrays)}; expected {sorted(model)}"
    _expect(set(arrays) == set(model), names)
    for name, old in model.items():
        new = arrays[name].numpy()
        fits = new.shape == old.shape and np.can_cast(new.dtype, old.dtype, "same_kind")
        forms = [f"{array.dtype}{list(array.shape)}" for array in (new, old)]
        _expect(fits, f"{name} is {forms[0]}; expected {forms[1]}")
        update[name] = np.zeros_like(old)
        if old.dtype.kind in "bu":  # flags have no mean
            continue
        with np.errstate(all="ignore"):
            update[name] = new.astype(old.dtype) - old
        is_finite = np.abs(update[name]) < np.finfo(np.float32).max
        _expect(is_finite.all(), f"{name} is not finite")
    return update, _count(content, TAU, 0), _count(content, size_name, 1)


def _check(rule: Aggregator, hparams: HParams, seconds: float) -> None:
    """Raise `UserError` unless what clients send is enough for the rule."""
    mixing = rule.mixing
    needs_more = rule.clients.gradient_correction or mixing.uses_gradients
    needs_more = needs_more or mixing.uses_validation
    needs_constants = mixing.uses_constants and not mixing.skips_constants(
        with_defaults(rule, hparams)
    )
    problems = {
        f"seconds={seconds}: expected Δ > 0, in seconds": not 0 < seconds < math.inf,
        "rule: needs more than the models that clients send (control variates, "
        "gradients or validation samples); choose another, such as dms": needs_more,
        "rule: its weights depend on L, G² and σ²; give "
        "hparams=tsfl_jax.HParams(lr=…, constants=tsfl_jax.types.Constants(…)), "
        "as a simulation of the fleet has them in its history": needs_constants
        and any(math.isnan(value) for value in hparams.constants),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise UserError(problem)


def _variables(arrays: dict[str, Any], buffers: tuple[str, ...]) -> Params:
    """Arrays by name as parameters, and others that become a mean."""
    parts: Params = {"params": {}, "buffers": {}}
    for name, array in arrays.items():
        is_buffer = any(part in name for part in buffers) or not trees.inexact(array)
        parts["buffers" if is_buffer else "params"][name] = array
    return parts
