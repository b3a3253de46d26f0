"""Settings from YAML, environment and command line, later ones first; every fault at once, with its line and the way out.

YAML is read as a tree of texts and each text by the type of its key, with the same reader that environment variables go through.
So `id: no` is a name and not a boolean, `start: 2026-11-01T00:00:00Z` an instant as written, and a fault knows its line. Tags,
anchors and merge keys are refused: settings say what they say.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import yaml
from msgspec import inspect

from wheelsched.core.settings import Settings

ENVIRONMENT_PREFIX: Final = "WHEELSCHED_"
Value = str | int | float


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong. `where` is `FILE:LINE`, `environment` or `command line`."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class SettingsError(ValueError):
    """The settings cannot be used; `faults` lists everything that is wrong with them."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: its dotted name, default, documentation, and the type and bounds its value must have."""

    name: str
    default: Value
    description: str
    type: inspect.Type

    @property
    def environment(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper().replace(".", "__")

    @property
    def bounds(self) -> str:
        """What a value may be, in words; empty where anything may."""
        match self.type:
            case inspect.LiteralType(values=values):
                # The default first: msgspec sorts them.
                return " or ".join(sorted(map(str, values), key=lambda value: (value != self.default, value)))
            case inspect.IntType(ge=low, le=high) if low is not None and high is not None:
                return f"{low:,} to {high:,}"
            case inspect.IntType(ge=low) if low is not None:
                return f"at least {low:,}"
            case inspect.FloatType(gt=low) if low is not None:
                return f"above {low:g}"
            case inspect.StrType(pattern=pattern) if pattern:
                return "1 to 128 of A-Z a-z 0-9 . _ -, starting with a letter or digit"
        return ""


def _keys() -> dict[str, Key]:
    tree = inspect.type_info(Settings)
    assert isinstance(tree, inspect.StructType)
    keys = {}
    for section in tree.fields:
        assert isinstance(section.type, inspect.StructType)
        for item in section.type.fields:
            kind, description = item.type, ""
            if isinstance(kind, inspect.Metadata):
                description, kind = (kind.extra_json_schema or {}).get("description", ""), kind.type
            name = f"{section.name}.{item.name}"
            keys[name] = Key(name, item.default, description, kind)
    return keys


KEYS: Final = _keys()
SECTIONS: Final = tuple(dict.fromkeys(name.split(".")[0] for name in KEYS))


def load_settings(
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Value] | None = None,
) -> Settings:
    """The settings of a file (None: the defaults), of `environment` (os.environ by default) and of `overrides` (dotted keys, from
    the command line), the later winning. Raises `SettingsError` with every fault."""
    faults: list[Fault] = []
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}
    environment = os.environ if environment is None else environment
    for source in (_from_file(path, faults), _from_environment(environment, faults), _from_overrides(overrides or {})):
        for where, name, text in source:
            value = _read_value(KEYS[name], text)
            if isinstance(value, _Refusal):
                faults.append(Fault(where, value.text))
                continue
            values[name], origins[name] = value, where
    settings = _build(values)
    default_origin = str(path) if path else "settings"
    faults += [Fault(origins.get(name, default_origin), message) for name, message in _contradictions(settings)]
    if faults:
        raise SettingsError(sorted(faults, key=_place))
    return settings


def _place(fault: Fault) -> tuple[bool, int]:
    line = fault.where.rpartition(":")[2]
    return (not line.isdigit(), int(line) if line.isdigit() else 0)


def data_dir(settings: Settings) -> Path:
    """Where this node keeps its data."""
    return Path(settings.node.data_dir.replace("{id}", settings.node.id))


def parse_instant_ms(text: str) -> int | None:
    """UTC Unix ms of an RFC 3339 instant with an offset or Z; None where the text is none."""
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if instant.tzinfo is None else round(instant.timestamp() * 1_000)


def reference_yaml() -> str:
    """Every setting with its default, what it is for and what it may be: the text of `conf/reference.yaml`."""
    lines = [
        "# Every setting of wheelsched with its default. Generated: `wheelsched config reference > conf/reference.yaml`.",
        "# Leave out what you do not change. An environment variable wins over the file: WHEELSCHED_HTTP__PORT=9000",
        "# (or WHEELSCHED_HTTP_PORT) stands for http.port.",
    ]
    for section in SECTIONS:
        lines += ["", f"{section}:"]
        for key in (key for name, key in KEYS.items() if name.split(".")[0] == section):
            bounds = f" ({key.bounds})" if key.bounds else ""
            lines += [f"  # {key.description}{bounds}", f"  {key.name.split('.')[1]}: {_yaml_text(key.default)}"]
    return "\n".join(lines) + "\n"


def _yaml_text(value: Value) -> str:
    return f'"{value}"' if isinstance(value, str) and not value[:1].isalnum() else str(value)


# Sources: each gives (where, dotted name, text) of the keys that exist and notes a fault for those that do not.

_Item = tuple[str, str, Value]


def _from_file(path: Path | None, faults: list[Fault]) -> Iterator[_Item]:
    if path is None:
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        faults.append(Fault(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}"))
        return
    yield from _items_of(text, str(path), faults)


def _items_of(text: str, file: str, faults: list[Fault]) -> Iterator[_Item]:
    def fault(node: yaml.Node, message: str) -> None:
        faults.append(Fault(f"{file}:{node.start_mark.line + 1}", message))

    try:
        faults += [Fault(f"{file}:{line}", message) for line, message in _extras_of(text)]
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        faults.append(Fault(f"{file}:{mark.line + 1}" if mark else file, f"is not YAML: {error.problem or error.context}"))
        return
    except yaml.YAMLError as error:
        faults.append(Fault(file, f"is not YAML: {error}"))
        return
    if root is None:
        return
    for section, body in _pairs(root, "", fault):
        if section not in SECTIONS:
            fault(body.key, f"{section} is not a setting; {_nearest(section, SECTIONS)}")
        elif not _is_empty(body.value):
            for name, item in _pairs(body.value, section + ".", fault):
                if name not in KEYS:
                    fault(item.key, f"{name} is not a setting; {_nearest(name, tuple(KEYS))}")
                elif not isinstance(item.value, yaml.ScalarNode):
                    fault(item.value, f"{name} takes one value, not a {type(item.value).__name__.removesuffix('Node').lower()}")
                else:
                    yield f"{file}:{item.value.start_mark.line + 1}", name, item.value.value


@dataclass(frozen=True, slots=True)
class _Pair:
    key: yaml.ScalarNode
    value: yaml.Node


def _pairs(node: yaml.Node, prefix: str, fault: Callable[[yaml.Node, str], None]) -> Iterator[tuple[str, _Pair]]:
    if not isinstance(node, yaml.MappingNode):
        what = prefix.rstrip(".") or "the file"
        fault(node, f"{what} must hold keys and values, like `{prefix or 'http.'}{'port: 8080' if not prefix else '…'}`")
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            fault(key, "a key must be a plain word")
            continue
        name = prefix + key.value
        if name in lines:
            fault(key, f"{name} stands here twice, first in line {lines[name]}; remove one")
            continue
        lines[name] = key.start_mark.line + 1
        yield name, _Pair(key, value)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~", "null")


def _extras_of(text: str) -> Iterator[tuple[int, str]]:
    """(line, message) of what YAML can do and settings must not."""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        assert event.start_mark is not None
        line, tag = event.start_mark.line + 1, getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            yield line, "anchors and aliases (& and *) are not allowed here; write the value out"
        elif tag:
            yield line, f"the tag {tag} is not allowed here; write the plain value"


def _from_environment(environment: Mapping[str, str], faults: list[Fault]) -> Iterator[_Item]:
    known = {key.environment: name for name, key in KEYS.items()}
    known |= {variable.replace("__", "_"): name for variable, name in known.items()}
    sections = tuple(f"{ENVIRONMENT_PREFIX}{section.upper()}_" for section in SECTIONS)
    for variable, text in sorted(environment.items()):
        if variable in known:
            yield f"environment {variable}", known[variable], text
        elif variable.startswith(sections):
            # Other variables of the prefix are not settings (WHEELSCHED_URL, WHEELSCHED_PURE); these are meant to be.
            faults.append(Fault("environment", f"{variable} is not a setting; {_nearest(variable, tuple(known))}"))


def _from_overrides(overrides: Mapping[str, Value]) -> Iterator[_Item]:
    for name, value in overrides.items():
        yield "command line", name, value


def _nearest(name: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else "see conf/reference.yaml (`wheelsched config reference`)"


# Values.


@dataclass(frozen=True, slots=True)
class _Refusal:
    text: str


def _read_value(key: Key, given: Value) -> Value | _Refusal:
    """The value of a key, or why it cannot be one."""
    text = str(given).strip()
    match key.type:
        case inspect.IntType():
            return _read_number(key, text, int, "a whole number")
        case inspect.FloatType():
            return _read_number(key, text, float, "a number")
        case inspect.LiteralType(values=values) if text not in values:
            return _Refusal(f"{key.name} {text!r} is not one of {key.bounds}")
    if not text and key.default:
        return _Refusal(f"{key.name} is empty; give a value or remove the line (default {key.default})")
    try:
        msgspec.convert(text, _annotated(key))
    except msgspec.ValidationError:
        return _Refusal(f"{key.name} {text!r} is not {key.bounds}")
    return text


def _read_number(key: Key, text: str, kind: Callable[[str], Value], what: str) -> Value | _Refusal:
    try:
        value = kind(text)
    except ValueError:
        return _Refusal(f"{key.name} {text!r} is not {what} ({key.bounds}; default {key.default})")
    assert isinstance(key.type, inspect.IntType | inspect.FloatType) and isinstance(value, int | float)
    if value != value or value in (float("inf"), float("-inf")):
        return _Refusal(f"{key.name} {text} is not a number ({key.bounds}; default {key.default})")
    if key.type.ge is not None and value < key.type.ge:
        return _Refusal(f"{key.name} {text} is below {key.type.ge:,}; allowed: {key.bounds}")
    if key.type.gt is not None and value <= key.type.gt:
        return _Refusal(f"{key.name} {text} is not above {key.type.gt:g}")
    if key.type.le is not None and value > key.type.le:
        return _Refusal(f"{key.name} {text} is above {key.type.le:,}; allowed: {key.bounds}")
    return value


def _annotated(key: Key) -> Any:
    pattern = key.type.pattern if isinstance(key.type, inspect.StrType) else None
    return Annotated[str, msgspec.Meta(pattern=pattern)] if pattern else str


def _build(values: Mapping[str, Value]) -> Settings:
    tree: dict[str, dict[str, Value]] = {}
    for name, value in values.items():
        section, item = name.split(".")
        tree.setdefault(section, {})[item] = value
    return msgspec.convert(tree, Settings)


def _contradictions(settings: Settings) -> Iterator[tuple[str, str]]:
    """(key, message) of what each value allows and all together do not."""
    groups = settings.cluster.group_count
    if groups & (groups - 1):
        below = 1 << (groups.bit_length() - 1)
        yield "cluster.group_count", f"cluster.group_count {groups} is not a power of two; take {below} or {below * 2}"
    if settings.auth.mode == "none" and not is_loopback(settings.http.host):
        yield (
            "http.host",
            (
                f"http.host {settings.http.host} is reachable from other machines and auth.mode is none; "
                "listen on 127.0.0.1 and put a proxy that authenticates in front"
            ),
        )
    store = settings.store
    if store.free_bytes_stop > store.free_bytes_min:
        yield (
            "store.free_bytes_stop",
            (
                f"store.free_bytes_stop {store.free_bytes_stop:,} is above store.free_bytes_min {store.free_bytes_min:,}; "
                "the node would stop before it refuses new jobs"
            ),
        )
    if settings.clock.start and settings.clock.kind != "virtual":
        yield "clock.start", "clock.start is for a virtual clock; set clock.kind to virtual or remove it"
    if settings.clock.start and parse_instant_ms(settings.clock.start) is None:
        yield (
            "clock.start",
            (f"clock.start {settings.clock.start!r} is not an RFC 3339 instant with an offset, like 2026-11-01T07:00:00Z"),
        )


def is_loopback(host: str) -> bool:
    """True where nobody outside this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
