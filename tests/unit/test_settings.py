"""Settings from file, environment and command line: what wins, and how faults are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from wheelsched.core.settings import NodeAddress, Settings, TlsSettings, raft_id_of, raft_ids, shared_settings, split_address
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
    assert all(f"{'  ' * name.count('.')}{name.rpartition('.')[2]}: " in text for name in KEYS)
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
    assert faults_of(write("http:\n  host: 127.0.0.1\n\n  prot: 8080\n")) == ["4: http.prot is not a setting; did you mean http.port?"]


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


THREE = """
cluster:
  replication_factor: 3
  nodes:
    - {id: n1, http: "127.0.0.1:8081", peer: "127.0.0.1:7081"}
    - {id: n2, http: "127.0.0.1:8082", peer: "127.0.0.1:7082"}
    - id: n3
      http: "localhost:8083"
      peer: "[::1]:7083"
"""


def test_nodes_are_read_and_each_listens_where_the_others_are_told_it_is(write) -> None:
    settings = load_settings(write(THREE), environment={}, overrides={"node.id": "n3"})
    assert [node.id for node in settings.cluster.nodes] == ["n1", "n2", "n3"]
    assert settings.cluster.nodes[2] == NodeAddress(id="n3", http="localhost:8083", peer="[::1]:7083")
    assert (settings.http.host, settings.http.port) == ("localhost", 8083)


def test_a_http_address_that_is_given_wins_over_that_of_the_list(write) -> None:
    settings = load_settings(write(THREE), environment={}, overrides={"node.id": "n2", "http.port": 9})
    assert (settings.http.host, settings.http.port) == ("127.0.0.1", 9)


def test_nodes_can_come_from_one_environment_variable() -> None:
    text = "[{id: n1, http: '127.0.0.1:8081', peer: '127.0.0.1:7081'}]"
    environment = {
        "WHEELSCHED_CLUSTER__NODES": text,
        "WHEELSCHED_CLUSTER_REPLICATION_FACTOR": "1",
        "WHEELSCHED_CLUSTER__TLS__CERT_FILE": "",
    }
    settings = load_settings(None, environment=environment)
    assert settings.cluster.nodes == (NodeAddress(id="n1", http="127.0.0.1:8081", peer="127.0.0.1:7081"),)
    assert load_settings(None, environment={"WHEELSCHED_CLUSTER__NODES": ""}) == Settings()
    told = faults_of(None, environment={"WHEELSCHED_CLUSTER__NODES": "[{id: n1"})
    assert told == ["environment WHEELSCHED_CLUSTER__NODES: cluster.nodes is not YAML; write it in one line, like [{id: n1, …}, …]"]
    told = faults_of(None, environment={"WHEELSCHED_CLUSTER__NODES": "[{id: n1}]"})
    assert told == ["environment WHEELSCHED_CLUSTER__NODES: cluster.nodes[0] lacks http and peer; it needs id, http, peer"]


def test_nested_section_is_read(write) -> None:
    text = "cluster:\n  tls:\n    cert_file: a.pem\n    key_file: b.pem\n    ca_file: c.pem\n"
    assert load_settings(write(text), environment={}).cluster.tls == TlsSettings(cert_file="a.pem", key_file="b.pem", ca_file="c.pem")
    assert faults_of(write("cluster:\n  tls:\n    cert: a.pem\n"))[0].startswith(
        "3: cluster.tls.cert is not a setting; did you mean cluster.tls.cert_file?"
    )
    assert faults_of(write("cluster:\n  tls: on\n"))[0].startswith("2: cluster.tls must hold keys and values")


N1 = '{id: n1, http: "127.0.0.1:8081", peer: "127.0.0.1:7081"}'


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ("n1", "4: cluster.nodes takes a list of {id: …, http: …, peer: …}, not a scalar"),
        ("[n1]", "4: cluster.nodes[0] must hold keys and values"),
        ('[{id: n1, http: "127.0.0.1:8081"}]', "4: cluster.nodes[0] lacks peer; it needs id, http, peer"),
        ('[{id: n1, htp: "127.0.0.1:8081"}]', "4: cluster.nodes[0].htp is not a setting; did you mean http?"),
        ('[{id: n1, http: "127.0.0.1", peer: "127.0.0.1:7081"}]', "4: cluster.nodes[0].http '127.0.0.1' is not host:port"),
        ('[{id: n 1, http: "127.0.0.1:1", peer: "127.0.0.1:7081"}]', "4: cluster.nodes[0].id 'n 1' is not 1 to 128 of"),
        ('[{id: n1, http: "127.0.0.1:0", peer: "127.0.0.1:7081"}]', "4: cluster.nodes[0].http 127.0.0.1:0 has no port that others"),
        ('[{id: n1, http: "127.0.0.1:7", peer: "127.0.0.1:70000"}]', "4: cluster.nodes[0].peer 127.0.0.1:70000 has no port that others"),
        ('[{id: n1, http: "127.0.0.1:7", peer: "127.0.0.1:7"}]', "4: cluster.nodes[0].peer 127.0.0.1:7 is already cluster.nodes[0].http"),
        (f'[{N1},\n   {{id: n1, http: "127.0.0.1:1", peer: "127.0.0.1:2"}}]', "5: cluster.nodes[1].id n1 stands here twice"),
        ('[{id: n2, http: "127.0.0.1:1", peer: "127.0.0.1:2"}]', "node.id n1 is not among cluster.nodes (n2); say which one"),
    ],
)
def test_faults_in_nodes_are_told_with_line_and_way_out(write, nodes: str, told: str) -> None:
    found = faults_of(write(f"cluster:\n  name: x\n  replication_factor: 1\n  nodes: {nodes}\n"))
    assert len(found) == 1 and told in found[0], found


@pytest.mark.parametrize(
    ("factor", "told"),
    [("4", "is above the 3 of cluster.nodes; set it to 3"), ("2", "survives no more failures than 1; take 1 or 3"), ("8", "is above 7")],
)
def test_replication_factor_fits_the_nodes(write, factor: str, told: str) -> None:
    assert told in faults_of(write(THREE), overrides={"cluster.replication_factor": factor})[0]


def test_tls_needs_all_three_files() -> None:
    told = "cluster.tls.key_file and cluster.tls.ca_file are empty; mutual TLS needs all three files"
    assert told in faults_of(None, overrides={"cluster.tls.cert_file": "a.pem"})[0]


def test_a_cluster_reachable_without_authentication_is_refused(write) -> None:
    text = 'cluster:\n  replication_factor: 1\n  nodes: [{id: n1, http: "10.0.0.1:8080", peer: "10.0.0.1:7080"}]\n'
    assert "http.host 10.0.0.1 is reachable from other machines" in faults_of(write(text))[0]


def test_raft_ids_are_stable_and_collisions_are_refused() -> None:
    """Pinned: the number stands in votes on disk."""
    assert raft_ids(["n1", "n2"]) == {"n1": 5_274_454_431_591_333_430, "n2": 14_103_913_120_232_401_630}
    assert raft_id_of("n1") > 0
    with pytest.raises(ValueError, match="n2 and n1 have the same raft id 7; give n2 another id"):
        raft_ids(["n1", "n2"], id_of=lambda _: 7)


def test_shared_settings_leave_out_what_is_each_nodes_own(write) -> None:
    one = load_settings(write(THREE), environment={}, overrides={"node.id": "n1", "cluster.secret_file": "a"})
    two = load_settings(write(THREE), environment={}, overrides={"node.id": "n2", "cluster.secret_file": "b", "http.port": 1})
    assert shared_settings(one) == shared_settings(two)
    three = load_settings(write(THREE), environment={}, overrides={"limits.payload_bytes": 7})
    assert shared_settings(one).items() ^ shared_settings(three).items() == {
        ("limits.payload_bytes", "7"),
        ("limits.payload_bytes", "65536"),
    }


def test_addresses() -> None:
    assert split_address("n1.example.org:7080") == ("n1.example.org", 7080)
    assert split_address("[fd00::1]:7080") == ("fd00::1", 7080)
