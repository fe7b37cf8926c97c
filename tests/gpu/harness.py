"""Running the kernel so that nothing can hide: every output is poisoned first, every result is compared.

`Call` says how the public function is called, `problem` (see numerics.py) what with. Calls that belong
together go into one compiled program: compiling a program costs some 0.3 s whatever is in it, so 50 shapes
are one program.

Poisoning. XLA allocates results itself, so each result's memory is handed in: an array full of NaN bits is
donated for every result, and XLA writes the result where that array was. Asserted each time: by address that
it did, and from the compiled program that no copy stands between the kernel and that memory. What the kernel
leaves unwritten is then NaN and fails the comparison. The residual is returned as (B, N, T), the order in
which the kernel writes it; otherwise a transpose would be such a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import re
import threading
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numerics
import numpy as np
from numerics import Problem

import jax_r2p


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of `jax_r2p.attention` in words: its sizes and its keyword arguments."""

    t: int
    s: int | None = None
    b: int = 1
    n: int = 2
    k: int = 1
    h: int = 64
    hv: int | None = None
    dtype: str = "bfloat16"
    is_causal: bool = False
    window: int | tuple[int, int] | None = None
    scale: float | None = None
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    seed: int = 0

    def __str__(self) -> str:
        mask = ("causal " if self.is_causal else "") + (
            "" if self.window is None else f"window={self.window} "
        )
        s = self.t if self.s is None else self.s
        return (
            f"{mask}T={self.t} S={s} B={self.b} N={self.n} K={self.k} H={self.h} "
            f"{'' if self.hv is None else f'Hv={self.hv} '}{self.dtype}"
            f"{'' if self.scale is None else f' scale={self.scale}'}"
            f"{'' if self.q_lengths is None else f' t={self.q_lengths}'}"
            f"{'' if self.kv_lengths is None else f' s={self.kv_lengths}'}"
        )

    def problem(self) -> Problem:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "seed"}
        return numerics.random_problem(self.seed, **fields)

    def keywords(self) -> dict:
        return {"is_causal": self.is_causal, "local_window_size": self.window, "scale": self.scale}

    def lengths(self) -> dict:
        """The lengths as arguments of the public function: arrays, so that a program can be given others."""
        given = {"query_seq_lengths": self.q_lengths, "key_value_seq_lengths": self.kv_lengths}
        return {name: np.asarray(x, np.int32) for name, x in given.items() if x is not None}


def kernel(query, key, value, **keywords):
    """The public function, kernel demanded, residual in the order the kernel writes it: out, (..., N, T)."""
    out, residual = jax_r2p.attention(
        query, key, value, **keywords, return_residual=True, implementation="r2p"
    )
    return out, jnp.swapaxes(residual, -1, -2)


def _poison(shape, dtype) -> jax.Array:
    """An array of `shape` with every bit set (a NaN in each floating type), copied from the host: no
    compilation.
    """
    bits = np.full(shape, -1, np.dtype(f"int{8 * jnp.dtype(dtype).itemsize}"))
    return jax.device_put(bits.view(jnp.dtype(dtype)))


def poisoned(function, *args, direct: bool = False, shared_memory: bool = False):
    """jit(function)(*args) with every result written over NaN. Returns what `function` returns, on the
    device.

    direct: `function` does nothing but call the kernel. Then the compiled program may hold no copy, so the
      memory that was poisoned is the memory that the kernel wrote.
    shared_memory: Leave NaN in the shared memory of every SM, too, right before the program runs.
    """
    shapes = jax.eval_shape(function, *args)
    poison = jax.tree.map(lambda x: _poison(x.shape, x.dtype), shapes)
    addresses = _addresses(poison)

    def program(poison, args):
        del poison  # only its memory is wanted
        return function(*args)

    compiled = jax.jit(program, donate_argnums=0, keep_unused=True).lower(poison, args).compile()
    if direct:
        copies = re.findall(r"= \w+\[\d[^ ]* (?:copy|transpose|fusion)\(.*", compiled.as_text())
        assert not copies, f"results reach the poisoned memory through copies: {copies[:3]}"
    if shared_memory:
        # The widest kernel fills most. NaN of bfloat16 are NaN of float16 and, in pairs, of float32, too.
        fill_shared_memory_with_nan(256, "bfloat16")
    written = _addresses(results := jax.block_until_ready(compiled(poison, args)))
    assert written == addresses, "a result was not written into the memory that was poisoned for it"
    return results


def _addresses(tree) -> list[int]:
    """Sorted device addresses; results of equal shape may swap places. Empty arrays have no memory."""
    return sorted(x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size)


def run(
    calls: Sequence[Call], problems: Sequence[Problem], *, direct: bool = True
) -> list[tuple[np.ndarray, np.ndarray]]:
    """All calls in one compiled program over poisoned results: per call out (B, T, N, Hv) and residual (B, T,
    N). Widths that have to be padded are not `direct`.
    """
    arrays = [
        jax.device_put(((p.query, p.key, p.value), call.lengths()))
        for call, p in zip(calls, problems, strict=True)
    ]

    def program(*arrays):
        return [
            kernel(*a, **lengths, **call.keywords()) for call, (a, lengths) in zip(calls, arrays, strict=True)
        ]

    return [
        (np.asarray(out), np.swapaxes(np.asarray(residual), -1, -2))
        for out, residual in poisoned(program, *arrays, direct=direct)
    ]


def check(calls: Sequence[Call], *, direct: bool = True) -> None:
    """Run all calls on random inputs and compare out and residual of each with the definition.

    Calls of one shape and mask differ by `seed` only if they say so. The first failure of each call is
    collected, so one run shows whether one length is off or all are.
    """
    problems = [call.problem() for call in calls]
    results = run(calls, problems, direct=direct)
    failures = []
    for call, (out, residual), want in zip(calls, results, numerics.expected(problems), strict=True):
        try:
            numerics.check(out, residual, want, name=str(call))
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(calls)} calls are off:\n" + "\n".join(failures[:20])


def check_visible_keys(calls: Sequence[Call]) -> None:
    """Read the mask back out of the kernel, exactly: each call must use the visible keys, each once, and no
    other.

    With query 0 all weights are 1, so residual = ln(number of visible keys), and with value[j] = one in lane
    j % Hv the output times that number counts the visible keys of each lane. A key too many or too few moves
    a count by one, far over the rounding allowed here; random inputs would hide it in rows that see hundreds
    of keys.
    """
    problems = []
    for call in calls:
        p = call.problem()
        lanes = np.zeros(p.value.shape, p.value.dtype)
        lanes[:, np.arange(lanes.shape[1]), :, np.arange(lanes.shape[1]) % lanes.shape[-1]] = 1
        problems.append(dataclasses.replace(p, query=np.zeros_like(p.query), value=lanes))
    failures = []
    for call, p, (out, residual) in zip(calls, problems, run(calls, problems), strict=True):
        b, t, s, _, _, _ = p.shape
        width = p.out_shape[-1]
        seen = np.zeros((b, t, s), bool)
        for i in range(b):
            own_t, own_s = p.lengths(i)
            seen[i, :own_t, :own_s] = numerics.visible(own_t, own_s, p.left, p.right)
        count = seen.sum(axis=2)
        lane = np.zeros((b, t, width))
        for j in range(s):
            lane[:, :, j % width] += seen[:, :, j]
        with np.errstate(divide="ignore"):
            want_residual = np.log(count)[..., None]
        want = (lane / np.maximum(count, 1)[..., None])[:, :, None]
        rounding = float(jnp.finfo(p.value.dtype).eps)  # at most one unit in the last place; 0 must be 0
        want, want_residual = np.broadcast_to(want, out.shape), np.broadcast_to(want_residual, residual.shape)
        try:
            numerics.assert_close(residual, want_residual, 1e-5, name=f"{call}: residual")
            numerics.assert_close(out, want, rounding * want, name=f"{call}: share of each lane")
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(calls)} calls are off:\n" + "\n".join(failures[:20])


def fill_shared_memory_with_nan(h: int, dtype: str) -> None:
    """Leave NaN in the shared memory of every SM: what a later launch reads without writing it first is then
    NaN.
    """
    nan = jnp.full((1, 256, 1056, h), jnp.nan, dtype)  # 1056 heads: 8 blocks per SM of an H200 at the least
    jax.block_until_ready(kernel(nan, nan[:, :, :1], nan[:, :, :1]))


@contextlib.contextmanager
def busy_gpu() -> Iterator[None]:
    """Keeps kernels in flight on a stream of their own, so that blocks start at other times and on other SMs.

    JAX has one compute stream for each device, so work of another thread would wait for the kernel, not run
    beside it. Fails unless kernels were launched, and all ran, while the body did.
    """
    spinner = _Spinner()
    spinner.start()
    try:
        assert spinner.running.wait(60), "no kernel has run on the second stream"
        spinner.check()
        before = spinner.launches
        yield
        launches = spinner.launches - before
    finally:
        spinner.stop.set()
        spinner.join(60)
    spinner.check()
    assert not spinner.is_alive(), "kernels on the second stream do not end"
    assert launches > 0, "no kernel has run on the second stream beside the body"


_SPIN = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry spin(.param .u64 cycles)
{
    .reg .pred %before;
    .reg .b64 %cycles, %first, %now;
    ld.param.u64 %cycles, [cycles];
    mov.u64 %first, %clock64;
again:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %first;
    setp.lt.u64 %before, %now, %cycles;
    @%before bra again;
    ret;
}
"""

_SPIN_SHARED_MEMORY = 192 << 10
"""Of 227 KiB that an SM has for blocks: none of ours fits beside a block of this kernel."""


class _Spinner(threading.Thread):
    """Launches kernels of 8 to 64 blocks that hold their SMs for 20 to 200 microseconds."""

    def __init__(self) -> None:
        # What hangs must not keep the process from ending.
        super().__init__(name="second stream", daemon=True)
        self.stop, self.running = threading.Event(), threading.Event()
        self.launches = 0
        self._error: AssertionError | AttributeError | OSError | None = None

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        try:
            self._run()
        except (AssertionError, AttributeError, OSError) as error:
            self._error = error
        finally:
            self.running.set()

    def _run(self) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")

        def call(name: str, *arguments) -> None:
            status = cuda[name](*arguments)
            assert status == 0, f"{name} of the second stream failed: CUDA error {status}"

        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuInit", 0)
        call("cuDeviceGet", ctypes.byref(device), 0)  # as JAX's first device
        # The context that JAX uses: kernels of two contexts would take turns.
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        with contextlib.ExitStack() as undo:
            undo.callback(call, "cuDevicePrimaryCtxRelease_v2", device)
            call("cuCtxSetCurrent", context)
            undo.callback(call, "cuCtxSetCurrent", ctypes.c_void_p())
            call("cuModuleLoadData", ctypes.byref(module), _SPIN)
            undo.callback(call, "cuModuleUnload", module)
            call("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
            call("cuFuncSetAttribute", function, 8, _SPIN_SHARED_MEMORY)  # the most dynamic shared memory
            call("cuStreamCreate", ctypes.byref(stream), 1)  # waits for no other stream
            undo.callback(call, "cuStreamDestroy_v2", stream)
            rng = np.random.default_rng(0)
            while not self.stop.is_set():
                for _ in range(4):  # and no more in the queue, so that it is soon empty
                    cycles = ctypes.c_uint64(int(rng.integers(40_000, 400_000)))
                    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(cycles))
                    sizes = (int(rng.integers(8, 65)), 1, 1, 32, 1, 1, _SPIN_SHARED_MEMORY)
                    call("cuLaunchKernel", function, *sizes, stream, parameters, None)
                call("cuStreamSynchronize", stream)
                self.launches += 4
                self.running.set()
