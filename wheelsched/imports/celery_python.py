"""A Celery configuration module, read with `ast` and never run: the beat schedule and the time zone it writes down.

What can be read is what can be seen: literals, `crontab(...)`, `schedule(...)`, `timedelta(...)`, sums and products of numbers, and
names that the module sets once to such a value. Anything else is Refused, with its line.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from wheelsched.core.errors import InvalidRequest
from wheelsched.imports.plan import Refused

# As in `app.conf`, in Django's settings, and before Celery 4.
_SCHEDULE_NAMES: Final = {"beat_schedule", "celery_beat_schedule", "celerybeat_schedule"}
_ZONE_NAMES: Final = {"timezone", "celery_timezone"}
_CRONTAB_ORDER: Final = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")
_TIMEDELTA_S: Final = {
    "days": 86_400.0, "seconds": 1.0, "microseconds": 1e-6, "milliseconds": 1e-3, "minutes": 60.0, "hours": 3_600.0, "weeks": 604_800.0,
}  # fmt: skip
_NUMBER_MAX: Final = 1e15
_REMEDY: Final = "write the value itself there, or export the schedule as JSON"


@dataclass(frozen=True, slots=True)
class CrontabCall:
    """`crontab(...)`: the fields that were given, by Celery's names."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IntervalCall:
    """Seconds, `timedelta(...)` or `schedule(...)`."""

    every_s: float
    relative: bool = False


@dataclass(frozen=True, slots=True)
class OtherCall:
    """`solar(...)`, `clocked(...)`: no schedule of ours."""

    name: str


@dataclass
class BeatModule:
    """`entries`: (line, name, members). `faults`: (line, what was refused)."""

    zone: str | None = None
    entries: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    faults: list[tuple[int, Refused]] = field(default_factory=list)


def read_module(text: str) -> BeatModule:
    """What a module's text says of its beat schedule. InvalidRequest if it is no Python, or has no beat schedule at all."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InvalidRequest(
            f"line {error.lineno or 1}: neither JSON nor Python ({error.msg}); give the file with beat_schedule"
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest(f"the file is not readable as Python ({error}); export the schedule as JSON") from error
    found = BeatModule()
    reader = _Reader(_constants(tree))
    seen = False
    for name, value, line in _settings(tree):
        lowered = name.lower()
        try:
            if lowered in _ZONE_NAMES:
                found.zone = reader.text(value)
            elif lowered in _SCHEDULE_NAMES:
                seen = True
                _read_entries(reader, value, found)
            elif lowered == "beat_schedule[]":
                seen = True
                assert isinstance(value, ast.Tuple)
                _read_entry(reader, value.elts[0], value.elts[1], found)
        except Refused as refused:
            found.faults.append((line, refused))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == "add_periodic_task":
            seen = True
            what = "add_periodic_task(...) is made by running code, which an import never does"
            found.faults.append((node.lineno, Refused(what, "write the entry in beat_schedule, or as JSON")))
    if not seen:
        raise InvalidRequest("no beat_schedule is assigned in the file; give the module that sets it, or a JSON export")
    found.faults.sort(key=lambda fault: fault[0])
    return found


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that the module's top level sets once: what they stand for can be looked up."""
    values: dict[str, ast.expr] = {}
    counts: dict[str, int] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                counts[name] = counts.get(name, 0) + 1
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                values[name] = value
    return {name: value for name, value in values.items() if counts.get(name) == 1}


def _settings(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    """(name, value, line) of each setting: `x = …`, `app.conf.x = …`, `app.conf.update(x=…)`, `….beat_schedule["name"] = …`."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _assigned(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _assigned(target, value)
            case ast.Call(func=ast.Attribute(value=owner, attr="update"), args=args, keywords=keywords):
                if (_last_name(owner) or "").lower() in _SCHEDULE_NAMES and len(args) == 1:
                    yield "beat_schedule", args[0], node.lineno
                elif _last_name(owner) == "conf":
                    yield from ((word.arg, word.value, word.value.lineno) for word in keywords if word.arg)
                    yield from _members(args[0]) if args and isinstance(args[0], ast.Dict) else ()


def _members(node: ast.Dict) -> Iterator[tuple[str, ast.expr, int]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, value, value.lineno


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr, int]]:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name, value, target.lineno
        case ast.Subscript(value=owner, slice=key) if (_last_name(owner) or "").lower() in _SCHEDULE_NAMES:
            yield "beat_schedule[]", ast.Tuple([key, value], ast.Load()), target.lineno
        case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))) if _last_name(owner) == "conf":
            yield name, value, target.lineno


def _last_name(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return None


def _called(node: ast.Call) -> str | None:
    return _last_name(node.func)


def _read_entries(reader: _Reader, node: ast.expr, found: BeatModule) -> None:
    node = reader.resolved(node)
    match node:
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if key is None:
                    # **common: what it adds is seen only if it is a dict of this module.
                    if isinstance(reader.resolved(value), ast.Dict):
                        _read_entries(reader, value, found)
                    else:
                        found.faults.append((value.lineno, _unseen(value)))
                else:
                    _read_entry(reader, key, value, found)
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
            for word in keywords:
                if word.arg is None:
                    found.faults.append((word.value.lineno, _unseen(word.value)))
                else:
                    _read_entry(reader, ast.Constant(word.arg), word.value, found)
        case _:
            raise _unseen(node)


def _read_entry(reader: _Reader, key: ast.expr, value: ast.expr, found: BeatModule) -> None:
    line = getattr(key, "lineno", value.lineno)
    try:
        name = reader.text(key)
        members = reader.value(value)
        if not isinstance(members, dict):
            raise Refused(f"entry {name!r} is not a dict", _REMEDY)
        found.entries.append((line, name, members))
    except Refused as refused:
        found.faults.append((line, refused))


def _unseen(node: ast.expr) -> Refused:
    return Refused(f"line {node.lineno}: {_source(node)} is only known when the code runs, which an import never does", _REMEDY)


def _source(node: ast.expr) -> str:
    """An expression in a message, cut."""
    try:
        text = ast.unparse(node)
    except RecursionError:
        return "an expression of great depth"
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclass
class _Reader:
    """Expressions to values. `names` are the constants of the module; `depth` ends those that name each other."""

    names: Mapping[str, ast.expr]
    depth: int = 0

    def text(self, node: ast.expr) -> str:
        value = self.value(node)
        if not isinstance(value, str):
            raise Refused(f"line {node.lineno}: {_source(node)} is not a text", _REMEDY)
        return value

    def resolved(self, node: ast.expr) -> ast.expr:
        for _ in range(10):
            if not isinstance(node, ast.Name) or node.id not in self.names:
                return node
            node = self.names[node.id]
        raise _unseen(node)

    def value(self, node: ast.expr) -> Any:
        self.depth += 1
        try:
            if self.depth > 50:
                raise _unseen(node)
            return self._value(node)
        finally:
            self.depth -= 1

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return node.value
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self.value(element) for element in elements]
            case ast.Set(elts=elements):
                return sorted(self.value(element) for element in elements if isinstance(element, ast.Constant))
            case ast.Dict(keys=keys, values=values):
                return self._dict(node, keys, values)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return self._sum(node, left, op, right)
            case ast.Name(id=name) if name in self.names:
                return self.value(self.names[name])
            case ast.Call():
                return self._call(node)
        raise _unseen(node)

    def _dict(self, node: ast.expr, keys: list[ast.expr | None], values: list[ast.expr]) -> dict[str, Any]:
        found = {}
        for key, value in zip(keys, values, strict=True):
            if key is None:
                raise _unseen(value)
            name = self.value(key)
            if not isinstance(name, str):
                raise Refused(f"line {node.lineno}: the key {name!r} is not a text, JSON has no others", _REMEDY)
            found[name] = self.value(value)
        return found

    def _number(self, node: ast.expr) -> float:
        value = self.value(node)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _unseen(node)
        return value

    def _sum(self, node: ast.expr, left: ast.expr, op: ast.operator, right: ast.expr) -> Any:
        first, second = self.value(left), self.value(right)
        if isinstance(first, IntervalCall) and isinstance(second, IntervalCall) and isinstance(op, ast.Add):
            return IntervalCall(first.every_s + second.every_s)
        for value in (first, second):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _unseen(node)
        operations: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
            ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b, ast.Div: lambda a, b: a / b,
            ast.FloorDiv: lambda a, b: a // b,
        }  # fmt: skip
        operation = operations.get(type(op))
        if operation is None or (isinstance(op, ast.Div | ast.FloorDiv) and not second):
            raise _unseen(node)
        result = operation(first, second)
        if not abs(result) <= _NUMBER_MAX:
            raise Refused(f"line {node.lineno}: {_source(node)} is not a number of seconds anybody means", _REMEDY)
        return result

    def _call(self, node: ast.Call) -> Any:
        name = _called(node)
        if any(word.arg is None for word in node.keywords) or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise _unseen(node)
        words = {word.arg: word.value for word in node.keywords if word.arg is not None}
        match name:
            case "crontab":
                if len(node.args) > len(_CRONTAB_ORDER):
                    raise _unseen(node)
                given = dict(zip(_CRONTAB_ORDER, node.args, strict=False)) | words
                return CrontabCall({field: self.value(value) for field, value in given.items()})
            case "timedelta":
                given = dict(zip(_TIMEDELTA_S, node.args, strict=False)) | words
                if not given.keys() <= _TIMEDELTA_S.keys():
                    raise _unseen(node)
                return IntervalCall(sum(self._number(value) * _TIMEDELTA_S[unit] for unit, value in given.items()))
            case "schedule":
                given = dict(zip(("run_every", "relative"), node.args, strict=False)) | words
                if "run_every" not in given or not given.keys() <= {"run_every", "relative"}:
                    raise _unseen(node)
                every = self.value(given["run_every"])
                every_s = every.every_s if isinstance(every, IntervalCall) else self._number(given["run_every"])
                return IntervalCall(every_s, relative=bool(self.value(given["relative"])) if "relative" in given else False)
            case "solar" | "clocked":
                return OtherCall(name)
            case "dict" if not node.args:
                return {word: self.value(value) for word, value in words.items()}
        raise _unseen(node)
