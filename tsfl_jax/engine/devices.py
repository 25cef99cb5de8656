"""Clients over several devices: the mesh, and which device trains which clients.

One mesh with one axis. Every device holds the samples and the global model, trains its
share of the clients and adds up its part of Σ ρ_i w_i; the sum over devices is a
`psum`. Several GPUs and several CPU devices run the same code, in one process.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from tsfl_jax import trees
from tsfl_jax.types import UserError

AXIS = "clients"

# Devices synchronize at every sum. XLA's CPU backend takes a long wait for a deadlock,
# warns after 20 s and ends the process after 40 s; with a large network devices may be
# further apart. Only XLA_FLAGS have an effect, not a compiler option.
_PATIENCE = (
    "xla_cpu_collective_call_warn_stuck_timeout_seconds",
    "xla_cpu_collective_call_terminate_timeout_seconds",
)
_WEEK = 7 * 24 * 3600  # seconds
_CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE"


def start(count: int) -> None:
    """Ask for CPU devices, which must happen before JAX is used for the first time.

    It also lets the devices wait for each other for a week, see `_PATIENCE`. Settings
    made before (``jax_num_cpu_devices``, flags) are kept. If JAX has started already,
    nothing changes; on GPUs this has no effect.

    Args:
      count: devices wanted; there will be at least one for each CPU core of this
        process, so that a later run may use more.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    patient = [f"--{name}={_WEEK}" for name in _PATIENCE if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *patient]).strip()
    # JAX adds its settings at run time, and -1 is none; its own wins over XLA's flag.
    setting = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if setting < 0 and "xla_force_host_platform_device_count" not in flags:
        allowed = getattr(os, "sched_getaffinity", None)  # Linux only
        cores = len(allowed(0)) if allowed else os.cpu_count() or 1
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", max(count, cores))


def make_mesh(count: int, num_clients: int) -> Mesh:
    """A mesh of `count` devices; 0 for all there are, at most one per client.

    Raises:
      UserError: fewer devices than asked for.
    """
    devices = jax.local_devices()
    if count > len(devices):
        raise UserError(
            f"--config.devices={count}: JAX sees {len(devices)} "
            f"{devices[0].platform} device(s); use at most that many, or 0 for all"
        )
    devices = devices[: min(count or len(devices), num_clients)]
    return Mesh(np.array(devices), (AXIS,))


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """Options of XLA that programs for the devices of a mesh need.

    On CPUs, a pass is left out that splits every elementwise operation above some
    40,000 elements over a pool of threads. Clients already use all cores; see
    ``python -m benchmarks.wide``. Another one is left out that removes optimization
    barriers before operations are fused.

    On GPUs, loops join the command buffers (CUDA graphs), so that the host launches
    the training of a whole interval at once. The list names all that XLA puts there by
    default, and WHILE; an addition such as "+WHILE" works in XLA_FLAGS only, which
    would have to be set before JAX is used.
    """
    if mesh.devices.flat[0].platform == "cpu":
        passes = "cpu-parallel-task-assigner,cse_barrier_expander"
        return {"xla_disable_hlo_passes": passes}
    return {"xla_gpu_enable_command_buffer": _CAPTURED}


def place(mesh: Mesh, tree: Any, spec: Any) -> Any:
    """Put arrays on the devices of the mesh, with a (prefix) tree of specs."""
    return jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), spec))


def count(axis: str | None) -> int:
    """Devices of a mesh axis, inside a program; None: one device."""
    return lax.axis_size(axis or ())


def total(tree: Any, axis: str | None) -> Any:
    """Sum over the devices of a mesh axis, inside a program; None: one device."""
    return lax.psum(tree, axis or ())


def own_share(number: int, axis: str | None) -> Int[Array, "K"]:
    """Device d of D takes d, d + D, d + 2D, … of 0..number−1, inside a program.

    All get as many, K = ⌈number/D⌉, so that the last ones may be `number` or more.
    """
    step = count(axis)
    return lax.axis_index(axis or ()) + step * jnp.arange(-(-number // step))


def shared_map(
    function: Callable[[Any], Any], items: Any, axis: str | None, width: int
) -> Any:
    """`function` of each item, computed on one device each; the results on all.

    Items and results have leaves ``[N, ...]``; `width` are side by side on a device.
    """
    number = jax.tree.leaves(items)[0].shape[0]
    index, width = own_share(number, axis), min(width, number)
    # The last entries may be beyond the last item: they are computed and left out.
    items = trees.take(items, index % number)
    results = lax.map(function, items, batch_size=width if width > 1 else None)
    return total(trees.scattered(results, index, number), axis)


_SINGLES = 64  # with more devices than this some could be without work


def group_size(number: Any) -> Any:
    """Clients of a group, whose updates are added up one by one, of all that work.

    The sum of groups is exact (`exact_sums`) and costs much more. Up to 64 clients are
    a group each; of more there are 33 to 64 groups.
    """
    return number // (_SINGLES + 1) + 1


def _place(rank: Any, group: Any, num_devices: int) -> tuple[Any, Any]:
    """(device, entry there) of the client of a rank: groups are assigned to and fro."""
    number = rank // group
    turn, device = number // num_devices, number % num_devices
    device = device + (turn % 2) * (num_devices - 1 - 2 * device)
    return device, turn * group + rank % group


def places(number: int, num_devices: int, *, grouped: bool = True) -> int:
    """K, entries of every device for so many clients; arguments as of `assign`."""
    even = -(-number // num_devices)
    return min(even + group_size(number) - 1, number) if grouped else even


def assign_again(
    work: Int[Array, "N"], places: int, axis: str | None, *, grouped: bool = True
) -> Int[Array, "K"]:
    """The clients of this device as `assign` assigns them, inside a program.

    Where the work is known only once the weights are.
    """
    number = work.shape[0]
    order = jnp.argsort(-work).astype(jnp.int32)  # stable, as in `assign`
    group = group_size((work > 0).sum()) if grouped else 1
    device, entry = _place(jnp.arange(number), group, count(axis))
    is_here = device == lax.axis_index(axis or ())
    entry = jnp.where(is_here, entry, places)  # left out
    return jnp.full(places, number, jnp.int32).at[entry].set(order, mode="drop")


def assign(
    work: Int[np.ndarray, "T N"], num_devices: int, *, grouped: bool = True
) -> Int[np.ndarray, "T DK"]:
    """Assign clients to devices: in order of work, in groups assigned back and forth.

    Args:
      work: mini-batch steps of every client.
      num_devices: D.
      grouped: whether clients run one after another; side by side, each is a group.

    Returns:
      ``[T, D·K]`` int32 client indices; the first K are device 0's. N marks an entry
      that stays empty. K = ⌈N/D⌉, and more where groups have several clients. Devices
      differ by at most the work of one group.
    """
    intervals, num_clients = work.shape
    num_places = places(num_clients, num_devices, grouped=grouped)
    # Stable, so that equal work keeps the order of the clients.
    order = np.argsort(-work, axis=1, kind="stable").astype(np.int32)
    group = group_size((work > 0).sum(axis=1, keepdims=True)) if grouped else 1
    device, entry = _place(np.arange(num_clients)[None], group, num_devices)
    slots = np.full((intervals, num_devices * num_places), num_clients, np.int32)
    index = np.broadcast_to(device * num_places + entry, order.shape)
    np.put_along_axis(slots, index, order, axis=1)
    return slots
