"""The rows of the conformance tables: one function of the core each, called and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wheelsched.raft import (
    Append,
    AppendResponse,
    Change,
    ChangeKind,
    Entry,
    EntryKind,
    Raft,
    RaftConfig,
    RestoredState,
    VoteRequest,
    VoteResponse,
    decode_configuration,
    make_configuration,
    make_entry,
)
from wheelsched.raft.configuration import Configuration, Refused, enter_joint, leave_joint, simple
from wheelsched.raft.leadership import Leadership
from wheelsched.raft.log import Log
from wheelsched.raft.progress import PeerState, Progress, Window
from wheelsched.raft.quorum import committed_index, vote_result
from wheelsched.testing.raft_world import Timeouts

Row = dict[str, Any]

CONFIG = RaftConfig(pre_vote=False, check_quorum=False, restart_grace=False, max_inflight=256)


def check_row(table: str, row: Row) -> None:
    """Raises AssertionError where the core differs from the row."""
    CHECKS[table](row)


def expect(found: object, wanted: object, what: str = "result") -> None:
    assert found == wanted, f"{what} is {found!r}, expected {wanted!r}"


def entries_of(terms: Sequence[int], first: int = 1) -> list[Entry]:
    return [make_entry(0, first + offset, term, EntryKind.EMPTY) for offset, term in enumerate(terms)]


def log_of(row: Row) -> Log:
    start_index, start_term = row.get("snapshot", (0, 0))
    return Log(start_index, start_term, entries_of(row["log"], start_index + 1))


def by_id(values: dict[str, Any]) -> dict[int, Any]:
    return {int(node_id): value for node_id, value in values.items()}


def quorum_commit(row: Row) -> None:
    voters, outgoing = sorted(row["voters"]), sorted(row["outgoing"])
    expect(committed_index(voters, outgoing, by_id(row["acked"])), row["committed"])
    if outgoing:
        expect(committed_index(outgoing, voters, by_id(row["acked"])), row["committed"], "halves exchanged")


def vote_result_row(row: Row) -> None:
    expect(vote_result(sorted(row["voters"]), sorted(row["outgoing"]), by_id(row["votes"])), row["result"])


def conf_change(row: Row) -> None:
    conf = Configuration()
    for step in row["steps"]:
        changes = [Change(ChangeKind(kind), node_id) for kind, node_id in step["changes"]]
        try:
            match step["how"]:
                case "simple":
                    after = simple(conf, changes)
                case "enter_joint":
                    after = enter_joint(conf, changes, auto_leave=step.get("auto_leave", False))
                case _:
                    after = leave_joint(conf)
        except Refused as error:
            expect(error.code, step.get("error"), "error")
            continue
        expect(None, step.get("error"), "error")
        conf = after
        expect(conf, conf_of(step["conf"]), "configuration")


def conf_of(fields: Row) -> Configuration:
    voters, others = fields.get("voters", ()), {key: value for key, value in fields.items() if key != "voters"}
    return make_configuration(voters, **others)


def conf_restore(row: Row) -> None:
    conf = conf_of(row["conf"])
    expect(decode_configuration(conf.encode()), conf)


def commit_rule(row: Row) -> None:
    """A leader of `term` with this log, of whose voters each acknowledged so much."""
    count, term = len(row["acked"]), row["term"]
    core = a_core(log=row["log"], term=term, commit=row["commit_before"], voters=range(1, count + 1))
    # In office without the empty entry that an election would append, and in a term that may be below that of its last entry.
    core.term = term
    office = core.leadership = Leadership(core)
    for peer_id, index in zip(range(1, count + 1), row["acked"], strict=True):
        office.peers[peer_id].match = index
    office.advance_commit()
    expect(core.commit, row["commit"], "commit")


def a_core(*, log: Sequence[int], term: int, commit: int = 0, vote: int = 0, voters: Sequence[int] = (1, 2, 3), node_id: int = 1) -> Raft:
    restored = RestoredState(make_configuration(voters), entries=entries_of(log), term=term, vote=vote, commit=commit, applied=commit)
    return Raft(node_id, CONFIG, restored, Timeouts("table"))


def up_to_date(row: Row) -> None:
    expect(log_of(row).is_up_to_date(*row["candidate"]), row["up_to_date"])


def vote_grant(row: Row) -> None:
    core = a_core(log=row["log"], term=row["term"], vote=row["voted_for"])
    last_index, last_term = row["candidate"]
    core.step(VoteRequest(0, row["from"], 1, row["term"], last_index, last_term))
    ready = core.take_ready()
    assert ready is not None
    granted = [not message.reject for message in ready.after if isinstance(message, VoteResponse)]
    expect(granted, [row["granted"]], "granted")


def find_conflict(row: Row) -> None:
    expect(log_of(row).find_conflict(entries_of(row["entries"], row["first"])), row["conflict_at"])


def hint_by_term(row: Row) -> None:
    expect(log_of(row).hint_by_term(*row["at"]), (row["hint_index"], row["hint_term"]))


def append_result(row: Row) -> None:
    prev_index, prev_term = row["prev"]
    term = max([*row["log"], *row["entries"], prev_term])
    core = a_core(log=row["log"], term=term, commit=row["commit_before"])
    entries = tuple(entries_of(row["entries"], prev_index + 1))
    core.step(Append(0, 2, 1, term, prev_index, prev_term, entries, row["leader_commit"]))
    ready = core.take_ready()
    assert ready is not None
    answer = ready.after[-1]
    assert isinstance(answer, AppendResponse)
    expect(not answer.reject, row["accepted"], "accepted")
    expect(core.commit, row["commit"], "commit")
    if "last_new" in row:
        expect(answer.index, row["last_new"], "last_new")


def log_append(row: Row) -> None:
    log = log_of(row)
    if row["entries"]:
        log.append(entries_of(row["entries"], row["first"]))
    log.check()
    expect([log.term(index) for index in range(1, log.last_index + 1)], row["log_after"], "log_after")
    expect(log.unwritten_from, row["first_undurable"], "first_undurable")


def a_progress(row: Row) -> Progress:
    progress = Progress(match=row["match"], next=row["next"], window=Window(256, 0))
    progress.state = PeerState(row.get("state", "probe"))
    progress.snapshot_index = row.get("pending_snapshot", 0)
    return progress


def progress_on_refusal(row: Row) -> None:
    progress = a_progress(row)
    expect(progress.refused(row["refused"], row["hint"]), row["accepted"], "accepted")
    expect(progress.next, row["next_after"], "next")


def progress_on_ack(row: Row) -> None:
    progress = a_progress(row)
    expect(progress.acknowledged(row["ack"]), row["updated"], "updated")
    expect((progress.match, progress.next), (row["match_after"], row["next_after"]), "match, next")


def progress_to_probe(row: Row) -> None:
    progress = a_progress(row)
    progress.probe()
    expect((progress.state, progress.next), (PeerState.PROBE, row["next_after"]), "state, next")


def inflight_window(row: Row) -> None:
    window = Window(row["max_messages"], row["max_bytes"])
    index = 0
    for full_after in (row["full_after"], row["full_again_after"]):
        while not window.is_full:
            window.add(index, row["first_size"] + index)
            index += 1
        expect(index, full_after, "messages until full")
        window.free_up_to(row["ack_up_to"])


CHECKS: dict[str, Callable[[Row], None]] = {
    "quorum_commit": quorum_commit, "vote_result": vote_result_row, "conf_change": conf_change, "conf_restore": conf_restore,
    "commit_rule": commit_rule, "up_to_date": up_to_date, "vote_grant": vote_grant, "find_conflict": find_conflict,
    "hint_by_term": hint_by_term, "append_result": append_result, "log_append": log_append,
    "progress_on_refusal": progress_on_refusal, "progress_on_ack": progress_on_ack, "progress_to_probe": progress_to_probe,
    "inflight_window": inflight_window,
}  # fmt: skip
