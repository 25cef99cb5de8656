"""Federated data as they are: one table of samples, and the client of each sample.

What the readers of formats share. A reader gives the `ClientSamples` of its files; here
they become a `Dataset`: text becomes tokens, names of clients become numbers.
"""

import glob
import operator
import pathlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
from jaxtyping import Bool, Shaped

from tsfl_jax import rng
from tsfl_jax.components import component, setting
from tsfl_jax.data import in_memory, inputs, tokens
from tsfl_jax.data.inputs import require
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset

# What samples, labels and clients are called, the first that a file has.
_SAMPLES = ("pixels", "image", "img", "x", "snippets", "tokens", "text", "sentence")
_LABELS = ("label", "labels", "y", "character", "fine_label")
_CLIENTS = ("client", "client_id", "writer_id", "user_id", "user", "author", "speaker")
Client = tuple[Any, Any, Any]  # name, samples, labels or None


@component("data")
class ColumnsConfig:
    """Names in files that may have any."""

    columns: str = setting(
        "", 'names of "samples,labels[,clients]" in the files; "": the usual ones'
    )


class ClientSamples(NamedTuple):
    """Samples of one part, training or test, of all clients; texts are objects."""

    x: np.ndarray  # [M, ...], or M texts
    y: np.ndarray | None  # [M], also texts; None: the next token
    client: np.ndarray  # [M], names or numbers


def read(
    clients: Callable[[DataConfig, pathlib.Path], Iterable[Client]],
    layout: str,
    expected: str,
    settings: DataConfig,
    _seed: int = 0,
) -> Dataset:
    """Read files of training samples and files of test samples from a folder.

    Args:
      clients: function of the settings and a file, to name, samples and labels of each
        of its clients.
      layout: such as "{}/*.json", where {} is train or test and may be several files,
        or "*{}.h5", which is one file.
      expected: what such a file is.
      settings: `dir` is the folder, `file` what comes before _train, of several;
        `columns` names the features, if others are wanted.

    Returns:
      A `Dataset`; 784 numbers of LEAF become an image [28, 28, 1]. Pixels are as
      stored, in EMNIST 1 is the background.

    Raises:
      UserError: file, what is wrong and what was expected, in one line.
    """
    content = " and ".join(layout.format(part) for part in ("train", "test"))
    folder, parts = inputs.folder(settings, f"files {content}"), []
    prefix = f"{glob.escape(settings.file)}_" if settings.file else "*"
    for part in ("train", "test"):
        pattern = layout.replace("*{}", prefix + part).replace("{}", part)
        paths = sorted(folder.glob(pattern))
        names = ", ".join(path.name for path in paths) or "none"
        require(
            paths and (len(paths) == 1 or "/" in layout),
            f"--config.data.dir={folder}: expected {pattern}, got {names}; of several, "
            f"--config.data.file chooses: what comes before _{part}",
        )
        by_client = []
        for path in paths:
            with inputs.reading(path, expected):
                by_client += clients(settings, path)
        parts.append(samples_of(by_client, folder))
    return from_samples(settings, folder, *parts)


def samples_of(clients: list[Client], folder: pathlib.Path) -> ClientSamples:
    """The samples of all clients, which have labels or have none."""
    has_labels = bool(clients) and clients[0][2] is not None
    for name, x, y in clients:
        require(
            (y is not None) == has_labels and len(x if y is None else y) == len(x),
            f"{folder}: client {name}: expected a label per sample, or none at all",
        )
    x = joined([x for _, x, _ in clients], folder)
    y = joined([y for _, _, y in clients], folder) if has_labels else None
    return ClientSamples(x, y, joined([[n] * len(x) for n, x, _ in clients], folder))


def columns(
    settings: Any, names: Collection[str], path: object, client: bool = False
) -> list[str]:
    """The names of samples, labels and, on demand, clients; "" for no labels.

    Args:
      settings: `columns`, "" for the usual names.
      names: of all columns that there are.
      path: the file, for messages.
      client: whether a column names the clients.

    Raises:
      UserError: a name that is not there.
    """
    usual = (_SAMPLES, _LABELS, _CLIENTS)[: 2 + client]
    if settings.columns:
        chosen = [name.strip() for name in settings.columns.split(",")]
    else:
        chosen = [next((n for n in group if n in names), "") for group in usual]
    needed = {name for i, name in enumerate(chosen) if name or i != 1}
    require(
        len(chosen) == len(usual) and needed <= set(names),
        f"--config.data.columns={settings.columns!r}: {path} holds "
        f"{', '.join(sorted(names))}; expected the names of samples,labels"
        f"{',clients' * client}; none between two commas: the next token is predicted",
    )
    return chosen


def joined(parts: list[Any], path: object) -> np.ndarray:
    """What several clients hold, as one array, of texts as one of objects."""
    with inputs.reading(path, "samples: numbers of one shape, or texts"):
        if not isinstance(parts[0], list):
            parts = [np.asarray(part) for part in parts]
            if parts[0].dtype.kind not in "OSU":
                return np.concatenate(parts)
        texts = [text for part in parts for text in part]
        texts = [t.decode() if isinstance(t, bytes) else t for t in texts]
        # str.__str__ refuses what is no text, such as null.
        return np.array([*map(str.__str__, texts)], object)


def _is_text(values: np.ndarray | None) -> TypeGuard[np.ndarray]:
    return values is not None and values.dtype == object


def from_samples(
    settings: Any,
    folder: pathlib.Path,
    train: ClientSamples,
    test: ClientSamples | None,
    vocabulary: dict[str, int] | None = None,
) -> Dataset:
    """The data set of the samples of all clients.

    Text without labels becomes rows of `length` + 1 tokens, for a network that predicts
    each from those before; text with labels becomes one row each. Where labels are
    text, they are tokens: the next one of each row.

    Args:
      settings: `tokens`, `length`, `vocabulary` of text.
      folder: for names and messages.
      train, test: likewise; None: a tenth of each client's samples, always the same
        ones, is the test set.
      vocabulary: the tokens; None: those of the training texts.

    Returns:
      A `Dataset` with `client` and `test_client`; clients are numbered in sorted order,
      those without training samples after the others.

    Raises:
      UserError: samples that do not fit together, in one line.
    """
    if test is None:
        is_test = _tenth(train.client)
        train, test = _rows(train, ~is_test), _rows(train, is_test)
    kinds = ((_is_text(p.x), _is_text(p.y), p.y is None) for p in (train, test))
    require(
        len({*kinds}) == 1,
        f"{folder}: expected texts, and labels, in both train and test or neither",
    )
    num_classes = 0
    if _is_text(train.x):
        is_image = all(text.endswith((".jpg", ".jpeg", ".png")) for text in train.x)
        message = f"{folder}: {train.x[0]!r} is a file's name; expected images or text"
        require(not is_image, message)
        train, test, num_classes = _tokenized(train, test, settings, vocabulary)
    require(train.y is not None, f"{folder}: expected labels, or text without them")
    # A class may be in the test part only.
    labels = np.concatenate([np.ravel(np.asarray(part.y)) for part in (train, test)])
    if not num_classes and labels.dtype.kind in "iu":
        num_classes = int(labels.max(initial=0)) + 1
    # EMNIST's pixels are floats [M, 28, 28].
    gray = settings.name in ("tff", "fedjax") and np.ndim(train.x) == 3
    return in_memory.make_dataset(
        train.x,
        train.y,
        test.x,
        test.y,
        name=f"{settings.name}({folder.resolve().name})",
        num_classes=num_classes,
        client=train.client.tolist(),
        test_client=test.client.tolist(),
        add_channel=True if gray else None,
    )


def _tokenized(
    train: ClientSamples,
    test: ClientSamples,
    settings: Any,
    vocabulary: dict[str, int] | None,
) -> tuple[ClientSamples, ClientSamples, int]:
    """Texts as tokens, and their number where they are predicted, else 0."""
    if vocabulary is None:
        texts = np.append(train.x, train.y) if _is_text(train.y) else train.x
        vocabulary = tokens.vocabulary(texts, settings.tokens, settings.vocabulary)
    predicted = train.y is None or _is_text(train.y)
    train, test = (_token_rows(part, vocabulary, settings) for part in (train, test))
    return train, test, predicted * (tokens.RESERVED + len(vocabulary))


def _token_rows(
    part: ClientSamples, vocabulary: dict[str, int], settings: Any
) -> ClientSamples:
    labels, arguments = part.y, (vocabulary, settings.tokens, settings.length)
    if labels is None:
        x, text = tokens.sequences(part.x, *arguments)
        lengths = (x != tokens.PADDING).sum(axis=1)
        y = x[np.arange(len(x)), lengths - 1]  # only for the mix of labels
        return ClientSamples(x, y, part.client[text])
    if _is_text(labels):
        unit = settings.tokens
        wrong = [label for label in labels if len(tokens.split(label, unit)) != 1]
        require(
            not wrong,
            f"--config.data.tokens={unit}: the label {''.join(wrong[:1])!r} is not one "
            "token; expected the next one, or numbers of classes",
        )
        labels = np.array([vocabulary.get(label, tokens.UNKNOWN) for label in labels])
    return ClientSamples(tokens.rows(part.x, *arguments), labels, part.client)


def _rows(samples: ClientSamples, rows: Bool[np.ndarray, "M"]) -> ClientSamples:
    return jax.tree.map(operator.itemgetter(rows), samples)


def _tenth(client: Shaped[np.ndarray, "M"]) -> Bool[np.ndarray, "M"]:
    """A tenth of each client's samples, rounded down, chosen at random."""
    import pandas as pd  # slow to import

    mixed = rng.generator(0, "test subset").permutation(len(client))
    clients: Any = pd.Series(client[mixed]).groupby(client[mixed])
    is_test = np.zeros(len(client), bool)
    is_test[mixed] = clients.cumcount() < clients.transform("size") // 10
    require(is_test.any(), "data.dir: no test samples, and no client has ten samples")
    return is_test
