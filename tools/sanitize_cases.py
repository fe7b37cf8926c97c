"""A few small calls of every kernel, for compute-sanitizer: values and gradients are checked too, in numpy.

    compute-sanitizer --tool memcheck python tools/sanitize_cases.py [PART...]

PART: lengths, forward, pairs, gradient_lengths, gradients64, gradients128 or gradients256; all by default.
The tool itself may die of too many kernels in one process, or beside itself.

Small, since instrumented kernels run a hundred times slower; but with several tiles each way, partial ones,
grouped heads, skipped blocks, rows that see nothing, and lengths, so that every barrier and every bound is
passed. XLA compiles nothing here but the calls themselves.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

import jax_r2p
from jax_r2p import _ffi, _primitives
from jax_r2p._spec import AttentionSpec

# (H, Hv): every variant, narrow heads, and a width that is padded.
WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (40, 40), (100, 36))
# (T, S, N, K): two tiles of 192 rows or more and four of 128 keys, partial; then T > S, so that causal rows
# see nothing
SIZES = ((389, 413, 2, 1), (210, 70, 2, 2))
# More tiles than twice as many CTAs as fit on 132 SMs, so that some take a third, and causal ones pairs.
QUEUE_SIZE = (130, 130, 538, 538)
# What takes the kernels for rows that see many keys: H, mask, its arguments and bounds, and T, S, N, K.
WIDE_CALLS = (
    (64, "causal", {"is_causal": True}, None, 0, (210, 3100, 2, 1)),
    (128, "window", {"local_window_size": (700, 90)}, 700, 90, (413, 901, 2, 1)),
)
# Enough tiles that causal ones of these kernels are in pairs, and some CTAs have two: H, and T, S, N, K.
WIDE_PAIRS = ((64, (193, 3100, 276, 23)), (128, (130, 260, 254, 127)))
# More heads than those that run at once, so that every backward kernel takes slots of its ring of sums again.
RING_SIZE = (70, 600, 40, 40)
# So many of them start in turn under a causal mask, where the order of additions is not fixed. Else all would
# do, and each would have its own slot. The last ones are fewer.
RING_TOGETHER = 3
MASKS = {
    "none": ({}, None, None),
    "causal": ({"is_causal": True}, None, 0),
    "window": ({"local_window_size": (70, 9)}, 70, 9),
}
# Of T and S above: a query tile that is beyond the sequence, and a length inside a block; no key; no query.
LENGTHS = ((100, 300), (389, 0), (0, 413), (150, 40))
DTYPES = {
    "bfloat16": 0.02,
    "float16": 0.004,
}  # allowed error of outputs of size 1: a few units in the last place


Shapes = tuple[tuple[int, ...], ...]


def expected(q, k, v, left, right) -> np.ndarray:
    """Attention in float64, by the definition."""
    t, n, h = q.shape[1:]
    s, group = k.shape[1], n // k.shape[2]
    q, k, v = (x.astype(np.float64)[0] for x in (q, k, v))
    distance = np.arange(s)[None] - np.arange(t)[:, None] - (s - t)
    mask = (distance >= (-np.inf if left is None else -left)) & (
        distance <= (np.inf if right is None else right)
    )
    out = np.zeros((1, t, n, v.shape[-1]))
    for head in range(n):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(h)
        weights = np.where(mask, np.exp(scores), 0)
        total = weights.sum(axis=1, keepdims=True)
        out[0, :, head] = weights @ v[:, head // group] / np.where(total == 0, 1, total)
    return out


def check_lengths(rng: np.random.Generator, h: int, name: str) -> bool:
    """A batch of sequences with lengths, NaN beyond them; returns whether the results are right."""
    keywords, left, right = MASKS[name]
    t, s, n, k = SIZES[0]
    shapes = ((len(LENGTHS), t, n, h), (len(LENGTHS), s, k, h), (len(LENGTHS), s, k, h))
    query, key, value = (rng.standard_normal(x, np.float32).astype(jnp.bfloat16) for x in shapes)
    want = np.zeros(query.shape)
    for b, (own_t, own_s) in enumerate(LENGTHS):
        query[b, own_t:] = key[b, own_s:] = value[b, own_s:] = np.nan
        if own_t and own_s:
            rows = query[b : b + 1, :own_t], key[b : b + 1, :own_s], value[b : b + 1, :own_s]
            want[b, :own_t] = expected(*rows, left, right)
    lengths = np.asarray(LENGTHS, np.int32)

    @jax.jit
    def f(query, key, value, t, s):
        lengths = {"query_seq_lengths": t, "key_value_seq_lengths": s}
        return jax_r2p.attention(query, key, value, **keywords, **lengths, implementation="r2p")

    out = np.asarray(f(*jax.device_put((query, key, value, lengths[:, 0], lengths[:, 1]))), np.float64)
    error = np.abs(out - want).max()
    good = bool(error < DTYPES["bfloat16"])
    print(f"{'ok ' if good else 'BAD'} {name:6s} lengths H={h}: error {error:.1e}", flush=True)
    return good


def check_gradient_lengths(rng: np.random.Generator, h: int, hv: int, name: str, deterministic: bool) -> bool:
    """Gradients of such a batch; returns whether they are right, and 0 for what lies beyond."""
    _, left, right = MASKS[name]
    t, s, n, k = SIZES[0]
    shapes = ((t, n, h), (s, k, h), (s, k, hv), (t, n, hv))
    arrays = [rng.standard_normal((len(LENGTHS), *x), np.float32).astype(jnp.bfloat16) for x in shapes]
    wanted = [np.zeros(x.shape) for x in arrays[:3]]
    for b, (own_t, own_s) in enumerate(LENGTHS):
        own = own_t, own_s, own_s, own_t
        for x, length in zip(arrays, own, strict=True):
            x[b, length:] = np.nan
        if own_t and own_s:
            rows = [x[b : b + 1, :length] for x, length in zip(arrays, own, strict=True)]
            for want, length, part in zip(
                wanted, own[:3], expected_gradients(*rows, left, right), strict=True
            ):
                want[b, :length] = part[0]
    got = gradients(arrays, name, deterministic, *np.asarray(LENGTHS, np.int32).T)
    what = f"{name:6s} gradients with lengths H={h} Hv={hv} {deterministic=}"
    return are_close(got, wanted, "bfloat16", what)


def gradients(
    arrays: Sequence[np.ndarray], name: str, deterministic: bool, *lengths: np.ndarray
) -> Sequence[jax.Array]:
    """By query, key and value, of a call of mask `name`, given these and the cotangent of out.

    What the forward pass gives goes by the host: initcheck does not see what TMA stores, and would report
    that the backward pass reads it.
    """
    keywords, left, right = MASKS[name]
    *operands, dout = jax.device_put(arrays)
    given = dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths, strict=False))
    attend = functools.partial(jax_r2p.attention, **keywords, return_residual=True, implementation="r2p")
    rows = [np.asarray(x) for x in jax.jit(attend)(*operands, **given)]

    @jax.jit
    def backward(query, key, value, out, residual, dout, *lengths):
        lse = jnp.swapaxes(residual, 1, 2)
        return _primitives.bind_backward(
            *(query, key, value, jnp.float32(query.shape[-1] ** -0.5), out, lse, dout, jnp.zeros_like(lse)),
            *lengths,
            spec=AttentionSpec(left=left, right=right),
            deterministic=deterministic,
            of=(True, True, True, False),
        )

    return backward(*operands, *jax.device_put(rows), dout, *lengths)


def are_close(got: Iterable[jax.Array], wanted: Iterable[np.ndarray], dtype: str, what: str) -> bool:
    """Whether gradients are right, relative to the largest element of each; prints that."""
    errors = [
        np.abs(np.asarray(x, np.float64) - want).max() / np.abs(want).max()
        for x, want in zip(got, wanted, strict=True)
    ]
    good = bool(np.max(errors) < DTYPES[dtype])  # False for NaN, which `max` may lose
    print(f"{'ok ' if good else 'BAD'} {what}: errors {', '.join(f'{x:.1e}' for x in errors)}", flush=True)
    return good


def expected_gradients(q, k, v, dout, left, right) -> tuple[np.ndarray, ...]:
    """The gradients by query, key and value in float64, by their formulas; heads as in `expected`."""
    t, n, h = q.shape[1:]
    s, group = k.shape[1], n // k.shape[2]
    q, k, v, dout = (x.astype(np.float64)[0] for x in (q, k, v, dout))
    distance = np.arange(s)[None] - np.arange(t)[:, None] - (s - t)
    mask = (distance >= (-np.inf if left is None else -left)) & (
        distance <= (np.inf if right is None else right)
    )
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for head in range(n):
        shared = head // group
        weights = np.where(mask, np.exp(q[:, head] @ k[:, shared].T / math.sqrt(h)), 0)
        total = weights.sum(axis=1, keepdims=True)
        weights /= np.where(total == 0, 1, total)
        dweights = dout[:, head] @ v[:, shared].T
        delta = (weights * dweights).sum(axis=1, keepdims=True)
        dscores = weights * (dweights - delta) / math.sqrt(h)
        dq[:, head] = dscores @ k[:, shared]
        dk[:, shared] += dscores.T @ q[:, head]
        dv[:, shared] += weights.T @ dout[:, head]
    return dq[None], dk[None], dv[None]


def check_gradients(rng: np.random.Generator, h: int, dtype: str, name: str) -> bool:
    """A backward kernel, with sums in a fixed order and in any; returns whether the results are right."""
    _, left, right = MASKS[name]
    good = True
    cases = (*zip(SIZES, (True, False), strict=True), (RING_SIZE, True), (RING_SIZE, False))
    together_bytes = _ffi._TOGETHER_BYTES
    for (t, s, n, k), deterministic in cases:
        is_ring = (t, s, n, k) == RING_SIZE
        _ffi._TOGETHER_BYTES = RING_TOGETHER * t * 2 * h * 2 if is_ring else together_bytes
        shapes = ((1, t, n, h), (1, s, k, h), (1, s, k, h), (1, t, n, h))
        arrays = [rng.standard_normal(x, np.float32).astype(jnp.dtype(dtype)) for x in shapes]
        wanted = expected_gradients(*arrays, left, right)
        what = f"{name:6s} {dtype} gradients H={h} T={t} S={s} {deterministic=}"
        good &= are_close(gradients(arrays, name, deterministic), wanted, dtype, what)
    return good


def forward_calls() -> Iterator[tuple[str, str, dict[str, Any], int | None, int | None, Shapes]]:
    """Calls of every forward kernel: mask, dtype, arguments, left and right bound, shapes."""
    for dtype in DTYPES:
        for h, hv in WIDTHS:
            for name, (keywords, left, right) in MASKS.items():
                for t, s, n, k in SIZES if dtype == "float16" else (*SIZES, QUEUE_SIZE):
                    yield name, dtype, keywords, left, right, ((1, t, n, h), (1, s, k, h), (1, s, k, hv))
        for h, name, keywords, left, right, (t, s, n, k) in WIDE_CALLS:
            yield name, dtype, keywords, left, right, ((1, t, n, h), (1, s, k, h), (1, s, k, h))


def pair_calls() -> Iterator[tuple[str, str, dict[str, Any], int | None, int | None, Shapes]]:
    """Calls whose tiles are in pairs, of the kernels for rows that see many keys."""
    for h, (t, s, n, k) in WIDE_PAIRS:
        yield "causal", "bfloat16", *MASKS["causal"], ((1, t, n, h), (1, s, k, h), (1, s, k, h))


def check_forward(rng: np.random.Generator, calls: Callable[[], Iterator[Any]]) -> int:
    """Returns how many calls give wrong results."""
    failed = 0
    for name, dtype, keywords, left, right, shapes in calls():
        arrays = [rng.standard_normal(x, np.float32).astype(jnp.dtype(dtype)) for x in shapes]
        f = jax.jit(lambda *a, kw=keywords: jax_r2p.attention(*a, **kw, implementation="r2p"))
        out = np.asarray(f(*jax.device_put(arrays))).astype(np.float64)
        error = np.abs(out - expected(*arrays, left, right)).max()
        good = error < DTYPES[dtype]  # False for NaN
        failed += not good
        sizes = f"query {shapes[0]} key {shapes[1]} value {shapes[2]}"
        print(f"{'ok ' if good else 'BAD'} {name:6s} {dtype} {sizes}: error {error:.1e}", flush=True)
    return failed


def check_all_gradients(rng: np.random.Generator, h: int) -> int:
    """The backward kernels of a head dim; returns how many give wrong results."""
    return sum(not check_gradients(rng, h, dtype, name) for dtype in DTYPES for name in MASKS)


def main() -> int:
    parts: dict[str, Callable[[np.random.Generator], int]] = {
        "lengths": lambda rng: sum(not check_lengths(rng, h, name) for h in (64, 128) for name in MASKS),
        "forward": functools.partial(check_forward, calls=forward_calls),
        "pairs": functools.partial(check_forward, calls=pair_calls),
        "gradient_lengths": lambda rng: sum(
            not check_gradient_lengths(rng, h, hv, name, h == hv)
            for h, hv in ((64, 64), (40, 40), (100, 36), (192, 128))
            for name in MASKS
        ),
        **{f"gradients{h}": functools.partial(check_all_gradients, h=h) for h in (64, 128, 256)},
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all by default")
    chosen = parser.parse_args().parts or list(parts)
    if unknown := set(chosen) - set(parts):
        parser.error(f"PART must be one of {', '.join(parts)}, got {', '.join(sorted(unknown))}")
    return 1 if sum(parts[name](np.random.default_rng(0)) for name in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
