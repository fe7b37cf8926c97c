"""Check and time the package on several GPUs of one host.

    python benchmarks/multi_gpu.py --out rows.jsonl --commit $(git rev-parse HEAD)

It takes all GPUs that jax finds, two at least. What it does, in this order, each part whatever became of the
others:

    split     `jit` over sharded arrays, `shard_map` and `pmap`: results of one GPU, and nothing is sent
    share     the time that all GPUs take for their shares, against one GPU alone with one share
    ring      `ring_attention`: the results of one GPU
    overlap   its time against the same work without transfers, and against contiguous shards
    last      arrays on the last GPU alone, two threads on two GPUs, the CUDA context of the calling thread
    graphs    CUDA graphs on and off, from the first call on, in processes of their own
    train     `examples/train_gpt.py` on one GPU and on all; only with --train

A row is written as soon as it is known. It has `what`, `ok` (true or false, or null where nothing is judged),
numbers, and what it was measured with. The exit status is 0 only if no row is false. `--size tiny` takes
seconds on CPU devices (`XLA_FLAGS=--xla_force_host_platform_device_count=2`); times are not judged there.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink, which not every host allows
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes of their own share the GPUs

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_r2p
from jax_r2p.bench import environment, measure, report
from jax_r2p.cli.output import first_line

ROOT = Path(__file__).resolve().parent.parent
LEAST_EFFICIENCY = 0.95
MOST_EXPOSED = 1.10
"""Time of the ring over that without transfers, from shards of `Size.judged` tokens on."""

MOST_LOSS_APART = 0.05
"""Losses of two runs in bfloat16 that differ only in the order of their sums came up to 0.03 apart."""

COLLECTIVES = re.compile(
    r" (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
)
GRAPHS = {
    "on": "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
    "off": "--xla_gpu_enable_command_buffer=",
}
GRAPH_MARK = "graphs: "


@dataclasses.dataclass(frozen=True)
class Size:
    """How much of everything."""

    heads: int
    kv_heads: int
    width: int
    check_length: int
    batch: int  # of a device
    length: int
    ring_totals: tuple[int, ...]  # whole sequences that one GPU computes too
    rings: tuple[tuple[int, int], ...]  # tokens of a device, heads; the most telling first
    judged: int  # tokens of a device from which transfers have to be hidden
    replays: int
    rounds: int
    sample_seconds: float
    train: tuple[str, ...]


SIZES = {
    "full": Size(
        heads=16,
        kv_heads=8,
        width=128,
        check_length=1024,
        batch=4,
        length=8192,
        ring_totals=(8192, 32768),
        rings=((32768, 16), (8192, 16), (131072, 2)),
        judged=32768,
        replays=20,
        rounds=5,
        sample_seconds=0.06,
        train=("--size", "medium", "--steps", "60"),
    ),
    "tiny": Size(
        heads=8,
        kv_heads=4,
        width=8,
        check_length=16,
        batch=1,
        length=32,
        ring_totals=(64,),
        rings=((32, 4),),
        judged=32,
        replays=3,
        rounds=1,
        sample_seconds=0.0,
        train=("--size", "tiny", "--steps", "3"),
    ),
}


class Run:
    """What all parts need, and the rows that they leave."""

    def __init__(self, options: argparse.Namespace):
        self.size = SIZES[options.size]
        self.train = options.train
        self.devices = jax.devices()
        self.count = len(self.devices)
        self.on_gpu = self.devices[0].platform == "gpu"  # elsewhere times say nothing
        self.about = environment.describe(options.commit) | {"xla_flags": os.environ.get("XLA_FLAGS", "")}
        self.out, self.limit = options.out, options.limit
        self.rows: list[dict[str, Any]] = []
        self.start = time.perf_counter()

    def record(self, what: str, ok: bool | None, **values: Any) -> None:
        """Writes a row, and says so."""
        at = round(time.perf_counter() - self.start, 1)
        row = {"what": what, "devices": self.count, "ok": ok, **values, "at_s": at, **self.about}
        self.rows.append(row)
        report.write_rows(self.out, [row])
        print(f"{at:6.1f} s  {_verdict(ok):6}  {what}  {_short(values)}", flush=True)

    def is_late(self, what: str) -> bool:
        """Whether the time is over; then `what` has a row that says so."""
        late = time.perf_counter() - self.start > self.limit
        if late:
            self.record(what, None, skipped=f"{self.limit:.0f} s are over")
        return late

    def mesh(self, shape: tuple[int, ...] | None = None) -> Mesh:
        """Returns the mesh of all devices, with axes x and, if the shape has two dimensions, y."""
        shape = shape or (self.count,)
        return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))

    def attend(self, query: Array, key: Array, value: Array, **keywords: Any) -> Array:
        """`attention`, which has to run in a kernel where there are GPUs."""
        keywords = {"is_causal": True, "implementation": "r2p" if self.on_gpu else None} | keywords
        return jax_r2p.attention(query, key, value, **keywords)

    def inputs(
        self, batch: int, length: int, heads: int, kv_heads: int, seed: int = 0, sharding: Any = None
    ) -> list[Array]:
        """Returns query, key, value and a cotangent, on the first device or as the sharding says."""
        sharding = sharding or jax.sharding.SingleDeviceSharding(self.devices[0])
        width = self.size.width

        @functools.partial(jax.jit, out_shardings=sharding)
        def make(key: Array) -> list[Array]:
            keys = jax.random.split(key, 4)
            counts = (heads, kv_heads, kv_heads, heads)
            return [
                jax.random.normal(k, (batch, length, n, width), jnp.bfloat16)
                for k, n in zip(keys, counts, strict=True)
            ]

        return make(jax.random.key(seed))


def _verdict(ok: bool | None) -> str:
    return {True: "ok", False: "FAILED", None: "-"}[ok]


def _short(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )


def compiled(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """Returns the program for these arguments, and which collectives it has."""
    program = (function if hasattr(function, "lower") else jax.jit(function)).lower(*args).compile()
    return program, sorted(COLLECTIVES.findall(program.as_text()))


def pullback(attend: Callable[..., Array]) -> Callable[..., Any]:
    """Returns the function of query, key, value and a cotangent that gives the three gradients."""
    return lambda query, key, value, dout: jax.vjp(attend, query, key, value)[1](dout)


def compare(got: Any, want: Any) -> dict[str, Any]:
    """Returns whether results are equal bit by bit, and the largest relative error of an array."""
    errors, equal = [], True
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        x = x.reshape(y.shape)
        equal &= x.tobytes() == y.tobytes()
        x, y = x.astype(np.float32), y.astype(np.float32)
        errors.append(float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)))
    return {"equal_bits": bool(equal), "relative_error": max(errors)}


def times(run: Run, functions: dict[str, Callable[[], Any]], rounds: int | None = None) -> dict[str, float]:
    """Returns the median milliseconds of each; all run in turns."""
    samples = measure.alternate(
        functions,
        [()],
        rounds=rounds or run.size.rounds,
        sample_seconds=run.size.sample_seconds,
        warm_up_seconds=0.2 if run.on_gpu else 0.0,
        settle_seconds=0.2 if run.on_gpu else 0.0,
    )
    return {name: sample.median() for name, sample in samples.items()}


# Sharded batch and heads.

BATCH, HEADS, BOTH = P("x"), P(None, None, "x"), P("x", None, "y")


def split(run: Run) -> None:
    """Results of all devices together are those of one."""
    size, count = run.size, run.count
    whole = run.inputs(2 * count, size.check_length, size.heads, size.kv_heads)
    attend = functools.partial(run.attend, deterministic=True)
    for name, function in (("forward", lambda q, k, v, _: attend(q, k, v)), ("gradient", pullback(attend))):
        want = jax.device_get(jax.jit(function)(*whole))

        def check(
            how: str, transformed: Callable[..., Any], args: Sequence[Any], name: str = name, want: Any = want
        ) -> None:
            with guarded(run, f"split: {how}, {name}"):
                program, sent = compiled(transformed, *args)
                found = compare(program(*args), want)
                # XLA for CPU may sum up smaller arrays in another order.
                same = found["equal_bits"] if run.on_gpu else found["relative_error"] < 1e-2
                run.record(f"split: {how}, {name}", same and not sent, collectives=sent, **found)

        meshes = {"batch": ((count,), BATCH)}
        if size.kv_heads % count == 0:
            meshes["heads"] = ((count,), HEADS)
        if count % 2 == 0 and count > 2:
            meshes["batch and heads"] = ((2, count // 2), BOTH)
        for how, (shape, spec) in meshes.items():
            placed = jax.device_put(whole, NamedSharding(run.mesh(shape), spec))
            check(f"jit, {how}", lambda *args, f=function: f(*args), placed)
        mapped = jax.shard_map(function, mesh=run.mesh(), in_specs=(BATCH,) * 4, out_specs=BATCH)
        check("shard_map, batch", mapped, jax.device_put(whole, NamedSharding(run.mesh(), BATCH)))
        stacked = [np.asarray(x).reshape(count, 2, *x.shape[1:]) for x in whole]
        check("pmap", jax.pmap(function), jax.pmap(lambda *args: args)(*stacked))


def share(run: Run) -> None:
    """All devices at once take as long as the slowest of them does alone."""
    size, count = run.size, run.count

    def forward(query: Array, key: Array, value: Array, _: Array) -> Array:
        return run.attend(query, key, value)

    alone = [
        run.inputs(
            size.batch, size.length, size.heads, size.heads, sharding=jax.sharding.SingleDeviceSharding(d)
        )
        for d in run.devices
    ]
    for how, spec in (("batch", BATCH), ("heads", HEADS)):
        batch, heads = (
            (size.batch * count, size.heads) if how == "batch" else (size.batch, size.heads * count)
        )
        sharded = run.inputs(batch, size.length, heads, heads, sharding=NamedSharding(run.mesh(), spec))
        for name, function in (("forward", forward), ("gradient", pullback(run.attend))):
            what = f"share: jit, {how}, {name}"
            with guarded(run, what):
                program, sent = compiled(function, *sharded)
                ones = {
                    f"device {i}": functools.partial(compiled(function, *args)[0], *args)
                    for i, args in enumerate(alone)
                }
                ms = times(run, {**ones, "all": functools.partial(program, *sharded)})
                slowest = max(value for key, value in ms.items() if key != "all")
                efficiency = slowest / ms["all"]
                good = not sent and (efficiency >= LEAST_EFFICIENCY or not run.on_gpu)
                run.record(
                    what,
                    good if run.on_gpu or sent else None,
                    efficiency=efficiency,
                    ms={key: round(value, 4) for key, value in ms.items()},
                    collectives=sent,
                    batch=size.batch,
                    length=size.length,
                    heads=size.heads,
                )


# A sharded sequence.


@contextlib.contextmanager
def no_transfers(copies: bool) -> Iterator[None]:
    """Programs that are traced in here keep what they would send.

    What is kept goes through a barrier, or is copied, so that XLA does not find hops to be the same.
    """

    def stay(x: Array, axis_name: Any, perm: Any) -> Array:
        del axis_name, perm
        if copies:
            first = (slice(0, 1),) * x.ndim
            x = x.at[first].set(x[first] * 1.5)
        return lax.optimization_barrier(x)

    with unittest.mock.patch.object(lax, "ppermute", stay):
        yield


def ring_function(run: Run, name: str, **keywords: Any) -> Callable[..., Any]:
    """Returns a new function of sharded query, key, value and cotangent: "forward" or "gradient"."""
    spec = P(None, "x")
    implementation = "r2p" if run.on_gpu else None

    def attend(query: Array, key: Array, value: Array) -> Array:
        return jax_r2p.ring_attention(
            query, key, value, axis_name="x", implementation=implementation, **keywords
        )

    local = (lambda q, k, v, _: attend(q, k, v)) if name == "forward" else pullback(attend)
    return jax.shard_map(local, mesh=run.mesh(), in_specs=(spec,) * 4, out_specs=spec)


RING_MASKS: dict[str, dict[str, Any]] = {
    "causal zigzag": {"is_causal": True, "layout": "zigzag"},
    "causal contiguous": {"is_causal": True},
    "no mask": {},
}


def ring(run: Run) -> None:
    """Results of all devices together are those of one."""
    sharding = NamedSharding(run.mesh(), P(None, "x"))
    for total in run.size.ring_totals:
        whole = run.inputs(1, total, run.size.heads, run.size.kv_heads)
        for mask, keywords in RING_MASKS.items():
            zigzag = keywords.get("layout") == "zigzag"
            args = [jax_r2p.to_zigzag(x, run.count, axis=1) for x in whole] if zigzag else whole
            placed = jax.device_put(args, sharding)
            attend = functools.partial(run.attend, is_causal=keywords.get("is_causal", False))
            # Longer ones take their time on one GPU.
            for name in ("forward", "gradient") if total == run.size.ring_totals[0] else ("forward",):
                what = f"ring: {total} tokens, {mask}, {name}"
                with guarded(run, what):
                    one = (lambda q, k, v, _, f=attend: f(q, k, v)) if name == "forward" else pullback(attend)
                    want = jax.device_get(jax.jit(one)(*whole))
                    program, sent = compiled(ring_function(run, name, **keywords), *placed)
                    got = jax.device_get(program(*placed))
                    if zigzag:
                        got = jax.tree.map(lambda x: jax_r2p.from_zigzag(x, run.count, axis=1), got)
                    found = compare(got, want)
                    ok = found["relative_error"] < 1e-2 and set(sent) == {"collective-permute"}
                    run.record(what, ok, collectives=len(sent), relative_error=found["relative_error"])


def overlap(run: Run) -> None:
    """The ring takes hardly longer than the same work without its transfers."""
    sharding = NamedSharding(run.mesh(), P(None, "x"))
    for length, heads in run.size.rings:
        args = run.inputs(1, length * run.count, heads, heads, sharding=sharding)
        rounds = min(run.size.rounds, 3) if length > 65536 else None
        for mask in ("causal zigzag", "no mask"):
            for name in ("forward", "gradient"):
                what = f"overlap: {length} tokens a device, {mask}, {name}"
                if run.is_late(what):
                    continue
                with guarded(run, what):
                    _overlap(run, what, name, mask, args, rounds, length)


def _overlap(
    run: Run, what: str, name: str, mask: str, args: Sequence[Array], rounds: int | None, length: int
) -> None:
    keywords = RING_MASKS[mask]
    program, sent = compiled(ring_function(run, name, **keywords), *args)
    for copies in (False, True):
        with no_transfers(copies):
            still, kept = compiled(ring_function(run, name, **keywords), *args)
        calls = [text.as_text().count("custom-call(") for text in (program, still)]
        if calls[0] == calls[1]:
            break
    functions = {"ring": functools.partial(program, *args), "without": functools.partial(still, *args)}
    if mask == "causal zigzag":
        contiguous, _ = compiled(ring_function(run, name, is_causal=True), *args)
        functions["contiguous"] = functools.partial(contiguous, *args)
    ms = times(run, functions, rounds)
    ratio = ms["ring"] / ms["without"]
    judged = run.on_gpu and length >= run.size.judged
    run.record(
        what,
        ratio <= MOST_EXPOSED if judged else None,
        over_no_transfers=ratio,
        ms={key: round(value, 4) for key, value in ms.items()},
        collectives=[len(sent), len(kept)],
        custom_calls=calls,
        copies=copies,
        heads=args[0].shape[2],
    )
    if mask == "causal zigzag":
        # The last of P contiguous shards has P - 1/2 to compute, each of zigzag P / 2.
        balance = ms["contiguous"] / ms["ring"]
        ideal = (2 * run.count - 1) / run.count
        run.record(
            what.replace("overlap", "balance"),
            balance >= 0.85 * ideal if judged else None,
            contiguous_over_zigzag=balance,
            ideal=ideal,
        )


# One device among several.


def last(run: Run) -> None:
    """Devices other than the first, threads, and the thread's CUDA context."""
    size = run.size
    args = run.inputs(2, size.check_length, size.heads, size.kv_heads)
    function = pullback(functools.partial(run.attend, deterministic=True))
    want = jax.device_get(jax.jit(function)(*args))
    with guarded(run, "last: arrays on the last device"):
        got = jax.jit(function)(*jax.device_put(args, run.devices[-1]))
        there = all(x.devices() == {run.devices[-1]} for x in got)
        found = compare(got, want)
        run.record("last: arrays on the last device", there and found["equal_bits"], there=there, **found)
    with guarded(run, "last: two threads"):
        sets = [
            jax.device_put(run.inputs(2, size.check_length, size.heads, size.kv_heads, i), run.devices[i])
            for i in range(2)
        ]
        one = [jax.device_get(jax.jit(function)(*x)) for x in sets]

        def work(i: int) -> bool:
            own = jax.jit(lambda *args: function(*args))  # each compiles its own
            return all(compare(own(*sets[i]), one[i])["equal_bits"] for _ in range(size.replays))

        with ThreadPoolExecutor(2) as pool:
            equal = list(pool.map(work, range(2)))
        run.record("last: two threads", all(equal), equal=equal)
    with guarded(run, "last: current context"):
        read = _current_context() if run.on_gpu else "no GPU"
        if isinstance(read, str):
            run.record("last: current context", None, skipped=read)
            return
        outcomes = []
        plain, ours = jax.jit(lambda x: x * 2), jax.jit(function)
        for device in run.devices:
            own = jax.device_put(args, device)
            jax.block_until_ready(plain(own[0]))
            before = read()
            jax.block_until_ready(ours(*own))
            outcomes.append([before, read()])
        run.record("last: current context", all(a == b for a, b in outcomes), contexts=outcomes)


def _current_context() -> Callable[[], int] | str:
    """Returns a function that reads the thread's CUDA context, 0 for none; or why there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)

    def read() -> int:
        context = ctypes.c_void_p()
        code = library.cuCtxGetCurrent(ctypes.byref(context))
        if code:
            raise RuntimeError(f"cuCtxGetCurrent gives {code}")
        return context.value or 0

    return read


# CUDA graphs, in a process of its own for each setting.


def graphs(run: Run) -> None:
    """The same bits with graphs and without, on every device and over all of them."""

    def child(flags: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--child", "--size", _name_of(run.size)]
        flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), flags)))
        done = subprocess.run(
            command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, timeout=150
        )
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-2000:]}")
        (line,) = (x for x in done.stdout.splitlines() if x.startswith(GRAPH_MARK))
        return json.loads(line.removeprefix(GRAPH_MARK))

    with ThreadPoolExecutor(2) as pool:
        on, off = pool.map(child, GRAPHS.values())
    for where in off["bits"]:
        a, b = on["bits"][where], off["bits"][where]
        fresh = len(set(b)) == len(b) == run.size.replays
        run.record(
            f"graphs: {where}",
            a == b and fresh,
            replays=len(b),
            differ=[i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y],
        )
    launches = [on["launches"], off["launches"]]
    run.record(
        "graphs: were used", launches[0] < launches[1] if run.on_gpu else None, launches_on_and_off=launches
    )


def _name_of(size: Size) -> str:
    return next(name for name, other in SIZES.items() if other == size)


def graphs_child(run: Run) -> None:
    """Prints hashes of all results; the first call of the process is of the program that is captured."""
    size, count = run.size, run.count
    attend = functools.partial(run.attend, deterministic=True)

    def function(query: Array, key: Array, value: Array, dout: Array) -> list[Array]:
        # Work of XLA before, between and after, so that a graph holds more than the kernels.
        out, back = jax.vjp(attend, 2 * query, key, value + 1)
        return [out + 1, *(x * 3 for x in back(dout))]

    def numbers(seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        shapes = [(count, size.check_length // 2, n, size.width) for n in (size.heads, size.kv_heads)]
        return [rng.standard_normal(shapes[i], np.float32).astype(jnp.bfloat16) for i in (0, 1, 1, 0)]

    every = [numbers(seed) for seed in range(size.replays)]
    places: dict[str, Any] = {f"device {i}": device for i, device in enumerate(run.devices)}
    places["all devices"] = NamedSharding(run.mesh(), BATCH)
    bits, launched = {}, 0
    for name, place in places.items():
        program, hashes, keep = jax.jit(lambda *args: function(*args)), [], []
        for seed, arrays in enumerate(every):
            args = jax.device_put(arrays, place)
            if seed % 3:  # some stay, so that later ones get other addresses
                keep.append(args)
            results = b"".join(np.asarray(x).tobytes() for x in program(*args))
            hashes.append(hashlib.sha256(results).hexdigest()[:16])
        bits[name] = hashes
        before = _launches()
        for _ in range(size.replays):
            jax.block_until_ready(program(*args))
        launched += _launches() - before
    print(f"{GRAPH_MARK}{json.dumps({'bits': bits, 'launches': launched})}")


def _launches() -> int:
    """Returns how many kernels the library has launched. A graph that is replayed does not come by it."""

    class Counters(ctypes.Structure):  # R2pCounters of ffi/c_api.h
        _fields_ = (("loads", ctypes.c_uint64), ("launches", ctypes.c_uint64))

    counters = Counters()
    folder = Path(jax_r2p.__file__).parent
    ctypes.CDLL(str(folder / "libjax_r2p.so")).r2p_counters(ctypes.byref(counters))
    return int(counters.launches)


# A whole model.


def train(run: Run) -> None:
    """The example on all devices: the curve of one with the same batch, its speed with as much for each.

    All wait for the slowest in every step, so its speed alone is what each of them can have.
    """
    # 65536 tokens for each GPU and step: with half as many, sums of gradients are 2 % of a step.
    per_device = 32 if run.on_gpu else 2
    every = tuple(range(run.count))
    alone = [train_on(run, (device,), per_device) for device in every]
    of_one, speeds = alone[0][0], [speed for _, speed in alone]
    of_all, _ = train_on(run, every, per_device)
    _, full_speed = train_on(run, every, per_device * run.count)
    if of_one.keys() != of_all.keys() or not of_one:
        raise RuntimeError(f"curves with other steps: {sorted(of_one)}, {sorted(of_all)}")
    apart = max(abs(of_one[step] - of_all[step]) for step in of_one)
    last = max(of_one)
    run.record(
        "train: loss curve",
        apart <= MOST_LOSS_APART,
        most_apart=apart,
        last_losses=[of_one[last], of_all[last]],
        steps=last,
    )
    efficiency = full_speed / min(speeds) / run.count
    run.record(
        "train: tokens a second and device",
        efficiency >= LEAST_EFFICIENCY if run.on_gpu else None,
        tokens_per_second={"alone": speeds, "all": full_speed},
        efficiency=efficiency,
    )


def train_on(run: Run, devices: tuple[int, ...], batch: int) -> tuple[dict[int, float], float]:
    """Returns the losses of the example by step, on some of the devices, and its tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        script = str(ROOT / "examples" / "train_gpt.py")
        command = [sys.executable, script, *run.size.train, "--batch", str(batch), "--rows", str(rows)]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
        if not run.on_gpu:
            variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={len(devices)}"
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=150
        )
        if done.returncode:
            raise RuntimeError(f"devices {devices}, exit {done.returncode}: {done.stderr[-2000:]}")
        *curve, summary = (json.loads(line) for line in rows.read_text("utf-8").splitlines())
    return {row["step"]: row["loss"] for row in curve}, summary["tokens_per_second"]


# The program.

PARTS: dict[str, Callable[[Run], None]] = {
    "split": split,
    "share": share,
    "ring": ring,
    "overlap": overlap,
    "last": last,
    "graphs": graphs,
    "train": train,
}


@contextlib.contextmanager
def guarded(run: Run, what: str) -> Iterator[None]:
    """Turns an exception into a row."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        run.record(what, False, error=f"{type(error).__name__}: {first_line(error)}"[:600])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments; exits with what is wrong about them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="file that rows are added to, as JSON lines")
    parser.add_argument("--commit", default="unknown", help="what the package was built from")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--parts", help="parts to run, separated by commas; all but train by default")
    parser.add_argument("--train", action="store_true", help="run the part train, too")
    parser.add_argument("--limit", type=float, default=230, help="seconds after which no part begins")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not (options.out or options.child):
        parser.error("--out must be given")
    parts = options.parts.split(",") if options.parts else [name for name in PARTS if name != "train"]
    options.parts = parts + ["train"] * (options.train and "train" not in parts)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"--parts must be of {', '.join(PARTS)}; got {name!r}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts and prints what failed."""
    options = parse(arguments)
    run = Run(options)
    # What is measured has to run in kernels. On CPU none does.
    action = "error" if run.on_gpu else "ignore"
    warnings.simplefilter(action, jax_r2p.FallbackWarning)
    if options.size == "tiny":
        jax.config.update("jax_disable_most_optimizations", True)
    if options.child:
        graphs_child(run)
        return 0
    if run.count < 2:
        print(f"jax must find two devices at least, got {run.devices}", file=sys.stderr)
        return 2
    faulthandler.dump_traceback_later(options.limit + 120, exit=True)  # of a transfer that never ends
    for name in options.parts:
        if not run.is_late(name):
            with guarded(run, name):
                PARTS[name](run)
    faulthandler.cancel_dump_traceback_later()

    print(f"\n{run.count} x {run.about['device']}, driver {run.about['driver']}, jax {run.about['jax']}")
    for row in run.rows:
        print(f"{row['what']:62}  {_verdict(row['ok']):6}  {_notable(row)}")
    failed = [row["what"] for row in run.rows if row["ok"] is False]
    print(f"{len(run.rows)} rows, {len(failed)} failed{': ' if failed else ''}{'; '.join(failed)}")
    return 1 if failed else 0


def _notable(row: dict[str, Any]) -> str:
    """Returns the number of a row that one looks for first."""
    for name in ("error", "skipped", "efficiency", "over_no_transfers", "contiguous_over_zigzag"):
        if name in row:
            return f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name])
    if "equal_bits" in row:
        return "equal bits" if row["equal_bits"] else f"error {row['relative_error']:.1e}"
    return f"error {row['relative_error']:.1e}" if "relative_error" in row else ""


if __name__ == "__main__":
    sys.exit(main())
