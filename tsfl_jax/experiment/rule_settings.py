"""Whether the chosen components fit each other and the schedule, before a run.

Which settings a component reads is declared beside it, in its folder's table.
"""

from collections.abc import Iterable
from typing import Any

from tsfl_jax import components
from tsfl_jax import config as settings
from tsfl_jax.components import Part, declared, listed, section_of
from tsfl_jax.config import COMMON, READERS, Config, chosen_parts, get
from tsfl_jax.data.builtin import DATASETS
from tsfl_jax.data.partition import PARTITIONS
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.engine import optimizers
from tsfl_jax.experiment import weighting
from tsfl_jax.experiment.custom_hooks import Custom
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.rules.oracle import Oracle
from tsfl_jax.sections import ConstantsConfig
from tsfl_jax.types import Dataset, HParams, Params, Schedule, UserError
from tsfl_jax.uplink import chain_of
from tsfl_jax.uplink.base import Uplink


def rule_of(config: Config, custom: Custom) -> Aggregator:
    """The rule of a run: the user's own, or that of the table."""
    rule = custom.aggregator or AGGREGATORS[config.algorithm]
    return weighting.applied(config.cohort.weighting, rule, config.algorithm)


def sections(config: Config, rule: Aggregator) -> tuple[type, ...]:
    """The components whose settings reach the program."""
    links = (link.section for link in chain_of(config) if link.section)
    measured = (Oracle,) * (config.measure_regret and Oracle not in rule.sections)
    return (*rule.sections, *measured, *links)


def arrays(config: Config, kinds: tuple[type, ...]) -> dict[str, Any]:
    """The settings of these components as arrays, by section."""
    return {
        section_of(kind): components.arrays(
            components.narrowed(getattr(config, section_of(kind)), kind)
        )
        for kind in kinds
    }


def needs_constants(config: Config, rule: Aggregator) -> bool:
    """Whether L, G² and σ² have a part in this run."""
    if config.measure_clients or not rule.mixing.uses_constants:
        return config.measure_clients
    hparams = HParams(settings=arrays(config, rule.sections))
    return not rule.mixing.skips_constants(hparams)


# What chooses a component → the argument that gives one's own instead, and what that
# still reads.
_CUSTOM = {
    "algorithm": ("aggregator", Part()),
    "data.name": ("dataset", Part(reads=("data.validation",))),
    "partition.kind": ("partition", PARTITIONS["client"]),
    "model.name": (
        "model",
        Part(
            reads=("model.params", "model.frozen", "model.local", "model.local_period")
        ),
    ),
    "cohort.sampler": ("sampler", Part()),
}


def is_custom_data(settings: DataConfig, dataset: Dataset | None) -> bool:
    """Whether a user's samples are others than those that the settings name."""
    # Data that are drawn for the clients: the model has their settings, too.
    is_drawn = DATASETS[settings.name].make is None
    is_loaded = is_drawn or getattr(dataset, "source", "") == str(settings)
    return dataset is not None and not is_loaded


def _replaced(config: Config, custom: Custom) -> dict[str, tuple[str, Part]]:
    """Those of `_CUSTOM` that a user replaces."""
    is_replaced = {n: part is not None for n, part in custom._asdict().items()}
    is_replaced["dataset"] = is_custom_data(config.data, custom.dataset)
    return {by: row for by, row in _CUSTOM.items() if is_replaced[row[0]]}


def unread(config: Config, custom: Custom) -> dict[str, str]:
    """Settings of components that were not chosen → the setting that chooses."""
    parts = {by: part for by, (_, part) in _replaced(config, custom).items()}
    rule = rule_of(config, custom)
    kinds = sections(config, rule) + (ConstantsConfig,) * config.measure_clients
    parts["algorithm"] = Part(reads=rule.reads, sections=kinds)
    return settings.unread(config, parts)


def check_read(configs: list[Config], custom: Custom) -> None:
    """Refuse a changed setting of a component that no run has chosen.

    Args:
      configs: of one run, or of all runs of a sweep.
      custom: parts of the user's own.

    Raises:
      UserError: a setting that is not at its default and would be ignored.
    """
    read, ignored = set(), {}
    for config in configs:
        changed = _changed(config, READERS)
        left = unread(config, custom) if changed else {}
        read |= changed - {*left}
        ignored |= {name: config for name in changed & {*left}}
    for name in (n for n in READERS if n in ignored and n not in read):
        config = ignored[name]
        by = unread(config, custom)[name]
        replaced, values = _replaced(config, custom), READERS[name][by]
        chosen = f"--config.{by}={get(config, by)}"
        chosen = f"{replaced[by][0]}=" if by in replaced else chosen
        way = "give that another value"
        if values:
            way = f"it belongs to {listed([v or 'an empty one' for v in values])}"
        flag = f"--config.{name}={get(config, name)}"
        raise UserError(f"{flag}: would be ignored with {chosen}; {way}")


def _changed(config: Config, names: Iterable[str]) -> set[str]:
    """Those settings that are not at their defaults."""
    default = Config()
    values = {n: get(config, n) for n in names}
    values = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
    return {n for n, value in values.items() if value != get(default, n)}


def check(config: Config, rule: Aggregator) -> None:
    """Check that the settings of the chosen components go together.

    Raises:
      UserError: they do not.
    """
    parts = chosen_parts(config)
    del parts["algorithm"]
    chosen = [kind for part in parts.values() for kind in part.sections]
    kinds: list[Any] = [*COMMON, *chosen, *sections(config, rule)]
    for kind in kinds:
        if hasattr(kind, "check"):
            kind.check(getattr(config, section_of(kind)), config, rule)
    missing = [
        f"--config.constants.{name}"
        for name in ("smoothness", "grad_sq_norm", "grad_variance")
        if getattr(config.constants, name) < 0
    ]
    is_given = config.constants.when == "given"
    if is_given and missing and needs_constants(config, rule):
        raise UserError(
            f"--config.constants.when=given: {listed(missing)} is not given; give it, "
            "or choose once or interval"
        )


def check_needs(config: Config, rule: Aggregator, custom: Custom) -> None:
    """Check that the rule and what is measured get what they need.

    Raises:
      UserError: no validation samples, untrained clients, local layers, test samples of
        clients, or steps other than those of SGD, where something needs the contrary.
    """
    regret, leave_one = "--config.measure_regret=True", "leave one of them out"
    algorithm = "aggregator=" if custom.aggregator else ""
    algorithm = algorithm or f"--config.algorithm={config.algorithm}"
    cause = regret if config.measure_regret else algorithm
    if not config.data.validation and (
        rule.mixing.uses_validation or config.measure_regret
    ):
        raise UserError(
            f"--config.data.validation=0: {cause} needs samples that no client holds; "
            "hold some out, as --config.data.validation=500"
        )
    if not config.train_all and (rule.stacks or config.measure_regret):
        raise UserError(
            f"--config.train_all=False: {cause} needs the models of all clients; "
            f"{leave_one}"
        )
    keeping = [link for link in chain_of(config) if link.keeps_variables]
    for name in _asking(config, rule, keeping) if keeping else ():
        is_score = name == "evaluation.clients"
        way = "score the clients' models: labels or own" if is_score else leave_one
        keeps = next(n for n in declared(keeping[0].section) if get(config, n))
        raise UserError(
            f"--config.{name}={get(config, name)} with --config.{keeps}="
            f"{get(config, keeps)}: the global model's local layers are not trained, "
            f"so that it says nothing alone; {way}"
        )
    has_owners = config.partition.kind == "client" or custom.partition is not None
    if config.evaluation.clients == "own" and not has_owners:
        raise UserError(
            f"--config.evaluation.clients=own: with --config.partition.kind="
            f"{config.partition.kind} clients train on other samples than those that "
            "belong to them; choose --config.partition.kind=client, or labels"
        )
    steps = [n for n in ("optimizer", "client_step") if getattr(custom, n) is not None]
    if not custom.aggregator and rule.clients.counts_on_sgd and steps:
        raise UserError(
            f"{algorithm}: it is made for the steps of the package's own SGD; leave "
            f"out {steps[0]}="
        )


def _asking(config: Config, rule: Aggregator, links: list[Uplink]) -> list[str]:
    """Settings that score or differentiate the global model, without local layers."""
    estimates = config.constants.when == "interval"
    asks = {
        "evaluation.clients": any(link.is_personal for link in links)
        and config.evaluation.clients == "none",
        "train_all": not config.train_all,
        "measure_regret": config.measure_regret,
        "measure_clients": config.measure_clients,
        "cohort.sampler": config.cohort.choice is not None,
        "algorithm": rule.mixing.uses_validation or rule.mixing.uses_gradients,
        "constants.when": estimates and needs_constants(config, rule),
    }
    return [name for name, on in asks.items() if on]


def notes(config: Config, rule: Aggregator, times: Schedule) -> tuple[str, ...]:
    """What a rule does with this schedule that its settings do not say.

    Raises:
      UserError: a rule that cannot work with so few clients per update.
    """
    lines = ()
    for kind in sections(config, rule):
        if hasattr(kind, "notes"):
            values = getattr(config, section_of(kind))
            lines += kind.notes(values, config, rule, times)
    return lines


# Settings that only the package's own SGD is sure to read → the hyper-parameter.
_OF_SGD = {n: n for n in ("momentum", "clip_norm", "lr")} | {"lr_schedule": "lr"}


def optimizer_notes(
    config: Config, custom: Custom, rule: Aggregator, hparams: HParams, params: Params
) -> tuple[str, ...]:
    """Notes on settings of SGD that a user's own optimizer does not read."""
    changed = _changed(config, _OF_SGD)
    if custom.optimizer is None or custom.client_step is not None or not changed:
        return ()
    factory = optimizers.as_factory(custom.optimizer)
    read = optimizers.check(factory, hparams, params)
    if custom.aggregator or rule.mixing.uses_constants or rule.mixing.uses_gradients:
        read |= {"lr"}  # by the rule
    return tuple(
        f"{name}={get(config, name)} has no effect: optimizer= does not read it"
        for name, field in _OF_SGD.items()
        if name in changed and field not in read
    )
