"""The programs in `data`, as users have them in files.

    python tests/exported.py NAME...

writes those. Do that only for a program that is new, or while no release has written such files: what is
there stands for files that users keep.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_r2p

FOLDER = Path(__file__).parent / "data"
# The oldest JAX that is supported, and the oldest whose files for several devices jax 0.12 still reads.
WRITTEN_BY = {"plain": "0.8.2", "shared": "0.8.2", "sharded": "0.10.2"}
PLATFORMS = ("cpu", "cuda")
SHAPES = ((2, 6, 4, 64), (2, 9, 2, 64), (2, 9, 2, 64))
LENGTHS = np.int32([9, 5])
SHARDED = P("x", None, "y")


def plain(query, key, value, implementation=None):
    """A window with lengths on causal attention, so that every operand and attribute is used."""
    call = functools.partial(jax_r2p.attention, implementation=implementation)
    query = call(query, key, value, is_causal=True, scale=0.25)
    return call(
        query,
        key,
        value,
        local_window_size=(4, 1),
        key_value_seq_lengths=jnp.asarray(LENGTHS),
        return_residual=True,
    )


def shared(query, key, value, implementation=None):
    """Keys that mapped queries share, and gradients that are the same bits in each run."""

    def one(query, key, value):
        return jax_r2p.attention(query, key, value, implementation=implementation, deterministic=True)

    return jax.vmap(one, (0, None, None))(jnp.stack([query, 2 * query]), key, value)


def sharded(query, key, value, implementation=None):
    """Split over four devices, batch and heads."""
    return jax_r2p.attention(query, key, value, is_causal=True, implementation=implementation)


PROGRAMS: dict[str, Callable] = {"plain": plain, "shared": shared, "sharded": sharded}


def structs(name: str) -> list[jax.ShapeDtypeStruct]:
    if name != "sharded":
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES]
    mesh = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, SHARDED)
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in SHAPES]


def arrays() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in SHAPES]


def place(args: Sequence[jax.Array], devices: int) -> list[jax.Array]:
    """The arrays where a program for so many devices wants them: on one, or four."""
    if devices == 1:
        return list(args)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:devices])
    return [jax.device_put(x, NamedSharding(mesh, SHARDED)) for x in args]


def cotangent(x: jax.Array) -> jax.Array:
    """Different for each element, and finite where the result is not."""
    return jnp.cos(jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32)).astype(x.dtype)


def export(name: str) -> jax.export.Exported:
    # A new function each time: jit would remember what it lowered before.
    function = jax.jit(lambda *args: PROGRAMS[name](*args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jax_r2p.FallbackWarning)
        return jax.export.export(function, platforms=PLATFORMS, disabled_checks=jax_r2p.DISABLED_CHECKS)(
            *structs(name)
        )


def file(name: str) -> Path:
    return FOLDER / f"exported_{name}.bin"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in sys.argv[1:]:
        assert jax.__version__ == WRITTEN_BY[each], f"{each} is to be written by jax {WRITTEN_BY[each]}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jax_r2p.FallbackWarning)
            file(each).write_bytes(export(each).serialize(vjp_order=1))
        print(file(each), file(each).stat().st_size)
