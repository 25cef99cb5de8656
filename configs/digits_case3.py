"""Handwritten digits of scikit-learn, Case 3, DMS: the default experiment.

Reproduces: nothing of the paper; real data that needs no download, to try things on.
Expected: over 90 % test accuracy.
Time: about 10 seconds on 2 CPU cores, compilation included.
Run: python launch.py
"""

from tsfl_jax.config import Config


def get_config() -> Config:
    config = Config()
    config.algorithm = "dms"  # dms, fedavg, fedprox or fedasync
    config.num_intervals = 60
    config.lr = 0.03
    config.batch_size = 8
    config.data.name = "digits"
    config.schedule.kind = "case3"
    config.schedule.data_size = 44  # 20 clients share 1,438 training images
    config.model.name = "mlp"
    config.model.hidden = 64
    return config
