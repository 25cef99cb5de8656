"""Elements of a page: names and texts are escaped where they are made."""

import string
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree import ElementTree

Element = ElementTree.Element


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    sort: str | None = None  # what it is sorted by; None: the text
    number: bool = False
    before: str = ""  # markup in front of the text


def clean(text: object) -> str:
    """Text without what no page can hold: control characters, lone surrogates."""
    plain = str(text).encode("utf-8", "replace").decode()
    return "".join(c for c in plain if c >= " " or c in "\n\t")


def tag(name: str, *inside: "str | Element", **attributes: str) -> Element:
    """An element; ``class_`` is its class, ``data_sort`` is ``data-sort``."""
    names = {n.rstrip("_").replace("_", "-"): clean(v) for n, v in attributes.items()}
    element = Element(name, names)
    for part in inside:
        if not isinstance(part, str):
            element.append(part)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + clean(part)
        else:
            element.text = (element.text or "") + clean(part)
    return element


def markup(element: Element) -> str:
    """The element as HTML."""
    return ElementTree.tostring(element, encoding="unicode", method="html")


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], name: str = "") -> str:
    """A table; sortable if it has a name.

    Args:
      head: names of the columns; a column of numbers is aligned to the right.
      rows: cells, as many as there are names.
      name: its id, of letters and minus signs.
    """
    numbers = [any(row[i].number for row in rows) for i in range(len(head))]
    kinds = [{"class": "number"} if number else {} for number in numbers]
    titles = []
    for text, kind in zip(head, kinds, strict=True):
        title = tag("th", tag("button", text, type="button") if name else text)
        title.set("scope", "col")
        title.attrib.update(kind)
        titles.append(title)
    lines = [f"<thead>{markup(tag('tr', *titles))}</thead><tbody>"]
    for row in rows:
        cells = []
        for cell, kind in zip(row, kinds, strict=True):
            element = tag("td", cell.text)
            element.attrib.update(kind)
            if cell.sort is not None:
                element.set("data-sort", cell.sort)
            opened, text = markup(element).split(">", 1)
            cells.append(f"{opened}>{cell.before}{text}")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    kind = f' class="sortable" id="{name}"' if name else ""
    return (
        f'<div class="scroll"><table{kind}>{chr(10).join(lines)}</tbody></table></div>'
    )


def details(summary: str, *inside: str) -> str:
    """A part that opens with a click."""
    head = markup(tag("summary", summary))
    return f"<details>{head}{''.join(inside)}</details>"


def grid(parts: Sequence[str]) -> str:
    """Figures, beside each other where there is room; "" if there are none."""
    return f'<div class="grid">{"".join(parts)}</div>' if parts else ""


def section(name: str, title: str, *inside: str) -> str:
    """A part of the page with a heading; "" if there is nothing inside."""
    whole = "\n".join(filter(None, inside))
    heading = markup(tag("h2", title))
    return f'<section id="{name}">{heading}\n{whole}</section>' if whole else ""


def fill(template: str, title: str, body: str) -> str:
    """The whole page."""
    head = markup(tag("title", title)).removeprefix("<title>").removesuffix("</title>")
    return string.Template(template).substitute(title=head, body=body)
