"""Bounds of the contract and of memory, each with where it comes from. How they relate is asserted at import."""

from __future__ import annotations

NAME_LENGTH_MAX = 128
IDEMPOTENCY_KEY_LENGTH_MAX = 255
LABELS_MAX = 16
LABEL_KEY_LENGTH_MAX = 63
LABEL_VALUE_LENGTH_MAX = 255
DELAY_S_MAX = 31_622_400  # 366 days
WINDOW_S_MAX = 86_400
TIMEOUT_S_MIN, TIMEOUT_S_MAX = 0.1, 43_200
LEASE_S_MIN, LEASE_S_MAX = 1, 43_200
WAIT_S_MAX = 60
CLAIM_JOBS_MAX = 100
ATTEMPTS_MAX = 100
BACKOFF_S_MAX = 31_622_400
PAGE_DEFAULT, PAGE_MAX = 100, 1_000
EVERY_S_MIN = 1
FORECAST_S_MAX = 7 * 86_400
NEXT_RUNS, PREVIEW_MAX = 5, 100  # instants that an answer with a schedule shows; that a preview may ask for

PAYLOAD_BYTES_DEFAULT, PAYLOAD_BYTES_MAX = 64 * 1024, 256 * 1024
REQUEST_BYTES_MAX = 1024 * 1024
BATCH_BYTES_MAX, BATCH_ITEMS_MAX = 32 * 1024 * 1024, 1_000
HEADER_BYTES_MAX = 16 * 1024
DEPTH_MAX = 128
ERROR_BYTES_MAX = 4 * 1024
PROGRESS_BYTES_MAX = 4 * 1024

# One entry is one WriteBatch and `write` holds the GIL (1.2 to 2 µs a row operation): 500 keep it near 1 ms.
ENTRY_COMMANDS_MAX, ENTRY_BYTES_MAX = 128, 512 * 1024
# Every command waiting for the log is an open HTTP request; past these the API answers 503 before accepting.
INBOX_COMMANDS_MAX, INBOX_BYTES_MAX = 10_000, 64 * 1024 * 1024
COMMAND_BYTES_MAX = 512 * 1024

KEEP_KEYED_MS = 24 * 3_600_000  # a job with an idempotency key is kept this long at least
RETENTION_MS_DEFAULT = 30 * 86_400_000
DEAD_RETENTION_MS = 90 * 86_400_000
LEASE_MS_DEFAULT = 45_000

assert PAYLOAD_BYTES_MAX * 2 <= COMMAND_BYTES_MAX, "a command holds a payload and a result"
assert COMMAND_BYTES_MAX <= ENTRY_BYTES_MAX
assert PAYLOAD_BYTES_DEFAULT <= PAYLOAD_BYTES_MAX < REQUEST_BYTES_MAX <= BATCH_BYTES_MAX
