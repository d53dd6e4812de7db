"""The overhead benchmark runs, and those of its figures that do not depend on the clock hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_overhead_measures_and_residuals_are_a_third_of_vjps(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "overhead.py"), f"--json={figures}"]
    flags = ["--pairs=2", "--sizes=small", "--only=step", "--only=host", "--only=residuals"]
    emulated = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [*command, *flags],
        env={**os.environ, **emulated},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    step = found["step"]["small"]
    assert step["fastest"] in ("scan", "loop")
    assert step["ratio"] == step["ratio_to"][step["fastest"]]
    assert 0 < step["ratio"]["low"] <= step["ratio"]["median"] <= step["ratio"]["high"]
    assert found["host"] > 0
    assert found["residuals"]["small"]["ratio"] <= 0.33
