"""`wheelsched demo`, as `make demo` runs it: it ends well, within its time, and leaves what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

# What the demo promises on an idle machine is 90 s; the tests share theirs.
TOOK_S_MAX = 180


@pytest.mark.slow
@pytest.mark.timeout(TOOK_S_MAX + 30)
def test_the_demo_accounts_for_every_job_through_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib (wheelsched[plot])")
    began = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", "wheelsched.cli", "demo", "--output-dir", str(tmp_path), "--json"],
        capture_output=True, text=True, check=False, timeout=TOOK_S_MAX,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(run.stdout)
    print(f"{time.monotonic() - began:.0f} s, {sum(kind['created'] for kind in told['kinds'].values())} jobs")
    assert told["good"]
    assert (told["lost"], told["run_twice"], told["keys_created_twice"], told["jobs_nobody_asked_for"]) == (0, 0, 0, 0)
    assert all(kind["created"] == kind["succeeded"] + kind["dead"] for kind in told["kinds"].values())
    assert told["outage_s"] > 0
    assert (tmp_path / "lateness.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["lateness.png"], "data and logs go when all is well"
