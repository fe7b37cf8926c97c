"""Attention over a sequence that is sharded over devices: `ring_attention`, for use inside `jax.shard_map`.

Each device keeps its queries. The shards of key and value travel from device to device, and every device
computes attention to the shard that is visiting and merges it into what it has. Which part of its queries
sees which part of a visiting shard is known while tracing, but for one question whose answer differs between
devices: whether the shard came around the end of the ring. So a mask over the whole sequence becomes a
`_Plan`: for each hop two tiles, one for either answer, each a call of ordinary attention with an ordinary
mask, or nothing at all. Contiguous shards, windows and the zigzag layout differ in their plans only.

The gradient is a second trip around the ring, by the same plan. It needs the results of the whole sequence
and no others, so nothing is kept of the hops of the first trip. The gradients of key and value travel along
with them and end at home.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import ad
from jax.typing import ArrayLike

from jax_r2p import _arguments, _attention, _blockwise, _primitives, reference
from jax_r2p._dispatch import Implementation
from jax_r2p._promotion import promoting
from jax_r2p._spec import AttentionSpec

Layout = Literal["contiguous", "zigzag"]
Method = Literal["ring", "all_gather"]
AxisName = str | tuple[str, ...]

_LAYOUTS = ("contiguous", "zigzag")
_METHODS = ("ring", "all_gather")


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    is_causal: bool = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    scale: ArrayLike | None = ...,
    layout: Layout = ...,
    method: Method = ...,
    return_residual: Literal[False] = ...,
    implementation: Implementation | None = ...,
    deterministic: bool | None = ...,
) -> Array: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    is_causal: bool = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    scale: ArrayLike | None = ...,
    layout: Layout = ...,
    method: Method = ...,
    return_residual: Literal[True],
    implementation: Implementation | None = ...,
    deterministic: bool | None = ...,
) -> tuple[Array, Array]: ...


@promoting
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    scale: ArrayLike | None = None,
    layout: Layout = "contiguous",
    method: Method = "ring",
    return_residual: bool = False,
    implementation: Implementation | None = None,
    deterministic: bool | None = None,
) -> Array | tuple[Array, Array]:
    """Computes `jax_r2p.attention` of sequences that are sharded over a mesh axis, inside `jax.shard_map`.

    Every device passes its own shard, and gets that of the result. Of P devices, device i has

        layout="contiguous"    part i of P equal parts of the sequence
        layout="zigzag"        parts i and 2 P - 1 - i of 2 P equal parts, in this order; see `to_zigzag`

    Masks are those of the whole sequence. Under a causal mask contiguous shards leave the first devices idle
    while the last ones work; with "zigzag" all have the same to do.

    Reverse-mode derivatives are a second trip around the ring. Forward mode and derivatives of higher order
    come from `method="all_gather"`.

    Args:
      query: (..., T / P, N, H), this device's shard. Other dimensions may be sharded over other axes.
      key: (..., S / P, K, H), likewise. With a mask, S must be T, unless `method` is "all_gather" and
        `layout` "contiguous".
      value: (..., S / P, K, Hv), likewise.
      axis_name: The axis of the mesh that the sequence is sharded over, or a tuple of them.
      is_causal: As for `attention`: whether a query sees no key after its own position.
      local_window_size: As for `attention`, in positions of the whole sequence; not with "zigzag". Shards
        that no query of a device sees are not sent to it.
      scale: As for `attention`; the same on all devices.
      layout: How the sequence is sharded. "zigzag" wants a causal mask and an even shard length.
      method: "ring" sends key and value on from device to device while computing: memory for two shards of
        each, whatever P is. "all_gather" gathers them first: memory for all of S, one call of the kernel, no
        transfer behind which it could hide; for short sequences.
      return_residual: As for `attention`.
      implementation: As for `attention`.
      deterministic: As for `attention`.

    Returns:
      out, (..., T / P, N, Hv), with the dtype of `query`. With `return_residual`, (out, residual), where the
      residual, (..., T / P, N), is that of all visible keys of the whole sequence.

    Raises:
      TypeError: As for `attention`; or the call is differentiated in forward mode and `method` is "ring".
      ValueError: As for `attention`; or there is no such axis, layout or method, or the layout does not go
        with the shapes or the mask.
      NotImplementedError: As for `attention`; or a window with "zigzag", or a mask with S other than T.
    """
    arrays = _arguments.as_arrays(query, key, value)
    _arguments.check_arrays(*arrays)
    spec = _arguments.make_spec(is_causal, local_window_size)
    factor = _arguments.check_scale(scale, arrays[0].shape[-1])
    _arguments.check_flag("return_residual", return_residual)
    _arguments.check_implementation(implementation)
    backend = _Backend(implementation, _arguments.check_deterministic(deterministic))
    size = _axis_size(axis_name)
    _check_layout(spec, layout, method, *(x.shape[-3] for x in arrays[:2]))

    query, key, value = arrays
    if implementation == "r2p":
        _attention.require_kernel(spec, arrays)
    factor = jnp.asarray(factor, reference.compute_dtype(query.dtype))
    # The transpose of what makes them all vary sums up gradients of what does not, such as scale.
    query, key, value, factor, _ = _primitives.vary_together(
        query, key, value, factor, lax.axis_index(axis_name)
    )
    if method == "ring":
        _check_reverse_mode(query, key, value, factor)
        plan = _plan(spec, layout, query.shape[-3], key.shape[-3], size)
        ring = _Ring(axis_name=axis_name, size=size, plan=plan, backend=backend)
        out, lse = _around(ring, query, key, value, factor)
    else:
        out, lse = _gathered(query, key, value, factor, axis_name, spec=spec, layout=layout, backend=backend)
    return (out, jnp.swapaxes(lse, -1, -2)) if return_residual else out


def _axis_size(axis_name: AxisName) -> int:
    try:
        return int(lax.axis_size(axis_name))
    except (NameError, TypeError) as error:
        raise ValueError(
            "axis_name must be an axis of a mesh, and the call inside a jax.shard_map over it; got "
            f"{axis_name!r}"
        ) from error


def _check_layout(spec: AttentionSpec, layout: Any, method: Any, queries: int, keys: int) -> None:
    for name, got, known in (("layout", layout, _LAYOUTS), ("method", method, _METHODS)):
        if not isinstance(got, str) or got not in known:
            raise ValueError(f"{name} must be one of {known}, got {got!r}")
    masked = spec != AttentionSpec()
    if layout == "zigzag":
        if spec.left is not None or (masked and not spec.right == 0):
            raise NotImplementedError(
                "layout='zigzag' takes no local_window_size; use layout='contiguous', where each device has "
                "the same to do in a window"
            )
        if not masked:
            raise ValueError("layout='zigzag' is for is_causal=True; without a mask use layout='contiguous'")
        if queries != keys:
            raise ValueError(
                "layout='zigzag' needs query and key shards of one length, "
                f"got {queries} queries and {keys} keys"
            )
        if queries % 2:
            raise ValueError(f"layout='zigzag' needs shards of two equal parts, got an odd length, {queries}")
    elif method == "ring" and masked and queries != keys:
        raise NotImplementedError(
            "method='ring' with a mask needs query and key shards of one length, got "
            f"{queries} queries and {keys} keys; method='all_gather' takes them"
        )


def _check_reverse_mode(*operands: Array) -> None:
    """Refuses operands with tangents.

    JAX itself refuses forward mode of a `jax.custom_vjp`, but outside of jit all it says is that some type
    cannot be hashed. Where a jit is between here and the derivative, only JAX can tell, and does.
    """
    if any(isinstance(x, ad.JVPTracer) for x in operands):
        raise TypeError(
            "method='ring' has reverse-mode derivatives only, got a call under forward-mode differentiation "
            "(jax.jvp, jax.jacfwd, jax.hessian); method='all_gather' has derivatives of any kind"
        )


# The zigzag layout.


def zigzag_order(length: int, devices: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the positions of a sequence in the order in which layout "zigzag" has them.

    The sequence is cut in 2 * devices parts, and device i gets parts i and 2 * devices - 1 - i. For 8
    positions and 2 devices: 0 1 6 7 for the first and 2 3 4 5 for the second.

    Args:
      length: Positions of the whole sequence, a multiple of 2 * devices.
      devices: Size of the mesh axis that the sequence is sharded over.

    Returns:
      int64 (length,): `x[zigzag_order(length, devices)]`, sharded evenly, is in this layout.

    Raises:
      ValueError: The parts would not be of equal length.
    """
    if devices < 1:
        raise ValueError(f"{devices=} must be at least 1")
    if length % (2 * devices):
        raise ValueError(f"{length=} must be a multiple of 2 * devices = {2 * devices}")
    part = length // (2 * devices)
    return np.concatenate(
        [np.arange(i * part, (i + 1) * part) for d in range(devices) for i in (d, 2 * devices - 1 - d)]
    )


def to_zigzag(x: Array, devices: int, axis: int) -> Array:
    """Returns `x`, a whole array in sequence order, reordered along `axis` for layout "zigzag".

    Reorder what a model is fed, tokens and their positions, rather than query, key and value of each layer:
    everything else in a model does not mind the order. NumPy arrays give NumPy arrays.

    Args:
      x: Any array, not a shard.
      devices: Size of the mesh axis that the sequence is to be sharded over.
      axis: The dimension of the sequence.

    Raises:
      ValueError: The length along `axis` is not a multiple of 2 * devices.
    """
    return x.take(zigzag_order(x.shape[axis], devices), axis=axis)


def from_zigzag(x: Array, devices: int, axis: int) -> Array:
    """Returns `x`, a whole array in layout "zigzag", in sequence order: the inverse of `to_zigzag`.

    Args:
      x: As for `to_zigzag`.
      devices: As for `to_zigzag`.
      axis: As for `to_zigzag`.

    Raises:
      ValueError: As for `to_zigzag`.
    """
    return x.take(np.argsort(zigzag_order(x.shape[axis], devices)), axis=axis)


# Plans: who sees what, and when.


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A part of a device's queries, a part of a visiting shard, and the mask between them."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    spec: AttentionSpec


@dataclasses.dataclass(frozen=True)
class _Hop:
    """What a device computes while the shard of a device that is n hops away visits.

    Attributes:
      near: If that shard lies n places before the device's own (after it, in a chain of direction -1).
      wrapped: If there are no n places, so that the shard came around the end of the ring.
    """

    near: _Tile | None
    wrapped: _Tile | None


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Hops in one direction.

    Attributes:
      direction: 1 if shards travel to the next device, so that those before a device's own arrive there; -1
        for the other direction.
      first: Number of the first hop; at hop 0 the device's own shard is the visitor.
      hops: What to compute at each.
    """

    direction: int
    first: int
    hops: tuple[_Hop, ...]

    @property
    def last(self) -> int:
        """Number of the last hop."""
        return self.first + len(self.hops) - 1

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yields (start, stop) of runs of equal hops; the first and the last hop are runs of their own."""
        start = self.first
        for n in range(self.first + 1, self.last + 2):
            inner = self.first < start and n < self.last
            if not inner or self.hops[n - self.first] != self.hops[start - self.first]:
                yield start, n
                start = n


_Plan = tuple[_Chain, ...]


def _plan(spec: AttentionSpec, layout: Layout, queries: int, keys: int, size: int) -> _Plan:
    """Returns which tiles a device computes, hop by hop.

    Args:
      spec: The mask over the whole sequence.
      layout: How the sequence is sharded.
      queries: Of one device.
      keys: Of one device; with a mask, as many.
      size: Devices.
    """
    whole = _Tile((0, queries), (0, keys), AttentionSpec())
    if spec == AttentionSpec():
        return (_Chain(1, 0, (_Hop(whole, whole),) * size),)
    if layout == "zigzag":
        # The own two parts are in order, so the mask between them is a causal one. Of an earlier device the
        # first part is before, and the second after, both parts here; a later device's are both between them.
        half = queries // 2
        own = dataclasses.replace(whole, spec=spec)
        earlier = dataclasses.replace(whole, columns=(0, half))
        later = dataclasses.replace(whole, rows=(half, queries))
        return (_Chain(1, 0, (_Hop(own, own), *(_Hop(earlier, later),) * (size - 1))),)

    tiles = {distance: _tile(spec, distance, queries) for distance in range(1 - size, size)}
    before = max(d for d, tile in tiles.items() if tile is not None)
    after = -min(d for d, tile in tiles.items() if tile is not None)
    if before + after >= size - 1:  # every shard is seen somewhere
        others = (_Hop(tiles[n], tiles[n - size]) for n in range(1, size))
        return (_Chain(1, 0, (_Hop(tiles[0], tiles[0]), *others)),)
    chains = [_Chain(1, 0, (_Hop(tiles[0], tiles[0]), *(_Hop(tiles[n], None) for n in range(1, before + 1))))]
    if after:
        chains.append(_Chain(-1, 1, tuple(_Hop(tiles[-n], None) for n in range(1, after + 1))))
    return tuple(chains)


def _tile(spec: AttentionSpec, distance: int, length: int) -> _Tile | None:
    """Returns what queries see of the shard `distance` places before their own; None if nothing.

    The rows that see something and the columns that are seen are cut out. What is left has bounds on either
    side of its diagonal, as a spec wants them.
    """
    offset = distance * length
    low = None if spec.left is None else offset - spec.left
    high = None if spec.right is None else offset + spec.right
    above = max(0, low or 0)  # columns seen by no row, and as many rows that see nothing
    below = max(0, -(high or 0))
    rest = length - above - below
    if rest < 0 or (rest == 0 and length):
        return None
    shift = below - above
    inner = AttentionSpec(
        left=None if low is None else -(low + shift), right=None if high is None else high + shift
    )
    return _Tile((below, length - above), (above, length - below), inner.effective(rest, rest))


# One call.


@dataclasses.dataclass(frozen=True)
class _Backend:
    """What computes the calls. The arguments of `ring_attention` of these names."""

    implementation: Implementation | None
    deterministic: bool

    def forward(
        self,
        query: Array,
        key: Array,
        value: Array,
        scale: Array,
        spec: AttentionSpec,
        key_lengths: Array | None = None,
    ) -> tuple[Array, Array]:
        """Returns out and lse, (*B, N, T)."""
        operands = (query, key, value, scale, None, key_lengths)
        if self.implementation == "xla":
            return reference.attention(*operands, spec=spec)
        return _primitives.bind_attention(
            *operands, spec=spec, implementation=self.implementation, deterministic=self.deterministic
        )

    def backward(
        self,
        query: Array,
        key: Array,
        value: Array,
        scale: Array,
        out: Array,
        lse: Array,
        dout: Array,
        dlse: Array,
        spec: AttentionSpec,
    ) -> tuple[Array, Array, Array, Array]:
        """Returns what some keys add to the gradients, given the results over all keys."""
        rows = (out, lse, dout, dlse)
        if self.implementation == "xla":
            dquery, dkey, dvalue, dscale = _blockwise.backward(
                query, key, value, scale, None, None, *rows, spec=spec
            )
            return dquery, dkey, dvalue, jnp.sum(dscale)
        # `_around` does not know whether scale is differentiated. Where it is not, nothing reads dscale in
        # the end, and XLA leaves out the calls of a kernel that are for it alone.
        dquery, dkey, dvalue, dscale = _primitives.bind_backward(
            query, key, value, scale, *rows, spec=spec, deterministic=self.deterministic, of=(True,) * 4
        )
        return dquery, dkey, dvalue, dscale


# Trips around the ring.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ring:
    """What is known while tracing."""

    axis_name: AxisName
    size: int
    plan: _Plan
    backend: _Backend

    def send(self, arrays: tuple[Array, ...], places: int) -> tuple[Array, ...]:
        """Sends arrays that many devices onward, and returns those that come in."""
        if places % self.size == 0:
            return arrays
        pairs = [(i, (i + places) % self.size) for i in range(self.size)]
        return tuple(lax.ppermute(x, self.axis_name, pairs) for x in arrays)


_State = Any
_Step = Callable[[_State, int | Array, _Hop, bool, bool], _State]
_Visit = Callable[[_Tile, _State], _State]


def _travel(chain: _Chain, state: _State, step: _Step) -> _State:
    """Calls `step(state, number, hop, is_first, is_last)` for each hop; runs of equal hops in a loop."""
    for start, stop in chain.runs():
        hop = chain.hops[start - chain.first]
        if stop - start == 1:
            state = step(state, start, hop, start == chain.first, start == chain.last)
        else:

            def body(number: Array, state: _State, hop: _Hop = hop) -> _State:
                return step(state, number, hop, False, False)

            state = lax.fori_loop(start, stop, body, state)
    return state


def _compute(
    ring: _Ring, chain: _Chain, number: int | Array, hop: _Hop, visit: _Visit, state: _State
) -> _State:
    """Updates the state by the tile that this device sees at a hop, if any."""

    def branch(tile: _Tile | None) -> Callable[[_State], _State]:
        return lambda state: state if tile is None else visit(tile, state)

    if hop.near == hop.wrapped:
        return branch(hop.near)(state)
    origin = lax.axis_index(ring.axis_name) - chain.direction * number
    return lax.cond((origin >= 0) & (origin < ring.size), branch(hop.near), branch(hop.wrapped), state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _around(ring: _Ring, query: Array, key: Array, value: Array, scale: Array) -> tuple[Array, Array]:
    """Returns out and lse, (*B, N, T), of this device's queries. All operands vary over the same axes."""
    *batch, queries, heads, _ = query.shape
    out = jnp.zeros((*batch, queries, heads, value.shape[-1]), scale.dtype)
    lse = jnp.full((*batch, heads, queries), -jnp.inf, scale.dtype)
    out, lse, _ = _primitives.vary_together(out, lse, query)
    for chain in ring.plan:
        out, lse = _along(ring, chain, (query, key, value, scale), (out, lse))
    return out.astype(query.dtype), lse


def _along(
    ring: _Ring, chain: _Chain, operands: tuple[Array, ...], results: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Merges the results of the shards that a chain brings along into those there are."""
    query, key, value, scale = operands

    def step(state: _State, number: int | Array, hop: _Hop, is_first: bool, is_last: bool) -> _State:
        del is_first
        visiting, results = state
        # Sent before it is used: the transfer does not wait for the computation, nor that for it.
        coming = visiting if is_last else ring.send(visiting, chain.direction)

        def visit(tile: _Tile, results: tuple[Array, Array]) -> tuple[Array, Array]:
            part = ring.backend.forward(*_cut(tile, query, *visiting), scale, tile.spec)
            return _merge(results, part, tile.rows)

        return coming, _compute(ring, chain, number, hop, visit, results)

    start = ring.send((key, value), chain.direction * chain.first)
    _, results = _travel(chain, (start, results), step)
    return results


def _cut(tile: _Tile, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    rows, columns = (functools.partial(_take, bounds=bounds) for bounds in (tile.rows, tile.columns))
    return rows(query), columns(key), columns(value)


def _take(x: Array, bounds: tuple[int, int], axis: int = -3) -> Array:
    return lax.slice_in_dim(x, *bounds, axis=axis)


def _put(x: Array, part: Array, bounds: tuple[int, int], axis: int = -3) -> Array:
    """Returns `x` with `part` between the bounds along `axis`."""
    if part.shape == x.shape:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, bounds[0], axis)


def _merge(
    whole: tuple[Array, Array], part: tuple[Array, Array], rows: tuple[int, int]
) -> tuple[Array, Array]:
    """Returns the results of two disjoint sets of keys together; `part` has those of some rows only."""
    out, lse = _take(whole[0], rows), _take(whole[1], rows, axis=-1)
    both = jnp.logaddexp(lse, part[1])
    shift = jnp.where(both == -jnp.inf, 0, both)  # of rows that have seen nothing yet
    mine, others = (jnp.swapaxes(jnp.exp(x - shift), -1, -2)[..., None] for x in (lse, part[1]))
    merged = mine * out + others * part[0].astype(out.dtype)
    return _put(whole[0], merged, rows), _put(whole[1], both, rows, axis=-1)


@promoting
def _around_forward(ring: _Ring, *operands: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    _check_reverse_mode(*operands)  # forward mode of a gradient
    results = _around(ring, *operands)
    return results, (*operands, *results)


@promoting
def _around_backward(
    ring: _Ring, kept: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, ...]:
    # Or XLA would find hops that both trips have in common, and keep what visits there.
    kept, cotangents = lax.optimization_barrier((kept, cotangents))
    query, key, value, scale, *_ = kept
    zeros = (jnp.zeros(x.shape, scale.dtype) for x in (query, key, value, scale))
    sums = tuple(_primitives.vary_together(*zeros, query)[:4])
    for chain in ring.plan:
        sums = _back_along(ring, chain, (*kept, *cotangents), sums)
    dquery, dkey, dvalue, dscale = sums
    return dquery.astype(query.dtype), dkey.astype(key.dtype), dvalue.astype(value.dtype), dscale


def _back_along(
    ring: _Ring, chain: _Chain, operands: tuple[Array, ...], sums: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Adds to the gradients what comes of the shards that a chain brings along."""
    query, key, value, scale, *of_rows = operands
    dquery, dkey, dvalue, dscale = sums

    def step(state: _State, number: int | Array, hop: _Hop, is_first: bool, is_last: bool) -> _State:
        visiting, gradients, own = state
        # The gradients of the visitor come behind it: they are what the device before has made of them at the
        # last hop. So none of the transfers waits for this hop's computation.
        coming = visiting if is_last else ring.send(visiting, chain.direction)
        if not is_first:
            gradients = ring.send(gradients, chain.direction)

        def visit(tile: _Tile, state: tuple[Array, ...]) -> tuple[Array, ...]:
            out, lse, dout, dlse = (
                _take(x, tile.rows, axis) for x, axis in zip(of_rows, (-3, -1, -3, -1), strict=True)
            )
            results = ring.backend.backward(
                *_cut(tile, query, *visiting), scale, out, lse, dout, dlse, tile.spec
            )
            bounds = (tile.rows, tile.columns, tile.columns)
            *added, more = (x.astype(scale.dtype) for x in results)
            *sums, dscale = state
            total = (_put(x, _take(x, b) + y, b) for x, y, b in zip(sums, added, bounds, strict=True))
            return (*total, dscale + more)

        dquery, dscale = own
        dquery, *rest, dscale = _compute(ring, chain, number, hop, visit, (dquery, *gradients, dscale))
        return coming, tuple(rest), (dquery, dscale)

    start = ring.send((key, value), chain.direction * chain.first)
    nothing = _primitives.vary_together(jnp.zeros_like(dkey), jnp.zeros_like(dvalue), query)
    _, gradients, (dquery, dscale) = _travel(chain, (start, tuple(nothing[:2]), (dquery, dscale)), step)
    at_home = ring.send(gradients, -chain.direction * chain.last)
    return dquery, dkey + at_home[0], dvalue + at_home[1], dscale


_around.defvjp(_around_forward, _around_backward)


# All keys at once.


def _gathered(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    axis_name: AxisName,
    *,
    spec: AttentionSpec,
    layout: Layout,
    backend: _Backend,
) -> tuple[Array, Array]:
    """Returns out and lse, (*B, N, T), of this device's queries."""
    index, size = lax.axis_index(axis_name), _axis_size(axis_name)
    key, value = (_gather(x, axis_name) for x in (key, value))
    if spec == AttentionSpec():
        return backend.forward(query, key, value, scale, spec)

    queries = query.shape[-3]
    if layout == "contiguous":
        start = index * queries + (key.shape[-3] - queries * size)
        after = min(spec.right or 0, queries * (size - 1))
        return _attend_at(query, key, value, scale, start, after, spec, backend)

    key, value = (from_zigzag(x, size, axis=-3) for x in (key, value))
    part = queries // 2
    outs, lses = zip(
        *(
            _attend_at(x, key, value, scale, start * part, 0, spec, backend)
            for x, start in zip(jnp.split(query, 2, axis=-3), (index, 2 * size - 1 - index), strict=True)
        ),
        strict=True,
    )
    return jnp.concatenate(outs, -3), jnp.concatenate(lses, -1)


def _gather(x: Array, axis_name: AxisName) -> Array:
    """Returns `x` of all devices, joined along the sequence."""
    gather = functools.partial(lax.all_gather, axis_name=axis_name, axis=x.ndim - 3, tiled=True)
    spec = jax.typeof(x).sharding.spec
    explicit = {name for names in spec if names for name in ((names,) if isinstance(names, str) else names)}
    if not explicit:
        return gather(x)
    # JAX lowers the transpose, a reduce_scatter, with a scalar of the array's type and forgets to take the
    # sharding from it: that is an error where the array is sharded over explicit axes.
    return jax.sharding.auto_axes(gather, axes=tuple(sorted(explicit)), out_sharding=spec)(x)


def _attend_at(
    query: Array,
    key: Array,
    value: Array,
    scale: Array,
    start: Array,
    after: int,
    spec: AttentionSpec,
    backend: _Backend,
) -> tuple[Array, Array]:
    """Attends from queries whose first stands beside key `start`, which may differ between devices.

    It is one program for all: masks are aligned to the last query and the last key that is there, so the
    number of keys moves them. But then no query sees a key beside which there is none. If a window wants
    `after` such keys, as many rows are added to the queries: behind them, or before them at the end of keys.
    """
    queries, keys = query.shape[-3], key.shape[-3]
    end = start + queries + after
    lengths = jnp.broadcast_to(jnp.minimum(end, keys), query.shape[:-3])
    if not after:
        return backend.forward(query, key, value, scale, spec, lengths)
    before = jnp.clip(end - keys, 0, after)
    padding = [(0, 0)] * (query.ndim - 3) + [(after, after), (0, 0), (0, 0)]
    rows = lax.dynamic_slice_in_dim(jnp.pad(query, padding), after - before, queries + after, axis=-3)
    out, lse = backend.forward(rows, key, value, scale, spec, lengths)
    return (
        lax.dynamic_slice_in_dim(out, before, queries, axis=-3),
        lax.dynamic_slice_in_dim(lse, before, queries, axis=-1),
    )
