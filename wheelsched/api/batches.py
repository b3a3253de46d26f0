"""Batches between JSON and commands, in one pass over all items: compiled where it could be built, else the twin.

The item-by-item path in `jobs.py` and `attempts.py` is the specification: what is read here gives the same commands, what is written
here the same bytes, and whatever looks the least unusual (an error, an escaped name, a number with an exponent) is left to it.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wheelsched.api.batches_pure import claimed_json, created_json, draft_jobs, ended_json, scan_completions, scan_jobs
else:
    try:
        if os.environ.get("WHEELSCHED_PURE") == "1":
            raise ImportError("WHEELSCHED_PURE=1")
        from wheelsched._native.batches import claimed_json, created_json, draft_jobs, ended_json, scan_completions, scan_jobs
    except ImportError:
        from wheelsched.api.batches_pure import claimed_json, created_json, draft_jobs, ended_json, scan_completions, scan_jobs

__all__ = ["claimed_json", "created_json", "draft_jobs", "ended_json", "scan_completions", "scan_jobs"]
