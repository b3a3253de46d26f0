"""Why a store does not open, or is no longer used. None of these is a caller's error: they end the start or the process."""

from __future__ import annotations


class StoreError(Exception):
    """Base of what a store raises about itself; the message names directory, cause and remedy."""


class StoreRefused(StoreError):
    """The data directory is in use, belongs to somebody else or is of another format. Nothing in it was changed."""


class StoreCorrupt(StoreError):
    """What was written cannot be read back: perhaps synced data is gone. The node must not run on it."""


class StoreFailed(StoreError):
    """A write, sync or read failed before: what the disk holds is unknown, and `fatal` was called."""
