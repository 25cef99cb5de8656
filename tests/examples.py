"""Examples of the documentation: Python blocks by the title of their section."""

import contextlib
import io
import pathlib
import re

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def text(page: str) -> str:
    """A page of docs/."""
    return (DOCS / page).read_text()


def examples(page: str, section: str) -> dict[str, str]:
    """Blocks of a page of docs/; `section` finds (title, text)."""
    return {
        title: block
        for title, body in re.findall(section, text(page), re.M | re.S)
        for block in re.findall(r"^```python\n(.*?)^```", body, re.M | re.S)
    }


def run(block: str) -> tuple[dict, str]:
    """Variables and output of an example."""
    variables, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(block, variables)
    return variables, out.getvalue()
