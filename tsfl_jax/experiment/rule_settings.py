"""Whether a rule fits its settings, schedule and optimizer, before a run.

Which settings a rule reads is declared beside it, `Aggregator.sections`.
"""

import dataclasses
from typing import Any

import optax

from tsfl_jax import components
from tsfl_jax.components import listed, section_of
from tsfl_jax.config import SETTINGS, Config, get
from tsfl_jax.engine import optimizers
from tsfl_jax.experiment.custom_hooks import Own
from tsfl_jax.rules import AGGREGATORS, SECTIONS
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.rules.oracle import Oracle
from tsfl_jax.timeline import FRAMEWORKS, readers
from tsfl_jax.types import HParams, Params, Schedule, UserError


def rule_of(config: Config, own: Own) -> Aggregator:
    """The rule of a run: the user's own, or that of the table."""
    return own.aggregator or AGGREGATORS[config.algorithm]


def sections(config: Config, rule: Aggregator) -> tuple[type, ...]:
    """The components whose settings reach the program."""
    return rule.sections + (Oracle,) * (
        config.measure_regret and Oracle not in rule.sections
    )


def arrays(config: Config, kinds: tuple[type, ...]) -> dict[str, Any]:
    """The settings of these components as arrays, by section."""
    names = map(section_of, kinds)
    return {name: components.arrays(getattr(config, name)) for name in names}


def needs_constants(config: Config, rule: Aggregator) -> bool:
    """Whether L, G² and σ² have a part in this run."""
    if config.measure_clients or not rule.uses_constants:
        return config.measure_clients
    return not rule.needs_none(HParams(settings=arrays(config, rule.sections)))


def _readers() -> dict[str, tuple[str, list[str]]]:
    """Setting of a component → the setting that chooses it, and by which names."""
    users = {
        section: [n for n, rule in AGGREGATORS.items() if kind in rule.sections]
        for section, kind in SECTIONS.items()
    }
    users["constants"] = [n for n, r in AGGREGATORS.items() if r.uses_constants]
    sections = {name: name.partition(".")[0] for name in SETTINGS}
    return {n: ("algorithm", users[s]) for n, s in sections.items() if s in users} | {
        name: ("timeline.framework", by) for name, by in readers().items()
    }


def unread(config: Config, rule: Aggregator) -> set[str]:
    """Settings of components that were not chosen."""
    mine = {section_of(kind) for kind in sections(config, rule)}
    mine |= {"constants"} if rule.uses_constants or config.measure_clients else set()
    framework = FRAMEWORKS.get(config.timeline.framework)
    there = () if framework is None else framework.settings
    return {
        name
        for name, (chosen_by, _) in _readers().items()
        if name.partition(".")[0] not in mine
        and (chosen_by == "algorithm" or name not in there)
    }


def check_read(configs: list[Config], own: Own) -> None:
    """Refuse a changed setting of a component that no run has chosen.

    Args:
      configs: of one run, or of all runs of a sweep.
      own: parts of the user's own.

    Raises:
      UserError: a setting that is not at its default and would be ignored.
    """
    default, read, ignored = Config(), set(), {}
    known = _readers()
    for config in configs:
        changed = {n for n in known if get(config, n) != get(default, n)}
        left = changed & unread(config, rule_of(config, own)) if changed else changed
        read |= changed - left
        ignored |= {name: config for name in left}
    for name in (n for n in known if n in ignored and n not in read):
        config, (by, names) = ignored[name], known[name]
        chosen = f"--config.{by}={get(config, by)}"
        if by == "algorithm" and own.aggregator is not None:
            chosen = "aggregator="
        raise UserError(
            f"--config.{name}={get(config, name)}: would be ignored with {chosen}; it "
            f"belongs to {listed(names)}"
        )


def check(config: Config, rule: Aggregator) -> None:
    """Check that what a rule reads fits the other settings.

    Raises:
      UserError: it does not.
    """
    for kind in sections(config, rule):
        own = getattr(config, section_of(kind))
        getattr(own, "check", lambda config, rule: None)(config, rule)
    values = dataclasses.asdict(config.constants)
    names = ("smoothness", "grad_sq_norm", "grad_variance")
    missing = [f"--config.constants.{name}" for name in names if values[name] < 0]
    if values["when"] == "given" and missing and needs_constants(config, rule):
        raise UserError(
            f"--config.constants.when=given: {listed(missing)} is not given; give it, "
            "or choose once or interval"
        )


def check_validation(config: Config, rule: Aggregator) -> None:
    """Check that there are validation samples where some are used.

    Raises:
      UserError: there are none.
    """
    if not config.data.validation:
        reason = ""
        if rule.uses_validation:
            reason = f"--config.algorithm={config.algorithm} chooses its weights"
        if config.measure_regret:
            reason = "--config.measure_regret=True measures"
        if reason:
            raise UserError(
                f"--config.data.validation=0: {reason} on samples that no client "
                "holds; hold some out, as --config.data.validation=500"
            )


def check_training(config: Config, rule: Aggregator, given: bool) -> None:
    """Check that clients without weight can be left untrained.

    Args:
      config: all settings.
      rule: of the run.
      given: whether it is the user's own.

    Raises:
      UserError: something needs the models of all clients.
    """
    if config.train_all or not (rule.stacks or config.measure_regret):
        return
    what = "aggregator=" if given else f"--config.algorithm={config.algorithm}"
    if config.measure_regret:
        what = "--config.measure_regret=True"
    raise UserError(
        f"--config.train_all=False: {what} needs the models of all clients; leave one "
        "of them out"
    )


def _refuse(config: Config, names: tuple[str, ...], why: str) -> None:
    """Raise `UserError` for the first of these settings that is not its default."""
    for name in names:
        value = get(config, name)
        if value != get(Config(), name):
            raise UserError(f"--config.{name}={value}: would be ignored{why}")


def notes(config: Config, rule: Aggregator, times: Schedule) -> tuple[str, ...]:
    """What a rule does with this schedule that its settings do not say.

    Raises:
      UserError: a rule that cannot work with so few clients per update.
    """
    found = ()
    for kind in rule.sections:
        own = getattr(config, section_of(kind))
        found += getattr(own, "notes", lambda *given: ())(config, rule, times)
    return found


def check_given_partition(config: Config) -> None:
    """Check that no setting asks for sizes or samples that are given.

    Raises:
      UserError: one does.
    """
    _refuse(
        config,
        ("schedule.data_size", "schedule.size_groups", "partition.iid_share"),
        ", since each client's samples are given (partition= or "
        "--config.partition.kind=client); leave it out",
    )
    if config.partition.online:
        raise UserError(
            "--config.partition.online=True: draws samples anew, but each client's "
            "are given; leave it out"
        )


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
    if own.aggregator or rule.uses_constants or rule.uses_gradients:
        read |= {"lr"}  # by the rule
    found = ()
    for name in changed:
        if made and name != "lr" and get(config, name):
            _refuse(
                config,
                (name,),
                ", since optimizer= is made already; leave it out, or give a function "
                "of HParams, like lambda h: optax.sgd(h.lr, h.momentum)",
            )
        if _OF_SGD[name] not in read:
            value = get(config, name)
            found += (f"{name}={value} has no effect: optimizer= does not read it",)
    return found


def check_steps(config: Config, rule: Aggregator, own: Own) -> None:
    """Check that a rule can do with clients whose steps it does not know.

    Raises:
      UserError: it knows what SGD does and counts on it.
    """
    given = [n for n in ("optimizer", "client_step") if getattr(own, n) is not None]
    if rule.counts_on_sgd and given:
        raise UserError(
            f"--config.algorithm={config.algorithm}: it is made for the steps of the "
            f"package's own SGD; leave out {given[0]}="
        )
