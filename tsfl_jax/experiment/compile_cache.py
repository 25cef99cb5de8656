"""JAX's persistent compilation cache: the second launch of a program skips XLA."""

import os
import pathlib
import tempfile

import jax

from tsfl_jax.types import UserError


def default_folder() -> pathlib.Path:
    """``$XDG_CACHE_HOME/tsfl_jax/xla``, which is ~/.cache/tsfl_jax/xla for most."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "tsfl_jax" / "xla"


def _writable(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def use(choice: str) -> pathlib.Path | None:
    """Switches the cache on for this process, or leaves it as it is.

    Args:
      choice: "auto": the folder JAX has been told (``$JAX_COMPILATION_CACHE_DIR``,
        `jax.config`), else `default_folder` where that can be written; "off": nothing
        is changed; anything else: the folder to use.

    Returns:
      The folder in use; None: no cache.

    Raises:
      UserError: no folder's name, or a chosen folder that cannot be written.
    """
    if not choice.strip():  # as a path this would be the current folder
        raise UserError(
            "--config.compile_cache is empty: expected a folder, 'auto' or 'off'"
        )
    told = jax.config.jax_compilation_cache_dir
    if choice == "off" or (choice == "auto" and told):
        return pathlib.Path(told) if told else None
    folder = default_folder() if choice == "auto" else pathlib.Path(choice)
    try:
        _writable(folder.expanduser())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        if choice == "auto":
            return None
        raise UserError(
            f"--config.compile_cache={choice}: cannot write there "
            f"({getattr(error, 'strerror', None) or error}); choose another folder, "
            "or off"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder.expanduser()))
    # The trifles too: a launch compiles dozens of them beside its own program.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
