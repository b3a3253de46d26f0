"""Rows of many jobs in one pass: compiled where it could be built, else the twin. `WHEELSCHED_PURE=1` forces the twin."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wheelsched.engine.rows_pure import create_rows, state_rows
else:
    try:
        if os.environ.get("WHEELSCHED_PURE") == "1":
            raise ImportError("WHEELSCHED_PURE=1")
        from wheelsched._native.rows import create_rows, state_rows
    except ImportError:
        from wheelsched.engine.rows_pure import create_rows, state_rows

__all__ = ["create_rows", "state_rows"]
