"""Text as int32 tokens: a vocabulary of characters or words, and rows of one length.

Four tokens are reserved, and the others count from `RESERVED` on: padding, the
beginning and the end of a text, and all that is not in the vocabulary.
"""

import collections
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int

from tsfl_jax.components import component, setting

Texts = Sequence[str] | np.ndarray
PADDING, BEGINNING, END, UNKNOWN = range(4)
RESERVED = 4


@component("data")
class TextConfig:
    """What text becomes."""

    tokens: str = setting(
        "characters", "what text is cut into", ("characters", "words")
    )
    length: int = setting(80, "S, tokens of a text sample", low=1, high=10**6)
    vocabulary: int = setting(
        10000,
        "the most frequent tokens, others are one; shakespeare has its own letters",
        low=1,
        high=10**7,
    )


def split(text: str, unit: str) -> Sequence[str]:
    """The characters of a text, or its words between spaces."""
    return text if unit == "characters" else text.split()


def vocabulary(texts: Iterable[str], unit: str, most: int) -> dict[str, int]:
    """The most frequent characters or words, in this order, from `RESERVED` on.

    Args:
      texts: of the training samples.
      unit: "characters" or "words".
      most: ≥ 1, of them; of equally frequent ones the first in sorted order.
    """
    count = collections.Counter(part for t in texts for part in split(t, unit))
    ranked = sorted(count, key=lambda part: (-count[part], part))[:most]
    return {part: RESERVED + i for i, part in enumerate(ranked)}


def rows(
    texts: Texts, vocabulary: dict[str, int], unit: str, length: int
) -> Int[np.ndarray, "M S"]:
    """One row per text, its last `length` tokens, with padding before them."""
    table = np.full((len(texts), length), PADDING, np.int32)
    for row, text in zip(table, texts, strict=True):
        ids = [vocabulary.get(part, UNKNOWN) for part in split(text, unit)[-length:]]
        row[length - len(ids) :] = ids
    return table


def sequences(
    texts: Texts, vocabulary: dict[str, int], unit: str, length: int
) -> tuple[Int[np.ndarray, "M S1"], Int[np.ndarray, "M"]]:
    """Rows of S + 1 tokens, of which each but the first is predicted from those before.

    A text, with a beginning and an end, is cut so that every token is predicted once:
    a row begins with the last token of the row before. Padding follows the end.

    Args:
      texts: any number of them.
      vocabulary: from the function of this name.
      unit: "characters" or "words".
      length: S ≥ 1.

    Returns:
      The rows, and of each row the text that it is from.

    As McMahan et al. (2017) and FedJAX have it for Shakespeare, except that two texts
    are never in one row.
    """
    table, text_of_row = [], []
    for number, text in enumerate(texts):
        inner = [vocabulary.get(part, UNKNOWN) for part in split(text, unit)]
        ids = [BEGINNING, *inner, END]
        for start in range(0, len(ids) - 1, length):
            row = ids[start : start + length + 1]
            table.append(row + [PADDING] * (length + 1 - len(row)))
            text_of_row.append(number)
    return np.array(table, np.int32).reshape(-1, length + 1), np.array(text_of_row, int)
