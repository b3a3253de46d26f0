"""The commands. Each is a thin layer: options in, one call over HTTP or one object from `node/`, a table or JSON out.

Promises: `--json` gives one JSON document on stdout and nothing else there; exit codes are those of `errors.py`; what goes
wrong is told in one sentence with the way out. Read `main.py` first (the tree of commands), then `serve.py` (how a node starts
and stops).
"""

from wheelsched.cli.main import main

__all__ = ["main"]
