"""The call of a backward kernel: what goes into it, and what is made of its results. Nothing needs a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch_stub import make_backward_variant

from jax_r2p import _ffi
from jax_r2p._manifest import InstallationError, Variant
from jax_r2p._spec import AttentionSpec

WIDE = make_backward_variant(tile_m=128, head_dim=96)
NARROW = make_backward_variant(tile_m=64, head_dim=64)
BATCH, HEADS, KV_HEADS, KEYS = 3, 4, 2, 70


def fragment_place(tile_m: int, width: int, index: tuple[int, ...]) -> tuple[int, int]:
    """Row and column of an element of a tile, by (w, j2, r, t, jj, c) from slowest to fastest.

    The thread t of warpgroup w is in row (t % 32) // 4 of its warp's accumulator of 8 rows.
    """
    w, j2, r, t, jj, c = index
    row = 16 * (t // 32) + 8 * r + (t % 32) // 4
    column = 16 * j2 + 8 * jj + 2 * (t % 4) + c
    return (row, w * (width // 2) + column) if tile_m == 64 else (64 * w + row, column)


@functools.cache
def places(tile_m: int, width: int) -> np.ndarray:
    """(tile_m * width, 2): row and column of each element, in the kernel's order."""
    columns = width // 2 if tile_m == 64 else width
    indices = itertools.product(*map(range, (2, columns // 16, 2, 128, 2, 2)))
    return np.array([fragment_place(tile_m, width, index) for index in indices])


@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize("width", [32, 64, 96, 128, 192, 256])
def test_dquery_rows_is_the_kernels_order(tile_m: int, width: int):
    where = places(tile_m, width)
    assert len({*map(tuple, where)}) == tile_m * width, "each element has a place of its own"
    tiles = np.arange(2 * 3 * 5 * tile_m * width, dtype=np.int32).reshape(2, 3, 5, tile_m * width)
    expected = np.empty((2, 3, 5, tile_m, width), np.int32)
    expected[..., where[:, 0], where[:, 1]] = tiles
    rows = _ffi.dquery_rows(jnp.asarray(tiles), tile_m)
    np.testing.assert_array_equal(rows, expected.reshape(2, 3, 5 * tile_m, width))


def test_dquery_rows_knows_two_tiles():
    with pytest.raises(ValueError, match="tile_m=192 must be 64 or 128"):
        _ffi.dquery_rows(jnp.zeros((1, 192 * 64)), 192)


@dataclasses.dataclass
class Recorder:
    """Stands in for `jax.ffi.ffi_call`: keeps the call, and returns what a kernel would."""

    variant: Variant
    sums: np.ndarray | None = None  # (B, N, rows of whole tiles, head_dim of the kernel)

    def __call__(self, target, results, *, input_output_aliases):
        assert target == _ffi.BACKWARD_TARGET
        self.results, self.aliases = results, input_output_aliases

        def call(*operands, **attributes):
            self.operands, self.attributes = operands, attributes
            outputs = [jnp.full(result.shape, 7, result.dtype) for result in results]
            if self.sums is not None:
                tile_m, width = self.variant.tile_m, self.variant.head_dim
                batch, heads, rows, _ = self.sums.shape
                where = places(tile_m, width)
                tiles = self.sums.reshape(batch, heads, rows // tile_m, tile_m, width)
                outputs[0] = jnp.asarray(tiles[..., where[:, 0], where[:, 1]])
            return outputs

        return call


def arguments(queries: int, head_dim: int = 40, value_head_dim: int = 24) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(queries)
    shapes = {
        "query": (BATCH, queries, HEADS, head_dim),
        "key": (BATCH, KEYS, KV_HEADS, head_dim),
        "value": (BATCH, KEYS, KV_HEADS, value_head_dim),
        "dout": (BATCH, queries, HEADS, value_head_dim),
        "lse": (BATCH, HEADS, queries),
        "delta": (BATCH, HEADS, queries),
    }
    rows = {
        name: rng.standard_normal(shape).astype("float32" if name in ("lse", "delta") else "float16")
        for name, shape in shapes.items()
    }
    return {**rows, "scale": np.float32(0.5)}


def call(variant: Variant, *, deterministic: bool = False, **operands):
    return _ffi.attention_backward(
        **{name: jnp.asarray(array) for name, array in operands.items()},
        variant=variant,
        spec=AttentionSpec(),
        kv_repeat=1,
        kv_inner=1,
        deterministic=deterministic,
    )


@pytest.fixture
def record(monkeypatch):
    """Returns a function that puts a Recorder in the place of XLA's call."""

    def start(variant, sums=None):
        recorder = Recorder(variant, sums)
        monkeypatch.setattr(jax.ffi, "ffi_call", recorder)
        return recorder

    return start


OPERANDS = ("query", "key", "value", "dout", "lse", "delta", "scale", "query_lengths", "key_lengths")


@pytest.mark.parametrize("variant", [WIDE, NARROW], ids=["128", "64"])
@pytest.mark.parametrize("queries", [1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("lengths", [None, (0, 1, 1000)])
def test_rows_as_the_kernel_takes_them(record, variant: Variant, queries: int, lengths):
    """lse in base 2, +inf where there is no row or no key; delta 0 there, whatever it was."""
    recorder = record(variant)
    operands = arguments(queries)
    lse, delta = operands["lse"], operands["delta"]
    lse[:, 1] = -np.inf
    delta[:, 1] = np.nan
    if lengths:
        delta[0] = np.nan
        lse[0] = np.nan
        operands["query_lengths"] = jnp.asarray(lengths, jnp.int32)
    call(variant, **operands)
    got = dict(zip(OPERANDS, recorder.operands[:9], strict=True))

    rows = -(-queries // variant.tile_m) * variant.tile_m
    expected_lse = np.full((BATCH, HEADS, rows), np.inf, np.float32)
    expected_delta = np.zeros((BATCH, HEADS, rows), np.float32)
    for b, h, t in np.ndindex(lse.shape):
        if h != 1 and (lengths is None or t < lengths[b]):
            expected_lse[b, h, t] = lse[b, h, t] / math.log(2)
            expected_delta[b, h, t] = delta[b, h, t]
    assert (got["lse"].dtype, got["delta"].dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(got["lse"], expected_lse, rtol=3e-7)
    np.testing.assert_array_equal(got["delta"], expected_delta)
    for name in ("query", "key", "value", "dout", "scale"):
        np.testing.assert_array_equal(got[name], operands[name])
    assert got["query_lengths"].shape == ((BATCH,) if lengths else (0,))
    assert got["key_lengths"].shape == (0,)


@pytest.mark.parametrize("variant", [WIDE, NARROW], ids=["128", "64"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_and_counters_start_as_zeros(record, variant: Variant, deterministic: bool):
    recorder = record(variant)
    call(variant, deterministic=deterministic, **arguments(200))
    tiles = -(-200 // variant.tile_m)
    sums, counters = recorder.operands[9:]
    assert (sums.shape, sums.dtype) == (
        (BATCH, HEADS, tiles, variant.tile_m * variant.head_dim),
        jnp.float32,
    )
    assert (counters.shape, counters.dtype) == ((BATCH * HEADS * tiles * deterministic,), jnp.int32)
    assert not sums.any()
    assert not counters.any()
    assert recorder.aliases == {9: 0, 10: 3}
    for operand, result in recorder.aliases.items():
        aliased = recorder.operands[operand]
        assert (recorder.results[result].shape, recorder.results[result].dtype) == (
            aliased.shape,
            aliased.dtype,
        )


@pytest.mark.parametrize("variant", [WIDE, NARROW], ids=["128", "64"])
@pytest.mark.parametrize("queries", [1, 64, 129])
def test_dquery_comes_back_in_order(record, variant: Variant, queries: int):
    rows = -(-queries // variant.tile_m) * variant.tile_m
    sums = np.random.default_rng(0).standard_normal((BATCH, HEADS, rows, variant.head_dim), np.float32)
    record(variant, sums)
    operands = arguments(queries)
    dquery, dkey, dvalue = call(variant, **operands)
    assert dquery.dtype == jnp.float32
    np.testing.assert_array_equal(dquery, sums[:, :, :queries, :40].transpose(0, 2, 1, 3))
    for cotangent, like in ((dkey, "key"), (dvalue, "value")):
        assert (cotangent.shape, cotangent.dtype) == (operands[like].shape, operands[like].dtype)


# What a program for CUDA has. It is lowered, not run.


def lower(variant: Variant, *, lengths: bool = False, deterministic: bool = False, **fields) -> str:
    structs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arguments(200).items()}
    if lengths:
        counts = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
        structs |= {"query_lengths": counts, "key_lengths": counts}
    options = {"spec": AttentionSpec(left=9, right=2), "kv_repeat": 1, "kv_inner": 1, **fields}
    function = functools.partial(
        _ffi.attention_backward, variant=variant, deterministic=deterministic, **options
    )
    traced = jax.jit(lambda kwargs: function(**kwargs)).trace(structs)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def the_call(text: str) -> str:
    (line,) = (line for line in text.splitlines() if f"custom_call @{_ffi.BACKWARD_TARGET}(" in line)
    return line


def types(line: str) -> tuple[list[str], list[str]]:
    """Types of operands and results."""
    signature = re.search(r": \(([^()]*)\) -> \(([^()]*)\)\s*$", line)
    assert signature, line
    operands, results = (re.findall(r"tensor<(.*?)>", side) for side in signature.groups())
    return operands, results


@pytest.mark.parametrize(
    ("lengths", "deterministic"), [(False, False), (True, True)], ids=["plain", "everything"]
)
def test_names_types_and_attributes(lengths: bool, deterministic: bool):
    """The whole interface to the library: a change here needs a new target name."""
    line = the_call(lower(WIDE, lengths=lengths, deterministic=deterministic))
    operands, results = types(line)
    counts = ["3xi32" if lengths else "0xi32"] * 2
    counters = f"{3 * 4 * 2 if deterministic else 0}xi32"
    assert operands == [
        *("3x200x4x40xf16", "3x70x2x40xf16", "3x70x2x24xf16", "3x200x4x24xf16"),
        *("3x4x256xf32", "3x4x256xf32", "f32", *counts),
        *("3x4x2x12288xf32", counters),
    ]
    assert results == ["3x4x2x12288xf32", "3x70x2x40xf16", "3x70x2x24xf16", counters]
    config = re.search(r"mhlo\.backend_config = \{([^}]*)\}", line)
    assert config
    assert dict(item.split(" = ") for item in config[1].split(", ")) == {
        "variant": f'"{WIDE.name}"',
        "window_left": "9 : i32",
        "window_right": "2 : i32",
        "kv_repeat": "1 : i64",
        "kv_inner": "1 : i64",
    }


def test_results_alias_their_zeros():
    line = the_call(lower(WIDE))
    aliases = re.findall(
        r"output_operand_alias<output_tuple_indices = \[(\d+)\], operand_index = (\d+), "
        r"operand_tuple_indices = \[\]>",
        line,
    )
    assert sorted(aliases) == [("0", "9"), ("3", "10")]


def test_unbounded_windows_and_shared_keys():
    line = the_call(lower(NARROW, spec=AttentionSpec(), kv_repeat=3, kv_inner=2))
    for attribute in (
        f"window_left = {1 << 29} : i32",
        f"window_right = {1 << 29} : i32",
        "kv_repeat = 3 : i64",
        "kv_inner = 2 : i64",
    ):
        assert attribute in line


def test_layouts_are_row_major():
    rank4, rank3 = "dense<[3, 2, 1, 0]> : tensor<4xindex>", "dense<[2, 1, 0]> : tensor<3xindex>"
    rank1, rank0 = "dense<0> : tensor<1xindex>", "dense<> : tensor<0xindex>"
    line = the_call(lower(WIDE))
    operands = [*[rank4] * 4, rank3, rank3, rank0, rank1, rank1, rank4, rank1]
    assert f"operand_layouts = [{', '.join(operands)}]" in line
    assert f"result_layouts = [{', '.join([rank4, rank4, rank4, rank1])}]" in line


def test_the_library_takes_a_backward_kernel():
    """Its role and parameters reach the library as R2pVariant has them."""
    variant = make_backward_variant(name="made_up_backward")
    library = _ffi.load_library()
    _ffi._add_variant(library, variant, b"made up")
    with pytest.raises(InstallationError, match=r"'made_up_backward', parameters: expected \d+; got 24"):
        _ffi._add_variant(library, dataclasses.replace(variant, role="forward"), b"made up")
