"""What all tests share: Hypothesis profiles, twins as parameters, a clock that stands still, and a guard of the event loop."""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from wheelsched.runtime.clock import VirtualClock

# No deadline: two shared cores make one example in a thousand slow, which says nothing about the code. `print_blob` gives the
# line that replays a failure; a failing example of CI can so be run anywhere. CI draws the same examples each time, so that what it
# judges is the change; fresh ones are drawn by every other run, and the simulators try fresh seeds always.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile(
    "ci", deadline=None, print_blob=True, derandomize=True, max_examples=200, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=5_000, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# A Saturday, 2026-01-03T04:05:06.007Z: every field of a date differs.
START_MS = 1_767_413_106_007

# name -> (native module, plain-Python module); a test that asks for `<name>_twin` runs once with each.
TWINS = {
    "wheel": ("wheelsched._native.wheel", "wheelsched.wheel.pure"),
    "ready": ("wheelsched._native.ready", "wheelsched.fairness.ready_pure"),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "blocking_allowed: this test may block the event loop")
    # Also where pytest runs without the project's own configuration.
    if getattr(config.option, "asyncio_mode", None) is None:
        config.option.asyncio_mode = "auto"


def pytest_report_header() -> str:
    pure = " WHEELSCHED_PURE=1" if os.environ.get("WHEELSCHED_PURE") == "1" else ""
    return f"hypothesis profile: {settings.get_current_profile_name()}{pure}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, modules in TWINS.items():
        if f"{name}_twin" in metafunc.fixturenames:
            metafunc.parametrize(f"{name}_twin", modules, ids=("native", "python"), indirect=True)


def _twin(module: str) -> Any:
    """The module of a twin; the native one is skipped where it is not built or not wanted."""
    if module.startswith("wheelsched._native.") and os.environ.get("WHEELSCHED_PURE") == "1":
        pytest.skip("WHEELSCHED_PURE=1")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{module} is not built: {error}")


@pytest.fixture
def wheel_twin(request: pytest.FixtureRequest) -> Any:
    return _twin(request.param)


@pytest.fixture
def ready_twin(request: pytest.FixtureRequest) -> Any:
    return _twin(request.param)


@pytest.fixture
def clock() -> VirtualClock:
    """Stands still at `START_MS`."""
    return VirtualClock(START_MS)


@pytest.fixture(autouse=True)
def no_blocking_on_the_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A sleep or an fsync on an event loop's thread fails the test: what waits must be awaited or run on a thread."""
    if request.node.get_closest_marker("blocking_allowed"):
        yield
        return
    for module, name in ((time, "sleep"), (os, "fsync"), (os, "fdatasync")):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, _guarded(getattr(module, name), f"{module.__name__}.{name}"))
    yield


def _guarded(call: Any, name: str) -> Any:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return call(*args, **kwargs)
        raise AssertionError(f"{name} blocks the event loop; await, or use a thread (mark the test blocking_allowed if it must)")

    return guarded
