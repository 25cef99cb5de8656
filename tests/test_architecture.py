"""Data flows one way: a folder imports only from those above it in `ORDER`.

docs/architecture.md shows the same order with one paragraph per folder.
"""

import ast
import pathlib
import re
import sys
import tomllib

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "tsfl_jax"

ROOT = "types rng trees components sections host_memory command"
FOLDERS = "timeline data models theory rules uplink"
# Assembled from the tables of the folders above.
BORDER = "config config_files registry"
LATER = "engine report prepare run"
ORDER = f"{ROOT} {FOLDERS} {BORDER} {LATER} flower cli __main__".split()
ENTRY_POINTS = {"__init__"}  # the public API
MOST_LINES, TALLEST = 500, 60
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]
STUDIES = sorted((PACKAGE.parent / "studies").glob("*.py"))  # not in the wheel
WRITTEN = [*FILES, *STUDIES]
WRITTEN_NAMES = [*NAMES, *(f"beside/{path.name}" for path in STUDIES)]


def modules(node: ast.AST) -> list[str]:
    """The modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [a.name for a in node.names] if isinstance(node, ast.Import) else []


def place(path: pathlib.Path) -> str:
    """The folder of a file in the package, or a root module's own name."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imported(path: pathlib.Path) -> set[str]:
    """Folders and root modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        assert getattr(node, "level", 0) == 0, f"{path}: relative import"
        for module in modules(node):
            if module == "tsfl_jax":
                found |= {alias.name for alias in node.names}
            elif module.startswith("tsfl_jax."):
                found.add(module.split(".")[1])
    return found


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_folder_imports_only_from_those_above_it(path):
    here = place(path)
    if here in ENTRY_POINTS:
        return
    for other in imported(path):
        assert other in ORDER, f"{path}: imports {other}, which has no place"
        assert ORDER.index(other) <= ORDER.index(here), f"{path}: imports {other}"


def test_the_order_names_only_what_exists():
    there = {place(path) for path in FILES} - ENTRY_POINTS
    assert there <= set(ORDER)
    assert set(ORDER) - there <= {"trees", "cli", "__main__"}


@pytest.mark.parametrize("path", WRITTEN, ids=WRITTEN_NAMES)
def test_files_stay_short_and_say_what_they_do(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert ast.get_docstring(ast.parse(text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= TALLEST, f"{path}: {node.name} has {lines} lines"
    for node in ast.parse(text).body:
        public = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if public and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name} has no docstring"


def test_the_documents_show_the_folders_in_this_order():
    docs = PACKAGE.parent / "docs" / "architecture.md"
    shown = re.findall(r"^\*\*(\w+)/\*\*", docs.read_text(), re.M)
    assert shown == f"{FOLDERS} {LATER}".split()


def test_all_folders_and_files_are_packaged():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    settings = project["tool"]["setuptools"]
    configs = {"tsfl_jax.configs", "tsfl_jax.configs.frameworks"}
    folders = {path.parent.relative_to(PACKAGE.parent) for path in FILES}
    packages = {str(folder).replace("/", ".") for folder in folders}
    assert set(settings["packages"]) == packages | configs
    assert settings["package-dir"] == {"tsfl_jax.configs": "configs"}
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            folder = path.parent.relative_to(PACKAGE.parent)
            assert (path.parent / "__init__.py").exists(), f"{folder} is no package"
            kinds = settings["package-data"].get(str(folder).replace("/", "."), [])
            kind = f"*{path.suffix}" if path.name != "py.typed" else path.name
            assert path.suffix == ".py" or kind in kinds, path


def test_dependencies_are_those_that_are_imported():
    """What the package imports is declared."""
    names = {"absl": "absl-py", "sklearn": "scikit-learn"}
    names |= {"tensorflow_datasets": "tensorflow-datasets", "jaxlib": "jax"}
    names |= {"yaml": "pyyaml", "dp_accounting": "dp-accounting"}
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    optional = sum(project["optional-dependencies"].values(), [])
    declared = {
        re.split(r"[\[>]", text)[0] for text in [*project["dependencies"], *optional]
    }
    found = {
        name.split(".")[0]
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        for name in modules(node)
    }
    foreign = found - set(sys.stdlib_module_names) - {"tsfl_jax"}
    assert {names.get(name, name) for name in foreign} <= declared
    assert "chex" in found  # checks of shapes where a custom rule hands over arrays


def test_settings_are_read_in_prepare_and_run_only():
    """Others may name the type `Config`; components say what does not go together."""
    for path in FILES:
        if place(path) in ("prepare", "run", "config", "cli"):
            continue
        tree, own = ast.parse(path.read_text()), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in ("check", "notes"):
                own |= set(ast.walk(node))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                read = node.value.id == "config" and node not in own
                assert not read, f"{path}: config.{node.attr}"
