"""Notes on the runs of a sweep: one line for many runs."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# One number, or several as in "classes 1, 4".
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*(?:, \d+(?:[.,]\d+)*)*")


def merged(notes: Sequence[Sequence[str]]) -> list[str]:
    """The notes of all runs; of those that differ in numbers only, the first one.

    Args:
      notes: of each run.
    """
    alike: dict[str, list[str]] = {}
    for note in (note for own in notes for note in own):
        alike.setdefault(_NUMBERS.sub("#", note), []).append(note)
    return [
        found[0]
        if len(set(found)) == 1
        else f"{found[0]} (with other numbers in {len(found) - 1} of {len(notes)} runs)"
        for found in alike.values()
    ]


def without_effect(
    points: Sequence[Mapping[str, Any]], histories: Sequence[Mapping[str, np.ndarray]]
) -> list[str]:
    """A note for each swept setting that changed no bit of any run.

    Args:
      points: swept settings of each run.
      histories: of each run, arrays by name. Runs that diverged are taken for
        different.
    """
    digests = []
    for number, one in enumerate(histories):
        whole = b"".join(a.tobytes() for n, a in sorted(one.items()) if n != "seconds")
        lost = str(number).encode() if one["diverged"].any() else b""
        digests.append(hashlib.sha256(lost + whole).digest())
    found = []
    for name in dict.fromkeys(name for point in points for name in point):
        values: dict[str, set] = {}
        results: dict[str, set] = {}
        for point, digest in zip(points, digests, strict=True):
            rest = str({n: v for n, v in point.items() if n != name})
            values.setdefault(rest, set()).add(str(point.get(name)))
            results.setdefault(rest, set()).add(digest)
        compared = [rest for rest in values if len(values[rest]) > 1]
        if compared and all(len(results[rest]) == 1 for rest in compared):
            found.append(
                f"{name} made no difference: runs that differ in nothing else have the "
                "same results to the last bit"
            )
    return found
