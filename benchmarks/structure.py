"""``python -m benchmarks.structure``: what a GPU executes, from the compiler alone.

Compiles one interval (τ = 1, batch 32; FedAvg, or ``--algorithm``) for an H100 or A100
on a machine that needs none: host launches, kernels of a training step, command
buffers, temporary memory, and the roofline of bytes and FLOP. Nothing runs, so no
column is a time that was measured. Needs the extra ``[aot]``; every program compiles in
a process of its own.
"""

import argparse
import itertools
import json
import subprocess
import sys

from jax.sharding import Mesh

from benchmarks import ahead, common, lanes, own
from tsfl_jax.prepare import backend, prepare
from tsfl_jax.prepare.custom_hooks import Custom
from tsfl_jax.run import program
from tsfl_jax.run.lanes import make_arrays, make_group, single

MAPPINGS = ("vmap", "sequential")
FORMS = ("quarters", "slices", "fast", "lax")


def worker(work: dict) -> dict:
    """The row of one program; the process has not used JAX before."""
    folder = ahead.start(work.get("flags", ""))
    settings = {
        "num_clients": work["clients"],
        "mapping": work["mapping"],
        "convolution": work["form"],
        "precision": work.get("precision", "float32"),
        "algorithm": work.get("algorithm", "fedavg"),
        "schedule__kind": "explicit",
        "schedule__tau": (work.get("tau", 1),),
        "schedule__data_size": work["size"],
        "devices": 1,
    }
    mesh = ahead.make_mesh(work["target"])
    if work["lanes"] > 1:
        found = lanes.several(work["lanes"], work["network"], settings)
        host = backend.start_jax(found[0].config)
        arrays = make_arrays(make_group(found, host), found, estimates=False)
        made = program.make_program([ahead.on_target(p, mesh) for p in found], mesh)
    else:
        prepared, host = _experiment(work, settings)
        _, arrays = single(prepared, host, estimates=False)
        made = program.make_program([ahead.on_target(prepared, mesh)], mesh)
    result = ahead.compile_ahead(made, arrays, work["target"], folder)
    return {
        "structure": result.structure._asdict(),
        "memory": result.memory,
        "cost": result.cost._asdict(),
        "products": result.products,
        "seconds": result.seconds,
        "step": [[*k[:-1], k.cost._asdict()] for k in result.step],
    }


def _experiment(work: dict, settings: dict) -> tuple[prepare.Prepared, Mesh]:
    """One experiment, and the devices of this machine."""
    name, theirs = work["network"], Custom()
    if name in own.WORK:
        same = own.WORK[name]._replace(clients=work["clients"], samples=work["size"])
        theirs, name = Custom(model=same.network, dataset=own.data(same)), "vgg11"
    config = common.make_config(name, **settings)
    host = backend.start_jax(config)
    return prepare.prepare_validated(config, theirs), host


def compiled(**work) -> dict:
    """`worker` in a process of its own.

    Args:
      **work: network, mapping, form, clients, size, lanes, target; and optional
        algorithm, tau, flags.

    Raises:
      RuntimeError: XLA cannot compile it.
    """
    work = {"clients": 20, "size": 128, "lanes": 1, "target": "h100"} | work
    command = [sys.executable, "-m", "benchmarks.structure", "--worker"]
    done = subprocess.run([*command, json.dumps(work)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["?"])[-1][:300])
    return json.loads(done.stdout.splitlines()[-1])


def row(work: dict) -> dict:
    """One row of the table."""
    named = {
        "network": work["network"],
        "mapping": work["mapping"],
        "convolution": work["form"],
        "precision": work.get("precision", "float32"),
        "clients": work["clients"],
        "lanes": work["lanes"],
    }
    try:
        found = compiled(**work)
    except RuntimeError as error:
        return named | {"launches an interval": f"not compiled: {error}"}
    s, cost = found["structure"], found["cost"]
    return named | {
        "launches an interval": s["launches"],
        "launches a step": s["step_launches"],
        "kernels a step": s["step_kernels"],
        "captured": f"{s['captured']}/{s['kernels']}",
        "temporary, MiB": f"{found['memory']['temporary'] / 2**20:,.0f}",
        "bytes, GB": f"{cost['bytes'] / 1e9:,.2f}",
        "GFLOP": f"{cost['flop'] / 1e9:,.1f}",
        "roofline, µs": "≥ " * bool(cost["unknown"]) + f"{cost['seconds'] * 1e6:,.0f}",
        "compile, s": f"{found['seconds']:.0f}",
    }


def kernel_rows(work: dict) -> list[dict]:
    """The table of the kernels of a training step, in the order in which they run."""
    return [
        {
            "computes": computes,
            "emitter": emitter,
            "product": product,
            "MB": f"{cost['bytes'] / 1e6:,.2f}",
            "GFLOP": f"{cost['flop'] / 1e9:,.3f}",
            "roofline, µs": f"{cost['seconds'] * 1e6:,.2f}",
        }
        for computes, emitter, product, cost in compiled(**work)["step"]
    ]


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    networks = [*common.SHAPES, *own.WORK]
    paper = list(common.SHAPES)
    parser.add_argument("--networks", nargs="+", default=paper, choices=networks)
    parser.add_argument("--mappings", nargs="+", default=MAPPINGS, choices=MAPPINGS)
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--clients", type=int, nargs="+", default=[20])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1])
    parser.add_argument("--size", type=int, default=128, help="samples per client")
    parser.add_argument("--precision", nargs="+", default=["float32"])
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--target", default="h100", choices=ahead.TARGETS)
    parser.add_argument("--flags", default="", help="further flags of XLA")
    kernels = "for each kernel of a training step: what it computes, emitter, bytes"
    parser.add_argument("--kernels", action="store_true", help=kernels)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(json.loads(options.worker))))
        return
    cases = itertools.product(
        options.networks,
        options.mappings,
        options.forms,
        options.clients,
        options.lanes,
        options.precision,
    )
    rows = []
    for network, mapping, form, clients, several, precision in cases:
        work = {
            "network": network,
            "mapping": mapping,
            "form": form,
            "clients": clients,
            "lanes": several,
            "size": options.size,
            "precision": precision,
            "target": options.target,
            "flags": options.flags,
            "algorithm": options.algorithm,
        }
        if options.kernels:
            print(f"\n{network}, {mapping}, {form}\n")
            common.show(kernel_rows(work))
            continue
        rows.append(row(work))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if rows:
        common.show(rows)


if __name__ == "__main__":
    main()
