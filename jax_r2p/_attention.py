"""The public functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_r2p import _arguments, _dispatch, _primitives, reference
from jax_r2p._arguments import ArrayOrStruct
from jax_r2p._dispatch import Capability, Implementation
from jax_r2p._manifest import Variant
from jax_r2p._promotion import promoting
from jax_r2p._spec import AttentionSpec


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    is_causal: bool = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    scale: ArrayLike | None = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    return_residual: Literal[False] = ...,
    implementation: Implementation | None = ...,
    deterministic: bool | None = ...,
) -> Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    is_causal: bool = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    scale: ArrayLike | None = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    return_residual: Literal[True],
    implementation: Implementation | None = ...,
    deterministic: bool | None = ...,
) -> tuple[Array, Array]: ...


@promoting
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    scale: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    return_residual: bool = False,
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
) -> Array | tuple[Array, Array]:
    """Computes softmax(scale * query @ key.T, over the visible keys) @ value for each head.

    The scores never leave the chip where a kernel runs: on NVIDIA Hopper GPUs, in bfloat16 and float16, for
    heads of up to 256 elements. Where H or Hv is no multiple of 8, the arrays are copied into wider ones.
    Elsewhere plain XLA computes the same, with all T * S scores in memory; `explain` tells which of them a
    call gets. Softmax is computed in float32, and `jax_r2p.reference` defines
    every result.

    Works under `jit`, `vmap`, `grad`, `jvp`, `scan`, `checkpoint` and `shard_map`, for derivatives of any
    order by query, key, value and scale. Up to the third order their memory is linear in T and S. Gradients
    come from a backward kernel where the build has one; all other derivatives, and those elsewhere, from
    plain XLA, block of keys by block of keys, which is slower. A `jax.checkpoint` whose policy saves
    `OUT_NAME` and `RESIDUAL_NAME` does not compute the result again. `vmap` over the query alone copies
    neither key nor value; over `scale` it launches one kernel for each value. Arrays that are sharded along
    batch or heads stay so.

    Which keys a query sees, with 1 for visible, queries as rows and keys as columns:

        T = 4, S = 4    is_causal   local_window_size = (1, 1)   (1, 0)    is_causal, T = 2   is_causal, S = 2
                        1 0 0 0              1 1 0 0             1 0 0 0        1 1 1 0             0 0
                        1 1 0 0              1 1 1 0             1 1 0 0        1 1 1 1             0 0
                        1 1 1 0              0 1 1 1             0 1 1 0                            1 0
                        1 1 1 1              0 0 1 1             0 0 1 1                            1 1

    A query that sees no key gets 0. Keys and values that no query sees have no influence, even if NaN or
    infinite.

    Sequences of a batch that are shorter than its arrays come with their lengths: t queries and s keys are
    there, and t and s take the place of T and S in the rules of masks. What lies beyond may hold anything:

        T = 4, S = 4            is_causal, s = 3   is_causal, t = 2, s = 3   t = 2, s = 3
                                0 0 0 0                 1 1 0 0              1 1 1 0
                                1 0 0 0                 1 1 1 0              1 1 1 0
                                1 1 0 0                 0 0 0 0              0 0 0 0
                                1 1 1 0                 0 0 0 0              0 0 0 0

    For example, one token a sequence is decoded against caches of 300 and 4096 keys by

        attention(query, key_cache, value_cache, key_value_seq_lengths=jnp.array([300, 4096], jnp.int32))

    with query (2, 1, N, H) and caches (2, 8192, K, H), in which whatever follows these keys does not matter.

    Args:
      query: (..., T, N, H), with any number of batch dimensions. float32, bfloat16 or float16; float64 if
        enabled.
      key: (..., S, K, H), same batch dimensions and dtype. N is a multiple of K; query head n uses key head
        n // (N // K).
      value: (..., S, K, Hv), same batch dimensions and dtype. Hv, the width of the result, may be H or
        another.
      is_causal: Whether query i sees no key after i + S - T. So the last query is aligned with the last key,
        unlike in `jax.nn.dot_product_attention`, which aligns the first ones.
      local_window_size: (left, right): query i sees only the keys from i + S - T - left to i + S - T + right,
        both included. An int w stands for (w, w). With `is_causal`, both rules hold. None for no window.
      scale: Factor of the scores: a real number of any sign, or an array of shape (), which may be traced. A
        new value needs no compilation. None for 1 / sqrt(H).
      query_seq_lengths: int32, with the batch dimensions of `query`, (...), as its shape: how many queries of
        each sequence are there. The others get 0, and -inf as residual. May be traced; new values need no
        compilation. Lengths below 0 count as 0, above T as T. None for T.
      key_value_seq_lengths: Likewise how many keys and values of each sequence are there; the others are seen
        by no query. None for S.
      return_residual: Whether to return the residual too.
      implementation: None for the kernel where there is one, else plain XLA, with a `FallbackWarning` once
        for each reason; "r2p" for the kernel or an error; "xla" for plain XLA, whose derivatives hold all
        T * S scores. The demand "r2p" concerns the result, not its derivatives.
      deterministic: Whether the gradients by query, key and value have to be the same bits in each run. A
        backward kernel is slower then. The result always is the same; so are derivatives that no kernel
        computes. None for True if XLA_FLAGS has `--xla_gpu_deterministic_ops` or
        `--xla_gpu_exclude_nondeterministic_ops`, else False.

    Returns:
      out, (..., T, N, Hv), with the dtype of `query`. With `return_residual`, (out, residual): the natural
      logarithm of the sum of the exponentials of a query's visible scores, (..., T, N), float32 (float64 for
      float64 inputs); -inf for a query that sees no key.

    Raises:
      TypeError: An argument has the wrong type or dtype, or a static one is traced.
      ValueError: Shapes do not go together, or an argument has a value that is not allowed.
      NotImplementedError: `implementation="r2p"`, and no kernel takes this call: here, if none does on any
        GPU; when the call is lowered, if none does for that platform.
      RuntimeError: The kernels of the installed package are missing or altered.
    """
    arrays = _arguments.as_arrays(query, key, value)
    _arguments.check_arrays(*arrays)
    spec = _arguments.make_spec(is_causal, local_window_size)
    factor = _arguments.check_scale(scale, arrays[0].shape[-1])
    lengths = _arguments.as_lengths(query_seq_lengths, key_value_seq_lengths)
    _arguments.check_lengths(lengths, arrays[0].shape[:-3])
    _arguments.check_flag("return_residual", return_residual)
    _arguments.check_implementation(implementation)
    deterministic = _arguments.check_deterministic(deterministic)

    query, key, value = arrays
    factor = jnp.asarray(factor, reference.compute_dtype(query.dtype))
    if implementation == "xla":
        out, lse = reference.attention(query, key, value, factor, *lengths, spec=spec)
    else:
        if implementation == "r2p":
            require_kernel(spec, arrays)
        out, lse = _primitives.bind_attention(
            query,
            key,
            value,
            factor,
            *lengths,
            spec=spec,
            implementation=implementation,
            deterministic=deterministic,
        )
    return (out, jnp.swapaxes(lse, -1, -2)) if return_residual else out


def _choose(spec: AttentionSpec, arrays: Sequence[ArrayOrStruct], capability: Capability) -> Variant | str:
    query, key, value = arrays
    return _dispatch.choose(spec, query.shape, key.shape, value.shape, query.dtype, capability)


def _is_empty(arrays: Sequence[ArrayOrStruct]) -> bool:
    return _dispatch.is_empty(arrays[0].shape, arrays[1].shape)


def require_kernel(spec: AttentionSpec, arrays: Sequence[Array]) -> None:
    """Raises NotImplementedError if no GPU has a kernel. Lowering would, too, but far from the caller."""
    choice = _choose(spec, arrays, _dispatch.HOPPER)
    if isinstance(choice, str) and not _is_empty(arrays):
        raise _dispatch.refuse(choice)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call of `attention` does, and why.

    Attributes:
      implementation: What would compute it in this process, on its default backend: "r2p" for the kernel,
        "xla" for plain XLA; None for nothing, since the kernel is demanded and the call would raise
        NotImplementedError.
      variant: The kernel which a Hopper GPU would run for it; None if there is none.
      reason: Why the kernel does not compute it here; None if it does.
    """

    implementation: Implementation | None
    variant: str | None
    reason: str | None

    def __str__(self) -> str:
        """Says the same in a sentence or two."""
        if self.implementation == "r2p":
            return f"Runs kernel {self.variant}."
        action = "Runs as plain XLA" if self.implementation == "xla" else "Raises NotImplementedError"
        hopper = f" A Hopper GPU can run kernel {self.variant}." if self.variant else ""
        return f"{action}: {self.reason}.{hopper}"


def explain(
    query: ArrayLike | jax.ShapeDtypeStruct,
    key: ArrayLike | jax.ShapeDtypeStruct,
    value: ArrayLike | jax.ShapeDtypeStruct,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    scale: ArrayLike | None = None,
    query_seq_lengths: ArrayLike | jax.ShapeDtypeStruct | None = None,
    key_value_seq_lengths: ArrayLike | jax.ShapeDtypeStruct | None = None,
    return_residual: bool = False,
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
) -> Explanation:
    """Tells what `attention` does with these arguments; computes nothing.

    Args:
      query: As for `attention`, or a `jax.ShapeDtypeStruct`.
      key: Likewise.
      value: Likewise.
      is_causal: As for `attention`.
      local_window_size: As for `attention`.
      scale: As for `attention`.
      query_seq_lengths: As for `attention`, or a `jax.ShapeDtypeStruct`; changes nothing.
      key_value_seq_lengths: Likewise.
      return_residual: As for `attention`; changes nothing.
      implementation: As for `attention`.
      deterministic: As for `attention`; changes nothing.

    Returns:
      The explanation. `print` it to read it.

    Raises:
      TypeError: As for `attention`.
      ValueError: As for `attention`.
      RuntimeError: As for `attention`.
    """
    arrays = _arguments.as_structs(query, key, value)
    _arguments.check_arrays(*arrays)
    spec = _arguments.make_spec(is_causal, local_window_size)
    _arguments.check_scale(scale, arrays[0].shape[-1])
    lengths = _arguments.as_length_structs(query_seq_lengths, key_value_seq_lengths)
    _arguments.check_lengths(lengths, arrays[0].shape[:-3])
    _arguments.check_flag("return_residual", return_residual)
    _arguments.check_implementation(implementation)
    _arguments.check_deterministic(deterministic)

    if _is_empty(arrays):
        return Explanation("xla", None, "there is nothing to compute")
    hopper = _choose(spec, arrays, _dispatch.HOPPER)
    variant = hopper.name if isinstance(hopper, Variant) else None
    if implementation == "xla":
        return Explanation("xla", variant, "implementation='xla' was asked for")
    reason = _reason_here(spec, arrays) if isinstance(hopper, Variant) else hopper
    if reason is None:
        return Explanation("r2p", variant, None)
    return Explanation(None if implementation == "r2p" else "xla", variant, reason)


def _reason_here(spec: AttentionSpec, arrays: Sequence[ArrayOrStruct]) -> str | None:
    """Returns why the default backend does not run a call for which there is a kernel; None if it does."""
    backend = jax.default_backend()
    if backend != "gpu" or not _dispatch.cuda_capabilities():
        return _dispatch.wrong_platform(backend)
    choice = _choose(spec, arrays, _dispatch.lowering_capability())
    return choice if isinstance(choice, str) else None
