"""What a GPU executes for a compiled program: XLA's thunk sequence, read and counted.

A thunk is one thing that XLA's GPU runtime does: start a kernel, copy, call a library,
run a loop or a branch, or launch a command buffer (a CUDA graph), which holds many of
them. The host launches each thunk that no command buffer holds. XLA writes the sequence
as text with ``--xla_dump_to``; command buffers are made too late to stand in the HLO.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_THUNK = re.compile(r"^( *)\d+: k(\w+)")
_PART = re.compile(r"^( *)(condition|body|\w*branch\w*)\b.*:\s*$")
_HOLDERS = ("CommandBuffer", "While", "Conditional", "Sequential", "DynamicSliceFusion")


class Thunk(NamedTuple):
    """One thunk; those that it holds by part: "", "condition", "body", "…branch…"."""

    kind: str  # "CustomKernel", "While", "CommandBuffer", …
    parts: dict[str, list["Thunk"]]

    def held(self) -> list["Thunk"]:
        """All thunks that this one holds directly."""
        return [thunk for part in self.parts.values() for thunk in part]


class Structure(NamedTuple):
    """How the host and the GPU share the work of one interval.

    Evaluation is the branch of a conditional on the host and is not counted, but for
    `conditionals`, each of which the host waits for.
    """

    launches: int  # by the host in an interval, outside loops that the host runs
    step_launches: int  # by the host in a training step; 0: the loop is captured
    step_kernels: int  # kernels, copies and library calls of a training step
    buffers: int  # command buffers
    loop_buffers: int  # those that hold a loop
    captured: int  # kernels in command buffers
    kernels: int  # all kernels
    conditionals: int  # branches that the host decides
    host_loops: int  # loops that the host runs


def read(text: str) -> list[Thunk]:
    """Read the text ``*thunk_sequence_after_thunk_passes.txt``.

    Raises:
      ValueError: there is no thunk in it.
    """
    root = Thunk("Sequential", {})
    open_thunks = [(-1, root)]  # (indentation, thunk)
    part = {id(root): ""}
    for line in text.splitlines():
        if found := _THUNK.match(line):
            indent, thunk = len(found[1]), Thunk(found[2], {})
            while open_thunks[-1][0] >= indent:
                open_thunks.pop()
            parent = open_thunks[-1][1]
            parent.parts.setdefault(part[id(parent)], []).append(thunk)
            part[id(thunk)] = ""
            open_thunks.append((indent, thunk))
        elif found := _PART.match(line):
            # "condition:" follows its loop without indentation.
            while found[2] != "condition" and open_thunks[-1][0] >= len(found[1]):
                open_thunks.pop()
            part[id(open_thunks[-1][1])] = found[2]
    if not root.parts:
        raise ValueError("no thunk sequence: expected lines such as '000: kCopy …'")
    return root.parts[""]


def walk(thunks: list[Thunk]) -> Iterator[Thunk]:
    """All thunks, those that others hold included."""
    for thunk in thunks:
        yield thunk
        yield from walk(thunk.held())


def kernels(thunks: list[Thunk]) -> int:
    """Kernels, copies and library calls, each counted once however often it runs."""
    return sum(thunk.kind not in _HOLDERS for thunk in walk(thunks))


def _outside_branches(thunks: list[Thunk]) -> Iterator[Thunk]:
    for thunk in thunks:
        yield thunk
        if thunk.kind != "Conditional":
            yield from _outside_branches(thunk.held())


def _interval(thunks: list[Thunk]) -> list[Thunk]:
    """The body of the scan over intervals, or all if that was unrolled."""
    for thunk in thunks:
        held = list(walk(thunk.held()))
        if thunk.kind == "While" and any(t.kind == "Conditional" for t in held):
            return thunk.parts["body"]
    return thunks


def _launches(thunks: list[Thunk]) -> int:
    """Of one pass over a sequence, outside loops and branches."""
    return sum(thunk.kind not in ("While", "Conditional") for thunk in thunks)


def _training_loop(thunks: list[Thunk]) -> Thunk | None:
    """Of the loops without an inner loop, the last large one; estimates come first."""
    loops = [t for t in _outside_branches(thunks) if t.kind == "While"]
    loops = [t for t in loops if all(i.kind != "While" for i in walk(t.held()))]
    most = max((kernels([t]) for t in loops), default=0)
    return next((t for t in reversed(loops) if 2 * kernels([t]) > most), None)


def structure(thunks: list[Thunk]) -> Structure:
    """Count what the host launches in one interval; see `Structure`."""
    interval = _interval(thunks)
    every = list(_outside_branches(interval))
    buffers = [t for t in every if t.kind == "CommandBuffer"]
    captured = {id(t) for b in buffers for t in walk(b.held())}
    loop = _training_loop(interval)
    return Structure(
        launches=_launches(interval),
        step_launches=(
            0 if loop is None or id(loop) in captured else _launches(loop.held())
        ),
        step_kernels=0 if loop is None else kernels(loop.held()),
        buffers=len(buffers),
        loop_buffers=sum(
            any(t.kind == "While" for t in walk(b.held())) for b in buffers
        ),
        captured=sum(kernels(b.held()) for b in buffers),
        kernels=sum(t.kind not in _HOLDERS for t in every),
        conditionals=sum(
            t.kind == "Conditional" and id(t) not in captured for t in every
        ),
        host_loops=sum(t.kind == "While" and id(t) not in captured for t in every),
    )
