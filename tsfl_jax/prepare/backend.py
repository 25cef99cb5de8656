"""What depends on the backend: implementations, devices and the compilation cache.

The table of implementations follows docs/performance.md; ``--config.mapping`` and
``--config.convolution`` override it; ``python -m benchmarks.implementations`` measures
the alternatives. JAX's persistent compilation cache lets the second launch of a program
skip XLA.
"""

import math
import os
import pathlib
import tempfile
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Int

from tsfl_jax.config import Config
from tsfl_jax.engine import devices
from tsfl_jax.types import Params, UserError


class Implementation(NamedTuple):
    """How clients are mapped and convolutions are computed."""

    mapping: str  # of `mapping`: "sequential" or "vmap"
    convolution: str  # a key of `convolution.CONVOLUTIONS`


# By structure, "slices" measured on an H200 (docs/performance.md). Clients in lock-step
# with convolutions as matrix products: the training of an interval is one command
# buffer (CUDA graph). With "lax" cuDNN's calls stay outside of it, 21 to 144 launches a
# step. "quarters" is "slices" with fewer bytes before pools, not measured on a GPU.
_ACCELERATOR = Implementation("vmap", "quarters")
# A loop over clients skips frozen work.
_CPU = Implementation("sequential", "fast")


def implementation(
    backend: str, mapping: str = "auto", convolution: str = "auto"
) -> Implementation:
    """The implementation on "cpu", "gpu", …; "auto" is the backend's."""
    best = _CPU if backend == "cpu" else _ACCELERATOR
    return Implementation(
        best.mapping if mapping == "auto" else mapping,
        best.convolution if convolution == "auto" else convolution,
    )


# Compute capabilities of GPUs whose tensor cores multiply bfloat16 at more than six
# times the rate of float32: A100 (16 by data sheet), H100 and H200 (15), B200, B300.
_TENSOR_CORES = ("8.0", "9.0", "10.0", "10.3")


def algorithm(precision: str, device: Any) -> lax.DotAlgorithmPreset | None:
    """How a device multiplies float32 matrices of a network; None: on FP32 cores."""
    is_fast = getattr(device, "compute_capability", "") in _TENSOR_CORES
    takes = is_fast and precision == "float32"
    return lax.DotAlgorithmPreset.BF16_BF16_F32_X6 if takes else None


# FLOP; larger steps use the processor well one after another. The second is for uneven
# work, of which at most half is frozen steps.
_SMALL_STEP, _TINY_STEP = 2**20, 2**16


def cheaper_side_by_side(
    params: Params, steps: Int[np.ndarray, "T N"], batch_size: int
) -> bool:
    """Whether a CPU runs clients faster side by side than one after another.

    So it is where a mini-batch step is so small that what a loop costs counts: with no
    step frozen, since all clients do the same number of steps, or with steps so tiny
    that frozen ones cost less than the loop. Kernels of convolutions are left out,
    since one per client is slow on a CPU. `params` are shapes.
    """
    leaves = jax.tree.leaves(params)
    dense = all(len(leaf.shape) <= 2 for leaf in leaves)
    flop = 6 * batch_size * sum(math.prod(leaf.shape) for leaf in leaves)
    if not dense or not steps.size or not steps.any():
        return False
    if steps.min() == steps.max():
        return flop <= _SMALL_STEP
    return flop <= _TINY_STEP and bool(steps.max() <= 2 * steps.mean())


def start_jax(config: Config) -> Mesh:
    """Start the devices and the compilation cache of a config; returns the mesh."""
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise UserError(
            "JAX is set to 64 bits (JAX_ENABLE_X64, jax_enable_x64), and training is "
            "in float32; leave that out, and use `with jax.enable_x64():` around "
            "functions of tsfl_jax.theory and tsfl_jax.dms"
        )
    devices.start(config.devices)
    use_cache(config.compile_cache)
    return devices.make_mesh(config.devices, config.cohort.size or config.num_clients)


def default_folder() -> pathlib.Path:
    """``$XDG_CACHE_HOME/tsfl_jax/xla``, by default ~/.cache/tsfl_jax/xla."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "tsfl_jax" / "xla"


def use_cache(choice: str) -> pathlib.Path | None:
    """Switch the compilation cache on for this process, or leave it as it is.

    Args:
      choice: a folder; "auto": that of JAX's configuration, else `default_folder` where
        that can be written; "off": nothing is changed.

    Returns:
      The folder in use; None: no cache.
    """
    configured = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    if choice == "off" or (choice == "auto" and configured):
        return pathlib.Path(configured) if configured else None
    folder = default_folder() if choice == "auto" else pathlib.Path(choice)
    try:
        folder.expanduser().mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.expanduser()).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        if choice == "auto":
            return None
        raise UserError(
            f"--config.compile_cache={choice}: cannot write there "
            f"({getattr(error, 'strerror', None) or error}); choose another folder, "
            "or off"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder.expanduser()))
    # Cache small programs, too: a launch compiles dozens beside its own.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def autotuning_note(device: Any) -> str:
    """What a compilation finds of earlier autotuning on a GPU; "": nothing.

    JAX has XLA keep the fastest kernel of each product beside the compiled programs.
    """
    folder = use_cache("off")  # as it is
    if device.platform != "gpu" or not folder:
        return ""
    folder = folder / "xla_gpu_per_fusion_autotune_cache_dir"
    count = sum(1 for _ in folder.glob("*"))
    return f"note: kernels of {count:,} products from {folder}" if count else ""
