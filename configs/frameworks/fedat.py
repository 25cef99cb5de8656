"""Tiers of similar speed, each with its own synchronous rounds.

Reproduces: no table; Chai et al., 2021 (FedAT), 3 tiers,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s an iteration, 0.1 s a transfer, 80 virtual seconds.
Expected: 94.98 % at best, 90 % after 23.77 virtual seconds, means of 3 seeds.
Time: about 39 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/fedat.py
All: python -m tsfl_jax.compare configs/frameworks/*.py
"""

from tsfl_jax.config import Config


def get_config() -> Config:
    config = Config()
    config.algorithm = "fedat"
    config.num_intervals = 40
    config.lr = 0.003
    config.data.name = "mnist"
    config.model.name = "mnist_cnn"
    config.schedule.data_size = 512
    config.schedule.interval_seconds = 2.0
    config.timeline.framework = "fedat"
    config.timeline.speed = "uniform(0.25,1)"
    config.timeline.jitter = 0.2
    config.timeline.download = "constant(0.1)"
    config.timeline.upload = "constant(0.1)"
    config.timeline.local_iterations = 3
    config.timeline.tiers = 3
    return config
