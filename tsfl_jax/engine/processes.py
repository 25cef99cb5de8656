"""Several processes that run one experiment, through `jax.distributed`.

Process 0 reads and writes files; `devices` has the sums over all of them. A process
that is lost ends the others with JAX's own message, at once or when its heartbeats
have been missing for 100 s.

NOT done: a run does not continue without a process that has ended; the same commands
resume it from its last checkpoint.
"""

import hashlib
import json
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tsfl_jax.engine import devices
from tsfl_jax.types import UserError, one_line


def join(
    coordinator: str, count: int, index: int, settings: dict[str, Any], patience: float
) -> None:
    """Make this process one of several that run the same program on one mesh.

    JAX itself ends a process that has waited in vain, with the word DEADLINE_EXCEEDED.

    Args:
      coordinator: ``host:port`` on which process 0 listens; "" where `count` is 0.
      count: processes; 0 as Slurm, Open MPI or Kubernetes say.
      index: of this one, 0 ≤ index < count; not used where `count` is 0.
      settings: JSON values that have to be the same in all processes.
      patience: seconds to wait until all processes are connected.

    Raises:
      UserError: an address or index that cannot be used, no job of a cluster, or
        processes with other settings.
    """
    if count and not 0 <= index < count:
        raise UserError(
            f"--process={index}: expected 0 to {count - 1} with --processes={count}"
        )
    port = re.fullmatch(r".+:(\d{1,5})", coordinator)
    if (count or coordinator) and not (port and 0 < int(port[1]) < 2**16):
        raise UserError(
            f"--coordinator={coordinator}: expected host:port, where process 0 listens,"
            " with a port from 1 to 65535"
        )
    given = (count, index) if count else (None, None)
    try:
        jax.distributed.initialize(
            coordinator or None, *given, initialization_timeout=max(1, round(patience))
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"--processes={count}: JAX cannot connect them ({one_line(error)})"
        ) from error
    devices.meet()
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    if (digests != digests[0]).any():
        raise UserError("the processes differ in their settings; give all the same")
