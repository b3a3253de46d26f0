"""Settings from file, environment and command line: what wins, and how faults are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from wheelsched.core.settings import Settings
from wheelsched.runtime.config import KEYS, SettingsError, data_dir, is_loopback, load_settings, parse_instant_ms, reference_yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "x.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def faults_of(path: Path | None, **sources: object) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(path, **{"environment": {}, **sources})  # type: ignore[arg-type]
    return [str(fault).rpartition("x.yaml:")[2] for fault in caught.value.faults]


def test_nothing_given_is_the_defaults() -> None:
    assert load_settings(None, environment={}) == Settings()


def test_reference_file_is_what_the_tree_generates() -> None:
    text = (ROOT / "conf/reference.yaml").read_text(encoding="utf-8")
    assert text == reference_yaml(), "run: wheelsched config reference > conf/reference.yaml"


def test_reference_read_back_is_the_defaults_and_names_every_key() -> None:
    assert load_settings(ROOT / "conf/reference.yaml", environment={}) == Settings()
    text = reference_yaml()
    assert all(f"  {name.split('.')[1]}: " in text for name in KEYS)
    assert all(key.description for key in KEYS.values())


def test_every_example_in_conf_is_good() -> None:
    for path in (ROOT / "conf").glob("*.yaml"):
        load_settings(path, environment={})


def test_later_sources_win(write) -> None:
    path = write("http: {port: 1001, drain_s: 7}\nnode: {id: a}\n")
    environment = {"WHEELSCHED_HTTP__PORT": "1002", "WHEELSCHED_NODE_ID": "b", "WHEELSCHED_URL": "http://x", "HTTP_PORT": "5"}
    settings = load_settings(path, environment=environment, overrides={"http.port": 1003})
    assert (settings.http.port, settings.http.drain_s, settings.node.id) == (1003, 7.0, "b")


def test_unknown_key_names_line_and_nearest(write) -> None:
    assert faults_of(write("http:\n  host: 127.0.0.1\n\n  prot: 8080\n")) == [
        "4: http.prot is not a setting; did you mean http.port?"
    ]


def test_unknown_section_is_named(write) -> None:
    assert faults_of(write("htp:\n  port: 1\n")) == ["1: htp is not a setting; did you mean http?"]


def test_all_faults_come_together_in_order_of_lines(write) -> None:
    text = "http:\n  port: 70000\n  host: 0.0.0.0\nscheduler:\n  horizon_s: -1\n  horizon: 2\nstore: {kind: disk}\n"
    found = faults_of(write(text), environment={"WHEELSCHED_CLUSTER__GROUP_COUNT": "33"})
    assert [line.split(":")[0] for line in found] == ["2", "3", "5", "6", "7", "environment WHEELSCHED_CLUSTER__GROUP_COUNT"]
    assert "http.port 70000 is above 65,535" in found[0]
    assert "auth.mode is none" in found[1]
    assert "scheduler.horizon_s -1 is not above 0" in found[2]
    assert "store.kind 'disk' is not one of rocksdb or memory" in found[4]
    assert "not a power of two; take 32 or 64" in found[5]


def test_duplicate_keys_are_refused(write) -> None:
    assert faults_of(write("http:\n  port: 1\n  port: 2\n")) == ["3: http.port stands here twice, first in line 2; remove one"]
    assert faults_of(write("node: {id: a}\nnode: {id: b}\n")) == ["2: node stands here twice, first in line 1; remove one"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("node: {id: !!python/name:os.system x}", "1: the tag"),
        ("http: &a {port: 1}\nlimits: *a", "1: anchors and aliases"),
        ("http: [1, 2]", "1: http must hold keys and values"),
        ("- http", "1: the file must hold keys and values"),
        ("http:\n  port: {a: 1}", "2: http.port takes one value, not a mapping"),
        ("http:\n  port: eighty", "2: http.port 'eighty' is not a whole number"),
        ("http:\n  port: 80.5", "2: http.port '80.5' is not a whole number"),
        ("http:\n  port:", "2: http.port '' is not a whole number"),
        ("scheduler:\n  horizon_s: .nan", "2: scheduler.horizon_s '.nan' is not a number"),
        ("scheduler:\n  horizon_s: nan", "2: scheduler.horizon_s nan is not a number"),
        ("node:\n  id: a b", "2: node.id 'a b' is not 1 to 128 of"),
        ("node:\n  data_dir: ''", "2: node.data_dir is empty"),
        ("http: {port: 1", "1: is not YAML"),
        ("http:\n\tport: 1", "2: is not YAML"),
    ],
)
def test_what_a_file_must_not_hold(write, text: str, told: str) -> None:
    assert faults_of(write(text))[0].startswith(told)


def test_texts_are_read_by_the_type_of_the_key(write) -> None:
    """YAML 1.1 would make a boolean of `no` and a date of the instant."""
    text = "node: {id: no}\nclock: {kind: virtual, start: 2026-11-01T00:00:00Z}\nscheduler: {ready_queue_max: 10_000}\nlogging:\n"
    settings = load_settings(write(text), environment={})
    assert settings.node.id == "no"
    assert settings.clock.start == "2026-11-01T00:00:00Z"
    assert settings.scheduler.ready_queue_max == 10_000


def test_missing_file_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "gone.yaml", environment={})


def test_mistyped_environment_variable_of_a_section_is_refused() -> None:
    assert faults_of(None, environment={"WHEELSCHED_HTTP__PROT": "1"}) == [
        "environment: WHEELSCHED_HTTP__PROT is not a setting; did you mean WHEELSCHED_HTTP__PORT?"
    ]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"clock.start": "2026-11-01T00:00:00Z"}, "set clock.kind to virtual"),
        ({"clock.kind": "virtual", "clock.start": "2026-11-01T00:00:00"}, "RFC 3339 instant with an offset"),
        ({"store.free_bytes_min": 1, "store.free_bytes_stop": 2}, "before it refuses"),
        ({"http.host": "example.org"}, "reachable from other machines"),
    ],
)
def test_values_that_contradict_each_other(overrides: dict[str, str], told: str) -> None:
    assert told in faults_of(None, overrides=overrides)[0]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_data_dir_stands_in_the_node_name() -> None:
    settings = load_settings(None, environment={}, overrides={"node.data_dir": "/var/lib/ws/{id}", "node.id": "n7"})
    assert data_dir(settings) == Path("/var/lib/ws/n7")


def test_instants() -> None:
    assert parse_instant_ms("2026-11-01T00:00:00.250Z") == 1_793_491_200_250
    assert parse_instant_ms("2026-11-01T02:00:00+02:00") == 1_793_491_200_000
    assert parse_instant_ms("2026-11-01") is None
