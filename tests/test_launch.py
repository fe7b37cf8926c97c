"""What the launcher asks of the driver, and what it refuses. No GPU: see launch_stub.py."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import runpy
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launch_stub import (
    LIBRARY,
    STREAM,
    UNBOUNDED,
    Call,
    LibraryError,
    StubProcess,
    c_structures,
    describe_launch,
    make_call,
    pack,
)

from jax_r2p import _dispatch, _ffi
from jax_r2p._manifest import Variant, load_manifest, package_file
from jax_r2p._spec import AttentionSpec

VARIANTS = {variant.name: variant for variant in load_manifest().variants if variant.role == "forward"}
BF16_D128 = VARIANTS["fwd_bf16_d128_causal_wide"]
BF16_D64 = VARIANTS["fwd_bf16_d64_window"]
CONTEXT = 0xC000000000000000 | STREAM

# What a first launch asks for, in order. No call that waits for the device is among them, nor may one be.
ENTER = ["cuStreamGetCtx", "cuCtxPushCurrent", "cuCtxGetId"]
LOAD = [
    "cuThreadExchangeStreamCaptureMode",
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelGetFunction",
    "cuFuncSetAttribute",
    "cuFuncSetAttribute",
    "cuCtxGetDevice",
    "cuDeviceGetAttribute",
    "cuThreadExchangeStreamCaptureMode",
]
LAUNCH = ["cuTensorMapEncodeTiled"] * 4 + ["cuLaunchKernelEx"]
LEAVE = ["cuCtxPopCurrent"]


@pytest.fixture(scope="module")
def process():
    """A process that knows every forward kernel; for tests that leave nothing behind in it."""
    with StubProcess() as process:
        for variant in VARIANTS.values():
            process.add(variant)
        yield process


@pytest.fixture
def fresh():
    """A process that knows one variant of each head dim and has loaded none."""
    with StubProcess() as process:
        process.add(BF16_D128)
        process.add(BF16_D64)
        yield process


def names(log: list[dict[str, Any]]) -> list[str]:
    return [call["call"] for call in log]


def error_of(action: Any, *arguments: Any) -> LibraryError:
    with pytest.raises(LibraryError) as caught:
        action(*arguments)
    return caught.value


# Shapes (B, T, N, H) and (Bk, S, K, H), and the rest of the call. Sizes are free, since nothing is
# computed: rows and keys are one off a tile, at it, and far from it.
CASES = {
    "one-of-each": ((1, 1, 1, 8), (1, 1, 1, 8), {}),
    "tile-minus-one": ((1, 63, 2, 64), (1, 127, 2, 64), {}),
    "tile": ((1, 192, 2, 64), (1, 160, 2, 64), {}),
    "tile-plus-one": ((1, 193, 2, 64), (1, 161, 2, 64), {}),
    "grouped": ((3, 1000, 28, 64), (3, 700, 4, 64), {}),
    "multi-query": ((2, 130, 7, 64), (2, 130, 1, 64), {}),
    "narrow-head": ((2, 300, 4, 40), (2, 300, 2, 40), {}),
    "narrow-values": ((2, 300, 4, 64), (2, 300, 2, 64), {"value_width": 24}),
    "wide-values": ((2, 300, 4, 8), (2, 300, 2, 8), {"value_width": 64}),
    "windowed": ((2, 300, 4, 64), (2, 500, 2, 64), {"window_left": 100, "window_right": 0}),
    "one-sided": ((2, 300, 4, 64), (2, 500, 2, 64), {"window_left": UNBOUNDED, "window_right": 7}),
    "repeated-keys": ((12, 64, 4, 64), (4, 64, 2, 64), {"kv_repeat": 3, "kv_inner": 1}),
    "inner-keys": ((12, 64, 4, 64), (4, 64, 2, 64), {"kv_repeat": 3, "kv_inner": 4}),
    "middle-keys": ((12, 64, 4, 64), (4, 64, 2, 64), {"kv_repeat": 3, "kv_inner": 2}),
    "long-keys": ((2, 70000, 8, 64), (2, 1048576, 2, 64), {}),
    "query-lengths": ((3, 300, 4, 64), (3, 500, 2, 64), {"lengths": (True, False)}),
    "key-lengths": ((3, 300, 4, 64), (3, 500, 2, 64), {"lengths": (False, True)}),
    "lengths-of-shared-keys": ((6, 64, 4, 64), (2, 64, 2, 64), {"kv_inner": 2, "lengths": (True, True)}),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_launch_configuration(process: StubProcess, name: str, case: str):
    variant = VARIANTS[name]
    query, key, fields = CASES[case]
    packed = process.pack(variant, make_call(variant, query, key, **fields))
    batch, rows, heads, _ = query
    tiles = -(-rows // variant.tile_m) * batch * heads
    parameters = packed["parameters"]
    section_tiles, section_heads, paired_tiles = (
        number(parameters[name]) for name in ("section_tiles_size", "section_heads_size", "paired_tiles")
    )
    assert section_tiles == section_heads * -(-rows // variant.tile_m)
    assert batch * heads % section_heads == 0
    if variant.mask == "causal":
        # Whole sections in pairs, for as many thread blocks as 132 multiprocessors hold; the rest alone.
        resident = 132 * variant.min_blocks
        assert paired_tiles % (2 * section_tiles if section_tiles % 2 else section_tiles) == 0
        assert paired_tiles <= max(tiles - 2 * resident, 0)
        assert paired_tiles == 0 or paired_tiles >= 2 * resident
        pairing = packed["grid"][0] - (tiles - paired_tiles)
        assert pairing % resident == 0 or pairing == paired_tiles // 2
        assert (pairing > 0) == (paired_tiles > 0)
    else:
        assert paired_tiles == 0
        # As many thread blocks as the stub's 132 multiprocessors hold, and more for many keys.
        (grid, _, _), fit = packed["grid"], min(tiles, 132 * variant.min_blocks)
        assert grid == fit if key[1] < 2**20 else fit <= grid <= tiles
    assert packed["block"] == [variant.threads, 1, 1]
    assert packed["shared_memory"] == variant.shared_memory


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_maps(process: StubProcess, name: str, case: str):
    variant = VARIANTS[name]
    query, key, fields = CASES[case]
    call = make_call(variant, query, key, **fields)
    maps = process.pack(variant, call)["maps"]
    width, value_width = variant.head_dim, variant.value_head_dim
    tiles = {
        "query": (64, width),
        "key": (variant.tile_n, width),
        "value": (variant.tile_n, value_width),
        "out": (64, value_width),
    }
    for array, (rows_in_box, columns) in tiles.items():
        wide = columns % 64 == 0
        batch, rows, heads, head_dim = getattr(call, array).shape
        assert maps[array] == {
            "type": {"bf16": 9, "fp16": 6}[variant.dtype],
            "rank": 4,
            "address": getattr(call, array).data,
            "dims": [head_dim, rows, heads, batch],
            "strides": [heads * head_dim * 2, head_dim * 2, rows * heads * head_dim * 2],
            "box": [64 if wide else 32, rows_in_box, 1, 1],
            "element_strides": [1, 1, 1, 1],
            "interleave": 0,
            "swizzle": 3 if wide else 2,  # 128 or 64 bytes, the width of a box
            "promotion": 2,  # 128 bytes
            "fill": 0,  # zeros
            "aligned": True,
        }, array


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_parameters(process: StubProcess, name: str, case: str):
    variant = VARIANTS[name]
    query, key, fields = CASES[case]
    call = make_call(variant, query, key, **fields)
    parameters = process.pack(variant, call)["parameters"]
    (batch, rows, heads, head_dim), (kv_batch, keys, kv_heads, _) = query, key
    repeat, inner = call.kv_repeat, call.kv_inner
    expected = {
        "query_dims": struct.pack("<4i", rows, head_dim, heads, batch),
        "key_dims": struct.pack("<4i", keys, head_dim, kv_heads, kv_batch),
        "value_dims": struct.pack("<4i", keys, call.value.shape[-1], kv_heads, kv_batch),
        "out_dims": struct.pack("<4i", rows, call.value.shape[-1], heads, batch),
        **{
            array: struct.pack("<Q", getattr(call, array).data)
            for array in ("lse", "query", "key", "value", "scale")
        },
        **{
            name: struct.pack("<Q", getattr(call, name).data if given else 0)
            for name, given in zip(
                ("query_lengths", "key_lengths"), fields.get("lengths", (False, False)), strict=True
            )
        },
        "window_left": struct.pack("<i", min(call.window_left, keys)),
        "window_right": struct.pack("<i", min(call.window_right, rows)),
        # `test_sections` and `test_causal_thread_blocks` have the values of these.
        **{name: parameters[name] for name in ("paired_tiles", "section_tiles_size", "section_heads_size")},
        "heads_size": struct.pack("<i", heads),
        "group_size": struct.pack("<i", heads // kv_heads),
        "kv_outer_size": struct.pack("<i", repeat * inner),
        "kv_inner_size": struct.pack("<i", inner),
    }
    assert {name: parameters[name] for name in expected} == expected
    divisors = {"section_tiles", "section_heads", "heads", "group", "kv_outer", "kv_inner"}
    for divisor in divisors:
        (size,) = struct.unpack("<i", parameters[f"{divisor}_size"])
        assert struct.unpack("<I", parameters[divisor][:4]) == (size,)
        for number in (0, 1, size - 1, size, size + 1, 2**31 - 1):
            assert divide(parameters[divisor], number) == number // size
    assert parameters.keys() == expected.keys() | divisors | {f"{array}_map" for array in boxes_of(call)}


def boxes_of(call: Call) -> list[str]:
    return [array for array in ("query", "key", "value", "out") if getattr(call, array).dtype != "fp32"]


def divide(divisor: bytes, number: int) -> int:
    """The kernel's division, with its 32-bit arithmetic."""
    _, multiplier, shift1, shift2, padding = struct.unpack("<IIBBH", divisor)
    assert padding == 0
    high = number * multiplier >> 32
    return (high + (number - high >> shift1)) >> shift2


@settings(max_examples=300, deadline=None)
@given(divisor=st.integers(1, 2**29), numbers=st.lists(st.integers(0, 2**32 - 1), min_size=20))
@example(divisor=1, numbers=[0, 1, 2**31, 2**32 - 1])
@example(divisor=2**29, numbers=[0, 2**29 - 1, 2**29, 2**32 - 1])
def test_divisors_divide_exactly(process: StubProcess, divisor: int, numbers: list[int]):
    # kv_inner may be any size of the key's batch, so every divisor up to the limit of a batch comes by here.
    call = make_call(BF16_D64, (divisor, 1, 1, 8), kv_inner=divisor)
    packed = process.pack(BF16_D64, call)["parameters"]["kv_inner"]
    multiples = [divisor * k + d for k in (1, 2, 3, 2**32 // divisor - 1) for d in (-1, 0, 1)]
    for number in [*numbers, *(n for n in multiples if 0 <= n < 2**32)]:
        assert divide(packed, number) == number // divisor


def test_divisors_divide_exactly_exhaustively(process: StubProcess):
    """All small divisors on all small numbers, and around every multiple of a power of two."""
    edges = [2**bits + d for bits in range(33) for d in (-1, 0, 1) if 0 <= 2**bits + d < 2**32]
    for divisor in range(1, 258):
        call = make_call(BF16_D64, (divisor, 1, 1, 8), kv_inner=divisor)
        packed = process.pack(BF16_D64, call)["parameters"]["kv_inner"]
        assert all(divide(packed, number) == number // divisor for number in [*range(600), *edges])


def test_batch_rule_finds_the_repeated_key(process: StubProcess):
    """b // kv_outer * kv_inner + b % kv_inner, with the divisors as packed, is what a broadcast means."""
    for outer, repeat, inner in ((1, 3, 1), (4, 3, 1), (1, 3, 4), (5, 3, 2)):
        batch, kv_batch = outer * repeat * inner, outer * inner
        call = make_call(BF16_D64, (batch, 8, 2, 64), (kv_batch, 8, 2, 64), kv_inner=inner)
        parameters = process.pack(BF16_D64, call)["parameters"]
        indices = [(o, i) for o in range(outer) for _ in range(repeat) for i in range(inner)]
        for b, (o, i) in enumerate(indices):
            remainder = b - divide(parameters["kv_inner"], b) * inner
            assert divide(parameters["kv_outer"], b) * inner + remainder == o * inner + i


def number(parameter: bytes) -> int:
    return int.from_bytes(parameter, "little", signed=True)


@pytest.mark.parametrize(
    ("query", "key", "section_heads"),
    [
        # 64 columns: 256 bytes a key, so 32k keys fill the 8 MiB of a section.
        ((2, 64, 16, 64), (2, 65536, 4, 64), 4),
        ((2, 64, 16, 64), (2, 32768, 4, 64), 4),
        ((2, 64, 16, 64), (2, 16384, 4, 64), 8),
        ((2, 64, 16, 64), (2, 16383, 4, 64), 8),
        # Three groups of four heads would fit; two divide the eight there are.
        ((2, 64, 16, 64), (2, 10922, 4, 64), 8),
        ((2, 64, 16, 64), (2, 8192, 4, 64), 16),
        ((2, 64, 16, 64), (2, 100, 4, 64), 32),
        # A prime number of heads has no divisor but itself.
        ((1, 64, 17, 64), (1, 8192, 17, 64), 1),
        ((1, 64, 17, 64), (1, 1024, 17, 64), 17),
        # Not more than 512 heads of keys.
        ((2**20, 1, 1, 8), (2**20, 1, 1, 8), 512),
    ],
)
def test_sections(process: StubProcess, query: Any, key: Any, section_heads: int):
    parameters = process.pack(BF16_D64, make_call(BF16_D64, query, key))["parameters"]
    assert number(parameters["section_heads_size"]) == section_heads


@pytest.mark.parametrize(("keys", "section_heads"), [(13107, 1), (6553, 2), (6554, 1), (3276, 4)])
def test_sections_count_keys_and_values(process: StubProcess, keys: int, section_heads: int):
    """192 and 128 columns: 640 bytes a key, so 13107 of them fill the 8 MiB of a section."""
    variant = VARIANTS["fwd_bf16_d192v128_none"]
    call = make_call(variant, (1, 64, 4, 192), (1, keys, 4, 192), 128)
    parameters = process.pack(variant, call)["parameters"]
    assert number(parameters["section_heads_size"]) == section_heads


@pytest.mark.parametrize(
    ("query", "key", "ctas"),
    [
        # 128 rows a tile. 4096 tiles, 256 in each of 16 sections: the last 132 or more alone, so one of them.
        ((4, 8192, 16, 128), (4, 8192, 16, 128), 132 + 256),
        # As many, of 128 blocks on average in place of 32: 29 for each of 132, 3712 = 7 * 512 and a rest.
        ((1, 32768, 16, 128), (1, 32768, 16, 128), 7 * 132 + 256),
        # Of 8192 tiles the last 2048 are a section: four heads of keys, eight of queries each.
        ((4, 8192, 32, 128), (4, 8192, 4, 128), 2 * 132 + 2048),
        # No more than a section.
        ((1, 8192, 4, 128), (1, 8192, 4, 128), 256),
        # A section of three heads would have 195 tiles, so it is two with 130: 12220 of 12480 tiles in pairs,
        # 92 of 33 blocks for each of 132: 3036 = 5 * 512 and a rest.
        ((64, 8192 + 128, 3, 128), (64, 8192 + 128, 3, 128), 5 * 132 + 2 * 130),
        # 80 heads of three tiles, not 85.
        ((85, 384, 16, 128), (85, 384, 16, 128), 132 + 240),
        # No even number of heads divides 135.
        ((45, 384, 3, 128), (45, 384, 3, 128), 45 * 3 * 3),
        ((2, 512, 16, 128), (2, 512, 16, 128), 128),
        ((1, 531 * 128, 1, 128), (1, 64, 1, 128), 531),
        ((1, 532 * 128, 1, 128), (1, 64, 1, 128), 532),
    ],
)
def test_causal_thread_blocks(process: StubProcess, query: Any, key: Any, ctas: int):
    assert process.pack(BF16_D128, make_call(BF16_D128, query, key))["grid"] == [ctas, 1, 1]


def test_the_sanitizer_sees_every_kernel_and_pairs_of_all_causal_ones(process: StubProcess, monkeypatch):
    """In what tools/sanitize_cases.py runs; pairs in bfloat16."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as the file does
    cases = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "sanitize_cases.py"))
    seen, paired = set(), set()
    for _, dtype, _, left, right, shapes in (*cases["forward_calls"](), *cases["pair_calls"]()):
        if shapes[0][-1] % 8:
            continue  # padded before the launch
        variant = _dispatch.choose(
            AttentionSpec(left=left, right=right), *shapes, np.dtype(dtype), _dispatch.HOPPER
        )
        assert not isinstance(variant, str), variant
        seen.add(variant.name)
        if variant.mask == "causal":
            parameters = process.pack(variant, make_call(variant, *shapes[:2], shapes[2][-1]))["parameters"]
            if number(parameters["paired_tiles"]):
                paired.add(variant.name)
    assert seen == set(VARIANTS)
    assert paired == {x.name for x in VARIANTS.values() if x.dtype == "bf16" and x.mask == "causal"}


@pytest.mark.parametrize(
    ("name", "rows", "window", "ctas"),
    [
        # 128 rows and 128 keys. 4096 tiles, 31 for each of 132 thread blocks: 1984 key blocks, 3 times 512.
        ("fwd_bf16_d128_none", 8192, {}, 3 * 132),
        # 1024 for 8 of 32 tiles, and so few that 4 times 512 are not there.
        ("fwd_bf16_d128_none", 4096, {}, 132),
        # A tile for each is the most.
        ("fwd_bf16_d128_none", 1 << 17, {}, 1024 * 16),
        # 256 rows and 64 keys. A tile sees 8 blocks, of 16 tiles each: not 512.
        ("fwd_bf16_d64_window", 8192, {"window_left": 256, "window_right": 0}, 132),
        # All 128, as without a mask: 15 * 128 = 1920.
        ("fwd_bf16_d64_window", 8192, {"window_left": 8192 - 64, "window_right": 0}, 3 * 132),
    ],
)
def test_long_work_is_for_more_thread_blocks(
    process: StubProcess, name: str, rows: int, window: Any, ctas: int
):
    """Than fit at once, so that one which begins late has little to do."""
    variant = VARIANTS[name]
    shape = (max(1, 32768 // rows), rows, 16, variant.head_dim)
    assert process.pack(variant, make_call(variant, shape, shape, **window))["grid"] == [ctas, 1, 1]


# Refusals. Each row: what is changed in a valid call, and what the error has to say.

VALID = make_call(BF16_D128, (2, 256, 8, 128), (2, 512, 2, 128))


def shaped(query: tuple[int, ...], key: tuple[int, ...] | None = None, **fields: Any) -> Call:
    return make_call(BF16_D128, query, key, **fields)  # type: ignore[arg-type]


REFUSALS = {
    "variant-unknown": (
        dataclasses.replace(VALID, variant="fwd_fp8"),
        r"NOT_FOUND: variant: expected one of 'fwd_bf16_d128_causal', .*'fwd_fp16_d96_window'; got 'fwd_fp8'",
    ),
    "dtype-query": (
        VALID.change("query", dtype="fp16"),
        r"query: expected dtype bfloat16; got float16",
    ),
    "dtype-key": (VALID.change("key", dtype="fp32"), r"key: expected dtype bfloat16; got float32"),
    "dtype-value": (VALID.change("value", dtype=12), r"value: expected dtype bfloat16; got float64"),
    "dtype-out": (VALID.change("out", dtype=4), r"out: expected dtype bfloat16; got int32"),
    "dtype-scale": (VALID.change("scale", dtype="bf16"), r"scale: expected dtype float32; got bfloat16"),
    "dtype-lse": (VALID.change("lse", dtype="bf16"), r"lse: expected dtype float32; got bfloat16"),
    "dtype-exotic": (VALID.change("query", dtype=20), r"query: expected dtype bfloat16; got element type 20"),
    "rank-query": (VALID.change("query", shape=(2, 256, 8)), r"query: expected rank 4; got rank 3"),
    "rank-key": (VALID.change("key", shape=(2, 512)), r"key: expected rank 4; got rank 2"),
    "rank-scale": (VALID.change("scale", shape=(1,)), r"scale: expected rank 0; got rank 1"),
    "rank-lse": (VALID.change("lse", shape=(2, 8, 256, 1)), r"lse: expected rank 3; got rank 4"),
    "rank-beyond-c": (VALID.change("query", shape=(1,) * 5), r"query: expected a rank in 0\.\.4; got 5"),
    "empty-query": (
        VALID.change("query", shape=(2, 0, 8, 128)),
        r"query: expected every dimension to be at least 1; got shape \(2, 0, 8, 128\)",
    ),
    "empty-key": (
        VALID.change("key", shape=(2, 0, 2, 128)),
        r"key: expected every dimension to be at least 1; got shape \(2, 0, 2, 128\)",
    ),
    "negative": (
        VALID.change("key", shape=(2, -1, 2, 128)),
        r"key: expected every dimension .*\(2, -1, 2, 128\)",
    ),
    "head-dim-key": (
        VALID.change("key", shape=(2, 512, 2, 64)),
        r"key: expected shape \(2, 512, 2, 128\), with the head dim of query; got shape \(2, 512, 2, 64\)",
    ),
    "shape-value": (
        VALID.change("value", shape=(2, 511, 2, 128)),
        r"value: expected shape \(2, 512, 2, 128\), as key but for the head dim; got shape "
        r"\(2, 511, 2, 128\)",
    ),
    "shape-out": (
        VALID.change("out", shape=(2, 255, 8, 128)),
        r"out: expected shape \(2, 256, 8, 128\), as query with the head dim of value; got shape "
        r"\(2, 255, 8, 128\)",
    ),
    "head-dim-out": (
        VALID.change("value", shape=(2, 512, 2, 64)),
        r"out: expected shape \(2, 256, 8, 64\), as query with the head dim of value; got shape "
        r"\(2, 256, 8, 128\)",
    ),
    "shape-lse": (
        VALID.change("lse", shape=(2, 256, 8)),
        r"lse: expected shape \(2, 8, 256\), \(batch, heads, rows\) of query; got shape \(2, 256, 8\)",
    ),
    "head-dim-odd": (
        shaped((2, 16, 2, 36), (2, 16, 2, 36)),
        r"query: expected a head dim that is a multiple of 8, at most 128 for variant "
        r"'fwd_bf16_d128_causal_wide'; got 36",
    ),
    "head-dim-wide": (
        shaped((2, 16, 2, 136), (2, 16, 2, 136)),
        r"query: expected a head dim that is a multiple of 8, at most 128 .*; got 136",
    ),
    "value-head-dim-odd": (
        shaped((2, 16, 2, 128), value_width=12),
        r"value: expected a head dim that is a multiple of 8, at most 128 for variant "
        r"'fwd_bf16_d128_causal_wide'; got 12",
    ),
    "value-head-dim-wide": (
        shaped((2, 16, 2, 128), value_width=192),
        r"value: expected a head dim that is a multiple of 8, at most 128 .*; got 192",
    ),
    "heads": (
        shaped((2, 16, 8, 128), (2, 16, 3, 128)),
        r"key: expected a number of heads that divides the 8 heads of query; got 3",
    ),
    "more-key-heads": (
        shaped((2, 16, 2, 128), (2, 16, 4, 128)),
        r"key: expected a number of heads that divides the 2 heads of query; got 4",
    ),
    "batch": (
        shaped((5, 16, 2, 128), (2, 16, 2, 128)),
        r"kv_repeat: expected query's batch 5 to be key's batch 2 times kv_repeat; got 2",
    ),
    "repeat": (
        shaped((6, 16, 2, 128), (2, 16, 2, 128), kv_repeat=2),
        r"kv_repeat: expected query's batch 6 to be key's batch 2 times kv_repeat; got 2",
    ),
    "repeat-0": (shaped((2, 16, 2, 128), (2, 16, 2, 128), kv_repeat=0), r"kv_repeat: expected 1\.\.2; got 0"),
    "repeat-huge": (
        shaped((2, 16, 2, 128), (2, 16, 2, 128), kv_repeat=2**62),
        rf"kv_repeat: expected 1\.\.2; got {2**62}",
    ),
    "inner": (
        shaped((12, 16, 2, 128), (4, 16, 2, 128), kv_inner=3),
        r"kv_inner: expected a divisor of key's batch 4; got 3",
    ),
    "inner-0": (shaped((2, 16, 2, 128), (2, 16, 2, 128), kv_inner=0), r"kv_inner: expected 1\.\.2; got 0"),
    "inner-huge": (
        shaped((2, 16, 2, 128), (2, 16, 2, 128), kv_inner=2**62),
        rf"kv_inner: expected 1\.\.2; got {2**62}",
    ),
    "left-negative": (
        dataclasses.replace(VALID, window_left=-1),
        r"window_left: expected 0\.\.536870912; got -1",
    ),
    "right-large": (
        dataclasses.replace(VALID, window_right=2**29 + 1),
        r"window_right: expected 0\.\.536870912; got 536870913",
    ),
    "null-query": (VALID.change("query", data=0), r"query: expected a device address; got a null pointer"),
    "null-scale": (VALID.change("scale", data=0), r"scale: expected a device address; got a null pointer"),
    "aligned-key": (
        VALID.change("key", data=0x7F0000000008),
        r"key: expected an address that is a multiple of 16; got 0x7f0000000008",
    ),
    "aligned-out": (
        VALID.change("out", data=0x7F0000000004),
        r"out: expected an address that is a multiple of 16; got 0x7f0000000004",
    ),
    "aligned-lse": (
        VALID.change("lse", data=0x7F0000000002),
        r"lse: expected an address that is a multiple of 4; got 0x7f0000000002",
    ),
    "dtype-lengths": (
        VALID.change("query_lengths", dtype=5, shape=(2,)),
        r"query_lengths: expected dtype int32; got int64",
    ),
    "dtype-no-lengths": (
        VALID.change("key_lengths", dtype="fp32"),
        r"key_lengths: expected dtype int32; got float32",
    ),
    "rank-lengths": (
        VALID.change("key_lengths", shape=(2, 1)),
        r"key_lengths: expected rank 1; got rank 2",
    ),
    "shape-lengths": (
        VALID.change("query_lengths", shape=(3,)),
        r"query_lengths: expected shape \(2\), the batch of query; got shape \(3\)",
    ),
    "lengths-of-the-keys": (  # of which there are fewer than queries
        shaped((6, 16, 2, 128), (2, 16, 2, 128), lengths=(False, True)).change("key_lengths", shape=(2,)),
        r"key_lengths: expected shape \(6\), the batch of query; got shape \(2\)",
    ),
    "null-lengths": (
        VALID.change("query_lengths", shape=(2,), data=0),
        r"query_lengths: expected a device address; got a null pointer",
    ),
    "aligned-lengths": (
        VALID.change("key_lengths", shape=(2,), data=0x7F0000000002),
        r"key_lengths: expected an address that is a multiple of 4; got 0x7f0000000002",
    ),
    "rows": (
        shaped((1, 2**29 + 1, 1, 8), (1, 16, 1, 8)),
        r"query rows: expected 1\.\.536870912; got 536870913",
    ),
    "keys": (
        shaped((1, 16, 1, 8), (1, 2**29 + 1, 1, 8)),
        r"key rows: expected 1\.\.536870912; got 536870913",
    ),
    "tiles": (
        shaped((2**20, 128 * 512 + 1, 1, 8), (1, 16, 1, 8)),
        r"query: expected batch times heads times blocks of 128 rows to be at most 536870912; got 1048576 "
        r"times 1 times 513",
    ),
    "batch-times-heads": (
        shaped((2**28, 1, 3, 8), (2**28, 1, 3, 8)),
        r"query: expected batch times heads to be at most 536870912; got 268435456 times 3",
    ),
    "batch-of-64-bits": (
        shaped((2**32, 1, 1, 8), (2**32, 1, 1, 8)),
        r"query batch: expected 1\.\.2147483647; got 4294967296",
    ),
    "heads-of-64-bits": (
        shaped((1, 1, 2**32, 8), (1, 1, 2**32, 8)),
        r"query heads: expected 1\.\.2147483647; got 4294967296",
    ),
    "map-reach": (
        shaped((1, 64, 8, 128), (1, 2**29, 8, 128)),
        r"key: expected less than 2\^40 bytes in one batch entry, which is as far as TMA reaches; got "
        r"\(536870912, 8, 128\) elements of 2 bytes",
    ),
    "no-context": (
        dataclasses.replace(VALID, stream=0),
        r"stream: expected a CUDA stream, or a current CUDA context for the default stream; got the default "
        r"stream and no current context",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(process: StubProcess, case: str):
    call, message = REFUSALS[case]
    if not message.startswith("NOT_FOUND"):
        message = f"INVALID_ARGUMENT: {message}"
    error = error_of(process.launch, call)
    assert re.fullmatch(message, str(error)), error
    assert "cuLaunchKernelEx" not in names(process.take_log())
    assert process.state() == {"depth": 0, "capture_mode": 0}
    process.launch(VALID)


def test_error_text_is_cut_to_the_callers_buffer(process: StubProcess):
    call = VALID.change("query", dtype="fp16")
    text = "query: expected dtype bfloat16; got float16"
    for size in (1, 2, 10, len(text), len(text) + 1, 200):
        code, raw = process.error_text(dataclasses.asdict(call), size)
        kept = text[: size - 1]
        assert code == 1
        assert raw == kept + "\0" + "#" * (size + 8 - len(kept) - 1) + "\0"
    assert process.error_text(dataclasses.asdict(call), 0) == [1, "#" * 8 + "\0"]


def test_null_arguments_are_refused(process: StubProcess):
    with pytest.raises(LibraryError, match=r"INVALID_ARGUMENT: launch: expected a value; got a null pointer"):
        process.launch_null()


def test_another_versions_structs_are_refused(fresh: StubProcess):
    # As after an update of the Python files alone, in an editable install.
    with pytest.raises(
        LibraryError, match=r"R2pVariant\.struct_size: expected \d+; got 8: .* reinstall jax_r2p"
    ):
        fresh.add(VARIANTS["fwd_fp16_d64_none"], struct_size=8)
    with pytest.raises(
        LibraryError, match=r"R2pLaunch\.struct_size: expected \d+; got 8: .* reinstall jax_r2p"
    ):
        fresh.launch_with_struct_size(dataclasses.asdict(VALID), 8)


# Registration.

BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"role-{role}": (
            {"role": role},
            rf"role: expected 1 \(forward\), 2 \(backward\) or 3 \(preprocess\); got {role}",
        )
        for role in (0, 4)
    },
    "dtype": ({"dtype": 11}, r"dtype: expected 16 \(bfloat16\) or 10 \(float16\); got 11"),
    "head-dim": ({"head_dim": 80}, r"head_dim: expected a multiple of 32 in 32\.\.256; got 80"),
    "value-head-dim": (
        {"value_head_dim": 288},
        r"value_head_dim: expected a multiple of 32 in 32\.\.256; got 288",
    ),
    "tile-m": ({"tile_m": 0}, r"tile_m: expected a multiple of 8 in 8\.\.256; got 0"),
    "tile-n": ({"tile_n": 264}, r"tile_n: expected a multiple of 8 in 8\.\.256; got 264"),
    "threads": ({"threads": 100}, r"threads: expected a multiple of 32 in 32\.\.1024; got 100"),
    "shared-memory": (
        {"shared_memory": 232449},
        r"shared_memory: expected a multiple of 1 in 0\.\.232448; got 232449",
    ),
    "empty-cubin": ({"cubin": ""}, r"cubin_size: expected a multiple of 1 in 1\.\.2147483647; got 0"),
    "parameters-missing": ({"parameters": []}, r"parameters: expected \d+; got 0"),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_bad_variants_are_refused(fresh: StubProcess, case: str):
    fields, message = BAD_FIELDS[case]
    with pytest.raises(LibraryError, match=rf"INVALID_ARGUMENT: variant 'fwd_fp16_d64_none', {message}"):
        fresh.add(VARIANTS["fwd_fp16_d64_none"], **fields)


@pytest.mark.parametrize("change", ["name", "size", "order"])
def test_variants_with_other_parameters_are_refused(fresh: StubProcess, change: str):
    """A cubin whose parameters are not those that the launcher packs would read garbage."""
    variant = VARIANTS["fwd_fp16_d64_none"]
    parameters = [(parameter.name, parameter.size) for parameter in variant.parameters]
    expected = f"{parameters[1][0]} of {parameters[1][1]} bytes"
    if change == "name":
        parameters[1] = ("surprise", parameters[1][1])
    elif change == "size":
        parameters[1] = (parameters[1][0], 24)
    else:
        parameters[1], parameters[2] = parameters[2], parameters[1]
    got = f"{parameters[1][0]} of {parameters[1][1]} bytes"
    with pytest.raises(LibraryError, match=rf"'{variant.name}', parameter 1: expected {expected}; got {got}"):
        fresh.add(variant, parameters=parameters)


def test_registering_twice(fresh: StubProcess):
    fresh.add(BF16_D128)
    with pytest.raises(LibraryError, match=f"variant: '{BF16_D128.name}' is registered already, with other"):
        fresh.add(BF16_D128, cubin="another")
    with pytest.raises(LibraryError, match=f"variant: '{BF16_D128.name}' is registered already, with other"):
        fresh.add_broken_variant(BF16_D128.name, "bad")
    fresh.launch(VALID)


def test_broken_variants_fail_when_they_are_needed():
    message = "fwd.cubin: expected sha256 12, found 34"
    with StubProcess() as process:
        process.add_broken_variant(BF16_D64.name, message)
        process.add_broken_variant(BF16_D64.name, message)
        process.add(BF16_D128)
        process.launch(VALID)
        for error in (
            error_of(process.launch, make_call(BF16_D64, (1, 8, 1, 64))),
            error_of(process.load, BF16_D64.name, STREAM),
        ):
            assert str(error) == f"FAILED_PRECONDITION: {message}"
        assert str(error_of(process.add_broken_variant, "x", "")).startswith("INVALID_ARGUMENT: message: ")


def test_no_variants():
    with StubProcess() as process:
        error = error_of(process.launch, VALID)
    assert str(error) == f"NOT_FOUND: variant: expected one of (none registered); got '{VALID.variant}'"


# Loading.


def test_first_launch_loads_and_later_ones_do_not(fresh: StubProcess):
    log = fresh.launch(VALID)
    assert names(log) == ENTER + LOAD + LAUNCH + LEAVE
    assert names(fresh.launch(VALID)) == ENTER + LAUNCH + LEAVE
    assert fresh.counters() == {"loads": 1, "launches": 2}


def test_initialize_leaves_nothing_to_load(fresh: StubProcess):
    assert names(fresh.load(BF16_D128.name, STREAM)) == ENTER + LOAD + LEAVE
    assert names(fresh.load(BF16_D128.name, STREAM)) == ENTER + LEAVE
    assert names(fresh.launch(VALID)) == ENTER + LAUNCH + LEAVE
    assert fresh.counters() == {"loads": 1, "launches": 1}


def test_load_arguments(fresh: StubProcess):
    log = {call["call"]: call for call in fresh.launch(VALID)}
    assert log["cuLibraryLoadData"]["magic"] == "ELF"
    assert log["cuLibraryGetKernel"]["name"] == BF16_D128.entry
    assert log["cuLibraryGetKernel"]["library"] == log["cuLibraryLoadData"]["library"]
    assert log["cuKernelGetFunction"]["kernel"] == log["cuLibraryGetKernel"]["kernel"]
    assert log["cuKernelGetFunction"]["context"] == CONTEXT
    assert log["cuLaunchKernelEx"]["function"] == log["cuKernelGetFunction"]["function"]
    assert log["cuLaunchKernelEx"]["context"] == CONTEXT
    assert log["cuLaunchKernelEx"]["stream"] == STREAM
    assert log["cuLaunchKernelEx"]["attributes"] == 0
    assert log["cuLaunchKernelEx"]["extra"] is False


def test_function_attributes(fresh: StubProcess):
    attributes = [call for call in fresh.launch(VALID) if call["call"] == "cuFuncSetAttribute"]
    # 8: the most dynamic shared memory, in bytes; 9: the preferred share of shared memory, in percent.
    assert [(call["attribute"], call["value"]) for call in attributes] == [
        (8, BF16_D128.shared_memory),
        (9, 100),
    ]


def test_loading_does_not_disturb_a_capture(fresh: StubProcess):
    """While a stream is captured, a load must be allowed, and leave the thread's mode as it was."""
    fresh.set_capture_mode(1)
    log = fresh.launch(VALID)
    modes = {call["call"]: call["capture_mode"] for call in log if call["call"] in LOAD[1:-1]}
    assert set(modes.values()) == {2}  # relaxed
    assert [call["capture_mode"] for call in log if call["call"] == "cuLaunchKernelEx"] == [1]
    assert fresh.state() == {"depth": 0, "capture_mode": 1}


def test_each_context_gets_its_function_and_all_share_the_library(fresh: StubProcess):
    other = dataclasses.replace(VALID, stream=0x6000)
    fresh.launch(VALID)
    log = fresh.launch(other)
    assert names(log) == ENTER + [call for call in LOAD if "Library" not in call] + LAUNCH + LEAVE
    assert [call["context"] for call in log if call["call"] == "cuKernelGetFunction"] == [CONTEXT ^ 0x3000]
    functions = {
        call: [row["function"] for row in fresh.launch(call) if row["call"] == "cuLaunchKernelEx"]
        for call in (VALID, other, VALID, other)
    }
    assert functions[VALID] != functions[other]
    assert fresh.counters()["loads"] == 2


def test_a_new_context_at_an_old_address_loads_again(fresh: StubProcess):
    fresh.launch(VALID)
    fresh.set_id_base(1 << 50)
    assert "cuKernelGetFunction" in names(fresh.launch(VALID))


def test_default_stream_uses_the_current_context(fresh: StubProcess):
    fresh.set_current(0x1234)
    for stream in (0, 1, 2):  # NULL, legacy, per thread
        log = fresh.launch(dataclasses.replace(VALID, stream=stream))
        assert names(log)[:2] == ["cuCtxGetCurrent", "cuCtxPushCurrent"]
        assert [call["context"] for call in log if call["call"] == "cuLaunchKernelEx"] == [0x1234]
        assert [call["stream"] for call in log if call["call"] == "cuLaunchKernelEx"] == [stream]
    assert fresh.state()["depth"] == 1


def test_current_context_of_the_caller_is_left_alone(fresh: StubProcess):
    fresh.set_current(0x1234)
    log = fresh.launch(VALID)
    assert [call["context"] for call in log if call["call"] == "cuLaunchKernelEx"] == [CONTEXT]
    assert fresh.state()["depth"] == 1


@pytest.mark.parametrize("calls_of_a_thread", [1, 3])
def test_threads_load_once(fresh: StubProcess, calls_of_a_thread: int):
    """Threads start together on two kernels and two devices, and a load takes long enough for all to meet."""
    fresh.set_load_milliseconds(20)
    small = make_call(BF16_D64, (1, 64, 2, 64))
    calls = [
        dataclasses.replace(call, stream=stream) for call in (VALID, small) for stream in (0x5000, 0x6000)
    ]
    log = fresh.launch_together(calls * 2 * calls_of_a_thread)
    counts = {name: names(log).count(name) for name in names(log)}
    assert counts["cuLibraryLoadData"] == 2
    assert counts["cuKernelGetFunction"] == 4
    assert counts["cuLaunchKernelEx"] == 8 * calls_of_a_thread
    assert counts["cuCtxPushCurrent"] == counts["cuCtxPopCurrent"] == 8 * calls_of_a_thread
    assert fresh.counters() == {"loads": 4, "launches": 8 * calls_of_a_thread}
    functions = {call["function"]: call["context"] for call in log if call["call"] == "cuKernelGetFunction"}
    launches = [call for call in log if call["call"] == "cuLaunchKernelEx"]
    assert all(functions[call["function"]] == call["context"] for call in launches)


# Failing driver calls: code 209 is CUDA_ERROR_NO_BINARY_FOR_GPU, as on a GPU that is no Hopper.

WHY = r"CUDA_ERROR_NO_BINARY_FOR_GPU \(209\): no kernel image is available for execution on the device"
FAILURES = {
    ("cuStreamGetCtx", 1): "cuStreamGetCtx failed for the call's stream",
    ("cuCtxPushCurrent", 1): "cuCtxPushCurrent failed for the stream's context",
    ("cuCtxGetId", 1): "cuCtxGetId failed for the stream's context",
    ("cuThreadExchangeStreamCaptureMode", 1): "cuThreadExchangeStreamCaptureMode failed for loading a kernel",
    ("cuLibraryLoadData", 1): "cuLibraryLoadData failed for variant 'fwd_bf16_d128_causal_wide'",
    ("cuLibraryGetKernel", 1): "cuLibraryGetKernel failed for variant 'fwd_bf16_d128_causal_wide', entry "
    f"'{BF16_D128.entry}'",
    ("cuKernelGetFunction", 1): "cuKernelGetFunction failed for variant 'fwd_bf16_d128_causal_wide'",
    ("cuFuncSetAttribute", 1): "cuFuncSetAttribute failed for variant 'fwd_bf16_d128_causal_wide', "
    f"{BF16_D128.shared_memory} bytes of shared memory",
    (
        "cuFuncSetAttribute",
        2,
    ): "cuFuncSetAttribute failed for variant 'fwd_bf16_d128_causal_wide', shared memory carveout",
    (
        "cuTensorMapEncodeTiled",
        1,
    ): r"cuTensorMapEncodeTiled failed for query of shape \(2, 256, 8, 128\) with "
    "boxes of 64 rows and 64 columns",
    ("cuTensorMapEncodeTiled", 2): r"cuTensorMapEncodeTiled failed for key of shape \(2, 512, 2, 128\) with "
    f"boxes of {BF16_D128.tile_n} rows and 64 columns",
    (
        "cuTensorMapEncodeTiled",
        3,
    ): r"cuTensorMapEncodeTiled failed for value of shape \(2, 512, 2, 128\) with "
    f"boxes of {BF16_D128.tile_n} rows and 64 columns",
    ("cuTensorMapEncodeTiled", 4): r"cuTensorMapEncodeTiled failed for out of shape \(2, 256, 8, 128\) with "
    "boxes of 64 rows and 64 columns",
    ("cuCtxGetDevice", 1): "cuCtxGetDevice failed for the stream's context",
    ("cuDeviceGetAttribute", 1): "cuDeviceGetAttribute failed for the number of multiprocessors",
    (
        "cuLaunchKernelEx",
        1,
    ): "cuLaunchKernelEx failed for variant 'fwd_bf16_d128_causal_wide' with 32 blocks of "
    rf"{BF16_D128.threads} threads",
}


@pytest.mark.parametrize(("call", "nth"), FAILURES)
def test_failing_driver_calls(fresh: StubProcess, call: str, nth: int):
    """The error names call, purpose and reason; nothing stays pushed; and the next launch works."""
    fresh.fail(call, 209, nth)
    error = error_of(fresh.launch, VALID)
    assert re.fullmatch(f"INTERNAL: {FAILURES[call, nth]}: {WHY}", str(error)), error
    log = fresh.take_log()
    pushes = [row for row in log if row["call"] == "cuCtxPushCurrent" and row["result"] == 0]
    assert len(pushes) == names(log).count("cuCtxPopCurrent")
    assert fresh.state() == {"depth": 0, "capture_mode": 0}
    unloaded = [row["library"] for row in log if row["call"] == "cuLibraryUnload"]
    assert len(unloaded) == (call == "cuLibraryGetKernel")
    assert fresh.counters()["launches"] == 0
    assert "cuLaunchKernelEx" in names(fresh.launch(VALID))
    assert fresh.counters() == {"loads": 1, "launches": 1}


@pytest.mark.parametrize(
    ("call", "nth", "purpose"),
    [
        ("cuCtxPopCurrent", 1, "the stream's context"),
        ("cuThreadExchangeStreamCaptureMode", 2, "loading a kernel"),
    ],
)
def test_failing_clean_up_is_reported(fresh: StubProcess, call: str, nth: int, purpose: str):
    fresh.fail(call, 209, nth)
    assert re.fullmatch(f"INTERNAL: {call} failed for {purpose}: {WHY}", str(error_of(fresh.launch, VALID)))


def test_first_failure_is_the_one_reported(fresh: StubProcess):
    """A failed load is not hidden by a failing clean-up after it."""
    fresh.fail("cuLibraryGetKernel", 500, 1)
    fresh.fail("cuLibraryUnload", 209, 1)
    error = error_of(fresh.launch, VALID)
    assert error.message.startswith("cuLibraryGetKernel failed for")
    assert error.message.endswith("CUDA_ERROR_STUB (500): made to fail")


def test_errors_that_the_driver_cannot_name(fresh: StubProcess):
    fresh.set_unknown_errors(True)
    fresh.fail("cuLaunchKernelEx", 12345, 1)
    message = error_of(fresh.launch, VALID).message
    assert message.endswith(": unknown error (12345): the driver has no text for it")


def test_no_driver():
    if has_driver():
        pytest.skip("this machine has an NVIDIA driver")
    with StubProcess(driver=False) as process:
        process.add(BF16_D128)
        error = error_of(process.launch, VALID)
    assert error.code == "FAILED_PRECONDITION"
    assert error.message.startswith("cannot load the NVIDIA driver's libcuda.so.1: libcuda.so.1: cannot open")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("symbol", ["cuGetErrorName", "cuCtxPushCurrent_v2", "cuTensorMapEncodeTiled"])
def test_old_driver(symbol: str):
    with StubProcess(missing_symbol=symbol) as process:
        process.add(BF16_D128)
        error = error_of(process.launch, VALID)
        assert process.take_log() == []
    assert str(error) == (
        f"FAILED_PRECONDITION: libcuda.so.1 has no {symbol}: jax_r2p needs the NVIDIA driver of CUDA 12.0 or "
        "later"
    )


# The library as a file, and its mirrors.


def test_library_needs_only_the_c_library():
    """Any machine can load it: no driver, no CUDA run time, no C++ run time of the right version."""
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--wide", str(package_file(LIBRARY))],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", dynamic))
    assert needed <= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}


def test_library_exports_its_interface_and_nothing_else():
    symbols = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(package_file(LIBRARY))],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert {line.split()[-1] for line in symbols.splitlines()} == {
        "jax_r2p_attention_backward_execute",
        "jax_r2p_attention_backward_initialize",
        "jax_r2p_attention_forward_execute",
        "jax_r2p_attention_forward_initialize",
        "jax_r2p_attention_preprocess_execute",
        "jax_r2p_attention_preprocess_initialize",
        "r2p_add_broken_variant",
        "r2p_add_variant",
        "r2p_counters",
        "r2p_launch",
        "r2p_launch_backward",
        "r2p_launch_preprocess",
        "r2p_load",
    }


def test_run_time_mirrors_the_header():
    """The structs of jax_r2p/_ffi.py are those of ffi/c_api.h, field by field."""
    header = c_structures()
    for mirror, original in ((_ffi._Variant, "R2pVariant"), (_ffi._Parameter, "R2pParameter")):
        fields = [name for name, _ in mirror._fields_]
        assert fields == [name for name, _ in header[original]._fields_]
        for field in fields:
            got, expected = getattr(mirror, field), getattr(header[original], field)
            assert (got.offset, got.size) == (expected.offset, expected.size), field


def test_pack_is_the_short_form(process: StubProcess):
    query, key = (2, 300, 4, 64), (1, 300, 2, 64)
    fields = {"window_left": 9, "window_right": 0}
    short = pack(BF16_D64, query, key, **fields)
    long = process.pack(BF16_D64, make_call(BF16_D64, query, key, **fields))
    for name in (
        "query_map",
        "key_map",
        "value_map",
        "out_map",
    ):  # the number of the encoding in that process
        del short["parameters"][name], long["parameters"][name]
    assert short == long


def test_describe_launch_wants_one_launch(process: StubProcess):
    with pytest.raises(ValueError, match="not enough values"):
        describe_launch(BF16_D128, [])


def test_every_variant_is_covered():
    assert {(v.dtype, v.head_dim, v.value_head_dim, v.mask) for v in VARIANTS.values()} == {
        (dtype, *widths, mask)
        for dtype in ("bf16", "fp16")
        for widths in ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
        for mask in ("none", "causal", "window")
    }
    assert all(isinstance(variant, Variant) for variant in VARIANTS.values())
