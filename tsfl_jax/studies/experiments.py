"""The experiments of ``configs/``: the paper's, frameworks, quadratic clients.

The files in ``configs/`` call these functions, and say what to expect. What the
paper leaves open has the choices of docs/architecture.md.
"""

from tsfl_jax import config as settings
from tsfl_jax.components import check_name
from tsfl_jax.config import Config, read

# Data set of the paper → what is changed from the defaults of `Config` for it.
_MANY = {"num_intervals": 100, "report_every": 1}
_COLOR = {"lr": 0.005, "report_every": 1, "data.normalize": "standard"}
_RESNET = {"model.name": "resnet18", "model.norm": "group"}
_DATA = {
    "mnist": {"data.name": "mnist", "model.name": "mnist_cnn"},
    "fashion_mnist": _MANY
    | {"data.name": "fashion_mnist", "model.name": "fashion_cnn"},
    "cifar10": _COLOR | {"data.name": "cifar10", "model.name": "vgg11"},
    "svhn": _COLOR | _MANY | _RESNET | {"data.name": "svhn_cropped"},
}
CLASSES = 10  # of each of these data sets, and of scikit-learn's digits
# Experiment of the paper by name, such as "svhn_case3" or "mnist_select2".
PAPER = {
    f"{data}_case{case}": changes | {"schedule.kind": f"case{case}"}
    for data, changes in _DATA.items()
    for case in (1, 2, 3)
} | {
    f"mnist_select{least}": _DATA["mnist"] | {"schedule.upload_above": least}
    for least in (2, 4)
}
# Clients that all frameworks are compared on: 80 virtual seconds, 0.25 to 1 s per
# iteration, 0.1 s per transfer.
_CLIENTS = {
    "num_intervals": 40,
    "data.name": "mnist",
    "model.name": "mnist_cnn",
    "schedule.data_size": 512,
    "schedule.interval_seconds": 2.0,
    "timeline.jitter": 0.2,
    "timeline.download": "constant(0.1)",
    "timeline.upload": "constant(0.1)",
    "timeline.local_iterations": 3,
}
# Data set → what is changed for it; digits come with scikit-learn, in small images.
_FRAMEWORK_DATA = {
    "mnist": {},
    "digits": {"data.name": "digits", "model.name": "mlp", "batch_size": 8}
    | {"lr": 0.01, "schedule.data_size": 64},
}
# Clients with one quadratic each, all constants known: `bounds` varies it.
_QUADRATIC = {
    "algorithm": "dms",  # or fedavg, fedprox, fednova, …
    "num_intervals": 50,
    "num_clients": 10,
    "lr": 0.1,  # η <= 1/L keeps every iterate among w⁰ and the samples
    "momentum": 0.0,
    "batch_size": 8,
    "data.name": "quadratic",
    "data.shape": (8,),
    "quadratic.smoothness": 1.0,
    "quadratic.convexity": 0.1,
    "quadratic.grad_variance": "constant(0.5)",
    "quadratic.dissimilarity": "constant(1)",
    "quadratic.distance": 4.0,
    "partition.kind": "label",
    "schedule.kind": "case1",
    "schedule.data_size": 64,
    "schedule.iteration": "step",
    "model.name": "quadratic",
}
FRAMEWORKS = {
    "afl": {"algorithm": "fedasync", "staleness.kind": "polynomial"},
    "cached": {},
    "esync": {},
    "fedat": {"algorithm": "fedat"},
    "fedbuff": {"algorithm": "fedbuff", "staleness.kind": "polynomial"},
    "fedcs": {"timeline.deadline": 3.0},
    "hysync": {"algorithm": "fedasync", "staleness.kind": "polynomial"},
    "safa": {"algorithm": "safa"},
    "sfl": {},
    "tsfl": {},
    "ttfed": {},
    "tsfl_dms": {"algorithm": "dms", "timeline.framework": "tsfl"},
}


def paper(name: str) -> Config:
    """The settings of one of the paper's experiments, with DMS.

    Args:
      name: a key of `PAPER`.

    Raises:
      UserError: there is no such experiment.
    """
    check_name("experiment of the paper", name, PAPER)
    return settings.replace(Config(), {"schedule.data_size": 1024} | PAPER[name])


def quadratic() -> Config:
    """The settings of clients whose constants are known, with DMS."""
    return settings.replace(Config(), _QUADRATIC)


def framework(name: str, data: str = "mnist") -> Config:
    """The settings of a framework on the clients that all frameworks share.

    Args:
      name: a key of `FRAMEWORKS`.
      data: "mnist", or "digits", which need no download: 64 samples per client, and a
        network that fits them.

    Raises:
      UserError: other data.
    """
    check_name(f"data of frameworks/{name}", data, _FRAMEWORK_DATA)
    chosen = {"algorithm": "fedavg", "timeline.framework": name} | FRAMEWORKS[name]
    return settings.replace(Config(), read(_CLIENTS | _FRAMEWORK_DATA[data] | chosen))
