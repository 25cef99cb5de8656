"""A lower bound of a GPU program's time from its compiled HLO: bytes and FLOP.

Each kernel takes at least max(bytes / bandwidth, FLOP / peak); a loop takes as often as
long as its trip count. Bytes are what a kernel reads and writes outside of itself, each
array once, of an array that it only slices or gathers from the parts that it takes.
FLOP are those of matrix products and convolutions; the peak of a product made of six in
bfloat16 is a sixth of that of tensor cores. NOT modeled: caches, the time to start a
kernel, and how near to the bound a kernel comes.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

_FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "iota",
    "partition-id",
    "replica-id",
    "opt-barrier",
)
_EMITTERS = {  # by what the attributes hold
    "__triton": "Triton",
    "__cublas": "cuBLAS",
    "__cudnn": "cuDNN",
    "kind=kLoop": "loop",
    "kind=kInput": "reduction or transpose",
}
_SLICING = ("slice", "dynamic-slice", "gather")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{\s*$")


class Device(NamedTuple):
    """Peak rates of a GPU, from its data sheet."""

    name: str
    bandwidth: float  # bytes per second
    flops: float  # float32 multiplications and additions per second, no tensor cores
    bfloat16: float = math.inf  # the same of tensor cores, dense


DEVICES = {
    "h100": Device("H100 SXM", 3.35e12, 67e12, 989e12),
    "h200": Device("H200 SXM", 4.8e12, 67e12, 989e12),
    "a100": Device("A100 SXM 80 GB", 2.04e12, 19.5e12, 312e12),
}


class Instruction(NamedTuple):
    """One instruction of HLO text."""

    name: str
    shape: str  # as written: "f32[20,5]{1,0}", or a tuple of such
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes
    root: bool


class Cost(NamedTuple):
    """What some kernels take."""

    seconds: float = 0.0  # Σ max(bytes / bandwidth, FLOP / peak)
    bytes: float = 0.0
    flop: float = 0.0
    kernels: float = 0.0
    unknown: float = 0.0  # loops whose length the compiler does not know: once each

    def times(self, count: int | float) -> "Cost":
        """The cost of running them `count` times."""
        return Cost(*(value * count for value in self))

    def plus(self, other: "Cost") -> "Cost":
        """The sum of two costs."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class Kernel(NamedTuple):
    """One kernel of a training step."""

    computes: str
    emitter: str  # "Triton", "cuBLAS", "loop", …
    product: str  # shape of the matrix product, if it is one
    cost: Cost


Computation = dict[str, Instruction]


def read(text: str) -> tuple[dict[str, Computation], str]:
    """Read HLO text: its computations, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = computations.setdefault(found[1], {})
            entry = found[1] if line.startswith("ENTRY") else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found[2], found[3], bool(found[1]))
            current[found[2]] = instruction
    return computations, entry


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    begin = text.index("(")
    end = _closing(text, begin)
    operands = tuple(re.findall(r"%([\w.\-]+)", text[begin:end]))
    if text[:begin] == "parameter":
        operands = (text[begin + 1 : end],)  # its number
    return Instruction(name, shape, text[:begin], operands, text[end + 1 :], root)


def sizes(shape: str) -> list[tuple[int, tuple[int, ...]]]:
    """(bytes of an element, dimensions) of each array of a shape."""
    found = []
    for kind, dims in _SHAPE.findall(shape):
        bits = re.search(r"\d+", kind)
        width = max(int(bits[0]) // 8, 1) if bits else 1  # pred
        found.append((width, tuple(int(d) for d in dims.split(",") if d)))
    return found


def size_of(shape: str) -> int:
    """Bytes of a shape."""
    return sum(width * math.prod(dims) for width, dims in sizes(shape))


def _dims(shape: str) -> tuple[int, ...]:
    return sizes(shape)[0][1]


def _flop_of_dot(instruction: Instruction, scope: Computation) -> float:
    left = _dims(scope[instruction.operands[0]].shape)
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    # A call of cuBLAS has it as JSON, "lhs_contracting_dimensions":["1"].
    found = found or re.search(
        r'lhs_contracting_dimensions":\[([\d,"]*)\]', instruction.rest
    )
    contracted = [int(d) for d in re.findall(r"\d+", found[1])] if found else []
    outputs = math.prod(_dims(instruction.shape))  # a call's first result
    return 2.0 * outputs * math.prod(left[d] for d in contracted)


def _flop_of_convolution(instruction: Instruction, scope: Computation) -> float:
    """2 · |outputs| · window · input features of a group, whichever array is which."""
    window = re.search(r"window=\{size=([\dx]+)", instruction.rest)
    labels = re.search(r"dim_labels=\w+_(\w+)->(\w+)", instruction.rest)
    if not window or not labels:
        return 0.0
    taps = math.prod(int(size) for size in window[1].split("x"))
    a, b = (_dims(scope[name].shape) for name in instruction.operands[:2])
    out, kernel = _dims(instruction.shape), b
    if "BackwardFilter" in instruction.rest:  # (inputs, output gradient) -> kernel
        out, kernel = b, out
    elif "BackwardInput" in instruction.rest:  # (output gradient, kernel) -> inputs
        out = a
    return 2.0 * math.prod(out) * taps * kernel[labels[1].index("i")]


def _flop(instruction: Instruction, scope: Computation) -> float:
    if instruction.opcode == "dot" or "__cublas$" in instruction.rest:
        return _flop_of_dot(instruction, scope)
    if instruction.opcode == "convolution" or "__cudnn$conv" in instruction.rest:
        return _flop_of_convolution(instruction, scope)
    return 0.0


def _peak(instruction: Instruction, device: Device) -> float:
    """FLOP per second, where a product in float32 counts once however it is made."""
    is_six = _algorithm(instruction) == "bf16_bf16_f32_x6"
    return device.bfloat16 / 6 if is_six else device.flops


def _algorithm(instruction: Instruction) -> str:
    """Of a matrix product; "": by its precision."""
    found = re.search(r"\balgorithm\W+(?:ALG_)?DOT_(\w+)", instruction.rest, re.I)
    return found[1].lower() if found else ""


def products(text: str) -> dict[str, int]:
    """How many matrix products a program has, by algorithm; "": by their precision."""
    computations, _ = read(text)
    every = [i for scope in computations.values() for i in scope.values()]
    made = [i for i in every if i.opcode == "dot" or "__cublas$" in i.rest]
    return dict(Counter(map(_algorithm, made)))


def _taken(name: str, scope: Computation, most: int) -> float:
    """Bytes that a fused computation takes of its parameter `name`, at most all."""
    taken, open_names = 0.0, [name]
    while open_names:
        current = open_names.pop()
        for user in scope.values():
            if current not in user.operands:
                continue
            if user.opcode == "bitcast":
                open_names.append(user.name)
            elif user.opcode in _SLICING and user.operands[0] == current:
                taken += size_of(user.shape)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == current:
                continue  # written in place
            else:
                return float(most)
    return min(taken, float(most))


def _written(scope: Computation, shape: str) -> float:
    """Bytes that a fused computation writes."""
    root = next((i for i in scope.values() if i.root), None)
    while root is not None and root.opcode == "bitcast":
        root = scope.get(root.operands[0])
    if root is not None and root.opcode == "dynamic-update-slice":
        return float(size_of(scope[root.operands[1]].shape))
    return float(size_of(shape))


def _fusion(
    instruction: Instruction,
    scope: Computation,
    computations: dict[str, Computation],
    device: Device,
) -> tuple[float, float, float]:
    """(bytes, FLOP, seconds of these) of a fusion."""
    found = re.search(r"calls=%([\w.\-]+)", instruction.rest)
    inside = computations[found[1]] if found else {}
    parameters = {
        int(i.operands[0]): i for i in inside.values() if i.opcode == "parameter"
    }
    moved = _written(inside, instruction.shape)
    for position, operand in enumerate(instruction.operands):
        full = size_of(scope[operand].shape) if operand in scope else 0
        parameter = parameters.get(position)
        moved += full if parameter is None else _taken(parameter.name, inside, full)
    flop = [(_flop(i, inside), _peak(i, device)) for i in inside.values()]
    return moved, sum(f for f, _ in flop), sum(f / peak for f, peak in flop)


def _of_kernel(
    instruction: Instruction,
    scope: Computation,
    computations: dict[str, Computation],
    device: Device,
) -> Cost:
    """What one kernel takes."""
    if instruction.opcode == "fusion":
        moved, flop, busy = _fusion(instruction, scope, computations, device)
    else:
        given = [scope[o].shape for o in instruction.operands if o in scope]
        moved = size_of(instruction.shape) + sum(map(size_of, given))
        flop = _flop(instruction, scope)
        busy = flop / _peak(instruction, device)
    seconds = max(moved / device.bandwidth, busy)
    return Cost(seconds, moved, flop, 1)


def _emitter(instruction: Instruction) -> str:
    """What XLA makes the kernel with."""
    rest = instruction.rest
    for mark, name in _EMITTERS.items():
        if mark in rest:
            return name
    return instruction.opcode


def _product(instruction: Instruction, scope: Computation) -> str:
    """Shape of a matrix product and the length k of its sums; "" if it is none."""
    size = math.prod(_dims(instruction.shape))
    if not (flop := _flop(instruction, scope)):
        return ""
    return f"{list(_dims(instruction.shape))}, k = {flop / 2 / size:.0f}"


def _computes(instruction: Instruction) -> str:
    """The operation and the part of the network that a kernel comes from."""
    found = re.search(r'op_name="([^"]*)"', instruction.rest)
    path = found[1].rsplit("closed_call/", 1)[-1] if found else instruction.name
    gradient = "gradient of " * ("transpose(" in path)
    return gradient + re.sub(r"(transpose|jvp|vmap)\(|\)|^while/body/", "", path)


def _loop_bodies(computations: dict[str, Computation], name: str) -> list[Computation]:
    """Bodies of the innermost loops that a computation runs, without conditionals."""
    bodies = []
    for instruction in computations[name].values():
        key = {"while": "body", "call": "to_apply"}.get(instruction.opcode)
        if key and (found := re.search(key + r"=%([\w.\-]+)", instruction.rest)):
            inner = _loop_bodies(computations, found[1])
            bodies += inner or [computations[found[1]]] * (key == "body")
    return bodies


def step(text: str, device: Device) -> list[Kernel]:
    """The kernels of a training step, the last large one of the innermost loops.

    Args:
      text: optimized HLO.
      device: peak rates.
    """
    computations, entry = read(text)
    bodies = _loop_bodies(computations, entry) or [computations[entry]]
    loops = [[i for i in b.values() if i.opcode not in _FREE] for b in bodies]
    most = max(map(len, loops))
    index = max(i for i, loop in enumerate(loops) if 2 * len(loop) > most)
    kernels = []
    for instruction in loops[index]:
        found = re.search(r"calls=%([\w.\-]+)", instruction.rest)
        inside = computations[found[1]] if found else bodies[index]
        parts = inside.values() if found else [instruction]
        products = [p for p in (_product(i, inside) for i in parts) if p]
        kernels.append(
            Kernel(
                _computes(instruction),
                _emitter(instruction),
                "; ".join(products),
                _of_kernel(instruction, bodies[index], computations, device),
            )
        )
    return kernels


def by_name(text: str, device: Device) -> dict[str, tuple[str, Cost]]:
    """What each kernel computes and takes, by name, "_" for "." as on a GPU."""
    computations, _ = read(text)
    return {
        re.sub(r"\W", "_", name): (
            _computes(instruction),
            _of_kernel(instruction, scope, computations, device),
        )
        for scope in computations.values()
        for name, instruction in scope.items()
        if instruction.opcode not in (*_FREE, "while", "conditional", "call")
    }


def cost(
    text: str, device: Device, counted: Callable[[Instruction], bool] | None = None
) -> Cost:
    """The least cost of one call of a program; of a conditional, its costliest branch.

    Args:
      text: optimized HLO.
      device: peak rates.
      counted: which instructions of any computation count; None: all.
    """
    computations, entry = read(text)
    known: dict[str, Cost] = {}

    def of_computation(name: str) -> Cost:
        if name not in known:
            total = Cost()
            for instruction in computations[name].values():
                if counted is None or counted(instruction):
                    total = total.plus(of(instruction, computations[name]))
            known[name] = total
        return known[name]

    def called(instruction: Instruction, key: str) -> list[str]:
        found = re.search(key + r"=\{?((?:%[\w.\-]+(?:, )?)+)", instruction.rest)
        return re.findall(r"%([\w.\-]+)", found[1]) if found else []

    def of(instruction: Instruction, scope: Computation) -> Cost:
        if instruction.opcode in _FREE:
            return Cost()
        if instruction.opcode == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)', instruction.rest)
            each = of_computation(called(instruction, "body")[0])
            if trips is None:
                return each.plus(Cost(unknown=1.0))
            return each.times(int(trips[1]))
        if instruction.opcode == "conditional":
            names = called(instruction, "branch_computations") or [
                *called(instruction, "true_computation"),
                *called(instruction, "false_computation"),
            ]
            return max((of_computation(n) for n in names), key=lambda c: c.seconds)
        if instruction.opcode == "call":
            return of_computation(called(instruction, "to_apply")[0])
        return _of_kernel(instruction, scope, computations, device)

    return of_computation(entry)
