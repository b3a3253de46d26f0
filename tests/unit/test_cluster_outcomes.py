"""What a caller is told of a command whose answer was lost on the way from the leader."""

from __future__ import annotations

import pytest

from wheelsched.core.errors import OutcomeUnknown, Unavailable
from wheelsched.core.ids import group_of, keyed_job_id
from wheelsched.model.commands import Create
from wheelsched.model.rows import JobSpec, encode_spec
from wheelsched.node import cluster as face_module
from wheelsched.node.calls import PROPOSE
from wheelsched.testing.cluster import GROUP_COUNT, open_test_cluster

TENANT = "default"
SPEC = encode_spec(JobSpec())


@pytest.mark.parametrize("is_sent", [True, False], ids=("sent", "not sent"))
async def test_a_command_that_may_have_been_done_is_not_told_as_refused(is_sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A create with a key is proposed again, for a second one does no harm; but when nobody leads any more, the first may be there."""
    monkeypatch.setattr(face_module, "PATIENCE_MS", 200)
    async with open_test_cluster() as cluster:
        leader = cluster.leader_of(0)
        assert leader is not None
        face = cluster.face(next(node_id for node_id in cluster.nodes if node_id != leader))
        key = next(key for number in range(1_000) if group_of(keyed_job_id(TENANT, key := f"k-{number}"), GROUP_COUNT) == 0)
        create = Create(keyed_job_id(TENANT, key), TENANT, "q", 1, -1, 0, 0, 0, SPEC, b"1", b"f" * 16)
        request = face._request

        async def lose_answers(node: int, method: str, body: bytes, timeout_ms: int) -> bytes:
            if method != PROPOSE.name:
                return await request(node, method, body, timeout_ms)
            if not is_sent:
                raise Unavailable("not connected")
            await request(node, method, body, timeout_ms)
            raise OutcomeUnknown("the connection broke")

        face._request = lose_answers
        with pytest.raises(OutcomeUnknown if is_sent else Unavailable):
            await face.propose(create)
        face._request = request
        assert (await face.read_job(TENANT, create.job_id) is not None) is is_sent
