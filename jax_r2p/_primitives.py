"""The primitive `jax_r2p_attention`: its types, its rules, and what it is lowered to.

    query (*B, T, N, H), key (*B, S, K, H), value (*B, S, K, Hv), scale (), and up to two lengths of
    sequences (*B)  ->  out (*B, T, N, Hv), lse (*B, N, T)

Its parameter `lengths` says which lengths are among the operands: those of the queries, those of the keys.
`_batching` says which batch dimensions operands may have instead. What the results are is written in
`reference`, which also is the lowering wherever no kernel runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_r2p import _batching, _dispatch, _ffi, _sharding, reference
from jax_r2p._manifest import Variant, load_manifest
from jax_r2p._spec import AttentionSpec

_Attention = Callable[..., tuple[Array, Array]]
_Lengths = tuple[bool, bool]

attention_p: Any = Primitive("jax_r2p_attention")  # typed in part only
attention_p.multiple_results = True


def bind_attention(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    *,
    spec: AttentionSpec,
    implementation: _dispatch.Implementation | None,
) -> tuple[Array, Array]:
    """Binds the primitive.

    Args:
      query: (*B, T, N, H).
      key: (*B, S, K, H), same dtype; batch dimensions may be 1 instead.
      value: (*B, S, K, Hv), likewise.
      scale: () or any shape that `_batching` allows; dtype `reference.compute_dtype(query.dtype)`.
      query_lengths: (*B) or any shape that `_batching` allows, int32; None for T.
      key_lengths: Likewise; None for S.
      spec: The visible keys.
      implementation: "r2p" to fail where no kernel runs; None to take the reference there.

    Returns:
      out and lse.
    """
    lengths = (query_lengths is not None, key_lengths is not None)
    given = [x for x in (query_lengths, key_lengths) if x is not None]
    return _bind(query, key, value, scale, *given, spec=spec, implementation=implementation, lengths=lengths)


def _bind(*operands: Array, **params: Any) -> tuple[Array, Array]:
    out, lse = attention_p.bind(*vary_together(*operands), **params)
    return out, lse


def _with_lengths(function: _Attention, lengths: _Lengths) -> _Attention:
    """Returns the function of the primitive's operands for one that takes None for absent lengths."""

    def of_operands(*operands: Array) -> tuple[Array, Array]:
        given = iter(operands[4:])
        return function(*operands[:4], *(next(given) if there else None for there in lengths))

    return of_operands


def vary_together(*operands: Array) -> list[Array]:
    """Makes operands vary over the same manual axes of a `shard_map`.

    The transpose of this cast is a sum over the axis: it is what adds up the gradients of an operand that is
    the same on all devices of an axis.
    """
    have = [_manual_axes(jax.typeof(x)) for x in operands]
    want = frozenset[Any]().union(*have)
    return [
        x if axes == want else lax.pcast(x, tuple(sorted(want - axes, key=str)), to="varying")
        for x, axes in zip(operands, have, strict=True)
    ]


def _manual_axes(aval: Any) -> frozenset[Any]:
    manual = getattr(aval, "mat", None)  # jax 0.10 and later
    return manual.varying if manual is not None else getattr(aval, "vma", frozenset())


# Types. Results are derived from the query's type, which carries its sharding on explicit meshes and its
# manual axes; the columns of out from the value's.


def _abstract_eval(
    query: Any, key: Any, value: Any, scale: Any, *given: Any, lengths: _Lengths, **params: Any
) -> list[Any]:
    del key, params
    if [x.dtype for x in given] != [np.int32] * sum(lengths):
        raise TypeError(f"expected {sum(lengths)} int32 arrays of lengths, got {given}")
    batch = range(query.ndim - 3)
    rows, heads = query.ndim - 3, query.ndim - 2
    spec = PartitionSpec(*query.sharding.spec[:-1], value.sharding.spec[-1])
    out = query.update(
        shape=(*query.shape[:-1], value.shape[-1]),
        weak_type=False,
        sharding=query.sharding.update(spec=spec),
    )
    lse = _permute(query, (*batch, heads, rows), scale.dtype)
    return [out, lse]


attention_p.def_abstract_eval(_abstract_eval)


def _permute(aval: Any, dims: Sequence[int], dtype: DTypeLike) -> Any:
    """Returns the type whose dimension i is dimension `dims[i]` of `aval`, sharded alike."""
    spec = PartitionSpec(*(aval.sharding.spec[i] for i in dims))
    return aval.update(
        shape=tuple(aval.shape[i] for i in dims),
        dtype=np.dtype(dtype),
        weak_type=False,
        sharding=aval.sharding.update(spec=spec),
    )


# Evaluation outside of jit.


@functools.cache
def _compiled(**params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(attention_p.bind, **params))


attention_p.def_impl(lambda *operands, **params: _compiled(**params)(*operands))


# Transformations.


def _batch(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[tuple[Array, Array], tuple[int, int]]:
    mapped = _batching.add_leading_dimension(operands, axes)
    return _bind(*mapped, **params), (0, 0)


batching.primitive_batchers[attention_p] = _batch


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    *,
    spec: AttentionSpec,
    implementation: _dispatch.Implementation | None,
    lengths: _Lengths,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Tangents come from the reference, at its cost: it holds all T * S scores in memory.

    Lengths are integers, whose tangents are always zero.
    """
    results = _bind(*primals, spec=spec, implementation=implementation, lengths=lengths)
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    function = _with_lengths(functools.partial(reference.attention, spec=spec), lengths)

    def of_moving(*values: Array) -> tuple[Array, Array]:
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return function(*operands)

    _, result_tangents = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    return results, result_tangents


ad.primitive_jvps[attention_p] = _jvp


# Lowering. The rule is chosen by the platform that a program is lowered for, not by the devices of this
# process.


def _lower(function: _Attention, ctx: Any, *operands: Any) -> Any:
    """Lowers a function of plain arrays in place of the primitive.

    It is traced without the shardings of an explicit mesh, whose rules would refuse to merge a sharded batch
    with another dimension. The types of the results do not depend on it: they are those of `_abstract_eval`.
    """
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    return mlir.lower_fun(function, multiple_results=True)(ctx.replace(avals_in=plain), *operands)


def _lower_reference(ctx: Any, *operands: Any, spec: AttentionSpec, lengths: _Lengths) -> Any:
    return _lower(_with_lengths(functools.partial(reference.attention, spec=spec), lengths), ctx, *operands)


def _lower_default(
    ctx: Any,
    *operands: Any,
    spec: AttentionSpec,
    implementation: _dispatch.Implementation | None,
    lengths: _Lengths,
) -> Any:
    if not _is_empty(ctx):
        platforms = " and ".join(ctx.platforms or ctx.module_context.platforms)
        _fall_back(_dispatch.wrong_platform(platforms), implementation)
    return _lower_reference(ctx, *operands, spec=spec, lengths=lengths)


def _lower_cuda(
    ctx: Any,
    *operands: Any,
    spec: AttentionSpec,
    implementation: _dispatch.Implementation | None,
    lengths: _Lengths,
) -> Any:
    if not _is_empty(ctx):
        query, key, value, *_ = ctx.avals_in
        choice = _dispatch.choose(
            spec, query.shape, key.shape, value.shape, query.dtype, _dispatch.lowering_capability()
        )
        if isinstance(choice, Variant):
            settings = {"variant": choice.name, "spec": dataclasses.asdict(spec), "lengths": lengths}
            if _sharding.is_split(ctx):
                _ffi.register()  # here too: a program that is found in a cache is not split again
                return _sharding.lower(ctx, *operands, settings=settings)
            return _lower(_kernel_call(settings), ctx, *operands)
        _fall_back(choice, implementation)
    return _lower_reference(ctx, *operands, spec=spec, lengths=lengths)


mlir.register_lowering(attention_p, _lower_default)
mlir.register_lowering(attention_p, _lower_cuda, platform="cuda")


def _kernel_call(settings: _sharding.Settings) -> _Attention:
    """Returns the function of the primitive's operands, or of a shard of each, that calls a kernel."""
    (variant,) = (variant for variant in load_manifest().variants if variant.name == settings["variant"])
    spec = AttentionSpec(**settings["spec"])
    return _with_lengths(functools.partial(_call_kernel, variant=variant, spec=spec), settings["lengths"])


_sharding.register(_kernel_call, "cuda")


def _is_empty(ctx: Any) -> bool:
    query, key, *_ = ctx.avals_in
    return _dispatch.is_empty(query.shape, key.shape)


def _fall_back(reason: str, implementation: _dispatch.Implementation | None) -> None:
    if implementation == "r2p":
        raise _dispatch.refuse(reason)
    _dispatch.warn_fallback(reason)


def _call_kernel(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    query_lengths: Array | None,
    key_lengths: Array | None,
    *,
    variant: Variant,
    spec: AttentionSpec,
) -> tuple[Array, Array]:
    """Calls the kernel once; or, if scale differs along a batch dimension, once for each index of it."""
    *batch, queries, heads, _ = query.shape
    # The kernel wants the lengths of each batch entry of the query. They are few, so copies cost nothing.
    lengths = [x if x is None else jnp.broadcast_to(x, batch) for x in (query_lengths, key_lengths)]
    call = functools.partial(_call_kernel, variant=variant, spec=spec)
    for axis, size in enumerate(scale.shape):
        if size > 1:
            return _map(call, axis, size, query, key, value, scale, *lengths)

    keys, value_head_dim = key.shape[-3], value.shape[-1]
    # Zeros add nothing to a score, and in value they become columns of out that are cut off again.
    query, key, value = map(_pad_heads, (query, key, value))
    folding = _batching.fold(batch, key.shape[:-3], value.shape[:-3])
    key, value = (
        _batching.flatten_batch(jnp.broadcast_to(x, (*folding.kv_dims, *x.shape[-3:])), 3)
        for x in (key, value)
    )
    out, lse = _ffi.attention_forward(
        _batching.flatten_batch(query, 3),
        key,
        value,
        scale.reshape(()),
        *(x if x is None else _batching.flatten_batch(x, 0) for x in lengths),
        variant=variant,
        spec=spec.effective(queries, keys),
        kv_repeat=folding.repeat,
        kv_inner=folding.inner,
    )
    out = out.reshape(*batch, queries, heads, value.shape[-1])[..., :value_head_dim]
    return out, lse.reshape(*batch, heads, queries)


def _pad_heads(x: Array) -> Array:
    """Returns `x` with the columns that a kernel needs; `x` itself where it has them."""
    missing = _dispatch.padded_head_dim(x.shape[-1]) - x.shape[-1]
    if not missing:
        return x
    return lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(0, missing, 0)])


def _map(
    call: _Attention, axis: int, size: int, query: Array, key: Array, value: Array, *small: Array | None
) -> tuple[Array, Array]:
    """Calls `call` for each index of batch dimension `axis`, one after the other.

    An operand of size 1 there is shared, as is None. The kernel reads a single scale, so each further one
    costs a launch.

    A plain loop, since those of `lax.map` have inner functions, which XLA does not expect in a program that
    takes the place of a custom call (`_sharding`): for CPU, as of jax 0.12, it fails to compile them.
    """
    *batch, queries, heads, _ = query.shape

    def start(x: Array, i: Array) -> list[Any]:
        return [i if dim == axis else np.int32(0) for dim in range(x.ndim)]

    def take(x: Array | None, i: Array) -> Array | None:
        if x is None:
            return None
        if x.shape[axis] > 1:
            sizes = [1 if dim == axis else length for dim, length in enumerate(x.shape)]
            x = lax.dynamic_slice(x, start(x, i), sizes)
        return lax.squeeze(x, (axis,))

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, *wholes = state
        parts = call(*(take(x, i) for x in (query, key, value, *small)))
        out, lse = (
            lax.dynamic_update_slice(whole, lax.expand_dims(part, (axis,)), start(whole, i))
            for whole, part in zip(wholes, parts, strict=True)
        )
        return i + 1, out, lse

    out = lax.full((*batch, queries, heads, value.shape[-1]), 0, query.dtype)
    lse = lax.full((*batch, heads, queries), 0, np.dtype(np.float32))
    _, out, lse = lax.while_loop(lambda state: state[0] < size, step, (jnp.int32(0), out, lse))
    return out, lse
