"""The sandbox in which chat templates run: it counts a template's work and stops one that takes too much.

Templates come with models, so nobody has read them. The sandbox counts the items of loops, calls, and the characters
that are made or searched. What could grow without bound is weighed before it is done.
"""

import json
import operator
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce, wraps
from types import GeneratorType
from typing import Any, NoReturn, TypeVar

from jinja2 import TemplateError, TemplateRuntimeError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_T = TypeVar("_T")
MAX_SOURCE = 128 << 10
"""The most characters of a template; the largest that models ship have about 40,000."""
MAX_NODES = 20_000
"""The most parts of a parsed template, which bounds the time that its compilation takes."""
DEFAULT_WORK = 200_000
"""Units of work for rendering outside of `limited_work`: some tenths of a second."""
_UNIT = 64
"""Characters that cost as much as one step of a loop."""
_ITEM = 64
"""The cost of an item of a container, in characters."""
_TEXT_UNIT = 1024
"""Characters of a loop's constant text that cost as much as one step."""
_MAX_BITS = 1 << 15
"""The most bits of a computed integer."""
_MAX_INDENT = 32
"""The most characters of an indentation or a separator in JSON."""
_REMOVED_FILTERS = ("random", "urlize", "wordwrap", "pprint")
"""Filters that draw at random, or whose time nothing bounds. They are for web pages."""
_COMPARISONS = (
    *("eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<="),
    *("gt", ">", "greaterthan", "ge", ">=", "in"),
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHALLOW = _words("default d length count first last list items map select selectattr reject rejectattr attr safe")
"""Filters that look at the items of a container, but not into them."""
_LOOKUPS = _words("get keys values items copy")
"""Methods that do so."""
_LINEAR = _words(
    "trim strip lstrip rstrip split rsplit partition rpartition startswith endswith find rfind index rindex count "
    "removeprefix removesuffix sort dictsort unique groupby min max sum truncate int float"
)
"""Filters and methods whose time and result grow with the sum of their arguments' sizes, not with the product."""
_ITEMISED = _words("list sort unique groupby min max sum join reverse batch slice map select reject")
"""Filters that take a string apart into characters."""
_PAYING = (str, bytes, int, float, list, tuple, dict, LoopContext)
"""Types whose methods are weighed."""
_FORMATS = ("format", "format_map")
_DIGITS = re.compile(r"\d{1,12}")
_VARIABLE_WIDTH = re.compile(r"\*|\{[^{}]*\{")
"""Finds a placeholder whose width is one of the values."""


class TemplateWorkError(Exception):
    """A template takes more work than is allowed in this place."""

    def __init__(self) -> None:
        super().__init__("it takes too much work: it repeats or copies too much")


class _Meter:
    """The work that rendering may still take."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


_meter: ContextVar[_Meter | None] = ContextVar("samewise_template_work", default=None)


@contextmanager
def limited_work(units: int) -> Iterator[None]:
    """Context in which all rendering together may take so many units of work."""
    token = _meter.set(_Meter(units))
    try:
        yield
    finally:
        _meter.reset(token)


def within(units: int, work: Callable[..., _T], *args: Any) -> _T:
    """Return or raise what `work(*args)` does, with so many units of work for all of its rendering."""
    with limited_work(units):
        return work(*args)


@contextmanager
def metered() -> Iterator[None]:
    """Context in which work is limited in any case: by `limited_work` around it, otherwise to the default."""
    if _meter.get() is not None:
        yield
        return
    with limited_work(DEFAULT_WORK):
        yield


def compile_source(environment: "TemplateSandbox", source: str) -> Any:
    """The template of a source. Raises TemplateSyntaxError, with the reason, for anything that cannot be compiled."""
    if len(source) > MAX_SOURCE:
        raise TemplateSyntaxError(f"it has {len(source)} characters, and at most {MAX_SOURCE} are supported", 1)
    try:
        with metered():
            return environment.from_string(source)
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise TemplateSyntaxError("it is nested too deeply", 1) from error
    except (ValueError, OverflowError, TemplateWorkError) as error:
        raise TemplateSyntaxError(str(error), 1) from error


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A sandbox with what templates expect: Hugging Face's filters, functions and tags.

    Rendering raises TemplateWorkError if it takes more work than is allowed; use it within `metered`.
    """

    intercepted_binops = frozenset({"-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_weighed
        )
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {name: _metered_filter(name, one) for name, one in self.filters.items()}
        self.filters["tojson"] = _to_json
        tests: dict[str, Any] = self.tests
        tests.update({name: _metered_test(tests[name]) for name in _COMPARISONS})
        self.globals.update(raise_exception=_raise_exception, namespace=_Namespace)
        self.step, self.weighed, self.weighed_items = _spend, _weighed, _weighed_items
        self.joined, self.added = _joined, _added
        self._own = frozenset((_spend, _weighed, _weighed_items, _joined, _added))

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        """Python code of a parsed template, with the steps that count its work; a hook of jinja2."""
        if sum(1 for _ in source.find_all(nodes.Node)) > MAX_NODES:
            raise TemplateSyntaxError(f"it has more than {MAX_NODES} parts", 1)
        metering = _Metering().visit(source)
        metering.set_environment(self)
        return super()._generate(metering, *args, **options)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja2's names
        if isinstance(__obj, type(_spend)) and __obj in __self._own:
            return __obj(*args)
        _spend(1)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(owner, _PAYING) and __obj.__name__ not in _LOOKUPS:
            _pay(__obj.__name__, (owner, *args), kwargs)
        return _weighed_items(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):  # its hash takes as long as it is large
            _weighed(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(operator, left, right)
        elif operator == "*":
            size = _product(_length(left), _length(right))
        elif operator == "%" and isinstance(left, str | bytes):
            _pay("format", (left, right), {})
        _spend(1 + size // _UNIT)
        return super().call_binop(context, operator, left, right)


class _Metering(NodeTransformer):
    """Adds steps that count work to a parsed template."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)  # changes it in place
        change = _CHANGES.get(type(node))
        return node if change is None else change(node)


def _repeated(node: Any) -> Any:
    """A loop, macro or block with a step at the beginning of its body."""
    num_characters = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
    step = _call("step", [nodes.Const(1 + num_characters // _TEXT_UNIT)], node)
    node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
    if isinstance(node, nodes.For) and node.test is not None:  # items that it excludes are steps as well
        node.test = nodes.And(_call("weighed", [nodes.Const("step")], node), node.test, lineno=node.lineno)
    return node


def _compared(node: nodes.Compare) -> nodes.Node:
    """A comparison whose operands are weighed, unless one is a constant, which is compared in no time."""
    operands = [node.expr, *(one.expr for one in node.ops)]
    searches = any(one.op in ("in", "notin") for one in node.ops)
    if searches or not any(isinstance(operand, nodes.Const) for operand in operands):
        node.expr = _weighed_node(node.expr)
        for one in node.ops:
            one.expr = _weighed_node(one.expr)
    return node


def _summed(node: nodes.Add) -> nodes.Node:
    """A chain of additions as one, because templates mostly join texts so."""
    left = [node.left]
    if isinstance(node.left, nodes.Call) and node.left.node == nodes.EnvironmentAttribute("added"):
        left = node.left.args
    return _call("added", [*left, node.right], node)


def _keyed(node: nodes.Pair) -> nodes.Node:
    node.key = _weighed_node(node.key)
    return node


_CHANGES: Mapping[type[nodes.Node], Callable[[Any], nodes.Node]] = {
    **dict.fromkeys((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block), _repeated),
    nodes.Concat: lambda node: _call("joined", node.nodes, node),
    nodes.Add: _summed,
    nodes.Compare: _compared,
    nodes.Pair: _keyed,
    nodes.Tuple: lambda node: _weighed_node(node) if node.ctx == "load" else node,
    nodes.Getitem: lambda node: _call("weighed_items", [node], node) if isinstance(node.arg, nodes.Slice) else node,
}
"""Changes to parts of a template whose work is counted."""


class _GenerationTag(Extension):
    """Handles `{% generation %}`, which marks the assistant's text for training: renders its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace, whose text does not show its values: they may be of any size."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _call(name: str, arguments: list[nodes.Expr], place: nodes.Node) -> nodes.Call:
    """A call of one of the sandbox's own functions, in the line of `place`."""
    function = nodes.EnvironmentAttribute(name, lineno=place.lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=place.lineno)


def _weighed_node(node: nodes.Expr) -> nodes.Expr:
    """The expression, whose value is weighed before it is used; constants are as they are."""
    is_constant = isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple) and all(isinstance(item, nodes.Const) for item in node.items)
    )
    return node if is_constant else _call("weighed", [node], node)


def _spend(units: int) -> None:
    """Count work. Raises TemplateWorkError if it is more than is left."""
    meter = _meter.get()
    assert meter is not None, "templates run within metered()"
    meter.left -= units
    if meter.left < 0:
        raise TemplateWorkError


def _weighed(value: Any) -> Any:
    """The value, after its size is counted as work."""
    _spend(1 + (len(value) if isinstance(value, str) else _size(value)) // _UNIT)
    return value


def _weighed_items(value: Any) -> Any:
    """The same without looking into the items of a container."""
    _spend(1 + _length(value) // _UNIT)
    return value


def _joined(*parts: Any) -> str:
    """The parts as one text, for the operator `~`."""
    _spend(1 + sum(map(_size, parts)) // _UNIT)
    return "".join(map(str, parts))


def _added(*parts: Any) -> Any:
    """The sum of the parts, from the left, for the operator `+`."""
    sizes = (part.bit_length() if isinstance(part, int) else _length(part) for part in parts)
    units = 1 + sum(sizes) // _UNIT
    if all(type(part) is str for part in parts):
        _spend(units)
        return "".join(parts)
    _spend(len(parts) * units)  # each step may copy what the steps before have made
    return reduce(operator.add, parts)


def _size(value: Any, indent: int = 0) -> int:
    """The characters of a value as text, about; `indent` are added for each level of each item.

    Raises TemplateWorkError once they are more than may be spent: a container may contain the same one many times.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, range):
        return _ITEM * len(value)
    meter = _meter.get()
    most = _UNIT * (meter.left + 1) if meter is not None else 0
    size, waiting = _ITEM, [(value, 0)]
    while waiting:
        container, depth = waiting.pop()
        for item in _items(container):
            size += _ITEM + depth * indent
            if isinstance(item, str | bytes):
                size += len(item)
            elif isinstance(item, int):
                size += item.bit_length() // 3
            else:
                waiting.append((item, depth + 1))
            if size > most:
                raise TemplateWorkError
    return size


def _items(value: Any) -> Iterable[Any]:
    """The items of a container, keys and values of a mapping."""
    if isinstance(value, Mapping):
        return (item for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
        return value
    return ()


def _length(value: Any) -> int:
    """The characters of a value, not counting its items; of an integer, the number itself."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return abs(value)
    return _ITEM * len(value) if isinstance(value, list | tuple | dict) else 1


def _product(*numbers: int) -> int:
    """The product; a number of 0 counts as 1."""
    product = 1
    for number in numbers:
        product *= max(1, number)
    return product


def _check_bits(operator: str, left: int, right: int) -> None:
    """Raise TemplateRuntimeError if the result would be an integer of too many digits."""
    bits = left.bit_length()
    if operator == "**":
        bits *= max(0, right)
    elif operator == "*":
        bits += right.bit_length()
    if bits > _MAX_BITS and abs(left) > 1:
        raise TemplateRuntimeError(f"an integer of more than {_MAX_BITS} bits")


def _pay(name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Count the work of a filter or a method, before it is done, from its name and all of its arguments."""
    first, *others = [*arguments, *options.values()]
    sizes = [abs(one) if isinstance(one, int) else _size(one) for one in others]
    if name in _FORMATS:
        sizes = [_width(str(first), others)]
    if name == "replace" and len(others) > 1 and isinstance(first, str) and isinstance(others[0], str):
        size = len(first) + first.count(others[0]) * sizes[1]
    elif name in _LINEAR:
        size = _size(first) + sum(sizes)
    else:
        size = _product(_size(first), *(1 + one for one in sizes))
    _spend(size // _UNIT)


def _width(text: str, values: Sequence[Any]) -> int:
    """The most characters of a placeholder in a text to format: of its width, or of its value."""
    values = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    widths = map(int, _DIGITS.findall(text))
    if _VARIABLE_WIDTH.search(text):
        return sum(widths) + sum(map(_length, values))
    return sum(widths) + sum(_size([value]) for value in values)


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which counts its work."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        given = arguments[skipped:]
        _spend(1)
        if name in _ITEMISED and isinstance(given[0], str):
            _spend(len(given[0]) // 4)
        if name not in _SHALLOW:
            _pay(name, given, options)
        result = function(*arguments, **options)
        return _stepped(result) if isinstance(result, GeneratorType) else _weighed_items(result)

    return run


def _metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """The comparison, which weighs its operands."""

    def run(*operands: Any) -> Any:
        return function(*map(_weighed, operands))

    return run


def _stepped(items: Iterable[Any]) -> Iterator[Any]:
    """The items, each of which is a step."""
    for item in items:
        _spend(1)
        yield item


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Plain JSON. Jinja's own filter would escape HTML."""
    for size in (_length(indent or 0), *map(_length, separators or ())):
        if size > _MAX_INDENT:
            raise TemplateRuntimeError(f"tojson: an indentation or separator of more than {_MAX_INDENT} characters")
    _spend(1 + _size(value, _length(indent or 0)) // _UNIT)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
