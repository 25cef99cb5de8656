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
from tsfl_jax.prepare import weighting
from tsfl_jax.prepare.custom_hooks import Custom
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.rules.oracle import Oracle
from tsfl_jax.sections import ConstantsConfig
from tsfl_jax.types import Constants, Dataset, HParams, Schedule, UserError, user_code
from tsfl_jax.uplink import chain_of


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
        section: components.arrays(components.narrowed(getattr(config, section), kind))
        for section, kind in settings.by_section(kinds).items()
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


def check(config: Config, rule: Aggregator, custom: Custom) -> None:
    """Check that the chosen components go together and get what they need.

    Raises:
      UserError: settings that do not; no validation samples, untrained clients, local
        layers, test samples of clients, or steps other than those of SGD, where
        something needs the contrary.
    """
    parts = chosen_parts(config)
    del parts["algorithm"]
    chosen = [kind for part in parts.values() for kind in part.sections]
    kinds: list[Any] = [*COMMON, *chosen, *sections(config, rule)]
    for kind in kinds:
        if hasattr(kind, "check"):
            with user_code(f"{kind.__name__}.check fails", "mend the component"):
                kind.check(getattr(config, section_of(kind)), config, rule)
    missing = [
        f"--config.constants.{name}"
        for name in Constants._fields
        if getattr(config.constants, name) < 0
    ]
    is_given = config.constants.when == "given"
    if is_given and missing and needs_constants(config, rule):
        raise UserError(
            f"--config.constants.when=given: {listed(missing)} is not given; give it, "
            "or choose once or interval"
        )
    _check_needs(config, rule, custom)


def _check_needs(config: Config, rule: Aggregator, custom: Custom) -> None:
    """Check that the rule and what is measured get what they need."""
    regret, scores = config.measure_regret, config.evaluation.clients
    algorithm = f"--config.algorithm={config.algorithm}"
    algorithm = "aggregator=" if custom.aggregator else algorithm
    cause = "--config.measure_regret=True" if regret else algorithm
    has_owners = config.partition.kind == "client" or custom.partition is not None
    conflicts = [
        (
            "data.validation",
            not config.data.validation and (rule.mixing.uses_validation or regret),
            f"{cause} needs samples that no client holds; hold some out, such as 500",
        ),
        (
            "train_all",
            not config.train_all and (rule.stacks or regret),
            f"{cause} needs the models of all clients; leave one of them out",
        ),
        (
            "evaluation.clients",
            scores == "own" and not has_owners,
            f"with --config.partition.kind={config.partition.kind} clients train on "
            "other samples than those that belong to them; choose "
            "--config.partition.kind=client, or labels",
        ),
    ]
    if links := [link for link in chain_of(config) if link.keeps_variables]:
        estimates = config.constants.when == "interval"
        keeps = next(n for n in declared(links[0].section) if get(config, n))
        reason = (
            f"with --config.{keeps}={get(config, keeps)} the global model's local "
            "layers are not trained, so that it says nothing alone; leave one of them "
            "out, or score the clients' models: labels or own"
        )
        is_personal = any(link.is_personal for link in links)
        asks_global_model = {
            "evaluation.clients": is_personal and scores == "none",
            "train_all": not config.train_all,
            "measure_regret": regret,
            "measure_clients": config.measure_clients,
            "cohort.sampler": config.cohort.choice is not None,
            "algorithm": rule.mixing.uses_validation or rule.mixing.uses_gradients,
            "constants.when": estimates and needs_constants(config, rule),
        }
        conflicts += [(name, asks, reason) for name, asks in asks_global_model.items()]
    for name, is_conflict, reason in conflicts:
        if is_conflict:
            raise UserError(f"--config.{name}={get(config, name)}: {reason}")
    steps = [n for n in ("optimizer", "client_step") if getattr(custom, n) is not None]
    if not custom.aggregator and rule.clients.counts_on_sgd and steps:
        raise UserError(
            f"{algorithm}: it is made for the steps of the package's own SGD; leave "
            f"out {steps[0]}="
        )


def notes(config: Config, rule: Aggregator, times: Schedule) -> tuple[str, ...]:
    """What the chosen components say of this run, which their settings do not.

    Raises:
      UserError: a rule that cannot work with so few clients per update.
    """
    lines = []
    for kind in sections(config, rule):
        if hasattr(kind, "notes"):
            values: Any = getattr(config, section_of(kind))
            with user_code(f"{kind.__name__}.notes fails", "mend the component"):
                lines += kind.notes(values, config, rule, times)
    return tuple(lines)
