"""``python -m benchmarks.own``: networks that a user wrote, beside PyTorch.

FedAvg, one pass over the samples of every client, SGD without momentum. "auto" is the
default, in which convolutions are replaced (`models.replay`); "lax" leaves the network
as it is (``--forms auto lax``). PyTorch is a loop over clients in one process on all
cores, and in two processes of one thread each (`torch_loop`); the faster one counts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import tsfl_jax
from benchmarks import common
from tsfl_jax import config
from tsfl_jax.engine import devices
from tsfl_jax.run import runner


class TwoConvolutions(nn.Module):
    """The CNN of pfl-research; with dropout the EMNIST model of FedJAX."""

    classes: int = 10
    dropout: bool = False

    @nn.compact
    def __call__(self, x, train: bool = False):
        def drop(x, rate):
            return nn.Dropout(rate, deterministic=not train)(x) if self.dropout else x

        for filters in (32, 64):
            x = nn.relu(nn.Conv(filters, (3, 3), padding="VALID")(x))
        x = drop(nn.max_pool(x, (2, 2), strides=(2, 2)), 0.25)
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.classes)(drop(x, 0.5))


class ResNet20(nn.Module):
    """He et al. 2016, section 4.2, n = 3."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        def conv_norm(x, filters, kernel=3, stride=1):
            strides = (stride, stride)
            x = nn.Conv(filters, (kernel, kernel), strides, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=not train)(x)

        x = nn.relu(conv_norm(x, 16))
        for stage, filters in enumerate((16, 32, 64)):
            for block in range(3):
                stride = 2 if stage and not block else 1
                y = nn.relu(conv_norm(x, filters, stride=stride))
                y = conv_norm(y, filters)
                if y.shape != x.shape:
                    x = conv_norm(x, filters, 1, stride)
                x = nn.relu(x + y)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


class Recurrent(nn.Module):
    """Two recurrent layers on characters, as LEAF has it for Shakespeare."""

    cell: Any

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(80, 8)(x)
        for _ in range(2):
            x = nn.RNN(self.cell(256))(x)
        return nn.Dense(80)(x[:, -1])


class Transformer(nn.Module):
    """Two layers of width 128 with four heads on characters."""

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(80, 128)(x) + nn.Embed(80, 128)(jnp.arange(x.shape[1]))
        for _ in range(2):
            x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
            y = nn.Dense(512)(nn.LayerNorm()(x))
            x += nn.Dense(128)(nn.gelu(y))
        return nn.Dense(80)(nn.LayerNorm()(x).mean(1))


class Work(NamedTuple):
    """A network and what its clients do."""

    network: nn.Module
    shape: tuple[int, ...] = (32, 32, 3)  # one axis: characters
    clients: int = 10
    samples: int = 50
    batch_size: int = 10


WORK = {  # named as in `torch_loop.NETWORKS`
    "CNN": Work(TwoConvolutions(), clients=50),
    "EMNIST CNN, dropout": Work(TwoConvolutions(62, True), (28, 28, 1), 10, 160, 20),
    "ResNet-20, batch norm": Work(ResNet20()),
    "LSTM": Work(Recurrent(nn.LSTMCell), (80,), samples=40),
    "GRU": Work(Recurrent(nn.GRUCell), (80,), samples=40),
    "transformer": Work(Transformer(), (80,), samples=40),
}


def data(work: Work) -> tsfl_jax.Dataset:
    """Random samples; what is computed with them does not depend on their values."""
    rng, number = np.random.default_rng(0), work.clients * work.samples
    images = len(work.shape) == 3
    x = rng.integers(0, 256 if images else 80, (number, *work.shape))
    x = x.astype(np.uint8 if images else np.int32)
    classes = 80 if not images else getattr(work.network, "classes", 10)
    y = np.arange(number) % classes
    return tsfl_jax.make_dataset(x, y, x[:classes], y[:classes], num_classes=classes)


def config_of(work: Work, **settings) -> config.Config:
    """FedAvg, one pass of every client, with settings changed."""
    fixed = {
        "num_clients": work.clients,
        "batch_size": work.batch_size,
        "momentum": 0.0,
        "schedule__data_size": work.samples,
        "schedule__kind": "explicit",
        "schedule__tau": (1,),
    }
    made = config.Config(algorithm="fedavg", num_intervals=1, report_every=1)
    made.compile_cache, made.partition.kind = "off", "iid"
    return common.changed(made, fixed | settings)


def _experiment(work: Work, form: str) -> runner.Experiment:
    made = config_of(work, convolution=form)
    return runner.build(made, model=work.network, dataset=data(work))


def measure(name: str, forms: list[str], repeats: int) -> dict:
    """One row of the table."""
    work = WORK[name]
    experiments = {form: _experiment(work, form) for form in forms}
    runs: dict[str, Any] = {f: common.compiled(e) for f, e in experiments.items()}
    exp = experiments[forms[0]]
    runs["PyTorch, one process"] = common.torch_interval(name, exp)
    if jax.default_backend() == "cpu":
        runs["PyTorch, two"] = common.torch_interval(name, exp, best=True)
    seconds = common.side_by_side({k: r for k, r in runs.items() if r}, repeats)
    row = {"network": name}
    row |= {
        f"{k}, ms": common.spread([1e3 * s for s in seconds[k]], 0) for k in seconds
    }
    rivals = [k for k in seconds if k.startswith("PyTorch")]
    if rivals:
        best = min(rivals, key=lambda k: np.median(seconds[k]))
        row[f"{forms[0]} / PyTorch"] = common.spread(
            common.ratios(seconds[forms[0]], seconds[best])
        )
    return row


def main() -> None:
    """Prints the table as Markdown."""
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--networks", nargs="+", default=[*WORK], choices=WORK)
    parser.add_argument("--forms", nargs="+", default=["auto"], choices=["auto", "lax"])
    options = parser.parse_args()
    devices.start(0)
    common.show([measure(n, options.forms, options.repeats) for n in options.networks])


if __name__ == "__main__":
    main()
