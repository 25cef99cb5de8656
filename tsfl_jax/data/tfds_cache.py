"""The decoded arrays beside prepared TFDS data, which are read without TFDS.

Beside the array_record files of a split is tsfl_cache_SPLIT.npz with its images, its
labels, and the digest of the files that they were decoded from. A cache is used if
the digest agrees and if shapes and labels are those that TFDS's own description of
the data, two JSON files, gives.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

Split = tuple[UInt8[np.ndarray, "M H W C"], Int32[np.ndarray, "M"]]  # images, labels


class Held(NamedTuple):
    """Both splits of a data set."""

    train: Split
    test: Split
    num_classes: int


def find(root: pathlib.Path, name: str) -> pathlib.Path | None:
    """The folder of the newest prepared version of a data set, None if there is none.

    Args:
      root: data folder, which may be missing.
      name: in TFDS.
    """
    versions = {}
    for info in root.glob(f"{name}/*/dataset_info.json"):
        with contextlib.suppress(ValueError):  # not a version
            versions[tuple(map(int, info.parent.name.split(".")))] = info.parent
    return versions[max(versions)] if versions else None


def load(folder: pathlib.Path, name: str) -> Held | None:
    """Both splits from their caches, None unless both are there and up to date.

    Args:
      folder: of one version, from `find`.
      name: in TFDS.
    """
    try:
        info = json.loads((folder / "dataset_info.json").read_text())
        features = json.loads((folder / "features.json").read_text())
        features = features["featuresDict"]["features"]
        shape = features["image"]["image"]["shape"]["dimensions"]
        shape = tuple(map(int, shape))
        classes = int(features["label"]["classLabel"]["numClasses"])
        sizes = {s["name"]: sum(map(int, s["shardLengths"])) for s in info["splits"]}
        train, test = (
            _split(folder, f"{name}-{split}", split, (sizes[split], *shape), classes)
            for split in ("train", "test")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # TFDS says what is wrong with its files
    return Held(train, test, classes) if train and test else None


def _split(
    folder: pathlib.Path, prefix: str, split: str, shape: tuple[int, ...], classes: int
) -> Split | None:
    cache = path(folder, split)
    files = sorted(folder.glob(f"{prefix}.array_record-*-of-*"))
    if not files or not cache.exists():
        return None
    return read(cache, digest(files), shape, classes)


def path(folder: pathlib.Path, split: str) -> pathlib.Path:
    """Where the cache of a split is."""
    return folder / f"tsfl_cache_{split}.npz"


def digest(files: list[pathlib.Path]) -> str:
    """SHA-256 of the content: times may agree by chance, or differ after a copy."""
    whole = hashlib.sha256()
    for name in files:
        with open(name, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def read(
    cache: pathlib.Path, origin: str, shape: tuple[int, ...], classes: int
) -> Split | None:
    """Images and labels of a cache, None if it is missing, damaged or out of date.

    Args:
      cache: from `path`.
      origin: `digest` of the files that it should have been made from.
      shape: of the images, (M, H, W, C).
      classes: number of classes.
    """
    try:
        # Opened here: np.load alone leaves a damaged file open.
        with open(cache, "rb") as file, np.load(file, allow_pickle=False) as held:
            if str(held["origin"]) != origin:
                return None
            x, y = held["image"], held["label"]  # zip checks their CRC-32
    except Exception:  # what NumPy raises depends on the damage
        return None
    if (x.dtype, x.shape, y.dtype, y.shape) != (np.uint8, shape, np.int32, shape[:1]):
        return None
    return (x, y) if ((y >= 0) & (y < classes)).all() else None


def write(cache: pathlib.Path, like: pathlib.Path, **arrays: np.ndarray) -> None:
    """Write the cache in one rename; do nothing if the folder is read-only.

    Args:
      cache: from `path`.
      like: the file whose permissions it gets.
      **arrays: image, label and origin, as `read` expects them.
    """
    part = ""
    try:
        handle, part = tempfile.mkstemp(dir=cache.parent, prefix=cache.stem)
        with open(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        shutil.copymode(like, part)  # who may read the data may read its cache
        os.replace(part, cache)
    except OSError:
        pass
    finally:
        with contextlib.suppress(OSError):  # gone after the rename
            os.unlink(part)
