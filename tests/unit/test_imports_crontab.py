"""Crontabs: what is read, what is refused, and names that stay the same."""

from __future__ import annotations

from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st
from imports_reference import only, ours, refusal, sunday_0, the_settings, theirs

from wheelsched.imports import read_crontab
from wheelsched.imports.crontab import command_slug, split_percent

DEBIAN = """\
# /etc/crontab: system-wide crontab
SHELL=/bin/sh
PATH=/usr/local/sbin:/usr/local/bin:/sbin:/bin:/usr/sbin:/usr/bin

# .---------------- minute (0 - 59)
# |  .------------- hour (0 - 23)
# *  *  *  *  * user-name command to be executed
17 *\t* * *\troot\tcd / && run-parts --report /etc/cron.hourly
25 6\t* * *\troot\ttest -x /usr/sbin/anacron || { cd / && run-parts --report /etc/cron.daily; }
47 6\t* * 7\troot\ttest -x /usr/sbin/anacron || { cd / && run-parts --report /etc/cron.weekly; }
#
"""


def test_a_debian_crontab_is_read_with_its_users_and_variables() -> None:
    plan = read_crontab(DEBIAN, the_settings())
    assert not plan.problems
    assert [(schedule.cron, schedule.place) for schedule in plan.schedules] == [
        ("17 * * * *", "line 8"),
        ("25 6 * * *", "line 9"),
        ("47 6 * * 7", "line 10"),
    ]
    first = plan.schedules[0]
    assert first.name.startswith("run-parts-cron.hourly-")
    assert first.spec() == {
        "cron": "17 * * * *",
        "time_zone": "UTC",
        "missed_runs": {"policy": "skip"},
        "job_template": {
            "queue": "cron",
            "payload": {
                "command": "cd / && run-parts --report /etc/cron.hourly",
                "user": "root",
                "env": {"SHELL": "/bin/sh", "PATH": "/usr/local/sbin:/usr/local/bin:/sbin:/bin:/usr/sbin:/usr/bin"},
            },
            "retry": {"max_attempts": 1},
            "timeout_s": 43_200,
        },
    }
    assert any("read as a system crontab" in note.what for note in plan.notes)
    assert any("UTC is assumed" in note.what for note in plan.notes)


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("0 5 * * * root /usr/bin/true\n0 6 * * * www-data /usr/bin/true\n", "root"),
        ("0 5 * * * root /usr/bin/true\n0 6 * * * /usr/bin/true\n", None),
        ("0 5 * * * php /srv/shop/run.php\n", None),
        ("# m h dom mon dow user command\n0 5 * * * backup /bin/x\n", "backup"),
        ("0 5 * * * root\n", None),
    ],
)
def test_the_format_is_judged_from_the_text(text: str, user: str | None) -> None:
    assert read_crontab(text, the_settings()).schedules[0].job_template["payload"].get("user") == user


def test_the_format_can_be_said() -> None:
    line = "0 5 * * * root /usr/bin/true\n"
    assert only(read_crontab(line, the_settings(), system=False)).job_template["payload"] == {"command": "root /usr/bin/true"}
    assert only(read_crontab("0 5 * * * php x\n", the_settings(), system=True)).job_template["payload"]["user"] == "php"
    assert "no user and command" in refusal(read_crontab("0 5 * * * php\n", the_settings(), system=True))


def test_zones_apply_from_their_line_on() -> None:
    text = "1 5 * * * a\nCRON_TZ=Europe/Berlin\n2 5 * * * b\nTZ=Asia/Tokyo\n3 5 * * * c\nCRON_TZ=\nTZ=:Asia/Tokyo\n4 5 * * * d\n"
    plan = read_crontab(text, the_settings(zone="America/New_York"))
    assert [schedule.time_zone for schedule in plan.schedules] == ["America/New_York", "Europe/Berlin", "Europe/Berlin", "Asia/Tokyo"]
    assert plan.schedules[2].job_template["payload"]["env"] == {"TZ": "Asia/Tokyo"}
    assert any("TZ=Asia/Tokyo moves the schedule in some crons" in text for text in plan.schedules[3].warnings)
    assert not any("is assumed" in note.what for note in plan.notes)


def test_a_zone_that_is_none_is_told_at_each_line_it_spoils() -> None:
    plan = read_crontab("CRON_TZ=Europe/Berln\n0 5 * * * a\n", the_settings())
    told = refusal(plan)
    assert told.startswith("line 2: ") and "Europe/Berln" in told and "did you mean Europe/Berlin?" in told


@pytest.mark.parametrize(
    ("written", "name", "value"),
    [
        ("A=b c", "A", "b c"),
        ('A = "b c"  ', "A", "b c"),
        ("'A B'= 'b' ", "A B", "b"),
        ("A=", "A", ""),
        ('A="b', "A", '"b'),
    ],
)
def test_variables_are_kept_for_the_command(written: str, name: str, value: str) -> None:
    assert only(read_crontab(f"{written}\n1 2 * * * x\n", the_settings())).job_template["payload"]["env"] == {name: value}


def test_mail_variables_are_told_and_not_kept() -> None:
    plan = read_crontab('MAILTO="ada@example.com"\n1 2 * * * x\n', the_settings())
    assert "env" not in only(plan).job_template["payload"]
    assert any(note.place == "line 1" and "MAILTO" in note.what for note in plan.notes)


def test_a_random_delay_becomes_jitter() -> None:
    plan = read_crontab("1 2 * * * a\nRANDOM_DELAY=45\n1 2 * * * b\n", the_settings())
    assert [schedule.spec().get("jitter_s") for schedule in plan.schedules] == [None, 2_700]
    assert "RANDOM_DELAY=soon is not a number" in str(read_crontab("RANDOM_DELAY=soon\n", the_settings()).problems[0])
    assert "jitter_s would be 90000" in refusal(read_crontab("RANDOM_DELAY=1500\n1 2 * * * b\n", the_settings()))


@pytest.mark.parametrize(
    ("text", "command", "stdin"),
    [
        ("date +\\%F", "date +%F", None),
        ("mail ada%Hello%World", "mail ada", "Hello\nWorld\n"),
        ("cat %", "cat", "\n"),
        ("cat%a\\%b%", "cat", "a%b\n"),
        ("echo \\\\", "echo \\\\", None),
    ],
)
def test_percent_signs_end_the_command(text: str, command: str, stdin: str | None) -> None:
    assert split_percent(text) == (command, stdin)
    payload = only(read_crontab(f"1 2 * * * {text}\n", the_settings())).job_template["payload"]
    assert payload == {"command": command} | ({} if stdin is None else {"stdin": stdin})


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("@reboot /bin/x", "@reboot is not a time, no schedule can do it; start the command from the machine's init system"),
        ("@every_minute /bin/x", "create one with every_s and overlap forbid"),
        ("@600 /bin/x", "create one with every_s and overlap forbid"),
        ("@fortnightly /bin/x", "@fortnightly is not a macro of cron's"),
        ("* * * *", "no command"),
        ("5", "has 1 of five time fields"),
        ("* * * * *", "has no command"),
        ("@daily", "has no command"),
        ("0 24 * * * x", "hour 24 is out of range 0-23"),
        ("0 22-2 * * * x", "runs backwards (22 is above 2); write 22-23,0-2"),
        ("~ 5 * * * x", "random time; write H(0-59)"),
        ("0~30 5 * * * x", "random time; write H(0-30)"),
        ("H 5 * * * x", "minute 'H' is not cron's"),
        ("0 5 L * * x", "day of month 'L' is not cron's"),
        ("0 5 * * MON#2 x", "'MON#2' is not a value"),
        ("0 5 ? * * x", "day of month '?' is not cron's"),
        ("0 5 1, * * x", "empty item"),
        ("0 5 1- * * x", "not complete"),
        ("0 0 31 2 * x", "never comes"),
        ("0 5 * * * %x", "no command before the first %"),
    ],
)
def test_what_cannot_be_taken_over_names_its_line_and_a_way_out(line: str, what: str) -> None:
    told = refusal(read_crontab(f"# a comment\n{line}\n", the_settings()))
    assert told.startswith("line 2: ") and what in told
    assert ";" in told


def test_a_bad_line_leaves_the_others() -> None:
    plan = read_crontab("@reboot a\n1 2 * * * b\n0 99 * * * c\n  3 4 * * * d\n", the_settings())
    assert [schedule.source_name for schedule in plan.schedules] == ["b", "d"]
    assert [problem.place for problem in plan.problems] == ["line 1", "line 3"]


@pytest.mark.parametrize("macro", ["@hourly", "@Daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually"])
def test_macros_stay(macro: str) -> None:
    assert only(read_crontab(f"{macro} x\n", the_settings())).cron == macro.lower()


def test_cronie_and_bsd_marks_are_dropped_and_told() -> None:
    schedule = only(read_crontab("-*/5 * * * * -n -q /bin/x\n", the_settings()))
    assert (schedule.cron, schedule.source_name) == ("*/5 * * * *", "/bin/x")
    assert len([text for text in schedule.warnings if "dropped" in text]) == 2


def test_crlf_and_a_last_line_without_an_end_are_read() -> None:
    assert only(read_crontab("# x\r\n1 2 * * * /bin/x\r\n", the_settings())).source_name == "/bin/x"
    assert only(read_crontab("1 2 * * * /bin/x", the_settings())).source_name == "/bin/x"


DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


@given(
    first=st.integers(0, 7), last=st.integers(0, 7), step=st.integers(1, 8), names=st.booleans(),
    day=st.sampled_from(["*", "*/2", "1-15", "13"]), other=st.none() | st.integers(0, 7),
)  # fmt: skip
def test_weekday_ranges_are_the_same_days_as_crons(first: int, last: int, step: int, names: bool, day: str, other: int | None) -> None:
    """Also those that end at Sunday or go on past it; both day fields count unless one begins with a star."""
    text = f"{DAYS[first]}-{DAYS[last]}" if names and max(first, last) < 7 else f"{first}-{last}"
    low = first if first <= last else first % 7
    high = last if low <= last else last + 7
    weekdays = {number % 7 for number in range(low, high + 1)[::step]}
    if other is not None:
        text, weekdays = f"{text}/{step},{other}", weekdays | {other % 7}
    else:
        text = f"{text}/{step}"
    days = {"*": set(range(1, 32)), "*/2": set(range(1, 32, 2)), "1-15": set(range(1, 16)), "13": {13}}[day]

    def matches(one: date) -> bool:
        found = (one.day in days, sunday_0(one) in weekdays)
        return all(found) if day.startswith("*") else any(found)

    schedule = only(read_crontab(f"30 4 {day} * {text} x\n", the_settings()))
    assert ours(schedule) == theirs({30}, {4}, matches)


# Names


def names(text: str, **settings: object) -> list[str]:
    return [schedule.name for schedule in read_crontab(text, the_settings(**settings)).schedules]


def test_names_come_from_the_command_and_do_not_change_with_time_or_place() -> None:
    (name,) = names("0 5 * * * /usr/bin/php /srv/shop/artisan schedule:run >> /dev/null 2>&1\n")
    assert name.startswith("php-artisan-schedule-run-")
    moved = names("MAILTO=x\n\n1 2 * * * /bin/other\n7 3 1 * * /usr/bin/php /srv/shop/artisan schedule:run >> /dev/null 2>&1\n")
    assert moved[1] == name
    assert names("0 5 * * * /usr/bin/php /srv/shop/artisan schedule:run\n") != [name]


def test_equal_commands_are_numbered_and_told_apart_by_user() -> None:
    found = names("0 5 * * * /bin/x\n0 6 * * * /bin/x\n0 7 * * * /bin/x\n")
    assert found == [found[0], f"{found[0]}-2", f"{found[0]}-3"]
    both = names("0 5 * * * root /bin/x\n0 5 * * * ada /bin/x\n", prefix="web1-")
    assert len(set(both)) == 2 and all(name.startswith("web1-x-") for name in both)


@pytest.mark.parametrize(
    ("command", "slug"),
    [
        ("/usr/local/bin/backup.sh --all", "backup.sh"),
        ("cd /srv/shop && ./manage.py cleanup --days 30", "manage.py-cleanup-30"),
        ("test -x /usr/sbin/anacron || ( cd / && run-parts --report /etc/cron.daily )", "run-parts-cron.daily"),
        ("[ -d /x ] && find /x -delete 2>/dev/null", "find-x"),
        ("FOO=1 BAR=2 /bin/a b", "a-b"),
        ("日本", ""),
        ("a" * 100, "a" * 48),
    ],
)
def test_slugs_are_what_a_person_knows_the_command_by(command: str, slug: str) -> None:
    assert command_slug(command) == slug


@given(st.text(st.characters(exclude_characters="\n%", exclude_categories=("Cs",)), min_size=1))
def test_every_command_gets_a_name_that_is_one(command: str) -> None:
    if not command.strip():
        return
    plan = read_crontab(f"1 2 * * * x{command}\n", the_settings(prefix="p" * 64), system=False)
    assert len(plan.schedules) == 1, plan.problems


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    first, second = (read_crontab(text, the_settings()) for _ in range(2))
    assert first == second
