"""``python -m benchmarks.wide``: wide layers with and without XLA's splitting pass.

Perceptrons 784-h-10, 100 clients of 20 samples, B = 10, FedAvg, one interval a call.
The pass `cpu-parallel-task-assigner` splits elementwise operations of more than some
40,000 elements over a pool of threads; programs for CPUs leave it out
(`devices.compiler_options`). ``--busy 4`` starts four processes that compute beside.
"""

import contextlib
import multiprocessing
from collections.abc import Callable
from unittest import mock

from benchmarks import common
from tsfl_jax.engine import devices


def _compute() -> None:
    while True:
        pass


@contextlib.contextmanager
def beside(count: int):
    """Processes that compute until the end of the context."""
    started = [
        multiprocessing.get_context("spawn").Process(target=_compute, daemon=True)
        for _ in range(count)
    ]
    for process in started:
        process.start()
    yield
    for process in started:
        process.kill()


def interval(hidden: int, options: dict | None) -> Callable[[], None]:
    """One interval; `options` None: compiled as the package does."""
    exp = common.make_experiment(
        "mnist_cnn",
        model__name="mlp",
        model__hidden=hidden,
        num_clients=100,
        batch_size=10,
        schedule__data_size=20,
        schedule__kind="explicit",
        schedule__tau=(1,),
        mapping="sequential",
    )
    if options is None:
        return common.compiled(exp)
    with mock.patch.object(devices, "compiler_options", lambda mesh: options):
        return common.compiled(exp)


def measure(hidden: list[int], repeats: int) -> list[dict]:
    """The rows of the table."""
    rows = []
    for width in hidden:
        runs = {"split": interval(width, {}), "whole": interval(width, None)}
        seconds = common.side_by_side(runs, repeats)
        rows.append(
            {
                "hidden": width,
                "split, ms": common.spread([1e3 * s for s in seconds["split"]], 1),
                "as compiled here, ms": common.spread(
                    [1e3 * s for s in seconds["whole"]], 1
                ),
                "ratio": common.spread(
                    common.ratios(seconds["split"], seconds["whole"])
                ),
            }
        )
    return rows


def main() -> None:
    """Prints the table as Markdown."""
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--busy", type=int, default=0)
    options = parser.parse_args()
    devices.start(0)
    with beside(options.busy):
        common.show(measure(options.hidden, options.repeats))


if __name__ == "__main__":
    main()
