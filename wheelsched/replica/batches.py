"""Commands of a batch by their groups: compiled where it could be built, else the twin. `WHEELSCHED_PURE=1` forces the twin."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wheelsched.replica.batches_pure import by_group
else:
    try:
        if os.environ.get("WHEELSCHED_PURE") == "1":
            raise ImportError("WHEELSCHED_PURE=1")
        from wheelsched._native.rows import by_group
    except ImportError:
        from wheelsched.replica.batches_pure import by_group

__all__ = ["by_group"]
