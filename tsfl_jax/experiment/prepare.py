"""From settings to everything that is drawn before training, on the host.

Data → partition → schedule as plain arrays; network, rule and optimizer as functions.
With `experiment` the only reader of `Config`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import data, host_memory, rng
from tsfl_jax.config import STALENESS, Config
from tsfl_jax.data import in_memory, partition
from tsfl_jax.data.quadratic import Quadratic, curvature
from tsfl_jax.data.quadratic_samples import make as make_quadratic
from tsfl_jax.engine import client as local
from tsfl_jax.engine import optimizers
from tsfl_jax.experiment import backend, rule_settings
from tsfl_jax.experiment.describe import describe
from tsfl_jax.experiment.workload import draw_schedule, groups
from tsfl_jax.models import networks
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import Aggregator, Counts
from tsfl_jax.timeline import replay
from tsfl_jax.types import Dataset, HParams, Partition, Schedule, UserError
from tsfl_jax.validate import validate

_MOST_SAMPLES = 2**31 - 1  # of a client in an interval: what the device counts to


class Prepared(NamedTuple):
    """One experiment before anything is compiled or put on a device."""

    config: Config
    dataset: Dataset
    dealt: Partition
    times: Schedule
    steps: np.ndarray  # [T, N] int64, mini-batch steps of every client
    model: networks.Model
    rule: Aggregator
    optimizer: optimizers.Factory
    hparams: HParams
    estimates: bool  # some of L, G², σ² are to be estimated
    mapping: str
    convolution: str
    model_name: str
    # A user's own parts in words, for a checkpoint to compare: network (its name where
    # it is one of ours), optimizer, rule.
    own: tuple[str, str | None, str | None]
    # Digests of the drawn arrays, to tell whether two runs had the same.
    fingerprints: dict[str, str]
    notes: tuple[str, ...]  # what a user should know before the run


def hparams_of(config: Config, aggregator: Aggregator) -> HParams:
    """The sweepable scalars; NaN marks a constant to be estimated."""

    def given(value: float) -> float:
        return value if value >= 0 else np.nan

    server = config.server
    default_lr = AGGREGATORS[config.algorithm].settings.default_lr
    values = HParams(
        lr=config.lr,
        momentum=config.momentum,
        mu=config.mu if aggregator.proximal or config.proximal else 0.0,
        gamma=config.gamma,
        clip_norm=config.clip_norm or np.inf,
        smoothness=given(config.dms.smoothness),
        grad_sq_norm=given(config.dms.grad_sq_norm),
        grad_variance=given(config.dms.grad_variance),
        weight_limit=config.dms.weight_limit or np.inf,
        server_lr=server.lr or default_lr(server.momentum),
        server_momentum=server.momentum,
        server_second=server.second,
        server_floor=server.floor,
        trim=server.trim,
        staleness_a=server.staleness_a,
        staleness_b=server.staleness_b,
    )
    values = HParams(*(jnp.float32(value) for value in values))
    kind = jnp.int32(STALENESS.index(server.staleness))
    return values._replace(staleness=kind, rule=jnp.int32(0))


def load_dataset(config: Config) -> Dataset:
    """The data set of a config."""
    d, q = config.data, config.quadratic
    if d.name == "quadratic":
        clients, held, size = config.num_clients, config.schedule.data_size, d.shape[0]
        host_memory.require(
            f"--config.data.shape={tuple(d.shape)}, num_clients={clients}, "
            f"schedule.data_size={held}",
            28 * clients * held * size,  # noise, scaled, added up; and as float32
            "quadratic samples",
        )
        return make_quadratic(
            config.num_clients,
            config.schedule.data_size,
            batch_size=config.batch_size,
            curvature=curvature_of(config, d.shape),
            grad_variance=groups(q.grad_variance),
            dissimilarity=groups(q.dissimilarity),
            distance=q.distance,
            seed=config.seed,
        )
    return data.load(
        d.name,
        dir=d.dir,
        file=d.file,
        download=d.download,
        normalize=d.normalize,
        shape=tuple(d.shape),
        num_classes=d.num_classes,
        train_size=d.train_size,
        test_size=d.test_size,
        seed=config.seed,
    )


def curvature_of(config: Config, shape: tuple[int, ...]) -> np.ndarray:
    """λ ``[d]`` of the quadratic model, for samples of a shape."""
    q = config.quadratic
    return curvature(int(np.prod(shape)), q.smoothness, q.convexity)


def _network(config: Config, dataset: Dataset, form: str) -> Any:
    """The Flax module of a config."""
    shape = dataset.x_train.shape[1:]
    if config.model.name == "quadratic":
        return Quadratic(tuple(curvature_of(config, shape).tolist()))
    return networks.make_model(
        config.model.name,
        dataset.num_classes,
        shape,
        hidden=config.model.hidden,
        norm=config.model.norm,
        form=form,
    )


def _capacity(times: Schedule, num_clients: int) -> np.ndarray:
    """``[N]``, the most samples that each client ever holds."""
    if times.delivery is None:
        return times.size.max(axis=0)
    # Whoever never delivers holds as many as anybody: its data is never used.
    most = np.zeros(num_clients, np.int32)
    np.maximum.at(most, times.delivery.client, np.where(times.tau > 0, times.size, 0))
    return np.where(most > 0, most, times.size.max()).astype(np.int32)


def _check_batch(batch_size: int, capacity: np.ndarray) -> None:
    smallest = int(capacity.argmin())
    if batch_size > capacity[smallest]:
        raise UserError(
            f"--config.batch_size={batch_size}: client {smallest} never holds more "
            f"than {capacity[smallest]} samples; use a smaller batch or a larger "
            "--config.schedule.data_size"
        )


def _steps(config: Config, times: Schedule) -> np.ndarray:
    """``[T, N]`` int64 mini-batch steps, all of which the device can count.

    Raises:
      UserError: a client has more samples to train on in an interval than int32 holds.
    """
    iteration, tau = config.schedule.iteration, times.tau.astype(np.int64)
    size = times.size.astype(np.int64)
    each = local.steps_per_iteration(size, config.batch_size, iteration)
    claimed = tau if times.reported is None else np.maximum(tau, times.reported)
    samples = claimed * (size if iteration == "pass" else config.batch_size)
    if samples.max(initial=0) > _MOST_SAMPLES:
        t, place = np.unravel_index(samples.argmax(), samples.shape)
        i = place if times.delivery is None else times.delivery.client[t, place]
        framework = config.timeline.framework
        given = f"schedule.kind={config.schedule.kind}"
        given = given if framework == "none" else f"timeline.framework={framework}"
        raise UserError(
            f"--config.{given}: client {i} does τ = {claimed[t, place]} local "
            f"iterations of {samples[t, place] // claimed[t, place]} samples in "
            f"interval {t}, {samples[t, place]} samples; a client can train on at most "
            f"{_MOST_SAMPLES} in one interval; choose a smaller τ or fewer samples"
        )
    return tau * each


def prepare(
    config: Config,
    *,
    model: Any = None,
    dataset: Dataset | None = None,
    optimizer: optimizers.Optimizer | None = None,
    aggregator: Aggregator | None = None,
    data_fingerprint: str = "",
) -> Prepared:
    """Draws and makes everything; see `runner.simulate` for the arguments.

    `data_fingerprint` is that of the dataset, where it is known already.

    Raises:
      UserError: a setting, file or data set that cannot work, in one line.
    """
    validate(config)
    if aggregator is not None and not isinstance(aggregator, Aggregator):
        raise UserError(f"aggregator={aggregator!r}: expected a tsfl_jax.Aggregator")
    if aggregator is None:
        rule_settings.check(config)
    rule = aggregator or AGGREGATORS[config.algorithm]
    times = draw_schedule(config)
    if dataset is None:
        dataset = load_dataset(config)
    elif not data_fingerprint:  # whoever knows that has checked the data
        dataset = in_memory.check(dataset)
    steps, capacity = _steps(config, times), _capacity(times, config.num_clients)
    _check_batch(config.batch_size, capacity)
    hparams = hparams_of(config, rule)
    if aggregator is None:
        if optimizer is not None:
            rule = rule_settings.with_optimizer(config, rule, optimizer, hparams, times)
        rule_notes = rule_settings.notes(config, hparams, times)
    else:
        rule_notes = ()
    dealt = partition.make_partition(
        dataset.y_train,
        capacity,
        kind=config.partition.kind,
        alpha=config.partition.alpha,
        classes_per_client=config.partition.classes_per_client,
        replacement=config.partition.replacement,
        rng=rng.generator(config.seed, "partition"),
    )
    best = backend.choose(
        jax.default_backend(), config.model.name if model is None else "own"
    )
    form = best.convolution if config.convolution == "auto" else config.convolution
    if model is None:
        model = _network(config, dataset, form)
        model_name = own_model = config.model.name
    else:
        model_name = type(model).__name__
        own_model = describe(model)
    if not isinstance(model, networks.Model):
        model = networks.from_flax(model)
    model, model_notes = networks.decided(
        model, dataset.x_train.shape[1:], dataset.num_classes
    )
    constants = (hparams.smoothness, hparams.grad_sq_norm, hparams.grad_variance)
    return Prepared(
        config=config,
        dataset=dataset,
        dealt=dealt,
        times=times,
        steps=steps,
        model=model,
        rule=rule,
        optimizer=optimizers.as_factory(optimizer),
        hparams=hparams,
        estimates=bool(rule.uses_constants or config.measure_clients)
        and any(np.isnan(c) for c in constants),
        mapping=best.mapping if config.mapping == "auto" else config.mapping,
        convolution=form,
        model_name=model_name,
        own=(
            own_model,
            None if optimizer is None else describe(optimizer),
            None if aggregator is None else describe(aggregator),
        ),
        fingerprints={
            "data": data_fingerprint or data.fingerprint(*dataset[1:5]),
            "scale": data.fingerprint(
                dataset.mean, dataset.std, np.int64(dataset.num_classes)
            ),
            "split": data.fingerprint(dealt.indices, dealt.capacity),
            "schedule": data.fingerprint(
                *jax.tree.leaves(times._replace(seconds=None, places=None, notes=()))
            ),
        },
        notes=times.notes + dealt.notes + rule_notes + model_notes,
    )


def evaluated(prepared: Prepared) -> np.ndarray:
    """``[T]`` bool: after which updates the model is tested; the last is one."""
    config, times = prepared.config, prepared.times
    if config.timeline.framework != "none":
        every = config.eval_every * config.schedule.interval_seconds
        return replay.evaluated(times.seconds, every)
    intervals = np.arange(1, config.num_intervals + 1)
    return (intervals % config.eval_every == 0) | (intervals == config.num_intervals)


def chunk_of(prepared: Prepared) -> int:
    """Updates of one compiled call, all of the same shape.

    Intervals: a divisor of T. On a timeline as many as happen in that many intervals;
    the last call is filled up with updates by nobody.
    """
    config, updates = prepared.config, len(prepared.times.tau)
    most = min(config.report_every, config.num_intervals)
    if config.timeline.framework != "none":
        return -(-updates * most // config.num_intervals)
    return max(r for r in range(1, most + 1) if config.num_intervals % r == 0)


def counts_of(prepared: Prepared) -> Counts:
    """Numbers that shape a rule's state."""
    config = prepared.config
    tiers = config.timeline.tiers if config.timeline.framework == "fedat" else 1
    return Counts(config.num_clients, tiers)


def drawn_bytes(config: Config) -> int:
    """What is kept of an experiment's draws takes at least so much memory."""
    s, N = config.schedule, config.num_clients
    if config.timeline.framework != "none":
        return 0  # not known before
    held = 0 if s.size_groups or s.kind == "trace" else s.data_size
    return 12 * config.num_intervals * N + 2 * N * held  # τ, sizes, steps; indices


def data_key(config: Config) -> str:
    """All that `load_dataset` depends on."""
    own = (config.seed,) if config.data.name in ("synthetic", "quadratic") else ()
    if config.data.name == "quadratic":
        own += (config.num_clients, config.schedule.data_size, config.batch_size)
    return f"{config.data}{config.quadratic}{own}"


def prepare_all(
    configs: list[Config], dataset: Dataset | None = None, **parts: Any
) -> list[Prepared]:
    """`prepare` for each; those with the same data share one copy of it."""
    shared: dict[str, tuple[Dataset, str]] = {}
    several = []
    for config in configs:
        key = data_key(config) if dataset is None else ""
        if key not in shared:
            found = (
                load_dataset(config) if dataset is None else in_memory.check(dataset)
            )
            shared[key] = found, data.fingerprint(*found[1:5])
        found, digest = shared[key]
        several.append(prepare(config, dataset=found, data_fingerprint=digest, **parts))
    return several
