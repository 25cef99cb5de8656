"""Every setting of an experiment, declared once: default, help, names, range.

A setting is a field of a dataclass. `setting` keeps what is known about it as metadata
of the field; `validate` reads it there, and modules that are also called without a
`Config` check a value by its setting's name with `validate.check`. Settings are read in
`experiment` only; all other modules take plain arguments, and the factories of data
sets and networks their own section.
"""

import copy
import dataclasses
import functools
import math
from typing import Any, NamedTuple

from flax import traverse_util

FRAMEWORKS = (
    *("none", "tsfl", "sfl", "afl", "fedbuff", "fedat", "fedcs", "esync", "safa"),
)
STALENESS = ("constant", "polynomial", "hinge", "exponential")
LR_SCHEDULES = ("constant", "exponential", "cosine", "steps")
FREE_RIDING = ("claim", "echo", "visit")
DATA_NAMES = (
    *("digits", "mnist", "fashion_mnist", "cifar10", "svhn_cropped"),
    *("idx", "npz", "synthetic", "quadratic"),
)
PARTITIONS = ("iid", "dirichlet", "shards", "label", "client")
SCHEDULES = ("case1", "case2", "case3", "explicit", "distribution", "trace")
MODELS = (
    *("mlp", "mnist_cnn", "mnist_dropout_cnn", "fashion_cnn", "vgg11", "resnet18"),
    "quadratic",
)
NORMS = ("none", "group", "batch")
CONSTANTS = ("interval", "once", "given")
ESTIMATORS = ("bounds", "power", "quotient")
UNITS = ("iteration", "step")
DECAYS = ("none", "exponential", "inverse")
THRESHOLDS = ("uploads", "all")
BY_SIZE = ("auto", "yes", "no")
MAPPINGS = ("auto", "sequential", "vmap")
CONVOLUTIONS = ("auto", "fast", "slices", "lax")
PRECISIONS = ("float32", "tf32", "bfloat16")


class Setting(NamedTuple):
    """What is known about a setting besides its type, which is that of its default."""

    help: str  # what it is, in one line, with symbol and unit
    choices: tuple[str, ...] = ()  # names; empty: any value
    low: float = -math.inf  # least value
    high: float = math.inf  # largest value
    above: float = -math.inf  # instead of `low`, a bound that is excluded
    below: float = math.inf  # instead of `high`, a bound that is excluded


def setting(default: Any, *known: Any, **bounds: float) -> Any:
    """Declare a setting: a dataclass field with its default and a `Setting`."""
    metadata = {"setting": Setting(*known, **bounds)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class DataConfig:
    """Where the samples come from."""

    name: str = setting(
        "digits", "data set; svhn is svhn_cropped", (*DATA_NAMES, "svhn")
    )
    dir: str = setting(
        "", 'TFDS data, "": $TFDS_DATA_DIR or ~/tensorflow_datasets; idx: the files'
    )
    file: str = setting("", "npz: file with x_train, y_train, x_test, y_test")
    download: bool = setting(True, "fetch and prepare a missing TFDS data set")
    normalize: str = setting(
        "unit",
        "unit: to [0, 1]; standard: mean 0, variance 1 of each channel or feature",
        ("unit", "standard"),
    )
    shape: tuple[int, ...] = setting(
        (28, 28, 1), "synthetic: shape of one sample; quadratic: (d,)"
    )
    num_classes: int = setting(10, "synthetic: number of classes", low=2)
    train_size: int = setting(0, "training samples; 0: all, synthetic 4096", low=0)
    test_size: int = setting(0, "test samples; 0: all, synthetic 1024", low=0)
    validation: int = setting(
        0,
        "V, held-out training samples of all classes, for oracle and measure_regret",
        low=0,
    )


@dataclasses.dataclass
class QuadraticConfig:
    """data.name=quadratic: one quadratic per client, all constants known."""

    smoothness: float = setting(1.0, "L, the largest eigenvalue", above=0)
    convexity: float = setting(1.0, "the smallest eigenvalue, at most L", above=0)
    grad_variance: str = setting("constant(1)", "groups; σ_i² of a mini-batch gradient")
    dissimilarity: str = setting("constant(1)", "groups; Γ_i = ‖w* − w_i*‖²")
    distance: float = setting(1.0, "‖w⁰ − w*‖²", low=0)


@dataclasses.dataclass
class PartitionConfig:
    """Which training samples each client gets."""

    kind: str = setting(
        "dirichlet", "the split; client: as the data set says", PARTITIONS
    )
    alpha: float = setting(
        0.5, "dirichlet: concentration; small values skew the labels more", above=0
    )
    classes_per_client: int = setting(2, "shards: classes of a client", low=1)
    replacement: bool = setting(False, "let clients share samples if there are too few")
    iid_share: float = setting(
        0.0, "share of each client's samples that is drawn IID", low=0, below=1
    )
    common: bool = setting(False, "the IID share is the same samples for all clients")
    online: bool = setting(
        False, "in every interval new samples of the same classes, drawn from all"
    )


@dataclasses.dataclass
class ScheduleConfig:
    """How many local iterations on how many samples, per client and interval."""

    kind: str = setting("case3", "where τ comes from", SCHEDULES)
    data_size: int = setting(
        44, "samples per client, the mean if sizes are drawn", low=1, high=10**9
    )
    tau: tuple[int, ...] = setting((), "explicit: τ per client or per equal group")
    tau_groups: str = setting("", 'distribution: "normal(2,0.4); uniform(1,5)"')
    size_groups: str = setting(
        "", 'distributions of sizes; "": those of the kind; on a timeline data_size'
    )
    trace: str = setting("", "trace: CSV file, interval,client,tau[,size], from 0")
    iteration: str = setting(
        "pass", "one local iteration: a pass over the data or a step", ("pass", "step")
    )
    upload_above: int = setting(0, "client selection: upload only if τ > this", low=0)
    dropout: float = setting(
        0.0, "chance that a client is away for an interval", low=0, below=1
    )
    interval_seconds: float = setting(1.0, "Δ, virtual seconds", low=1e-9)
    free_riders: int = setting(0, "clients that report work they did not do", low=0)
    free_riding: str = setting(
        "claim", "what free riders do, see timeline/free_riders.py", FREE_RIDING
    )


@dataclasses.dataclass
class TimelineConfig:
    """Virtual time: which clients deliver when, from speeds and delays in seconds."""

    framework: str = setting("none", "none: τ comes from schedule", FRAMEWORKS)
    speed: str = setting(
        "uniform(0.25,1)", "groups; seconds per iteration at the mean size"
    )
    jitter: float = setting(
        0.0, "σ of a lognormal factor on each iteration and transfer", low=0, high=10
    )
    download: str = setting("constant(0)", "groups; seconds")
    upload: str = setting("constant(0)", "groups; seconds")
    speeds: str = setting("", "CSV file, client,seconds[,download,upload], not drawn")
    availability: str = setting(
        "", "CSV file, client,start,end in seconds; others are always online"
    )
    local_iterations: int = setting(
        4, "H of a task; tsfl: as many as fit into Δ", low=1, high=2**31 - 1
    )
    carry: bool = setting(
        False, "tsfl: an unfinished iteration continues in the next interval"
    )
    buffer: int = setting(10, "fedbuff: deliveries per update", low=1)
    tiers: int = setting(3, "fedat: tiers of clients", low=1)
    deadline: float = setting(4.0, "fedcs: seconds per round", low=1e-9)
    fraction: float = setting(
        0.5, "safa: share of the clients that ends a round", above=0, high=1
    )
    lag: int = setting(5, "safa: most versions a client may be behind", low=0)


@dataclasses.dataclass
class ServerConfig:
    """The server's step, and settings of rules other than the paper's."""

    lr: float = setting(
        0.0,
        "η_g; 0: the rule's own, 1; fedadam, fedyogi 0.01; fedavgm min(1, 2(1 − β₁))",
        low=0,
    )
    momentum: float = setting(0.9, "β₁: fedavgm, fedadam, fedyogi", low=0, below=1)
    second: float = setting(0.99, "β₂: fedadam, fedyogi", low=0, below=1)
    floor: float = setting(1e-3, "added to √v: fedadam, fedyogi", above=0)
    trim: float = setting(
        0.1,
        "share of clients that may be wrong: trimmed_mean, krum, multi_krum",
        low=0,
        below=0.5,
    )
    by_size: str = setting(
        "auto", "weights ∝ |D_i|; auto: fedavg and rules like it yes, dms no", BY_SIZE
    )
    staleness: str = setting("constant", "factor s(lag) on stale updates", STALENESS)
    staleness_a: float = setting(0.5, "a of polynomial and hinge", low=0)
    staleness_b: float = setting(4.0, "b of hinge, in updates", low=0)


@dataclasses.dataclass
class ModelConfig:
    """The network."""

    name: str = setting("mlp", "network", MODELS)
    norm: str = setting("none", "vgg11, resnet18: normalization layers", NORMS)
    hidden: int = setting(
        50,
        "width of the hidden layer, mlp, mnist_cnn, mnist_dropout_cnn; 0: none",
        low=0,
    )


@dataclasses.dataclass
class DMSConfig:
    """DMS (Algorithm 1) and its variants."""

    smoothness: float = setting(-1.0, "L; negative: estimated")
    grad_sq_norm: float = setting(-1.0, "G²; negative: estimated")
    grad_variance: float = setting(-1.0, "σ²; negative: estimated")
    constants: str = setting(
        "once",
        "L, G², σ²: estimated once at w⁰, in every interval, or all of them given",
        CONSTANTS,
    )
    estimator: str = setting(
        "bounds",
        "the largest of all clients; or of 8, L by power iteration or by one step",
        ESTIMATORS,
    )
    coupling: float = setting(
        -1.0, "c in ρ_i − ρ_j = c(τ_i − τ_j); negative: of L, G², σ²"
    )
    unit: str = setting(
        "iteration", "what τ counts in c(τ_i − τ_j) and in c itself", UNITS
    )
    threshold: str = setting(
        "uploads",
        "K is the mean τ of uploads (0 of others), or of all work",
        THRESHOLDS,
    )
    drop: float = setting(1.0, "factor on P_i, the chance to be dropped", low=0, high=1)
    late: int = setting(0, "intervals before the two factors below; 0: never", low=0)
    drop_late: float = setting(1.0, "factor on P_i from then on", low=0, high=1)
    coupling_late: float = setting(1.0, "factor on c from then on", low=0)
    decay: str = setting(
        "none", "factor on c and P_i; e^(−t/T_c), or 1/(1 + t/T_c)", DECAYS
    )
    decay_time: float = setting(10.0, "T_c, intervals", above=0)
    adapt: float = setting(
        4.0, "dms_adaptive: c and P_i change by this factor per interval", above=1
    )
    project: bool = setting(
        True, "weights below 0 or above θ/N are projected; False: used as they are"
    )
    weight_limit: float = setting(0.0, "θ ≥ 1 in ρ_i ≤ θ/N; 0: no limit")


@dataclasses.dataclass
class OracleConfig:
    """Search for the best weights of an interval on the validation samples."""

    steps: int = setting(
        12, "evaluations of the search after those of its starts", low=0, high=1000
    )
    step: float = setting(0.1, "most that a weight changes in its first step", above=0)


@dataclasses.dataclass
class SeedsConfig:
    """Separate seeds of single sources of randomness, in place of `seed`."""

    model: int = setting(-1, "of the initial model; -1: seed", low=-1, high=2**32 - 1)
    split: int = setting(
        -1, "of the split and of validation; -1: seed", low=-1, high=2**32 - 1
    )
    fleet: int = setting(
        -1, "of τ, sizes, speeds, delays, free riders; -1: seed", low=-1, high=2**32 - 1
    )
    batches: int = setting(
        -1, "of all draws in training; -1: seed", low=-1, high=2**32 - 1
    )


@dataclasses.dataclass
class LearnedConfig:
    """θ of the rule learned, ρ = softmax(θ · features); see rules/learned.py.

    Trained by `studies.learned`; docs/results has how it did elsewhere.
    """

    tau: float = setting(0.541, "θ of τ_i/max τ")
    left: float = setting(2.772, "θ of (1 − t/T) τ_i/max τ")
    size: float = setting(1.023, "θ of log(|D_i|/mean)")
    lag: float = setting(0.0, "θ of lag_i/(1 + lag_i); not trained")
    loss: float = setting(1.693, "θ of log(F_i/mean F), F_i the training loss")


@dataclasses.dataclass
class Config:
    """One experiment."""

    algorithm: str = setting("dms", "aggregation rule")
    seed: int = setting(0, "decides every random draw", low=0, high=2**32 - 1)
    num_intervals: int = setting(50, "T, intervals of a run", low=1, high=10**6)
    num_clients: int = setting(20, "N, number of clients", low=1, high=10**7)
    lr: float = setting(0.003, "η, learning rate of the clients", above=0)
    lr_schedule: str = setting(
        "constant", "η_t over the intervals or updates t = 0..T−1", LR_SCHEDULES
    )
    lr_decay: float = setting(
        0.1,
        "d; exponential: η dᵗ; steps: η d^⌊t/E⌋; cosine: from η to d η",
        above=0,
        high=1,
    )
    lr_every: int = setting(10, "E, intervals between two drops of steps", low=1)
    momentum: float = setting(
        0.9, "of the clients' SGD, reset at the start of every interval", low=0, below=1
    )
    batch_size: int = setting(32, "B, samples of a mini-batch", low=1)
    mu: float = setting(
        0.01, "μ, the proximal coefficient; 0 without fedprox or proximal", low=0
    )
    gamma: float = setting(
        0.5, "γ, fedasync's share of the old global model", low=0, below=1
    )
    proximal: bool = setting(
        False, "add μ/2‖w − w^t‖² under every algorithm, not only fedprox"
    )
    measure_clients: bool = setting(
        False, "measure σ_i², ‖∇F_i − ∇F‖² at every w^t, for studies.theory"
    )
    measure_regret: bool = setting(
        False, "measure what better weights would win in every interval, see oracle"
    )
    train_all: bool = setting(
        True, "train clients whose weight is 0, too; False: same models, less work"
    )
    clip_norm: float = setting(0.0, "clip gradients to this global norm; 0: off", low=0)
    eval_every: int = setting(1, "intervals between two evaluations", low=1)
    report_every: int = setting(
        0, "intervals per compiled call and progress line; 0: by their work", low=0
    )
    checkpoint: bool = setting(True, "save from time to time, resume from the workdir")
    devices: int = setting(
        0,
        "devices that share the clients; 0: all (CPU: one per core)",
        low=0,
    )
    mapping: str = setting(
        "auto", "clients one after another or side by side", MAPPINGS
    )
    client_chunk: int = setting(
        0, "clients trained side by side under vmap; 0: all", low=0
    )
    convolution: str = setting("auto", "how convolutions are computed", CONVOLUTIONS)
    precision: str = setting(
        "float32", "of a network's arithmetic; weights stay float32", PRECISIONS
    )
    compile_cache: str = setting(
        "auto", "folder of compiled programs; auto: below ~/.cache; or off"
    )
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    quadratic: QuadraticConfig = dataclasses.field(default_factory=QuadraticConfig)
    partition: PartitionConfig = dataclasses.field(default_factory=PartitionConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    timeline: TimelineConfig = dataclasses.field(default_factory=TimelineConfig)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    dms: DMSConfig = dataclasses.field(default_factory=DMSConfig)
    oracle: OracleConfig = dataclasses.field(default_factory=OracleConfig)
    seeds: SeedsConfig = dataclasses.field(default_factory=SeedsConfig)
    learned: LearnedConfig = dataclasses.field(default_factory=LearnedConfig)


def _declared(kind: type, prefix: str = "") -> dict[str, tuple[type, Setting]]:
    found = {}
    for field in dataclasses.fields(kind):
        if "setting" in field.metadata:
            name = prefix + field.name
            found[name] = (type(field.default), field.metadata["setting"])
        elif isinstance(field.default_factory, type):
            found |= _declared(field.default_factory, f"{prefix}{field.name}.")
    return found


# Every setting by its flat name, such as "data.name": its type and what is known of it.
SETTINGS: dict[str, tuple[type, Setting]] = _declared(Config)


# Settings that runs of the same experiment may differ in.
SEEDS = ("seed", *(name for name in SETTINGS if name.startswith("seeds.")))


def get(config: Config, name: str) -> Any:
    """The value of a setting by its flat name."""
    return functools.reduce(getattr, name.split("."), config)


def seed_of(config: Config, source: str) -> int:
    """The seed of a source of randomness: a name in `SeedsConfig`."""
    own = getattr(config.seeds, source)
    return config.seed if own < 0 else own


def replace(config: Config, values: dict[str, Any]) -> Config:
    """A copy of a config with settings changed by their flat names."""
    config = copy.deepcopy(config)
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        setattr(get(config, section) if section else config, last, value)
    return config


# Settings that did not exist in earlier versions, and the values that do what those
# versions did: left out there. Not the defaults, which may change.
_BEFORE = {
    "dms.constants": "interval",
    "dms.coupling": -1.0,
    "dms.unit": "iteration",
    "dms.threshold": "uploads",
    "dms.drop": 1.0,
    "dms.late": 0,
    "dms.drop_late": 1.0,
    "dms.coupling_late": 1.0,
    "dms.project": True,
    "dms.decay": "none",
    "dms.decay_time": 10.0,
    "dms.adapt": 2.0,
    "dms.estimator": "quotient",
    "server.by_size": "auto",
    "partition.iid_share": 0.0,
    "partition.common": False,
    "partition.online": False,
    "data.validation": 0,
    "measure_regret": False,
    "train_all": True,
    "oracle.steps": 12,
    "oracle.step": 0.1,
    "learned.tau": 0.541,
    "learned.left": 2.772,
    "learned.size": 1.023,
    "learned.lag": 0.0,
    "learned.loss": 1.693,
}
_BEFORE |= {name: -1 for name in SEEDS[1:]}
# Settings that cannot change a result: a checkpoint may be resumed with others.
# Data is compared by its fingerprint.
WITHOUT_EFFECT = {
    "checkpoint",
    "compile_cache",
    "data.dir",
    "data.download",
    "data.file",
}


def applicable(settings: dict) -> dict:
    """The flat settings without those that cannot change this experiment's result."""
    kept = {n: v for n, v in settings.items() if n not in WITHOUT_EFFECT}
    if settings.get("data.name") != "quadratic":
        kept = {n: v for n, v in kept.items() if not n.startswith("quadratic.")}
    if not settings.get("measure_clients"):
        kept.pop("measure_clients", None)
    if settings.get("lr_schedule") == "constant":
        kept = {n: v for n, v in kept.items() if not n.startswith("lr_")}
    if settings.get("precision") == "float32":
        kept.pop("precision")
    return kept


def effective(settings: dict) -> dict:
    """What tells experiments apart: `applicable` settings, as in earlier versions.

    Settings with which a run is what it was before they existed are left out, so that
    runs from that time are still the same experiments.
    """
    kept = applicable(settings)
    kept = {n: v for n, v in kept.items() if n not in _BEFORE or v != _BEFORE[n]}
    if settings.get("report_every") == 0:  # no result depends on it; 5 was the default
        kept["report_every"] = 5
    return kept


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings as one dict, ``{"data.name": "mnist"}``."""
    return traverse_util.flatten_dict(settings, sep=".")
