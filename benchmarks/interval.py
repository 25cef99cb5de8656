"""``python -m benchmarks.interval``: one interval of 20 clients against PyTorch.

Side by side in one run: same data, networks, τ, batch 32, float32; evaluation and
compilation left out. Case 1 of 1,024 samples per client for the two small networks;
one pass over 128 samples per client for VGG11 and ResNet-18. The floor is the FLOP of
direct convolutions at the rate of large matrix products here, taken in the same turns;
fewer multiplications can pass it. ``--best``: against the fastest set-up of PyTorch
that was found. Needs the extra ``[bench]``.
"""

import statistics

from benchmarks import common
from tsfl_jax.engine import devices

_CASE1 = {"schedule__kind": "case1", "schedule__data_size": 1024}
_ONE_PASS = {
    "schedule__kind": "explicit",
    "schedule__tau": (1,),
    "schedule__data_size": 128,
}
WORK = {
    "mnist_cnn": _CASE1,
    "fashion_cnn": _CASE1,
    "vgg11": _ONE_PASS,
    "resnet18": _ONE_PASS,
}


def measure(name: str, repeats: int, clients: int, best: bool) -> dict:
    """One row of the table."""
    exp = common.make_experiment(name, num_clients=clients, **WORK[name])
    ours, theirs = common.compiled(exp), common.torch_interval(name, exp, best)
    if theirs is None:
        raise SystemExit("benchmarks.interval needs PyTorch: install the extra [bench]")
    tau, size = exp.arrays.inputs.tau[0, 0], exp.arrays.inputs.size[0, 0]
    product, flop = common.matrix_product()
    seconds = common.side_by_side(
        {"torch": theirs, "tsfl_jax": ours, "product": product}, repeats
    )
    samples = int((tau * size).sum())
    median = {k: samples / statistics.median(v) for k, v in seconds.items()}
    rate = flop / statistics.median(seconds["product"])
    floor = rate / common.flop_per_sample(name)
    return {
        "network": name,
        "samples": f"{samples:,}",
        "PyTorch samples/s": f"{median['torch']:,.0f}",
        "tsfl_jax samples/s": f"{median['tsfl_jax']:,.0f}",
        "ratio, median (range)": common.spread(
            common.ratios(seconds["torch"], seconds["tsfl_jax"])
        ),
        "product, GFLOP/s": f"{rate / 1e9:.0f}",
        "floor, samples/s": f"{floor:,.0f}",
        "of the floor": f"{median['tsfl_jax'] / floor:.2f}",
    }


def main() -> None:
    """Prints the table as Markdown."""
    parser = common.parser(__doc__, repeats=7)
    parser.add_argument("--models", nargs="+", default=list(WORK), choices=list(WORK))
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--devices", type=int, default=0)
    best = "PyTorch in two processes with one thread each, channels_last, fused SGD"
    parser.add_argument("--best", action="store_true", help=best)
    options = parser.parse_args()
    devices.start(options.devices)
    rows = [
        measure(m, options.repeats, options.clients, options.best)
        for m in options.models
    ]
    common.show(rows)


if __name__ == "__main__":
    main()
