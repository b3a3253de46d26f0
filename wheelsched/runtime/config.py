"""Settings from YAML, environment and command line, later ones first; every fault at once, with its line and the way out.

YAML is read as a tree of texts and each text by the type of its key, with the same reader that environment variables go through.
So `id: no` is a name and not a boolean, `start: 2026-11-01T00:00:00Z` an instant as written, and a fault knows its line. Tags,
anchors and merge keys are refused: settings say what they say.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import yaml
from msgspec import inspect

from wheelsched.core.settings import Settings, raft_ids, split_address

ENVIRONMENT_PREFIX: Final = "WHEELSCHED_"


@dataclass(frozen=True, slots=True)
class Row:
    """One element of a setting that is a list: its texts by name, and where it stands."""

    where: str
    texts: Mapping[str, str]


Rows = tuple[Row, ...]
Value = str | int | float | Rows


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
                return _pattern_in_words(pattern)
            case inspect.VarTupleType(item_type=inspect.StructType(fields=fields)):
                return f"a list of {{{', '.join(f'{item.name}: …' for item in fields)}}}"
        return ""

    @property
    def fields(self) -> dict[str, str]:
        """Pattern of each field by name, of a key that is a list; else empty."""
        found: dict[str, str] = {}
        if isinstance(self.type, inspect.VarTupleType) and isinstance(self.type.item_type, inspect.StructType):
            for item in self.type.item_type.fields:
                kind = item.type.type if isinstance(item.type, inspect.Metadata) else item.type
                assert isinstance(kind, inspect.StrType) and kind.pattern, "fields of a list are texts with a pattern"
                found[item.name] = kind.pattern
        return found


def _pattern_in_words(pattern: str) -> str:
    if "[0-9]{1,5}" in pattern:
        return "host:port, like 10.0.0.1:7080 or [fd00::1]:7080"
    return "1 to 128 of A-Z a-z 0-9 . _ -, starting with a letter or digit"


def _keys() -> dict[str, Key]:
    tree = inspect.type_info(Settings)
    assert isinstance(tree, inspect.StructType)
    keys: dict[str, Key] = {}

    def collect(prefix: str, fields: tuple[inspect.Field, ...]) -> None:
        for item in fields:
            kind, description = item.type, ""
            if isinstance(kind, inspect.Metadata):
                description, kind = (kind.extra_json_schema or {}).get("description", ""), kind.type
            name = f"{prefix}{item.name}"
            if isinstance(kind, inspect.StructType):
                SECTIONS[name] = description
                collect(f"{name}.", kind.fields)
            else:
                keys[name] = Key(name, item.default, description, kind)

    collect("", tree.fields)
    return keys


# Dotted names of the tree's inner nodes, with what they are for.
SECTIONS: Final[dict[str, str]] = {}
KEYS: Final = _keys()


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
            if isinstance(value, tuple):
                origins |= {f"{name}[{number}]": row.where for number, row in enumerate(value)}
    settings = _with_own_address(_build(values), values)
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
    told: set[str] = set()
    for key in KEYS.values():
        *sections, last = key.name.split(".")
        for depth in range(1, len(sections) + 1):
            section = ".".join(sections[:depth])
            if section not in told:
                told.add(section)
                indent = "  " * (depth - 1)
                lines += [""] if depth == 1 else [f"{indent}# {SECTIONS[section]}"]
                lines.append(f"{indent}{sections[depth - 1]}:")
        indent, bounds = "  " * len(sections), f" ({key.bounds})" if key.bounds else ""
        lines += [f"{indent}# {key.description}{bounds}", f"{indent}{last}: {_yaml_text(key.default)}"]
    return "\n".join(lines) + "\n"


def _yaml_text(value: Value) -> str:
    if isinstance(value, tuple):
        assert not value, "a list is empty by default"
        return "[]"
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
    if root is not None:
        yield from _items_below(root, "", file, fault)


_Fault = Callable[[yaml.Node, str], None]


def _items_below(node: yaml.Node, prefix: str, file: str, fault: _Fault) -> Iterator[_Item]:
    for name, pair in _pairs(node, prefix, fault):
        where = f"{file}:{pair.value.start_mark.line + 1}"
        key = KEYS.get(name)
        if name in SECTIONS:
            if not _is_empty(pair.value):
                yield from _items_below(pair.value, name + ".", file, fault)
        elif key is None:
            fault(pair.key, f"{name} is not a setting; {_nearest(name, tuple(KEYS) if prefix else tuple(SECTIONS))}")
        elif fields := key.fields:
            if not _is_empty(pair.value):
                yield where, name, _rows(pair.value, key, fields, file, fault)
        elif not isinstance(pair.value, yaml.ScalarNode):
            fault(pair.value, f"{name} takes one value, not a {_shape(pair.value)}")
        else:
            yield where, name, pair.value.value


def _shape(node: yaml.Node) -> str:
    return type(node).__name__.removesuffix("Node").lower()


def _rows(node: yaml.Node, key: Key, fields: Mapping[str, str], file: str, fault: _Fault) -> Rows:
    """The elements of a list, those with a fault left out."""
    if not isinstance(node, yaml.SequenceNode):
        fault(node, f"{key.name} takes {key.bounds}, not a {_shape(node)}")
        return ()
    rows = []
    for number, element in enumerate(node.value):
        complaints: list[tuple[yaml.Node, str]] = []
        texts = _texts(element, f"{key.name}[{number}]", fields, complaints)
        for place, text in complaints:
            fault(place, text)
        if not complaints:
            rows.append(Row(f"{file}:{element.start_mark.line + 1}", texts))
    return tuple(rows)


def _texts(element: yaml.Node, name: str, fields: Mapping[str, str], complaints: list[tuple[yaml.Node, str]]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for dotted, pair in _pairs(element, f"{name}.", lambda node, text: complaints.append((node, text))):
        field = dotted.removeprefix(f"{name}.")
        pattern = fields.get(field)
        if pattern is None:
            complaints.append((pair.key, f"{dotted} is not a setting; {_nearest(field, tuple(fields))}"))
        elif not isinstance(pair.value, yaml.ScalarNode):
            complaints.append((pair.value, f"{dotted} takes one value, not a {_shape(pair.value)}"))
        elif not re.search(pattern, pair.value.value):
            complaints.append((pair.value, f"{dotted} {pair.value.value!r} is not {_pattern_in_words(pattern)}"))
        else:
            texts[field] = pair.value.value
    missing = [field for field in fields if field not in texts]
    if missing and not complaints:
        complaints.append((element, f"{name} lacks {' and '.join(missing)}; it needs {', '.join(fields)}"))
    return texts


def _rows_of_text(key: Key, text: str, where: str, faults: list[Fault]) -> Rows:
    """A list that is given as one text, from the environment: YAML in one line."""
    try:
        extras = [message for _, message in _extras_of(text)]
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        faults.append(Fault(where, f"{key.name} is not YAML; write it in one line, like [{{id: n1, …}}, …]"))
        return ()
    if extras:
        faults += [Fault(where, message) for message in extras]
        return ()
    if node is None or _is_empty(node):
        return ()
    rows = _rows(node, key, key.fields, where, lambda _, message: faults.append(Fault(where, message)))
    return tuple(Row(where, row.texts) for row in rows)


@dataclass(frozen=True, slots=True)
class _Pair:
    key: yaml.ScalarNode
    value: yaml.Node


def _pairs(node: yaml.Node, prefix: str, fault: _Fault) -> Iterator[tuple[str, _Pair]]:
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
    sections = tuple(f"{ENVIRONMENT_PREFIX}{section.upper()}_" for section in SECTIONS if "." not in section)
    for variable, text in sorted(environment.items()):
        if variable in known:
            where, name = f"environment {variable}", known[variable]
            value: Value = _rows_of_text(KEYS[name], text, where, faults) if KEYS[name].fields else text
            yield where, name, value
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
    if isinstance(given, tuple):
        return given
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


def _read_number(key: Key, text: str, kind: Callable[[str], int | float], what: str) -> Value | _Refusal:
    try:
        value = kind(text)
    except ValueError:
        return _Refusal(f"{key.name} {text!r} is not {what} ({key.bounds}; default {key.default})")
    assert isinstance(key.type, inspect.IntType | inspect.FloatType)
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
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = [row.texts for row in value] if isinstance(value, tuple) else value
    return msgspec.convert(tree, Settings)


def _with_own_address(settings: Settings, values: Mapping[str, Value]) -> Settings:
    """A node of a cluster listens where the others are told it is, unless `http` says otherwise (behind a proxy or a NAT)."""
    own = next((node for node in settings.cluster.nodes if node.id == settings.node.id), None)
    if own is None:
        return settings
    host, port = split_address(own.http)
    given = {name: values.get(f"http.{name}", default) for name, default in (("host", host), ("port", port))}
    return msgspec.structs.replace(settings, http=msgspec.structs.replace(settings.http, **given))


def _contradictions(settings: Settings) -> Iterator[tuple[str, str]]:
    """(key, message) of what each value allows and all together do not."""
    groups = settings.cluster.group_count
    if groups & (groups - 1):
        below = 1 << (groups.bit_length() - 1)
        yield "cluster.group_count", f"cluster.group_count {groups} is not a power of two; take {below} or {below * 2}"
    yield from _cluster_contradictions(settings)
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


def _cluster_contradictions(settings: Settings) -> Iterator[tuple[str, str]]:
    cluster = settings.cluster
    tls = {name: getattr(cluster.tls, name) for name in ("cert_file", "key_file", "ca_file")}
    if any(tls.values()) and not all(tls.values()):
        empty = [f"cluster.tls.{name}" for name, value in tls.items() if not value]
        yield empty[0], f"{' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty; mutual TLS needs all three files"
    if not cluster.nodes:
        return
    ids = [node.id for node in cluster.nodes]
    seen: dict[str, str] = {}
    for number, node in enumerate(cluster.nodes):
        place = f"cluster.nodes[{number}]"
        if node.id in ids[:number]:
            yield place, f"{place}.id {node.id} stands here twice, first as cluster.nodes[{ids.index(node.id)}]; every node needs its own"
        for kind, address in (("http", node.http), ("peer", node.peer)):
            port = split_address(address)[1]
            if not 1 <= port <= 65_535:
                yield place, f"{place}.{kind} {address} has no port that others could reach; allowed: 1 to 65,535"
            elif address in seen:
                yield place, f"{place}.{kind} {address} is already {seen[address]}; every address needs its own port"
            else:
                seen[address] = f"{place}.{kind}"
    try:
        raft_ids(dict.fromkeys(ids))
    except ValueError as error:
        yield "cluster.nodes", f"cluster.nodes: {error}"
    if settings.node.id not in ids:
        yield (
            "node.id",
            f"node.id {settings.node.id} is not among cluster.nodes ({', '.join(ids)}); say which one this is with --node or node.id",
        )
    if cluster.replication_factor > len(ids):
        fitting = len(ids) - 1 + len(ids) % 2
        yield (
            "cluster.replication_factor",
            f"cluster.replication_factor {cluster.replication_factor} is above the {len(ids)} of cluster.nodes; "
            f"set it to {fitting} or add nodes",
        )
    elif cluster.replication_factor % 2 == 0:
        below = cluster.replication_factor - 1
        yield (
            "cluster.replication_factor",
            f"cluster.replication_factor {below + 1} survives no more failures than {below}; take {below} or {below + 2}",
        )


def is_loopback(host: str) -> bool:
    """True where nobody outside this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
