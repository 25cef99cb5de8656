"""Which formulation is the default where: the one table, from docs/performance.md.

``--config.mapping`` and ``--config.convolution`` override it; `python -m
benchmarks.formulations` measures the alternatives on the machine at hand.
"""

from typing import NamedTuple


class Choice(NamedTuple):
    """How clients are mapped and convolutions are formed."""

    mapping: str  # of `mapping`: "sequential" or "vmap"
    convolution: str  # a key of `convolution.CONVOLUTIONS`


_CPU = Choice("sequential", "fast")
# Not measured: no GPU was at hand. What a GPU is expected to like: all clients in
# lock-step, one batched kernel for each operation, with XLA's own convolution.
_NOT_MEASURED = Choice("vmap", "lax")

CHOICES = {
    ("cpu", "mlp"): _CPU,
    ("cpu", "mnist_cnn"): _CPU,
    ("cpu", "fashion_cnn"): _CPU,
    ("cpu", "vgg11"): _CPU,
    ("cpu", "resnet18"): _CPU,
    ("gpu", "mlp"): _NOT_MEASURED,
    ("gpu", "mnist_cnn"): _NOT_MEASURED,
    ("gpu", "fashion_cnn"): _NOT_MEASURED,
    ("gpu", "vgg11"): _NOT_MEASURED,
    ("gpu", "resnet18"): _NOT_MEASURED,
}


def choose(backend: str, model: str) -> Choice:
    """The default on a backend ("cpu", "gpu", …) for a model by name.

    A model of the user's own is treated like any other on a CPU, where a loop over
    clients skips frozen work, and side by side elsewhere.
    """
    other = _CPU if backend == "cpu" else _NOT_MEASURED
    return CHOICES.get((backend, model), other)
