"""Find out how a template uses the contents of messages: whether it only writes them, and what it looks for in them.

A template that writes contents, perhaps without their outer white space, and asks of them only whether they are empty
or have a certain text in them, puts every conversation of one shape into the same frame. Such a frame is found once.
Anything else that a template does with a content (its length, its first character, a macro, a comparison of two) is
not understood here, and such a template is rendered anew for every conversation.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from jinja2 import nodes

from forebay.chat.conversations import THINKING_FIELDS

_CONTENTS = ("content", *THINKING_FIELDS)
_KEPT_BY_FILTER = ("default", "d", "safe", "string", "trim")  # what is written of a text is the text, or stripped
_STRIPS = ("strip", "lstrip", "rstrip")
_LOOKS_FOR = ("startswith", "endswith", "replace", "removeprefix", "removesuffix")
_SPLITS = ("split", "rsplit", "partition", "rpartition")
_TESTS = (
    "boolean",
    "defined",
    "false",
    "iterable",
    "mapping",
    "none",
    "number",
    "sequence",
    "string",
    "true",
    "undefined",
)
_NEIGHBORS = ("previtem", "nextitem")  # of a loop
_OF_LIST = {"first": 1, "last": 1, "list": 1, "reverse": 1, "length": 0, "count": 0}
_SELECTS = ("selectattr", "rejectattr")
_ENDS = (0, -1)


class _Value(IntEnum):
    """What an expression may be."""

    PLAIN = 0  # no content
    HOLDER = 1  # a message, or several
    TEXT = 2  # a content
    PARTS = 3  # a content that was split


class _NotUnderstood(Exception):
    pass


class ContentUses(NamedTuple):
    """What a template does with contents beside writing them."""

    looked_for: tuple[str, ...]  # texts
    strips: bool  # whether outer white space may decide what is written
    escapes: bool  # whether some are written as JSON


def uses_of_contents(parsed: nodes.Template) -> ContentUses | None:
    """Return what a template does with contents; None if it does more than look for texts, strip and write them."""
    uses = _Uses()
    try:
        before = -1
        while before != uses.known:  # until names that are set in loops are known
            before = uses.known
            for child in parsed.body:
                uses.statement(child)
    except _NotUnderstood:
        return None
    return ContentUses(tuple(sorted(uses.texts - {""})), uses.strips, uses.escapes)


class _Uses:
    """Walks through a template; raises `_NotUnderstood`."""

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.strips = self.escapes = False
        self._names = {"messages": _Value.HOLDER} | dict.fromkeys(
            (f"loop.{name}" for name in _NEIGHBORS), _Value.HOLDER
        )
        self._in_macro = False

    @property
    def known(self) -> int:
        return sum(self._names.values())

    def statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Output():
                allowed = (_Value.PLAIN,) if self._in_macro else (_Value.PLAIN, _Value.TEXT)
                if any(self.value(each) not in allowed for each in map(self._written, node.nodes)):
                    raise _NotUnderstood
            case nodes.Assign():
                self._set(node.target, self.value(node.node))
            case nodes.AssignBlock(filter=None):
                self._set(node.target, _Value.TEXT)
                self._statements(node.body)
            case nodes.If():
                self._plain_or_tested(node.test)
                self._statements([*node.body, *node.elif_, *node.else_])
            case nodes.For(recursive=False):
                self._set(node.target, self._item(node.iter))
                if node.test is not None:
                    self._plain_or_tested(node.test)
                self._statements([*node.body, *node.else_])
            case nodes.CallBlock() if not node.args and "generation" in repr(node.call):
                self._statements(node.body)
            case nodes.Macro():  # its arguments are checked where it is called
                self._in_macro = True
                self._statements(node.body)
                self._in_macro = False
            case nodes.ExprStmt() | nodes.Break() | nodes.Continue():
                pass
            case _:
                raise _NotUnderstood

    def _written(self, node: nodes.Expr) -> nodes.Expr:
        """An expression that is written; of JSON, what it is made of."""
        if not isinstance(node, nodes.Filter) or node.name != "tojson" or node.node is None or node.args or node.kwargs:
            return node
        self.escapes |= self.value(node.node) is _Value.TEXT
        return node.node

    def _statements(self, body: Sequence[nodes.Node]) -> None:
        for each in body:
            self.statement(each)

    def _set(self, target: nodes.Node, value: _Value) -> None:
        if isinstance(target, nodes.NSRef):
            name = f"{target.name}.{target.attr}"
        elif isinstance(target, nodes.Name):
            name = target.name
        elif value is _Value.PLAIN and isinstance(target, nodes.Tuple):
            return
        else:
            raise _NotUnderstood
        self._names[name] = max(value, self._names.get(name, _Value.PLAIN))

    def _item(self, iterated: nodes.Node) -> _Value:
        value = self.value(iterated)
        if value > _Value.HOLDER:
            raise _NotUnderstood
        return value

    def _plain_or_tested(self, expression: nodes.Node) -> None:
        """A condition. Whether a content is empty decides the shape of a conversation."""
        if self.value(expression) is _Value.PARTS:
            raise _NotUnderstood

    def value(self, node: nodes.Node) -> _Value:
        match node:
            case nodes.Const() | nodes.TemplateData():
                return _Value.PLAIN
            case nodes.Name():
                return self._names.get(node.name, _Value.PLAIN)
            case nodes.Getattr():
                own = f"{node.node.name}.{node.attr}" if isinstance(node.node, nodes.Name) else ""
                return self._names[own] if own in self._names else self._member(node.node, nodes.Const(node.attr))
            case nodes.Getitem():
                return self._member(node.node, node.arg)
            case nodes.Filter():
                return self._filtered(node)
            case nodes.Call():
                return self._called(node)
            case nodes.Compare():
                return self._compared(node)
            case nodes.Test():
                self._only(*node.args)
                return self._only(node.node, allowed=_Value.TEXT if node.name in _TESTS else _Value.PLAIN)
            case nodes.Not():
                self._plain_or_tested(node.node)
                return _Value.PLAIN
            case nodes.And() | nodes.Or() | nodes.Add():
                return self._joined(node.left, node.right)
            case nodes.Concat():
                return self._joined(*node.nodes)
            case nodes.CondExpr():
                self._plain_or_tested(node.test)
                return self._joined(node.expr1, *([node.expr2] if node.expr2 is not None else []))
            case nodes.Expr():  # arithmetic, lists, objects, slices: of what is no content
                return self._only(*node.iter_child_nodes())
            case _:
                raise _NotUnderstood

    def _only(self, *expressions: nodes.Node, allowed: _Value = _Value.PLAIN) -> _Value:
        """Expressions that are plain, or at most of a certain kind."""
        for each in expressions:
            inner = each.iter_child_nodes() if isinstance(each, nodes.Pair | nodes.Keyword) else [each]
            if any(self.value(one) > allowed for one in inner):
                raise _NotUnderstood
        return _Value.PLAIN

    def _joined(self, *expressions: nodes.Node) -> _Value:
        found = max(map(self.value, expressions))
        if found is _Value.PARTS:
            raise _NotUnderstood
        return found

    def _member(self, owner: nodes.Node, key: nodes.Node) -> _Value:
        self._only(key)
        value = self.value(owner)
        if value is _Value.PLAIN:
            return value
        if value is _Value.PARTS and _constant(key) in _ENDS:
            return _Value.TEXT
        if value is not _Value.HOLDER:
            raise _NotUnderstood
        name = _constant(key)
        if isinstance(name, str):
            return _Value.TEXT if name in _CONTENTS else _Value.PLAIN
        return _Value.HOLDER  # messages[0], messages[1:]

    def _filtered(self, node: nodes.Filter) -> _Value:
        if node.node is None:
            raise _NotUnderstood
        value = self.value(node.node)
        if value is _Value.PLAIN:
            return self._only(*node.args, *node.kwargs)
        if value is _Value.TEXT and node.name in _KEPT_BY_FILTER and not (node.name == "trim" and node.args):
            self._only(*node.args, *node.kwargs)
            self.strips |= node.name == "trim"
            return value
        if value is _Value.TEXT and node.name == "replace":
            return self._text_for(node.args, value)
        if value is _Value.HOLDER and node.name in _SELECTS:
            self._only(*node.args[1:])
            name = _constant(node.args[0]) if node.args else None
            if isinstance(name, str) and name not in _CONTENTS:
                return value
        if node.name in _OF_LIST and not node.args and value in (_Value.HOLDER, _Value.PARTS):
            kept = _Value.TEXT if value is _Value.PARTS and node.name in ("first", "last") else value
            return kept if _OF_LIST[node.name] else _Value.PLAIN
        raise _NotUnderstood

    def _called(self, node: nodes.Call) -> _Value:
        method = node.node
        value = self.value(method.node) if isinstance(method, nodes.Getattr) else _Value.PLAIN
        if value is _Value.PLAIN:
            if isinstance(method, nodes.Name) and method.name == "raise_exception":
                return _Value.PLAIN  # nothing is written then
            return self._only(*node.args, *node.kwargs)
        assert isinstance(method, nodes.Getattr)
        if value is _Value.HOLDER and method.attr == "get" and node.args:
            self._only(*node.args[1:])
            return self._member(method.node, node.args[0])
        if value is not _Value.TEXT or node.kwargs:
            raise _NotUnderstood
        if method.attr in _STRIPS:
            if all(isinstance(_constant(each), str) and str(_constant(each)).isspace() for each in node.args):
                self.strips = True
                return value
        elif method.attr in _LOOKS_FOR:
            return self._text_for(node.args, value if method.attr[0] == "r" else _Value.PLAIN)
        elif method.attr in _SPLITS:
            return self._text_for(node.args[:1], _Value.PARTS)
        raise _NotUnderstood

    def _text_for(self, arguments: Sequence[nodes.Node], value: _Value) -> _Value:
        """Of a content without the text that is looked for, the result is `value`."""
        wanted = _constant(arguments[0]) if arguments else None
        if not isinstance(wanted, str) or not wanted:
            raise _NotUnderstood
        self._only(*arguments)
        self.texts.add(wanted)
        return value

    def _compared(self, node: nodes.Compare) -> _Value:
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        values = list(map(self.value, sides))
        if max(values) is _Value.PLAIN:
            return _Value.PLAIN
        if len(sides) > 2:
            raise _NotUnderstood
        is_within = node.ops[0].op in ("in", "notin")
        if is_within and values == [_Value.PLAIN, _Value.HOLDER]:
            return _Value.PLAIN  # whether a message has a field
        text_first = values[0] is _Value.TEXT
        other = sides[1] if text_first else sides[0]
        wanted = _constants(other)
        is_list = isinstance(other, nodes.List | nodes.Tuple)
        known = is_list == text_first if is_within else node.ops[0].op in ("eq", "ne") and not is_list
        if _Value.TEXT not in values or not known or not wanted:
            raise _NotUnderstood
        self.texts.update(wanted)
        return _Value.PLAIN


def _constant(node: nodes.Node) -> object:
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const):
        return -node.node.value
    return node.value if isinstance(node, nodes.Const) else None


def _constants(node: nodes.Node) -> list[str]:
    """The texts of a constant, or of a list of them; none if it is anything else."""
    items = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    found = [_constant(each) for each in items]
    return [text for text in found if isinstance(text, str)] if all(isinstance(text, str) for text in found) else []
