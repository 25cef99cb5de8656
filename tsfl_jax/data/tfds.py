"""Data sets of TensorFlow Datasets (TFDS), read from array_record files.

Preparing (download and write) needs the extra `tfds`, which brings TensorFlow, and so
does the first reading. Because decoding one PNG after another takes seconds, the
decoded arrays are kept beside the prepared files: tsfl_cache_SPLIT.npz has the images
and labels of a split. Later runs read only them and do not import TFDS.
"""

import contextlib
import logging
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import filelock
import numpy as np
from jaxtyping import Int32, UInt8

from tsfl_jax.data import in_memory
from tsfl_jax.data.inputs import check
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, user_code

_BLOCK = 4096  # records decoded at a time
_TIMEOUT = 6  # seconds without an answer after which there is no network
# Published as four files that `data.idx` reads without TFDS.
_AS_IDX = ("mnist", "fashion_mnist")
_SPLITS = ("train", "test")
Split = tuple[UInt8[np.ndarray, "M H W C"], Int32[np.ndarray, "M"]]  # images, labels


def read(settings: DataConfig, _seed: int = 0) -> Dataset:
    """Read an image classification data set of TFDS; prepare it first if allowed.

    Args:
      settings: `name` is its name in TFDS, or svhn; `dir` the data folder, "" is
        $TFDS_DATA_DIR or ~/tensorflow_datasets; `download` allows to fetch and prepare
        it if it is missing.

    Returns:
      A `Dataset`, uint8 [M, H, W, C].

    Raises:
      UserError: missing and cannot be prepared, unreadable, in another file format, or
        not yet decoded where the extra `tfds` is not installed.
    """
    name = "svhn_cropped" if settings.name == "svhn" else settings.name
    folder = settings.dir or os.environ.get("TFDS_DATA_DIR", "")
    folder = folder or "~/tensorflow_datasets"
    idx = "its four IDX files (--config.data.name=idx --config.data.dir=FOLDER), "
    expected = (
        f"expected a folder of data that TFDS has prepared as array_record; if {name} "
        "is damaged or has another format, delete it; to prepare or decode it, pip "
        "install 'tsfl_jax[tfds]', with network, or copy the folder from a machine "
        f"that has read it; or use {idx * (name in _AS_IDX)}--config.data.name=digits "
        "(frameworks: --config=frameworks/NAME:digits) or --config.data.name=npz "
        "--config.data.file=FILE.npz"
    )
    with user_code(f"no {name} in --config.data.dir={folder}", expected), _quiet():
        root = pathlib.Path(folder).expanduser()
        prepared = _prepared(root, name)
        check(prepared or settings.download, "--config.data.download=False")
        splits = [_cached(prepared, s) for s in _SPLITS] if prepared else [None]
        splits = _decode(name, root) if None in splits else splits
        arrays = [array for split in splits if split for array in split]
        return in_memory.make_dataset(*arrays, name=name, num_classes=10)


def _prepared(root: pathlib.Path, name: str) -> pathlib.Path | None:
    """The folder of the newest prepared version of a data set."""
    versions = {}
    for info in root.glob(f"{name}/*/dataset_info.json"):
        with contextlib.suppress(ValueError):  # not a version
            versions[tuple(map(int, info.parent.name.split(".")))] = info.parent
    return versions[max(versions)] if versions else None


def _cached(folder: pathlib.Path, split: str) -> Split | None:
    """Images and labels of a cache, None if it is missing or damaged."""
    try:
        # Opened here: np.load alone leaves a damaged file open.
        with open(_cache(folder, split), "rb") as file:
            arrays = np.load(file, allow_pickle=False)
            return arrays["image"], arrays["label"]  # zip checks their CRC-32
    except Exception:  # what NumPy raises depends on the damage
        return None


def _cache(folder: pathlib.Path, split: str) -> pathlib.Path:
    return folder / f"tsfl_cache_{split}.npz"


def _decode(name: str, root: pathlib.Path) -> list[Split]:
    """Read both splits with TFDS, which is imported here; prepare them if needed."""
    import tensorflow_datasets as tfds  # half a second  # pyright: ignore[reportMissingImports]

    if not tfds.builder(name, data_dir=root).is_prepared():
        _prepare(name, root)
    # Made again: with the file format of what is there. Its features have no types.
    builder: Any = tfds.builder(name, data_dir=root)
    splits = []
    for split in _SPLITS:
        source = builder.as_data_source(split=split)
        shape = (len(source), *builder.info.features["image"].shape)
        x, y = np.empty(shape, np.uint8), np.empty(len(source), np.int32)
        for start in range(0, len(y), _BLOCK):
            # One call for many records: 2.5 times as fast as one call for each.
            rows = range(start, min(start + _BLOCK, len(y)))
            for row, record in zip(rows, source.__getitems__(rows), strict=True):
                x[row], y[row] = record["image"], record["label"]
        _write_cache(pathlib.Path(builder.data_path), split, x, y)
        splits.append((x, y))
    return splits


def _write_cache(
    folder: pathlib.Path, split: str, image: np.ndarray, label: np.ndarray
) -> None:
    """Write a cache in one rename; do nothing if the folder is read-only."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=folder) as part:
        path = pathlib.Path(part) / "arrays.npz"
        np.savez(path, image=image, label=label)
        os.replace(path, _cache(folder, split))


def _prepare(name: str, root: pathlib.Path) -> None:
    """Download a data set and write it as array_record files."""
    import tensorflow_datasets as tfds  # pyright: ignore[reportMissingImports]

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    builder: Any = tfds.builder(name, data_dir=root, file_format="array_record")
    _check_connection(next(iter(builder.url_infos)))
    root.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(root / f"{name}.lock")
    with lock, tempfile.TemporaryDirectory(dir=root) as files:
        # Made again: it does nothing if another run has prepared it.
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
        builder.download_and_prepare(
            download_dir=files,
            download_config=tfds.download.DownloadConfig(try_download_gcs=False),
        )


def _check_connection(url: str) -> None:
    """Raise an error at once: TFDS itself retries for minutes before it gives up."""
    import requests  # a dependency of TFDS; honors proxy settings as TFDS does

    with requests.get(url, stream=True, timeout=_TIMEOUT) as response:
        response.raise_for_status()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide log lines and warnings of TFDS and of what it uses."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
