"""Rows of many jobs in one pass: compiled where it could be built, else the twin. `WHEELSCHED_PURE=1` forces the twin."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wheelsched.engine.rows_pure import claim_rows, create_rows, needs_reading, state_rows, succeed_rows, tally_moves
else:
    try:
        if os.environ.get("WHEELSCHED_PURE") == "1":
            raise ImportError("WHEELSCHED_PURE=1")
        from wheelsched._native.rows import claim_rows, create_rows, needs_reading, state_rows, succeed_rows, tally_moves
    except ImportError:
        from wheelsched.engine.rows_pure import claim_rows, create_rows, needs_reading, state_rows, succeed_rows, tally_moves

__all__ = ["claim_rows", "create_rows", "needs_reading", "state_rows", "succeed_rows", "tally_moves"]
