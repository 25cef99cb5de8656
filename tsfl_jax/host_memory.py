"""Refuse what cannot fit into this machine's memory, before it is allocated."""

import contextlib
import os
import pathlib
import sys

from tsfl_jax.types import UserError

_LIMITS = (  # of a container: cgroup version 2, version 1
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def total() -> int:
    """Return the bytes of memory that this process may use, within its container."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not known on Windows
        return sys.maxsize
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            size = min(size, int(pathlib.Path(path).read_text()))
    return size


def text(size: int) -> str:
    """Return a number of bytes as text."""
    if size >= 10**24:  # also keeps a product of settings within float's range
        return "more than 10^15 GB"
    return f"{size / 1e9:,.1f} GB"


def require(setting: str, needed: int, purpose: str) -> None:
    """Check that an allocation can fit.

    Args:
      setting: what to name first, with its value, such as "--config.num_clients=20".
      needed: bytes, at least.
      purpose: what they are for.

    Raises:
      UserError: there is less memory than that.
    """
    if needed > total():
        raise UserError(
            f"{setting}: {purpose} would take {text(int(needed))} of memory, and this "
            f"machine has {text(total())}; use a smaller value"
        )
