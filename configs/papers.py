"""All experiments of the paper in one file, by name: papers.py:mnist_case1.

Reproduces: Tables 1 and 2, Fig. 3 to 7 of Shao et al., 20 clients.
Paper, best test accuracy in %: in the files of the same name, such as mnist_case1.py.
Time: from 1 minute (MNIST) to 20 hours (SVHN) on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/papers.py:mnist_case1 --config.algorithm=fedavg

What the paper leaves open has the choices of docs/architecture.md.
"""

from tsfl_jax.components import check_name
from tsfl_jax.config import Config, replace

# Data set of the paper → what is changed from the defaults of `Config` for it.
MANY = {"num_intervals": 100, "report_every": 1}
COLOR = {"lr": 0.005, "report_every": 1, "data.normalize": "standard"}
RESNET = {"model.name": "resnet18", "model.norm": "group"}
DATA = {
    "mnist": {"data.name": "mnist", "model.name": "mnist_cnn"},
    "fashion_mnist": MANY | {"data.name": "fashion_mnist", "model.name": "fashion_cnn"},
    "cifar10": COLOR | {"data.name": "cifar10", "model.name": "vgg11"},
    "svhn": COLOR | MANY | RESNET | {"data.name": "svhn_cropped"},
}
# Experiment by name, such as "svhn_case3" or "mnist_select2" → its settings.
PAPER = {
    f"{data}_case{case}": changes | {"schedule.kind": f"case{case}"}
    for data, changes in DATA.items()
    for case in (1, 2, 3)
} | {
    f"mnist_select{least}": DATA["mnist"] | {"schedule.upload_above": least}
    for least in (2, 4)
}


def get_config(name: str = "mnist_case1") -> Config:
    check_name("experiment of the paper", name, PAPER)
    return replace(Config(), {"schedule.data_size": 1024} | PAPER[name])
