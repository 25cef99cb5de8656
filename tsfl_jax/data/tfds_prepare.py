"""Downloads and prepares a TFDS data set, or says in one line why that failed.

The only place that imports TensorFlow. Nothing half-written is left behind.
"""

import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
import urllib.parse

from tsfl_jax.types import UserError

_SECONDS = 6  # to wait for the server before saying that there is no network


def prepare(name: str, root: pathlib.Path, builder, download: bool) -> None:
    """Downloads a data set and writes it as array_record files.

    Args:
      name: of the data set in TFDS.
      root: data folder, may be missing.
      builder: TFDS's builder for it, which has found nothing prepared.
      download: False: only say that it is missing.

    Raises:
      UserError: not allowed, no network, nowhere to write, anything else.
    """
    ways_out = (
        "point --config.data.dir at a folder of prepared data, prepare it once on a "
        "machine with network, or use --config.data.name=digits or "
        "--config.data.name=npz --config.data.file=FILE.npz"
    )
    folder = pathlib.Path(builder.data_path)
    if folder.exists():
        raise UserError(
            f"{folder} exists but is not a complete {name}; delete it to have it "
            "prepared again, or choose another --config.data.dir"
        )
    if not download:
        raise UserError(
            f"no {name} in {root}, and --config.data.download=False; {ways_out}"
        )
    # TFDS itself retries for minutes before it gives up.
    problem = _unreachable(next(iter(builder.url_infos)))
    if problem:
        raise UserError(
            f"no {name} in {root}, and it cannot be downloaded ({problem}); {ways_out}"
        )
    made = [p for p in (root, *root.parents) if not p.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        _remove_empty(made)
        raise UserError(
            f"--config.data.dir={root}: {name} has to be prepared there, but nothing "
            f"can be written ({reason(error)}); choose another --config.data.dir"
        ) from error
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow_datasets as tfds

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    with _alone(root):
        before = _tree(root, name)
        try:
            builder = tfds.builder(name, data_dir=root, file_format="array_record")
            builder.download_and_prepare(  # nothing to do where another run was first
                download_config=tfds.download.DownloadConfig(try_download_gcs=False)
            )
        except BaseException as error:  # TFDS, the network, the disk, Ctrl-C, all alike
            _clean(root, name, before)
            _remove_empty(made)
            if not isinstance(error, Exception):
                raise
            raise UserError(
                f"no {name} in {root}, and preparing it failed ({reason(error)}); "
                f"{ways_out}"
            ) from error


@contextlib.contextmanager
def _alone(root: pathlib.Path):
    """Runs that start together prepare one after another, where locks exist."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # not on Windows

            handle = os.open(root, os.O_RDONLY)
            stack.callback(os.close, handle)  # which also unlocks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _unreachable(url: str) -> str:
    """Why the file cannot be fetched from here, in a few words; "" if it can."""
    import requests  # a dependency of TFDS; honours proxy settings as TFDS does

    host = urllib.parse.urlparse(url).netloc
    try:
        with requests.get(url, stream=True, timeout=_SECONDS) as response:
            good = response.status_code < 400
            return "" if good else f"{host} answers HTTP {response.status_code}"
    except requests.RequestException:
        return f"no connection to {host}"


def _tree(root: pathlib.Path, name: str) -> list[pathlib.Path]:
    """The folders that preparing makes in `root`, from the inside out."""
    downloads = root / "downloads"
    tops = (root / name, downloads / name, downloads / "extracted", downloads)
    parents = (root / name, downloads / name, downloads)
    below = [p for top in parents if top.is_dir() for p in top.iterdir()]
    return [*below, *(top for top in tops if top.exists())]


def _clean(root: pathlib.Path, name: str, before: list[pathlib.Path]) -> None:
    """Removes partial downloads and empty folders that were not there before."""
    new = [path for path in _tree(root, name) if path not in before]
    for path in new:
        if ".tmp." in path.name:  # as TFDS calls an unfinished download
            shutil.rmtree(path, ignore_errors=True)
    _remove_empty(new)


def _remove_empty(folders: list[pathlib.Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it holds something, or is gone
            folder.rmdir()


def reason(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
