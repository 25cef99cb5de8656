"""Whose code a module is: a user's own, or that of an installed package."""

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import sysconfig

# Known by name, also where they are installed from a checkout.
LIBRARIES = {"chex", "flax", "jax", "jaxlib", "jaxtyping", "numpy", "optax", "scipy"}
LIBRARIES |= {"sklearn", "tsfl_jax", "typing_extensions"}
_INSTALLED = {"site-packages", "dist-packages"}


@functools.lru_cache(maxsize=4096)
def is_own(module: str | None, file: str | None = None) -> bool:
    """Whether a module is a user's: in no folder of installed packages."""
    top = (module or "").partition(".")[0]
    if top in ("", "__main__"):  # text given to `exec`, a script, a notebook
        return True
    if top in LIBRARIES or top in sys.builtin_module_names:
        return False
    if not file:
        found = sys.modules.get(module or "") or sys.modules.get(top)
        spec = None if found else importlib.util.find_spec(top)
        file = getattr(found, "__file__", None) or (spec and spec.origin)
    if not file or file in ("built-in", "frozen"):
        return top not in sys.stdlib_module_names
    path = os.path.realpath(file)
    if _INSTALLED & set(path.split(os.sep)):
        return False
    folders = {sysconfig.get_path(n) for n in ("stdlib", "platstdlib")}
    roots = [os.path.realpath(f) + os.sep for f in folders]
    return not path.startswith(tuple(roots))


@functools.cache
def _files_of(package: str) -> str:
    """A digest of an installed package's code."""
    found = sys.modules.get(package)
    digest = hashlib.sha256()
    for folder in map(pathlib.Path, getattr(found, "__path__", ())):
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            for file in sorted(folder.rglob(f"*{suffix}")):  # of up to gigabytes
                digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    single = getattr(found, "__file__", None)
    if single:  # of a package the one that is imported first
        digest.update(pathlib.Path(single).read_bytes())
    return digest.hexdigest()[:16]


def release(module: str | None) -> str:
    """Tell releases of an installed package apart.

    A package that this project does not know may be a user's, installed.

    Returns:
      "@" and a digest of its files; empty for a user's own module, for Python's, and
      for those of `LIBRARIES`, whose name is enough.
    """
    top = (module or "").partition(".")[0]
    known = LIBRARIES | sys.stdlib_module_names | {*sys.builtin_module_names}
    return "" if is_own(module) or top in known else f"@{_files_of(top)}"
