"""Whether the chosen components fit each other and the schedule, before a run.

Which settings a component reads is declared beside it, in its folder's table.
"""

import dataclasses
from typing import Any

import optax

from tsfl_jax import components
from tsfl_jax import config as settings
from tsfl_jax.components import Part, declared, listed, section_of
from tsfl_jax.config import COMMON, READERS, Config, chosen_parts, get
from tsfl_jax.data.builtin import DATASETS
from tsfl_jax.data.partition import PARTITIONS
from tsfl_jax.engine import optimizers
from tsfl_jax.experiment import weighting
from tsfl_jax.experiment.custom_hooks import Own
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.rules.oracle import Oracle
from tsfl_jax.sections import ConstantsConfig
from tsfl_jax.types import HParams, Params, Schedule, UserError
from tsfl_jax.uplink import chain_of
from tsfl_jax.uplink.base import Uplink


def rule_of(config: Config, own: Own) -> Aggregator:
    """The rule of a run: the user's own, or that of the table."""
    return weighting.applied(config, own.aggregator or AGGREGATORS[config.algorithm])


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
_GIVEN = {
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


def is_own_data(config: Config, own: Own) -> bool:
    """Whether `own` has other samples than those that the settings name."""
    # Data that are drawn for the clients: the model has their settings, too.
    drawn = DATASETS[config.data.name].make is None
    loaded = drawn or getattr(own.dataset, "source", "") == str(config.data)
    return own.dataset is not None and not loaded


def _given(config: Config, own: Own) -> dict[str, tuple[str, Part]]:
    found = {by: g for by, g in _GIVEN.items() if getattr(own, g[0]) is not None}
    if not is_own_data(config, own):
        found.pop("data.name", None)
    return found


def unread(config: Config, own: Own) -> dict[str, str]:
    """Settings of components that were not chosen → the setting that chooses."""
    parts = {by: part for by, (_, part) in _given(config, own).items()}
    rule = rule_of(config, own)
    several = sections(config, rule) + (ConstantsConfig,) * config.measure_clients
    parts["algorithm"] = Part(reads=rule.reads, sections=several)
    return settings.unread(config, parts)


def check_read(configs: list[Config], own: Own) -> None:
    """Refuse a changed setting of a component that no run has chosen.

    Args:
      configs: of one run, or of all runs of a sweep.
      own: parts of the user's own.

    Raises:
      UserError: a setting that is not at its default and would be ignored.
    """
    default, read, ignored = Config(), set(), {}
    for config in configs:
        changed = {n for n in READERS if _differs(get(config, n), get(default, n))}
        left = unread(config, own) if changed else {}
        read |= changed - {*left}
        ignored |= {name: config for name in changed & {*left}}
    for name in (n for n in READERS if n in ignored and n not in read):
        config = ignored[name]
        by = unread(config, own)[name]
        chosen, values = f"--config.{by}={get(config, by)}", READERS[name][by]
        given = _given(config, own)
        chosen = f"{given[by][0]}=" if by in given else chosen
        way = "give that another value"
        if values:
            way = f"it belongs to {listed([v or 'an empty one' for v in values])}"
        mine = f"--config.{name}={get(config, name)}"
        raise UserError(f"{mine}: would be ignored with {chosen}; {way}")


def _differs(value: object, default: object) -> bool:
    return (tuple(value) if isinstance(value, list) else value) != default


def check(config: Config, rule: Aggregator) -> None:
    """Check that the settings of the chosen components go together.

    Raises:
      UserError: they do not.
    """
    parts = chosen_parts(config)
    del parts["algorithm"]
    chosen = [kind for part in parts.values() for kind in part.sections]
    for kind in (*COMMON, *chosen, *sections(config, rule)):
        own = getattr(config, section_of(kind))
        getattr(kind, "check", lambda own, config, rule: None)(own, config, rule)
    values = dataclasses.asdict(config.constants)
    names = ("smoothness", "grad_sq_norm", "grad_variance")
    missing = [f"--config.constants.{name}" for name in names if values[name] < 0]
    if values["when"] == "given" and missing and needs_constants(config, rule):
        raise UserError(
            f"--config.constants.when=given: {listed(missing)} is not given; give it, "
            "or choose once or interval"
        )


def check_needs(config: Config, rule: Aggregator, own: Own) -> None:
    """Check that the rule and what is measured get what they need.

    Raises:
      UserError: no validation samples, untrained clients, local layers, or steps other
        than those of SGD, where something needs the contrary.
    """
    regret, leave_one = "--config.measure_regret=True", "leave one of them out"
    chosen = f"--config.algorithm={config.algorithm}"
    chosen = chosen if own.aggregator is None else "aggregator="
    uses_validation = rule.mixing.uses_validation or config.measure_regret
    if uses_validation and not config.data.validation:
        reason = f"{chosen} chooses its weights"
        reason = f"{regret} measures" if config.measure_regret else reason
        raise UserError(
            f"--config.data.validation=0: {reason} on samples that no client holds; "
            "hold some out, as --config.data.validation=500"
        )
    if not config.train_all and (rule.stacks or config.measure_regret):
        what = regret if config.measure_regret else chosen
        raise UserError(
            f"--config.train_all=False: {what} needs the models of all clients; "
            f"{leave_one}"
        )
    keeping = [link for link in chain_of(config) if link.keeps_variables]
    for name in _asking(config, rule, keeping) if keeping else ():
        is_score = name == "evaluation.clients"
        way = "score the clients' models: labels or own" if is_score else leave_one
        cause = next(n for n in declared(keeping[0].section) if get(config, n))
        raise UserError(
            f"--config.{name}={get(config, name)} with --config.{cause}="
            f"{get(config, cause)}: the global model's local layers are not trained, "
            f"so that it says nothing alone; {way}"
        )
    changed = [n for n in ("optimizer", "client_step") if getattr(own, n) is not None]
    if own.aggregator is None and rule.clients.counts_on_sgd and changed:
        raise UserError(
            f"{chosen}: it is made for the steps of the package's own SGD; leave out "
            f"{changed[0]}="
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
    found = ()
    for kind in sections(config, rule):
        own = getattr(config, section_of(kind))
        found += getattr(own, "notes", lambda *given: ())(config, rule, times)
    return found


# Settings that only the package's own SGD is sure to read → the hyper-parameter.
_OF_SGD = {n: n for n in ("momentum", "clip_norm", "lr")} | {"lr_schedule": "lr"}


def optimizer_notes(
    config: Config, own: Own, rule: Aggregator, hparams: HParams, params: Params
) -> tuple[str, ...]:
    """Notes on settings of SGD that a user's own optimizer does not read.

    Raises:
      UserError: it is made already, and one asks for what it does not do.
    """
    changed = [name for name in _OF_SGD if get(config, name) != get(Config(), name)]
    if own.optimizer is None or own.client_step is not None or not changed:
        return ()
    made = isinstance(own.optimizer, optax.GradientTransformation)
    read = optimizers.check(optimizers.as_factory(own.optimizer), hparams, params)
    if own.aggregator or rule.mixing.uses_constants or rule.mixing.uses_gradients:
        read |= {"lr"}  # by the rule
    found = ()
    for name in changed:
        if made and name != "lr" and get(config, name):
            raise UserError(
                f"--config.{name}={get(config, name)}: would be ignored, since "
                "optimizer= is made already; leave it out, or give a function of "
                "HParams, like lambda h: optax.sgd(h.lr, h.momentum)"
            )
        if _OF_SGD[name] not in read:
            value = get(config, name)
            found += (f"{name}={value} has no effect: optimizer= does not read it",)
    return found
