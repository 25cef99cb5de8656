"""``python -m benchmarks.ahead mnist_case1``: compile for a GPU that is not there.

XLA needs no GPU to compile for one: a description of the device is enough (files
``*.txtpb``). Nothing runs, so there are no times; kernels, host launches, command
buffers (CUDA graphs) and memory are those of the real compiler, but for kernels that
would be tuned on the device. `start` has to be called before JAX is used. Needs the
extra ``[aot]``.
"""

import argparse
import dataclasses
import glob
import importlib.util
import os
import pathlib
import tempfile
import time
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import roofline, thunks
from tsfl_jax import config_files
from tsfl_jax.config import validate
from tsfl_jax.engine import devices, scan
from tsfl_jax.prepare import backend, custom_hooks, network, prepare
from tsfl_jax.run import grid, lanes
from tsfl_jax.run import program as programs
from tsfl_jax.types import UserError

_TARGETS = pathlib.Path(__file__).parent
TARGETS = tuple(sorted(path.stem for path in _TARGETS.glob("*.txtpb")))
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


class Ahead(NamedTuple):
    """What the compiler says of a program on a GPU."""

    target: str
    memory: dict[str, int]  # bytes, as `program.Compiled.memory`
    structure: thunks.Structure  # of one interval
    cost: roofline.Cost  # the least that one call takes without evaluation
    products: dict[str, int]  # matrix products by algorithm
    seconds: float  # of compiling
    step: list[roofline.Kernel]  # kernels of a training step


class Folder(NamedTuple):
    """Where XLA writes what it makes; kept as long as this value lives."""

    path: str
    keep: Any


def dump(flags: str = "") -> Folder:
    """Make XLA write what it compiles to a temporary folder, before JAX is used.

    Args:
      flags: further flags of XLA.
    """
    keep = tempfile.TemporaryDirectory(prefix="tsfl_jax-")
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = (
        f"{given} --xla_dump_to={keep.name} "
        f"--xla_dump_hlo_module_re=jit_.*(intervals|lanes) {flags}"
    ).strip()
    jax.config.update("jax_enable_compilation_cache", False)
    return Folder(keep.name, keep)


def start(flags: str = "") -> Folder:
    """Prepare this process: JAX on the CPU, and `dump`.

    Args:
      flags: further flags of XLA.

    Raises:
      UserError: the compiler for GPUs is not installed.
    """
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        raise UserError(
            "compiling for a GPU needs its compiler: pip install 'tsfl_jax[aot]'"
        )
    jax.config.update("jax_platforms", "cpu")
    return dump(f"--xla_gpu_autotune_level=0 {flags}")


def make_mesh(target: str) -> Mesh:
    """A mesh of one GPU of a kind.

    Raises:
      UserError: there is no description of this GPU.
    """
    if target not in TARGETS:
        raise UserError(f"GPU {target!r}: expected one of {', '.join(TARGETS)}")
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=(_TARGETS / f"{target}.txtpb").read_text(encoding="utf-8"),
        topology="1x1x1",
    )
    return topologies.make_mesh(topology, (1,), (devices.AXIS,))


def on_target(prepared: prepare.Prepared, mesh: Mesh) -> prepare.Prepared:
    """An experiment of this machine with the network as the mesh's GPU computes it."""
    device, choice = mesh.devices.flat[0], prepared.config.precision
    if backend.algorithm(choice, device) is None:
        return prepared
    parts = prepared.network, prepared.dataset, choice, device
    return prepared._replace(network=network.with_precision(*parts))


def _shapes(mesh: Mesh, tree: Any, spec: Any) -> Any:
    """The arrays of a tree as shapes on the devices of a mesh."""

    def put(part: PartitionSpec, below: Any) -> Any:
        sharding = NamedSharding(mesh, part)
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), below
        )

    return jax.tree.map(put, spec, tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def compile_ahead(
    program: programs.Program, arrays: programs.Arrays, target: str, folder: Folder
) -> Ahead:
    """Compile a program for another device.

    Args:
      program: made for the mesh `make_mesh`.
      arrays: of any device; only their shapes count.
      target: one of `TARGETS`.
      folder: from `start`.
    """
    inputs = programs.cut_inputs(arrays.inputs, slice(None), slice(program.chunk))
    given = arrays.start, arrays.key, arrays.hparams, arrays.problem, inputs
    pairs = zip(given, scan.ARGUMENTS_SPEC, strict=True)
    shapes = [_shapes(program.mesh, *pair) for pair in pairs]
    begun = time.perf_counter()
    compiled = _compiled(program.lower(*shapes))
    seconds = time.perf_counter() - begun
    hlo = compiled.as_text() or ""
    return Ahead(
        target,
        programs.Compiled(program, compiled, 0.0, seconds).memory(),
        structure_of(folder),
        roofline.cost(
            hlo, roofline.DEVICES[target], lambda i: i.opcode != "conditional"
        ),
        roofline.products(hlo),
        seconds,
        roofline.step(hlo, roofline.DEVICES[target]),
    )


def _compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile; with cuBLAS for all products where XLA's own kernels fail.

    A GPU would be asked which is faster. Without one XLA takes its own kernel untried,
    and finds no tiles for some shapes.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "output tile sizes" not in str(error):
            raise
    return lowered.compile({"xla_gpu_enable_triton_gemm": False})


def structure_of(folder: Folder) -> thunks.Structure:
    """What a GPU executes for the newest program of `dump`."""
    found = glob.glob(f"{folder.path}/*thunk_sequence_after_thunk_passes.txt")
    newest = pathlib.Path(max(found, key=os.path.getmtime))
    return thunks.structure(thunks.read(newest.read_text(encoding="utf-8")))


def text(found: Ahead) -> str:
    """What was found, as lines of text."""
    s, cost = found.structure, found.cost
    memory = ", ".join(
        f"{name} {b / 2**20:,.0f} MiB" for name, b in found.memory.items()
    )
    loop = f"{s.step_launches} launches by the host per step"
    once = ", loops of unknown length once" if cost.unknown else ""
    return "\n".join(
        [
            f"on {found.target:<11} {memory}",
            f"launches       {s.launches} per interval outside training loop and "
            f"evaluation; {s.captured} of {s.kernels} kernels in {s.buffers} command "
            "buffers",
            f"training       {s.step_kernels} kernels per step of all clients, "
            + (loop if s.step_launches else "in a command buffer"),
            f"at least       {1e3 * cost.seconds:.3g} ms per call without evaluation, "
            f"by {cost.bytes / 1e9:,.4g} GB moved and {cost.flop / 1e9:,.4g} GFLOP"
            f"{once}; times were not measured",
        ]
    )


def main() -> None:
    """Compiles one experiment, and prints what the GPU would execute."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="an experiment by name, or its file")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--target", default="h100", choices=TARGETS)
    options = parser.parse_args()
    config = config_files.load(options.config)
    config = grid.changed(config, grid.parse_settings(options.set))
    validate(config)
    folder = start()
    chosen = backend.implementation("gpu", config.mapping, config.convolution)
    config = dataclasses.replace(config, **chosen._asdict(), devices=1)
    host = backend.start_jax(config)
    prepared = prepare.prepare_validated(config, custom_hooks.Custom())
    _, arrays = lanes.single(prepared, host, estimates=False)
    mesh = make_mesh(options.target)
    program = programs.make_program([on_target(prepared, mesh)], mesh)
    print(text(compile_ahead(program, arrays, options.target, folder)))


if __name__ == "__main__":
    main()
