"""Federated data as they are: one table of samples, and the client of each sample.

What the readers of formats share. A reader gives the `Samples` of its files; here they
become a `Dataset`: text becomes tokens, names of clients become numbers.
"""

import glob
import importlib
import os
import pathlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Shaped

from tsfl_jax import rng
from tsfl_jax.components import component, setting
from tsfl_jax.data import in_memory, text
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, UserError, user_code

# What samples, labels and clients are called, the first that a file has.
_SAMPLES = ("pixels", "image", "img", "x", "snippets", "tokens", "text", "sentence")
_LABELS = ("label", "labels", "y", "character", "fine_label")
_CLIENTS = ("client", "client_id", "writer_id", "user_id", "user", "author", "speaker")


@component("data")
class ColumnsConfig:
    """Names in files that may have any."""

    columns: str = setting(
        "", 'names of "samples,labels[,clients]" in the files; "": the usual ones'
    )


class Samples(NamedTuple):
    """Samples of one part, training or test, of all clients."""

    x: np.ndarray | list[str]  # [M, ...], or M texts
    y: np.ndarray | list[str] | None  # [M], also characters; None: the next token
    client: np.ndarray | list  # [M], names or numbers


def folder(settings: DataConfig, holds: str) -> pathlib.Path:
    """The folder ``data.dir``, or what is wrong with it in one line."""
    flag = f"--config.data.name={settings.name}"
    if not settings.dir:
        raise UserError(f"{flag} needs --config.data.dir=FOLDER with {holds}")
    what = f"--config.data.dir={settings.dir}: cannot be read"
    with user_code(what, f"expected a folder with {holds}"):
        found = pathlib.Path(settings.dir).expanduser()
        os.listdir(found)
        return found


def read_pair(
    samples: Callable[[DataConfig, pathlib.Path], Samples],
    ending: str,
    settings: DataConfig,
    seed: int = 0,
) -> Dataset:
    """Read the two files of a folder that end with train and test and the `ending`.

    Args:
      samples: function of the settings and a file, to its samples.
      ending: ".h5" or ".sqlite".
      settings: `dir` is the folder, `file` what comes before _train, of several;
        `columns` names the features, if others are wanted.
      seed: ignored.

    Returns:
      A `Dataset`; pixels as stored, in EMNIST 1 is the background.

    Raises:
      UserError: file, what is wrong and what was expected, in one line.
    """
    del seed
    where = folder(settings, f"files *train{ending} and *test{ending}")
    files = [_file(settings, where, part, ending) for part in ("train", "test")]
    return dataset(settings, where, *(samples(settings, path) for path in files))


def _file(
    settings: DataConfig, folder: pathlib.Path, part: str, ending: str
) -> pathlib.Path:
    """The only file of a part, such as ``shakespeare_train.h5``."""
    pattern = f"{glob.escape(settings.file)}_{part}" if settings.file else f"*{part}"
    found = sorted(folder.glob(f"{pattern}{ending}"))
    if len(found) != 1:
        shown = ", ".join(path.name for path in found) or "none"
        raise UserError(
            f"--config.data.dir={folder}: expected one file {pattern}{ending}, got "
            f"{shown}; of several, --config.data.file chooses: what comes before "
            f"_{part}{ending}"
        )
    return found[0]


def package(name: str, what: str) -> Any:
    """A package that only some formats need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{what} needs the package {name}, which is not installed: "
            "pip install 'tsfl_jax[natural]'"
        ) from error


def columns(
    settings: Any, held: Collection[str], where: object, client: bool = False
) -> list[str]:
    """The names of samples, labels and, where asked for, clients; "" for no labels.

    Args:
      settings: `columns`, "" for the usual names.
      held: all names that there are.
      where: the file, for messages.
      client: whether a column names the clients.

    Raises:
      UserError: a name that is not there.
    """
    usual = (_SAMPLES, _LABELS, _CLIENTS)[: 2 + client]
    if settings.columns:
        names = [name.strip() for name in settings.columns.split(",")]
    else:
        names = [next((n for n in some if n in held), "") for some in usual]
    least = [name for i, name in enumerate(names) if name or i != 1]
    if len(names) != len(usual) or not set(least) <= set(held):
        wanted = "samples,labels" + ",clients" * client
        raise UserError(
            f"--config.data.columns={settings.columns!r}: {where} holds "
            f"{', '.join(sorted(held))}; expected the names of {wanted}; none between "
            "two commas: the next token is predicted"
        )
    return names


def joined(parts: list[Any], where: object) -> np.ndarray | list[str]:
    """What several clients or files hold, as one array, or as one list of texts."""
    if not parts:
        raise UserError(f"{where}: no samples")
    expected = "expected numbers of one shape, or texts"
    with user_code(f"{where}: cannot be read", expected):
        if not isinstance(parts[0], list):
            parts = [np.asarray(part) for part in parts]
            if parts[0].dtype.kind not in "OSU":
                return np.concatenate(parts)
        texts = [text for part in parts for text in part]
        # str.__str__ refuses what is no text, such as null.
        return [t.decode() if isinstance(t, bytes) else str.__str__(t) for t in texts]


def of_clients(parts: list[tuple[Any, Any, Any]], where: object) -> Samples:
    """The samples of clients, from name, x and y of each; y None: no labels."""
    has_labels = bool(parts) and parts[0][2] is not None
    for client, x, y in parts:
        if (y is not None) != has_labels or has_labels and len(y) != len(x):
            raise UserError(
                f"{where}: client {client}: expected a label per sample, or none at all"
            )
    samples = joined([x for _, x, _ in parts], where)
    labels = joined([y for _, _, y in parts], where) if has_labels else None
    names = joined([[client] * len(x) for client, x, _ in parts], where)
    return Samples(samples, labels, [*names])


def dataset(
    settings: Any, where: pathlib.Path, train: Samples, test: Samples | None
) -> Dataset:
    """The data set of the samples of all clients.

    Text without labels becomes rows of `length` + 1 tokens, for a network that predicts
    each from those before; text with labels becomes one row each. Where labels are
    text, they are tokens: the next one of each row.

    Args:
      settings: `tokens`, `length`, `vocabulary` of text.
      where: the folder, for names and messages.
      train, test: likewise; None: a tenth of each client's samples, always the same
        ones, is the test set.

    Returns:
      A `Dataset` with `client` and `test_client`; clients are numbered in sorted order,
      those without training samples after the others.

    Raises:
      UserError: samples that do not fit together, in one line.
    """
    if test is None:
        held = _tenth(np.asarray(train.client))
        train, test = _some(train, ~held), _some(train, held)
    if (type(train.x), type(train.y)) != (type(test.x), type(test.y)):
        raise UserError(
            f"{where}: expected texts, and labels, in both train and test or neither"
        )
    made, classes = [train, test], 0
    if isinstance(train.x, list):
        if all(sample.endswith((".jpg", ".jpeg", ".png")) for sample in train.x):
            raise UserError(
                f"{where}: {train.x[0]!r} is a file's name; expected images or text"
            )
        labels = train.y if isinstance(train.y, list) else []
        texts, S = [*train.x, *labels], settings.length
        known = text.vocabulary(texts, settings.tokens, settings.vocabulary)
        made = [_tokens(part, known, settings.tokens, S) for part in made]
        if train.y is None or labels:
            classes = text.RESERVED + len(known)
    elif train.y is None:
        raise UserError(f"{where}: samples without labels are expected to be text")
    # A class may be in the test part only.
    labels = np.concatenate([np.asarray(part.y).ravel() for part in made])
    if not classes and labels.dtype.kind in "iu":
        classes = int(labels.max(initial=0)) + 1
    parts = (made[0].x, made[0].y, made[1].x, made[1].y)
    clients: dict[str, Any] = {"client": made[0].client, "test_client": made[1].client}
    name = f"{settings.name}({where.resolve().name})"
    if settings.name in ("tff", "fedjax") and np.ndim(made[0].x) == 3:
        clients["add_channel"] = True  # EMNIST's pixels are floats [M, 28, 28]
    return in_memory.make_dataset(*parts, name=name, num_classes=classes, **clients)


def _tokens(part: Samples, known: dict[str, int], tokens: str, S: int) -> Samples:
    """Texts as tokens."""
    texts, labels = list(part.x), part.y
    if labels is None:
        x, source = text.sequences(texts, known, tokens, S)
        real = (x != text.PADDING).sum(axis=1)
        y = x[np.arange(len(x)), real - 1]  # only for the mix of labels
        return Samples(x, y, np.asarray(part.client)[source])
    if isinstance(labels, list):
        wrong = [label for label in labels if len(text.split(label, tokens)) != 1]
        if wrong:
            raise UserError(
                f"--config.data.tokens={tokens}: the label {wrong[0]!r} is not one "
                "token; expected the next one, or numbers of classes"
            )
        labels = np.array([known.get(label, text.UNKNOWN) for label in labels])
    return Samples(text.rows(texts, known, tokens, S), labels, part.client)


def _tenth(client: Shaped[np.ndarray, "M"]) -> Bool[np.ndarray, "M"]:
    """A tenth of each client's samples, rounded down, chosen at random."""
    mixed = rng.generator(0, "test subset").permutation(len(client))
    order = mixed[np.argsort(client[mixed], kind="stable")]
    _, start, size = np.unique(client[order], return_index=True, return_counts=True)
    rank = np.arange(len(client)) - np.repeat(start, size)
    held = np.zeros(len(client), bool)
    held[order] = rank < np.repeat(size // 10, size)
    if not held.any():
        raise UserError(
            "data.dir: no test samples, and no client has ten samples, of which one "
            "would be for tests"
        )
    return held


def _some(samples: Samples, kept: Bool[np.ndarray, "M"]) -> Samples:
    rows = np.flatnonzero(kept)

    def of(values: Any) -> Any:
        listed = isinstance(values, list)
        return [values[i] for i in rows] if listed else values[rows]

    labels = None if samples.y is None else of(samples.y)
    return Samples(of(samples.x), labels, of(samples.client))
