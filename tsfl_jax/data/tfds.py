"""Data sets of TensorFlow Datasets (TFDS), read from array_record files.

Preparing (download and write) needs the extra `tfds`, which brings TensorFlow, and so
does the first reading. The decoded arrays are kept beside the prepared files, because
decoding one PNG after another takes seconds; later runs read only them (`tfds_cache`)
and do not import TFDS. Arrays that do not fit to the files are decoded again.
"""

import contextlib
import importlib.util
import logging
import os
import pathlib
import shutil
import sys
import tempfile
import urllib.parse
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from tsfl_jax.data import in_memory, tfds_cache
from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import Dataset, UserError

_BLOCK = 4096  # records decoded at a time
_TIMEOUT = 6  # seconds without an answer after which there is no network
_WAYS_OUT = (
    "point --config.data.dir at a folder of prepared data, prepare it once on a "
    "machine with network, or use --config.data.name=digits (frameworks: "
    "--config=frameworks/NAME:digits) or --config.data.name=npz "
    "--config.data.file=FILE.npz"
)
# Published as four files that `data.idx` reads without TFDS.
_AS_IDX = ("mnist", "fashion_mnist")
_INSTALL = "pip install 'tsfl_jax[tfds]'"
Builder = Any  # tfds.core.DatasetBuilder; imported only if a TFDS data set is used


def read(settings: DataConfig, seed: int = 0) -> Dataset:
    """Read an image classification data set of TFDS; prepare it first if allowed.

    Args:
      settings: `name` is its name in TFDS, or svhn; `dir` the data folder, "" is
        $TFDS_DATA_DIR or ~/tensorflow_datasets; `download` allows to fetch and prepare
        it if it is missing.
      seed: ignored.

    Returns:
      A `Dataset`, uint8 [M, H, W, C].

    Raises:
      UserError: missing and cannot be prepared, unreadable, in another file format, or
        not yet decoded where the extra `tfds` is not installed.
    """
    del seed
    name = "svhn_cropped" if settings.name == "svhn" else settings.name
    folder = settings.dir or os.environ.get("TFDS_DATA_DIR", "")
    folder = folder or "~/tensorflow_datasets"
    try:
        root = pathlib.Path(folder).expanduser()
        a_file = root.exists() and not root.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name; an unknown ~user
        raise UserError(
            f"--config.data.dir={folder}: cannot be read ({_reason(error)})"
        ) from error
    if a_file:
        raise UserError(f"--config.data.dir={root}: a file; expected a folder")
    with _quiet():
        try:
            return _read(name, root, settings.download)
        except OSError as error:
            raise UserError(
                f"--config.data.dir={root}: {name} cannot be read ({_reason(error)})"
            ) from error


def _read(name: str, root: pathlib.Path, download: bool) -> Dataset:
    folder = tfds_cache.find(root, name)
    held = tfds_cache.load(folder, name) if folder else None
    if held:
        arrays = (*held.train, *held.test)
        return in_memory.from_arrays(name, *arrays, held.num_classes, 255.0)
    try:
        return _decode(name, root, download)
    except ImportError as error:
        text = _without_tfds(name, root, folder, download)
        raise UserError(text) from error


def _decode(name: str, root: pathlib.Path, download: bool) -> Dataset:
    """Read with TFDS, which is imported here; prepare first if that is needed."""
    builder = _builder(name, root)
    if not builder.is_prepared():
        _prepare(name, root, builder, download)
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
        classes = builder.info.features["label"].num_classes
        arrays = (*_split(builder, "train", classes), *_split(builder, "test", classes))
    except ImportError:
        raise
    except Exception as error:  # depends on how the files are damaged
        raise UserError(_damaged(folder, name, error)) from error
    return in_memory.from_arrays(name, *arrays, classes, 255.0)


def _builder(name: str, root: pathlib.Path) -> Builder:
    """TFDS's builder; it takes the file format of data that are prepared."""
    import tensorflow_datasets as tfds  # half a second  # pyright: ignore[reportMissingImports]

    try:
        return tfds.builder(name, data_dir=root)
    except ImportError:  # TensorFlow is not installed
        raise
    except Exception as error:  # it reads dataset_info.json
        raise UserError(_damaged(root / name, name, error)) from error


def _ways_out(name: str) -> str:
    """What to do instead of preparing a data set."""
    if name not in _AS_IDX:
        return _WAYS_OUT
    idx = "read its four IDX files (--config.data.name=idx --config.data.dir=FOLDER), "
    return _WAYS_OUT.replace("or use", f"{idx}or use")


def _without_tfds(
    name: str, root: pathlib.Path, folder: pathlib.Path | None, download: bool
) -> str:
    """What to do where the extra is not installed and the caches cannot be used."""
    if folder:
        return (
            f"{folder}: {name} is not decoded to tsfl_cache_*.npz, or these files "
            f"do not fit; reading it then needs TensorFlow Datasets: {_INSTALL}, or "
            "copy the folder from a machine that has read it once"
        )
    if not download:
        return _forbidden(name, root)
    return (
        f"no {name} in {root}, and preparing it needs TensorFlow Datasets: {_INSTALL}, "
        f"{_ways_out(name)}"
    )


def _forbidden(name: str, root: pathlib.Path) -> str:
    return f"no {name} in {root}, and --config.data.download=False; {_ways_out(name)}"


def _damaged(folder: pathlib.Path, name: str, error: Exception) -> str:
    return (
        f"{folder} cannot be read ({_reason(error)}); delete it to have "
        f"{name} prepared again, or choose another --config.data.dir"
    )


def _reason(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _split(builder: Builder, split: str, classes: int) -> tfds_cache.Split:
    """Images and labels of one split, from the cache if it is up to date."""
    source = builder.as_data_source(split=split)
    files = [pathlib.Path(f) for f in builder.info.splits[split].filepaths]
    shape = (len(source), *builder.info.features["image"].shape)
    origin = tfds_cache.digest(files)
    cache = tfds_cache.path(files[0].parent, split)
    held = tfds_cache.read(cache, origin, shape, classes)
    if held:
        return held
    x, y = np.empty(shape, np.uint8), np.empty(len(source), np.int32)
    for start in range(0, len(y), _BLOCK):
        # One call for many records: 2.5 times as fast as one call for each.
        rows = range(start, min(start + _BLOCK, len(y)))
        for row, record in zip(rows, source.__getitems__(rows), strict=True):
            x[row], y[row] = record["image"], record["label"]
    tfds_cache.write(cache, files[0], image=x, label=y, origin=np.array(origin))
    return x, y


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide log lines and warnings of TFDS and of what it uses."""
    import absl.logging  # creates the logger "absl", with a class of its own

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


def _prepare(name: str, root: pathlib.Path, builder: Builder, download: bool) -> None:
    """Download a data set and write it as array_record files, or leave nothing behind.

    Args:
      name: in TFDS.
      root: data folder, may be missing.
      builder: TFDS's builder for it, which has found nothing prepared.
      download: False: only report that it is missing.

    Raises:
      UserError: not allowed, no network, no write access, or any other failure.
      ImportError: TensorFlow is not installed.
    """
    folder = pathlib.Path(builder.data_path)
    if folder.exists():
        raise UserError(
            f"{folder} exists but is not a complete {name}; delete it to have it "
            "prepared again, or choose another --config.data.dir"
        )
    if not download:
        raise UserError(_forbidden(name, root))
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError("tensorflow")
    # TFDS itself retries for minutes before it gives up.
    problem = _unreachable(next(iter(builder.url_infos)))
    if problem:
        raise UserError(
            f"no {name} in {root}, and it cannot be downloaded ({problem}); "
            f"{_ways_out(name)}"
        )
    made = [p for p in (root, *root.parents) if not p.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        _remove_empty(made)
        raise UserError(
            f"--config.data.dir={root}: {name} has to be prepared there, but nothing "
            f"can be written ({_reason(error)}); choose another --config.data.dir"
        ) from error
    with _locked(root):
        before = _folders(root, name)
        try:
            _download(name, root)
        except BaseException as error:  # TFDS, the network, the disk, Ctrl-C, all alike
            _remove_partial(root, name, before)
            _remove_empty(made)
            if not isinstance(error, Exception):
                raise
            raise UserError(
                f"no {name} in {root}, and preparing it failed ({_reason(error)}); "
                f"{_ways_out(name)}"
            ) from error


def _download(name: str, root: pathlib.Path) -> None:
    """Prepare a data set by TFDS; the only place that imports TensorFlow."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow_datasets as tfds  # pyright: ignore[reportMissingImports]

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    builder = tfds.builder(name, data_dir=root, file_format="array_record")
    builder.download_and_prepare(  # nothing to do if another run has done it by now
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
    )


@contextlib.contextmanager
def _locked(root: pathlib.Path) -> Iterator[None]:
    """Make runs that start together prepare one after another, if locks exist."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # not on Windows

            handle = os.open(root, os.O_RDONLY)
            stack.callback(os.close, handle)  # which also unlocks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _unreachable(url: str) -> str:
    """Why the file cannot be fetched from here, in a few words; "" if it can."""
    import requests  # a dependency of TFDS; honors proxy settings as TFDS does

    host = urllib.parse.urlparse(url).netloc
    try:
        with requests.get(url, stream=True, timeout=_TIMEOUT) as response:
            good = response.status_code < 400
            return "" if good else f"{host} answers HTTP {response.status_code}"
    except requests.RequestException:
        return f"no connection to {host}"


def _folders(root: pathlib.Path, name: str) -> list[pathlib.Path]:
    """The folders that preparing makes in `root`, from the inside out."""
    downloads = root / "downloads"
    tops = (root / name, downloads / name, downloads / "extracted", downloads)
    parents = (root / name, downloads / name, downloads)
    below = [p for top in parents if top.is_dir() for p in top.iterdir()]
    return [*below, *(top for top in tops if top.exists())]


def _remove_partial(root: pathlib.Path, name: str, before: list[pathlib.Path]) -> None:
    """Remove partial downloads and empty folders that were not there before."""
    new = [path for path in _folders(root, name) if path not in before]
    for path in new:
        if ".tmp." in path.name:  # as TFDS calls an unfinished download
            shutil.rmtree(path, ignore_errors=True)
    _remove_empty(new)


def _remove_empty(folders: list[pathlib.Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it holds something, or is gone
            folder.rmdir()
