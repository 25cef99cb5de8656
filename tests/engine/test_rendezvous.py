"""Processes find each other: who is admitted, who is refused, who is missed."""

import json
import math
import socket
import threading
import time

import pytest

from tests.engine.test_processes import free_port
from tsfl_jax.engine import rendezvous
from tsfl_jax.types import UserError

SETTINGS = {"lr": 0.1, "tau": [1, 4], "unknown": math.nan}


def gathering(port, count, patience=20.0):
    """Process 0 in a thread: the thread, what it got or raised, the lines it showed."""
    got, shown = [], []

    def gather():
        try:
            meeting = rendezvous.Meeting(count, SETTINGS, patience, shown.append)
            links = rendezvous.gather(port, meeting)
            got.append(links)
            for link in links.values():
                rendezvous.send(link, {"service": 77})
        except UserError as error:
            got.append(error)

    thread = threading.Thread(target=gather)
    thread.start()
    return thread, got, shown


def find(port, count, index, settings=SETTINGS, patience=20.0):
    meeting = rendezvous.Meeting(count, settings, patience, print)
    return rendezvous.find("localhost", port, index, meeting)


def close(links):
    for link in links:
        link.close()


def connection(port):
    """A connection as soon as the port is open."""
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("localhost", port))
        except OSError:
            assert time.monotonic() < end, f"no process listens on port {port}"
            time.sleep(0.001)


def test_three_processes_find_each_other_whatever_else_connects():
    port = free_port()
    thread, got, shown = gathering(port, 3)
    stranger = connection(port)  # another program, as soon as the port is open
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    found = [None, None]

    def second():
        found[0] = find(port, 3, 1)

    other = threading.Thread(target=second)
    other.start()
    found[1] = find(port, 3, 2)
    other.join()
    thread.join()
    assert sorted(got[0]) == [1, 2] and shown == []
    assert [service for _, service in found] == [77, 77]
    close([stranger, *got[0].values(), *(link for link, _ in found)])


@pytest.mark.parametrize(
    ("count", "index", "settings", "words"),
    [
        (2, 1, SETTINGS | {"lr": 0.5}, "process 1 has lr: 0.5, process 0 has 0.1"),
        (2, 1, {"lr": 0.1, "tau": [1, 4]}, "process 1 has unknown: null, process 0"),
        (3, 1, SETTINGS, "--processes=3: process 0 has --processes=2"),
    ],
)
def test_a_process_that_does_not_fit_is_refused(count, index, settings, words):
    port = free_port()
    thread, got, shown = gathering(port, 2)
    with pytest.raises(UserError, match=words):
        find(port, count, index, settings)
    link, _ = find(port, 2, 1)  # the right one still finds its place
    thread.join()
    assert words in shown[0] and len(shown) == 1
    close([link, *got[0].values()])


def test_a_number_is_taken_until_its_process_ends():
    port = free_port()
    thread, got, shown = gathering(port, 3)
    hello = {"greeting": "tsfl_jax", "process": 1, "processes": 3}
    line = json.dumps(hello | {"settings": SETTINGS}).encode() + b"\n"
    early = connection(port)
    early.sendall(line)
    with pytest.raises(UserError, match="--process=1: another process has that"):
        find(port, 3, 1)
    early.close()  # it has ended, and is started again
    again = socket.create_connection(("localhost", port))
    again.sendall(line)
    last, _ = find(port, 3, 2)
    thread.join()
    assert json.loads(again.makefile().readline()) == {"service": 77}
    close([again, last, *got[0].values()])


def test_settings_that_only_one_has_are_refused():
    """What is at its default is not among the settings of a process."""
    port = free_port()
    thread, got, _ = gathering(port, 2, patience=2.0)
    more = SETTINGS | {"dms.drop": 0.5}
    with pytest.raises(UserError, match="process 1 has dms.drop: 0.5, process 0 has"):
        find(port, 2, 1, settings=more)
    thread.join()


def test_all_learn_who_is_missing():
    port = free_port()
    thread, got, _ = gathering(port, 3, patience=2.0)
    with pytest.raises(UserError, match=r"process 2 of 3 did not connect within 2 s"):
        find(port, 3, 1)
    thread.join()
    assert "process 2 of 3 did not connect within 2 s" in str(got[0])


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"process 0 cannot listen on port {port}"):
            rendezvous.gather(port, rendezvous.Meeting(2, SETTINGS, 1.0, print))


def test_another_program_at_the_port_is_no_process_0():
    with socket.create_server(("localhost", 0)) as server:

        def answer():
            link, _ = server.accept()
            with link:
                link.sendall(b"SSH-2.0-OpenSSH\r\n")
                link.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UserError, match="no answer from process 0"):
            find(server.getsockname()[1], 2, 1)
        thread.join()
