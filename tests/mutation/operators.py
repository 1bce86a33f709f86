"""The bugs that can be planted in a source text, each as a replacement of some of its bytes.

Left alone, because no test could reasonably fail for it: imports, annotations, docstrings,
decorators, class headers, `__all__` and `__slots__`, blocks under `TYPE_CHECKING` or
`__name__ == "__main__"`, abstract methods, names given to `NewType`, `TypeVar` and `cast`, and what
is said to `logger`, because those lines are for the developers of mlxsup. Nor is
`assert x is not None` or `assert isinstance(x, y)` deleted, which tells a type checker what holds
anyway.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

COMPARISONS = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"), ast.BitXor: ("^", "&"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}  # fmt: skip
OPENING_QUOTE = re.compile(rb"[a-zA-Z]*(?:\"\"\"|'''|\"|')")
NAMING_CALLS = {"NewType", "TypeVar", "cast"}
DELETABLE = (ast.Assign, ast.AugAssign, ast.Raise, ast.Delete, ast.Assert)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One bug in one file.

    Attributes:
        path: of the file, from the root of the tree.
        operator: the kind of bug, as the document names it.
        start, end: the bytes that are replaced.
        replacement: what stands there instead.
        line: the number of the first changed line, from 1.
        statement_lines: first and last line of the statement around it.
        is_at_import: whether the line runs when its module is imported.
    """

    path: str
    operator: str
    start: int
    end: int
    replacement: str
    line: int
    statement_lines: tuple[int, int]
    is_at_import: bool

    def apply(self, source: bytes) -> bytes:
        """The text with the bug."""
        return source[: self.start] + self.replacement.encode() + source[self.end :]


def mutations_of(path: str, source: bytes) -> list[Mutation]:
    """All bugs that can be planted in a file, in the order of their places."""
    walk = _Walk(path, source)
    walk.visit(ast.parse(source))
    return sorted(walk.found, key=lambda m: (m.start, m.end, m.replacement))


Placed = ast.stmt | ast.expr | ast.arg
"""Nodes that have a place in the text."""


class _Walk(ast.NodeVisitor):
    """Collects the bugs; knows the statement and the function around what it visits."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutation] = []
        self._path = path
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._statement: ast.stmt | None = None
        self._functions = 0

    def visit(self, node: ast.AST) -> None:
        """Skips what is left alone, and remembers statements."""
        if _is_left_alone(node):
            return
        outer = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
            self._delete(node)
        super().visit(node)
        self._statement = outer

    def _delete(self, node: ast.stmt) -> None:
        is_call = isinstance(node, ast.Expr) and isinstance(
            node.value, ast.Call | ast.Await | ast.Yield | ast.YieldFrom
        )
        is_value = isinstance(node, ast.AnnAssign) and node.value is not None
        is_return = isinstance(node, ast.Return) and node.value is None
        if _only_narrows(node):
            return
        if self._functions and (is_call or is_value or is_return or isinstance(node, DELETABLE)):
            self._add("deleted statement", node, "pass")

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Defaults run at import, the body does not; decorators and annotations are left alone."""
        self._drop_defaults(node.args)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._functions += 1
        for statement in node.body:
            self.visit(statement)
        self._functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def _drop_defaults(self, arguments: ast.arguments) -> None:
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs: list[tuple[ast.arg, ast.expr]] = []
        if arguments.defaults:  # without the first default, the order stays lawful
            pairs.append((positional[-len(arguments.defaults)], arguments.defaults[0]))
        pairs += [
            (argument, default)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        ]
        for argument, default in pairs:
            start, end = self._span(argument)[1], self._span(default)[1]
            self._add("dropped default", argument, "", (start, end))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """The header is left alone."""
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The annotation is left alone."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Another comparison."""
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            pattern, other = COMPARISONS[type(operator)]
            is_word = pattern[0].isalpha()
            self._between(left, right, pattern if is_word else re.escape(pattern), other, "compare")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another operator."""
        if type(node.op) in ARITHMETIC:
            right, wrong = ARITHMETIC[type(node.op)]
            self._between(node.left, node.right, re.escape(right), wrong, "arithmetic")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Another operator."""
        if type(node.op) in ARITHMETIC:
            right, wrong = ARITHMETIC[type(node.op)]
            self._between(
                node.target, node.value, re.escape(right + "="), wrong + "=", "arithmetic"
            )
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` for `or`, and the reverse, at each place."""
        right, wrong = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for first, second in zip(node.values, node.values[1:], strict=False):
            self._between(first, second, right, wrong, "boolean")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without `not`."""
        if isinstance(node.op, ast.Not):
            start = self._span(node)[0]
            self._add("removed not", node, "", (start, start + len("not")))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """The other branch."""
        self._negate(node.test, "swapped branches" if node.orelse else "negated condition")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """The other branch."""
        self._negate(node.test, "swapped branches")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        """The loop runs when it should not."""
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test, "negated condition")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """The others are taken."""
        for condition in node.ifs:
            self._negate(condition, "negated condition")
        self.generic_visit(node)

    def _negate(self, test: ast.expr, operator: str) -> None:
        match test:
            case ast.UnaryOp(op=ast.Not()):
                return  # the removed `not` is the same bug
            case ast.Compare(
                ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]
            ):
                return  # the other comparison is
        start, end = self._span(test)
        text = self._source[start:end].decode()
        self._add(operator, test, f"(not ({text}))")

    def visit_Return(self, node: ast.Return) -> None:
        """None instead of the value, unless that is false to whoever asks too."""
        is_falsy = ast.unparse(node.value or ast.Constant(None)) in ("None", "False")
        if node.value is not None and not is_falsy:
            self._add("return None", node, "return None")
            self.visit(node.value)

    def visit_Break(self, node: ast.Break) -> None:
        """The loop continues."""
        self._add("break and continue", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        """The loop ends."""
        self._add("break and continue", node, "break")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Another text; what is inside has no exact place before Python 3.12."""
        self._retell(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Another value."""
        value = node.value
        if isinstance(value, bool):
            self._add("constant", node, str(not value))
        elif isinstance(value, int):
            self._add("constant", node, str(value + 1))
        elif isinstance(value, float):
            self._add("constant", node, repr(value * 2 or 1.0))
        elif isinstance(value, str | bytes):
            self._retell(node)

    def _retell(self, node: ast.expr) -> None:
        start, end = self._span(node)
        if opening := OPENING_QUOTE.match(self._source[start:end]):
            quote_end = start + opening.end()
            self._add("constant", node, "XX", (quote_end, quote_end))

    def _between(
        self, left: Placed, right: Placed, pattern: str, other: str, operator: str
    ) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        if place := re.search(rb"(?<!\w)" + pattern.encode(), self._source[start:end]):
            self._add(operator, left, other, (start + place.start(), start + place.end()))

    def _span(self, node: Placed) -> tuple[int, int]:
        """First and last byte of a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        starts = self._line_starts
        first, last = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def _add(
        self, operator: str, node: Placed, replacement: str, span: tuple[int, int] | None = None
    ) -> None:
        start, end = span or self._span(node)
        statement = self._statement
        assert statement is not None
        assert statement.end_lineno is not None
        first, last = statement.lineno, statement.end_lineno
        if isinstance(statement, ast.Match):
            first = last = 1 + self._source[:start].count(b"\n")
        elif isinstance(body := getattr(statement, "body", None), list):  # only its header
            last = max(first, body[0].lineno - 1)
        self.found.append(
            Mutation(
                path=self._path,
                operator=operator,
                start=start,
                end=end,
                replacement=replacement,
                line=1 + self._source[:start].count(b"\n"),
                statement_lines=(first, last),
                is_at_import=self._functions == 0,
            )
        )


def _only_narrows(node: ast.stmt) -> bool:
    """Whether it tells the type checker what holds anyway, so that nothing changes without it."""
    match node:
        case ast.Assert(test=ast.Compare(ops=[ast.IsNot()])):
            return True
        case ast.Assert(test=ast.Call(func=ast.Name(id="isinstance"))):
            return True
    return False


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):  # docstrings, and `...`
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return any("abstractmethod" in ast.unparse(one) for one in node.decorator_list)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in NAMING_CALLS
    return False
