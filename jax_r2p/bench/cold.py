"""Process start to first result: what a user waits for, with interpreter, imports, compilation and loading.

Every repeat is a fresh process; implementations take turns, so that a warming file cache favours none. The
clock starts right before the process is created and stops in it, once the first result is there.

The fresh process is `python -m jax_r2p.bench.cold NAME COMMIT SCALE STARTED`, in an empty folder, so that the
environment decides which jax_r2p it imports. It prints its row as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from jax_r2p.bench import environment, report, rivals, workloads
from jax_r2p.bench.report import Row
from jax_r2p.bench.rivals import Rival

CASE = "causal_d128_s2048"
DEFAULT = (rivals.OURS, "cudnn")
TIMEOUT = 120.0
"""Seconds a process may take."""


class ProcessFailed(RuntimeError):
    """A fresh process gave no result: the text says which implementation, and what it said."""


def time_starts(
    chosen: Sequence[Rival], *, repeats: int, commit: str, scale_down: int, advance: Callable[[str], None]
) -> list[Row]:
    """Times fresh processes.

    Args:
      chosen: The rivals.
      repeats: Processes of each.
      commit: What the installed package was built from, for the rows.
      scale_down: Divides batch and length of the workload `CASE`.
      advance: Called with the name of the rival after each of `repeats * len(chosen)` processes, whether it
        was started or not.

    Returns:
      One row a rival: the seconds of its processes and their median.

    Raises:
      ProcessFailed: A process gave no result in time.
    """
    seconds: dict[str, list[float]] = {rival.name: [] for rival in chosen}
    rows: dict[str, Row] = {}
    for number in range(repeats):
        for rival in chosen if number % 2 == 0 else chosen[::-1]:
            if rival.is_installed():
                rows[rival.name] = _fresh_process(rival.name, commit, scale_down)
                seconds[rival.name].append(rows[rival.name].pop("seconds"))
            else:
                rows[rival.name] = {"status": rivals.NOT_INSTALLED, "commit": commit}
            advance(rival.name)
    for name, values in seconds.items():
        if values:
            rows[name] = {"median_s": round(statistics.median(values), 3), "seconds": values, **rows[name]}
    return [{"case": f"{report.COLD}{CASE}", "impl": rival.name, **rows[rival.name]} for rival in chosen]


def _fresh_process(name: str, commit: str, scale_down: int) -> Row:
    """Runs one process with the compilation cache off; returns its JSON."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    command = [sys.executable, "-m", "jax_r2p.bench.cold", name, commit, str(scale_down)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*command, repr(time.time())],
                cwd=folder,
                env=variables,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired as error:
            raise ProcessFailed(f"{name} gave no result in {TIMEOUT:g} s") from error
    if done.returncode:
        raise ProcessFailed(f"{name} failed in a fresh process:\n{done.stderr[-3000:].rstrip()}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def _first_result(name: str, commit: str, scale_down: int, started: float) -> Row:
    """In the fresh process: inputs, one call, the clock; what else is asked comes after it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    [w] = workloads.select(CASE)
    w = workloads.shrink(w, scale_down)
    rng = np.random.default_rng(0)
    shapes = [(w.batch, w.length, heads, w.head_dim) for heads in (w.heads, w.kv_heads, w.kv_heads)]
    small = rng.standard_normal((1, 64, 1, w.head_dim), np.float32).astype(jnp.bfloat16)
    query, key, value = (jax.device_put(np.resize(small, shape)) for shape in shapes)
    out = jax.jit(rivals.RIVALS[name].build(w))(query, key, value)
    jax.block_until_ready(out)
    seconds = time.time() - started
    if not bool(jnp.isfinite(out).all()):
        raise RuntimeError("the first result is not finite")
    return {"seconds": round(seconds, 3), **environment.describe(commit)}


if __name__ == "__main__":
    print(json.dumps(_first_result(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
