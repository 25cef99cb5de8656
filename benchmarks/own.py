"""``python -m benchmarks.own``: networks that a user wrote, replayed and as they are.

One pass over 50 images per client, B = 10, FedAvg: a CNN of two convolutions on 32x32x3
images, and a ResNet-20 with batch normalization, both as Flax's examples are written.
"auto" is the default (`models.replay`), "lax" leaves the network as it is.
"""

from flax import linen as nn

from benchmarks import common
from tsfl_jax.engine import devices
from tsfl_jax.experiment import assemble


class CNN(nn.Module):
    """Convolutions of 32 and 64 filters, a pool, a dense layer of 128."""

    @nn.compact
    def __call__(self, x):
        for filters in (32, 64):
            x = nn.relu(nn.Conv(filters, (3, 3), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2)).reshape(x.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


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


NETWORKS = {"CNN": CNN, "ResNet-20": ResNet20}


def measure(names: list[str], clients: int, repeats: int) -> list[dict]:
    """The rows of the table."""
    rows = []
    for name in names:
        runs = {}
        for form in ("auto", "lax"):
            config = common.make_config(
                "vgg11",
                num_clients=clients,
                batch_size=10,
                schedule__data_size=50,
                schedule__kind="explicit",
                schedule__tau=(1,),
                convolution=form,
            )
            exp = assemble.build(config, model=NETWORKS[name]())
            runs[form] = common.compiled(exp)
        seconds = common.side_by_side(runs, repeats)
        rows.append(
            {
                "network": name,
                "lax, ms per client": common.spread(
                    [1e3 * s / clients for s in seconds["lax"]], 0
                ),
                "auto, ms per client": common.spread(
                    [1e3 * s / clients for s in seconds["auto"]], 0
                ),
                "lax / auto": common.spread(
                    common.ratios(seconds["lax"], seconds["auto"])
                ),
            }
        )
    return rows


def main() -> None:
    """Prints the table as Markdown."""
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS], choices=NETWORKS)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    devices.start(0)
    common.show(measure(options.networks, options.clients, options.repeats))


if __name__ == "__main__":
    main()
