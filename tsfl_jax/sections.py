"""The settings that every experiment has; those of rules are beside the rules.

A setting is a field of a dataclass, declared by `components.setting` with its default,
help, names and range. Modules that are also called without a `Config` check a value by
its setting's name with `check`. Settings are read in `experiment` only; all other
modules take plain arguments, and the factories of data sets and networks their own
section.
"""

import dataclasses
import functools

from tsfl_jax import components
from tsfl_jax.components import setting

FRAMEWORKS = (
    *("none", "tsfl", "sfl", "afl", "fedbuff", "fedat", "fedcs", "esync", "safa"),
)
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
MAPPINGS = ("auto", "sequential", "vmap")
CONVOLUTIONS = ("auto", "fast", "slices", "lax")
PRECISIONS = ("float32", "tf32", "bfloat16")


@dataclasses.dataclass
class DataConfig:
    """Where the samples come from."""

    name: str = setting(
        "digits", "data set; svhn is svhn_cropped", (*DATA_NAMES, "svhn")
    )
    dir: str = setting(
        "",
        'TFDS data, "": $TFDS_DATA_DIR or ~/tensorflow_datasets; idx: the files',
        effect=False,
    )
    file: str = setting(
        "", "npz: file with x_train, y_train, x_test, y_test", effect=False
    )
    download: bool = setting(
        True, "fetch and prepare a missing TFDS data set", effect=False
    )
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
        static=True,
    )


@dataclasses.dataclass
class QuadraticConfig:
    """data.name=quadratic: one quadratic per client, all constants known."""

    smoothness: float = setting(1.0, "L, the largest eigenvalue", above=0, static=True)
    convexity: float = setting(
        1.0, "the smallest eigenvalue, at most L", above=0, static=True
    )
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
        False,
        "in every interval new samples of the same classes, drawn from all",
        static=True,
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
        "pass",
        "one local iteration: a pass over the data or a step",
        ("pass", "step"),
        static=True,
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
class ModelConfig:
    """The network."""

    name: str = setting("mlp", "network", MODELS, static=True)
    norm: str = setting(
        "none", "vgg11, resnet18: normalization layers", NORMS, static=True
    )
    hidden: int = setting(
        50,
        "width of the hidden layer, mlp, mnist_cnn, mnist_dropout_cnn; 0: none",
        low=0,
        static=True,
    )


@dataclasses.dataclass
class ConstantsConfig:
    """L, G² and σ² of rules that use them, such as DMS, and of measure_clients."""

    smoothness: float = setting(-1.0, "L; negative: estimated")
    grad_sq_norm: float = setting(-1.0, "G²; negative: estimated")
    grad_variance: float = setting(-1.0, "σ²; negative: estimated")
    when: str = setting(
        "once", "estimated once at w⁰, in every interval, or all given", CONSTANTS
    )
    estimator: str = setting(
        "bounds",
        "the largest of all clients; or of 8, L by power iteration or by one step",
        ESTIMATORS,
        static=True,
    )


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
class General:
    """What every experiment has; `Config` adds the sections of the rules."""

    algorithm: str = setting("dms", "aggregation rule")
    seed: int = setting(0, "decides every random draw", low=0, high=2**32 - 1)
    num_intervals: int = setting(
        50, "T, intervals of a run", low=1, high=10**6, static=True
    )
    num_clients: int = setting(
        20, "N, number of clients", low=1, high=10**7, static=True
    )
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
    batch_size: int = setting(32, "B, samples of a mini-batch", low=1, static=True)
    mu: float = setting(
        0.01, "μ, the proximal coefficient; 0 without fedprox or proximal", low=0
    )
    proximal: bool = setting(
        False, "add μ/2‖w − w^t‖² under every algorithm, not only fedprox", static=True
    )
    measure_clients: bool = setting(
        False,
        "measure σ_i², ‖∇F_i − ∇F‖² at every w^t, for studies.theory",
        static=True,
    )
    measure_regret: bool = setting(
        False,
        "measure what better weights would win in every interval, see oracle",
        static=True,
    )
    train_all: bool = setting(
        True,
        "train clients whose weight is 0, too; False: same models, less work",
        static=True,
    )
    clip_norm: float = setting(0.0, "clip gradients to this global norm; 0: off", low=0)
    eval_every: int = setting(
        1, "intervals between two evaluations", low=1, static=True
    )
    report_every: int = setting(
        0,
        "intervals per compiled call and progress line; 0: by their work",
        low=0,
        static=True,
    )
    checkpoint: bool = setting(
        True, "save from time to time, resume from the workdir", effect=False
    )
    devices: int = setting(
        0,
        "devices that share the clients; 0: all (CPU: one per core)",
        low=0,
        static=True,
    )
    mapping: str = setting(
        "auto", "clients one after another or side by side", MAPPINGS, static=True
    )
    client_block: int = setting(
        0, "clients trained side by side under vmap; 0: all", low=0, static=True
    )
    convolution: str = setting(
        "auto", "how convolutions are computed", CONVOLUTIONS, static=True
    )
    precision: str = setting(
        "float32",
        "of a network's arithmetic; weights stay float32",
        PRECISIONS,
        static=True,
    )
    compile_cache: str = setting(
        "auto",
        "folder of compiled programs; auto: below ~/.cache; or off",
        effect=False,
    )
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    quadratic: QuadraticConfig = dataclasses.field(default_factory=QuadraticConfig)
    partition: PartitionConfig = dataclasses.field(default_factory=PartitionConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    timeline: TimelineConfig = dataclasses.field(default_factory=TimelineConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    constants: ConstantsConfig = dataclasses.field(default_factory=ConstantsConfig)
    seeds: SeedsConfig = dataclasses.field(default_factory=SeedsConfig)


SETTINGS = components.declared(General)
check = functools.partial(components.check, SETTINGS)
