"""`wheelsched import …`: what is printed, what is sent, and exit codes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from imports_reference import NOW_MS, the_settings
from test_cli import FakeNode

from wheelsched.cli import imports
from wheelsched.cli.imports import next_runs_text, put_schedules
from wheelsched.cli.main import main
from wheelsched.client.types import Runs
from wheelsched.core.errors import InvalidSchedule, Unavailable, WheelschedError
from wheelsched.imports import read_crontab
from wheelsched.imports.times import parse_instant

Call = Callable[..., tuple[int, str, str]]

CRONTAB = """\
CRON_TZ=UTC
30 3 * * * /bin/backup
*/10 * * * * /bin/sweep
@reboot /bin/agent
"""


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Run a command as the console script does, on 2026-11-05: (exit code, stdout, stderr)."""
    monkeypatch.delenv("WHEELSCHED_URL", raising=False)
    monkeypatch.setattr(imports, "_now_ms", lambda: NOW_MS)
    handlers = logging.root.handlers[:]

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["import", *(str(argument) for argument in arguments)])
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    yield call
    logging.root.handlers[:] = handlers


@pytest.fixture
def crontab(tmp_path: Path) -> Path:
    file = tmp_path / "crontab.txt"
    file.write_text(CRONTAB)
    return file


class FakeClient:
    """Keeps what was put. `fails`: name -> what is raised instead."""

    def __init__(self) -> None:
        self.specs: dict[str, Mapping[str, Any]] = {}
        self.fails: dict[str, WheelschedError] = {}
        self.pages: dict[str, list[dict[str, Any]]] = {}

    async def put_schedule(self, name: str, spec: Mapping[str, Any], /) -> dict[str, Any]:
        if name in self.fails:
            raise self.fails[name]
        self.specs[name] = spec
        return {"name": name, "version": 1, **spec}

    async def schedule_runs(self, name: str, /, *, limit: int | None = None, cursor: str | None = None) -> Runs:
        pages = self.pages.get(name, [])
        index = int(cursor or 0)
        following = str(index + 1) if index + 1 < len(pages) else None
        page = pages[index] if pages else {"skipped": []}
        return msgspec.convert({"jobs": [], **page, "next_cursor": following}, Runs)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()

    @asynccontextmanager
    async def make(url: str) -> Any:
        yield fake

    def make_client(url: str) -> AbstractAsyncContextManager[FakeClient]:
        return make(url)

    monkeypatch.setattr(imports, "make_client", make_client)
    return fake


def test_the_plan_is_told_and_nothing_is_created(call: Call, client: FakeClient, crontab: Path) -> None:
    code, out, _ = call("crontab", crontab)
    assert code == 0 and not client.specs
    assert "2026-11-06 03:30, 11-07 03:30, 11-08 03:30" in out and "2026-11-05 09:10, 09:20" in out
    assert "problem: line 4: @reboot is not a time" in out
    assert "2 schedules, 1 problem" in out and "nothing was created; --apply creates them" in out


def test_json_is_one_document(call: Call, crontab: Path) -> None:
    code, out, _ = call("crontab", crontab, "--json", "--shadow", "--queue", "ops", "--prefix", "web1-", "--zone", "Europe/Berlin")
    plan = json.loads(out)
    assert code == 0 and plan["source"] == "crontab"
    assert [schedule["name"].rpartition("-")[0] for schedule in plan["schedules"]] == ["web1-backup", "web1-sweep"]
    assert all(schedule["spec"]["shadow"] and schedule["spec"]["job_template"]["queue"] == "ops" for schedule in plan["schedules"])
    assert plan["problems"][0]["place"] == "line 4" and plan["problems"][0]["remedy"]


def test_strict_exits_with_1_and_creates_nothing(call: Call, client: FakeClient, crontab: Path) -> None:
    code, out, _ = call("crontab", crontab, "--strict", "--apply")
    assert code == 1 and not client.specs and "nothing was created: --strict" in out
    crontab.write_text("1 2 * * * x\n")
    assert call("crontab", crontab, "--strict", "--apply")[0] == 0 and client.specs


def test_apply_puts_each_schedule_and_twice_the_same(call: Call, client: FakeClient, crontab: Path) -> None:
    code, out, _ = call("crontab", crontab, "--apply", "--shadow", "--url", "http://127.0.0.1:9")
    assert code == 0 and "2 schedules put at http://127.0.0.1:9 in shadow mode" in out
    first = dict(client.specs)
    assert [spec["shadow"] for spec in first.values()] == [True, True]
    code, out, _ = call("crontab", crontab, "--apply", "--json")
    assert [one["name"] for one in json.loads(out)["applied"]] == sorted(first)
    assert {name: {**spec, "shadow": True} for name, spec in client.specs.items()} == first
    assert "stop the old scheduler" in call("crontab", crontab, "--apply")[1]


async def test_one_that_is_refused_leaves_the_others() -> None:
    schedules = read_crontab("".join(f"1 2 * * * x{number}\n" for number in range(50)), the_settings()).schedules
    client, steps = FakeClient(), []
    client.fails[schedules[7].name] = InvalidSchedule("no such thing")
    outcome = await put_schedules(client, schedules, shadow=False, advance=lambda: steps.append(1))
    assert len(client.specs) == 49 and len(steps) == 50
    assert [(name, error.detail) for name, error in outcome.refused] == [(schedules[7].name, "no such thing")]


def test_refusals_are_told_with_exit_code_1(call: Call, client: FakeClient, crontab: Path) -> None:
    name = json.loads(call("crontab", crontab, "--json")[1])["schedules"][0]["name"]
    client.fails[name] = InvalidSchedule("no such thing", errors=[{"pointer": "/cron", "detail": "x"}])
    code, out, _ = call("crontab", crontab, "--apply")
    assert code == 1 and f"refused: {name}: no such thing" in out and "1 schedule put" in out
    code, out, _ = call("crontab", crontab, "--apply", "--json")
    assert code == 1 and json.loads(out)["refused"] == [
        {"name": name, "problem": {"code": "invalid-schedule", "detail": "no such thing", "errors": [{"pointer": "/cron", "detail": "x"}]}}
    ]


def test_a_node_that_goes_away_ends_it_with_exit_code_5(call: Call, client: FakeClient, crontab: Path) -> None:
    crontab.write_text("".join(f"1 2 * * * x{number}\n" for number in range(100)))
    names = [schedule["name"] for schedule in json.loads(call("crontab", crontab, "--json")[1])["schedules"]]
    client.fails = {name: Unavailable("no quorum") for name in names[20:]}
    code, _, err = call("crontab", crontab, "--apply")
    assert code == 5 and "20 of 100 schedules were put, then: no quorum; repeat the command" in err
    assert len(client.specs) == 20


def test_apply_over_http(call: Call, crontab: Path) -> None:
    fake = FakeNode()
    try:
        crontab.write_text("30 3 * * * /bin/backup\n")
        (schedule,) = json.loads(call("crontab", crontab, "--json")[1])["schedules"]
        path = f"/v1/schedules/{schedule['name']}"
        fake.answers["PUT", path] = (200, {"name": schedule["name"], "version": 3})
        code, out, _ = call("crontab", crontab, "--apply", "--json", "--url", fake.url)
        assert code == 0 and json.loads(out)["applied"] == [{"name": schedule["name"], "version": 3}]
        assert fake.asked[0][:3] == ("PUT", path, schedule["spec"])
        fake.answers["PUT", path] = (400, {"code": "invalid-schedule", "status": 400, "detail": "no"})
        assert call("crontab", crontab, "--apply", "--url", fake.url)[0] == 1
    finally:
        fake.close()


def test_the_other_sources(call: Call, tmp_path: Path) -> None:
    beat = tmp_path / "celery.py"
    beat.write_text('timezone = "UTC"\nbeat_schedule = {"a": {"task": "t", "schedule": crontab(minute=7)}}\n')
    assert json.loads(call("celery-beat", beat, "--json")[1])["schedules"][0]["spec"]["cron"] == "7 * * * *"
    rules = tmp_path / "rules.json"
    rules.write_text('{"Rules": [{"Name": "a", "ScheduleExpression": "rate(1 hour)", "State": "ENABLED"}]}')
    assert "every 3600 s" in call("eventbridge", rules)[1]
    jobs = tmp_path / "jobs.yaml"
    containers = "{spec: {template: {spec: {containers: [{image: x}]}}}}"
    jobs.write_text(f"kind: CronJob\nmetadata: {{name: a}}\nspec:\n  schedule: 7 * * * *\n  jobTemplate: {containers}\n")
    assert "7 * * * *" in call("k8s-cronjob", jobs)[1]


def test_a_path_of_the_system_is_read_with_users(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "cron.d"
    folder.mkdir()
    file = folder / "backup"
    file.write_text("1 2 * * * ada /bin/x\n")
    assert json.loads(call("crontab", file, "--json")[1])["schedules"][0]["spec"]["job_template"]["payload"]["user"] == "ada"
    found = json.loads(call("crontab", file, "--json", "--user-format")[1])["schedules"][0]["spec"]["job_template"]["payload"]
    assert found == {"command": "ada /bin/x"}


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("crontab", "{tmp}/none"), 2, "cannot be read: No such file"),
        (("crontab", "{tmp}/latin1"), 2, "byte 0 is not UTF-8"),
        (("eventbridge", "{tmp}/broken"), 2, "line 1, column 2: not JSON"),
        (("crontab", "{tmp}/broken", "--zone", "Mars"), 2, "time zone 'Mars' is not a name"),
        (("crontab", "{tmp}/broken", "--queue", "a b"), 2, "'a b' is not a name"),
        (("crontab", "{tmp}/broken", "--prefix", "-"), 2, "'-' is not a name"),
        (("crontab", "{tmp}/broken", "--prefix", "a" * 65), 2, "65 characters, 64 are allowed"),
        (("diff", "--log", "{tmp}/log", "{tmp}/broken"), 2, "broken is not JSON"),
        (("diff", "--log", "{tmp}/broken", "{tmp}/plan"), 2, "broken: line 1: not JSON"),
        (("diff", "--log", "{tmp}/log", "{tmp}/plan"), 2, "has no run; give --from and --to"),
        (("diff", "--log", "{tmp}/log", "--from", "soon", "{tmp}/plan"), 2, "--from 'soon' is not an instant"),
        (
            ("diff", "--log", "{tmp}/log", "--from", "2026-11-01T00:00:00Z", "--to", "2026-11-01T00:00:00Z", "{tmp}/plan"),
            2,
            "--from is not before --to",
        ),
    ],
)
def test_what_is_wrong_is_told(call: Call, tmp_path: Path, arguments: tuple[str, ...], code: int, what: str) -> None:
    (tmp_path / "latin1").write_bytes(b"\xe9")
    (tmp_path / "broken").write_text("{")
    (tmp_path / "log").write_text("name,time\n")
    (tmp_path / "plan").write_text('{"schedules": []}')
    found, _, err = call(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert found == code and what in " ".join(err.split())


def test_diff_compares_a_plan_with_a_log(call: Call, crontab: Path, tmp_path: Path) -> None:
    plan, log = tmp_path / "plan.json", tmp_path / "syslog"
    plan.write_text(call("crontab", crontab, "--json")[1])
    lines = [f"Nov  5 03:{minute}0:01 h CRON[1]: (ada) CMD (/bin/sweep)" for minute in range(6)]
    log.write_text("\n".join([*lines, "Nov  5 03:30:01 h CRON[1]: (ada) CMD (/bin/backup)"]))
    assert call("diff", "--log", log, plan)[:2][0] == 0
    log.write_text("\n".join([*lines[:2], *lines[3:], "Nov  5 03:31:01 h CRON[1]: (ada) CMD (/bin/other)"]))
    code, out, _ = call("diff", "--log", log, plan)
    assert code == 1 and "2026-11-05T03:20:00Z" in out and "not in the plan: /bin/other (1 run)" in out
    assert "2 planned runs are missing from the log, 0 runs of the log were not planned" in out
    code, out, _ = call("diff", "--log", log, "--json", plan)
    found = json.loads(out)
    assert (code, found["agrees"], found["from"], found["to"]) == (1, False, "2026-11-05T03:00:00Z", "2026-11-05T03:50:01.001Z")
    assert [(one["matched"], one["missing"]) for one in found["schedules"]] == [
        (0, ["2026-11-05T03:30:00Z"]),
        (5, ["2026-11-05T03:20:00Z"]),
    ]


def test_diff_can_take_what_a_node_recorded(call: Call, client: FakeClient, crontab: Path, tmp_path: Path) -> None:
    """Stretches of several pages, a run that has a job, and the next one, which has not come yet."""
    plan, log = tmp_path / "plan.json", tmp_path / "log.csv"
    plan.write_text(call("crontab", crontab, "--json")[1])
    names = [schedule["name"] for schedule in json.loads(plan.read_text())["schedules"]]
    log.write_text("name,time\n" + "".join(f"/bin/sweep,2026-11-05T03:{minute}0:02Z\n" for minute in range(6)))

    def job(at: str, status: str) -> dict[str, Any]:
        return {"job_id": "job_1", "queue": "cron", "status": status, "fire_at": at, "scheduled_for": at}

    def skipped(first: str, last: str, count: int, reason: str = "shadow") -> dict[str, Any]:
        return {"from": f"2026-11-05T{first}:00Z", "to": f"2026-11-05T{last}:00Z", "count": count, "reason": reason}

    client.pages[names[1]] = [
        {
            "jobs": [job("2026-11-05T03:50:00Z", "SCHEDULED"), job("2026-11-05T03:40:00Z", "SUCCEEDED")],
            "skipped": [skipped("03:20", "03:20", 1)],
        },
        {"skipped": [skipped("02:50", "03:10", 3), skipped("01:00", "02:00", 7, "missed")]},
    ]
    code, out, _ = call("diff", "--log", log, "--recorded", "--json", plan)
    backup, sweep = json.loads(out)["schedules"]
    assert code == 1 and backup["missing"] == []
    assert (sweep["matched"], sweep["missing"]) == (4, []) and sweep["extra"] == ["2026-11-05T03:30:02Z", "2026-11-05T03:50:02Z"]
    client.pages[names[1]] = [{"skipped": [skipped("03:00", "03:50", 5)]}]
    code, _, err = call("diff", "--log", log, "--recorded", plan)
    assert code == 2 and "the node recorded 5 runs" in err and "the plan has 6 there" in err


def test_runs_are_told_without_what_they_share() -> None:
    def told(*times: str) -> str:
        return next_runs_text([parse_instant(time) for time in times])

    assert told("2026-12-31T23:30:00Z", "2027-01-01T00:30:00Z", "2027-01-02T00:30:00Z") == "2026-12-31 23:30, 2027-01-01 00:30, 01-02 00:30"
    assert told("2026-12-31T23:30:00.250Z", "2026-12-31T23:31:00Z") == "2026-12-31 23:30:00.250, 23:31:00"
    assert told() == ""


def test_the_example_of_the_page_is_what_is_printed(call: Call, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "importing.md").read_text(encoding="utf-8")
    crontab = page.partition("```crontab\n")[2].partition("```")[0]
    file = tmp_path / "shop.cron"
    file.write_text(crontab)
    printed = "\n".join(line.rstrip() for line in call("crontab", file)[1].splitlines())
    assert printed == page.partition("```text\n")[2].partition("\n```")[0]


def test_the_json_of_the_page_is_a_beat_schedule(call: Call, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "importing.md").read_text(encoding="utf-8")
    file = tmp_path / "beat.json"
    file.write_text(page.partition("```json\n")[2].partition("```")[0])
    assert [schedule["spec"].get("cron") for schedule in json.loads(call("celery-beat", file, "--json")[1])["schedules"]] == [
        "30 7 * * MON",
        None,
    ]
