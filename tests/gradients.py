"""What gradients are compared with: those of the definition, in float32, differentiated by JAX.

As for results (numerics.py), the same maths in the input's dtype says how much may be asked of a kernel:

    max |actual - expected|  <=  2 * max |same maths in the input dtype - expected|  +  1e-5

of each of the three gradients. That maths is written out (weights, their cotangents and three products), with
each operation rounded, since the derivative of a softmax by its parts would round what cancels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numerics
import numpy as np
from numerics import FACTOR, FLOOR, UNBOUNDED, Problem, _rounded

NAMES = ("dquery", "dkey", "dvalue")

_WIDTHS = (128, 256)
_LENGTHS = (64, 208, 400, 800, 1152)
_HEADS = 8


@dataclasses.dataclass(frozen=True)
class Cotangents:
    """Of out, (B, T, N, Hv), in the input's dtype, and of the residual, (B, T, N), in float32."""

    out: np.ndarray
    residual: np.ndarray


@dataclasses.dataclass(frozen=True)
class Expected:
    """The gradients by query, key and value in float32, and those of the maths in the input's dtype."""

    full: tuple[np.ndarray, np.ndarray, np.ndarray]
    low: tuple[np.ndarray, np.ndarray, np.ndarray]

    def rounded(self, dtype: Any) -> Expected:
        """The same with `low` as arrays of `dtype` hold it: sums over heads, too, are rounded in the end."""
        low = (x.astype(dtype).astype(np.float32) for x in self.low)
        return Expected(self.full, tuple(low))  # type: ignore[arg-type]

    def allowed(self) -> list[float]:
        pairs = zip(self.full, self.low, strict=True)
        return [FACTOR * float(np.abs(low - full).max(initial=0.0)) + FLOOR for full, low in pairs]


def random_cotangents(problem: Problem, seed: int = 0) -> Cotangents:
    """Standard normal ones."""
    rng = np.random.default_rng([seed, *problem.shape])
    out = rng.standard_normal(problem.out_shape, np.float32).astype(problem.query.dtype)
    return Cotangents(out, rng.standard_normal(problem.query.shape[:3], np.float32))


def _mask(query: Any, key: Any, sizes: Any) -> Any:
    t, s, left, right = sizes
    i, j = jnp.arange(query.shape[0])[:, None], jnp.arange(key.shape[0])[None, :]
    distance = j - (i + s - t)
    return (distance >= -left) & (distance <= right) & (j < s) & (i < t)


def _full(query: Any, key: Any, value: Any, dout: Any, dlse: Any, sizes: Any, scale: Any) -> Any:
    """One head in float32: the definition, differentiated."""
    mask = _mask(query, key, sizes)
    some = mask.any(axis=1)

    def definition(query: Any, key: Any, value: Any) -> Any:
        scores = jnp.where(mask, scale * (query @ key.T), -jnp.inf)
        lse = jax.nn.logsumexp(jnp.where(some[:, None], scores, 0), axis=1)
        weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - lse[:, None], 0)), 0)
        return weights @ value, jnp.where(some, lse, 0)

    _, vjp = jax.vjp(definition, query, key, value)
    return vjp((dout, dlse))


def _low(query: Any, key: Any, value: Any, dout: Any, dlse: Any, sizes: Any, scale: Any) -> Any:
    """One head in the dtype of the arrays."""
    mask = _mask(query, key, sizes)
    scale = _rounded(scale.astype(query.dtype))
    scores = jnp.where(mask, _rounded(_rounded(query @ key.T) * scale), -jnp.inf)
    top = jnp.max(scores, axis=1, keepdims=True)
    weights = jnp.where(mask, _rounded(jnp.exp(_rounded(scores - jnp.where(jnp.isneginf(top), 0, top)))), 0)
    total = _rounded(jnp.sum(weights, axis=1, keepdims=True))
    weights = _rounded(weights / jnp.where(total == 0, 1, total))
    out = _rounded(weights @ value)
    delta = _rounded(_rounded(jnp.sum(dout * out, axis=1)) - dlse.astype(query.dtype))
    dscores = _rounded(weights * _rounded(_rounded(dout @ value.T) - delta[:, None]))
    dquery, dkey = (_rounded(_rounded(x) * scale) for x in (dscores @ key, dscores.T @ query))
    return dquery, dkey, _rounded(weights.T @ dout)


@functools.cache
def _compiled() -> Any:
    """Both for a stack of heads; on a GPU without tuning its matmuls."""

    def both(arrays: Any, low: Any, dlse: Any, sizes: Any, scale: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return (
                jax.vmap(_full)(*arrays, dlse, sizes, scale),
                jax.vmap(_low)(*low, dlse, sizes, scale),
            )

    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return jax.jit(both, compiler_options=options if jax.default_backend() == "gpu" else None)


def _padded(length: int) -> int:
    return next(size for size in _LENGTHS if length <= size)


def _padded_width(p: Problem) -> int:
    return next(width for width in _WIDTHS if max(p.query.shape[-1], p.out_shape[-1]) <= width)


def expected(problems: Sequence[Problem], cotangents: Sequence[Cotangents]) -> list[Expected]:
    """The gradients of each problem. What is not there is taken as 0, and gets 0.

    Heads of all problems of one padded size and dtype are computed together.
    """
    results = [
        Expected(*(tuple(np.zeros(x.shape, np.float32) for x in (p.query, p.key, p.value)) for _ in range(2)))
        for p in problems
    ]
    groups: dict[tuple[int, int, int, str], list[tuple[int, int, int]]] = {}
    for index, p in enumerate(problems):
        b, t, s, n, _, _ = p.shape
        group = (_padded(t), _padded(s), _padded_width(p), p.query.dtype.name)
        groups.setdefault(group, []).extend((index, x, y) for x in range(b) for y in range(n))
    for (lq, lk, width, _), heads in groups.items():
        for start in range(0, len(heads), _HEADS):
            _compute(problems, cotangents, results, heads[start : start + _HEADS], lq, lk, width)
    return [result.rounded(p.query.dtype) for p, result in zip(problems, results, strict=True)]


def _compute(
    problems: Sequence[Problem],
    cotangents: Sequence[Cotangents],
    results: Sequence[Expected],
    heads: Sequence[tuple[int, int, int]],
    lq: int,
    lk: int,
    width: int,
) -> None:
    dtype = problems[heads[0][0]].query.dtype
    arrays = [np.zeros((_HEADS, length, width), dtype) for length in (lq, lk, lk, lq)]
    dlse = np.zeros((_HEADS, lq), np.float32)
    sizes, scale = np.zeros((_HEADS, 4), np.int32), np.zeros(_HEADS, np.float32)
    for m, (index, b, head) in enumerate(heads):
        p, d = problems[index], cotangents[index]
        _, _, _, n, k, h = p.shape
        (t, s), hv, kv_head = p.lengths(b), p.out_shape[-1], head // (n // k)
        some = numerics.visible(t, s, p.left, p.right).any(axis=1)
        arrays[0][m, :t, :h] = p.query[b, :t, head]
        arrays[1][m, :s, :h] = p.key[b, :s, kv_head]
        arrays[2][m, :s, :hv] = p.value[b, :s, kv_head]
        # Rows that see nothing have no derivative, whatever their cotangents are.
        arrays[3][m, :t, :hv] = np.where(some[:, None], d.out[b, :t, head], 0)
        dlse[m, :t] = np.where(some, d.residual[b, :t, head], 0)
        sizes[m] = t, s, *(UNBOUNDED if x is None else x for x in (p.left, p.right))
        scale[m] = p.softmax_scale()
    full = [x.astype(np.float32) for x in arrays]
    found = jax.tree.map(np.asarray, _compiled()(full, arrays, dlse, sizes, scale))
    for m, (index, b, head) in enumerate(heads):
        p = problems[index]
        _, _, _, n, k, _ = p.shape
        own_t, own_s = p.lengths(b)
        for result, (dquery, dkey, dvalue) in zip(
            (results[index].full, results[index].low), found, strict=True
        ):
            result[0][b, :own_t, head] = dquery[m, :own_t, : result[0].shape[-1]]
            result[1][b, :own_s, head // (n // k)] += dkey[m, :own_s, : result[1].shape[-1]]
            result[2][b, :own_s, head // (n // k)] += dvalue[m, :own_s, : result[2].shape[-1]]


def check(actual: Sequence[Any], expected: Expected, *, name: str) -> None:
    """Compares the three gradients with what was expected."""
    for what, got, want, allowed in zip(NAMES, actual, expected.full, expected.allowed(), strict=True):
        numerics.assert_close(got, want, allowed, name=f"{name}: {what}")
