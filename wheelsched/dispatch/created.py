"""Where jobs just created belong, in one pass: compiled where it could be built, else the twin. `WHEELSCHED_PURE=1` forces the twin."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wheelsched.dispatch.created_pure import sort_created
else:
    try:
        if os.environ.get("WHEELSCHED_PURE") == "1":
            raise ImportError("WHEELSCHED_PURE=1")
        from wheelsched._native.rows import sort_created
    except ImportError:
        from wheelsched.dispatch.created_pure import sort_created

__all__ = ["sort_created"]
