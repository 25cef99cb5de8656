"""Writes the pages of the API reference: one of the public names, one per folder.

The pages are made from the package itself at each build and are not committed.
"""

import importlib
import inspect
import pathlib
import pkgutil
import re
from types import ModuleType
from typing import Any

from sphinx import addnodes

import tsfl_jax

# Folders in the order in which data flows, then the modules beside them.
FOLDERS = [
    "timeline",
    "data",
    "models",
    "theory",
    "rules",
    "uplink",
    "engine",
    "report",
    "prepare",
    "run",
]
MODULES = ("types", "components", "sections", "config", "rng", "trees", "validate")


def title(text: str, mark: str = "=") -> str:
    """A heading in reStructuredText."""
    return f"{text}\n{mark * len(text)}\n\n"


def entry(name: str) -> str:
    """The directive that documents one public name, by what it is."""
    item = getattr(tsfl_jax, name)
    if inspect.ismodule(item):
        short = item.__name__.removeprefix("tsfl_jax.").split(".")[0]
        return f"``{name}``: the module :mod:`{item.__name__}` (:doc:`{short}`).\n\n"
    if inspect.isclass(item):
        if hasattr(item, "__dataclass_fields__"):
            return f".. autoclass:: {name}\n\n   :doc:`All settings </settings>`.\n\n"
        return f".. autoclass:: {name}\n   :members:\n\n"
    if isinstance(item, dict):
        keys = ", ".join(f"``{key}``" for key in item)
        return f".. py:data:: {name}\n   :type: dict\n\n   By name: {keys}.\n\n"
    return f".. autofunction:: {name}\n\n"


def groups() -> dict[str, list[str]]:
    """The public names by group, from the list in the package's docstring."""
    found: dict[str, list[str]] = {}
    last = ""
    for line in (tsfl_jax.__doc__ or "").splitlines():
        row = re.fullmatch(r" {2}(.*?) {2,}(\S.*)", line)
        if row:
            last = row[1].strip() or last
            found.setdefault(last, []).extend(re.findall(r"\w+", row[2]))
    listed = {name for names in found.values() for name in names}
    others = sorted(set(tsfl_jax.__all__) - listed)
    return found | ({"Others": others} if others else {})


def public_page() -> str:
    """The names of ``import tsfl_jax``."""
    text = title("Public names")
    text += "What ``import tsfl_jax`` offers. Names elsewhere may move.\n\n"
    text += ".. currentmodule:: tsfl_jax\n\n"
    for group, names in groups().items():
        text += title(group, "-") + "".join(map(entry, names))
    return text


def public_here(module: ModuleType) -> list[str]:
    """Public names whose functions and classes a module defines."""
    return [
        name
        for name in sorted(tsfl_jax.__all__)
        if getattr(getattr(tsfl_jax, name), "__module__", "") == module.__name__
    ]


def module_part(module: ModuleType) -> str:
    """A module with its functions and classes; public ones are on their own page."""
    name = module.__name__.removeprefix("tsfl_jax.")
    text = title(name, "-") + f".. automodule:: {module.__name__}\n   :members:\n"
    text += "   :ignore-module-all:\n"
    names = public_here(module)
    if names:
        text += f"   :exclude-members: {', '.join(names)}\n\n"
        text += ":doc:`Public <public>`: "
        text += ", ".join(f":py:obj:`tsfl_jax.{name}`" for name in names) + ".\n"
    return text + "\n"


def resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A name in backticks that a module knows under its public name."""
    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in tsfl_jax.__all__:
        return None
    if name in node.get("reftarget") and node.get("reftarget") != f"tsfl_jax.{name}":
        domain = env.get_domain("py")
        here = node.get("refdoc")
        return domain.resolve_xref(
            env, here, app.builder, "obj", f"tsfl_jax.{name}", node, content
        )
    return None


def folder_page(folder: str) -> str:
    """All modules of a folder."""
    package = importlib.import_module(f"tsfl_jax.{folder}")
    text = title(folder) + f".. automodule:: tsfl_jax.{folder}\n\n"
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"tsfl_jax.{folder}.{found.name}")
        text += module_part(module)
    return text


def roots_page() -> str:
    """The modules that belong to no folder."""
    text = title("Types, settings, random streams")
    for name in MODULES:
        text += module_part(importlib.import_module(f"tsfl_jax.{name}"))
    return text


def index_page() -> str:
    """The list of pages."""
    pages = ["public", "base", *FOLDERS]
    return (
        title("API reference")
        + "Made from the docstrings. :doc:`public` has what ``import tsfl_jax`` "
        + "offers; the other pages have one folder each, in the order in which data "
        + "flows through the package (:doc:`/architecture`). Symbols and shapes are "
        + "explained in :mod:`tsfl_jax.types`.\n\n"
        + ".. toctree::\n   :maxdepth: 1\n\n"
        + "".join(f"   {page}\n" for page in pages)
    )


def write(app: Any) -> None:
    """Write the pages that changed, so that the others are not built again."""
    folder = pathlib.Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    pages = {"index": index_page(), "public": public_page(), "base": roots_page()}
    pages |= {name: folder_page(name) for name in FOLDERS}
    for name, text in pages.items():
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def unlink(app: Any, document: Any) -> None:
    """Leave names in annotations alone that are no classes of the package.

    Those have full names; `Run`, an alias of a type, could lead to any class `Run`.
    """
    del app
    for node in list(document.findall(addnodes.pending_xref)):
        named = node.get("refdomain") == "py" and node.get("reftype") == "class"
        if named and "." not in node["reftarget"] and "py:module" in node:
            node.replace_self(node.children)


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect("builder-inited", write)
    app.connect("doctree-read", unlink)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
