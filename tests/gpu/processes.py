"""What the tests of fresh processes run: `python processes.py first INDEX OUT.npz`, `... replay OUT.npz`,
`... gradients OUT.npz`, `... exported PROGRAM.bin OUT.npz` or `... remat`.

A process of its own is needed where the first call counts, or where XLA's flags do.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent

FIRST_LENGTHS = (1, 63, 65, 127, 129, 447, 1021)
FIRST_HEADS = ((2, 2), (4, 2), (7, 1), (8, 1))  # groups of 1, 2, 7, 8

REPLAYS = 20


def first_calls():
    from harness import Call

    return [Call(t=t, n=n, k=k, h=64, is_causal=True) for t in FIRST_LENGTHS for n, k in FIRST_HEADS]


def replay_calls(seed: int = 0):
    """Each mask with both compiled head dims, so several kernels share a graph; and each mask with lengths,
    which differ from seed to seed as the arrays do.
    """
    from harness import Call

    masks = ({}, {"is_causal": True}, {"window": (30, 2)})
    lengths = {"q_lengths": (150 - 7 * seed, 64), "kv_lengths": (7 * seed, 150 - seed)}
    return [
        *(Call(t=150, n=4, k=2, h=h, seed=seed, **mask) for h in (64, 128) for mask in masks),
        *(Call(t=150, b=2, n=4, k=2, h=64, seed=seed, **lengths, **mask) for mask in masks),
    ]


def start(*arguments: str, timeout: float, **environment: str) -> str:
    """Run this file in a fresh process outside any source tree; returns stdout, raises with stderr."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(HERE / "processes.py"), *arguments],
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    assert done.returncode == 0, (
        f"{arguments} failed ({done.returncode}):\n{done.stdout}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def _save(path: str, results) -> None:
    import numpy as np

    arrays = {}
    for i, (out, residual) in enumerate(results):
        arrays[f"out{i}"] = np.asarray(out).view(np.uint16)  # npz knows no bfloat16
        arrays[f"residual{i}"] = np.asarray(residual)
    np.savez(path, **arrays)


def load(path, dtype="bfloat16") -> list:
    """The list of (out, residual) that a process saved."""
    import jax.numpy as jnp
    import numpy as np

    with np.load(path) as f:
        return [(f[f"out{i}"].view(jnp.dtype(dtype)), f[f"residual{i}"]) for i in range(len(f.files) // 2)]


def _first(index: int, path: str) -> None:
    """The call with this index is the first in the process; then all. Results are written over NaN."""
    from harness import run

    calls = first_calls()
    problems = [c.problem() for c in calls]
    first = run([calls[index]], [problems[index]])
    _save(path, first + run(calls, problems))


def _replay(path: str) -> None:
    """REPLAYS runs of one program over changing inputs in changing buffers.

    Prints how many launches as many runs more, over one set of buffers, come to.
    """
    import jax
    from harness import kernel

    calls = replay_calls()

    @jax.jit
    def program(arrays):
        # an elementwise operation before and after, so that a graph holds more than our kernels
        return [
            kernel(2 * q, k, v + 1, **lengths, **c.keywords())
            for c, (q, k, v, lengths) in zip(calls, arrays, strict=True)
        ]

    results, keep = [], []
    for seed in range(REPLAYS):
        own = [(call.problem(), call.lengths()) for call in replay_calls(seed)]
        arrays = jax.device_put([(p.query, p.key, p.value, lengths) for p, lengths in own])
        if seed % 3:  # some buffers stay alive, so that later runs get other addresses
            keep.append(arrays)
        results += program(arrays)
    _save(path, results)
    print(count_launches(lambda: jax.block_until_ready(program(arrays)), runs=REPLAYS))


def _gradients(path: str) -> None:
    """Gradients of several calls in one program, from three runs; prints launches as `_replay` does."""
    import jax
    import numpy as np
    from test_backward import GRAPH_CALLS, operands, random_cotangents, vjp

    given = []
    for call in GRAPH_CALLS:
        p = call.problem()
        given.append(operands(p, random_cotangents(p)))
    arrays = jax.device_put(given)

    @jax.jit
    def program(arrays):
        return [
            vjp(*x, **call.keywords(), deterministic=True)
            for call, x in zip(GRAPH_CALLS, arrays, strict=True)
        ]

    runs = [jax.tree.leaves(program(arrays)) for _ in range(3)]
    np.savez(path, *(np.asarray(x).view(np.uint16) for run in runs for x in run))
    print(count_launches(lambda: jax.block_until_ready(program(arrays)), runs=REPLAYS))


def _remat() -> None:
    """Prints how many kernels a run of each program with remat launches."""
    import jax
    from test_backward import REMAT, remat

    for case in REMAT:
        program, arrays = remat(*case)
        jax.block_until_ready(program(*arrays))
        print(count_launches(lambda run=program, own=arrays: jax.block_until_ready(run(*own)), runs=1))


def _exported(program: str, path: str) -> None:
    """Results and gradients of a program in a file, where nothing but the package was imported before.

    Prints how many kernels one run of both launches. If a program is for several devices, runs it on those.
    """
    import jax
    import jax.export
    import numpy as np
    from exported import arrays, cotangent, place

    import jax_r2p

    jax_r2p.register()
    loaded = jax.export.deserialize(bytearray(Path(program).read_bytes()))

    @jax.jit
    def both(*args):
        results, transpose = jax.vjp(loaded.call, *args)
        return results, transpose(jax.tree.map(cotangent, results))

    args = place(arrays(), loaded.nr_devices)
    leaves = jax.tree.leaves(both(*args))
    np.savez(path, *[np.asarray(x, np.float32) for x in leaves])
    print(count_launches(lambda: jax.block_until_ready(both(*args)), runs=1))


def count_launches(function, runs: int) -> int:
    """How many kernels the library launched while `function` ran on the same buffers `runs` times.

    A graph that is replayed does not come by the library again.
    """
    from importlib.resources import files

    class Counters(ctypes.Structure):  # R2pCounters of ffi/c_api.h
        _fields_ = (("loads", ctypes.c_uint64), ("launches", ctypes.c_uint64))

    library = ctypes.CDLL(str(files("jax_r2p") / "libjax_r2p.so"))  # the one that jax uses: loaded once
    counters = Counters()
    library.r2p_counters(ctypes.byref(counters))
    before = counters.launches
    for _ in range(runs):
        function()
    library.r2p_counters(ctypes.byref(counters))
    return counters.launches - before


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    if sys.argv[1] == "first":
        _first(int(sys.argv[2]), sys.argv[3])
    elif sys.argv[1] == "remat":
        _remat()
    elif sys.argv[1] == "exported":
        _exported(sys.argv[2], sys.argv[3])
    else:
        {"replay": _replay, "gradients": _gradients}[sys.argv[1]](sys.argv[2])
