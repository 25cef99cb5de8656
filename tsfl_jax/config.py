"""Every setting of an experiment: a tree of dataclasses with one comment each.

Only `prepare` and `experiment` read it (and `validate` checks it); all other modules
take plain arguments.
"""

import dataclasses

ALGORITHMS = (
    "dms",
    "bound_optimal",
    "fedavg",
    "fedprox",
    "fedasync",
    "fedbuff",
    "fedat",
    "fednova",
    "scaffold",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "median",
    "trimmed_mean",
    "geometric_median",
    "krum",
    "multi_krum",
)
FRAMEWORKS = (
    "none",
    "tsfl",
    "sfl",
    "afl",
    "fedbuff",
    "fedat",
    "fedcs",
    "esync",
    "safa",
)
STALENESS = ("constant", "polynomial", "hinge", "exponential")
FREE_RIDING = ("claim", "echo", "visit")
DATA_NAMES = (
    "digits",
    "mnist",
    "fashion_mnist",
    "cifar10",
    "svhn_cropped",
    "npz",
    "synthetic",
    "quadratic",
)
PARTITIONS = ("iid", "dirichlet", "shards", "label")
SCHEDULES = ("case1", "case2", "case3", "explicit", "distribution", "trace")
MODELS = ("mlp", "mnist_cnn", "fashion_cnn", "vgg11", "resnet18", "quadratic")
NORMS = ("none", "group", "batch")
ITERATIONS = ("pass", "step")
NORMALIZATIONS = ("unit", "standard")
MAPPINGS = ("auto", "sequential", "vmap")
CONVOLUTIONS = ("auto", "fast", "slices", "lax")


@dataclasses.dataclass
class DataConfig:
    """Where the samples come from."""

    name: str = "digits"  # one of DATA_NAMES
    dir: str = ""  # TFDS data; "" = $TFDS_DATA_DIR or ~/tensorflow_datasets
    file: str = ""  # name="npz": file with x_train, y_train, x_test, y_test
    download: bool = True  # fetch and prepare a missing TFDS data set
    normalize: str = "unit"  # unit: to [0, 1]; standard: zero mean, unit variance
    # name="synthetic": shape of one sample; "quadratic": (d,)
    shape: tuple[int, ...] = (28, 28, 1)
    num_classes: int = 10  # name="synthetic"
    train_size: int = 0  # use that many training samples; 0 = all (synthetic: 4096)
    test_size: int = 0  # use that many test samples; 0 = all (synthetic: 1024)


@dataclasses.dataclass
class QuadraticConfig:
    """data.name="quadratic": every client its own quadratic, all constants known."""

    smoothness: float = 1.0  # L, the largest eigenvalue
    convexity: float = 1.0  # the smallest eigenvalue, <= L
    grad_variance: str = "constant(1)"  # groups; σ_i² of a mini-batch gradient
    dissimilarity: str = "constant(1)"  # groups; Γ_i = ‖w* − w_i*‖²
    distance: float = 1.0  # ‖w⁰ − w*‖²


@dataclasses.dataclass
class PartitionConfig:
    """How the training samples are dealt to the clients."""

    kind: str = "dirichlet"  # one of PARTITIONS
    alpha: float = 0.5  # kind="dirichlet": concentration; small = more skewed
    classes_per_client: int = 2  # kind="shards"
    replacement: bool = False  # let clients share samples when there are too few


@dataclasses.dataclass
class ScheduleConfig:
    """How many local iterations on how many samples, per client and interval."""

    kind: str = "case3"  # one of SCHEDULES
    data_size: int = 1024  # samples a client (the mean, where sizes are drawn)
    tau: tuple[int, ...] = ()  # kind="explicit": per client, or per equal group
    tau_groups: str = ""  # kind="distribution": "normal(2,0.4); uniform(1,5)"
    size_groups: str = ""  # likewise for sizes; "" = the kind's own sizes
    trace: str = ""  # kind="trace": CSV, interval,client,tau[,size], from 0
    iteration: str = "pass"  # one local iteration: "pass" over the data, or one "step"
    upload_above: int = 0  # client-selection system: upload only if τ > this
    dropout: float = 0.0  # chance that a client is away for an interval
    interval_seconds: float = 1.0  # Δ, virtual seconds
    free_riders: int = 0  # clients that do not keep to the rules
    free_riding: str = "claim"  # one of FREE_RIDING, see tsfl_jax/riders.py


@dataclasses.dataclass
class TimelineConfig:
    """Virtual time: who delivers when, from speeds and delays in seconds."""

    framework: str = "none"  # one of FRAMEWORKS; none: τ comes from `schedule`
    speed: str = "uniform(0.25,1)"  # groups; seconds an iteration at the mean size
    jitter: float = 0.0  # sigma of a lognormal factor on each iteration and transfer
    download: str = "constant(0)"  # groups; seconds
    upload: str = "constant(0)"  # groups; seconds
    speeds: str = ""  # CSV, client,seconds[,download,upload], instead of the draws
    availability: str = ""  # CSV, client,start,end in seconds; others always online
    local_iterations: int = 4  # H of a task; tsfl: as many as fit into Δ
    carry: bool = False  # tsfl: an unfinished iteration goes on in the next interval
    buffer: int = 10  # fedbuff: deliveries of one update
    tiers: int = 3  # fedat
    deadline: float = 4.0  # fedcs: seconds of a round
    fraction: float = 0.5  # safa: share of the clients that ends a round
    lag: int = 5  # safa: most versions a client may be behind


@dataclasses.dataclass
class ServerConfig:
    """What the server does with updates; rules beside the paper's."""

    # η_g; 0: the rule's own: 1, fedadam and fedyogi 0.01, fedavgm min(1, 2(1 − β₁))
    lr: float = 0.0
    momentum: float = 0.9  # β₁: fedavgm, fedadam, fedyogi
    second: float = 0.99  # β₂: fedadam, fedyogi
    floor: float = 1e-3  # added to √v: fedadam, fedyogi
    trim: float = 0.1  # share of clients that may be wrong: trimmed_mean, krum
    staleness: str = "constant"  # one of STALENESS: what a late update still counts
    staleness_a: float = 0.5  # a of polynomial and hinge
    staleness_b: float = 4.0  # b of hinge, in updates


@dataclasses.dataclass
class ModelConfig:
    """The network."""

    name: str = "mlp"  # one of MODELS
    norm: str = "none"  # vgg11, resnet18: one of NORMS
    hidden: int = 50  # width of the hidden layer of mlp and mnist_cnn; 0 = none


@dataclasses.dataclass
class DMSConfig:
    """Constants of Corollary 1; a negative one is estimated in every interval."""

    smoothness: float = -1.0  # L
    grad_sq_norm: float = -1.0  # G²
    grad_variance: float = -1.0  # σ²
    weight_limit: float = 0.0  # θ ≥ 1: ρ_i ≤ θ/N; 0 = no limit


@dataclasses.dataclass
class Config:
    """One experiment."""

    algorithm: str = "dms"  # one of ALGORITHMS
    seed: int = 0  # ≥ 0; decides every random draw
    num_intervals: int = 50  # T
    num_clients: int = 20  # N
    lr: float = 0.003  # η
    momentum: float = 0.9  # reset at the start of every interval
    batch_size: int = 32  # B
    mu: float = 0.01  # FedProx's proximal coefficient μ
    gamma: float = 0.5  # FedAsync's share γ of the old global model
    proximal: bool = False  # add μ/2‖w − w^t‖² under every algorithm, not only fedprox
    measure_clients: bool = False  # σ_i², ‖∇F_i − ∇F‖² at every w^t: theory_report
    clip_norm: float = 0.0  # clip gradients to this global norm; 0 = off
    eval_every: int = 1  # intervals between two evaluations on the test set
    report_every: int = 5  # intervals of one compiled call, between progress lines
    checkpoint: bool = True  # save after every report, resume from the same workdir
    devices: int = 0  # devices that share the clients; 0: all (CPU: one a core)
    mapping: str = "auto"  # clients: one after another, or vmap in chunks
    client_chunk: int = 0  # clients trained side by side under vmap; 0 = all
    convolution: str = "auto"  # one of CONVOLUTIONS
    compile_cache: str = "auto"  # folder of compiled programs; auto: ~/.cache; or off
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    quadratic: QuadraticConfig = dataclasses.field(default_factory=QuadraticConfig)
    partition: PartitionConfig = dataclasses.field(default_factory=PartitionConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    timeline: TimelineConfig = dataclasses.field(default_factory=TimelineConfig)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    dms: DMSConfig = dataclasses.field(default_factory=DMSConfig)


# Settings that cannot change a result: a checkpoint may be resumed with others.
# Data is compared by its fingerprint.
WITHOUT_EFFECT = {
    "checkpoint",
    "compile_cache",
    "data.dir",
    "data.download",
    "data.file",
}


def effective(settings: dict) -> dict:
    """Of flat settings those that can change a result of this experiment.

    Settings that do not apply are left out, so that runs of before they existed are
    still the same experiments.
    """
    kept = {n: v for n, v in settings.items() if n not in WITHOUT_EFFECT}
    if settings.get("data.name") != "quadratic":
        kept = {n: v for n, v in kept.items() if not n.startswith("quadratic.")}
    if not settings.get("measure_clients"):
        kept.pop("measure_clients", None)
    return kept


def flat(settings: dict, prefix: str = "") -> dict:
    """Nested settings as one dict, ``{"data.name": "mnist"}``."""
    found = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
