"""How the processes of a run find each other: all others connect to process 0.

Plain sockets, before JAX starts: its own client aborts if there is no answer, and it
cannot report which process is missing. Messages are lines of JSON. Connections of other
programs are left unanswered.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tsfl_jax.types import UserError

_GREETING = "tsfl_jax"
_RETRY = 0.2  # seconds between two attempts to connect


class Meeting(NamedTuple):
    """What every process of a run has to be given; see `processes.join`."""

    count: int
    settings: dict[str, Any]
    patience: float
    notice: Callable[[str], None]


def address(coordinator: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``.

    Raises:
      UserError: no host, or no port from 1 to 65535.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UserError(
            f"--coordinator={coordinator}: expected host:port, where process 0 listens,"
            " with a port from 1 to 65535"
        )
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--coordinator={coordinator}: host {host!r} is not known ({reason})"
        ) from error
    return host, int(port)


def gather(port: int, meeting: Meeting) -> dict[int, socket.socket]:
    """Process 0: connections to all others, by index."""
    count, _, patience, notice = meeting
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port} ({error.strerror or error}); "
            "choose another port for --coordinator, in all processes"
        ) from error
    links: dict[int, socket.socket] = {}
    deadline, quiet = time.monotonic() + patience, time.monotonic() + 2
    with server:
        while len(links) < count - 1:
            missing = [i for i in range(1, count) if i not in links]
            names = ", ".join(map(str, missing[:5])) + ", …" * (len(missing) > 5)
            now = time.monotonic()
            if now > deadline:
                reason = (
                    f"process {names} of {count} did not connect within {patience:g} s"
                )
                for link in links.values():
                    send(link, {"refused": reason})
                    link.close()
                raise UserError(
                    f"{reason}; process 0 waits on port {port}: start every --process "
                    f"from 0 to {count - 1} with that port in its --coordinator"
                )
            if quiet < now:
                quiet = deadline
                notice(f"waiting for process {names} of {count} on port {port} …")
            server.settimeout(min(1.0, patience))
            try:
                link, _ = server.accept()
            except TimeoutError:
                continue
            refused = _admit(link, links, meeting)
            if refused:
                notice(f"a process was refused: {refused}")
    return links


def _admit(
    link: socket.socket, links: dict[int, socket.socket], meeting: Meeting
) -> str:
    """Add a process that asks to join, or return why a process of a run cannot."""
    link.settimeout(5)
    try:
        hello = json.loads(_line(link))
        greeting, index, theirs = (
            hello[name] for name in ("greeting", "process", "settings")
        )
        if greeting != _GREETING or not isinstance(theirs, dict):
            raise ValueError(hello)
    except (OSError, ValueError, LookupError, TypeError):
        link.close()
        return ""
    # As text: NaN is not equal to itself.
    count, settings, *_ = meeting
    # Either may have a setting that the other has at its default, and so has not.
    names = settings | theirs
    other = [n for n in names if _text(theirs.get(n)) != _text(settings.get(n))]
    reason = ""
    if hello["processes"] != count:
        reason = f"--processes={hello['processes']}: process 0 has --processes={count}"
    elif index not in range(1, count):
        reason = f"--process={index}: expected 1 to {count - 1}"
    elif index in links and not _ended(links[index]):
        reason = f"--process={index}: another process has that number already"
    elif other:
        reason = (
            f"process {index} has {other[0]}: {_text(theirs.get(other[0]))}, process 0 "
            f"has {_text(settings.get(other[0]))}; give all processes the same settings"
        )
    if reason:
        send(link, {"refused": reason})
        link.close()
    else:
        if index in links:
            links[index].close()
        links[index] = _alive(link)
    return reason


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _ended(link: socket.socket) -> bool:
    """Whether a process that has joined is gone before all are connected."""
    link.settimeout(0)
    try:
        return not link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        link.settimeout(None)


def find(
    host: str, port: int, index: int, meeting: Meeting
) -> tuple[socket.socket, int]:
    """Another process: the connection to process 0, and the port of JAX's service."""
    count, settings, patience, notice = meeting
    deadline, quiet = time.monotonic() + patience, time.monotonic() + 2
    where = f"--coordinator={host}:{port}: process {index} of {count}"
    while True:
        try:
            link = socket.create_connection((host, port), timeout=max(patience, 0.1))
            break
        except OSError as error:
            now = time.monotonic()
            if now > deadline:
                reason = error.strerror or error
                raise UserError(
                    f"{where} did not find process 0 there in {patience:g} s "
                    f"({reason}); start it, or correct the address"
                ) from error
            if quiet < now:
                quiet = deadline
                notice(f"process {index} looks for process 0 at {host}:{port} …")
            time.sleep(_RETRY)
    _alive(link)
    hello = {"greeting": _GREETING, "process": index, "processes": count}
    send(link, hello | {"settings": settings})
    try:
        link.settimeout(patience + 10)  # process 0 gives up first, and says so
        answer = json.loads(_line(link))
        link.settimeout(None)
        refused = answer.get("refused")
    except (OSError, ValueError, AttributeError) as error:
        link.close()
        raise UserError(
            f"{where} has no answer from process 0, which has ended or is no process "
            "of this program"
        ) from error
    if refused is not None:
        link.close()
        raise UserError(refused)
    return link, int(answer["service"])


def _alive(link: socket.socket) -> socket.socket:
    """End a connection within 20 s when the other machine is gone."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"KEEPIDLE": 5, "KEEPINTVL": 5, "KEEPCNT": 3, "USER_TIMEOUT": 20_000}
    for name, value in options.items():
        if hasattr(socket, f"TCP_{name}"):  # not on every system
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
    return link


def _line(link: socket.socket) -> bytes:
    """One line, read byte by byte so that nothing after it is lost."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = link.recv(1)
        if not byte or len(line) > 2**24:
            raise ValueError("no line")
        line += byte
    return bytes(line)


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """Send one message; an end of the other side shows when its answers are read."""
    with contextlib.suppress(OSError):
        link.sendall(json.dumps(message).encode() + b"\n")
