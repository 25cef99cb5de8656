"""Federated data as they are: one table of samples, and the client of each sample.

What the readers of formats share. A reader gives the `Samples` of its files; here they
become a `Dataset`: text becomes tokens, names of clients become numbers.
"""

import glob
import importlib
import pathlib
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Shaped

from tsfl_jax import rng
from tsfl_jax.components import component, setting
from tsfl_jax.data import in_memory, text
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, UserError, one_line

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
    found = pathlib.Path(settings.dir).expanduser()
    if not found.is_dir():
        raise UserError(f"--config.data.dir={found}: no such folder; expected {holds}")
    return found


def file_of(
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


def unreadable(path: pathlib.Path, error: BaseException, expected: str) -> UserError:
    """One line on a file that is damaged or of another format."""
    reason = one_line(error, 200)
    return UserError(f"{path}: cannot be read ({reason}); expected {expected}")


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
    if not isinstance(parts[0], list):
        parts = [np.asarray(part) for part in parts]
        if parts[0].dtype.kind not in "OSU":
            try:
                return np.concatenate(parts)
            except ValueError as error:
                raise UserError(f"{where}: samples differ ({error})") from error
    flat = [one for part in parts for one in part]
    return [one.decode() if isinstance(one, bytes) else str(one) for one in flat]


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
    made, classes = [train, test], 0
    if isinstance(train.x, list):
        labels = train.y if isinstance(train.y, list) else []
        texts, S = [*train.x, *labels], settings.length
        known = text.vocabulary(texts, settings.tokens, settings.vocabulary)
        made = [_tokens(part, known, settings.tokens, S) for part in made]
        if train.y is None or labels:
            classes = text.RESERVED + len(known)
    elif train.y is None:
        raise UserError(f"{where}: samples without labels are expected to be text")
    parts = (made[0].x, made[0].y, made[1].x, made[1].y)
    clients = {"client": made[0].client, "test_client": made[1].client}
    name = f"{settings.name}({where.resolve().name})"
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
