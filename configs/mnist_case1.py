"""MNIST, Case 1: half of the clients 1 local iteration, half 4.

Reproduces: Table 1 and Fig. 3, 20 clients, two-convolution CNN, T = 50.
Paper, best test accuracy in %: FedAvg 96.41, FedProx 97.01, FedAsync 96.17, DMS 97.89.
Time: about 1 minute on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/mnist_case1.py --config.algorithm=dms
"""

from tsfl_jax.config import Config


def get_config() -> Config:
    config = Config()
    config.algorithm = "dms"  # dms, fedavg, fedprox or fedasync
    config.num_intervals = 50
    config.lr = 0.003
    config.data.name = "mnist"
    config.data.normalize = "unit"
    config.schedule.kind = "case1"
    config.model.name = "mnist_cnn"
    return config
