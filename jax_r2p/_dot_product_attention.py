"""`dot_product_attention`: the function of `jax.nn`, by the kernel where the kernel gives its result.

`jax.nn` aligns masks to the first query and the first key: query i sees key j when
`i - left <= j <= i + right`. The kernel aligns them to the last ones. `plan` says how a call of the first
kind is made one of the second, or why it cannot be. `jax.nn.dot_product_attention` itself computes the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_r2p import _arguments, _dispatch, _primitives
from jax_r2p._promotion import promoting
from jax_r2p._spec import AttentionSpec

Implementation = Literal["xla", "cudnn", "r2p"]

_IMPLEMENTATIONS = (None, "xla", "cudnn", "r2p")
_HIDDEN = np.float32(-0.7 * float(np.finfo(np.float32).max))
"""The score that `jax.nn` gives to a hidden key, and so its residual of a query that sees none."""


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: Implementation | None = ...,
    return_residual: Literal[False] = ...,
) -> Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: Implementation | None = ...,
    return_residual: Literal[True],
) -> tuple[Array, Array]: ...


@promoting
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """Computes what `jax.nn.dot_product_attention` computes, with the same arguments.

    A call whose result the kernel can give runs there: bfloat16 or float16, no `bias` and no `mask`. All
    others are handed to `jax.nn.dot_product_attention(implementation="xla")`, with a `FallbackWarning` once
    for each reason; `docs/drop-in.md` lists them. On a machine without a GPU, the calls for the kernel run as
    plain XLA, as those of `attention` do.

    Unlike in `attention`, masks are aligned to the first query and the first key:

        is_causal, T = 4, S = 4   T = 2, S = 4   T = 4, S = 2   local_window_size = (0, 0), T = 4, S = 2
               1 0 0 0              1 0 0 0          1 0                        1 0
               1 1 0 0              1 1 0 0          1 1                        0 1
               1 1 1 0                               1 1                        0 0
               1 1 1 1                               1 1                        0 0

    A query that sees no key gets the mean of all S values. One beyond `query_seq_lengths` gets 0. For both
    the residual is -0.7 times the greatest float32, rounded to the dtype of `key`; in float16 that is -inf.

    Args:
      query: (B, T, N, H) or (T, N, H).
      key: (B, S, K, H) or (S, K, H), same dtype. N is a multiple of K.
      value: Of the shape and dtype of `key`.
      bias: Added to the scores; broadcasts to (B, N, T, S). For `jax.nn`.
      mask: bool, True where a query sees a key; broadcasts to (B, N, T, S). For `jax.nn`.
      scale: Factor of the scores. None for 1 / sqrt(H).
      is_causal: Whether query i sees no key after i.
      query_seq_lengths: int32 (B): how many queries of each sequence are there. None for T.
      key_value_seq_lengths: int32 (B): how many keys and values of each sequence are there. None for S. To
        have the kernel together with `is_causal` or a window, pass the same array as `query_seq_lengths`.
      local_window_size: (left, right), in keys: query i sees only the keys from i - left to i + right. An int
        w stands for (w, w). None for no window.
      implementation: None for the kernel where it can, else `jax.nn`; "r2p" for the kernel or an error; "xla"
        and "cudnn" for those of `jax.nn`.
      return_residual: Whether to return the residual too.

    Returns:
      out, of the shape and dtype of `query`. With `return_residual`, (out, residual): the natural logarithm
      of the sum of the exponentials of a query's visible scores, (B, T, N) or (T, N), of the dtype of `key`,
      without derivative.

    Raises:
      ValueError: `implementation` is none of these, or `jax.nn` refuses the arguments.
      TypeError: `jax.nn` refuses the arguments.
      NotImplementedError: `implementation="r2p"`, and the kernel does not take this call.
      RuntimeError: The kernels of the installed package are missing or altered.
    """
    if not any(implementation is known or implementation == known for known in _IMPLEMENTATIONS):
        raise ValueError(f"implementation must be one of {_IMPLEMENTATIONS}, got {implementation!r}")
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    masks: dict[str, Any] = {
        "is_causal": is_causal,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "local_window_size": local_window_size,
    }
    function: Any = jax.nn.dot_product_attention  # its overloads are too many for a type checker
    by_jax = functools.partial(
        function, *arrays, bias, mask, scale=scale, **masks, return_residual=return_residual
    )

    if implementation in ("xla", "cudnn"):
        return by_jax(implementation=implementation)
    call = make_plan(arrays, bias=bias, mask=mask, scale=scale, **masks)
    if isinstance(call, Plan):
        return _run(
            call, arrays, scale, query_seq_lengths, key_value_seq_lengths, return_residual, implementation
        )
    if implementation == "r2p" and call:
        jax.eval_shape(
            functools.partial(by_jax, implementation="xla")
        )  # the error for wrong arguments, if there is one
        raise _dispatch.refuse(call)
    result = by_jax(implementation="xla")
    if call:
        _dispatch.warn_fallback(call, "jax_r2p.dot_product_attention calls jax.nn.dot_product_attention")
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How the kernel computes a call.

    Attributes:
      spec: The visible keys, aligned to the last query and key of the arrays that the kernel gets.
      queries: How many queries, from the first, the kernel gets. Those that follow see no key.
      keys: How many keys, from the first, it gets. No query sees those that follow.
      query_lengths: Whether it gets the lengths of the queries. If not, what is beyond is set to 0 after it.
      key_lengths: Whether it gets those of the keys. If not, they hide no key.
    """

    spec: AttentionSpec
    queries: int
    keys: int
    query_lengths: bool
    key_lengths: bool


def make_plan(
    arrays: Sequence[Array],
    *,
    bias: Any,
    mask: Any,
    scale: Any,
    is_causal: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
) -> Plan | str:
    """Returns how the kernel computes a call, or why not; "" if there is nothing to compute.

    What `jax.nn` refuses gets a reason too. It is not told: `jax.nn` is called first.

    Args:
      arrays: query, key and value.
      bias: As for `dot_product_attention`, like all that follow.
      mask: Likewise.
      scale: Likewise.
      is_causal: Likewise.
      query_seq_lengths: Likewise.
      key_value_seq_lengths: Likewise.
      local_window_size: Likewise.
    """
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None:
            return f"no kernel takes {name}; is_causal, local_window_size and lengths have one"
    if not isinstance(is_causal, bool | np.bool_):
        return f"no kernel takes is_causal={is_causal!r}; True and False have one"
    if not (scale is None or isinstance(scale, numbers.Real) or getattr(scale, "shape", None) == ()):
        return "no kernel takes a scale that is no scalar; a real number has one"
    window = _window(local_window_size)
    if window is None:
        return f"no kernel takes {local_window_size=}; integers of at least 0, known when tracing, have one"
    left, right = window
    if is_causal:
        right = 0

    query, key, value = arrays
    shapes = [_shape(x) for x in arrays]
    if not _fit(shapes):
        return f"no kernel takes arrays of the shapes {shapes}; (B, T, N, H) and twice (B, S, K, H) have one"
    (batch, queries, heads, width), (_, keys, kv_heads, _) = shapes[:2]
    if any(not isinstance(size, int) for shape in shapes for size in shape):
        return f"no kernel takes symbolic dimensions, got query {shapes[0]} and key {shapes[1]}"
    if _dispatch.is_empty(shapes[0], shapes[1]):
        return ""
    if heads % kv_heads:
        return f"no kernel takes {heads} query heads with {kv_heads} key heads; a multiple has one"
    if not query.dtype == key.dtype == value.dtype:
        return f"no kernel takes several dtypes, got {query.dtype}, {key.dtype}, {value.dtype}; one has one"
    lengths = [jnp.asarray(x) for x in (query_seq_lengths, key_value_seq_lengths) if x is not None]
    for x in lengths:
        if x.shape != (batch,) or x.dtype != jnp.int32:
            return "no kernel takes lengths that are not int32 of shape (B,); those have one"

    same = _same_lengths(query_seq_lengths, key_value_seq_lengths)
    call = plan(
        left, right, queries, keys, query_seq_lengths is not None, key_value_seq_lengths is not None, same
    )
    if isinstance(call, str):
        return call
    choice = _dispatch.choose(
        call.spec,
        (batch, call.queries, heads, width),
        (batch, call.keys, kv_heads, width),
        (batch, call.keys, kv_heads, width),
        query.dtype,
        _dispatch.lowering_capability(),
    )
    return choice if isinstance(choice, str) else call


def plan(
    left: int | None,
    right: int | None,
    queries: int,
    keys: int,
    query_lengths: bool,
    key_lengths: bool,
    same_lengths: bool,
) -> Plan | str:
    """Returns how the kernel computes a mask that is aligned to the first query and key, or why not.

    Args:
      left: Query i sees no key before i - left; at least 0, None for no such bound.
      right: Query i sees no key after i + right; likewise.
      queries: T, at least 1.
      keys: S, at least 1.
      query_lengths: Whether sequences have lengths of their queries.
      key_lengths: Whether they have lengths of their keys.
      same_lengths: Whether these are known to be equal.
    """
    if left is not None and left >= queries - 1:
        left = None  # The last query sees key 0.
    if right is not None and right >= keys - 1:
        right = None  # The first query sees the last key.
    if left is None and right is None:
        return Plan(
            spec=AttentionSpec(),
            queries=queries,
            keys=keys,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
        )

    # What no query sees and what sees no key is cut off. The last query sees key T - 1 + right at most, and
    # the last key is seen by query S - 1 + left at most.
    used_keys = keys if right is None else min(keys, queries + right)
    used_queries = queries if left is None else min(queries, keys + left)
    if key_lengths:
        # Bounds follow from the lengths t and s of a sequence, so it takes s = t to put them where `jax.nn`
        # has them. Lengths above T and S count as those, so it takes S = T too.
        if not same_lengths:
            return (
                "no kernel takes key_value_seq_lengths with is_causal or a window, unless query_seq_lengths "
                "is the same array"
            )
        if used_keys != queries:
            return f"no kernel takes lengths, a window, T = {queries} and S = {keys} together; T = S has one"

    # With o = S - T the kernel's bounds are o - left' <= j - i <= o + right'. They are to be -left and right,
    # so left' = left + o and right' = right - o. Neither is negative: after the cuts above S <= T + right,
    # and T <= S + left, since where keys were cut S is T + right.
    offset = used_keys - used_queries
    spec = AttentionSpec(
        left=None if left is None else left + offset, right=None if right is None else right - offset
    )
    return Plan(
        spec=spec,
        queries=used_queries,
        keys=used_keys,
        query_lengths=key_lengths,
        key_lengths=key_lengths,
    )


def _window(size: Any) -> tuple[int | None, int | None] | None:
    """Returns (left, right), or None for what the kernel has no window for."""
    if size is None:
        return None, None
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        return None
    if any(not isinstance(side, int | np.integer) or isinstance(side, bool) or side < 0 for side in sides):
        return None
    return int(sides[0]), int(sides[1])


def _shape(x: Array) -> tuple[int, ...]:
    """Returns the shape with dimensions of 1 in front, up to four in all, as `jax.nn` does."""
    return (*(1,) * (4 - x.ndim), *x.shape)


def _fit(shapes: list[tuple[int, ...]]) -> bool:
    query, key, value = shapes
    ranks = all(len(shape) == 4 for shape in shapes)
    return ranks and key == value and query[0] == key[0] and query[3] == key[3]


def _same_lengths(queries: Any, keys: Any) -> bool:
    """Whether lengths are known to be equal: one object, or equal lists or NumPy arrays."""
    if queries is keys:
        return True
    known = all(isinstance(x, tuple | list | np.ndarray) for x in (queries, keys))
    return known and np.array_equal(queries, keys)


def _run(
    call: Plan,
    arrays: Sequence[Array],
    scale: Any,
    query_lengths: Any,
    key_lengths: Any,
    return_residual: bool,
    implementation: Any,
) -> Array | tuple[Array, Array]:
    """Computes a call by its plan."""
    shape = arrays[0].shape
    query, key, value = (x.reshape(_shape(x)) for x in arrays)
    factor = jnp.asarray(1 / math.sqrt(shape[-1]) if scale is None else scale, jnp.float32)
    query_lengths, key_lengths = (x if x is None else jnp.asarray(x) for x in (query_lengths, key_lengths))

    kernel_keys = key_lengths if call.key_lengths else None
    # A sequence without keys gets the mean of all values. That is what equal scores give.
    lacks = None
    if kernel_keys is not None and call.spec == AttentionSpec():
        lacks = kernel_keys <= 0
        query = jnp.where(lacks[:, None, None, None], 0, query)
        kernel_keys = jnp.where(lacks, call.keys, kernel_keys)

    out, lse = _primitives.bind_attention(
        query[:, : call.queries],
        key[:, : call.keys],
        value[:, : call.keys],
        factor,
        query_lengths if call.query_lengths else None,
        kernel_keys,
        spec=call.spec,
        implementation=implementation,
        deterministic=_arguments.check_deterministic(None),
    )
    residual = jnp.swapaxes(lse, 1, 2)
    residual = jnp.where(residual == -jnp.inf, _HIDDEN, residual)
    if lacks is not None:
        residual = jnp.where(lacks[:, None, None], _HIDDEN, residual)

    missing = query.shape[1] - call.queries
    if missing:
        mean = _mean(value, query.shape[2]).astype(out.dtype)
        rows = jnp.broadcast_to(mean[:, None], (out.shape[0], missing, *out.shape[2:]))
        out = jnp.concatenate([out, rows], axis=1)
        residual = jnp.pad(residual, [(0, 0), (0, missing), (0, 0)], constant_values=_HIDDEN)
    if query_lengths is not None and not call.query_lengths:
        there = jnp.arange(query.shape[1]) < query_lengths[:, None]
        out = jnp.where(there[..., None, None], out, 0)
        residual = jnp.where(there[..., None], residual, _HIDDEN)

    out = out.reshape(shape)
    if not return_residual:
        return out
    return out, lax.stop_gradient(residual.reshape(shape[:-1]).astype(key.dtype))


def _mean(value: Array, heads: int) -> Array:
    """Returns (B, N, H), float32: the mean of the values of (B, S, K, H), for each query head."""
    mean = jnp.mean(value, axis=1, dtype=jnp.float32)
    batch, kv_heads, width = mean.shape
    return jnp.broadcast_to(mean[:, :, None], (batch, kv_heads, heads // kv_heads, width)).reshape(
        batch, heads, width
    )
