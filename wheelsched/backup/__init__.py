"""Backups: what every group held at one instant of its own, as files that can be checked and made a cluster of again.

A backup is a directory: a file of each group, the chunks of a snapshot (`replica/snapshots.py`) with a length and a checksum before
each, and `manifest.json`, written last: a directory without one is no backup. Every byte of it is covered by a checksum.

Promises: a group's file is its state as of one index, everything acknowledged before the backup began included (`never_lost`); groups
are read one after the other, so what spans two of them may be found in one and not in the other. A restored group's watermark is that
of the backup, so that nothing fires twice that had fired by then; its fencing counter is far above it (`token_grows`), above all that
the cluster which was lost may have minted since.

Read `files.py` for the format, `taking.py` for a backup of a running cluster, `restoring.py` for the way back.
"""

from wheelsched.backup.files import BackupUnusable, GroupEntry, Manifest
from wheelsched.backup.restoring import check_target_groups, fill_group, restored_state
from wheelsched.backup.taking import Slice, Views, take_backup
from wheelsched.backup.verifying import verify

__all__ = [
    "BackupUnusable",
    "GroupEntry",
    "Manifest",
    "Slice",
    "Views",
    "check_target_groups",
    "fill_group",
    "restored_state",
    "take_backup",
    "verify",
]
