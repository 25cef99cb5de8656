"""Docstrings, written as plain text, made into reStructuredText.

Symbols such as ``w*``, ``|D_i|`` and ``Σ_i`` would be read as markup and are escaped.
An equation, a paragraph of its own that begins with a formula, becomes a block of class
``formula``. Fields of a NamedTuple are documented by the comments beside them.
"""

import ast
import dataclasses
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Any

import tsfl_jax

# What stays as it is: literals, roles, links, emphasized words.
_EMPHASIS = r"(?<!\S)\*[A-Za-z][\w ]*[A-Za-z]\*(?!\w)"
_KEPT = re.compile(rf"(``.+?``|:\w+(?::\w+)?:`[^`]+`|`[^`\n]+`_?|{_EMPHASIS})")
_MARKS = re.compile(r"(?<!\\)([*|])|(?<=\w)_(?=[^\w{]|$)")
_BARS = str.maketrans("|*", "∣∗")
# At most a word of three letters before the relation: else it is a sentence.
_FORMULA = re.compile(r"^(?![>\-=])(?:(?![A-Za-z]{4}).){1,60}? [=≤≥∝←→] \S")
_SHORT = 6  # fields of a NamedTuple that its signature shows


def escape(line: str) -> str:
    """Escape asterisks, bars and final underscores outside literals."""
    parts = _KEPT.split(line)
    for k in range(0, len(parts), 2):
        parts[k] = _MARKS.sub(lambda m: "\\" + m[0], parts[k])
        if k and parts[k][:1].isalnum():  # a plural, `Segment`s
            parts[k] = "\\ " + parts[k]
    return "".join(parts)


def is_formula(paragraph: list[str]) -> bool:
    """Whether a paragraph is an equation: short, flush left, with a relation."""
    text = " ".join(paragraph)
    words = re.findall(r"[A-Za-z]{4,}", _KEPT.sub("", text))
    return bool(_FORMULA.match(text)) and len(paragraph) <= 3 and len(words) <= 8


def paragraphs(lines: list[str]) -> list[list[str]]:
    """Lines grouped by the blank lines between them."""
    groups: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            groups[-1].append(line)
        elif groups[-1]:
            groups.append([])
    return [group for group in groups if group]


def statements(source: str) -> Iterator[tuple[list[tokenize.TokenInfo], str]]:
    """The tokens of each statement, and its comment.

    A comment is on the lines of the statement, or on lines of its own before it.
    """
    before: list[str] = []
    same: list[str] = []
    line: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (same if line else before).append(token.string.lstrip("# "))
        elif token.type == tokenize.NEWLINE:
            yield line, " ".join(same or before)
            before, same, line = [], [], []
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            line.append(token)


def unfenced(lines: list[str]) -> list[str]:
    """Blocks between lines of three backquotes as literal blocks."""
    found: list[str] = []
    inside = False
    for line in lines:
        if line.strip().startswith("```"):
            inside = not inside
            found += ["::", ""] if inside else [""]
        else:
            found.append("    " + line if inside else line)
    return found


def fields(kind: Any) -> dict[str, tuple[str, str]]:
    """Annotation and comment of each field of a NamedTuple, from its source."""
    try:
        source = inspect.cleandoc("\n" + inspect.getsource(kind))
    except (OSError, TypeError):
        return {}
    nodes = {
        item.target.id: ast.unparse(item.annotation)
        for item in ast.walk(ast.parse(source))
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    notes = {line[0].string: note for line, note in statements(source) if line}
    return {name: (nodes[name], notes[name]) for name in kind._fields if name in nodes}


def field_lines(kind: Any) -> list[str]:
    """The fields of a NamedTuple as a list in reStructuredText."""
    return [""] + [
        f"- **{name}** (``{annotation}``)" + (note and f": {escape(note)}")
        for name, (annotation, note) in fields(kind).items()
    ]


def process(
    app: Any, what: str, name: str, item: Any, options: Any, lines: list[str]
) -> None:
    """Rewrite the lines of one docstring in place."""
    del app, name, options
    found: list[str] = []
    literal = False  # inside a block after "::", a table or an example
    for paragraph in paragraphs(unfenced(lines)):
        first = paragraph[0]
        literal = first.startswith((">>>", "===", "..", "::")) or (
            literal and first.startswith(" ")
        )
        if first.startswith("==="):  # a table, whose columns must stay aligned
            found += [line.translate(_BARS) for line in paragraph]
        elif literal:
            found += paragraph
        elif not first.startswith((" ", ":")) and is_formula(paragraph):
            text = " ".join(escape(line.strip()) for line in paragraph)
            found += [".. rst-class:: formula", "", text]
        else:
            found += [escape(line) for line in paragraph]
            literal = paragraph[-1].endswith("::")
        found.append("")
    if what == "class" and hasattr(item, "_fields"):
        found += field_lines(item)
    lines[:] = found


class _Linked(ast.NodeTransformer):
    """Writes classes of the package with their full names, which Sphinx shortens."""

    def __init__(self, known: dict[str, Any]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return self.replaced(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return self.replaced(node)

    def replaced(self, node: Any) -> Any:
        try:
            found = eval(ast.unparse(node), self.known)
        except (NameError, AttributeError):
            return node
        module = getattr(found, "__module__", None) or ""
        if not inspect.isclass(found) or not module.startswith("tsfl_jax"):
            return node
        if found.__name__.startswith("_"):  # has no entry to link to
            return node
        if getattr(tsfl_jax, found.__name__, None) is found:
            module = "tsfl_jax"
        return ast.Name(f"~{module}.{found.__name__}")


def signature(
    app: Any, what: str, name: str, item: Any, options: Any, args: str, result: str
) -> tuple[str, str | None] | None:
    """Annotations as the source has them, ``Params`` rather than ``Any``.

    The fields of a NamedTuple are listed below it; its signature has the names at most.
    """
    del app, name, options, args, result
    if what == "class" and hasattr(item, "_fields"):
        short = len(item._fields) <= _SHORT
        return f"({', '.join(item._fields)})" if short else "", None
    if what == "class" and dataclasses.is_dataclass(item):
        return "", None  # many settings, which have a page of their own
    if what not in ("function", "method"):
        return None
    item = inspect.unwrap(item)
    try:
        node = ast.parse(inspect.cleandoc("\n" + inspect.getsource(item))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(node, ast.FunctionDef):
        return None
    if what == "method" and node.args.args:
        node.args.args.pop(0)  # self
    linked = _Linked(item.__globals__)
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg) and argument.annotation:
            argument.annotation = linked.visit(argument.annotation)
    gives = node.returns and ast.unparse(linked.visit(node.returns))
    return f"({ast.unparse(node.args)})", gives


def skip(app: Any, what: str, name: str, item: Any, old: bool, options: Any) -> Any:
    """Leave out fields of a NamedTuple, which stand in its docstring."""
    del app, what, name, old, options
    return True if type(item).__name__ == "_tuplegetter" else None


def setup(app: Any) -> dict[str, bool]:
    """Register the extension; after napoleon, which has priority 500."""
    app.connect("autodoc-process-docstring", process, priority=600)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
