"""``python -m benchmarks.implementations``: which mapping and convolution win here.

One interval of FedAvg, τ = 1, batch 32, of every combination, taken in turns; the
table in `experiment.backend` follows it. On a GPU with PyTorch it also runs the loop
over clients there, counts the kernels that run, and with ``--structure`` says how many
of the program's kernels XLA put in how many command buffers (CUDA graphs).
"""

import itertools
import statistics
from collections.abc import Callable

import jax

from benchmarks import ahead, common, profile
from tsfl_jax.engine import devices
from tsfl_jax.prepare import backend

MAPPINGS = ("sequential", "vmap")
FORMS = ("fast", "slices", "quarters", "lax")


def kernels(run: Callable[[], None]) -> str:
    """Kernels that one call starts on a GPU, "–" without one."""
    if jax.default_backend() != "gpu":
        return "–"
    return str(len(profile.record(run)[0]))


def measure(name: str, options, folder: ahead.Folder | None) -> list[dict]:
    """The rows of one network; `folder` of `ahead.dump` on a GPU."""
    built, runs = {}, {}
    ways = options.mappings, options.forms, options.precisions
    for mapping, form, precision in itertools.product(*ways):
        if form == "lax" and jax.default_backend() == "cpu" and not options.all:
            continue  # 10 to 50 times slower inside a loop: jax-ml/jax#12868
        exp = common.make_experiment(
            name,
            num_clients=options.clients,
            mapping=mapping,
            convolution=form,
            precision=precision,
            schedule__kind="explicit",
            schedule__tau=(1,),
            schedule__data_size=options.size,
        )
        way = mapping, form, precision
        runs[way], _ = common.first_chunk(exp.program, exp.arrays)
        built[way] = None if folder is None else ahead.structure_of(folder)
    theirs = common.torch_interval(name, exp)
    product, product_flop = common.matrix_product()
    seconds = common.side_by_side(
        runs | {"product": product} | ({"torch": theirs} if theirs else {}),
        options.repeats,
    )
    rate = product_flop / statistics.median(seconds["product"])
    samples = options.clients * options.size
    flop = common.flop_per_sample(name)
    rows = []
    for way, structure in built.items():
        mapping, form, precision = way
        speed = samples / statistics.median(seconds[way])
        against = (
            common.spread(common.ratios(seconds["torch"], seconds[way]))
            if theirs
            else "no PyTorch"
        )
        chosen = backend.implementation(jax.default_backend())
        rows.append(
            {
                "network": name,
                "mapping": mapping,
                "convolution": form,
                "precision": precision,
                "samples/s": f"{speed:,.0f}",
                "× PyTorch": against,
                "TFLOP/s": f"{speed * flop / 1e12:.2f}",
                "of large products": f"{speed * flop / rate:.2f}",
                "kernels": kernels(runs[way]),
                "captured": (
                    "–"
                    if structure is None
                    else f"{structure.captured} of {structure.kernels} in "
                    f"{structure.buffers}"
                ),
                "launches per step": (
                    "–" if structure is None else structure.step_launches
                ),
                "default": "yes" if (*chosen, "float32") == way else "",
            }
        )
    return rows


def main() -> None:
    """Prints the table as Markdown."""
    parser = common.parser(__doc__, repeats=3)
    parser.add_argument("--models", nargs="+", default=list(common.SHAPES))
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--size", type=int, default=128, help="samples per client")
    parser.add_argument("--mappings", nargs="+", default=MAPPINGS, choices=MAPPINGS)
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--precisions", nargs="+", default=["float32"])
    parser.add_argument("--all", action="store_true", help="lax on a CPU too")
    parser.add_argument("--devices", type=int, default=0)
    structure = "on a GPU: kernels in command buffers; compiles without a cache"
    parser.add_argument("--structure", action="store_true", help=structure)
    options = parser.parse_args()
    folder = ahead.dump() if options.structure else None
    devices.start(options.devices)
    rows = [row for name in options.models for row in measure(name, options, folder)]
    common.show(rows)


if __name__ == "__main__":
    main()
