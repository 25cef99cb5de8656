"""Run the notebooks: ``python docs/execute.py [--text] [NAME …]``.

``docs/tutorials/NAME.md`` is a notebook as text, the source; this writes
``NAME.ipynb`` with the same cells and their outputs, which the site shows. With
``--text`` nothing runs: the old outputs stay, which the code must have made.
"""

import pathlib
import sys
import time

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "tutorials"


def with_old_outputs(notebook: nbformat.NotebookNode, path: pathlib.Path) -> None:
    """Take over the outputs of the notebook at `path`, whose code must be the same."""
    old = nbformat.read(path, as_version=4)
    pairs = zip(notebook.cells, old.cells, strict=True)
    for new, before in pairs:
        if new.cell_type == "code":
            if new.source != before.source:
                raise SystemExit(f"{path.name}: the code has changed; leave out --text")
            new.outputs = before.outputs
            new.execution_count = before.execution_count


def execute(path: pathlib.Path, text_only: bool) -> None:
    """Run one notebook in the root of the checkout and write it beside its source."""
    notebook = read_myst_markdown_notebook(path.read_text(), add_source_map=False)
    begun = time.perf_counter()
    if text_only:
        with_old_outputs(notebook, path.with_suffix(".ipynb"))
    else:
        where = {"metadata": {"path": str(ROOT)}}
        NotebookClient(notebook, timeout=600, resources=where).execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"].pop("execution", None)
    notebook["metadata"] = {
        "kernelspec": {"name": "python3", "display_name": "Python 3"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    notebook["nbformat"], notebook["nbformat_minor"] = 4, 5
    target = path.with_suffix(".ipynb")
    target.write_text(nbformat.writes(notebook, indent=1) + "\n")
    size, seconds = target.stat().st_size / 1024, time.perf_counter() - begun
    print(f"{target.relative_to(ROOT)}: {seconds:.0f} s, {size:.0f} KB")


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--text"]
    for name in words or sorted(p.stem for p in FOLDER.glob("*.md")):
        execute(FOLDER / f"{name}.md", "--text" in sys.argv)
