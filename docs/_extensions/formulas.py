"""Symbols in running text with indices: ρ_i as ρ with a subscript, w^{t+1} likewise.

The documents are plain text with Unicode symbols, readable in a terminal and on
GitHub. On the site indices are set as such. Code is left alone.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform

_INDEX = r"(?:\{[^}]+\}|i,h|j,h|eff|max|min|[A-Za-z0-9](?:[+−][0-9])?)"
_SYMBOL = re.compile(
    r"(?P<base>(?<![\w.`])[^\W\d_]{1,4}[‖|)\]]?|[‖|)\]]|(?<![\w.`])\d+(?=\^))"
    rf"(?:_(?P<sub>{_INDEX}))?"
    r"(?:\^(?P<sup>\{[^}]+\}|[+−-]?[A-Za-z0-9*]+))?(?![A-Za-z0-9_`])"
)
_CODE = (nodes.literal, nodes.literal_block, nodes.math, nodes.raw)


def pieces(text: str) -> list[nodes.Node] | None:
    """The text as nodes with indices; None where it has none."""
    found: list[nodes.Node] = []
    done = 0
    for match in _SYMBOL.finditer(text):
        below, above = match["sub"], match["sup"]
        if not (below or above):
            continue
        found.append(nodes.Text(text[done : match.start()] + match["base"]))
        if below:
            found.append(nodes.subscript("", below.strip("{}")))
        if above:
            found.append(nodes.superscript("", above.strip("{}")))
        done = match.end()
    return [*found, nodes.Text(text[done:])] if found else None


class Indices(SphinxTransform):
    """Replaces text nodes outside code."""

    default_priority = 950  # after references are made

    def apply(self, **options: Any) -> None:
        """Rewrite the document."""
        del options
        for node in list(self.document.findall(nodes.Text)):
            above = node.parent
            while above is not None and not isinstance(above, _CODE):
                above = above.parent
            if above is not None or node.parent is None:
                continue
            if isinstance(node.parent, nodes.title):
                continue  # also the text of menus and of the browser's tab
            new = pieces(str(node))
            if new:
                node.parent.replace(node, new)


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.add_transform(Indices)
    return {"parallel_read_safe": True}
