"""Find out how a template uses the contents of messages: whether it only writes them, and what it looks for in them.

A template that writes contents, perhaps without their outer white space, and asks of them only whether they are empty
or have a certain text in them, puts every conversation of one shape into the same frame. Such a frame is found once.
Anything else that a template does with a content (its length, its first character, a macro, a comparison of two) is
not understood here, and such a template is rendered anew for every conversation.

This is a proof from the code of the template, not a sample of its output. Every expression has one of the values below,
a name has that of all that is ever assigned to it, and what is not listed is not understood.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from jinja2 import nodes

_UNCHANGED_BY_FILTER = ("default", "d", "safe", "string", "trim")  # what is written of a text is the text, or stripped
_STRIPS = ("strip", "lstrip", "rstrip")
_LOOKS_FOR = ("startswith", "endswith", "replace", "removeprefix", "removesuffix")
_SPLITS = ("split", "rsplit", "partition", "rpartition")
_TYPE_TESTS = (
    "boolean", "defined", "false", "iterable", "mapping", "none", "number", "sequence", "string", "true", "undefined",
)  # fmt: skip
_NEIGHBORS = ("previtem", "nextitem")  # of a loop
_SELECTS = ("selectattr", "rejectattr")
_ENDS = (0, -1)


class _Value(Enum):
    """The possible values of an expression."""

    PLAIN = auto()  # no content
    MESSAGES = auto()
    MESSAGE = auto()
    TEXT = auto()  # a content, or a part of one
    JOINED = auto()  # a content with other texts: what is looked for in it may lie across a border
    PARTS = auto()  # a content that was split
    SEVERAL = auto()  # sometimes one of these, sometimes another


_PLAIN, _MESSAGES, _MESSAGE, _TEXT, _JOINED, _PARTS, _SEVERAL = _Value
_OF_LIST = {
    (_MESSAGES, "first"): _MESSAGE, (_MESSAGES, "last"): _MESSAGE, (_MESSAGES, "list"): _MESSAGES,
    (_MESSAGES, "reverse"): _MESSAGES, (_MESSAGES, "length"): _PLAIN, (_MESSAGES, "count"): _PLAIN,
    (_PARTS, "first"): _TEXT, (_PARTS, "last"): _TEXT, (_PARTS, "length"): _PLAIN, (_PARTS, "count"): _PLAIN,
}  # fmt: skip


class _NotUnderstood(Exception):
    pass


def uses_of_contents(parsed: nodes.Template, contents: Sequence[str]) -> dict[str, Any] | None:
    """Return how a template uses content fields, as `ContentUses`.

    None if it does more than look for texts, strip and write them.
    """
    uses = _Uses(contents)
    try:
        before: dict[str, _Value] = {}
        while before != uses.names:  # until names that are set in loops are known
            before = dict(uses.names)
            uses.statements(parsed.body)
    except _NotUnderstood:
        return None
    return {"looked_for": sorted(uses.texts - {""}), "strips": uses.strips, "escapes": uses.escapes}


class _Uses:
    """Walks through a template; raises `_NotUnderstood`."""

    def __init__(self, contents: Sequence[str]) -> None:
        self._contents = contents
        self.texts: set[str] = set()
        self.strips = self.escapes = False
        self.names = {"messages": _MESSAGES} | dict.fromkeys((f"loop.{name}" for name in _NEIGHBORS), _MESSAGE)
        self._spaces = {"loop"}  # names with attributes that are contents or messages
        self._in_macro = False

    def statements(self, body: Sequence[nodes.Node]) -> None:
        for each in body:
            self._statement(each)

    def _statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Output():
                allowed = (_PLAIN,) if self._in_macro else (_PLAIN, _TEXT, _JOINED)
                if any(self._value(each) not in allowed for each in map(self._written, node.nodes)):
                    raise _NotUnderstood
            case nodes.Assign():
                self._set(node.target, self._value(node.node))
            case nodes.AssignBlock(filter=None):
                self._set(node.target, _JOINED)
                self.statements(node.body)
            case nodes.If():
                self._value(node.test)  # whether a content is empty decides the shape of a conversation
                self.statements([*node.body, *node.elif_, *node.else_])
            case nodes.For(recursive=False):
                items = self._value(node.iter)
                if items not in (_PLAIN, _MESSAGES):
                    raise _NotUnderstood
                self._set(node.target, _MESSAGE if items is _MESSAGES else _PLAIN)
                if node.test is not None:
                    self._value(node.test)
                self.statements([*node.body, *node.else_])
            case nodes.Scope():  # a `generation` block
                self.statements(node.body)
            case nodes.Macro():  # its arguments are checked where it is called
                self._only(*node.defaults)
                outside, self._in_macro = self._in_macro, True
                self.statements(node.body)
                self._in_macro = outside
            case nodes.Break() | nodes.Continue():
                pass
            case _:
                raise _NotUnderstood

    def _written(self, node: nodes.Expr) -> nodes.Expr:
        """An expression that is written; of JSON, what it is made of."""
        if not isinstance(node, nodes.Filter) or node.name != "tojson" or node.node is None or _arguments(node):
            return node
        self.escapes |= self._value(node.node) in (_TEXT, _JOINED)
        return node.node

    def _set(self, target: nodes.Node, value: _Value) -> None:
        if isinstance(target, nodes.NSRef):
            name = f"{target.name}.{target.attr}"
            if value is not _PLAIN:
                self._spaces.add(target.name)
        elif isinstance(target, nodes.Name):
            name = target.name
        elif value is _PLAIN and isinstance(target, nodes.Tuple):
            return
        else:
            raise _NotUnderstood
        if value is not _PLAIN:
            self.names[name] = _either(value, self.names.get(name, _PLAIN))

    def _value(self, node: nodes.Node) -> _Value:
        match node:
            case nodes.Const() | nodes.TemplateData():
                return _PLAIN
            case nodes.Name():  # a namespace under another name, or with a subscript, is not followed
                return _SEVERAL if node.name in self._spaces else self.names.get(node.name, _PLAIN)
            case nodes.Getattr(node=nodes.Name(name=space)) if space in self._spaces and space not in self.names:
                return self.names.get(f"{space}.{node.attr}", _PLAIN)
            case nodes.Getattr():
                return self._member(node.node, nodes.Const(node.attr))
            case nodes.Getitem():
                return self._member(node.node, node.arg)
            case nodes.Filter():
                return self._filtered(node)
            case nodes.Call():
                return self._called(node)
            case nodes.Compare():
                return self._compared(node)
            case nodes.Test():
                self._only(*_arguments(node))
                self._value(node.node) if node.name in _TYPE_TESTS else self._only(node.node)
                return _PLAIN
            case nodes.Not():
                self._value(node.node)
                return _PLAIN
            case nodes.And() | nodes.Or():
                return _either(self._value(node.left), self._value(node.right))
            case nodes.CondExpr():
                self._value(node.test)
                return _either(self._value(node.expr1), self._value(node.expr2) if node.expr2 else _PLAIN)
            case nodes.Add():
                return self._joined(node.left, node.right)
            case nodes.Concat():
                return self._joined(*node.nodes)
            case nodes.Expr():  # arithmetic, lists, objects, slices of values that are not contents
                return self._only(*node.iter_child_nodes())
            case _:
                raise _NotUnderstood

    def _only(self, *expressions: nodes.Node) -> _Value:
        """Expressions that are plain."""
        for each in expressions:
            inner = each.iter_child_nodes() if isinstance(each, nodes.Pair | nodes.Keyword) else [each]
            if any(self._value(one) is not _PLAIN for one in inner):
                raise _NotUnderstood
        return _PLAIN

    def _joined(self, *expressions: nodes.Node) -> _Value:
        values = {self._value(each) for each in expressions}
        if not values <= {_PLAIN, _TEXT, _JOINED}:
            raise _NotUnderstood
        return _PLAIN if values == {_PLAIN} else _JOINED

    def _member(self, owner: nodes.Node, key: nodes.Node) -> _Value:
        self._only(key)
        value, name = self._value(owner), _constant(key)
        if value is _PLAIN:
            return _PLAIN
        if value is _PARTS and name in _ENDS:
            return _TEXT
        if value is _MESSAGES and not isinstance(name, str):
            return _MESSAGES if isinstance(key, nodes.Slice) else _MESSAGE
        if value is _MESSAGE and isinstance(name, str) and not hasattr(dict, name):
            return _TEXT if name in self._contents else _PLAIN
        raise _NotUnderstood

    def _filtered(self, node: nodes.Filter) -> _Value:
        if node.node is None:
            raise _NotUnderstood
        value, arguments = self._value(node.node), _arguments(node)
        if value is _PLAIN:
            return self._only(*arguments)
        if value in (_TEXT, _JOINED) and node.name in _UNCHANGED_BY_FILTER and not (node.name == "trim" and arguments):
            self._only(*arguments)
            self.strips |= node.name == "trim"
            return value
        if value is _TEXT and node.name == "replace":
            return self._text_for(arguments, value)
        if value is _MESSAGES and node.name in _SELECTS and arguments:
            self._only(*arguments)
            name = _constant(arguments[0])
            if isinstance(name, str) and not set(name.split(".")).intersection(self._contents):
                return value
        if (value, node.name) in _OF_LIST and not arguments:
            return _OF_LIST[value, node.name]
        raise _NotUnderstood

    def _called(self, node: nodes.Call) -> _Value:
        method, arguments = node.node, _arguments(node)
        if not isinstance(method, nodes.Getattr):
            if isinstance(method, nodes.Name) and method.name == "raise_exception":
                return _PLAIN  # nothing is written then
            return self._only(method, *arguments)
        value = self._value(method.node)
        if value is _PLAIN:
            return self._only(*arguments)
        if value is _MESSAGE and method.attr == "get" and arguments:
            self._only(*arguments[1:])
            return self._member(method.node, arguments[0])
        if value in (_TEXT, _JOINED) and method.attr in _STRIPS:
            if all(isinstance(_constant(each), str) and str(_constant(each)).isspace() for each in arguments):
                self.strips = True
                return value
        elif value is _TEXT and method.attr in _LOOKS_FOR:
            return self._text_for(arguments, value if method.attr[0] == "r" else _PLAIN)
        elif value is _TEXT and method.attr in _SPLITS:
            return self._text_for(arguments, _PARTS)
        raise _NotUnderstood

    def _text_for(self, arguments: Sequence[nodes.Node], value: _Value) -> _Value:
        """The result is `value` if the content does not contain the searched text."""
        wanted = _constant(arguments[0]) if arguments else None
        if not isinstance(wanted, str) or not wanted:
            raise _NotUnderstood
        self._only(*arguments)
        self.texts.add(wanted)
        return value

    def _compared(self, node: nodes.Compare) -> _Value:
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        values = list(map(self._value, sides))
        if set(values) == {_PLAIN}:
            return _PLAIN
        if len(sides) > 2:
            raise _NotUnderstood
        is_within = node.ops[0].op in ("in", "notin")
        if is_within and values == [_PLAIN, _MESSAGE] and isinstance(_constant(sides[0]), str):
            return _PLAIN  # whether a message has a field
        text_first = values[0] is _TEXT
        other = sides[1] if text_first else sides[0]
        wanted = _constants(other)
        is_list = isinstance(other, nodes.List | nodes.Tuple)
        known = is_list == text_first if is_within else node.ops[0].op in ("eq", "ne") and not is_list
        if _TEXT not in values or not known or not wanted:
            raise _NotUnderstood
        self.texts.update(wanted)
        return _PLAIN


def _either(one: _Value, other: _Value) -> _Value:
    """A value that may be either of two."""
    if other in (one, _PLAIN):
        return one
    if one is _PLAIN:
        return other
    return _JOINED if {one, other} == {_TEXT, _JOINED} else _SEVERAL


def _arguments(node: nodes.Filter | nodes.Test | nodes.Call) -> list[nodes.Node]:
    """All arguments of a call: also those of `*` and `**`."""
    return [*node.args, *node.kwargs, *(each for each in (node.dyn_args, node.dyn_kwargs) if each is not None)]


def _constant(node: nodes.Node) -> object:
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const) and isinstance(node.node.value, int):
        return -node.node.value
    return node.value if isinstance(node, nodes.Const) else None


def _constants(node: nodes.Node) -> list[str]:
    """The texts of a constant, or of a list of them; none if it is anything else."""
    items = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    values = [_constant(each) for each in items]
    return [text for text in values if isinstance(text, str)] if all(isinstance(text, str) for text in values) else []
