"""What is done with many jobs at once: compiled where it could be built, else the twin. `WHEELSCHED_PURE=1` forces the twin."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wheelsched.dispatch.batches_pure import hand_over, rows_found, seeks_of, sort_created
else:
    try:
        if os.environ.get("WHEELSCHED_PURE") == "1":
            raise ImportError("WHEELSCHED_PURE=1")
        from wheelsched._native.rows import hand_over, rows_found, seeks_of, sort_created
    except ImportError:
        from wheelsched.dispatch.batches_pure import hand_over, rows_found, seeks_of, sort_created

__all__ = ["hand_over", "rows_found", "seeks_of", "sort_created"]
