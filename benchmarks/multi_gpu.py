"""Check and time the package on several GPUs of one host.

    python benchmarks/multi_gpu.py --out rows.jsonl --commit $(git rev-parse HEAD)

It takes all GPUs that jax finds, two at least. What it does, in this order, each part whatever became of the
others:

    split     `jit` over sharded arrays, `shard_map` and `pmap`: results of one GPU, and nothing is sent
    share     the time that all GPUs take for their shares, against one GPU alone with one share
    ring      `ring_attention`: the results of one GPU, where it can hold them
    overlap   its time against the same work without transfers, and against contiguous shards
    last      arrays on the last GPU alone, two threads on two GPUs, the CUDA context of the calling thread
    graphs    CUDA graphs on and off, from the first call on, in processes of their own
    train     `examples/train_gpt.py` on one GPU and on all; only with --train

A row is written as soon as it is known. It has `what`, `ok` (true or false, or null where nothing is judged),
numbers, and what it was measured with. What cannot be done with so many devices, or in the time, has a row
with the reason, `skipped`. The exit status is 0 only if no row is false. `--size tiny` takes
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
from typing import Any, Literal

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

MOST_ERROR = 1e-2
"""Of what may be summed up in another order, in bfloat16."""

CHILD_SECONDS = 150
"""A process of its own may take no longer. What is under way at the limit has as long, and some more."""

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "recv",
    "reduce-scatter",
    "send",
}
HOPS = {"collective-permute", "recv", "send"}
"""What XLA makes of a transfer to the next device."""

# %name = shape opcode(. What follows may be names of the user's, so only the first on a line counts.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?\S+ = .*? ([a-z][a-z0-9-]*)\(", re.MULTILINE)
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
    length: int
    shares: tuple[tuple[int, int], ...]  # sequences of a device, calls in one program; the first in all ways
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
        length=8192,
        shares=((1, 8), (4, 2)),
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
        length=32,
        shares=((1, 2),),
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


def round_up(number: int, multiple: int) -> int:
    """Returns the next multiple that is not below the number."""
    return -(-number // multiple) * multiple


def opcodes(program: Any) -> list[str]:
    """Returns what the instructions of a program do; for x-start, which begins x, it is x."""
    return [name.removesuffix("-start") for name in INSTRUCTION.findall(program.as_text())]


def compiled(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """Returns the program for these arguments, and which collectives it has."""
    program = (function if hasattr(function, "lower") else jax.jit(function)).lower(*args).compile()
    return program, sorted(name for name in opcodes(program) if name in COLLECTIVES)


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
        errors.append(float(np.linalg.norm(x - y)) / max(float(np.linalg.norm(y)), 1e-30))
    return {"equal_bits": bool(equal), "relative_error": float(np.max(errors))}  # NaN if one is


def times(
    run: Run,
    functions: dict[str, Callable[[], Any]],
    rounds: int | None = None,
    calls_each: int = 1,
    settle_seconds: float = 0.0,
) -> dict[str, measure.Samples]:
    """Returns what each took in milliseconds a call; all run in turns."""
    return measure.alternate(
        functions,
        [()],
        rounds=rounds or run.size.rounds,
        sample_seconds=run.size.sample_seconds,
        calls_each=calls_each,
        warm_up_seconds=0.2 if run.on_gpu else 0.0,
        settle_seconds=settle_seconds if run.on_gpu else 0.0,
    )


def medians(samples: dict[str, measure.Samples]) -> dict[str, float]:
    """Returns the milliseconds of each."""
    return {name: round(sample.median(), 4) for name, sample in samples.items()}


# Sharded batch and heads.

BATCH, HEADS, BOTH = P("x"), P(None, None, "x"), P("x", None, "y")


def split(run: Run) -> None:
    """Results of all devices together are those of one."""
    size, count = run.size, run.count
    kv_heads = round_up(size.kv_heads, count)
    whole = run.inputs(2 * count, size.check_length, size.heads // size.kv_heads * kv_heads, kv_heads)
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
                same = found["equal_bits"] if run.on_gpu else found["relative_error"] < MOST_ERROR
                run.record(f"split: {how}, {name}", same and not sent, collectives=sent, **found)

        for how, shape, spec in (
            ("batch", (count,), BATCH),
            ("heads", (count,), HEADS),
            ("batch and heads", (2, count // 2), BOTH),
        ):
            if how == "batch and heads" and (count % 2 or count == 2):
                reason = f"{count} devices cannot be split both ways"
                for kind in ("jit", "shard_map"):
                    run.record(f"split: {kind}, {how}, {name}", None, skipped=reason)
                continue
            mesh = run.mesh(shape)
            placed = jax.device_put(whole, NamedSharding(mesh, spec))
            check(f"jit, {how}", lambda *args, f=function: f(*args), placed)
            mapped = jax.shard_map(function, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)
            check(f"shard_map, {how}", mapped, placed)
        check("pmap", jax.pmap(function), stacked([x.reshape(count, 2, *x.shape[1:]) for x in whole]))


def stacked(arrays: Sequence[Any]) -> list[Array]:
    """Returns arrays for `pmap`: each device has what is at its place of the first dimension."""
    return list(jax.pmap(lambda *args: args)(*(np.asarray(x) for x in arrays)))


def in_turn(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Returns a function of as many calls, so that devices do not wait for the host between them.

    The first result of each, out or the query's gradient, is the query of the next. All others are returned,
    so nothing can be left out.
    """

    def chain(query: Array, *others: Array) -> list[Array]:
        results = []
        for _ in range(calls):
            query, *rest = jax.tree.leaves(function(query, *others))
            results += rest
        return [query, *results]

    return chain


def share(run: Run) -> None:
    """All devices at once take as long as the slowest of them does alone."""

    def forward(query: Array, key: Array, value: Array, _: Array) -> Array:
        return run.attend(query, key, value)

    for batch, calls in run.size.shares:
        for name, function in (("forward", forward), ("gradient", pullback(run.attend))):
            what = f"share: {batch} x {run.size.length} tokens a device"
            if run.is_late(f"{what}, {name}"):
                continue
            with guarded(run, f"{what}, {name}"):
                _share(run, what, name, function, batch, calls)


def _share(run: Run, what: str, name: str, function: Callable[..., Any], batch: int, calls: int) -> None:
    size, mesh, chain = run.size, run.mesh(), in_turn(function, calls)

    def inputs(sharding: Any, batch: int = batch, heads: int = size.heads) -> list[Array]:
        return run.inputs(batch, size.length, heads, heads, sharding=sharding)

    alone = [inputs(jax.sharding.SingleDeviceSharding(device)) for device in run.devices]
    by_batch = inputs(NamedSharding(mesh, BATCH), batch=batch * run.count)
    by_heads = inputs(NamedSharding(mesh, HEADS), heads=size.heads * run.count)
    ways: dict[str, tuple[Callable[..., Any], Sequence[Array]]] = {
        "jit, batch": (chain, by_batch),
        "jit, heads": (chain, by_heads),
    }
    if (batch, calls) == size.shares[0]:
        mapped = jax.shard_map(chain, mesh=mesh, in_specs=(BATCH,) * 4, out_specs=BATCH)
        ways["shard_map, batch"] = (mapped, by_batch)
        ways["pmap"] = (jax.pmap(chain), stacked([np.stack(x) for x in zip(*alone, strict=True)]))

    functions: dict[str, Callable[[], Any]] = {
        f"device {i}": functools.partial(compiled(chain, *args)[0], *args) for i, args in enumerate(alone)
    }
    ones, sent = list(functions), {}
    for how, (transformed, args) in ways.items():
        with guarded(run, f"{what}, {how}, {name}"):
            program, sent[how] = compiled(transformed, *args)
            functions[how] = functools.partial(program, *args)
    # A GPU that has idled is faster for moments, and here some idle while others run.
    samples = times(run, functions, calls_each=calls, settle_seconds=0.2)
    ms = medians(samples)
    for how, collectives in sent.items():
        efficiency = max(ms[one] for one in ones) / ms[how]
        host_bound = [key for key in (*ones, how) if samples[key].host_bound()]
        good = not collectives and not host_bound and efficiency >= LEAST_EFFICIENCY
        run.record(
            f"{what}, {how}, {name}",
            good if run.on_gpu or collectives else None,
            efficiency=efficiency,
            ms={one: ms[one] for one in ones} | {"all": ms[how]},
            host_bound=host_bound,
            collectives=collectives,
            batch=batch,
            length=size.length,
            heads=size.heads,
            calls_in_one_program=calls,
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
    implementation: Literal["r2p"] | None = "r2p" if run.on_gpu else None

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
    for length, heads in run.size.rings:
        whole = run.inputs(1, length * run.count, heads, heads // 2)
        for name in ("forward", "gradient"):

            @functools.cache
            def of_one(is_causal: bool, name: str = name, whole: Sequence[Array] = whole) -> Any:
                attend = functools.partial(run.attend, is_causal=is_causal)
                one = (lambda q, k, v, _: attend(q, k, v)) if name == "forward" else pullback(attend)
                return jax.block_until_ready(jax.jit(one)(*whole))

            for mask in RING_MASKS:
                what = f"ring: {length} tokens a device, {mask}, {name}"
                if run.is_late(what):
                    continue
                with guarded(run, what):
                    _ring(run, what, name, mask, whole, of_one)


def _ring(
    run: Run, what: str, name: str, mask: str, whole: Sequence[Array], of_one: Callable[[bool], Any]
) -> None:
    keywords = RING_MASKS[mask]
    try:
        want = of_one(keywords.get("is_causal", False))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        run.record(what, None, skipped="one device cannot hold it")
        return

    def place(arrays: Any) -> Any:
        if keywords.get("layout") == "zigzag":
            arrays = jax.tree.map(lambda x: jax_r2p.to_zigzag(x, run.count, axis=1), arrays)
        return jax.device_put(arrays, NamedSharding(run.mesh(), P(None, "x")))

    args = place(whole)
    program, sent = compiled(ring_function(run, name, **keywords), *args)
    of_all, of_part = map(float, errors(program(*args), place(want), 2 * run.count))
    run.record(
        what,
        of_part < MOST_ERROR and bool(sent) and HOPS.issuperset(sent),
        collectives=len(sent),
        relative_error=of_all,
        relative_error_of_a_part=of_part,
        heads=whole[0].shape[2],
        kv_heads=whole[1].shape[2],
    )


@functools.partial(jax.jit, static_argnames="parts")
def errors(got: Any, want: Any, parts: int) -> tuple[Array, Array]:
    """Returns the largest relative error of an array, and of one of so many parts of its tokens.

    Under a causal mask the first tokens have by far the largest results, so that others hardly count in an
    error of all. It is computed where the arrays are: a host takes seconds for long ones.
    """
    of_all, of_parts = [], []
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (z.astype(jnp.float32).reshape(z.shape[0], parts, -1) for z in (x, y))
        wrong, right = (jnp.sum(jnp.square(z), axis=(0, 2)) for z in (x - y, y))
        of_all.append(jnp.sqrt(jnp.sum(wrong) / jnp.sum(right)))
        of_parts.append(jnp.sqrt(jnp.max(wrong / right)))
    return jnp.max(jnp.stack(of_all)), jnp.max(jnp.stack(of_parts))


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
        calls = [opcodes(x).count("custom-call") for x in (program, still)]
        # Else the time is over that of other work, and says nothing.
        same_work = bool(sent) and not kept and calls[0] == calls[1]
        if same_work:
            break
    functions: dict[str, Callable[[], Any]] = {
        "ring": functools.partial(program, *args),
        "without": functools.partial(still, *args),
    }
    if mask == "causal zigzag":
        contiguous, _ = compiled(ring_function(run, name, is_causal=True), *args)
        functions["contiguous"] = functools.partial(contiguous, *args)
    ms = medians(times(run, functions, rounds))
    ratio = ms["ring"] / ms["without"]
    judged = run.on_gpu and length >= run.size.judged
    run.record(
        what,
        same_work and ratio <= MOST_EXPOSED if judged or not same_work else None,
        over_no_transfers=ratio,
        same_work=same_work,
        ms=ms,
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
        contexts = _contexts(run.devices)
        if isinstance(contexts, str):
            run.record("last: current context", None, skipped=contexts)
            return
        read, make_current = contexts
        outcomes = []
        for i, device in enumerate(run.devices):
            own = jax.device_put(args, device)
            left = []
            for f in (lambda query, *_: query * 2, function):
                program, _ = compiled(f, *own)
                make_current(run.devices[i - 1])
                before = read()
                jax.block_until_ready(program(*own))
                left.append(read())
            outcomes.append([before, *left])
        # Plain JAX may leave the one from before or its own. The library leaves the same.
        same = all(plain == ours for _, plain, ours in outcomes)
        run.record("last: current context", same, before_plain_ours=outcomes)


def _contexts(devices: Sequence[jax.Device]) -> tuple[Callable[[], int], Callable[[jax.Device], None]] | str:
    """Returns a function that reads the thread's CUDA context and one that sets it, or why there are none.

    The first gives 0 for none, the second makes current that of a device which jax uses.
    """
    if devices[0].platform != "gpu":
        return "no GPU"
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)

    def call(name: str, *args: Any) -> None:
        code = getattr(library, name)(*args)
        if code:
            raise RuntimeError(f"{name} gives {code}")

    def read() -> int:
        context = ctypes.c_void_p()
        call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def make_current(device: jax.Device) -> None:
        number, context = ctypes.c_int(), ctypes.c_void_p()
        call("cuDeviceGet", ctypes.byref(number), device.local_hardware_id)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)  # until the process ends
        call("cuCtxSetCurrent", context)

    return read, make_current


# CUDA graphs, in a process of its own for each setting.


def graphs(run: Run) -> None:
    """The same bits with graphs and without, on every device and over all of them."""

    def child(flags: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--child", "--size", _name_of(run.size)]
        flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), flags)))
        done = subprocess.run(
            command,
            env={**os.environ, "XLA_FLAGS": flags},
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
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
    # 65536 tokens for each GPU and step: with half as many, sums of gradients are 2 % of a step. The curve is
    # of half as many: with 32 sequences one of 60 losses was 0.2 apart, the last ones 0.0005.
    per_device = round_up(32 if run.on_gpu else 2, run.count)
    of_curve = round_up(16 if run.on_gpu else 2, run.count)
    every = tuple(range(run.count))
    alone = [((device,), per_device) for device in every]
    full = (every, per_device * run.count)
    curve_of_one, curve_of_all = ((0,), of_curve), (every, of_curve)
    results: dict[tuple[tuple[int, ...], int], tuple[dict[int, float], float]] = {}

    def all_ran(what: str, *runs: tuple[tuple[int, ...], int]) -> bool:
        """Whether there was time for all of these runs, each on some devices with some batch."""
        for one in runs:
            if one not in results:
                if run.is_late(what):
                    return False
                results[one] = train_on(run, *one)
        return True

    what = "train: loss curve"
    with guarded(run, what):
        if all_ran(what, curve_of_one, curve_of_all):
            of_one, of_all = results[curve_of_one][0], results[curve_of_all][0]
            if of_one.keys() != of_all.keys() or not of_one:
                raise RuntimeError(f"curves with other steps: {sorted(of_one)}, {sorted(of_all)}")
            worst = max(of_one, key=lambda step: abs(of_one[step] - of_all[step]))
            apart = abs(of_one[worst] - of_all[worst])
            last = max(of_one)
            run.record(
                what,
                apart <= MOST_LOSS_APART,
                most_apart=apart,
                losses_there={"step": worst, "one": of_one[worst], "all": of_all[worst]},
                last_losses=[of_one[last], of_all[last]],
                steps=last,
            )
    what = "train: tokens a second and device"
    with guarded(run, what):
        if all_ran(what, *alone, full):
            speeds, full_speed = [results[one][1] for one in alone], results[full][1]
            efficiency = full_speed / min(speeds) / run.count
            run.record(
                what,
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
        if run.on_gpu:
            variables = {"CUDA_VISIBLE_DEVICES": visible(devices)}
        else:
            variables = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={len(devices)}"}
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=CHILD_SECONDS
        )
        if done.returncode:
            raise RuntimeError(f"devices {devices}, exit {done.returncode}: {done.stderr[-2000:]}")
        *curve, summary = (json.loads(line) for line in rows.read_text("utf-8").splitlines())
    return {row["step"]: row["loss"] for row in curve}, summary["tokens_per_second"]


def visible(devices: Sequence[int]) -> str:
    """Returns `CUDA_VISIBLE_DEVICES` for some GPUs by their numbers here, where not all may be visible."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(names[i] if names else str(i) for i in devices)


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
    parser.add_argument("--limit", type=float, default=300, help="seconds after which nothing begins")
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
    action: Literal["error", "ignore"] = "error" if run.on_gpu else "ignore"
    warnings.simplefilter(action, jax_r2p.FallbackWarning)
    if options.size == "tiny":
        jax.config.update("jax_disable_most_optimizations", True)
    if options.child:
        graphs_child(run)
        return 0
    if run.count < 2:
        print(f"jax must find two devices at least, got {run.devices}", file=sys.stderr)
        return 2
    # Of a transfer that never ends. A process of its own may still have begun at the limit.
    faulthandler.dump_traceback_later(options.limit + CHILD_SECONDS + 30, exit=True)
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
