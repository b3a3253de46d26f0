"""CronJobs of Kubernetes: YAML or JSON, one or many documents, lists included (`kubectl get cronjobs -A -o yaml`).

What the controller does is kept: `backoffLimit` counts repetitions (6 by default), waits begin at 10 s and end at 6 minutes, after
an outage only the latest missed run is started (our default), and without `activeDeadlineSeconds` a job has no time limit
(`timeout_s` at its maximum). Its cron library (robfig/cron 3, `ParseStandard`) differs from crontab(5) in one rule, see `translate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import yaml

from wheelsched.core.errors import InvalidRequest
from wheelsched.core.limits import TIMEOUT_S_MAX
from wheelsched.imports.crontab import check_plain
from wheelsched.imports.documents import Members, shown
from wheelsched.imports.fields import DAY, FIELDS, WEEKDAY, FieldKind, Item, items_of
from wheelsched.imports.plan import (
    Collector,
    ImportSettings,
    Plan,
    PlannedSchedule,
    Refused,
    capped_attempts,
    capped_timeout,
    kept_labels,
    meets_clock_change,
)

DEFAULT_QUEUE: Final = "kubernetes"
_OVERLAPS: Final = {"Allow": "allow", "Forbid": "forbid", "Replace": "replace"}
_MACROS: Final = {"@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"}
_ZONE_PREFIX: Final = re.compile(r"(?P<variable>CRON_TZ|TZ)=(?P<zone>\S*)\s+(?P<rest>.*)", re.DOTALL)
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_UNITS_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0}
_BACKOFF_LIMIT_DEFAULT: Final = 6
_LISTS: Final = {"List", "CronJobList"}
# What a pod may need beside its command: named in a warning, so that nobody finds out at the first run.
_POD_EXTRAS: Final = (
    "initContainers", "volumes", "serviceAccountName", "nodeSelector", "affinity", "tolerations", "securityContext", "imagePullSecrets",
)  # fmt: skip
_CONTAINER_EXTRAS: Final = ("envFrom", "volumeMounts", "resources", "securityContext", "workingDir", "lifecycle")
_UNQUOTED: Final = re.compile(r":\s+[@*]")
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_kubernetes(text: str, settings: ImportSettings) -> Plan:
    """The plan of all CronJobs in a YAML text. InvalidRequest if it is no YAML, with the line."""
    collector = Collector("k8s-cronjob", settings)
    for place, document in _documents(text):
        with collector.at(place):
            top = Members.of(document, "")
            if top.get("kind") == "CronJob":
                _add(collector, place, top)
            else:
                kind = shown(top.get("kind"))
                collector.note(place, f"kind {kind} is left out", "only CronJobs have a schedule")
    return collector.plan()


def _documents(text: str) -> Iterator[tuple[str, Any]]:
    """(place, object) of each object, those in lists one by one. The same construction as `yaml.safe_load`, with lines."""
    loader = _LOADER(text)
    try:
        number = 0
        while loader.check_node():
            number += 1
            node = loader.get_node()
            assert node is not None
            line = node.start_mark.line + 1
            document = loader.construct_document(node)
            if document is None:
                continue
            if isinstance(document, dict) and document.get("kind") in _LISTS and isinstance(document.get("items"), list):
                lines = _item_lines(node)
                for index, item in enumerate(document["items"]):
                    yield f"document {number}, item {index + 1}, line {lines[index] if index < len(lines) else line}", item
            else:
                yield f"document {number}, line {line}", document
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        if mark is None:
            raise InvalidRequest(f"not YAML ({what}); export the CronJobs again") from error
        line = text.split("\n")[mark.line] if mark.line < text.count("\n") + 1 else ""
        remedy = "quote what begins with @ or *" if _UNQUOTED.search(line) else "correct it there"
        raise InvalidRequest(f"line {mark.line + 1}, column {mark.column + 1}: not YAML ({what}); {remedy}") from error
    except RecursionError as error:
        raise InvalidRequest("the YAML is nested too deeply to be CronJobs") from error
    except ValueError as error:
        raise InvalidRequest(f"the YAML has a value that is none ({error}); quote it if it is a text") from error
    finally:
        loader.dispose()


def _item_lines(node: Any) -> list[int]:
    for key, value in node.value:
        if key.value == "items" and isinstance(value, yaml.SequenceNode):
            return [item.start_mark.line + 1 for item in value.value]
    return []


def _add(collector: Collector, place: str, top: Members) -> None:
    metadata = top.members("metadata")
    name = metadata.needed_text("name")
    namespace = metadata.text("namespace")
    full = f"{namespace}/{name}" if namespace else name
    place = f"{place} ({full})"
    with collector.at(place):
        collector.add(_planned(collector, place, top.members("spec"), metadata, name, namespace))


def _planned(
    collector: Collector, place: str, spec: Members, metadata: Members, name: str, namespace: str | None
) -> PlannedSchedule:  # fmt: skip
    warnings: list[str] = []
    source = spec.needed_text("schedule")
    zone, rest = _zone_of(collector, spec, source, warnings)
    cron, every_s = _time(rest)
    job = spec.members("jobTemplate").members("spec")
    template: dict[str, Any] = {"queue": collector.queue_or(DEFAULT_QUEUE)}
    template["payload"] = _payload(job, name, namespace, warnings)
    template |= _limits(job, warnings)
    own = {"cronjob": name} | ({"namespace": namespace} if namespace else {})
    labels = {str(key): str(value) for key, value in metadata.members("labels").value.items() if key not in own}
    template["labels"], dropped = kept_labels(own | labels)
    deadline_s = spec.count("startingDeadlineSeconds")
    planned = PlannedSchedule(
        name=collector.full_name(f"{namespace}.{name}" if namespace else name),
        place=place,
        source=source,
        source_name=f"{namespace}/{name}" if namespace else name,
        cron=cron,
        every_s=every_s,
        time_zone=zone,
        job_template=template,
        missed_runs=None if deadline_s is None else {"policy": "run_latest", "starting_deadline_s": deadline_s},
        overlap=_overlap(spec),
        paused=spec.flag("suspend"),
        warnings=(*warnings, *dropped),
    )
    if every_s is not None:
        told = "@every counts from when the CronJob was made, every_s from the import"
    elif meets_clock_change(planned, collector.settings.zones, collector.settings.now_ms, fixed_only=True):
        told = "Kubernetes skips a time that a clock change leaves out and runs one that comes twice both times; not so here"
    else:
        return planned
    return replace(planned, warnings=(*planned.warnings, told))


def _zone_of(collector: Collector, spec: Members, source: str, warnings: list[str]) -> tuple[str, str]:
    """(zone, the schedule without its prefix)."""
    named = spec.text("timeZone")
    match = _ZONE_PREFIX.fullmatch(source.strip())
    if match is not None:
        prefix = f"{match['variable']}={match['zone']}"
        if named is not None and named != match["zone"]:
            raise Refused(f"spec.schedule begins with {prefix} and spec.timeZone is {named}", "leave one of them out")
        warnings.append(f"the zone was written in the schedule, {prefix}; Kubernetes does not support that officially")
        return match["zone"], match["rest"]
    assumed = "CronJobs without timeZone follow the clock of kube-controller-manager; UTC is assumed"
    return collector.zone_or_default(named, "all documents", assumed), source


def _time(text: str) -> tuple[str | None, float | None]:
    """(cron, every_s), one of them."""
    stripped = text.strip()
    if not stripped.startswith("@"):
        return translate(stripped), None
    if stripped in _MACROS:
        return stripped, None
    if stripped.startswith("@every "):
        return None, _duration_s(stripped.removeprefix("@every ").strip())
    raise Refused(f"spec.schedule {stripped!r} is not a descriptor", f"there are {', '.join(sorted(_MACROS))} and @every 1h30m")


def _duration_s(text: str) -> float:
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise Refused(f"@every {text!r} is not a duration", "write one like 90s, 15m or 1h30m")
    # The library rounds to whole seconds and allows none below one.
    return float(max(1, int(sum(float(number) * _UNITS_S[unit] for number, unit in parts))))


def translate(text: str) -> str:
    """Our expression for five fields of robfig/cron.

    Its star rule is another: an item `*` or `?` anywhere in a day field, but not `*/2`, makes both fields count. Vixie cron's, and
    ours, asks whether the field begins with `*`. So `0 0 */2 * MON` there is every odd day and every Monday: `0 0 1-31/2 * MON` here.
    """
    parts = text.split()
    if len(parts) != 5:
        raise Refused(f"spec.schedule {text!r} has {len(parts)} of five fields", "write minute, hour, day, month and weekday")
    return " ".join(_field(kind, part) for kind, part in zip(FIELDS, parts, strict=True))


def _field(kind: FieldKind, text: str) -> str:
    items = [_plain(item) for item in items_of(kind, text, "Kubernetes")]
    for item in items:
        check_plain(kind, item)
    if kind not in (DAY, WEEKDAY):
        return ",".join(item.text for item in items)
    if any(item.first == "*" and item.step in (None, "1") for item in items):
        return "*"
    return ",".join(f"{kind.low}-{kind.high}/{item.step}" if item.first == "*" else item.text for item in items)


def _plain(item: Item) -> Item:
    """`?` is `*`."""
    if item.first != "?":
        return item
    return Item(item.text.replace("?", "*", 1), "*", item.last, item.step)


def _overlap(spec: Members) -> str | None:
    policy = spec.text("concurrencyPolicy")
    if policy is None or policy == "Allow":
        return None
    if policy not in _OVERLAPS:
        raise Refused(f"spec.concurrencyPolicy {policy!r} is unknown", f"there are {', '.join(_OVERLAPS)}")
    return _OVERLAPS[policy]


def _limits(job: Members, warnings: list[str]) -> dict[str, Any]:
    limit = job.count("backoffLimit")
    attempts, told = capped_attempts(_BACKOFF_LIMIT_DEFAULT if limit is None else limit)
    warnings += told
    deadline_s = job.number("activeDeadlineSeconds")
    if deadline_s is not None and deadline_s <= 0:
        raise Refused(f"jobTemplate.spec.activeDeadlineSeconds is {deadline_s:g}", "write a number above 0")
    timeout_s, told = capped_timeout(TIMEOUT_S_MAX if deadline_s is None else deadline_s)
    warnings += told
    if deadline_s is not None and attempts > 1:
        warnings.append("activeDeadlineSeconds bounds all attempts together there; timeout_s bounds each one here")
    for name in ("completions", "parallelism"):
        if (job.count(name) or 1) > 1:
            warnings.append(f"{name} {job.count(name)}: a run is one job here; create several in the handler, or a flow")
    return {"retry": {"max_attempts": attempts, "initial_backoff_s": 10, "max_backoff_s": 360}, "timeout_s": timeout_s}


def _payload(job: Members, name: str, namespace: str | None, warnings: list[str]) -> dict[str, Any]:
    pod = job.members("template").members("spec")
    containers = [Members.of(value, f"{pod.where('containers')}[{number}]") for number, value in enumerate(pod.items("containers"))]
    if not containers:
        raise Refused(f"{pod.where('containers')} is missing", "export the CronJob complete: kubectl get cronjob NAME -o yaml")
    payload: dict[str, Any] = {"cronjob": name}
    if namespace:
        payload["namespace"] = namespace
    described = [_container(container, warnings) for container in containers]
    if len(described) == 1:
        payload |= described[0]
    else:
        payload["containers"] = described
    left_out = [extra for extra in _POD_EXTRAS if pod.get(extra)]
    left_out += [extra for extra in _CONTAINER_EXTRAS if any(container.get(extra) for container in containers)]
    if left_out:
        warnings.append(f"the payload has image, command, args and env; left out: {', '.join(dict.fromkeys(left_out))}")
    return payload


def _container(container: Members, warnings: list[str]) -> dict[str, Any]:
    described: dict[str, Any] = {}
    if container.text("name"):
        described["container"] = container.text("name")
    if container.text("image"):
        described["image"] = container.text("image")
    for name in ("command", "args"):
        if container.get(name) is not None:
            described[name] = container.texts(name)
    env, elsewhere = {}, []
    for number, value in enumerate(container.items("env")):
        variable = Members.of(value, f"{container.where('env')}[{number}]")
        if variable.get("valueFrom") is not None:
            elsewhere.append(variable.needed_text("name"))
        else:
            env[variable.needed_text("name")] = variable.text("value") or ""
    if env:
        described["env"] = env
    if elsewhere:
        warnings.append(f"env that comes from secrets, config maps or fields is left out: {', '.join(elsewhere)}")
    return described
