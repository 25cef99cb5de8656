"""A few seconds through every part of the program, on synthetic images.

Reproduces: nothing; for trying an installation or a change.
Expected: the loss falls.
Time: about 10 seconds on 2 CPU cores, compilation included.
Run: python launch.py --config=configs/smoke.py
"""

from tsfl_jax.config import Config


def get_config() -> Config:
    config = Config()
    config.num_intervals = 4
    config.num_clients = 4
    config.lr = 0.01
    config.batch_size = 8
    config.report_every = 1
    config.data.name = "synthetic"
    config.data.shape = (28, 28, 1)
    config.data.train_size = 512
    config.data.test_size = 256
    config.schedule.kind = "case1"
    config.schedule.data_size = 32
    config.model.name = "mnist_cnn"
    return config
