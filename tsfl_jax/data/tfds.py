"""Data sets of TensorFlow Datasets, read from array_record files.

Reading needs no TensorFlow; only `tfds_prepare` does, when a data set is missing.
The decoded arrays are kept beside the prepared files (tsfl_cache_*.npz), because
decoding one PNG after another takes seconds. A cache holds the digest of the files
that it was made from; one that does not agree, or has other shapes or labels than the
data set, is made anew.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import shutil
import tempfile
import warnings
import zipfile
import zlib

import numpy as np

from tsfl_jax.data import builtin, tfds_prepare
from tsfl_jax.types import Dataset, UserError

_CLASSES = 10  # of each data set
_BLOCK = 4096  # records decoded at a time


def read(name: str, dir: str, download: bool) -> Dataset:
    """A prepared TFDS data set; prepares it first where it may.

    Args:
      name: one of `config.TFDS`.
      dir: data folder; "" is $TFDS_DATA_DIR or ~/tensorflow_datasets.
      download: fetch and prepare it where it is missing.

    Returns:
      A `Dataset`, uint8 [M, H, W, C].

    Raises:
      UserError: not there and not to be had, unreadable, or in another file format.
    """
    dir = dir or os.environ.get("TFDS_DATA_DIR", "") or "~/tensorflow_datasets"
    try:
        root = pathlib.Path(dir).expanduser()
        a_file = root.exists() and not root.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name; an unknown ~user
        raise UserError(
            f"--config.data.dir={dir}: cannot be read ({tfds_prepare.reason(error)})"
        ) from error
    if a_file:
        raise UserError(f"--config.data.dir={root}: a file; expected a folder")
    with _quiet():
        try:
            arrays = _read(name, root, download)
        except OSError as error:
            raise UserError(
                f"--config.data.dir={root}: {name} cannot be read "
                f"({tfds_prepare.reason(error)})"
            ) from error
    return builtin.unit(name, *arrays, _CLASSES, 255)


def _read(name: str, root: pathlib.Path, download: bool) -> list[np.ndarray]:
    """x_train, y_train, x_test, y_test."""
    builder = _builder(name, root)
    if not builder.is_prepared():
        tfds_prepare.prepare(name, root, builder, download)
        builder = _builder(name, root)
    folder = pathlib.Path(builder.data_path)
    formats = {f.value for f in builder.info.available_file_formats()}
    if "array_record" not in formats:
        raise UserError(
            f"{folder} holds {name} as {', '.join(sorted(formats))}, which only "
            "TensorFlow can read; delete it to have it prepared as array_record, or "
            "choose another --config.data.dir"
        )
    try:
        return [*_split(builder, "train"), *_split(builder, "test")]
    except Exception as error:  # whatever damaged files make TFDS raise
        raise UserError(_damaged(folder, name, error)) from error


def _builder(name: str, root: pathlib.Path):
    """TFDS's builder; where data are prepared it takes their file format."""
    import tensorflow_datasets as tfds  # half a second

    try:
        return tfds.builder(name, data_dir=root)
    except Exception as error:  # it reads dataset_info.json
        raise UserError(_damaged(root / name, name, error)) from error


def _damaged(folder: pathlib.Path, name: str, error: Exception) -> str:
    return (
        f"{folder} cannot be read ({tfds_prepare.reason(error)}); delete it to have "
        f"{name} prepared again, or choose another --config.data.dir"
    )


def _split(builder, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one split, from the cache where it is up to date."""
    source = builder.as_data_source(split=split)
    files = [pathlib.Path(f) for f in builder.info.splits[split].filepaths]
    features = builder.info.features
    x = np.empty((len(source), *features["image"].shape), np.uint8)
    y = np.empty(len(source), np.int32)
    origin = _digest(files)
    cache = files[0].parent / f"tsfl_cache_{split}.npz"
    if _read_cache(cache, origin, x, y):
        return x, y
    for start in range(0, len(y), _BLOCK):
        # One call for many records: 2.5 times as fast as one call for each.
        rows = range(start, min(start + _BLOCK, len(y)))
        for row, record in zip(rows, source.__getitems__(rows), strict=True):
            x[row], y[row] = record["image"], record["label"]
    _write_cache(cache, files[0], image=x, label=y, origin=np.array(origin))
    return x, y


def _digest(files: list[pathlib.Path]) -> str:
    """Of the content: times and sizes may agree by chance, or differ after a copy."""
    whole = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _read_cache(cache: pathlib.Path, origin: str, x: np.ndarray, y: np.ndarray) -> bool:
    """Fills images and labels; False where the cache is missing, damaged or stale."""
    try:
        # Opened here: np.load alone leaves a damaged file open.
        with open(cache, "rb") as file, np.load(file, allow_pickle=False) as held:
            if str(held["origin"]) != origin:
                return False
            arrays = held["image"], held["label"]  # zip checks their CRC-32
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        return False
    like = [(a.dtype, a.shape) for a in (x, y)]
    if like != [(a.dtype, a.shape) for a in arrays]:
        return False
    if not ((arrays[1] >= 0) & (arrays[1] < _CLASSES)).all():
        return False
    x[...], y[...] = arrays
    return True


def _write_cache(cache: pathlib.Path, like: pathlib.Path, **arrays) -> None:
    """Writes the cache in one rename; does nothing where the folder is read-only."""
    part = ""
    try:
        handle, part = tempfile.mkstemp(dir=cache.parent, prefix=cache.stem)
        with open(handle, "wb") as file:
            np.savez(file, **arrays)
        shutil.copymode(like, part)  # who may read the data may read its cache
        os.replace(part, cache)
    except OSError:
        pass
    finally:
        with contextlib.suppress(OSError):  # gone after the rename
            os.unlink(part)


@contextlib.contextmanager
def _quiet():
    """No log lines and warnings of TFDS and what it uses: users can do nothing."""
    import absl.logging  # before its logger is asked for, else that is the wrong kind

    del absl
    loggers = [logging.getLogger(n) for n in ("absl", "urllib3", "tensorflow")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
