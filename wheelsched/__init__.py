"""wheelsched, a distributed job scheduler. The way in: README, `cli/`, `node/`, `replica/replica.py`, `engine/machine.py`."""

__version__ = "0.1.0"
