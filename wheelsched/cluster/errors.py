"""What can become of a call to another node. `OutcomeUnknown` (sent, no answer) is that of `core/errors.py`."""

from __future__ import annotations

from wheelsched.core.errors import Unavailable


class NotConnected(Unavailable):
    """Nothing was sent to the node; another one may be asked."""


class Busy(Unavailable):
    """The node is reached and has too much to do: nothing was done."""
