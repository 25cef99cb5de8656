"""``python -m benchmarks.lanes``: seeds as lanes of one program against single runs.

MNIST CNN, 20 clients, Case 1 of 256 samples per client, one interval (``--model mlp``:
the digits, 48 samples, B = 8, τ = 2); a lane should cost what a single run costs on a
CPU, and much less on a GPU.
"""

import statistics
from collections.abc import Callable

from benchmarks import common
from tsfl_jax.config import Config
from tsfl_jax.engine import devices
from tsfl_jax.prepare import backend
from tsfl_jax.prepare.custom_hooks import Custom
from tsfl_jax.prepare.prepare import Prepared, load_dataset, prepare_all
from tsfl_jax.run import lanes, runner

WORK = {"schedule__kind": "case1", "schedule__data_size": 256}
MLP = {  # on the digits
    "model__name": "mlp",
    "data__name": "digits",
    "data__train_size": 0,
    "data__test_size": 0,
    "batch_size": 8,
    "schedule__data_size": 48,
    "schedule__kind": "explicit",
    "schedule__tau": (2,),
}


def config_of(model: str, **work) -> Config:
    """An experiment of one of the networks of the paper, or of the MLP."""
    if model == "mlp":
        return common.make_config("mnist_cnn", **work | MLP)
    return common.make_config(model, **work)


def several(seeds: int, model: str, work: dict) -> list[Prepared]:
    """Experiments that differ in their seed only."""
    configs = [config_of(model, seed=s, **work) for s in range(seeds)]
    return prepare_all(configs, Custom(dataset=load_dataset(configs[0])))


def compiled(found: list[Prepared]) -> Callable[[], None]:
    """One interval of all lanes as a function without arguments."""
    group = lanes.make_group(found, backend.start_jax(found[0].config))
    arrays = lanes.make_arrays(group, found)
    return common.first_chunk(group.program, arrays)[0]


def main() -> None:
    """Prints the table as Markdown."""
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 10, 40])
    parser.add_argument("--model", default="mnist_cnn", choices=[*common.SHAPES, "mlp"])
    parser.add_argument("--devices", type=int, default=0)
    options = parser.parse_args()
    devices.start(options.devices)
    single = runner.build(config_of(options.model, **WORK))
    runs = {"single run": common.compiled(single)}
    found = several(max(options.lanes), options.model, WORK)
    for count in options.lanes:
        runs[f"{count} lanes"] = compiled(found[:count])
    seconds = common.side_by_side(runs, options.repeats)
    inputs = single.arrays.inputs
    samples = int((inputs.tau[0, 0] * inputs.size[0, 0]).sum())
    rows = []
    for name, times in seconds.items():
        count = 1 if name == "single run" else int(name.split()[0])
        ratio = common.ratios(times, [count * s for s in seconds["single run"]])
        speed = count * samples / statistics.median(times)
        rows.append(
            {
                "program": name,
                "samples/s": f"{speed:,.0f}",
                "time per lane, of a single run": common.spread(ratio),
            }
        )
    common.show(rows)


if __name__ == "__main__":
    main()
