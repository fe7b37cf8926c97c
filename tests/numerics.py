"""What a result is compared with, and how close it has to be: the one place for both.

Letters: B batch, T queries, S keys, N query heads, K key/value heads, H and Hv elements of a key and a value.

`Problem` is one attention call written down as plain arrays and numbers. `expected` computes what it should
give straight from the definition (an explicit boolean mask, float32, full matmul precision), and once more
with every operation in the input's dtype. The second one says how much rounding the dtype itself costs, and
so what may be asked of a kernel:

    max |actual - expected|  <=  2 * max |same maths in the input dtype - expected|  +  1e-5

Both are computed by two small jitted functions whose shapes are padded to a few sizes: lengths, window and
scale are operands, so checking a thousand shapes compiles a handful of programs, not a thousand.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

UNBOUNDED = 2**29
"""A window end that no length used here reaches."""

FACTOR, FLOOR = 2.0, 1e-5
"""The tolerance rule of the output: FACTOR times the error of the same maths in the dtype, plus FLOOR."""

RESIDUAL_ABSOLUTE, RESIDUAL_RELATIVE = 1e-4, 2e-6
"""The residual is float32 in every dtype, so it gets a float32 tolerance: a key more or less in a row of
5,000 shows.
"""

_HEAD_DIMS = (128, 256)
_LENGTHS = (32, 288, 800, 1152, 2304, 4608, 16_512, 33_024)
_ELEMENTS = 8_000_000  # scores in one padded call: bounds the memory of the comparison at some 100 MB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call: query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv).

    Query i sees keys i+S-T-left to i+S-T+right. With `q_lengths` or `kv_lengths` (B), those stand for T and
    S: nothing beyond them is there.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    left: int | None = None
    right: int | None = None
    scale: float | None = None
    q_lengths: Sequence[int] | None = None
    kv_lengths: Sequence[int] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """(B, T, S, N, K, H)."""
        b, t, n, h = self.query.shape
        _, s, k, _ = self.key.shape
        return b, t, s, n, k, h

    def lengths(self, b: int) -> tuple[int, int]:
        """T and S of the sequence `b`."""
        _, t, s, _, _, _ = self.shape
        own_t = t if self.q_lengths is None else min(max(self.q_lengths[b], 0), t)
        own_s = s if self.kv_lengths is None else min(max(self.kv_lengths[b], 0), s)
        return own_t, own_s

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """(B, T, N, Hv)."""
        return (*self.query.shape[:3], self.value.shape[-1])

    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.query.shape[-1]) if self.scale is None else float(self.scale)


@dataclasses.dataclass(frozen=True)
class Expected:
    """out (B, T, N, Hv) and residual (B, T, N) in float32, and `low`: out of the same maths in the input
    dtype.
    """

    out: np.ndarray
    residual: np.ndarray
    low: np.ndarray


def bounds(is_causal: bool, window: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """The (left, right) that the public arguments stand for; None is unbounded."""
    left, right = (None, None) if window is None else (window, window) if isinstance(window, int) else window
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def visible(t: int, s: int, left: int | None, right: int | None) -> np.ndarray:
    """bool (T, S): the definition of the mask, aligned to the last key, both ends inclusive."""
    distance = np.arange(s)[None, :] - (np.arange(t)[:, None] + (s - t))
    return (distance >= -(UNBOUNDED if left is None else left)) & (
        distance <= (UNBOUNDED if right is None else right)
    )


def random_problem(
    seed: int,
    *,
    t: int,
    s: int | None = None,
    b: int = 1,
    n: int = 2,
    k: int = 1,
    h: int = 64,
    hv: int | None = None,
    dtype: str = "bfloat16",
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    q_lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
) -> Problem:
    """Standard normal inputs, drawn in numpy, rounded to `dtype`; equal seeds and sizes, equal inputs."""
    s = t if s is None else s
    hv = h if hv is None else hv
    rng = np.random.default_rng([seed, t, s, b, n, k, h])
    shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, hv)}
    arrays = {
        x: rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for x, shape in shapes.items()
    }
    left, right = bounds(is_causal, window)
    return Problem(**arrays, left=left, right=right, scale=scale, q_lengths=q_lengths, kv_lengths=kv_lengths)


def _rounded(x):
    """`x` as its dtype holds it. In one program XLA may otherwise keep more digits from one operation to the
    next than the dtype has, which is not what the same operations give one by one.
    """
    info = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _attend(query, key, value, t, s, left, right, scale, finite):
    """One head: query (Lq, H), key, value (Lk, H) and the true sizes -> out (Lq, H), residual (Lq,).

    Each operation is done in the dtype of the inputs, which is also that of the results.
    """
    i, j = jnp.arange(query.shape[0])[:, None], jnp.arange(key.shape[0])[None, :]
    distance = j - (i + s - t)
    mask = (distance >= -left) & (distance <= right) & (j < s) & (i < t)
    scores = _rounded(_rounded(jnp.einsum("ih,jh->ij", query, key)) * _rounded(scale.astype(query.dtype)))
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=1, keepdims=True)
    shifted = _rounded(scores - jnp.where(jnp.isneginf(top), 0, top))
    weights = jnp.where(mask, _rounded(jnp.exp(shifted)), 0)
    total = _rounded(jnp.sum(weights, axis=1, keepdims=True))
    weights = _rounded(weights / jnp.where(total == 0, 1, total))
    product = jnp.einsum("ij,jh->ih", weights, value) if finite else _weighted_sum(mask, weights, value)
    return _rounded(product), (top + _rounded(jnp.log(total)))[:, 0]


def _weighted_sum(mask, weights, value):
    """sum over visible j of weights[i, j] * value[j, h], where what is not visible may be NaN or infinite.

    A plain matmul computes 0 * NaN for hidden keys; so finite values go through it and the others are
    counted.
    """

    def sees(what):
        return jnp.einsum("ij,jh->ih", mask.astype(value.dtype), what.astype(value.dtype)) > 0

    plus, minus = sees(value == jnp.inf), sees(value == -jnp.inf)
    nan = sees(jnp.isnan(value)) | (plus & minus)
    out = jnp.einsum("ij,jh->ih", weights, jnp.where(jnp.isfinite(value), value, 0))
    out = jnp.where(plus, jnp.inf, jnp.where(minus, -jnp.inf, out))
    row = jnp.any(jnp.isnan(jnp.where(mask, weights, 0)), axis=1, keepdims=True)
    return jnp.where(nan | row, jnp.nan, out)


def _attend_heads(query, key, value, sizes, scale, *, finite):
    """A stack of heads (M, L, H), each with its own T, S, left, right (M, 4) and scale (M,)."""

    def head(q, k, v, z, x):
        return _attend(q, k, v, z[0], z[1], z[2], z[3], x, finite)

    with jax.default_matmul_precision("highest"):
        return jax.vmap(head)(query, key, value, sizes, scale)


@functools.cache
def _compiled():
    """`_attend_heads` under jit; on a GPU without tuning its matmuls, which takes longer than they do."""
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return jax.jit(
        _attend_heads,
        static_argnames=("finite",),
        compiler_options=options if jax.default_backend() == "gpu" else None,
    )


def _padded_length(length: int) -> int:
    for size in _LENGTHS:
        if length <= size:
            return size
    raise ValueError(
        f"{length=} is longer than the comparison handles ({_LENGTHS[-1]}); compare a slice of it"
    )


def _padded_width(p: Problem) -> int:
    """Columns that hold both a key and a value."""
    return next(width for width in _HEAD_DIMS if max(p.key.shape[-1], p.value.shape[-1]) <= width)


@dataclasses.dataclass
class _Head:
    problem: int
    b: int
    n: int


def expected(problems: Sequence[Problem], *, low: bool = True) -> list[Expected]:
    """What each problem should give. Heads of all problems are computed together, grouped by padded size.

    Args:
      problems: any mix of shapes and dtypes. Non-finite keys and values are followed exactly as
        defined: what a row cannot see does not matter, what it sees propagates.
      low: also do the maths in the input dtype (`Expected.low`); without it `low` holds NaN.
    """
    results = [
        Expected(
            np.zeros(p.out_shape, np.float32),
            np.full(p.query.shape[:3], -np.inf, np.float32),
            np.full(p.out_shape, 0 if low else np.nan, np.float32),
        )
        for p in problems
    ]
    groups: dict[tuple[int, int, int, str], list[_Head]] = {}
    for index, p in enumerate(problems):
        b, t, s, n, _, _ = p.shape
        if t and s:
            group = (_padded_length(t), _padded_length(s), _padded_width(p), p.query.dtype.name)
            groups.setdefault(group, []).extend(_Head(index, x, y) for x in range(b) for y in range(n))
    for (lq, lk, width, _), heads in groups.items():
        step = max(1, min(64 if len(heads) > 4 else 4, _ELEMENTS // (lq * lk)))
        for start in range(0, len(heads), step):
            _compare_chunk(problems, results, heads[start : start + step], step, lq, lk, width, low)
    return results


def _compare_chunk(problems, results, heads, step, lq, lk, width, low) -> None:
    dtype = problems[heads[0].problem].query.dtype
    query = np.zeros((step, lq, width), dtype)
    key, value = np.zeros((2, step, lk, width), dtype)
    sizes, scale = np.zeros((step, 4), np.int32), np.zeros(step, np.float32)
    for m, head in enumerate(heads):
        p = problems[head.problem]
        _, _, _, n, k, h = p.shape
        t, s = p.lengths(head.b)
        query[m, :t, :h] = p.query[head.b, :t, head.n]
        key[m, :s, :h] = p.key[head.b, :s, head.n // (n // k)]
        value[m, :s, : p.out_shape[-1]] = p.value[head.b, :s, head.n // (n // k)]
        sizes[m] = t, s, *(UNBOUNDED if x is None else x for x in (p.left, p.right))
        scale[m] = p.softmax_scale()
    finite = bool(all(np.isfinite(x.astype(np.float32)).all() for x in (query, key, value)))
    full = [jnp.asarray(x).astype(jnp.float32) for x in (query, key, value)]
    out, residual = map(np.asarray, _compiled()(*full, sizes, scale, finite=finite))
    if low:
        lower = np.asarray(
            _compiled()(*map(jnp.asarray, (query, key, value)), sizes, scale, finite=finite)[0]
        )
    for m, head in enumerate(heads):
        result = results[head.problem]
        _, t, n, hv = result.out.shape
        result.out[head.b, :, head.n] = out[m, :t, :hv]
        result.residual[head.b, :, head.n] = residual[m, :t]
        if low:
            result.low[head.b, :, head.n] = lower[m, :t, :hv]


def assert_close(actual, expected, allowed, *, name: str) -> None:
    """max |actual - expected| <= allowed (a number or an array); NaN and infinities must stand in the same
    places.

    The failure names the worst coordinate and both values there.
    """
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    if actual.size == 0:
        return
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    excess = np.where(same, -np.inf, np.where(np.isnan(error), np.inf, error - allowed))
    if np.max(excess) > 0:
        at = tuple(int(x) for x in np.unravel_index(np.argmax(excess), excess.shape))
        limit = np.broadcast_to(np.asarray(allowed, np.float32), excess.shape)[at]
        raise AssertionError(
            f"{name}: {int(np.sum(excess > 0))} of {excess.size} elements are off; the worst at {at}: "
            f"got {actual[at]!r}, expected {expected[at]!r}, error {error[at]:.3e}, allowed {limit:.3e}"
        )


def allowed_error(expected: Expected) -> float:
    """The tolerance of the output: see the module's docstring. Places where either side is not finite do not
    count.
    """
    with np.errstate(invalid="ignore"):
        error = np.abs(expected.low - expected.out)
    error = error[np.isfinite(error)]
    return FACTOR * float(error.max(initial=0.0)) + FLOOR


def check(out, residual, expected: Expected, *, name: str) -> None:
    """Compare an output (B, T, N, Hv) and, unless None, a residual (B, T, N) with what was expected."""
    assert_close(out, expected.out, allowed_error(expected), name=f"{name}: out")
    if residual is not None:
        with np.errstate(invalid="ignore"):
            size = np.where(np.isfinite(expected.residual), np.abs(expected.residual), 0)
        tolerance = RESIDUAL_ABSOLUTE + RESIDUAL_RELATIVE * size
        assert_close(residual, expected.residual, tolerance, name=f"{name}: residual")
