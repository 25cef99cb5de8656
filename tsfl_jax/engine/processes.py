"""Several processes that run one experiment: how they connect and how they end.

Every process keeps a TCP connection to process 0 for the whole run. The operating
system closes it when a process ends for any reason, so the others know at once; TCP
keepalive does the same for a machine that is gone. JAX alone notices this after minutes
or aborts with a stack trace, and reports neither which process ended nor why.

The coordination service of JAX runs in a process of its own, which process 0 starts.
Inside process 0 it would end with it, and the JAX client of every other process aborts
at that moment, before any Python code of that process can run.

NOT done: a run does not continue without a process that has ended.
"""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from tsfl_jax.engine import rendezvous
from tsfl_jax.types import UserError

_GRACE = 3.0  # seconds in which a process may give its own reason for the same stop
_DAY = 24 * 3600  # seconds
_RESTART = "start all processes again with the same commands"

# Ends when its input does: at once after a line, else some time after process 0 died,
# when all others have ended as well.
_SERVICE = """
import sys, time
from jaxlib import _jax
address, count, day = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
service = _jax.get_distributed_runtime_service(
    address, count, heartbeat_timeout=day, shutdown_timeout=60)
print("ready", flush=True)
if not sys.stdin.read():
    time.sleep(20)
"""


@dataclass(frozen=True)
class Group:
    """The processes of a run, as one of them sees them."""

    index: int  # of this process, from 0
    count: int
    links: dict[int, socket.socket]  # to all others in process 0, else to process 0
    end: Callable[[str, int], None]  # (line, exit code): ends this process, now
    service: subprocess.Popen | None  # of JAX, started by process 0
    # What to do after a loss, the newest last.
    resume: list[str] = field(default_factory=lambda: [_RESTART])
    left: set[int] = field(default_factory=set)  # processes that have finished
    over: threading.Event = field(default_factory=threading.Event)  # all have finished
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while sending


def join(
    coordinator: str,
    count: int,
    index: int,
    *,
    settings: dict,
    patience: float,
    notice: Callable[[str], None],
    end: Callable[[str, int], None],
) -> Group:
    """Make this process one of several that run the same program on one mesh.

    Args:
      coordinator: ``host:port`` on which process 0 listens.
      count: processes, at least 2.
      index: of this one, 0 ≤ index < count.
      settings: JSON values that have to be the same in all processes.
      patience: seconds to wait until all processes are connected.
      notice: shows a line while this process waits.
      end: shows a line and ends this process with an exit code, from any thread.

    Raises:
      UserError: an index out of range, an address that cannot be used, processes with
        other settings, or one that did not connect in time.
    """
    if not 0 <= index < count:
        raise UserError(
            f"--process={index}: expected 0 to {count - 1} with --processes={count}"
        )
    host, port = rendezvous.address(coordinator)
    meeting = rendezvous.Meeting(count, settings, patience, notice)
    service = None
    if index == 0:
        links = rendezvous.gather(port, meeting)
        service, service_port = _start_service(count)
        for link in links.values():
            rendezvous.send(link, {"service": service_port})
        host = "localhost"
    else:
        link, service_port = rendezvous.find(host, port, index, meeting)
        links = {0: link}
    group = Group(index, count, links, end, service)
    for other in links:
        thread = threading.Thread(target=_listen, args=(group, other), daemon=True)
        thread.start()
    _connect(group, host, service_port)
    return group


def _connect(group: Group, host: str, port: int) -> None:
    """Connect JAX to its coordination service."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        jax.distributed.initialize(
            address,
            group.count,
            group.index,
            # The service that JAX starts in process 0 stays without clients.
            coordinator_bind_address=None if group.index else "localhost:0",
            initialization_timeout=60,
            # Closed connections report ended processes; slow ones are waited for.
            heartbeat_timeout_seconds=_DAY,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        why = f"JAX cannot connect to its service at {address}: {reason}"
        stopped(group, why, 2)
        group.end(why, 2)


def will_resume(group: Group, how: str) -> None:
    """Process 0: what the user should do when a process is lost from now on."""
    group.resume.append(how)
    _send_all(group, {"resume": how})


def stopped(group: Group, why: str, code: int) -> None:
    """Report to the others that this process stops, why, and with which exit code."""
    if not group.over.is_set():
        _send_all(group, {"stopped": group.index, "why": why, "code": code})


def leave(group: Group) -> None:
    """Wait until all processes have finished; after that they may end."""
    _send_all(group, {"left": group.index})
    while group.index == 0 and len(group.left) < len(group.links):
        time.sleep(0.02)
    if group.index == 0:
        group.over.set()
        _send_all(group, {"over": True})
    group.over.wait()
    jax.distributed.shutdown()
    if group.service is not None:
        group.service.communicate(b"done")


def _send_all(group: Group, message: dict[str, Any]) -> None:
    with group.lock:
        for link in group.links.values():
            rendezvous.send(link, message)


def _start_service(count: int) -> tuple[subprocess.Popen, int]:
    """JAX's coordination service in a process of its own, and its port."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _SERVICE, f"[::]:{port}", str(count), str(_DAY)]
    service = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run; the service ends after it
    )
    assert service.stdout is not None
    if service.stdout.readline().strip() != b"ready":
        raise UserError(f"JAX's coordination service cannot listen on port {port}")
    return service, port


def _listen(group: Group, other: int) -> None:
    """Handle the messages of one connection until it ends."""
    ends = contextlib.suppress(OSError, ValueError)
    with ends, group.links[other].makefile("rb") as lines:
        for line in lines:
            _hear(group, other, json.loads(line))
    if group.over.is_set() or (group.index == 0 and other in group.left):
        return
    _send_all(group, {"lost": other})
    _lost(group, other)


def _hear(group: Group, other: int, news: dict[str, Any]) -> None:
    if "resume" in news:
        group.resume.append(news["resume"])
    elif "left" in news:
        group.left.add(other)
    elif "over" in news:
        group.over.set()
    elif "lost" in news:
        _lost(group, news["lost"])
    elif "stopped" in news:
        if group.index == 0:
            _send_all(group, news)
        time.sleep(_GRACE)
        who, why = news["stopped"], news["why"]
        group.end(f"process {who} of {group.count} has stopped: {why}", news["code"])


def _lost(group: Group, other: int) -> None:
    group.end(
        f"process {other} of {group.count} exited without a message (it was killed, it "
        f"crashed or its machine is gone); {group.resume[-1]}",
        1,
    )
