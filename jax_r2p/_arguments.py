"""The rules for arguments of the public functions: each is checked here, before anything is traced."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_r2p._spec import AttentionSpec

ArrayOrStruct = Array | jax.ShapeDtypeStruct

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_IMPLEMENTATIONS = (None, "r2p", "xla")
_DETERMINISTIC_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
_NAMES = ("query", "key", "value")
_LENGTH_NAMES = ("query_seq_lengths", "key_value_seq_lengths")


def as_arrays(*arrays: Any) -> list[Array]:
    """Returns query, key and value as jax arrays.

    Raises:
      TypeError: One is not an array. A list is not: converting it would hide how slow that is.
    """
    for name, x in zip(_NAMES, arrays, strict=True):
        if not _is_array(x):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    return [jnp.asarray(x) for x in arrays]


def as_structs(*arrays: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of query, key and value, which may be structs themselves.

    Raises:
      TypeError: One is neither an array nor a struct.
    """
    for name, x in zip(_NAMES, arrays, strict=True):
        if not _is_array(x) and not isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"{name} must be an array or a jax.ShapeDtypeStruct, got {type(x).__name__}")
    # As for arrays, float64 means float32 unless jax_enable_x64 is set.
    return [jax.eval_shape(jnp.asarray, x) for x in arrays]


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) or hasattr(x, "__jax_array__")


def check_arrays(query: ArrayOrStruct, key: ArrayOrStruct, value: ArrayOrStruct) -> None:
    """Checks dtypes and shapes.

    Raises:
      TypeError: A dtype is not supported, or they differ.
      ValueError: The shapes do not go together.
    """
    for name, x in zip(_NAMES, (query, key, value), strict=True):
        if str(x.dtype) not in _DTYPES:
            raise TypeError(f"{name} must have a dtype out of {', '.join(_DTYPES)}; got {x.dtype}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype}; got {x.dtype}")
    if query.ndim < 3:
        raise ValueError(f"query must have the dimensions (..., T, N, H), got shape {query.shape}")
    if key.ndim != query.ndim:
        raise ValueError(f"key must have as many dimensions as query, {query.ndim}; got shape {key.shape}")
    if key.shape[:-3] != query.shape[:-3]:
        raise ValueError(
            f"key must have the batch dimensions of query, {query.shape[:-3]}; got {key.shape[:-3]}"
        )
    head_dim, heads, kv_heads = query.shape[-1], query.shape[-2], key.shape[-2]
    if head_dim == 0:
        raise ValueError(f"{head_dim=} of query must be at least 1")
    if key.shape[-1] != head_dim:
        raise ValueError(f"key must have the {head_dim=} of query, got {key.shape[-1]}")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"value must have the shape of key but for the last dimension, {key.shape}; got {value.shape}"
        )
    if value.shape[-1] == 0:
        raise ValueError(f"the last dimension of value must be at least 1, got shape {value.shape}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"the number of heads of query must be a multiple of key's; got {heads=} and {kv_heads=}"
        )


def as_lengths(*lengths: Any) -> list[Array | None]:
    """Returns the lengths of queries and keys as jax arrays, where they are not None.

    Raises:
      TypeError: They cannot be made one.
    """
    return [_as_length(name, x) for name, x in zip(_LENGTH_NAMES, lengths, strict=True)]


def as_length_structs(*lengths: Any) -> list[ArrayOrStruct | None]:
    """Returns the same, but leaves structs as they are."""
    return [
        x if isinstance(x, jax.ShapeDtypeStruct) else _as_length(name, x)
        for name, x in zip(_LENGTH_NAMES, lengths, strict=True)
    ]


def _as_length(name: str, x: Any) -> Array | None:
    try:
        return None if x is None else jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be None or an int32 array, got {type(x).__name__}") from error


def check_lengths(lengths: Sequence[ArrayOrStruct | None], batch: tuple[int, ...]) -> None:
    """Checks dtypes and shapes of the lengths of queries and keys.

    Raises:
      TypeError: They are not int32.
      ValueError: There is not one for each sequence of the batch.
    """
    for name, x in zip(_LENGTH_NAMES, lengths, strict=True):
        if x is not None and x.dtype != jnp.int32:
            raise TypeError(f"{name} must have dtype int32, got {x.dtype}")
        if x is not None and x.shape != batch:
            raise ValueError(f"{name} must have the batch dimensions of query, {batch}; got shape {x.shape}")


def make_spec(is_causal: Any, local_window_size: Any) -> AttentionSpec:
    """Returns the spec of a mask.

    Raises:
      TypeError: `is_causal` is not a bool, or `local_window_size` is neither None, an int nor two ints.
      ValueError: A window side is negative.
    """
    check_flag("is_causal", is_causal)
    left, right = _window(local_window_size)
    if is_causal:
        right = 0  # the least that a window can have, too
    return AttentionSpec(left=left, right=right)


def _window(size: Any) -> tuple[int | None, int | None]:
    if size is None:
        return None, None
    sides = size if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2 or not all(_is_static_int(side) for side in sides):
        raise TypeError(
            "local_window_size must be None, an int or two ints (left, right), known when tracing; "
            f"got {size!r}"
        )
    left, right = map(operator.index, sides)
    if left < 0 or right < 0:
        raise ValueError(f"local_window_size must not be negative, got {size!r}")
    return left, right


def _is_static_int(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def check_scale(scale: Any, head_dim: int) -> Any:
    """Returns the scale to use: `scale`, or its default.

    Raises:
      TypeError: `scale` is not a real number.
      ValueError: `scale` is an array with dimensions.
    """
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        return float(scale)
    dtype = getattr(scale, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"scale must be a real number, got {scale!r}")
    if scale.shape != ():
        raise ValueError(f"scale must be a scalar, got shape {scale.shape}")
    return scale


def check_flag(name: str, flag: Any) -> None:
    """Raises TypeError unless `flag` is a bool."""
    if isinstance(flag, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a bool known when tracing, got {flag}; make it a static argument of jit"
        )
    if not isinstance(flag, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {flag!r}")


def check_implementation(implementation: Any) -> None:
    """Raises ValueError unless `implementation` is one that there is."""
    if not any(implementation is known or implementation == known for known in _IMPLEMENTATIONS):
        raise ValueError(f"implementation must be one of {_IMPLEMENTATIONS}, got {implementation!r}")


def check_deterministic(deterministic: Any) -> bool:
    """Returns whether derivatives have to be deterministic; for None, whether XLA was told to be so.

    Raises:
      TypeError: It is neither None nor a bool known when tracing.
    """
    if deterministic is None:
        return _wants_determinism(os.environ.get("XLA_FLAGS", ""))
    check_flag("deterministic", deterministic)
    return bool(deterministic)


def _wants_determinism(flags: str) -> bool:
    """Whether XLA, which reads the same text, is to give the same bits in each run."""
    values = {}
    for flag in flags.split():
        name, _, value = flag.partition("=")
        values[name] = value.lower() in ("", "true", "t", "yes", "y", "1")
    return any(values.get(name, False) for name in _DETERMINISTIC_FLAGS)
