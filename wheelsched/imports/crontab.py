"""crontab(5): the user's format and the system's (`/etc/crontab`, `/etc/cron.d`), as Vixie cron and cronie read them.

What cron does is kept: a failed command is not repeated (`retry.max_attempts` 1), what was due while the machine was down is not
caught up (`missed_runs.policy` skip), a command may run for long (`timeout_s` at its maximum) and beside itself (`overlap` allow, our
default). Cron's rule for the two day fields and its handling of clock changes are ours too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from wheelsched.core.limits import TIMEOUT_S_MAX
from wheelsched.imports.fields import FIELDS, REWRITE, WEEKDAY, FieldKind, Item, items_of, spread, written
from wheelsched.imports.plan import Collector, ImportSettings, Plan, PlannedSchedule, Refused, name_with_digest

DEFAULT_QUEUE: Final = "cron"
_VARIABLE: Final = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s=\d*@#-][^\s=]*))\s*=\s*(.*?)\s*""")
_ENTRY: Final = re.compile(r"(?P<time>@\S+|\S+(?:[ \t]+\S+){4})(?:[ \t]+(?P<rest>.*))?")
_USER: Final = re.compile(r"(?P<user>[A-Za-z_][A-Za-z0-9_.:/-]*\$?)(?:[ \t]+(?P<command>.*))?")
_FLAGS: Final = re.compile(r"(?:-[nqs]+[ \t]+)+(?=\S)")
_NAMED_DAY: Final = re.compile(r"[A-Za-z]{3}")
_MACROS: Final = {"@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"}
# Where cron sends what a command prints: no business of the command's.
_MAIL: Final = {"MAILTO", "MAILFROM", "CONTENT_TYPE", "CONTENT_TRANSFER_ENCODING"}
_USER_COLUMN: Final = re.compile(r"#.*\bdow\s+user(?:-name)?\s+command\b|#.*\buser-name\b")
_REDIRECTION: Final = re.compile(r"[0-9&]?[<>]{1,2}(?:&\S*|\s*\S+)")
_SLUG_WORDS_MAX: Final = 4
_SLUG_LENGTH_MAX: Final = 48
# What stands before the command proper in many a line: `cd /srv/shop && ./manage.py cleanup`.
_PREPARATIONS: Final = {"cd", "test", "[", "[[", "sleep", "export", "source", ".", "true", "umask", "set"}


@dataclass
class _Reading:
    """What the lines so far have set."""

    system: bool
    zone: str | None = None
    zone_is_tz: bool = False
    delay_s: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)


def read_crontab(text: str, settings: ImportSettings, *, system: bool | None = None) -> Plan:
    """The plan of a crontab. `system`: entries have a user column; None: judged from the text, with a note if so."""
    collector = Collector("crontab", settings)
    if system is None:
        system = _looks_like_system(text)
        if system:
            collector.note("the file", "read as a system crontab, with a user before each command", "give --user-format if it has none")
    reading = _Reading(system)
    for number, line in enumerate(text.split("\n"), 1):
        place = f"line {number}"
        stripped = line.strip(" \t\r")
        if not stripped or stripped.startswith("#"):
            continue
        with collector.at(place):
            variable = _VARIABLE.fullmatch(line)
            if variable is not None:
                _set_variable(collector, reading, place, variable)
            else:
                _add_entry(collector, reading, place, stripped)
    return collector.plan()


def _looks_like_system(text: str) -> bool:
    """A header that names the column, or `root` as the sixth word of an entry and a likely user in all of them."""
    if any(_USER_COLUMN.match(line) for line in text.split("\n")):
        return True
    users = []
    for line in text.split("\n"):
        stripped = line.strip(" \t\r")
        if not stripped or stripped.startswith("#") or _VARIABLE.fullmatch(line):
            continue
        entry = _ENTRY.fullmatch(stripped)
        if entry is None:
            continue
        match = _USER.fullmatch(entry["rest"] or "")
        if match is None or not match["command"]:
            return False
        users.append(match["user"])
    return "root" in users and all(re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}\$?", user) for user in users)


def _set_variable(collector: Collector, reading: _Reading, place: str, match: re.Match[str]) -> None:
    name = match[1] or match[2] or match[3] or ""
    value = match[4]
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    if name == "CRON_TZ":
        reading.zone, reading.zone_is_tz = value.removeprefix(":") or None, False
        collector.note(place, f"CRON_TZ={value} is the time zone of the entries below it")
    elif name == "TZ":
        reading.env[name] = value
        if reading.zone is None or reading.zone_is_tz:
            reading.zone, reading.zone_is_tz = value.removeprefix(":") or None, True
        collector.note(place, f"TZ={value} is taken as the time zone of the entries below it, and kept in payload.env")
    elif name == "RANDOM_DELAY":
        if not value.isdecimal():
            raise Refused(f"RANDOM_DELAY={value} is not a number of minutes", "correct it; the entries below are taken without a delay")
        reading.delay_s = int(value) * 60 or None
        collector.note(place, f"RANDOM_DELAY={value} becomes jitter_s {int(value) * 60}: the same delay at every run of a schedule")
    elif name in _MAIL:
        collector.note(place, f"{name}={value} is not kept: nothing is mailed", "a handler's result and error are kept with the job")
    else:
        reading.env[name] = value
        collector.note(place, f"{name}={value} is kept in payload.env of the entries below it")


def _add_entry(collector: Collector, reading: _Reading, place: str, line: str) -> None:
    warnings: list[str] = []
    if re.match(r"-[0-9*]", line):
        line = line[1:]  # cronie: run it without a line in syslog
        warnings.append("the leading '-' only kept the run out of syslog; it is dropped")
    entry = _ENTRY.fullmatch(line)
    if entry is None or (entry["time"].startswith("@") and entry["time"].lower() not in _MACROS):
        raise _unreadable(entry["time"] if entry is not None else line)
    user, command = _user_and_command(reading, entry["rest"] or "", line)
    flags = _FLAGS.match(command)
    if flags is not None:
        command = command[flags.end() :]
        warnings.append(f"the flags {flags.group().strip()!r} before the command are cron's; they are dropped")
    command, stdin = split_percent(command)
    if not command:
        raise Refused(f"{line!r} has no command before the first %", "write the command, or \\% for a percent sign")
    zone = collector.zone_or_default(reading.zone, "the file", "no line names a time zone: cron uses the machine's, UTC is assumed")
    if reading.zone_is_tz:
        warnings.append(f"TZ={reading.zone} moves the schedule in some crons and only the command's clock in others; compare the runs")
    payload: dict[str, Any] = {"command": command}
    payload |= {name: value for name, value in (("stdin", stdin), ("user", user)) if value is not None}
    if reading.env:
        payload["env"] = dict(reading.env)
    name, seen = _name(collector, reading, user, command, stdin)
    if seen > 1:
        warnings.append(f"the same command stands {seen} times by here; the names are numbered in the order of the file")
    cron, noted = translate(entry["time"])
    collector.add(
        PlannedSchedule(
            name=name,
            place=place,
            source=" ".join(entry["time"].split()),
            source_name=command,
            cron=cron,
            time_zone=zone,
            job_template={
                "queue": collector.queue_or(DEFAULT_QUEUE), "payload": payload, "retry": {"max_attempts": 1}, "timeout_s": TIMEOUT_S_MAX,
            },
            missed_runs={"policy": "skip"},
            jitter_s=reading.delay_s,
            warnings=(*warnings, *noted),
        )
    )  # fmt: skip


def _unreadable(time: str) -> Refused:
    macro = time.split()[0] if time.split() else time
    if macro.lower() == "@reboot":
        return Refused("@reboot is not a time, no schedule can do it", "start the command from the machine's init system")
    if macro.lower() in ("@every_minute", "@every_second") or re.fullmatch(r"@\d+", macro):
        return Refused(
            f"{macro} counts from the end of the last run, which no schedule can do", "create one with every_s and overlap forbid"
        )
    if macro.startswith("@"):
        return Refused(f"{macro} is not a macro of cron's", f"there are {', '.join(sorted(_MACROS))}; intervals are every_s")
    return Refused(
        f"{time!r} has {len(time.split())} of five time fields and no command", "an entry is: minute hour day month weekday command"
    )


def _user_and_command(reading: _Reading, rest: str, line: str) -> tuple[str | None, str]:
    if not reading.system:
        if not rest:
            raise Refused(f"{line!r} has no command", "an entry is: minute hour day month weekday command")
        return None, rest
    match = _USER.fullmatch(rest)
    if match is None or not match["command"]:
        raise Refused(
            f"{line!r} has no user and command", "a system entry is: minute hour day month weekday user command; else give --user-format"
        )
    return match["user"], match["command"]


def split_percent(text: str) -> tuple[str, str | None]:
    """(command, what it reads): the first bare `%` ends the command, further ones are ends of line; `\\%` is a percent sign."""
    parts = [""]
    at = 0
    while at < len(text):
        if text.startswith("\\%", at):
            parts[-1] += "%"
            at += 2
        elif text[at] == "%":
            parts.append("")
            at += 1
        else:
            parts[-1] += text[at]
            at += 1
    command = parts[0].rstrip(" \t")
    if len(parts) == 1:
        return command, None
    stdin = "\n".join(parts[1:])
    return command, stdin if stdin.endswith("\n") else stdin + "\n"


def _name(collector: Collector, reading: _Reading, user: str | None, command: str, stdin: str | None) -> tuple[str, int]:
    """A name from the command, and the how-many-eth entry of that command this is. The time is no part of it: an entry whose time
    was changed keeps its name, and importing it again moves the schedule."""
    identity = "\0".join((user or "", command, stdin or ""))
    name = name_with_digest(command_slug(command), identity, prefix=collector.settings.prefix)
    seen = reading.seen[name] = reading.seen.get(name, 0) + 1
    return (name if seen == 1 else f"{name}-{seen}"), seen


def command_slug(command: str) -> str:
    """A few words by which a person knows the command: `/usr/bin/php /srv/shop/artisan schedule:run` is `php-artisan-schedule-run`."""
    for segment in re.split(r"&&|\|\||[;|(){}]", _REDIRECTION.sub(" ", command)):
        words = [word for word in segment.split() if not re.match(r"[A-Za-z_]\w*=|[-&]", word)]
        if words and words[0] not in _PREPARATIONS:
            named = [word.strip("'\"").rstrip("/").rpartition("/")[2] for word in words]
            slug = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(named[:_SLUG_WORDS_MAX]))
            return slug[:_SLUG_LENGTH_MAX].strip("-._")
    return ""


def translate(time: str) -> tuple[str, tuple[str, ...]]:
    """(our expression, warnings) of five fields or a macro, as Vixie cron reads them. Raises Refused for what cron has not."""
    if time.startswith("@"):
        return time.lower(), ()
    warnings: list[str] = []
    fields = []
    for kind, text in zip(FIELDS, time.split(), strict=True):
        items = items_of(kind, text, "cron")
        for item in items:
            check_plain(kind, item)
            if item.step is not None and item.last is None and item.first != "*":
                warnings.append(f"crons differ on {kind.name} {item.text}; here it runs from {item.first} to the end of the field")
        fields.append(_weekdays(items, text, warnings) if kind is WEEKDAY else text)
    return " ".join(fields), tuple(warnings)


def check_plain(kind: FieldKind, item: Item) -> None:
    """Refuse what our grammar has and plain cron has not (H, L, W, #), and what only other crons have."""
    values = [item.first] if item.last is None else [item.first, item.last]
    for value in values:
        if value.isdecimal() or (value == "*" and item.last is None):
            continue
        if "~" in item.text:
            low, _, high = item.text.partition("~")
            remedy = f"write H({low or kind.low}-{high or kind.high}) for a time that stays the same, and create it by hand"
            raise Refused(f"{kind.name} {item.text!r} is a random time", remedy)
        if not _NAMED_DAY.fullmatch(value) or value.upper() not in kind.names:
            raise Refused(f"{kind.name} {item.text!r} is not cron's: {value!r} is not a value", REWRITE)


def _weekdays(items: list[Item], text: str, warnings: list[str]) -> str:
    """The day of week; ranges that end at or pass Sunday, `SAT-SUN` or `FRI-MON`, as days."""
    if not any(item.last is not None and _weekday(item.first) > _weekday(item.last) for item in items):
        return text
    parts = []
    for item in items:
        if item.last is None or _weekday(item.first) <= _weekday(item.last):
            parts.append(item.text)
            continue
        step = int(item.step) if item.step is not None and item.step.isdecimal() and int(item.step) else 1
        parts.append(written(WEEKDAY, spread(WEEKDAY, _weekday(item.first) % 7, _weekday(item.last), step)))
        warnings.append(f"day of week {item.text} passes the end of the week; many crons refuse it, here it is {parts[-1]}")
    return ",".join(parts)


def _weekday(text: str) -> int:
    return int(text) if text.isdecimal() else WEEKDAY.names[text.upper()]
