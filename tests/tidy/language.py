"""Wording that makes a reader stop, in names, docstrings and comments of product code.

`python -m tests.tidy.language [PATH…]` lists every place with its line.

- **dialect**: words that this tree uses in a private sense, and docstrings that begin with "The same".
- **clauses**: sentences that begin with "What …" or "Who …" and are no questions. Name the thing.
- **participles**: names that are one past participle (`found`, `_held`, `Claimed`). Classes are nouns,
  functions are verbs, booleans are questions, a list has the name of its items.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_dialect = re.compile(
    r"\b(told|whoever|whatever is|worded|at it|comes to|stands for|bears?|who (?:waits|asks|has|was|is)"
    r"|what is (?:urgent|there|left|held|not))\b"
)
_clause = re.compile(
    r"(?:^|(?<=[.;:] )|(?<=^- ))(?:What|Who|Whose|All who|Those who)\b[^.?]*\??", re.IGNORECASE
)
_irregular = frozenset(
    (
        "made",
        "held",
        "told",
        "brought",
        "given",
        "kept",
        "found",
        "left",
        "met",
        "sent",
        "taken",
        "seen",
        "gone",
        "lost",
        "done",
        "known",
        "shown",
        "written",
        "begun",
        "drawn",
        "built",
        "driven",
        "fallen",
        "felt",
        "forgotten",
        "frozen",
        "grown",
        "heard",
        "hidden",
        "laid",
        "led",
        "lent",
        "meant",
        "paid",
        "proven",
        "risen",
        "said",
        "sold",
        "spoken",
        "spent",
        "stolen",
        "struck",
        "taught",
        "thought",
        "thrown",
        "torn",
        "understood",
        "woken",
        "won",
        "worn",
        "broken",
        "chosen",
    )
)
#: Nouns, adjectives and verbs that end as participles do.
_no_participles = frozenset(
    (
        "need",
        "feed",
        "seed",
        "speed",
        "bed",
        "red",
        "embed",
        "exceed",
        "proceed",
        "succeed",
        "shed",
        "breed",
        "indeed",
        "hundred",
        "weed",
    )
)


class Place(NamedTuple):
    kind: str
    line: int
    text: str


@cache
def places(source: str) -> tuple[Place, ...]:
    """Every place of a file that reads badly."""
    return tuple(_places(source))


def _places(source: str) -> Iterator[Place]:
    tree = ast.parse(source)
    for line, text in _texts(source, tree):
        whole = " ".join(text.split())
        if whole.startswith("The same"):
            yield Place("dialect", line, whole[:80])
        for match in _dialect.finditer(whole):
            yield Place("dialect", line, f"{match.group(0)}: …{whole[max(0, match.start() - 30) :][:80]}")
        for match in _clause.finditer(whole):
            starts_sentence = match.group(0)[0].isupper()
            if starts_sentence and not match.group(0).endswith("?"):
                yield Place("clause", line, match.group(0)[:80])
    yield from _participles(tree)


def _texts(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings, and comments with all their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield node.body[0].lineno, docstring
    first, lines, column = 0, [""], -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, at = token.start
        if row != first + len(lines) or at != column:
            yield first, " ".join(lines)
            first, lines, column = row, [], at
        lines.append(token.string.lstrip("#: "))
    yield first, " ".join(lines)


def _participles(tree: ast.AST) -> Iterator[Place]:
    """Each name once: where it is bound first."""
    seen: set[tuple[str, str]] = set()
    for kind, name, line in sorted(_bindings(tree), key=lambda binding: binding[2]):
        if is_participle(name) and (kind, name) not in seen:
            seen.add((kind, name))
            yield Place("participle", line, f"{kind} {name}")


def _bindings(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "function", node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield "parameter", node.arg, node.lineno
        elif isinstance(node, ast.ClassDef):
            yield "class", node.name, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield "variable", node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield "attribute", node.attr, node.lineno


def is_participle(name: str) -> bool:
    word = name.strip("_")
    if not word or not (word.islower() or word[1:].islower()) or "_" in word:
        return False
    word = word.lower()
    if word in _no_participles:
        return False
    return word in _irregular or (len(word) > 3 and word.endswith("ed"))


def main() -> None:
    paths = [Path(each) for each in sys.argv[1:] or ("streams", "shard", "gateway")]
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if "_sync" not in file.parts:
                for place in places(file.read_text()):
                    print(f"{file}:{place.line}: {place.kind}: {place.text}")


if __name__ == "__main__":
    main()
