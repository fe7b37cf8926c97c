"""Process start to first result: what a user waits for, interpreter, imports, compilation and loading
included.

Every repeat is a fresh process; implementations take turns, so that a warming file cache favours none. The
clock starts right before the process is created and stops in it, once the first result is there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CASE = "causal_d128_s2048"
TIMEOUT = 120.0  # seconds a process may take


def run(args: argparse.Namespace) -> list[dict]:
    """One row an implementation: the seconds of its repeats and their median; also in `args.out`."""
    import report
    from rich.progress import Progress

    names = ["jax_r2p", "cudnn"] if args.impls == "default" else args.impls.split(",")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    facts: dict[str, dict] = {}
    with Progress() as progress:
        task = progress.add_task("fresh processes", total=args.repeats * len(names))
        for number in range(args.repeats):
            for name in names if number % 2 == 0 else names[::-1]:
                facts[name] = _process(name, args.commit, args.scale_down)
                seconds[name].append(facts[name].pop("seconds"))
                progress.advance(task)
    rows = [
        {
            "case": f"cold_{CASE}",
            "impl": name,
            "median_s": round(float(np.median(seconds[name])), 3),
            "seconds": seconds[name],
            **facts[name],
        }
        for name in names
    ]
    report.write_rows(args.out, rows)
    return rows


def print_summary(rows: list[dict]) -> None:
    """One line an implementation."""
    for row in rows:
        every = ", ".join(f"{x:.2f}" for x in row["seconds"])
        print(f"{row['impl']:10s} process start to first result: median {row['median_s']:.3f} s  ({every})")


def _process(name: str, commit: str, scale_down: int) -> dict:
    """Run one process; returns its JSON. The compilation cache is off and the folder is no source tree."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(HERE / "cold.py"), name, commit, str(scale_down), repr(time.time())],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    if done.returncode:
        raise RuntimeError(f"{name} failed in a fresh process:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _first_result(name: str, commit: str, scale_down: int, started: float) -> dict:
    """In the fresh process: inputs, one call, the clock; what else is asked comes after it."""
    import jax
    import jax.numpy as jnp
    import rivals
    import workloads

    [w] = workloads.select(CASE)
    w = workloads.shrink(w, scale_down)
    rng = np.random.default_rng(0)
    shapes = [(w.batch, w.length, heads, w.head_dim) for heads in (w.heads, w.kv_heads, w.kv_heads)]
    small = rng.standard_normal((1, 64, 1, w.head_dim), np.float32).astype(jnp.bfloat16)
    arrays = [jax.device_put(np.resize(small, shape)) for shape in shapes]
    out = jax.jit(rivals.RIVALS[name].build(w))(*arrays)
    jax.block_until_ready(out)
    seconds = time.time() - started
    import environment

    if not bool(jnp.isfinite(out).all()):
        raise RuntimeError("the first result is not finite")
    return {"seconds": round(seconds, 3), **environment.describe(commit)}


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    print(json.dumps(_first_result(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
