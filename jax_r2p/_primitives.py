"""The primitives: their types, their rules, and what they are lowered to.

    attention_p           query (*B, T, N, H), key (*B, S, K, H), value (*B, S, K, Hv), scale (), and up to
                          two lengths of sequences (*B)  ->  out (*B, T, N, Hv), lse (*B, N, T)
    attention_tangent_p   these operands, out, lse, and tangents of some of the first four  ->  the tangents
                          of out and lse; linear in the tangents
    attention_backward_p  these operands, out, lse, and the cotangents of the last two  ->  the cotangents of
                          some of the first four; that of scale is (*B), not summed yet

The second is the derivative of the first, and the third is the transpose of the second: so first derivatives
of every kind follow from JAX. Derivatives of the last two are those of the functions of `_blockwise`.

The parameter `lengths` says which lengths are among the operands: those of the queries, those of the keys.
`of` says which of query, key, value and scale have a tangent, or have their cotangent asked for. `_batching`
says which batch dimensions operands may have instead. What the results are is written in `reference` and
`_blockwise`, which also are the lowerings wherever no kernel runs.
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
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_r2p import _batching, _blockwise, _dispatch, _ffi, _kernel_call, _sharding, reference
from jax_r2p._batching import Role
from jax_r2p._manifest import Role as ManifestRole
from jax_r2p._manifest import Variant, load_manifest
from jax_r2p._promotion import promoting
from jax_r2p._spec import AttentionSpec

_Function = Callable[..., Sequence[Array]]
_Lengths = tuple[bool, bool]
_Of = tuple[bool, bool, bool, bool]

OUT_NAME = "jax_r2p_out"
"""The `checkpoint_name` of the result of `attention` where it is differentiated, for policies of
`jax.checkpoint`. Only a policy that saves both this and `RESIDUAL_NAME` spares the second forward pass."""

RESIDUAL_NAME = "jax_r2p_residual"
"""The same for the residual, which derivatives need whether or not it was asked for."""


def _primitive(name: str) -> Any:  # typed in part only
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


attention_p = _primitive("jax_r2p_attention")
attention_tangent_p = _primitive("jax_r2p_attention_tangent")
attention_backward_p = _primitive("jax_r2p_attention_backward")


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
    deterministic: bool,
) -> tuple[Array, Array]:
    """Binds the primitive of attention.

    Args:
      query: (*B, T, N, H).
      key: (*B, S, K, H), same dtype; batch dimensions may be 1 instead.
      value: (*B, S, K, Hv), likewise.
      scale: () or any shape that `_batching` allows; dtype `reference.compute_dtype(query.dtype)`.
      query_lengths: (*B) or any shape that `_batching` allows, int32; None for T.
      key_lengths: Likewise; None for S.
      spec: The visible keys.
      implementation: "r2p" to fail where no kernel runs; None to take the reference there.
      deterministic: Whether a backward kernel has to give the same bits in each run.

    Returns:
      out and lse.
    """
    lengths = (query_lengths is not None, key_lengths is not None)
    given = [x for x in (query_lengths, key_lengths) if x is not None]
    out, lse = _bind(
        attention_p,
        query,
        key,
        value,
        scale,
        *given,
        spec=spec,
        implementation=implementation,
        deterministic=deterministic,
        lengths=lengths,
    )
    return out, lse


def bind_backward(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    *,
    spec: AttentionSpec,
    deterministic: bool,
    of: _Of,
) -> list[Array]:
    """Binds the primitive of the cotangents.

    Args:
      query: As for `bind_attention`.
      key: Likewise; or some of the keys, if out and lse are those of all.
      value: Likewise.
      scale: (), dtype `reference.compute_dtype(query.dtype)`.
      out: (*B, T, N, Hv), a result of attention.
      lse: (*B, N, T), likewise.
      dout: The cotangent of out, of its type.
      dlse: The cotangent of lse, likewise.
      query_lengths: As for `bind_attention`.
      key_lengths: Likewise.
      spec: The visible keys.
      deterministic: As for `bind_attention`.
      of: Which of query, key, value and scale have their cotangent asked for. That of scale takes a second
        call of a kernel.

    Returns:
      These cotangents, of the types of their operands. Of some of the keys, what they add to those of query
      and scale.
    """
    lengths = (query_lengths is not None, key_lengths is not None)
    given = [x for x in (query_lengths, key_lengths) if x is not None]
    operands = (query, key, value, scale, *given, out, lse, dout, dlse)
    params = {"spec": spec, "deterministic": deterministic, "lengths": lengths, "of": of}
    results = _bind(attention_backward_p, *operands, **params)
    return [*results[:-1], jnp.sum(results[-1])] if of[3] else results


def _bind(primitive: Any, *operands: Array, **params: Any) -> list[Array]:
    return primitive.bind(*vary_together(*operands), **params)


def _call_operands(operands: Sequence[Array], lengths: _Lengths) -> tuple[list[Any], list[Any]]:
    """Splits operands of a primitive into those of the call, with None for absent lengths, and the others."""
    rest = iter(operands[4:])
    return [*operands[:4], *(next(rest) if there else None for there in lengths)], list(rest)


def _select(values: Sequence[Any], of: Sequence[bool]) -> list[Any]:
    return [value for value, wanted in zip(values, of, strict=True) if wanted]


def _spread(values: Sequence[Any], of: Sequence[bool]) -> list[Any]:
    """The inverse of `_select`, with None for what was left out."""
    rest = iter(values)
    return [next(rest) if wanted else None for wanted in of]


# The three functions of plain arrays, with the operands of the primitives.


def _attention(*operands: Array, spec: AttentionSpec, lengths: _Lengths) -> Sequence[Array]:
    call, _ = _call_operands(operands, lengths)
    return reference.attention(*call, spec=spec)


def _tangent(
    *operands: Array, spec: AttentionSpec, lengths: _Lengths, of: _Of, deterministic: bool
) -> Sequence[Array]:
    del deterministic  # concerns its transpose
    call, (out, lse, *tangents) = _call_operands(operands, lengths)
    given = [*call, out, lse, *_spread(tangents, of)]
    return _blockwise.tangent(*given, spec=spec)


def _backward(
    *operands: Array, spec: AttentionSpec, lengths: _Lengths, of: _Of, deterministic: bool
) -> Sequence[Array]:
    del deterministic  # it always is
    call, rows = _call_operands(operands, lengths)
    return _select(_blockwise.backward(*call, *rows, spec=spec), of)


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


def _result_types(
    query: Any, key: Any, value: Any, scale: Any, *others: Any, lengths: _Lengths, **params: Any
) -> list[Any]:
    del key, params
    given = others[: sum(lengths)]
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


def _cotangent_types(
    query: Any, key: Any, value: Any, scale: Any, *others: Any, of: _Of, **params: Any
) -> list[Any]:
    del others, params
    arrays = [_permute(x, range(x.ndim), x.dtype) for x in (query, key, value)]
    return _select([*arrays, _permute(query, range(query.ndim - 3), scale.dtype)], of)


attention_p.def_abstract_eval(_result_types)
attention_tangent_p.def_abstract_eval(_result_types)
attention_backward_p.def_abstract_eval(_cotangent_types)


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
def _compiled(primitive: Any, **params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **params))


def _define_evaluation(primitive: Any) -> None:
    primitive.def_impl(lambda *operands, **params: _compiled(primitive, **params)(*operands))


for _p in (attention_p, attention_tangent_p, attention_backward_p):
    _define_evaluation(_p)


# Batching.


def _roles(*, lengths: _Lengths, **params: Any) -> list[Role]:
    del params
    return _batching.roles_of_call(sum(lengths))


def _tangent_roles(*, lengths: _Lengths, of: _Of, **params: Any) -> list[Role]:
    call = _roles(lengths=lengths)
    return [*call, Role.WHOLE, Role.WHOLE, *_select(call[:4], of)]


def _backward_roles(*, lengths: _Lengths, of: _Of, **params: Any) -> list[Role]:
    """Each index of the mapped dimension gets a cotangent of its own; keys that are shared have one alone."""
    query, key, value, *small = _roles(lengths=lengths)
    key, value = (Role.WHOLE if wanted else role for role, wanted in ((key, of[1]), (value, of[2])))
    return [query, key, value, *small, *[Role.WHOLE] * 4]


@promoting
def _batch(
    operands: Sequence[Array], axes: Sequence[int | None], *, primitive: Any, roles: Any, **params: Any
) -> tuple[Sequence[Array], Sequence[int]]:
    mapped = _batching.add_leading_dimension(operands, axes, roles(**params))
    results = _bind(primitive, *mapped, **params)
    return results, [0] * len(results)


for _p, _r in (
    (attention_p, _roles),
    (attention_tangent_p, _tangent_roles),
    (attention_backward_p, _backward_roles),
):
    batching.primitive_batchers[_p] = functools.partial(_batch, primitive=_p, roles=_r)


# Differentiation.


@promoting
def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    *,
    spec: AttentionSpec,
    implementation: _dispatch.Implementation | None,
    deterministic: bool,
    lengths: _Lengths,
) -> tuple[Sequence[Array], Sequence[Array]]:
    """Lengths are integers, whose tangents are always zero."""
    params = {"spec": spec, "lengths": lengths, "deterministic": deterministic}
    out, lse = _bind(attention_p, *primals, **params, implementation=implementation)
    # Named here, so that what a policy saves are the very values that the derivatives read.
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, RESIDUAL_NAME)
    of = tuple(type(tangent) is not ad.Zero for tangent in tangents[:4])
    given = _select(tangents[:4], of)
    return [out, lse], _bind(attention_tangent_p, *primals, out, lse, *given, **params, of=of)


@promoting
def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    spec: AttentionSpec,
    deterministic: bool,
    lengths: _Lengths,
    of: _Of,
) -> list[Any]:
    count = len(operands) - sum(of)
    nonlinear, linear = operands[:count], operands[count:]
    asked = [ad.is_undefined_primal(x) for x in linear]
    wanted = tuple(bool(x) for x in _spread(asked, of))
    shapes = [x.aval.shape if ask else None for x, ask in zip(linear, asked, strict=True)]
    call = list(nonlinear)
    for i, shape in enumerate(_spread(shapes, of)):
        if shape is not None and i < 3 and shape != call[i].shape:
            # A tangent may be of another size in a batch dimension of key and value than its primal.
            call[i] = jnp.broadcast_to(call[i], jnp.broadcast_shapes(call[i].shape, shape))
    results = _bind(
        attention_backward_p,
        *call,
        *map(ad.instantiate_zeros, cotangents),
        spec=spec,
        deterministic=deterministic,
        lengths=lengths,
        of=wanted,
    )
    summed = (
        _blockwise.sum_to(x, shape)
        for x, shape in zip(results, [shape for shape in shapes if shape is not None], strict=True)
    )
    return [None] * count + [next(summed) if ask else None for ask in asked]


ad.primitive_jvps[attention_p] = _jvp
ad.primitive_transposes[attention_tangent_p] = _transpose


@promoting
def _jvp_of(
    primals: Sequence[Array], tangents: Sequence[Any], *, primitive: Any, function: _Function, **params: Any
) -> tuple[Sequence[Array], Sequence[Array]]:
    """Differentiates what the primitive computes, as JAX differentiates any function."""
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_moving(*values: Array) -> list[Array]:
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return list(function(*operands, **params))

    _, result_tangents = jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    return _bind(primitive, *primals, **params), result_tangents


for _p, _f in ((attention_tangent_p, _tangent), (attention_backward_p, _backward)):
    ad.primitive_jvps[_p] = functools.partial(_jvp_of, primitive=_p, function=_f)


# Lowering. The rule is chosen by the platform that a program is lowered for, not by the devices of this
# process.


@promoting
def _lower(function: _Function, ctx: Any, *operands: Any) -> Any:
    """Lowers a function of plain arrays in place of a primitive.

    It is traced without the shardings of an explicit mesh, whose rules would refuse to merge a sharded batch
    with another dimension, and without the mesh, on which what is new in a loop would be whole. The types of
    the results do not depend on it: they are those given above.
    """
    plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return mlir.lower_fun(function, multiple_results=True)(ctx.replace(avals_in=plain), *operands)


def _lower_forward_default(
    ctx: Any,
    *operands: Any,
    spec: AttentionSpec,
    implementation: _dispatch.Implementation | None,
    deterministic: bool,
    lengths: _Lengths,
) -> Any:
    if not _is_empty(ctx):
        platforms = " and ".join(ctx.platforms or ctx.module_context.platforms)
        _fall_back(_dispatch.wrong_platform(platforms), implementation)
    return _lower(functools.partial(_attention, spec=spec, lengths=lengths), ctx, *operands)


def _lower_forward_cuda(
    ctx: Any,
    *operands: Any,
    spec: AttentionSpec,
    implementation: _dispatch.Implementation | None,
    deterministic: bool,
    lengths: _Lengths,
) -> Any:
    function: _Function = functools.partial(_attention, spec=spec, lengths=lengths)
    if not _is_empty(ctx):
        choice = _choose(ctx, spec, "forward")
        if isinstance(choice, Variant):
            settings = {"variant": choice.name, "spec": dataclasses.asdict(spec), "lengths": lengths}
            if _sharding.is_split(ctx):
                _ffi.register()  # here too: a program that is found in a cache is not split again
                return _sharding.lower(ctx, *operands, target=_sharding.TARGET, settings=settings)
            function = _kernel_of(settings)
        else:
            _fall_back(choice, implementation)
    return _lower(function, ctx, *operands)


def _lower_tangent(ctx: Any, *operands: Any, **params: Any) -> Any:
    return _lower(functools.partial(_tangent, **params), ctx, *operands)


def _lower_backward_default(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Gives no warning: the forward call did."""
    return _lower(functools.partial(_backward, **params), ctx, *operands)


def _lower_backward_cuda(
    ctx: Any,
    *operands: Any,
    spec: AttentionSpec,
    lengths: _Lengths,
    of: _Of,
    deterministic: bool,
) -> Any:
    params: dict[str, Any] = {"lengths": lengths, "of": of, "deterministic": deterministic}
    function: _Function = functools.partial(_backward, spec=spec, **params)
    if not _is_empty(ctx) and any(of):
        choice = _choose(ctx, spec, "backward")
        if isinstance(choice, Variant):
            if _sharding.is_split(ctx):
                _ffi.register()
                settings = {"variant": choice.name, "spec": dataclasses.asdict(spec), **params}
                settings["sums"] = _sharding.all_automatic(ctx)
                return _sharding.lower(ctx, *operands, target=_sharding.BACKWARD_TARGET, settings=settings)
            function = functools.partial(_backward_kernel, spec=spec, variant=choice, **params)
        elif isinstance(_choose(ctx, spec, "forward"), Variant):
            _dispatch.warn_fallback(choice, "derivatives of jax_r2p.attention run as plain XLA")
    return _lower(function, ctx, *operands)


mlir.register_lowering(attention_p, _lower_forward_default)
mlir.register_lowering(attention_p, _lower_forward_cuda, platform="cuda")
mlir.register_lowering(attention_tangent_p, _lower_tangent)
mlir.register_lowering(attention_backward_p, _lower_backward_default)
mlir.register_lowering(attention_backward_p, _lower_backward_cuda, platform="cuda")


@promoting
def _forward_kernel(
    *operands: Array, spec: AttentionSpec, lengths: _Lengths, variant: Variant
) -> Sequence[Array]:
    call, _ = _call_operands(operands, lengths)
    return _kernel_call.forward(*call, spec=spec, variant=variant)


@promoting
def _backward_kernel(
    *operands: Array,
    spec: AttentionSpec,
    lengths: _Lengths,
    of: _Of,
    deterministic: bool,
    variant: Variant,
) -> Sequence[Array]:
    call, rows = _call_operands(operands, lengths)
    results = _kernel_call.backward(
        *call,
        *rows,
        spec=spec,
        variant=variant,
        deterministic=deterministic,
        of=of,
    )
    return _select(results, of)


def _kernel_of(settings: _sharding.Settings) -> _Function:
    """Returns the function of the operands of `attention_p`, or of a shard of each, that calls a kernel."""
    spec, variant = _named(settings)
    return functools.partial(_forward_kernel, spec=spec, lengths=settings["lengths"], variant=variant)


def _backward_kernel_of(settings: _sharding.Settings) -> _Function:
    """The same for a shard of each operand of `attention_backward_p`."""
    spec, variant = _named(settings)
    params = {name: settings[name] for name in ("lengths", "of", "deterministic")}
    return functools.partial(_backward_kernel, spec=spec, variant=variant, **params)


def _named(settings: _sharding.Settings) -> tuple[AttentionSpec, Variant]:
    (variant,) = (variant for variant in load_manifest().variants if variant.name == settings["variant"])
    return AttentionSpec(**settings["spec"]), variant


_sharding.register(_sharding.TARGET, _kernel_of, "cuda")
_sharding.register(_sharding.BACKWARD_TARGET, _backward_kernel_of, "cuda")


def _is_empty(ctx: Any) -> bool:
    query, key, *_ = ctx.avals_in
    return _dispatch.is_empty(query.shape, key.shape)


def _choose(ctx: Any, spec: AttentionSpec, role: ManifestRole) -> Variant | str:
    query, key, value, *_ = ctx.avals_in
    return _dispatch.choose(
        spec, query.shape, key.shape, value.shape, query.dtype, _dispatch.lowering_capability(), role=role
    )


def _fall_back(reason: str, implementation: _dispatch.Implementation | None) -> None:
    if implementation == "r2p":
        raise _dispatch.refuse(reason)
    _dispatch.warn_fallback(reason)
