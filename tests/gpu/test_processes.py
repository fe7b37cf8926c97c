"""What only shows in a process of its own: the first call ever, and CUDA graphs on and off."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numerics import check as compare
from numerics import expected
from processes import REPLAYS, first_calls, load, replay_calls, start

GRAPHS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "on": "--xla_gpu_enable_command_buffer=CUSTOM_CALL,FUSION --xla_gpu_graph_min_graph_size=1",
}


@pytest.mark.slow
def test_first_call_of_a_process(tmp_path):
    """Ten fresh processes, each with another shape first, all over memory that was NaN: right every time.

    https://github.com/jax-ml/jax/issues/23819: NaN on the first call only.
    """
    calls = first_calls()
    indices = [i * len(calls) // 10 for i in range(10)]

    def one(i):
        start("first", str(i), str(tmp_path / f"{i}.npz"), timeout=120)
        return load(tmp_path / f"{i}.npz")

    with ThreadPoolExecutor(5) as pool:
        saved = list(pool.map(one, indices))
    wanted = expected([c.problem() for c in calls])
    for i, (first, *rest) in zip(indices, saved, strict=True):
        compare(*first, wanted[i], name=f"first call: {calls[i]}")
        for call, result, want in zip(calls, rest, wanted, strict=True):
            compare(*result, want, name=f"after {calls[i]}: {call}")


@pytest.fixture(scope="module")
def replays(tmp_path_factory):
    """Per setting of CUDA graphs: the results of all runs, and how many launches later runs came to."""
    folder = tmp_path_factory.mktemp("replays")

    def one(name):
        path = folder / f"{name}.npz"
        launches = start("replay", str(path), timeout=180, XLA_FLAGS=GRAPHS[name]).strip().splitlines()[-1]
        return load(path), int(launches)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(GRAPHS, pool.map(one, GRAPHS), strict=True))


def test_graphs_change_nothing(replays):
    """Captured and plain runs give equal bits for every input, from the first (captured) call on.

    https://github.com/jax-ml/jax/issues/27599, https://github.com/openxla/xla/issues/14889
    """
    on, off = replays["on"][0], replays["off"][0]
    assert len(on) == len(off) == REPLAYS * len(replay_calls())
    for i, (a, b) in enumerate(zip(on, off, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert x.tobytes() == y.tobytes(), (
                f"run {i // len(replay_calls())}, call {i % len(replay_calls())}"
            )


def test_graphs_see_new_inputs(replays):
    """Every replay differs from the one before, and first and last are right."""
    calls = replay_calls()
    on = replays["on"][0]
    for i in range(len(calls), len(on)):
        assert on[i][0].tobytes() != on[i - len(calls)][0].tobytes()
    for seed in (0, REPLAYS - 1):
        problems = [call.problem() for call in replay_calls(seed)]
        for p in problems:
            p.query[...] = p.query * 2
            p.value[...] = p.value + np.ones((), p.value.dtype)
        results = on[seed * len(calls) : (seed + 1) * len(calls)]
        for call, (out, residual), want in zip(calls, results, expected(problems), strict=True):
            compare(out, np.swapaxes(residual, 1, 2), want, name=f"seed {seed}: {call}")


def test_graphs_were_used(replays):
    """The setting did what this file relies on: replays do not come by the library, plain runs do."""
    plain = REPLAYS * len(replay_calls())
    assert replays["off"][1] == plain
    assert replays["on"][1] < plain
