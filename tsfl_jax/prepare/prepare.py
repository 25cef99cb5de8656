"""Prepare an experiment: everything that is drawn before training, on the host.

Workload, data and partition become plain arrays; network, rule and optimizer become
functions. Nothing is compiled and nothing is put on a device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from tsfl_jax import config as configs
from tsfl_jax import data, host_memory, registry
from tsfl_jax.components import section_of
from tsfl_jax.config import SECTIONS, Config, get, renewed, replace, seeds_of, validate
from tsfl_jax.data import client_test, in_memory, poison, skew
from tsfl_jax.data.builtin import DATASETS
from tsfl_jax.data.client_test import ClientTest
from tsfl_jax.data.quadratic import make_quadratic
from tsfl_jax.engine import client as local
from tsfl_jax.engine import optimizers
from tsfl_jax.engine.program_spec import Hooks
from tsfl_jax.prepare import backend, custom_hooks, rule_settings, splits, trained
from tsfl_jax.prepare.custom_hooks import Custom
from tsfl_jax.prepare.network import Network, curvature_of, network_of, traffic_of
from tsfl_jax.prepare.privacy import Privacy, account
from tsfl_jax.prepare.workload import Workload, draw_workload
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import Aggregator, Counts
from tsfl_jax.sections import LR_SCHEDULES
from tsfl_jax.timeline import FRAMEWORKS, deliveries
from tsfl_jax.types import (
    INT32_MAX,
    Constants,
    Dataset,
    HParams,
    Partition,
    Scalar,
    Schedule,
    UserError,
)
from tsfl_jax.uplink import chain, chain_of
from tsfl_jax.uplink.chain import Chain


class Prepared(NamedTuple):
    """One experiment before anything is compiled or put on a device."""

    config: Config
    dataset: Dataset
    partition: Partition
    workload: Workload
    steps: Int[np.ndarray, "T N"]  # int64, mini-batch steps of each client
    network: Network
    rule: Aggregator
    optimizer: optimizers.Factory
    hooks: Hooks
    uplinks: Chain  # what updates pass on their way to the server
    hparams: HParams
    mapping: str  # "sequential" or "vmap"
    held_out: Int[np.ndarray, "V"]  # validation samples
    tested: ClientTest | None  # clients that are scored; None: none
    custom: Custom  # without its dataset, which is the one above
    custom_data: str  # the digest of that dataset before it was skewed; "": loaded
    # Digests of the drawn arrays, to find out whether two runs had the same.
    fingerprints: dict[str, str]
    notes: tuple[str, ...]  # what a user should know before the run
    privacy: Privacy | None  # of the noise on updates; None: there is none

    @property
    def slots(self) -> int:
        """Clients that train in an interval; there may be more candidates."""
        choice = self.config.cohort.choice
        return self.steps.shape[1] if choice is None else choice.size

    @property
    def waves(self) -> int:
        """Most deliveries of a client in an update, if links have a state; else 1."""
        times = self.workload.schedule
        if not times.snapshots or not self.has_link_states:
            return 1
        pairs = np.nonzero(times.tau)[0], times.client[times.tau > 0]
        return int(np.unique(pairs, axis=1, return_counts=True)[1].max())

    @property
    def has_link_states(self) -> bool:
        """Whether a link keeps something for each client."""
        shapes = _link_states(self.uplinks, self.network, self.hparams)
        return bool(jax.tree.leaves(shapes))

    @property
    def is_personal(self) -> bool:
        """Whether the clients' own models are tested, as layers stay with them."""
        return any(link.is_personal for link in self.uplinks)

    @property
    def sections(self) -> tuple[type, ...]:
        """The components whose settings reach the program."""
        return rule_settings.sections(self.config, self.rule)


@functools.lru_cache(maxsize=4096)
def _scalar(value: Any, dtype: Any = np.float32) -> Scalar:
    """An array on the device; thousands of lanes have most of them in common."""
    return jax.device_put(np.asarray(value, dtype))


def hparams_of(config: Config, rule: Aggregator) -> HParams:
    """Collect what may be swept; NaN marks a constant to be estimated."""
    values = [getattr(config.constants, name) for name in Constants._fields]
    proximal = rule.clients.proximal or config.proximal
    return HParams(
        lr=_scalar(config.lr),
        momentum=_scalar(config.momentum),
        mu=_scalar(config.mu if proximal else 0.0),
        clip_norm=_scalar(config.clip_norm or np.inf),
        lr_schedule=_scalar([*LR_SCHEDULES].index(config.lr_schedule), np.int32),
        lr_decay=_scalar(config.lr_decay),
        lr_every=_scalar(config.lr_every),
        lr_warmup=_scalar(config.lr_warmup),
        rule=_scalar(0, np.int32),
        constants=Constants(*(_scalar(v if v >= 0 else np.nan) for v in values)),
        settings=rule_settings.arrays(config, rule_settings.sections(config, rule)),
    )


def load_dataset(config: Config) -> Dataset:
    """Load or generate the data set of a config."""
    d, q, size = config.data, config.quadratic, config.schedule.data_size
    if DATASETS[d.name].make is not None:
        return data.load(d, config.seed)
    # Drawn for the clients.
    host_memory.require(
        f"--config.data.shape={tuple(d.shape)}, num_clients={config.num_clients}, "
        f"schedule.data_size={size}",
        28 * config.num_clients * size * d.shape[0],  # noise, scaled, added; as float32
        "quadratic samples",
    )
    counts = config.num_clients, size, config.batch_size
    return make_quadratic(*counts, q, curvature_of(q, d.shape), config.seed)


def _mapping_of(
    config: Config, network: Network, steps: Int[np.ndarray, "T N"]
) -> tuple[str, tuple[str, ...]]:
    """The mapping for this work, and notes on it.

    Side by side on a CPU only for one device by choice: there the last bits depend on
    how many devices share the clients, which must not follow from the machine.
    """
    mapping, _ = backend.implementation(jax.default_backend(), config.mapping)
    params = network.params["params"]
    if (
        config.mapping != "auto"
        or mapping != "sequential"
        or config.client_block
        or not backend.cheaper_side_by_side(params, steps, config.batch_size)
    ):
        return mapping, ()
    if config.devices != 1:
        return mapping, (
            "clients of this small network are trained one after another on each "
            "device; --config.devices=1 or --config.mapping=vmap trains them side by "
            "side, which is often faster, with other last bits",
        )
    note = (
        f"a small network and at most {steps.max():,} steps for a client: clients are "
        "trained side by side, equal to --config.mapping=sequential within rounding"
    )
    return "vmap", (note,)


def _steps(times: Schedule, batch_size: int, iteration: str) -> Int[np.ndarray, "T N"]:
    """Mini-batch steps ``[T, N]`` int64 of each client.

    Raises:
      UserError: a client has more samples to train on in an interval than int32 holds.
    """
    size = times.size.astype(np.int64)
    claimed = deliveries.claimed(times).astype(np.int64)
    samples = claimed * (size if iteration == "pass" else batch_size)
    if samples.max(initial=0) > INT32_MAX:
        t, place = np.unravel_index(samples.argmax(), samples.shape)
        i = times.client[t, place]
        raise UserError(
            f"client {i} does τ = {claimed[t, place]} local iterations in interval {t},"
            f" {samples[t, place]} samples; expected at most {INT32_MAX}; choose a "
            "smaller τ or fewer samples"
        )
    steps = local.steps_per_iteration(size, batch_size, iteration)
    return times.tau.astype(np.int64) * steps


# Arguments whose parts get a name in the table of this setting.
NAMED = {
    "framework": "timeline.framework",
    "uplink": "uplink.chain",
    "lr_schedule": "lr_schedule",
    "sampler": "cohort.sampler",
    "aggregator": "algorithm",
}


def adopted(config: Any, **custom: Any) -> tuple[Config, Custom]:
    """A validated config that names a user's own parts of `NAMED`, and the others.

    Args:
      config: all settings.
      **custom: fields of `Custom`, and those of `NAMED`. `aggregator` is a rule of
        `AGGREGATORS`, a component, whose values become settings, or a rule of
        functions, which gets a name only if it has settings.

    Raises:
      UserError: a setting that cannot work.
    """
    rule, arguments, named = custom.get("aggregator"), [*NAMED], {}
    if section := section_of(rule):
        if not isinstance(rule, type):
            named |= {f"{section}.{name}": value for name, value in vars(rule).items()}
            custom["aggregator"] = type(rule)
    elif isinstance(rule, Aggregator) and rule not in AGGREGATORS.values():
        sections = {*map(section_of, rule.sections)}
        arguments = [n for n in NAMED if n != "aggregator" or sections - SECTIONS]
    for argument in arguments:
        if (part := custom.pop(argument, None)) is not None:
            by, parts = NAMED[argument], part if type(part) in (list, tuple) else [part]
            names = []
            for one in parts:
                names.append(registry.named(by, one, names))
            named[by] = ",".join(names)
    config = replace(renewed(config), named)
    validate(config)
    return config, Custom(**custom)


def accepted(config: Any, **custom: Any) -> tuple[Config, Custom]:
    """A validated config of one run and the user's own parts, see `adopted`.

    Raises:
      UserError: a setting that cannot work, or that would be ignored.
    """
    config, parts = adopted(config, **custom)
    rule_settings.check_read([config], parts)
    return config, parts


def prepare(config: Config, **custom: Any) -> Prepared:
    """Validate a config, and draw and make everything of its experiment.

    Args:
      config: all settings.
      **custom: fields of `Custom`.

    Raises:
      UserError: a setting, file or data set that cannot work, in one line.
    """
    return prepare_validated(*accepted(config, **custom))


def prepare_validated(
    config: Config,
    custom: Custom,
    data_digest: str = "",
    traced: dict[str, Network] | None = None,
) -> Prepared:
    """Draw and make everything of a validated config; raises as `prepare`.

    Args:
      config: all settings, from `adopted`.
      custom: the user's own parts, likewise.
      data_digest: that of ``custom.dataset``, which was checked then; "": neither.
      traced: networks of experiments with the same custom parts, see `network_of`.
    """
    config = configs.filled(config)
    rule, uplinks = rule_settings.rule_of(config, custom), chain_of(config)
    rule_settings.check(config, rule, custom)
    loaded, digest, custom_digest = _data_of(config, custom.dataset, data_digest)
    fixed = splits.fix_samples(config, custom.partition, loaded)
    network = network_of(config, loaded, custom, traced)
    network, start = trained.started(config.model, custom.params, network)
    hparams = hparams_of(config, rule)
    _link_states(uplinks, network, hparams)  # each link checks the network
    sent = network.params, hparams, config.num_intervals, config.model.frozen
    down, up = traffic_of(uplinks, rule, *sent).mean(axis=1).tolist()  # of a transfer
    workload = draw_workload(config, fixed.num_samples, fixed.scores, (down, up))
    times = workload.schedule
    steps = _steps(times, config.batch_size, config.schedule.iteration)
    hparams = hparams._replace(lr_total=jnp.float32(len(times.tau)))
    privacy, hparams = account(config, rule, workload, network, hparams)
    split, dataset, tested = _split_of(config, loaded, fixed, workload, network)
    digest = digest if dataset is loaded else ""
    mapping, mapping_notes = _mapping_of(config, network, steps)
    metrics = dict(network.model.metrics)
    return Prepared(
        config=config,
        dataset=dataset,
        partition=split,
        workload=workload,
        steps=steps,
        network=network,
        rule=rule,
        optimizer=optimizers.as_factory(custom.optimizer),
        hooks=custom_hooks.checked(custom, dataset, config.batch_size),
        uplinks=uplinks,
        hparams=hparams,
        mapping=mapping,
        held_out=fixed.held_out,
        tested=tested,
        custom=custom._replace(dataset=None, params=None, metrics=metrics),
        custom_data=custom_digest,
        fingerprints=_fingerprints(dataset, digest, split, fixed.held_out, tested)
        | schedule_fingerprints(times, config.timeline)
        | (start or custom_hooks.start_of(custom.model)),
        notes=(*times.notes, *split.notes)
        + splits.small_clients(config.batch_size, workload.num_samples)
        + rule_settings.notes(config, rule, times)
        + (*network.notes, *mapping_notes),
        privacy=privacy,
    )


def _split_of(
    config: Config,
    loaded: Dataset,
    fixed: splits.FixedSamples,
    workload: Workload,
    network: Network,
) -> tuple[Partition, Dataset, ClientTest | None]:
    """Who holds which samples, these as the clients have them, and who is scored."""
    drawn, capacity = workload.drawn, workload.num_samples.astype(np.int32)
    among, seed = drawn if config.cohort.size else None, seeds_of(config).split
    split = splits.draw_split(config.partition, loaded, fixed, capacity, seed, among)
    dataset = skew.skewed(loaded, split, config.partition, seed)
    attack = workload.attackers, config.attack, loaded.x_train.max()
    dataset, split = poison.poisoned(dataset, split, *attack)
    number, tested = config.evaluation.number, None
    if config.evaluation.clients == "labels":
        classifies = network.model.classifies
        tested = client_test.by_labels(dataset, split, drawn, classifies, number)
    elif config.evaluation.clients == "own":
        # Clients that never work have no layers of their own.
        is_personal = any(link.is_personal for link in chain_of(config))
        owners = drawn if is_personal else np.arange(config.num_clients)
        tested = client_test.by_owner(dataset, owners, number)
    return split, dataset, tested


def _data_of(
    config: Config, custom: Dataset | None, digest: str = ""
) -> tuple[Dataset, str, str]:
    """The samples, their digest, "": not computed, and again if they are custom."""
    if custom is None:
        return load_dataset(config), "", ""
    dataset = custom if digest else in_memory.check(custom)
    digest = digest or data.digest(dataset)
    is_custom = rule_settings.is_custom_data(config.data, custom)
    return dataset, digest, digest if is_custom else ""


def _link_states(uplinks: Chain, network: Network, hparams: HParams) -> tuple:
    """Shapes of what the links keep for a client."""
    return jax.eval_shape(lambda p: chain.init(uplinks, p, hparams), network.params)


def _fingerprints(
    dataset: Dataset,
    digest: str,
    split: Partition,
    held_out: Int[np.ndarray, "V"],
    tested: ClientTest | None,
) -> dict[str, str]:
    """Digests of the samples by what they are; `digest` of the data, if it is known."""
    classes = np.asarray(dataset.num_classes, np.int64)
    digests = {
        "data": digest or data.digest(dataset),
        "scale": data.fingerprint(dataset.mean, dataset.std, classes),
        "split": data.fingerprint(split.indices, split.capacity),
    }
    # What only some runs have.
    if tested and tested.group is not None:
        digests["client tests"] = data.fingerprint(tested.group)
    if len(held_out):
        digests["validation"] = data.fingerprint(held_out)
    return digests


def schedule_fingerprints(times: Schedule, settings: Any) -> dict[str, str]:
    """Digests of a schedule; of its times where `settings` name files with speeds."""
    drawn = [times.tau, times.size]
    drawn += [] if times.in_order else [times.client]
    drawn += [*times.delivery] if times.snapshots else []
    drawn += [times.reported] if (times.reported >= 0).any() else []
    drawn += [a for a in (times.threshold, times.share) if not np.isnan(a).all()]
    digests = {"schedule": data.fingerprint(*drawn, *(times.lots or ()))}
    if settings.speeds or settings.availability:
        digests["times"] = data.fingerprint(times.seconds)
    return digests


def evaluated(prepared: Prepared) -> Bool[np.ndarray, "T"]:
    """After which updates the model is tested, ``[T]`` bool; always after the last."""
    config = prepared.config
    if config.timeline.framework != "none":
        period = config.eval_every * config.schedule.interval_seconds
        return deliveries.evaluated(prepared.workload.schedule.seconds, period)
    intervals = np.arange(1, config.num_intervals + 1)
    return (intervals % config.eval_every == 0) | (intervals == config.num_intervals)


def counts_of(prepared: Prepared) -> Counts:
    """Counts that shape a rule's state."""
    config = prepared.config
    framework = FRAMEWORKS.get(config.timeline.framework)
    tiers = 1 + int(prepared.workload.schedule.delivery.group.max(initial=0))
    if framework is not None and "timeline.tiers" in framework.settings:
        tiers = config.timeline.tiers  # one may never deliver
    return Counts(len(prepared.partition.capacity), tiers)


def drawn_bytes(config: Config) -> int:
    """A lower bound on the host memory of an experiment's draws, in bytes."""
    s, N = config.schedule, config.cohort.slots(config.num_clients)
    if config.timeline.framework != "none":
        return 0  # not known before
    size = 0 if s.size_groups or s.kind == "trace" else s.data_size
    return 12 * config.num_intervals * N + 2 * N * size  # τ, sizes, steps; indices


def data_key(config: Config) -> str:
    """A text that differs where `load_dataset` would load other data."""
    name, values = config.data.name, (config.data, config.quadratic)
    row = DATASETS[name]
    if "data.shape" in row.reads or not registry.is_taken("data.name", name):
        values += (config.seed,)  # drawn, not loaded
    if row.make is None:  # drawn for the clients
        values += (config.num_clients, config.schedule.data_size, config.batch_size)
    return str(values)


_OF_SINGLE_RUNS = ("stop.at", "stop.patience")


def prepare_all(configs: list[Config], custom: Custom | None = None) -> list[Prepared]:
    """Prepare several validated configs; those with the same data share one copy."""
    custom = custom or Custom()
    for name in _OF_SINGLE_RUNS:
        if any(get(config, name) for config in configs):
            raise UserError(
                f"--config.{name}: ends single runs; all runs of a sweep go to "
                "num_intervals, and its tables have the time to a target"
            )
    rule_settings.check_read(configs, custom)
    shared: dict[str, tuple[Dataset, str]] = {}
    traced: dict[str, Network] = {}
    datasets: dict[tuple[str, str], Dataset] = {}
    runs = []
    for config in configs:
        key = data_key(config) if custom.dataset is None else ""
        if key not in shared:
            dataset, digest, _ = _data_of(config, custom.dataset)
            shared[key] = dataset, digest or data.digest(dataset)
        dataset, digest = shared[key]
        parts = custom._replace(dataset=dataset)
        run = prepare_validated(config, parts, digest, traced)
        # Poisoned ones, too, which runs have made anew.
        digest = key, run.fingerprints["data"]
        dataset = datasets.setdefault(digest, run.dataset)
        runs.append(run._replace(dataset=dataset))
    return runs
