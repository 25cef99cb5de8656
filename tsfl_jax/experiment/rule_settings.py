"""Whether a rule fits its settings, schedule and optimizer, before a run.

What a rule reads is declared beside it, see `rules.base.Settings`.
"""

import functools

import jax
import numpy as np
import optax

from tsfl_jax.config import SETTINGS, Config, get
from tsfl_jax.engine import client as local
from tsfl_jax.engine import optimizers
from tsfl_jax.experiment.own_hooks import Own
from tsfl_jax.rules import AGGREGATORS, local_work
from tsfl_jax.rules.averages import normalized_by_work
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.rules.staleness import staleness_factor
from tsfl_jax.timeline import FRAMEWORKS, readers, replay
from tsfl_jax.types import HParams, Params, Schedule, UserError, nearest
from tsfl_jax.validate import check_name, check_used, listed
from tsfl_jax.validate import validate as validate_settings


def validate(config: Config) -> None:
    """Check all settings that can be checked without data, the rule's name included.

    Raises:
      UserError: one line about the first setting that cannot work.
    """
    validate_settings(config)
    check_name("algorithm", config.algorithm, AGGREGATORS)


def check_framework(config: Config) -> None:
    """Raise `UserError` for a changed setting that only other frameworks read."""
    check_used(config, {n: ("timeline.framework", by) for n, by in readers().items()})


def _readers() -> dict[str, list[str]]:
    """Setting → names of the rules that read it."""
    found: dict[str, list[str]] = {}
    for name, each in AGGREGATORS.items():
        for setting in each.settings.reads:
            full = setting if "." in setting else f"server.{setting}"
            if full not in SETTINGS:
                raise KeyError(
                    f"{name!r} is declared to read {full!r}, which is no setting"
                    f"{nearest(full, SETTINGS)}; declare it in config.py"
                )
            found.setdefault(full, []).append(name)
    return found


def _check_staleness(config: Config) -> None:
    server, timeline, rule = config.server, config.timeline, config.algorithm
    kind, framework = server.staleness, timeline.framework
    if kind == "constant":
        return
    ignored = f"--config.server.staleness={kind}: would be ignored with "
    effect = AGGREGATORS[rule].settings.staleness
    if not effect:
        known = [n for n, each in AGGREGATORS.items() if each.settings.staleness]
        raise UserError(
            f"{ignored}--config.algorithm={rule}, whose weights do not depend on it; "
            f"it belongs to {listed(known)}"
        )
    late = [name for name, each in FRAMEWORKS.items() if each.late]
    if framework not in late:
        raise UserError(
            f"{ignored}--config.timeline.framework={framework}, under which no model "
            f"is stale; it belongs to {listed(late)}"
        )
    alike = (
        framework in ("afl", "fedat")
        or (framework == "fedbuff" and timeline.buffer == 1)
        or (framework == "safa" and timeline.fraction * config.num_clients <= 1)
    )
    if alike and effect == "others":
        raise UserError(
            f"{ignored}--config.algorithm={rule} under "
            f"--config.timeline.framework={framework}: its weights sum to 1, and all "
            "models of one update are as stale; use fedasync or fedbuff"
        )


def _check_sizes(config: Config) -> None:
    """Weights of DMS times |D_i| keep no limit, and need a positive sum."""
    rule, by_size, dms = config.algorithm, config.server.by_size, config.dms
    adaptive = rule == "dms_adaptive" and by_size == "auto"
    if not (adaptive or (rule in ("dms", "dms_adaptive") and by_size == "yes")):
        return
    why = f"--config.algorithm={rule} with --config.server.by_size={by_size}"
    if dms.weight_limit:
        raise UserError(
            f"--config.dms.weight_limit={dms.weight_limit}: {why} multiplies the "
            "weights by the clients' samples, which can take them above θ/N; leave it "
            "out, or use --config.server.by_size=no"
        )
    if not dms.project:
        raise UserError(
            f"--config.dms.project=False: {why} multiplies the weights by the clients' "
            "samples, and negative ones may then have any sum; leave it out, or use "
            "--config.server.by_size=no"
        )


def check(config: Config) -> None:
    """Check that the chosen rule uses the settings of the server that were changed.

    Not for a user's own rule, which may read any of them.

    Raises:
      UserError: a setting that the rule would ignore.
    """
    rule = config.algorithm
    used_by = {name: ("algorithm", by) for name, by in _readers().items()} | {
        "server.staleness_a": ("server.staleness", ["polynomial", "hinge"]),
        "server.staleness_b": ("server.staleness", ["hinge"]),
    }
    check_used(config, used_by)
    _check_sizes(config)
    _check_staleness(config)
    if rule == "fednova" and config.proximal and config.clip_norm > 0:
        raise UserError(
            f"--config.clip_norm={config.clip_norm}: with --config.proximal=True it "
            "clips the proximal term too, so that FedNova's normalizer ‖a_i‖₁ is "
            "undefined; leave out one of them"
        )


def check_validation(config: Config, rule: Aggregator) -> None:
    """Check that there are validation samples where some are used, and their settings.

    Raises:
      UserError: there are none, or a setting of the search would be ignored.
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
    ours = any(rule is known for known in AGGREGATORS.values())
    if config.measure_regret or rule is AGGREGATORS["oracle"] or not ours:
        return  # a user's own rule may read any setting
    _refuse(
        config,
        ("oracle.steps", "oracle.step"),
        "; it belongs to --config.algorithm=oracle and --config.measure_regret=True",
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


def notes(config: Config, hparams: HParams, times: Schedule) -> tuple[str, ...]:
    """What a rule does with this schedule that its settings do not say.

    Raises:
      UserError: a rule that cannot work with so few clients per update.
    """
    there, server = replay.claimed(times) > 0, config.server
    settings = AGGREGATORS[config.algorithm].settings
    found = settings.notes(config.algorithm, server.trim, there.sum(axis=1))
    if found or server.staleness == "constant":
        return found
    late = staleness_factor(
        times.delivery.lag if times.delivery is not None else 0 * times.tau,
        hparams.staleness,
        hparams.staleness_a,
        hparams.staleness_b,
    )
    least = np.where(there, late, np.inf).min(axis=1)
    most = np.where(there, late, -np.inf).max(axis=1)
    if (least < (1 if settings.staleness == "global" else most)).any():
        return ()
    return (
        f"server.staleness={server.staleness} changes no weight in this run: no "
        "delivery is late enough",
    )


@functools.lru_cache(maxsize=8)
def _fednova(optimizer: optimizers.Optimizer, most: int) -> Aggregator:
    """The same function for the same optimizer, so that lanes share a program."""
    optimizer = optimizers.as_factory(optimizer)
    return normalized_by_work(local_work.measured_accumulation(optimizer, most))


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


def check_client_step(config: Config, rule: Aggregator) -> None:
    """Check that a rule can do with clients whose steps it does not know.

    Raises:
      UserError: it knows what SGD does and counts on it.
    """
    if rule.correction is not None or config.algorithm == "fednova":
        raise UserError(
            f"--config.algorithm={config.algorithm}: it is made for the steps of SGD; "
            "leave out client_step="
        )


def with_optimizer(
    config: Config,
    rule: Aggregator,
    optimizer: optimizers.Optimizer,
    hparams: HParams,
    times: Schedule,
) -> Aggregator:
    """A rule of ours for clients with an optimizer of the user's own."""
    if rule.correction is not None:
        raise UserError(
            f"--config.algorithm={config.algorithm}: its control variates are made for "
            "SGD; leave out optimizer="
        )
    if config.algorithm != "fednova":
        return rule
    factory = optimizers.as_factory(optimizer)
    try:
        number = {"w": jax.ShapeDtypeStruct((), np.float32)}
        optimizers.check(factory, hparams, number)
    except UserError as error:
        raise UserError(
            "--config.algorithm=fednova measures its normalizer ‖a_i‖₁ on a model of "
            f"one parameter: {error}"
        ) from error
    if not local_work.is_linear(factory(hparams)):
        raise UserError(
            "--config.algorithm=fednova: optimizer= is not linear in the gradients "
            "(Adam, clipping and weight decay are not), so that its normalizer ‖a_i‖₁ "
            "is undefined; use SGD with any momentum, or another rule"
        )
    steps = replay.claimed(times) * local.steps_per_iteration(
        times.size, config.batch_size, config.schedule.iteration
    )
    # A power of two, so that different schedules share a program.
    return _fednova(optimizer, 1 << int(steps.max()).bit_length())
