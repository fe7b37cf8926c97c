"""What the launcher asks of the driver for a preprocess kernel, and what it refuses. No GPU needed."""

from __future__ import annotations

import dataclasses
import re
import struct
from typing import Any

import pytest
from launch_stub import (
    LibraryError,
    PreprocessCall,
    StubProcess,
    make_backward_call,
    make_backward_variant,
    make_preprocess_call,
    make_preprocess_variant,
)

# No such kernels exist.
FP16 = make_preprocess_variant()
BF16 = make_preprocess_variant(
    name="pre_bf16_d128", dtype="bf16", head_dim=128, value_head_dim=128, tile_m=64, threads=256
)
BACKWARD = make_backward_variant()
VARIANTS = {variant.name: variant for variant in (FP16, BF16)}


@pytest.fixture(scope="module")
def process():
    """A process that knows the variants; for tests that leave nothing behind in it."""
    with StubProcess() as process:
        for variant in (*VARIANTS.values(), BACKWARD):
            process.add(variant, cubin="made up")
        yield process


def error_of(action: Any, *arguments: Any) -> str:
    with pytest.raises(LibraryError) as caught:
        action(*arguments)
    return str(caught.value)


# Shapes of out, (B, T, N, Hv), rows of the results (None: whole tiles of the kernel), and shapes of sums.
CASES: dict[str, tuple[tuple[int, int, int, int], int | None, tuple[int, int, int], bool]] = {
    "one-of-each": ((1, 1, 1, 8), 1, (1, 1, 4), False),
    "tile-minus-one": ((1, 127, 2, 64), None, (2, 1, 8192), False),
    "tile": ((1, 128, 2, 64), None, (2, 1, 8192), False),
    "tile-plus-one": ((2, 129, 3, 64), None, (6, 2, 8192), True),
    # Tiles of the backward kernel that are no multiple of this one's.
    "shorter-tiles": ((3, 1000, 28, 96), 1008, (84, 63, 16 * 96), False),
    "narrow": ((3, 300, 4, 40), 320, (5, 5, 64 * 96), True),
    "over-2^31-elements": ((2, 70_000, 128, 96), 70_016, (256, 1094, 64 * 96), False),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_launch(process: StubProcess, name: str, case: str):
    variant = VARIANTS[name]
    shape, rows, sums, lengths = CASES[case]
    call = make_preprocess_call(variant, shape, rows, sums, lengths=lengths)
    packed = process.pack(variant, call)
    (batch, queries, heads, width), rows = shape, call.lse_base2.shape[-1]
    assert packed["grid"] == [-(-rows // variant.tile_m) * batch * heads, 1, 1]
    assert packed["block"] == [variant.threads, 1, 1]
    assert packed["shared_memory"] == 0
    slots, tiles, elements = sums
    numbers = {"queries": queries, "rows": rows, "heads": heads, "value_head_dim": width}
    assert packed["parameters"] == {
        **{
            array: struct.pack("<Q", getattr(call, array).data)
            for array in ("out", "dout", "lse", "dlse", "lse_base2", "delta", "sums", "marks")
        },
        "query_lengths": struct.pack("<Q", call.query_lengths.data if lengths else 0),
        "sums_size": struct.pack("<q", slots * tiles * elements),
        "marks_size": struct.pack("<q", slots * (2 + tiles)),
        **{number: struct.pack("<i", value) for number, value in numbers.items()},
    }
    assert list(packed["parameters"]) == [parameter.name for parameter in variant.parameters]


def test_a_call_tells_parameters_apart(process: StubProcess):
    """`test_launch` notices two parameters of one size in the wrong order: they differ."""
    shape, rows, sums, lengths = CASES["narrow"]
    parameters = process.pack(FP16, make_preprocess_call(FP16, shape, rows, sums, lengths=lengths))[
        "parameters"
    ]
    assert len(set(parameters.values())) == len(parameters)


# Refusals. Each row: what is changed in a valid call, and what the error has to say.

VALID = make_preprocess_call(BF16, (4, 200, 8, 64), 256, (28, 4, 8192), lengths=True)
FLOATS = ("lse", "dlse", "lse_base2", "delta")
MOST = 2**29
"""Rows of a head, pairs of a batch entry and a head, and tiles."""


def shaped(*arguments: Any) -> PreprocessCall:
    return make_preprocess_call(BF16, *arguments)


REFUSALS = {
    **{
        f"dtype-{name}": (
            VALID.change(name, dtype="fp16"),
            rf"{name}: expected dtype bfloat16; got float16",
        )
        for name in ("out", "dout")
    },
    **{
        f"dtype-{name}": (VALID.change(name, dtype="bf16"), rf"{name}: expected dtype float32; got bfloat16")
        for name in (*FLOATS, "sums")
    },
    **{
        f"dtype-{name}": (VALID.change(name, dtype="fp32"), rf"{name}: expected dtype int32; got float32")
        for name in ("query_lengths", "marks")
    },
    **{
        f"rank-{name}": (VALID.change(name, shape=(2,)), rf"{name}: expected rank {rank}; got rank 1")
        for rank, names in ((2, ("marks",)), (3, (*FLOATS, "sums")), (4, ("out", "dout")))
        for name in names
    },
    "rank-query_lengths": (
        VALID.change("query_lengths", shape=(4, 1)),
        r"query_lengths: expected rank 1; got rank 2",
    ),
    **{
        f"null-{name}": (
            VALID.change(name, data=0),
            rf"{name}: expected a device address; got a null pointer",
        )
        for name in ("out", "dout", *FLOATS, "query_lengths", "sums", "marks")
    },
    **{
        f"aligned-{name}": (
            VALID.change(name, data=0x7F0000000000 + alignment // 2),
            rf"{name}: expected an address that is a multiple of {alignment}; got 0x7f\d+",
        )
        for alignment, names in ((16, ("out", "dout", "sums")), (4, (*FLOATS, "query_lengths", "marks")))
        for name in names
    },
    **{
        f"empty-{name}": (
            VALID.change(name, shape=(4, 0, 8, 64)[: len(getattr(VALID, name).shape)]),
            rf"{name}: expected every dimension to be at least 1; got shape \(4, 0.*\)",
        )
        for name in ("out", "dout", *FLOATS, "sums", "marks")
    },
    "shape-dout": (
        VALID.change("dout", shape=(4, 200, 8, 128)),
        r"dout: expected shape \(4, 200, 8, 64\), that of out; got shape \(4, 200, 8, 128\)",
    ),
    **{
        f"shape-{name}": (
            VALID.change(name, shape=(4, 8, 256)),
            rf"{name}: expected shape \(4, 8, 200\), \(batch, heads, rows\) of out; got shape \(4, 8, 256\)",
        )
        for name in ("lse", "dlse")
    },
    "shape-query_lengths": (
        VALID.change("query_lengths", shape=(3,)),
        r"query_lengths: expected shape \(4\), the batch of out; got shape \(3\)",
    ),
    "shape-lse_base2": (
        VALID.change("lse_base2", shape=(4, 200, 256)),
        r"lse_base2: expected shape \(4, 8, 256\), as lse but for the rows; got shape \(4, 200, 256\)",
    ),
    "shape-delta": (
        VALID.change("delta", shape=(4, 8, 200)),
        r"delta: expected shape \(4, 8, 256\), that of lse_base2; got shape \(4, 8, 200\)",
    ),
    **{
        f"rows-{rows}": (
            VALID.change("lse_base2", "delta", shape=(4, 8, rows)),
            rf"lse_base2 rows: expected 200\.\.263; got {rows}",
        )
        for rows in (199, 264, 2**40)
    },
    **{
        f"head-dim-{width}": (
            shaped((2, 16, 2, width)),
            r"out: expected a head dim that is a multiple of 8, at most 128 for variant 'pre_bf16_d128'; got "
            rf"{width}",
        )
        for width in (4, 60, 136, 2**40)
    },
    "rows": (shaped((1, MOST + 1, 1, 8)), r"out rows: expected 1\.\.536870912; got 536870913"),
    "heads": (shaped((1, 1, 2**31, 8)), r"out heads: expected 1\.\.2147483647; got 2147483648"),
    "batch": (shaped((2**31, 1, 1, 8)), r"out batch: expected 1\.\.2147483647; got 2147483648"),
    "pairs": (
        shaped((2**20, 1, 513, 8)),
        r"out: expected batch times heads to be at most 536870912; got 1048576 times 513",
    ),
    "tiles": (
        shaped((2**20, 64 * 512 + 1, 1, 8)),
        r"lse_base2: expected batch times heads times blocks of 64 rows to be at most 536870912; got "
        r"1048576 times 1 times 513",
    ),
    # Of the results, which may have a tile more than out.
    "tiles-of-rows": (
        shaped((2**20, 64 * 512, 1, 8), 64 * 512 + 1),
        r"lse_base2: expected batch times heads times blocks of 64 rows to be at most 536870912; got "
        r"1048576 times 1 times 513",
    ),
    "sums-elements": (
        shaped((1, 1, 1, 8), 1, (28, 4, 8190)),
        r"sums: expected tiles of a multiple of 4 elements; got 8190",
    ),
    **{
        f"sums-size-{'-'.join(map(str, sums))}": (
            shaped((1, 1, 1, 8), 1, sums),
            r"sums: expected slots times tiles times elements of a tile to be at most 281474976710656; got "
            rf"{' times '.join(map(str, sums))}",
        )
        for sums in ((1, 2**46 + 1, 4), (2**46 + 1, 1, 4), (1, 1, 2**48 + 4), (2**62, 2**61, 2**62))
    },
    **{
        f"shape-marks-{slots}-{marks}": (
            VALID.change("marks", shape=(slots, marks)),
            rf"marks: expected shape \(28, 6\), \(slots of sums, tiles of sums and 2\); got shape "
            rf"\({slots}, {marks}\)",
        )
        for slots, marks in ((28, 4), (28, 7), (27, 6))
    },
    "backward-kernel": (
        dataclasses.replace(VALID, variant=BACKWARD.name),
        rf"variant: expected a preprocess kernel; got the backward kernel '{BACKWARD.name}'",
    ),
    "preprocess-kernel": (
        make_backward_call(dataclasses.replace(BACKWARD, name=BF16.name), (2, 16, 2, 64)),
        rf"variant: expected a backward kernel; got the preprocess kernel '{BF16.name}'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(process: StubProcess, case: str):
    call, message = REFUSALS[case]
    error = error_of(process.launch, call)
    assert re.fullmatch(f"INVALID_ARGUMENT: {message}", error), error
    assert "cuLaunchKernelEx" not in [row["call"] for row in process.take_log()]
    assert process.state() == {"depth": 0, "capture_mode": 0}
    process.launch(VALID)


@pytest.mark.parametrize(
    ("call", "blocks"),
    [
        (VALID.change("lse_base2", "delta", shape=(4, 8, 200)), 4 * 8 * 4),
        (VALID.change("lse_base2", "delta", shape=(4, 8, 263)), 4 * 8 * 5),
        (VALID.change(*FLOATS, "query_lengths", "marks", data=0x7F0000000004), 4 * 8 * 4),
        (VALID.change("out", "dout", "sums", data=0x7F0000000010), 4 * 8 * 4),
        (shaped((1, 1, 1, 128)), 1),
        (shaped((1, MOST, 1, 8)), MOST // 64),
        (shaped((1, MOST, 1, 8), MOST + 63), MOST // 64 + 1),
        (shaped((2**20, 1, 512, 8)), MOST),
        (shaped((MOST, 1, 1, 8)), MOST),
        (shaped((2**20, 64 * 512, 1, 8)), MOST),
        (shaped((1, 1, 1, 8), 1, (2**23, 2**23, 4)), 1),
    ],
)
def test_limits(process: StubProcess, call: PreprocessCall, blocks: int):
    """One more of each is refused, in `REFUSALS`."""
    assert process.pack(BF16, call)["grid"] == [blocks, 1, 1]


def test_first_launch_loads_and_later_ones_do_not():
    enter = ["cuStreamGetCtx", "cuCtxPushCurrent", "cuCtxGetId"]
    launch = ["cuLaunchKernelEx", "cuCtxPopCurrent"]
    with StubProcess() as process:
        process.add(BF16, cubin="made up")
        first = [row["call"] for row in process.launch(VALID)]
        assert (first[: len(enter)], first[-len(launch) :]) == (enter, launch)
        assert "cuLibraryLoadData" in first
        assert [row["call"] for row in process.launch(VALID)] == enter + launch
        assert process.counters() == {"loads": 1, "launches": 2}


def test_a_kernel_without_shared_memory_has_the_sm_as_cache():
    """Attribute 8 is the most dynamic shared memory, in bytes; 9 the preferred share of it, in percent."""
    with StubProcess() as process:
        process.add(FP16, cubin="made up")
        log = process.launch(make_preprocess_call(FP16, (1, 9, 1, 64)))
    attributes = [call for call in log if call["call"] == "cuFuncSetAttribute"]
    assert [(call["attribute"], call["value"]) for call in attributes] == [(8, 0), (9, 0)]


def test_null_arguments_are_refused(process: StubProcess):
    message = "INVALID_ARGUMENT: launch: expected a value; got a null pointer"
    assert error_of(process.launch_null, "preprocess") == message


def test_another_versions_structs_are_refused(process: StubProcess):
    error = error_of(process.launch_with_struct_size, dataclasses.asdict(VALID), 8)
    assert re.match(r"INVALID_ARGUMENT: R2pPreprocess\.struct_size: expected \d+; got 8: .* reinstall", error)


# Registration.


def test_only_a_preprocess_kernel_has_no_keys(process: StubProcess):
    with pytest.raises(LibraryError, match=r"'other', tile_n: expected a multiple of 1 in 0\.\.0; got 8"):
        process.add(BF16, name="other", tile_n=8, cubin="made up")
    with pytest.raises(LibraryError, match=r"'other', tile_n: expected a multiple of 8 in 8\.\.256; got 0"):
        process.add(BACKWARD, name="other", tile_n=0, cubin="made up")


def test_parameters_are_those_of_the_role(process: StubProcess):
    with pytest.raises(LibraryError, match=r"'other', parameters: expected 30; got 15"):
        process.add(BF16, name="other", role=2, tile_n=128, cubin="made up")
    listed = [(parameter.name, parameter.size) for parameter in BF16.parameters]
    listed[1], listed[2] = listed[2], listed[1]
    with pytest.raises(LibraryError, match=r"parameter 1: expected dout of 8 bytes; got lse of 8 bytes"):
        process.add(BF16, name="other", parameters=listed, cubin="made up")
