"""Cursors: where a listing goes on, opaque, url-safe, and good for the listing that gave them only."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final

from wheelsched.api.bodies import shown
from wheelsched.api.problem import invalid
from wheelsched.core.errors import InvalidRequest
from wheelsched.core.limits import PAGE_DEFAULT, PAGE_MAX
from wheelsched.node.face import JobFilter

Query = dict[str, list[str]]

_CHECK_BYTES: Final = 8


class Seal:
    """Makes and opens the cursors of one listing: a position and a checksum over it, the cluster and the filter.

    The checksum tells a mistake from a cursor, not friend from foe: a position names nothing that its tenant may not list, since the
    tenant is part of the filter on every page. The same on every node, so that any of them can go on.
    """

    __slots__ = ("_key", "_scope")

    def __init__(self, cluster: str, listing: str, wanted: JobFilter | str) -> None:
        self._key = cluster.encode()[:64]
        if isinstance(wanted, JobFilter):
            statuses = sorted(int(status) for status in wanted.statuses)
            scope = (
                listing, wanted.tenant, wanted.queue, statuses, sorted(wanted.labels), wanted.from_ms, wanted.to_ms, wanted.schedule,
            )  # fmt: skip
            self._scope = repr(scope).encode()
        else:
            self._scope = repr((listing, wanted)).encode()

    def cursor(self, position: bytes | None) -> str | None:
        if position is None:
            return None
        return urlsafe_b64encode(position + self._check(position)).rstrip(b"=").decode()

    def open(self, cursor: str) -> bytes:
        """The position; raises where the cursor is not one that this listing gave."""
        try:
            sealed = urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))
        except ValueError:
            raise _foreign(cursor) from None
        position, check = sealed[:-_CHECK_BYTES], sealed[-_CHECK_BYTES:]
        # The text is compared, too: base64 decoders pass over some changes of the last letter.
        if check != self._check(position) or self.cursor(position) != cursor:
            raise _foreign(cursor)
        return position

    def _check(self, position: bytes) -> bytes:
        return hashlib.blake2b(position + self._scope, digest_size=_CHECK_BYTES, key=self._key, person=b"ws-cursor").digest()


def _foreign(cursor: str) -> InvalidRequest:
    return invalid("?cursor", f"cursor {shown(cursor)} was not given by this listing with this filter; start again without one")


def position_of(query: Query, seal: Seal) -> bytes | None:
    return seal.open(query["cursor"][0]) if "cursor" in query else None


def limit_of(query: Query) -> int:
    if "limit" not in query:
        return PAGE_DEFAULT
    text = query["limit"][0]
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= PAGE_MAX):
        raise invalid("?limit", f"limit {shown(text)} is out of its bounds: a whole number of 1 to {PAGE_MAX}; use next_cursor for more")
    return int(text)
