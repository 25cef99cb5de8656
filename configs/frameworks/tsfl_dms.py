"""T-SFL with DMS: whatever fits into an interval, weighted by DMS.

Reproduces: no table; Shao et al., Algorithm 1,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s an iteration, 0.1 s a transfer, 80 virtual seconds.
Expected: 94.30 % at best, 90 % after 31.60 virtual seconds, means of 5 seeds.
Time: about 29 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/tsfl_dms.py
All: python -m tsfl_jax.compare configs/frameworks/*.py
"""

from tsfl_jax.config import Config


def get_config() -> Config:
    config = Config()
    config.algorithm = "dms"
    config.num_intervals = 40
    config.lr = 0.003
    config.data.name = "mnist"
    config.model.name = "mnist_cnn"
    config.schedule.data_size = 512
    config.schedule.interval_seconds = 2.0
    config.timeline.framework = "tsfl"
    config.timeline.speed = "uniform(0.25,1)"
    config.timeline.jitter = 0.2
    config.timeline.download = "constant(0.1)"
    config.timeline.upload = "constant(0.1)"
    config.timeline.local_iterations = 3
    return config
