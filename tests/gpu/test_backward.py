"""The backward kernels: gradients of the public function against the definition's, in every variant.

Calls of one test share a compiled program; see harness.py. What a gradient may be off by is in gradients.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import gradients
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradients import Cotangents, random_cotangents
from harness import Call, busy_gpu, kernel, poisoned
from numerics import Problem, visible
from processes import REPLAYS, count_launches, start
from test_processes import GRAPHS

import jax_r2p
from jax_r2p import _ffi
from jax_r2p._manifest import load_manifest
from jax_r2p._primitives import bind_backward
from jax_r2p._spec import AttentionSpec

MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"window": (37, 11)},
}
DTYPES = ("bfloat16", "float16")
WIDTHS = (64, 128, 256)
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 319, 320, 321, 383)

masks = pytest.mark.parametrize("mask", MASKS)
widths = pytest.mark.parametrize("h", WIDTHS)
variants = pytest.mark.parametrize(
    ("dtype", "h", "mask"), [(dtype, h, mask) for dtype in DTYPES for h in WIDTHS for mask in MASKS]
)


def vjp(query, key, value, dout, dresidual, **keywords):
    """The gradients by query, key and value; `dresidual` is (B, N, T), as the kernel has the residual."""
    _, pull = jax.vjp(lambda *x: kernel(*x, **keywords), query, key, value)
    return pull((dout, dresidual))


def operands(p: Problem, d: Cotangents) -> tuple:
    return p.query, p.key, p.value, d.out, np.swapaxes(d.residual, -1, -2)


def run(
    calls: Sequence[Call],
    problems: Sequence[Problem],
    cotangents: Sequence[Cotangents],
    *,
    deterministic: bool = False,
) -> list[tuple[np.ndarray, ...]]:
    """The gradients of all calls, by one compiled program over NaN: results and shared memory."""
    arrays = [
        jax.device_put((operands(p, d), call.lengths()))
        for call, p, d in zip(calls, problems, cotangents, strict=True)
    ]

    def program(*arrays):
        return [
            vjp(*x, **lengths, **call.keywords(), deterministic=deterministic)
            for call, (x, lengths) in zip(calls, arrays, strict=True)
        ]

    return over_nan(program, *arrays)


def over_nan(program, *arrays):
    """What a program gives where its results and shared memory were NaN.

    Not `direct`: a gradient's program holds operations of XLA, too.
    """
    return jax.tree.map(np.asarray, poisoned(program, *arrays, shared_memory=True))


def compare(calls: Sequence[Call], results, wanted) -> None:
    failures = []
    for call, result, want in zip(calls, results, wanted, strict=True):
        try:
            gradients.check(result, want, name=str(call))
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(calls)} calls are off:\n" + "\n".join(failures[:20])


def check(calls: Sequence[Call], **keywords) -> None:
    problems = [call.problem() for call in calls]
    cotangents = [random_cotangents(p) for p in problems]
    compare(calls, run(calls, problems, cotangents, **keywords), gradients.expected(problems, cotangents))


# Shapes.


@variants
def test_around_tiles(dtype, h, mask):
    check([Call(t=t, h=h, dtype=dtype, seed=t, **MASKS[mask]) for t in LENGTHS])


@masks
@widths
def test_queries_and_keys_of_other_lengths(h, mask):
    sizes = ((1, 300), (300, 1), (65, 200), (200, 65), (130, 257), (257, 130), (64, 129))
    check([Call(t=t, s=s, h=h, **MASKS[mask]) for t, s in sizes], deterministic=True)


@masks
@widths
def test_grouped_heads(h, mask):
    calls = [Call(t=200, b=2, n=n, k=k, h=h, **MASKS[mask]) for n, k in ((2, 2), (4, 2), (8, 1))]
    check(calls)
    check(calls, deterministic=True)


@widths
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows(h, dtype):
    windows = ((0, 0), (0, 7), (7, 0), (64, 0), (63, 64), (128, 128), (200, 3), (3, 200), (500, 0), 20)
    calls = [Call(t=333, h=h, dtype=dtype, window=window) for window in windows]
    calls += [Call(t=200, s=333, h=h, dtype=dtype, window=window) for window in windows[:4]]
    check([*calls, Call(t=150, s=130, h=h, dtype=dtype, window=(20, 9), is_causal=True)])


@masks
def test_head_dims(mask):
    """Narrower than the kernel's tiles, in steps of 8; others are padded."""
    pairs = [(h, None) for h in (*range(8, 129, 8), *range(136, 257, 24), 192, 1, 17, 33, 100, 127, 191)]
    pairs += [(24, 120), (120, 24), (128, 64), (64, 72), (192, 128), (128, 192)]
    check([Call(t=130, h=h, hv=hv, **MASKS[mask]) for h, hv in pairs])


@variants
def test_slots_that_are_taken_again(dtype, h, mask, monkeypatch):
    """More heads than the ring of sums has slots for, some of them with tiles that no key adds to.

    Under a causal mask so many heads of key would start in turn that each had its slots. Here 3 do, or 5, and
    the last ones are fewer.
    """
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    (variant,) = (v for v in load_manifest().variants if v.name == f"bwd_{short}_d{h}_{mask}")
    few = tuple(range(0, 320, 20))
    calls = [
        Call(t=t, s=s, b=16, n=n, k=k, h=h, dtype=dtype, **lengths, **MASKS[mask])
        for t, s, n, k, lengths in (
            (300, 300, 8, 4, {}),
            (300, 260, 5, 5, {"kv_lengths": few[::-1]}),
            (320, 280, 8, 8, {"q_lengths": few}),
        )
    ]

    def check_rings(together: int, *, deterministic: bool) -> None:
        for call in calls:
            plan = _ffi.plan_sums(
                variant, call.b * call.k, call.n // call.k, call.t, call.s, deterministic=deterministic
            )
            assert plan.slots < call.b * call.n, f"{call}: each head has a slot of its own"
            assert plan.together == together
        check(calls, deterministic=deterministic)

    check_rings(1, deterministic=True)
    for together in (3, 5) if mask == "causal" else (1,):
        monkeypatch.setattr(_ffi, "_TOGETHER_BYTES", together * 320 * 2 * h * 2)
        check_rings(together, deterministic=False)


@variants
def test_shared_memory_of_nan(dtype, h, mask):
    """In a program without the forward kernel, which leaves its own numbers in shared memory."""
    call = Call(t=200, b=2, n=4, k=2, h=h, dtype=dtype, **MASKS[mask])
    p = call.problem()
    d = random_cotangents(p)
    query, key, value, *cotangents = jax.device_put(operands(p, d))
    results = jax.jit(functools.partial(kernel, **call.keywords()))(query, key, value)
    options = {"spec": AttentionSpec(left=p.left, right=p.right), "of": (True, True, True, False)}
    backward = functools.partial(bind_backward, **options, deterministic=False)
    scale = jnp.float32(p.softmax_scale())
    result = over_nan(backward, query, key, value, scale, *results, *cotangents)
    compare([call], [result], gradients.expected([p], [d]))


# What is not there.


@widths
@pytest.mark.parametrize("window", [None, (40, 0)], ids=str)
def test_rows_that_see_nothing(h, window):
    """Their gradients are 0, and their cotangents do not matter, NaN as they may be."""
    call = Call(t=300, s=120, n=4, k=2, h=h, window=window, is_causal=True)
    p = call.problem()
    d = random_cotangents(p)
    empty = ~visible(300, 120, p.left, p.right).any(axis=1)
    assert empty.sum() == 180
    d.out[:, empty], d.residual[:, empty] = np.nan, np.nan
    (result,) = run([call], [p], [d])
    assert not np.asarray(result[0], np.float32)[:, empty].any()
    compare([call], [result], gradients.expected([p], [d]))


@masks
@widths
@pytest.mark.parametrize("deterministic", [False, True])
def test_lengths(h, mask, deterministic):
    """Beyond the lengths stand NaN everywhere, and gradients are 0."""
    t, s = (0, 1, 130, 200, 200, 128), (200, 0, 77, 230, 64, 128)
    call = Call(t=200, s=230, b=6, n=4, k=2, h=h, q_lengths=t, kv_lengths=s, **MASKS[mask])
    p = call.problem()
    d = random_cotangents(p)
    for b, (own_t, own_s) in enumerate(zip(t, s, strict=True)):
        p.query[b, own_t:] = d.out[b, own_t:] = d.residual[b, own_t:] = np.nan
        p.key[b, own_s:] = p.value[b, own_s:] = np.nan
    (result,) = run([call], [p], [d], deterministic=deterministic)
    dquery, dkey, dvalue = (np.asarray(x, np.float32) for x in result)
    for b, (own_t, own_s) in enumerate(zip(t, s, strict=True)):
        assert not dquery[b, own_t:].any()
        assert not dkey[b, own_s:].any()
        assert not dvalue[b, own_s:].any()
    compare([call], [result], gradients.expected([p], [d]))


# Numbers.


@masks
@widths
def test_losses_of_out_or_of_the_residual_alone(h, mask):
    calls = [Call(t=200, n=4, k=2, h=h, seed=seed, **MASKS[mask]) for seed in range(3)]
    problems = [call.problem() for call in calls]
    cotangents = [random_cotangents(p) for p in problems]
    cotangents[0].residual[:] = 0
    cotangents[1].out[:] = 0
    results = run(calls, problems, cotangents)
    assert not np.asarray(results[1][2], np.float32).any(), "value does not change the residual"
    compare(calls, results, gradients.expected(problems, cotangents))


@masks
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales(mask, dtype):
    scales = (-0.3, 0.0, 0.05, 1.0)
    check([Call(t=200, h=64, dtype=dtype, scale=scale, **MASKS[mask]) for scale in scales])


@masks
@pytest.mark.parametrize(
    ("dtype", "scale", "size"),
    [
        *(("bfloat16", scale, 1) for scale in (-0.3, 0.0, 0.125)),
        *(("float16", scale, size) for scale, size in ((0.125, 1), (0.0, 64))),
    ],
)
def test_gradient_by_scale(mask, dtype, scale, size):
    """From sums that are not multiplied by it, since it may be 0; fp16 does not hold the largest of them."""
    call = Call(t=300, b=2, n=4, k=2, dtype=dtype, **MASKS[mask])
    p = call.problem()
    d = random_cotangents(p)
    p.key[:] *= size
    d.out[:] *= size
    options = {"is_causal": call.is_causal, "local_window_size": call.window, "return_residual": True}

    @jax.jit
    def by_scale(query, key, value, scale, cotangents):
        attend = functools.partial(jax_r2p.attention, query, key, value, **options, implementation="r2p")
        return jax.vjp(lambda scale: attend(scale=scale), scale)[1](cotangents)[0]

    @jax.jit
    def by_product(query, key, value, cotangents):
        attend = functools.partial(jax_r2p.attention, scale=1.0, **options, implementation="xla")
        return jax.vjp(lambda query: attend(query, key, value), query)[1](cotangents)[0]

    got = float(by_scale(p.query, p.key, p.value, jnp.float32(scale), (d.out, d.residual)))
    query, *exact = (np.float32(x) for x in (p.query, p.key, p.value, d.out, d.residual))
    unscaled = np.asarray(by_product(query * np.float32(scale), *exact[:2], tuple(exact[2:])))
    if size > 1 and mask == "causal":
        assert np.abs(unscaled).max() > jnp.finfo(jnp.float16).max
    want = float(np.vdot(query, unscaled))
    # Weights, their cotangents and dquery are rounded, each on its own.
    eps = float(jnp.finfo(call.dtype).eps)
    assert abs(got - want) <= eps * float(np.linalg.norm(query)) * float(np.abs(unscaled).max())


@variants
def test_very_negative_residuals(dtype, h, mask):
    """Scores of about -200: exp of them is 0 in float32, and weights are not.

    Around tiles, and the shapes of https://github.com/NVIDIA/cudnn-frontend/issues/1072: one query.
    """
    options = {"h": h, "dtype": dtype, "scale": 0.125, **MASKS[mask]}
    calls = [Call(t=t, **options) for t in (127, 128, 129, 191, 192, 193, 200)]
    calls += [Call(t=1, s=s, b=2, n=2, k=2, **options) for s in (96, 128, 129)]
    problems = [call.problem() for call in calls]
    for p in problems:
        p.query[..., 0], p.key[..., 0] = 40, -40
    cotangents = [random_cotangents(p) for p in problems]
    results = run(calls, problems, cotangents)
    wanted = gradients.expected(problems, cotangents)
    compare(calls, results, wanted)
    # The maths in the dtype is far off here, so more is asked: all but the column that is 40 times as large.
    for call, result, want in zip(calls, results, wanted, strict=True):
        for name, got, full in zip(gradients.NAMES, result, want.full, strict=True):
            error = np.abs(np.asarray(got, np.float32) - full)[..., 1:]
            assert error.max() <= 0.02 * np.abs(full[..., 1:]).max(), f"{call}: {name}"


# Transforms.


def test_keys_that_a_batch_shares():
    """Mapped queries on the same keys: their gradients are summed, inside the kernel."""
    calls = [Call(t=150, s=170, b=3, n=4, k=2, h=h, **MASKS[mask]) for h in WIDTHS for mask in MASKS]
    problems = []
    for p in (call.problem() for call in calls):
        key, value = (np.repeat(x[:1], 3, axis=0) for x in (p.key, p.value))
        problems.append(dataclasses.replace(p, key=key, value=value))
    cotangents = [random_cotangents(p) for p in problems]
    arrays = [jax.device_put(operands(p, d)) for p, d in zip(problems, cotangents, strict=True)]

    def program(*arrays):
        results = []
        for call, (query, key, value, dout, dresidual) in zip(calls, arrays, strict=True):
            mapped = jax.vmap(functools.partial(kernel, **call.keywords()), (0, None, None))
            _, pull = jax.vjp(mapped, query, key[0], value[0])
            results.append(pull((dout, dresidual)))
        return results

    results = over_nan(program, *arrays)
    wanted = [
        gradients.Expected(
            *((dquery, dkey.sum(axis=0), dvalue.sum(axis=0)) for dquery, dkey, dvalue in (x.full, x.low))
        ).rounded(jnp.bfloat16)
        for x in gradients.expected(problems, cotangents)
    ]
    compare(calls, results, wanted)


LOOPED = Call(t=130, s=150, n=4, k=2, h=64, window=(40, 3))


def test_transforms_agree_with_a_loop():
    """jit, vmap, scan and remat, bit by bit: sums are in a fixed order."""
    problems = [dataclasses.replace(LOOPED, seed=seed).problem() for seed in range(3)]
    stacked = [jnp.concatenate(x) for x in zip(*((p.query, p.key, p.value) for p in problems), strict=True)]

    def loss(query, key, value):
        out, residual = kernel(query, key, value, **LOOPED.keywords(), deterministic=True)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(residual))

    grad = jax.grad(loss, (0, 1, 2))
    ways = {
        "vmap": jax.vmap(grad),
        "scan": lambda *x: jax.lax.scan(lambda _, own: (None, grad(*own)), None, x)[1],
        "remat": jax.vmap(jax.grad(jax.checkpoint(loss), (0, 1, 2))),
    }
    one = jax.jit(grad)
    want = [np.stack(x) for x in zip(*(one(*own) for own in zip(*stacked, strict=True)), strict=True)]
    assert all(np.asarray(x, np.float32).any() for x in want)
    for name, way in ways.items():
        for what, got, loop in zip(gradients.NAMES, jax.jit(way)(*stacked), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got), loop, err_msg=f"{name}: {what}")


SAVE = jax.checkpoint_policies.save_only_these_names(jax_r2p.OUT_NAME, jax_r2p.RESIDUAL_NAME)


LAYERS = 3
REMAT = [(policy, scanned) for policy in (SAVE, None) for scanned in (False, True)]


def remat(policy, scanned):
    """Value and gradient of one layer, or of `LAYERS` in a scan, and its arguments."""
    p = LOOPED.problem()

    def loss(query, key, value):
        def layer(x, _):
            return x + kernel(x, key, value, **LOOPED.keywords())[0], None

        layer = jax.checkpoint(layer, policy=policy)
        out = jax.lax.scan(layer, query, None, length=LAYERS)[0] if scanned else layer(query, None)[0]
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    # The value, too: without it the first of two calls would be of no use.
    program = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    return program, jax.device_put((p.query, p.key, p.value))


def test_how_often_the_forward_kernel_runs():
    """With remat: once a layer if a policy saves its results, else twice. Each of the other two: once.

    Launches are counted, as XLA may unroll a scan; in a process without command buffers, which hide them.
    """
    launches = start("remat", timeout=120, XLA_FLAGS=GRAPHS["off"]).split()
    assert [int(x) for x in launches] == [3, 3 * LAYERS, 4, 4 * LAYERS]


# Runs.

REPEATED = [
    Call(t=1000, b=2, n=8, k=2, h=h, dtype=dtype, **mask)
    for h, dtype in ((128, "bfloat16"), (64, "float16"), (256, "bfloat16"))
    for mask in ({}, {"is_causal": True}, {"window": (100, 0)})
]


def compiled(call: Call, *, deterministic: bool):
    p = call.problem()
    arrays = jax.device_put(operands(p, random_cotangents(p)))
    return jax.jit(functools.partial(vjp, **call.keywords(), deterministic=deterministic)), arrays


def bits(results) -> tuple[bytes, ...]:
    return tuple(np.asarray(x).tobytes() for x in results)


@pytest.mark.parametrize("call", REPEATED, ids=str)
def test_fifty_deterministic_runs_are_bit_equal_while_the_gpu_is_busy(call):
    """Kernels of a second stream hold some SMs, so blocks start at other times and on other SMs."""
    function, arrays = compiled(call, deterministic=True)
    want = bits(function(*arrays))
    with busy_gpu():
        same = [bits(function(*arrays)) == want for _ in range(50)]
    assert all(same), f"{same.count(False)} of 50 runs differ"


@pytest.mark.parametrize("call", REPEATED, ids=str)
def test_runs_in_any_order_are_close(call):
    """By key and value they are bit-equal: only the sums of dquery come in any order."""
    ordered = compiled(call, deterministic=True)
    unordered, arrays = compiled(call, deterministic=False)
    want = [np.asarray(x, np.float32) for x in ordered[0](*ordered[1])]
    for _ in range(10):
        got = [np.asarray(x, np.float32) for x in unordered(*arrays)]
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_array_equal(got[2], want[2])
        # Sums in float32 in another order may round to the neighbour.
        eps = float(jnp.finfo(call.dtype).eps)
        np.testing.assert_allclose(got[0], want[0], rtol=2 * eps, atol=1e-5)


def test_cotangents_that_a_matmul_has_just_written():
    """300 times: the kernel sees all of its operands, however late they are written.

    Of two cotangents in random order: what a kernel that starts too early reads is left by a run before,
    which with equal cotangents would be right.
    """
    call = Call(t=1024, b=2, n=8, k=2, h=128, is_causal=True)
    p = call.problem()
    rng = np.random.default_rng(0)
    *lefts, right = (
        jnp.asarray(rng.standard_normal(shape, np.float32).astype(p.query.dtype))
        for shape in ((2048, 4096), (2048, 4096), (4096, 1024))
    )
    query, key, value = jax.device_put((p.query, p.key, p.value))

    def dout_of(left, right):
        # Whoever reads it reads what is in memory.
        return jax.lax.optimization_barrier((left @ right).reshape(query.shape))

    def at_once(query, key, value, left, right):
        dout = dout_of(left, right)
        zeros = jnp.zeros((2, 8, 1024), jnp.float32)
        return dout, vjp(query, key, value, dout, zeros, is_causal=True, deterministic=True)

    program = jax.jit(at_once)
    # The same from cotangents that have long been there.
    later = jax.jit(functools.partial(vjp, is_causal=True, deterministic=True))
    wanted = []
    for left in lefts:
        dout, _ = jax.block_until_ready(program(query, key, value, left, right))
        wanted.append(bits(later(query, key, value, dout, jnp.zeros((2, 8, 1024), jnp.float32))))
    assert all(x != y for x, y in zip(*wanted, strict=True))
    order = rng.integers(0, 2, 300).tolist()
    runs = [program(query, key, value, lefts[which], right)[1] for which in order]
    pairs = enumerate(zip(order, runs, strict=True))
    wrong = [number for number, (which, result) in pairs if bits(result) != wanted[which]]
    assert not wrong, f"{len(wrong)} of 300 runs differ, the first is number {wrong[0]}"


@variants
def test_grad_launches_the_kernel(dtype, h, mask):
    """Once, beside the other two kernels; and the program names it."""
    call = Call(t=200, h=h, dtype=dtype, **MASKS[mask])
    p = call.problem()
    arrays = jax.device_put((p.query, p.key, p.value))

    def loss(query, key, value):
        out, _ = kernel(query, key, value, **call.keywords())
        return jnp.sum(out.astype(jnp.float32) ** 2)

    program = jax.jit(jax.grad(loss, (0, 1, 2)))
    text = program.lower(*arrays).as_text()
    for target in (_ffi.TARGET, _ffi.PREPROCESS_TARGET, _ffi.BACKWARD_TARGET):
        assert text.count(f"@{target}(") == 1
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    assert f'variant = "bwd_{short}_d{h}_{mask}"' in text
    # At the first run every launch comes by the library, recorded or not.
    assert count_launches(lambda: jax.block_until_ready(program(*arrays)), runs=1) >= 3


GRAPH_CALLS = [Call(t=200, b=2, n=4, k=2, h=h, **MASKS[mask]) for h in WIDTHS for mask in MASKS]


def test_command_buffers_change_nothing(tmp_path):
    """In a process each; and they were used where they are on: fewer launches come by the library."""

    def one(name):
        path = tmp_path / f"{name}.npz"
        launches = start("gradients", str(path), timeout=180, XLA_FLAGS=GRAPHS[name]).split()[-1]
        with np.load(path) as file:
            return [file[key].tobytes() for key in sorted(file.files, key=lambda x: int(x[4:]))], launches

    with ThreadPoolExecutor(2) as pool:
        saved = dict(zip(GRAPHS, pool.map(one, GRAPHS), strict=True))
    on, off = saved["on"][0], saved["off"][0]
    assert len(off) == 3 * 3 * len(GRAPH_CALLS)
    count = 3 * len(GRAPH_CALLS)
    assert off[:count] == off[count : 2 * count] == off[2 * count :]
    assert on == off
    plain = REPLAYS * 3 * len(GRAPH_CALLS)
    assert int(saved["off"][1]) == plain
    assert int(saved["on"][1]) < plain
