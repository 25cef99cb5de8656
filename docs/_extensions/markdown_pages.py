"""Markdown files that serve GitHub and the site alike.

On GitHub BUILD.md is a file beside the folder docs; on the site it is a page in it, and
links to it are changed. Tables that a study wrote have no heading and are in no menu.
"""

import pathlib
import re
from typing import Any

# Pages that show a file of the repository's root.
ROOT = {"install": "BUILD", "changes": "CHANGELOG", "contributing": "CONTRIBUTING"}
_PAGES = {file: page for page, file in ROOT.items()}
_FILE = "(" + "|".join(_PAGES) + r")\.md"
_LINK = re.compile(r"\]\((?:\.\./)+" + _FILE)


def from_root(text: str) -> str:
    """A file of the root as a page in docs: its links lead from there."""
    text = re.sub(r"\]\(" + _FILE, lambda m: f"]({_PAGES[m[1]]}.md", text)
    text = text.replace("](docs/", "](")
    return re.sub(
        r"\]\((tsfl_jax|configs|benchmarks|tests|studies)/", r"](../\1/", text
    )


def rewrite(app: Any, name: str, source: list[str]) -> None:
    """Change the text of one page before it is parsed."""
    if name in ROOT:
        path = pathlib.Path(app.srcdir).parent / f"{ROOT[name]}.md"
        app.env.note_dependency(str(path))
        source[0] = from_root(path.read_text())
        return
    up = "../" * name.count("/")
    text = _LINK.sub(lambda m: f"]({up}{_PAGES[m[1]]}.md", source[0])
    if name.startswith("results/") and not text.startswith("# "):
        text = f"---\norphan: true\n---\n# {name.removeprefix('results/')}\n\n{text}"
    source[0] = text


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True}
