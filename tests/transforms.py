"""What works under which transformation of JAX: the rows of the README's table, and how each is checked.

    python tests/transforms.py

writes the table into the README. A row's transformation is applied to attention, and the result is compared
with that of the reference; `test_transforms_table` does so, for values and gradients. What runs is recorded
while the transformed function is lowered for CUDA, with bfloat16 arrays, which needs no GPU.
"""

from __future__ import annotations

if __name__ == "__main__":
    import conftest  # noqa: F401 - eight devices

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_r2p
from jax_r2p import _blockwise, _ffi, _sharding, reference

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- transforms: begin -->\n", "<!-- transforms: end -->\n"

B, T, N, K, H = 4, 8, 4, 2, 8
ALL = (0, 1, 2)
Function = Callable[..., Any]


def arrays(dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def attend(query, key, value, implementation=None):
    return jax_r2p.attention(query, key, value, is_causal=True, implementation=implementation)


plain = functools.partial(attend, implementation="xla")


def loss(function: Function) -> Function:
    def of(*args):
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(function(*args)))

    return of


def gradient(function: Function) -> Function:
    return jax.grad(loss(function), ALL)


def devices(kind: str) -> Any:
    """A mesh of four CPU devices, or of four that are not there, to lower for."""
    types = (AxisType.Auto,) * 2
    if kind == "cuda":
        return AbstractMesh((2, 2), ("x", "y"), axis_types=types)
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=types, devices=jax.devices()[:4])


# Transformations: each takes attention and what it is for, "cpu" or "cuda", and returns a function of query,
# key and value.


def _jvp(f, kind):
    return lambda *a: jax.jvp(f, a, tuple(map(jnp.cos, a)))[1]


def _linearize(f, kind):
    return lambda *a: jax.linearize(f, *a)[1](*map(jnp.cos, a))


def _hessian_vector(f, kind):
    return lambda *a: jax.jvp(gradient(f), a, tuple(map(jnp.cos, a)))[1]


def _vmap(f, kind):
    return jax.vmap(f)


def _vmap_queries(f, kind):
    return lambda q, k, v: jax.vmap(f, (0, None, None))(jnp.stack([q, 2 * q]), k, v)


def _vmap_gradient(f, kind):
    return lambda q, k, v: jax.vmap(gradient(f), (0, None, None))(jnp.stack([q, 2 * q]), k, v)


def _scan(f, kind):
    return lambda q, k, v: lax.scan(lambda x, _: (f(x, k, v), None), q, length=2)[0]


def _while(f, kind):
    return lambda q, k, v: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1], k, v)), (0, q))[1]


def _cond(f, kind):
    return lambda q, k, v: lax.cond(q[0, 0, 0, 0] < 9, f, lambda q, k, v: q, q, k, v)


def _checkpoint_saving(f, kind):
    policy = jax.checkpoint_policies.save_only_these_names(jax_r2p.OUT_NAME, jax_r2p.RESIDUAL_NAME)
    return jax.checkpoint(f, policy=policy)


def _custom_vjp(f, kind):
    outer = jax.custom_vjp(f)
    outer.defvjp(lambda *a: jax.vjp(f, *a), lambda back, cotangent: back(cotangent))
    return outer


SPLIT = P("x", None, "y")


def _shard_map(f, kind):
    return jax.shard_map(f, mesh=devices(kind), in_specs=(SPLIT,) * 3, out_specs=SPLIT)


def _pmap(f, kind):
    two = jax.devices()[:2]

    def function(*args):
        parts = [x.reshape(2, B // 2, *x.shape[1:]) for x in args]
        return jax.pmap(f, devices=two)(*parts).reshape(B, T, N, H)

    return function


def _sharded(f, kind):
    def function(*args):
        sharding = NamedSharding(devices(kind), SPLIT)
        return f(*(lax.with_sharding_constraint(x, sharding) for x in args))

    return jax.jit(function)


def _ring(f, kind):
    ring = functools.partial(jax_r2p.ring_attention, axis_name="y", is_causal=True)
    spec = P("x", "y")
    return jax.shard_map(ring, mesh=devices(kind), in_specs=(spec,) * 3, out_specs=spec)


def _export(f, kind):
    def function(*args):
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        export = jax.export.export(jax.jit(f), platforms=(kind,), disabled_checks=jax_r2p.DISABLED_CHECKS)
        return export(*structs).call(*args)

    return function


def _make_jaxpr(f, kind):
    def function(*args):
        closed, out = jax.make_jaxpr(f, return_shape=True)(*args)
        results = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return function


def _compile(f, kind):
    return lambda *args: jax.jit(f).lower(*args).compile()(*args)


def _eval_shape(f, kind):
    """Zeros of these types."""
    return lambda *args: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f, *args))


def _donate(f, kind):
    # Only what the result has the shape of can be donated; other buffers would be of no use.
    return lambda q, k, v: jax.jit(f, donate_argnums=0)(q + 0, k, v)


@dataclasses.dataclass(frozen=True)
class Row:
    """A transformation.

    Attributes:
      name: As in the table.
      transform: See above.
      note: The last column.
      same: Whether the transformed function is attention itself.
      outermost: Whether it is applied to the gradient, and not differentiated.
      forward_mode: Whether JAX differentiates it in forward mode only.
      traced: Whether its function can be traced: what runs is then recorded in one program.
    """

    name: str
    transform: Function
    note: str = ""
    same: bool = True
    outermost: bool = False
    forward_mode: bool = False
    traced: bool = True

    def value(self, f: Function, kind: str = "cpu") -> Function:
        return self.transform(f, kind)

    def gradient(self, f: Function, kind: str = "cpu") -> Function:
        if self.outermost:
            return self.transform(gradient(f), kind)
        if self.forward_mode:
            return _jvp(self.transform(f, kind), kind)
        return gradient(self.transform(f, kind))


ROWS = [
    Row("no transformation", lambda f, kind: f),
    Row("`jit`", lambda f, kind: jax.jit(f)),
    Row("`grad`", lambda f, kind: gradient(f), same=False, note="its gradient: the second order"),
    Row("`jvp`", _jvp, same=False),
    Row("`linearize`", _linearize, same=False),
    Row("`jvp` of `grad`", _hessian_vector, same=False, note="Hessian-vector products"),
    Row("`vmap`", _vmap),
    Row("`vmap` of queries", _vmap_queries, same=False, note="key and value are not copied"),
    Row("`vmap` of `grad`", _vmap_gradient, same=False, note="a gradient of key and value for each query"),
    Row("`scan`", _scan, same=False),
    Row("`while_loop`", _while, same=False, forward_mode=True, note="JAX has forward mode only: `jvp`"),
    Row("`cond`", _cond),
    Row("`jax.checkpoint`", lambda f, kind: jax.checkpoint(f), note="the forward pass runs twice"),
    Row("`jax.checkpoint`, policy", _checkpoint_saving, note="saves `OUT_NAME`, `RESIDUAL_NAME`: runs once"),
    Row("`custom_vjp` around it", _custom_vjp),
    Row("`shard_map`", _shard_map, note="with its default checks"),
    Row("`jit`, sharded arrays", _sharded, note="see [docs/sharding.md](docs/sharding.md)"),
    Row("`pmap`", _pmap),
    Row("`ring_attention`", _ring, note="in `shard_map`"),
    Row("`jax.export`", _export, outermost=True, note="see [docs/export.md](docs/export.md)"),
    Row("`eval_shape`", _eval_shape, outermost=True, note="types only"),
    Row("`make_jaxpr`", _make_jaxpr, outermost=True),
    Row("`lower().compile()`", _compile, outermost=True, traced=False),
    Row("donated query", _donate, outermost=True),
]

COLUMNS = (
    "under",
    "values",
    "gradients",
    "forward pass, on a Hopper GPU",
    "gradients, on a Hopper GPU",
    "note",
)


# What runs.

FORWARD, BACKWARD, BLOCKS, REFERENCE = "kernel", "backward kernel", "blocks", "reference"


@contextlib.contextmanager
def _recording() -> Iterator[set[str]]:
    """Yields a set to which is added what lowering rules call."""
    seen: set[str] = set()
    watched = [
        (_ffi, "attention_forward", FORWARD),
        (_sharding, "lower", FORWARD),
        (_ffi, "attention_backward", BACKWARD),
        (_blockwise, "backward", BLOCKS),
        (_blockwise, "tangent", BLOCKS),
        (reference, "attention", REFERENCE),
    ]

    def record(what, call, *args, **keywords):
        seen.add(what)
        return call(*args, **keywords)

    with contextlib.ExitStack() as stack:
        for module, name, what in watched:
            recorder = functools.partial(record, what, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, recorder))
        yield seen


def what_runs(function: Function) -> str:
    """Returns what a function of bfloat16 arrays is made of when it is lowered for CUDA."""
    structs = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays()]
    with _recording() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore", jax_r2p.FallbackWarning)
        jax.jit(lambda *args: function(*args)).trace(*structs).lower(lowering_platforms=("cuda",))
    order = (FORWARD, BACKWARD, BLOCKS, REFERENCE)
    return " + ".join(what for what in order if what in seen) or "nothing"


def cells(row: Row) -> tuple[str, ...]:
    """Returns the row of the table. Its first two cells are what `test_transforms_table` checks."""
    kind = "cuda"
    value, derived = row.value(attend, kind), row.gradient(attend, kind)
    if not row.traced:
        value, derived = attend, gradient(attend)
    return (
        row.name,
        "yes",
        "`jvp`" if row.forward_mode else "yes",
        what_runs(value),
        what_runs(derived),
        row.note,
    )


def table() -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(cells, ROWS)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def committed() -> str:
    return README.read_text("utf-8").split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    before, rest = README.read_text("utf-8").split(BEGIN)
    README.write_text(before + BEGIN + table() + END + rest.split(END)[1], "utf-8")
