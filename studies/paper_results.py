"""What the paper reports, for comparison with the results of this simulator.

Shao et al., Tables 1 (static cases) and 2 (dynamic cases): highest test accuracy in %,
mean of 10 runs. Each cell names its experiment in `settings`.
"""

from typing import NamedTuple

ALGORITHMS: tuple[str, ...] = ("fedavg", "fedprox", "fedasync", "dms")


class PaperCell(NamedTuple):
    """One row of a table: a case on a data set."""

    config: str  # the experiment in configs/papers.py
    case: str
    data: str  # as in ``config.data.name``
    accuracy: tuple[float, float, float, float]  # in %, in order of ALGORITHMS


_ROWS: tuple[tuple[str, str, str, tuple[float, float, float, float]], ...] = (
    ("mnist_case1", "Case 1", "mnist", (96.41, 97.01, 96.17, 97.89)),
    ("cifar10_case1", "Case 1", "cifar10", (63.54, 63.70, 62.68, 64.57)),
    ("fashion_mnist_case1", "Case 1", "fashion_mnist", (87.15, 88.19, 86.09, 89.52)),
    ("svhn_case1", "Case 1", "svhn_cropped", (83.08, 83.38, 80.80, 84.70)),
    ("mnist_case2", "Case 2", "mnist", (97.18, 97.58, 96.73, 98.20)),
    ("cifar10_case2", "Case 2", "cifar10", (62.70, 62.27, 61.89, 64.11)),
    ("fashion_mnist_case2", "Case 2", "fashion_mnist", (85.23, 86.45, 83.55, 87.47)),
    ("svhn_case2", "Case 2", "svhn_cropped", (83.51, 83.71, 80.74, 84.76)),
    ("mnist_case3", "Case 3", "mnist", (98.67, 98.55, 92.97, 99.06)),
    ("cifar10_case3", "Case 3", "cifar10", (68.07, 69.21, 65.97, 70.29)),
    ("fashion_mnist_case3", "Case 3", "fashion_mnist", (84.26, 84.61, 83.44, 89.84)),
    ("svhn_case3", "Case 3", "svhn_cropped", (88.46, 88.64, 83.05, 90.27)),
    ("mnist_select2", "2-iteration", "mnist", (98.13, 99.14, 97.75, 99.57)),
    ("mnist_select4", "4-iteration", "mnist", (97.11, 97.46, 96.58, 98.59)),
)
CELLS = {row[0]: PaperCell(*row) for row in _ROWS}


def _of(*cases: str) -> tuple[str, ...]:
    return tuple(name for name, cell in CELLS.items() if cell.case in cases)


# Which cells a table or figure of the paper is made of.
TARGETS = {
    "table1": _of("Case 1", "Case 2"),
    "table2": _of("Case 3", "2-iteration", "4-iteration"),
    "fig3": _of("Case 1"),
    "fig4": _of("Case 2"),
    "fig5": _of("Case 3"),
    "fig6": ("cifar10_case3", "mnist_case3"),  # the paper's, and one within reach
    "fig7": _of("2-iteration", "4-iteration"),
}
