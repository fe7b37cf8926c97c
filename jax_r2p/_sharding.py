"""How one program for several devices splits a kernel call: each device calls it for its own shard.

XLA cannot look into a custom call, so it would gather every sharded operand of one. Under `jit` over several
devices a primitive is therefore lowered to a placeholder, a custom call of `TARGET` or `BACKWARD_TARGET` with
the operands of the primitive. XLA asks back twice, and everything then follows the query:

- While shardings spread through the program, the placeholder's `sdy.sharding_rule` (`_rule`) says which
  dimensions of operands and results go together.
- When the program is split, a partitioner registered under the placeholder's name (`_partition`) gets the
  sharding of the query, derives the others from it, and returns the program that takes the placeholder's
  place on each device: the same function that one device alone would run, lowered for the shapes of a shard.

Batch dimensions and heads stay split as the query is, T, S, H and Hv become whole; `_layouts` is that rule.

Of keys that several devices share, each device knows the gradient that its own queries make. So that program
ends with a sum over these devices, the one thing that they send each other.

Why so, and not otherwise. `custom_partitioning` does the same, but writes the address of a Python object into
the program, so that no other process finds it in the persistent compilation cache; and it can neither be
exported nor lowered for devices that are not there. `register_ffi_target_as_batch_partitionable` knows only
leading dimensions: heads come last, and fewer key heads than devices cannot be expressed. Folding batch
dimensions has to wait until a shard's shapes are known: one that is split cannot be merged with another.

`register_custom_call_partitioner` of jaxlib and the hook that hands it to plugins are not public API; they
are what `custom_partitioning` itself is made of. Where a program has one device, or `shard_map` has made all
axes manual, none of this is used.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax._src import xla_bridge
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh
from jaxlib import xla_client
from jaxlib.mlir.dialects import stablehlo as hlo

TARGET = "jax_r2p.attention_partitioned.v1"
"""Name of the placeholder in programs not split yet. Other operands or settings need another name."""

BACKWARD_TARGET = "jax_r2p.attention_backward_partitioned.v1"
"""The same for the cotangents. Its settings have `of`, those of query, key, value and scale asked for, and
`sums`, whether a shard's program may sum over devices."""

Settings = dict[str, Any]
"""What a call of the kernel is made from besides arrays: anything that JSON can express."""


def is_split(ctx: Any) -> bool:
    """Whether a lowering rule runs for a program whose arrays XLA will split over devices."""
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        return axes.num_devices > 1
    if isinstance(axes, mlir.SPMDAxisContext):
        return any(size > 1 for name, size in axes.mesh.shape.items() if name not in axes.manual_axes)
    return False


def all_automatic(ctx: Any) -> bool:
    """Whether no axis of the mesh is manual in the program that a lowering rule runs for."""
    return not getattr(ctx.module_context.axis_context, "manual_axes", ())


def lower(ctx: Any, *operands: Any, target: str, settings: Settings) -> Any:
    """Lowers a primitive to its placeholder.

    Args:
      ctx: Context of the lowering rule.
      operands: Those of the primitive.
      target: Name of the placeholder.
      settings: What `register`'s function makes the call of a shard from. They are written into the program,
        and so must not depend on the process.
    """
    rule = _rule([aval.shape for aval in ctx.avals_in], settings)
    call = jax.ffi.ffi_lowering(
        target,
        api_version=2,  # of those that take a string
        backend_config=json.dumps(settings, sort_keys=True),
        extra_attributes={"sdy.sharding_rule": mlir.ir.Attribute.parse(rule)},
    )
    return call(ctx, *operands)


def register(
    target: str, shard_call: Callable[[Settings], Callable[..., Sequence[Array]]], platform: str
) -> None:
    """Registers the partitioner of a placeholder with XLA, for all platforms of this process.

    Args:
      target: Name of the placeholder.
      shard_call: Returns the function to be called with a shard of each operand, from the settings.
      platform: What that function is lowered for.
    """
    partitioner = {
        "prop_user_sharding": lambda sharding, *_: sharding,
        "partition": functools.partial(_partition, shard_call, platform),
        "infer_sharding_from_operands": _infer,
        "can_side_effecting_have_replicated_sharding": True,
    }
    # CUDA is a plugin, which has a registry of its own.
    add = functools.partial(xla_client.register_custom_call_partitioner, target, **partitioner)
    add()
    xla_bridge.register_plugin_callbacks(add)


# Which dimensions go together. A layout names, for each dimension of an array, the parts of the query that it
# is split like: those of the batch are numbers, and the heads of the query have two, the head of the keys and
# the place in its group.

_KV_HEAD, _IN_GROUP = "kv head", "in group"
_QUERIES, _KEYS, _WIDTH, _VALUE_WIDTH = "T", "S", "H", "Hv"
_WHOLE = (_QUERIES, _KEYS, _WIDTH, _VALUE_WIDTH)
_Layout = list[tuple[int | str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layouts:
    operands: list[_Layout]
    results: list[_Layout]


def _layouts(shapes: Sequence[Sequence[int]], settings: Settings) -> _Layouts:
    """Returns the layouts of a primitive's operands, of these shapes, and of its results."""
    query, key, value, *others = shapes
    batch = query[:-3]

    def follow(dims: Sequence[int]) -> _Layout:
        # One entry for the whole batch cannot be split, and is not.
        return [
            (i,) if size == whole else () for i, (size, whole) in enumerate(zip(dims, batch, strict=True))
        ]

    heads = (_KV_HEAD, _IN_GROUP)
    of_query: _Layout = [*follow(batch), (_QUERIES,), heads, (_WIDTH,)]
    of_key: _Layout = [*follow(key[:-3]), (_KEYS,), (_KV_HEAD,), (_WIDTH,)]
    of_value: _Layout = [*follow(value[:-3]), (_KEYS,), (_KV_HEAD,), (_VALUE_WIDTH,)]
    of_out: _Layout = [*follow(batch), (_QUERIES,), heads, (_VALUE_WIDTH,)]
    of_lse: _Layout = [*follow(batch), heads, (_QUERIES,)]
    results = rows = [of_out, of_lse]
    if "of" in settings:
        every = (of_query, of_key, of_value, follow(batch))
        results = [layout for layout, wanted in zip(every, settings["of"], strict=True) if wanted]
        rows = [of_out, of_lse, of_out, of_lse]
    small = others[: -len(rows)] if "of" in settings else others
    operands = [of_query, of_key, of_value, *(follow(dims) if dims else [] for dims in small)]
    return _Layouts(operands=operands + (rows if "of" in settings else []), results=results)


def _rule(shapes: Sequence[Sequence[int]], settings: Settings) -> str:
    """Returns the layouts in Shardy's notation, in which each part is a letter with a size."""
    query, key, value, *_ = shapes
    layouts = _layouts(shapes, settings)
    sizes: dict[int | str, int] = {
        **dict(enumerate(query[:-3])),
        _QUERIES: query[-3],
        _KV_HEAD: key[-2],
        _IN_GROUP: query[-2] // key[-2],
        _KEYS: key[-3],
        _WIDTH: query[-1],
        _VALUE_WIDTH: value[-1],
    }
    fresh = _letters()
    letters: dict[int | str, str] = {}
    factors: list[str] = []

    def letter(part: int | str | None, size: int) -> str:
        if part in letters:
            return letters[part]
        name = next(fresh)
        factors.append(f"{name}={size}")
        if part is not None:
            letters[part] = name
        return name

    def dimension(parts: tuple[int | str, ...]) -> str:
        # Only factors above 1 may be multiplied, and a dimension of size 1 has a factor of its own.
        parts = tuple(part for part in parts if sizes[part] > 1)
        return "".join(letter(part, sizes[part]) for part in parts) or letter(None, 1)

    def arrays(side: list[_Layout]) -> str:
        return ", ".join(f"[{', '.join(map(dimension, layout))}]" for layout in side)

    operands, results = arrays(layouts.operands), arrays(layouts.results)
    whole = ", ".join(letters[part] for part in letters if part in _WHOLE)
    replicated = f" need_replication={{{whole}}}" if whole else ""
    return f"#sdy.op_sharding_rule<({operands})->({results}) {{{', '.join(factors)}}}{replicated}, custom>"


def _letters() -> Iterator[str]:
    """Yields the names that Shardy gives to factors: i, j, ..., z, z_1, z_2, ..."""
    yield from "ijklmnopqrstuvwxyz"
    yield from (f"z_{i}" for i in itertools.count(1))


_Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Split:
    """How a placeholder is split: shardings of operands and results.

    For each result also the groups of devices that have to sum it up; none if it is whole on each.
    """

    operands: list[Any]
    results: list[Any]
    sums: list[_Groups]


def _split(shapes: Sequence[Sequence[int]], query: Any, settings: Settings) -> _Split:
    """Returns the shardings that follow from the query's.

    Heads stay split if each device's query heads use its own key heads: the devices divide either the key
    heads, or, if these are fewer, the queries of each. Otherwise every device gets all heads.

    Args:
      shapes: Of the operands, whole.
      query: Its `HloSharding`.
      settings: Those of the placeholder.
    """
    layouts = _layouts(shapes, settings)
    tiles, axes = _tiles(query, len(shapes[0]), shapes[0][-2], shapes[1][-2])

    def summed_over(layout: _Layout) -> list[int | str]:
        """The parts that are split and that a result does not have."""
        there = {part for parts in layout for part in parts}
        return [part for part, axis in axes.items() if part not in there and tiles.shape[axis] > 1]

    for part in {part for layout in layouts.results for part in summed_over(layout)}:
        # What fills up an uneven batch may be anything, and must not be added.
        even = isinstance(part, str) or shapes[0][part] % tiles.shape[axes[part]] == 0
        if not (even and settings["sums"]):
            for other in (part,) if isinstance(part, int) else (_KV_HEAD, _IN_GROUP):
                axes.pop(other, None)

    def sharding(layout: _Layout) -> Any:
        return _to_sharding(tiles, [[axes[part] for part in parts if part in axes] for parts in layout])

    def groups(layout: _Layout) -> _Groups:
        over = [axes[part] for part in summed_over(layout)]
        if not over:
            return ()
        rest = [axis for axis in range(tiles.ndim) if axis not in over]
        rows = tiles.transpose([*rest, *over]).reshape(-1, math.prod(tiles.shape[axis] for axis in over))
        return tuple(tuple(map(int, row)) for row in rows)

    return _Split(
        operands=list(map(sharding, layouts.operands)),
        results=list(map(sharding, layouts.results)),
        sums=list(map(groups, layouts.results)),
    )


def _tiles(
    query: Any, rank: int, heads: int, kv_heads: int
) -> tuple[np.ndarray[Any, Any], dict[int | str, int]]:
    """Returns the devices by the part of the query that they hold, and the axis of each part that is kept."""
    if not query.is_tiled():
        return np.zeros(1, int), {}  # no axis is kept
    dims = list(query.tile_assignment_dimensions())
    count = dims[rank - 2]
    by_key, in_group = (count, 1) if kv_heads % count == 0 else (kv_heads, count // kv_heads)
    keeps_heads = heads % count == 0 and by_key * in_group == count
    if not keeps_heads:
        by_key, in_group = count, 1
    devices = np.reshape(
        query.tile_assignment_devices(), [*dims[: rank - 2], by_key, in_group, *dims[rank - 1 :]]
    )
    axes: dict[int | str, int] = {i: i for i in range(rank - 3)}
    if keeps_heads:
        axes |= {_KV_HEAD: rank - 2, _IN_GROUP: rank - 1}
    return devices, axes


def _to_sharding(tiles: np.ndarray[Any, Any], dims: Sequence[Sequence[int]]) -> Any:
    """Returns the sharding that splits each dimension of an array along the given axes of `tiles`.

    Along the other axes devices hold copies.
    """
    proto = xla_client.OpSharding()
    shape = [math.prod(tiles.shape[axis] for axis in axes) for axes in dims]
    if math.prod(shape) == 1:
        proto.type = xla_client.OpSharding.Type.REPLICATED
        return xla_client.HloSharding.from_proto(proto)
    used = [axis for axes in dims for axis in axes]
    rest = [axis for axis in range(tiles.ndim) if axis not in used]
    copies = math.prod(tiles.shape[axis] for axis in rest)
    proto.type = xla_client.OpSharding.Type.OTHER
    proto.tile_assignment_dimensions = [*shape, *([copies] if copies > 1 else [])]
    proto.replicate_on_last_tile_dim = copies > 1
    proto.tile_assignment_devices = [int(device) for device in tiles.transpose([*used, *rest]).ravel()]
    return xla_client.HloSharding.from_proto(proto)


def _together(shardings: Sequence[Any]) -> Any:
    """Returns the sharding of all results; a single one is not in a tuple."""
    if len(shardings) == 1:
        return shardings[0]
    proto = xla_client.OpSharding()
    proto.type = xla_client.OpSharding.Type.TUPLE
    proto.tuple_shardings = [sharding.to_proto() for sharding in shardings]
    return xla_client.HloSharding.from_proto(proto)


# The sum over devices. A collective of `jax.lax` needs the axes of a mesh, of which XLA tells nothing here.

sum_p: Any = Primitive("jax_r2p_sum_over_devices")
sum_p.def_abstract_eval(lambda x, *, groups: x)


def _lower_sum(ctx: Any, x: Any, *, groups: _Groups) -> Any:
    del ctx
    scalar = mlir.ir.RankedTensorType.get([], mlir.ir.RankedTensorType(x.type).element_type)
    attributes: dict[str, Any] = {
        "replica_groups": mlir.ir.DenseIntElementsAttr.get(np.array(groups, np.int64)),  # type: ignore[call-overload]
        "channel_handle": hlo.ChannelHandle.get(1, 1),  # XLA gives it a number of its own
        "use_global_device_ids": mlir.ir.BoolAttr.get(True),
    }
    op = hlo.AllReduceOp([x.type], [x], **attributes)
    block = op.regions[0].blocks.append(scalar, scalar)
    with mlir.ir.InsertionPoint(block):
        hlo.return_([hlo.add(*block.arguments)])
    return op.results


mlir.register_lowering(sum_p, _lower_sum)


def _sum(x: Array, groups: _Groups) -> Array:
    """Sums in float32 what each group of devices has."""
    if not groups:
        return x
    return sum_p.bind(x.astype(np.promote_types(x.dtype, np.float32)), groups=groups).astype(x.dtype)


# What XLA calls.


def _infer(shapes: Sequence[Any], shardings: Sequence[Any], result_shape: Any, settings: bytes) -> Any:
    """Returns the sharding of the results. Shardy, which has the rule, does not ask for it."""
    del result_shape
    dims = [shape.dimensions() for shape in shapes]
    return _together(_split(dims, shardings[0], json.loads(settings)).results)


def _partition(
    shard_call: Callable[[Settings], Callable[..., Sequence[Array]]],
    platform: str,
    shapes: Sequence[Any],
    shardings: Sequence[Any],
    result_shape: Any,
    result_sharding: Any,
    settings: bytes,
) -> tuple[bytes, Sequence[Any], Any]:
    """Returns the program of one device, and how its operands and results are split."""
    del result_shape
    given: Settings = json.loads(settings)
    sums: Sequence[_Groups] | None = None
    if not shardings[0].is_manual():  # else the shapes are a shard's already
        split = _split([shape.dimensions() for shape in shapes], shardings[0], given)
        shardings, result_sharding, sums = split.operands, _together(split.results), split.sums
        shapes = [sharding.tile(shape) for sharding, shape in zip(shardings, shapes, strict=True)]
    local = [jax.ShapeDtypeStruct(shape.dimensions(), shape.numpy_dtype()) for shape in shapes]
    function = shard_call(given)

    def call(*operands: Array) -> Sequence[Array]:
        results = function(*operands)
        return results if sums is None else list(map(_sum, results, sums))

    # XLA calls this while the caller's mesh is set, whose rules are not for shards.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        lowered = jax.jit(call, keep_unused=True).trace(*local).lower(lowering_platforms=(platform,))
    return mlir.module_to_bytecode(lowered.compiler_ir("stablehlo")), shardings, result_sharding
