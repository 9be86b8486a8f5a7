"""Collects every message that a user can see from the source of the product: `make docs`.

Kinds: errors, log events, command help, printed lines, questions, findings of checks, and the tables of
settings and next steps. Placeholders are shown as `{name}`. A message that is built in several steps has one
line per text that the collector can resolve: arguments, both sides of a condition, and local variables.
Metric help is not in the list: `docs/reference/metrics.md` has it.

Method: the source is parsed, never imported. Files of the generated client for threads are left out.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, product
from typing import Final, NamedTuple

from tests.tidy.measures import name_of, sources

_HEAD: Final = "Every message that a user can see, by file. `make docs` writes this list.\n"
_LEVELS: Final = frozenset(("debug", "info", "warning", "error", "exception", "critical"))
#: Function or class -> kind of the texts in its arguments.
_PRINTERS: Final = {
    **dict.fromkeys(("echo", "print", "warn", "note", "inform", "show_result", "print_text"), "print"),
    **dict.fromkeys(("confirm", "prompt"), "question"),
    **dict.fromkeys(("fail", "BadParameter"), "error"),
    **dict.fromkeys(("Check", "Finding"), "check"),
    "_setting": "setting",
}
_HELP: Final = ("help", "short_help", "epilog")
#: Module-level tables of texts.
_TABLES: Final = frozenset(("COMMANDS", "NEXT_STEPS", "SETTINGS", "REASONS"))
#: Exceptions that only a bug raises.
_BUGS: Final = frozenset(("AssertionError", "NotImplementedError"))
#: Alternatives of one message: a message with more conditions than this shows its first combinations.
_TEXTS_MAX: Final = 16

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Message(NamedTuple):
    kind: str
    text: str


@cache
def page() -> str:
    """Return the list as text: a paragraph per file, a line per message."""
    trees = {name_of(path): ast.parse(path.read_text()) for path in sources()}
    errors = _error_classes(trees.values())
    parts = [_HEAD]
    for name, tree in trees.items():
        messages = sorted(dict.fromkeys(_Collector(tree, errors).messages()), key=lambda each: each.kind)
        if messages:
            parts.append(f"{name}\n" + "".join(f"  {kind}: {text}\n" for kind, text in messages))
    return "\n".join(parts)


def _error_classes(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Names of the classes in the tree that derive from an exception, and of the built-in exceptions."""
    bases = {
        node.name: [_last_name(base) for base in node.bases]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    errors = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, Exception) and name not in _BUGS
    } | {"ClickException", "UsageError"}
    while more := {name for name, names in bases.items() if name not in errors and errors & set(names)}:
        errors |= more
    return frozenset(errors)


def _last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, of `c[d]` and of `c(d)`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value) | ast.Call(func=value):
            return _last_name(value)
    return ""


class _Collector:
    """Collects the messages of one file."""

    def __init__(self, tree: ast.Module, errors: frozenset[str]) -> None:
        self._tree = tree
        self._errors = errors
        self._module_texts = _assignments(tree)

    def messages(self) -> Iterator[Message]:
        for node in self._tree.body:
            yield from self._table(node)
        yield from self._visit(self._tree, self._module_texts)

    def _visit(self, node: ast.AST, variables: dict[str, list[ast.expr]]) -> Iterator[Message]:
        if isinstance(node, Function):
            variables = {**variables, **_assignments(node)}
            yield from self._command_help(node)
        if isinstance(node, ast.Call):
            for kind, expression in self._call(node):
                for text in _texts(expression, variables):
                    if " " in text or kind.startswith("log"):  # one word is a code, a path or a placeholder
                        yield Message(kind, _one_line(text))
        for child in ast.iter_child_nodes(node):
            yield from self._visit(child, variables)

    def _call(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        name = _last_name(call.func)
        if isinstance(call.func, ast.Call):
            name = ""  # a call of a result: its own arguments are no messages
        if name in self._errors:
            yield from ((f"error {name}", each) for each in call.args)
        elif name in _LEVELS and "log" in _last_name(getattr(call.func, "value", call)):
            yield from ((f"log {name}", each) for each in call.args[:1])
        elif name in _PRINTERS:
            kind = _PRINTERS[name]
            skips = {"setting": 2, "check": 1}.get(kind, 0)
            yield from ((kind, each) for each in call.args[skips:] if not isinstance(each, ast.Lambda))
        for keyword in call.keywords:
            if keyword.arg in _HELP:
                options = [each.value for each in call.args if isinstance(each, ast.Constant)]
                flags = [str(each) for each in options if str(each).startswith("-")]
                yield f"help {flags[0]}" if flags else "help", keyword.value

    def _command_help(self, function: Function) -> Iterator[Message]:
        """The docstring of a click command."""
        makes_command = any(
            isinstance(each, ast.Call) and _last_name(each.func) in ("command", "group")
            for each in function.decorator_list
        )
        docstring = ast.get_docstring(function)
        if makes_command and docstring:
            yield Message("help", _one_line(docstring))

    def _table(self, node: ast.stmt) -> Iterator[Message]:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            return
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = _TABLES.intersection(map(_last_name, targets))
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            parts = value.elts if isinstance(value, ast.Tuple) else [value]
            if names and isinstance(key, ast.Constant):
                for text in chain.from_iterable(_texts(each, {}) for each in parts):
                    if " " in text:
                        yield Message(f"{min(names).lower()} {key.value}", _one_line(text))


def _assignments(node: ast.AST) -> dict[str, list[ast.expr]]:
    """The expressions that are assigned to each plain name in a module or function."""
    values: dict[str, list[ast.expr]] = {}
    for each in ast.walk(node) if isinstance(node, Function) else ast.iter_child_nodes(node):
        match each:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values.setdefault(name, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                values.setdefault(name, []).append(value)
    return values


def _texts(node: ast.expr, variables: dict[str, list[ast.expr]]) -> list[str]:
    """Return the texts that an expression can have, as far as its source shows them."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return ["".join(map(_part, values))]
        case ast.IfExp(body=body, orelse=other):
            return [*_texts(body, variables), *_texts(other, variables)][:_TEXTS_MAX]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = [_texts(each, variables) or [f"{{{_placeholder(each)}}}"] for each in (left, right)]
            is_text = any(_texts(each, variables) for each in (left, right))
            return ["".join(each) for each in product(*sides)][:_TEXTS_MAX] if is_text else []
        case ast.BoolOp(values=values):
            return [text for each in values for text in _texts(each, variables)][:_TEXTS_MAX]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [text for each in items for text in _texts(each, variables)][:_TEXTS_MAX]
        case ast.ListComp(elt=item) | ast.GeneratorExp(elt=item):
            return _texts(item, variables)
        case ast.Name(id=name) if name in variables:
            others = {each: value for each, value in variables.items() if each != name}
            return [text for each in variables[name] for text in _texts(each, others)][:_TEXTS_MAX]
    return []


def _part(node: ast.expr) -> str:
    """A literal part of an f-string, or `{name}`."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=value):
            return f"{{{_placeholder(value)}}}"
    return ""


def _placeholder(node: ast.expr) -> str:
    """A short name for a value inside a message."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
            return key
        case ast.Subscript(value=value) | ast.Await(value=value):
            return _placeholder(value)
        case ast.Call(func=ast.Name(id="len"), args=[value]):
            return f"len({_placeholder(value)})"
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="join"), args=[value]):
            return _placeholder(value)
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[]):
            return name
        case ast.Call(func=function, args=[value, *_]):
            return f"{_last_name(function)}({_placeholder(value)})"
        case ast.BinOp(left=left):
            return _placeholder(left)
        case ast.IfExp():
            return " or ".join(repr(text) for text in _texts(node, {})) or "…"
        case ast.BoolOp(values=[first, *_]):
            return _placeholder(first)
        case ast.GeneratorExp(elt=item) | ast.ListComp(elt=item):
            return _placeholder(item)
    return "…"


def _one_line(text: str) -> str:
    return " ⏎ ".join(" ".join(part.split()) for part in text.split("\n\n") if part.strip())


if __name__ == "__main__":
    print(page(), end="")
