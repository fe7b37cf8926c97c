"""Leading dimensions: how `vmap` adds one, and how the kernel call folds all of them into one.

Every operand of a primitive has the batch dimensions of the query in front, but key and value may have 1 in
place of any of them: all queries along that dimension then share them. That is how `vmap` over queries alone
copies neither. Scale and the lengths of the sequences have no batch dimension, or all of them, each whole or
1. Tangents are as free as what they are tangents of.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


class Role(enum.Enum):
    """What an operand may have in place of a batch dimension of the query.

    WHOLE: Nothing else.
    SHARED: 1.
    SMALL: 1, or no batch dimension at all; it has no others.
    """

    WHOLE = enum.auto()
    SHARED = enum.auto()
    SMALL = enum.auto()


def roles_of_call(lengths: int) -> list[Role]:
    """Returns the roles of query, key, value, scale and `lengths` lengths of sequences."""
    return [Role.WHOLE, Role.SHARED, Role.SHARED, Role.SMALL] + [Role.SMALL] * lengths


def add_leading_dimension(
    operands: Sequence[Array], axes: Sequence[int | None], roles: Sequence[Role]
) -> list[Array]:
    """Returns the operands of the mapped call, with the mapped dimension in front.

    A new dimension, never a product with the first one: merging would reshard an array whose batch is
    sharded.

    Args:
      operands: The query, and others.
      axes: The mapped dimension of each; None for one that is not mapped.
      roles: Of each.
    """
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    rank = operands[0].ndim - 3 + (axes[0] is None)

    def lead(x: Array, axis: int | None, role: Role) -> Array:
        if role is Role.SMALL:
            return _lead_small(x, axis, rank)
        x = _lead(x, axis)
        return jnp.broadcast_to(x, (size, *x.shape[1:])) if role is Role.WHOLE else x

    return [lead(x, axis, role) for x, axis, role in zip(operands, axes, roles, strict=True)]


def _lead(x: Array, axis: int | None) -> Array:
    return x[None] if axis is None else jnp.moveaxis(x, axis, 0)


def _lead_small(x: Array, axis: int | None, rank: int) -> Array:
    """Gives an operand with nothing but batch dimensions all `rank` of them, unless it has none at all."""
    if axis is None and x.ndim == 0:
        return x
    x = _lead(x, axis)
    return x.reshape(x.shape[0], *(1,) * (rank - x.ndim), *x.shape[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folding:
    """How a kernel with one batch dimension finds the keys of a query.

    Query batch b reads key batch `b // (repeat * inner) * inner + b % inner`.

    Attributes:
      kv_dims: Batch dimensions that key and value must have before they are folded: each whole or 1.
      repeat: Queries that share a key batch.
      inner: Distance of the queries that share one.
    """

    kv_dims: tuple[int, ...]
    repeat: int
    inner: int


def fold(query_dims: Sequence[int], key_dims: Sequence[int], value_dims: Sequence[int]) -> Folding:
    """Returns the folding that copies the least of key and value.

    The kernel's index rule expresses one run of neighbouring shared dimensions, the same for key and value.
    Of all such runs the one with the most queries per key is taken; other shared dimensions have to be
    written out.

    Args:
      query_dims: Batch dimensions of the query, none of them 0.
      key_dims: As many; each equals the query's or is 1.
      value_dims: Likewise.
    """
    shared = [key == value == 1 for key, value in zip(key_dims, value_dims, strict=True)]
    rank = len(shared)
    runs = [(a, b) for a in range(rank + 1) for b in range(a, rank + 1) if all(shared[a:b])]
    start, end = max(runs, key=lambda run: math.prod(query_dims[slice(*run)]))
    repeat = math.prod(query_dims[start:end])
    return Folding(
        kv_dims=tuple(1 if start <= i < end else size for i, size in enumerate(query_dims)),
        repeat=repeat,
        inner=math.prod(query_dims[end:]) if repeat > 1 else 1,
    )


def flatten_batch(x: Array, own_rank: int) -> Array:
    """Returns `x` with all but its last `own_rank` dimensions merged into one."""
    split = x.ndim - own_rank
    return x.reshape(math.prod(x.shape[:split]), *x.shape[split:])
