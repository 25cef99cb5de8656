"""Checks of a `Config` before anything slow starts; every error is one line."""

import dataclasses
import math
import numbers

from tsfl_jax import config as c
from tsfl_jax import host_memory
from tsfl_jax.types import UserError, nearest


def choice(flag: str, value: str, known: tuple[str, ...]) -> None:
    """Raises UserError unless `value` is one of the known names."""
    if value not in known:
        raise UserError(
            f"--config.{flag}={value}: unknown name{nearest(value, known)} "
            f"(one of: {', '.join(known)})"
        )


_LARGEST = 2**31 - 1  # of int32
_TINY, _HUGE = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers of float32
_DRAWS = 1024  # of a client's seconds, at least; see `fleet.draw_fleet`
_TYPE_NAMES = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    tuple: "whole numbers like (1,4)",
}
# NumPy's numbers will do, and an int for a float; a tuple holds whole numbers.
_ACCEPTED = {int: numbers.Integral, float: numbers.Real, tuple: (tuple, list)}


def _check_types(config: object, prefix: str = "") -> None:
    """A field has the type of its default; an int will do for a float."""
    fields = [field.name for field in dataclasses.fields(config)]
    for name in vars(config):
        if name not in fields:
            raise UserError(
                f"config.{prefix}{name}: there is no such setting"
                f"{nearest(prefix + name, [prefix + f for f in fields])}"
            )
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(field.default_factory):
            if not isinstance(value, field.default_factory):
                raise UserError(
                    f"config.{name} must be a {field.default_factory.__name__}, "
                    f"got {value!r}"
                )
            _check_types(value, name + ".")
            continue
        expected = type(field.default)
        fits = isinstance(value, _ACCEPTED.get(expected, expected))
        if expected is not bool and isinstance(value, bool):
            fits = False
        if expected is tuple and fits:
            fits = all(
                isinstance(v, numbers.Integral) and not isinstance(v, bool)
                for v in value
            )
        if fits:
            _check_extremes(f"--config.{name}", value)
        else:
            raise UserError(
                f"--config.{name}={value!r}: expected {_TYPE_NAMES[expected]}, "
                f"got {type(value).__name__}"
            )


def _check_extremes(flag: str, value: object) -> None:
    """Refuses what 32 bits or a file name cannot hold; seeds have their own range."""
    if isinstance(value, str):
        if "\0" in value:
            raise UserError(f"{flag}={value!r}: holds a zero byte")
    elif isinstance(value, tuple | list):
        for number in value:
            _check_extremes(f"{flag}={tuple(value)}", int(number))
    elif isinstance(value, numbers.Integral):
        if abs(int(value)) > _LARGEST and flag != "--config.seed":
            raise UserError(f"{flag}={value}: must be <= {_LARGEST}")
    elif 0 < abs(value) < _TINY or _HUGE < abs(value) < math.inf:
        raise UserError(
            f"{flag}={value}: outside what float32 holds, {_TINY:.2g} to {_HUGE:.2g}"
        )


def _in_range(config: c.Config) -> None:
    # (flag, value, smallest, largest, smallest itself excluded)
    inf = math.inf
    ranges = [
        ("seed", config.seed, 0, 2**32 - 1, False),
        ("num_intervals", config.num_intervals, 1, 10**6, False),
        ("num_clients", config.num_clients, 1, 10**7, False),
        ("lr", config.lr, 0, inf, True),
        ("batch_size", config.batch_size, 1, inf, False),
        ("mu", config.mu, 0, inf, False),
        ("clip_norm", config.clip_norm, 0, inf, False),
        ("eval_every", config.eval_every, 1, inf, False),
        ("report_every", config.report_every, 1, inf, False),
        ("devices", config.devices, 0, inf, False),
        ("client_chunk", config.client_chunk, 0, inf, False),
        ("data.train_size", config.data.train_size, 0, inf, False),
        ("data.test_size", config.data.test_size, 0, inf, False),
        ("data.num_classes", config.data.num_classes, 2, inf, False),
        ("partition.alpha", config.partition.alpha, 0, inf, True),
        (
            "partition.classes_per_client",
            config.partition.classes_per_client,
            1,
            inf,
            False,
        ),
        ("schedule.data_size", config.schedule.data_size, 1, 10**9, False),
        ("schedule.upload_above", config.schedule.upload_above, 0, inf, False),
        ("schedule.interval_seconds", config.schedule.interval_seconds, 0, inf, True),
        ("schedule.free_riders", config.schedule.free_riders, 0, inf, False),
        ("model.hidden", config.model.hidden, 0, inf, False),
        ("quadratic.smoothness", config.quadratic.smoothness, 0, inf, True),
        (
            "quadratic.convexity",
            config.quadratic.convexity,
            0,
            config.quadratic.smoothness,
            True,
        ),
        ("quadratic.distance", config.quadratic.distance, 0, inf, False),
        ("timeline.jitter", config.timeline.jitter, 0, inf, False),
        ("timeline.local_iterations", config.timeline.local_iterations, 1, inf, False),
        ("timeline.buffer", config.timeline.buffer, 1, inf, False),
        ("timeline.tiers", config.timeline.tiers, 1, inf, False),
        ("timeline.deadline", config.timeline.deadline, 0, inf, True),
        ("timeline.fraction", config.timeline.fraction, 0, 1, True),
        ("timeline.lag", config.timeline.lag, 0, inf, False),
        ("server.lr", config.server.lr, 0, inf, False),
        ("server.floor", config.server.floor, 0, inf, True),
        ("server.staleness_a", config.server.staleness_a, 0, inf, False),
        ("server.staleness_b", config.server.staleness_b, 0, inf, False),
    ]
    for flag, value, low, high, excluded in ranges:
        good = low < value <= high if excluded else low <= value <= high
        if not good or (isinstance(value, float) and not math.isfinite(value)):
            bound = f"{'>' if excluded else '>='} {low}"
            bound += "" if high == inf else f" and <= {high}"
            raise UserError(f"--config.{flag}={value}: must be finite and {bound}")
    shares = [
        ("momentum", config.momentum),
        ("gamma", config.gamma),
        ("schedule.dropout", config.schedule.dropout),
        ("server.momentum", config.server.momentum),
        ("server.second", config.server.second),
    ]
    for flag, value in shares:
        if not 0 <= value < 1:
            raise UserError(f"--config.{flag}={value}: must be in [0, 1)")
    if not 0 <= config.server.trim < 0.5:
        raise UserError(
            f"--config.server.trim={config.server.trim}: must be in [0, 0.5)"
        )
    limit = config.dms.weight_limit
    if not (limit == 0 or 1 <= limit < inf):
        raise UserError(
            f"--config.dms.weight_limit={limit}: θ in ρ ≤ θ/N must be at least 1 "
            "(or 0 for no limit), else the weights cannot sum to 1"
        )
    for name in ("smoothness", "grad_sq_norm", "grad_variance"):
        value = getattr(config.dms, name)
        if not math.isfinite(value) or (name == "grad_variance" and value == 0):
            raise UserError(
                f"--config.dms.{name}={value}: must be finite"
                f"{' and not 0' if name == 'grad_variance' else ''}; a negative "
                "value has it estimated in every interval"
            )
    if config.data.name == "synthetic" and (
        not config.data.shape or min(config.data.shape) < 1
    ):
        raise UserError(
            f"--config.data.shape={config.data.shape}: needs sizes > 0, as (28,28,1)"
        )


def _quadratic(config: c.Config) -> None:
    """Quadratic data have a section, a model and a shape of their own."""
    if (config.data.name == "quadratic") != (config.model.name == "quadratic"):
        raise UserError(
            f"--config.model.name={config.model.name} with "
            f"--config.data.name={config.data.name}: quadratic data and the quadratic "
            "model go together"
        )
    if config.data.name != "quadratic":
        for field in dataclasses.fields(config.quadratic):
            value = getattr(config.quadratic, field.name)
            if value != field.default:
                raise UserError(
                    f"--config.quadratic.{field.name}={value}: would be ignored with "
                    f"--config.data.name={config.data.name}; it belongs to quadratic"
                )
        return
    if len(config.data.shape) != 1 or config.data.shape[0] < 1:
        raise UserError(
            f"--config.data.shape={tuple(config.data.shape)}: quadratic data need the "
            "number of dimensions alone, as (8,)"
        )
    if config.data.shape[0] == 1 and (
        config.quadratic.convexity != config.quadratic.smoothness
    ):
        raise UserError(
            f"--config.quadratic.convexity={config.quadratic.convexity}: one dimension "
            "has one eigenvalue; set it to --config.quadratic.smoothness"
        )
    for name, needed in (("normalize", "unit"), ("train_size", 0), ("test_size", 0)):
        value = getattr(config.data, name)
        if value != needed:
            raise UserError(
                f"--config.data.{name}={value}: would spoil the known constants of "
                "quadratic data; leave it out"
            )


def _belongs_together(config: c.Config) -> None:
    """A setting that the chosen kind would ignore is a slip, not a wish."""
    schedule, default = config.schedule, c.ScheduleConfig()
    for name, kinds in (
        ("tau", ("explicit",)),
        ("tau_groups", ("distribution",)),
        ("trace", ("trace",)),
        ("size_groups", tuple(k for k in c.SCHEDULES if k != "trace")),
    ):
        value = getattr(schedule, name)
        if value and value != getattr(default, name) and schedule.kind not in kinds:
            raise UserError(
                f"--config.schedule.{name}={value}: would be ignored with "
                f"--config.schedule.kind={schedule.kind}; it belongs to "
                f"{' or '.join(kinds)}"
            )
    if config.measure_clients and config.timeline.framework not in ("none", "tsfl"):
        raise UserError(
            "--config.measure_clients=true: the theory is about clients in step; "
            f"--config.timeline.framework={config.timeline.framework} is not, use none "
            "or tsfl"
        )
    if config.timeline.framework == "none":
        for field in dataclasses.fields(config.timeline):
            value = getattr(config.timeline, field.name)
            if value != field.default:
                raise UserError(
                    f"--config.timeline.{field.name}={value}: would be ignored with "
                    "--config.timeline.framework=none; choose a framework"
                )
    else:
        for name in ("tau", "tau_groups", "trace", "upload_above"):
            value = getattr(schedule, name)
            if value:
                raise UserError(
                    f"--config.schedule.{name}={value}: would be ignored with "
                    f"--config.timeline.framework={config.timeline.framework}, whose "
                    "speeds decide τ; leave it out"
                )
    if config.data.file and config.data.name != "npz":
        raise UserError(
            f"--config.data.file={config.data.file}: would be ignored with "
            f"--config.data.name={config.data.name}; it belongs to npz"
        )
    _quadratic(config)
    if config.model.norm != "none" and config.model.name not in ("vgg11", "resnet18"):
        raise UserError(
            f"--config.model.norm={config.model.norm}: would be ignored with "
            f"--config.model.name={config.model.name}; it belongs to vgg11 or resnet18"
        )


def _check_memory(config: c.Config) -> None:
    """What is drawn before training must fit; later steps check what they make."""
    intervals, clients = config.num_intervals, config.num_clients
    if config.timeline.framework == "none":
        host_memory.require(
            f"--config.num_clients={clients} with --config.num_intervals={intervals}",
            # τ, sizes and drop-outs in 64 bits, then two of them in 32.
            32 * intervals * clients,
            "the schedule",
        )
        return
    host_memory.require(
        f"--config.num_clients={clients}",
        32 * _DRAWS * clients,  # seconds of iterations and transfers, losses
        "the clients' drawn seconds",
    )
    iterations = config.timeline.local_iterations
    host_memory.require(
        f"--config.timeline.local_iterations={iterations}",
        24 * iterations,  # numbers, places and seconds of one task's iterations
        "one task",
    )


_ADAPTIVE = ("fedadam", "fedyogi")
_KRUM = ("krum", "multi_krum")
# Settings of the server, and the rules that read them.
_READ_BY = {
    "lr": (
        *("fedbuff", "scaffold", "fedavgm", *_ADAPTIVE),
        *("median", "trimmed_mean", "geometric_median", *_KRUM),
    ),
    "momentum": ("fedavgm", *_ADAPTIVE),
    "second": _ADAPTIVE,
    "floor": _ADAPTIVE,
    "trim": ("trimmed_mean", *_KRUM),
}
# What s(lag) does: it takes weight from one client for the global model, or for the
# other clients of the same update, which then have to differ in their lag.
_STALE_ALONE = ("fedasync", "fedbuff")
_STALE_BESIDE = ("fedavg", "fedprox", "fedat", "scaffold", "fedavgm", *_ADAPTIVE)


def _listed(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _staleness(config: c.Config) -> None:
    server, timeline, rule = config.server, config.timeline, config.algorithm
    kind, framework = server.staleness, timeline.framework
    for name, kinds in (("a", ("polynomial", "hinge")), ("b", ("hinge",))):
        value = getattr(server, f"staleness_{name}")
        default = getattr(c.ServerConfig(), f"staleness_{name}")
        if value != default and kind not in kinds:
            raise UserError(
                f"--config.server.staleness_{name}={value}: would be ignored with "
                f"--config.server.staleness={kind}; it belongs to {_listed(kinds)}"
            )
    if kind == "constant":
        return
    ignored = f"--config.server.staleness={kind}: would be ignored with "
    if rule not in _STALE_ALONE + _STALE_BESIDE:
        raise UserError(
            f"{ignored}--config.algorithm={rule}, whose weights do not depend on it; "
            f"it belongs to {_listed(_STALE_ALONE + _STALE_BESIDE)}"
        )
    lags = framework in ("afl", "fedbuff", "fedat")
    if not lags and not (framework == "safa" and timeline.lag > 0):
        raise UserError(
            f"{ignored}--config.timeline.framework={framework}"
            f"{' and lag=0' * (framework == 'safa')}, under which no model is stale; "
            "it belongs to afl, fedbuff, fedat or safa"
        )
    alike = (
        framework in ("afl", "fedat")
        or (framework == "fedbuff" and timeline.buffer == 1)
        or (framework == "safa" and timeline.fraction * config.num_clients <= 1)
    )
    if alike and rule in _STALE_BESIDE:
        raise UserError(
            f"{ignored}--config.algorithm={rule} under "
            f"--config.timeline.framework={framework}: its weights sum to 1, and all "
            "models of one update are as stale; use fedasync or fedbuff"
        )


def rule_settings(config: c.Config) -> None:
    """Raises UserError for settings of the server that a rule of ours would ignore.

    A rule of the user's own may read any of them.
    """
    default, rule = c.ServerConfig(), config.algorithm
    for name, rules in _READ_BY.items():
        value = getattr(config.server, name)
        if value != getattr(default, name) and rule not in rules:
            raise UserError(
                f"--config.server.{name}={value}: would be ignored with "
                f"--config.algorithm={rule}; it belongs to {_listed(rules)}"
            )
    _staleness(config)
    if rule == "fednova" and config.proximal and config.clip_norm > 0:
        raise UserError(
            f"--config.clip_norm={config.clip_norm}: with --config.proximal=True it "
            "clips the proximal term too, so that fednova cannot know by what work to "
            "divide; leave out one of them"
        )


def validate(config: c.Config) -> None:
    """Raises UserError, one line, at the first setting that cannot work."""
    if not isinstance(config, c.Config):
        raise UserError(f"expected a tsfl_jax.Config, got {type(config).__name__}")
    _check_types(config)
    choice("algorithm", config.algorithm, c.ALGORITHMS)
    choice("data.name", config.data.name, (*c.DATA_NAMES, "svhn"))
    choice("data.normalize", config.data.normalize, c.NORMALIZATIONS)
    choice("partition.kind", config.partition.kind, c.PARTITIONS)
    choice("schedule.kind", config.schedule.kind, c.SCHEDULES)
    choice("schedule.iteration", config.schedule.iteration, c.ITERATIONS)
    choice("schedule.free_riding", config.schedule.free_riding, c.FREE_RIDING)
    choice("timeline.framework", config.timeline.framework, c.FRAMEWORKS)
    choice("server.staleness", config.server.staleness, c.STALENESS)
    choice("model.name", config.model.name, c.MODELS)
    choice("model.norm", config.model.norm, c.NORMS)
    choice("mapping", config.mapping, c.MAPPINGS)
    choice("convolution", config.convolution, c.CONVOLUTIONS)
    _in_range(config)
    _belongs_together(config)
    _check_memory(config)
