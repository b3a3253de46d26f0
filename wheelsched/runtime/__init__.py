"""The real world behind the protocols: clocks, logs, settings from files, metrics, the lag of the event loop.

Promises: a sleeper never wakes before its instant, whatever the wall clock does (`never_early` rests on it); a fault in a
settings file is reported with line and key, and all of them together; measuring costs the hot path less than a microsecond and no
lock, so that nobody has a reason to leave a measurement out.

Read `clock.py` first. `config.py` turns YAML and environment into `core/settings.py`; `metrics.py` is what everyone counts into.
"""

from wheelsched.runtime.clock import RealClock, VirtualClock
from wheelsched.runtime.config import SettingsError, data_dir, load_settings, reference_yaml
from wheelsched.runtime.lag import LoopLag
from wheelsched.runtime.logs import setup_logs
from wheelsched.runtime.metrics import Gauges, Metrics, QueueGauges

__all__ = [
    "Gauges", "LoopLag", "Metrics", "QueueGauges", "RealClock", "SettingsError", "VirtualClock",
    "data_dir", "load_settings", "reference_yaml", "setup_logs",
]  # fmt: skip
