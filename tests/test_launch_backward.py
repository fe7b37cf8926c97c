"""What the launcher asks of the driver for a backward kernel, and what it refuses. No GPU needed."""

from __future__ import annotations

import dataclasses
import re
import struct
from typing import Any

import pytest
from launch_stub import (
    MAPPED,
    UNBOUNDED,
    BackwardCall,
    LibraryError,
    StubProcess,
    make_backward_call,
    make_backward_variant,
    make_call,
)

from jax_r2p._manifest import load_manifest

# No such kernel exists. Widths that have boxes of 64 columns and of 32, both tiles that a kernel may have.
FP16 = make_backward_variant()
BF16 = make_backward_variant(
    name="bwd_bf16_d128_causal",
    dtype="bf16",
    head_dim=128,
    value_head_dim=128,
    tile_m=64,
    tile_n=128,
    threads=288,
)
VARIANTS = {variant.name: variant for variant in (FP16, BF16)}
FORWARD = next(variant for variant in load_manifest().variants if variant.name == "fwd_bf16_d128_causal")


@pytest.fixture(scope="module")
def process():
    """A process that knows the variants; for tests that leave nothing behind in it."""
    with StubProcess() as process:
        for variant in VARIANTS.values():
            process.add(variant, cubin="made up")
        process.add(FORWARD)
        yield process


def error_of(action: Any, *arguments: Any) -> str:
    with pytest.raises(LibraryError) as caught:
        action(*arguments)
    return str(caught.value)


# Shapes (B, T, N, H) and (Bk, S, K, H), and the rest of the call. Rows and keys are one off a tile, at it,
# and far from it.
CASES = {
    "one-of-each": ((1, 1, 1, 8), (1, 1, 1, 8), {}),
    "tile-minus-one": ((1, 127, 2, 64), (1, 79, 2, 64), {}),
    "tile": ((1, 128, 2, 64), (1, 640, 2, 64), {}),
    "tile-plus-one": ((1, 129, 2, 64), (1, 641, 2, 64), {}),
    "grouped": ((3, 1000, 28, 64), (3, 700, 4, 64), {}),
    "narrow-values": ((2, 300, 4, 96), (2, 300, 2, 96), {"value_width": 24}),
    "windowed": ((2, 300, 4, 64), (2, 500, 2, 64), {"window_left": 100, "window_right": 0}),
    "one-sided": ((2, 300, 4, 64), (2, 500, 2, 64), {"window_left": UNBOUNDED, "window_right": 7}),
    "repeated-keys": ((12, 64, 4, 64), (4, 64, 2, 64), {"kv_repeat": 3, "kv_inner": 1}),
    "middle-keys": ((12, 64, 4, 64), (4, 64, 2, 64), {"kv_repeat": 3, "kv_inner": 2}),
    "query-lengths": ((3, 300, 4, 64), (3, 500, 2, 64), {"lengths": (True, False)}),
    "key-lengths": ((3, 300, 4, 64), (3, 500, 2, 64), {"lengths": (False, True)}),
    "deterministic": ((3, 300, 4, 64), (3, 500, 2, 64), {"deterministic": 1}),
    "short-ring": ((3, 300, 4, 64), (3, 500, 2, 64), {"lag": 2, "slots": 6}),
    "groups": ((5, 300, 4, 64), (5, 500, 2, 64), {"together": 3, "lag": 2, "slots": 19}),
    "everything": (
        (6, 300, 4, 40),
        (2, 500, 2, 40),
        {
            "kv_inner": 2,
            "window_left": 9,
            "window_right": 2,
            "lengths": (True, True),
            "deterministic": 1,
            "lag": 2,
            "slots": 20,
        },
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_launch_configuration(process: StubProcess, name: str, case: str):
    variant = VARIANTS[name]
    query, key, fields = CASES[case]
    packed = process.pack(variant, make_backward_call(variant, query, key, **fields))
    kv_batch, keys, kv_heads, _ = key
    more = fields.get("lag", 1) * fields.get("together", 1)
    assert packed["grid"] == [-(-keys // variant.tile_n) * (kv_heads * kv_batch + more), 1, 1]
    assert packed["block"] == [variant.threads, 1, 1]
    assert packed["shared_memory"] == variant.shared_memory


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_maps(process: StubProcess, name: str, case: str):
    variant = VARIANTS[name]
    query, key, fields = CASES[case]
    call = make_backward_call(variant, query, key, **fields)
    maps = process.pack(variant, call)["maps"]
    width, value_width = variant.head_dim, variant.value_head_dim
    tiles = {
        "query": (variant.tile_m, width),
        "key": (variant.tile_n, width),
        "value": (variant.tile_n, value_width),
        "dout": (variant.tile_m, value_width),
        # Stored by each warpgroup.
        "dkey": (64, width),
        "dvalue": (64, value_width),
    }
    assert maps.keys() == tiles.keys()
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
    call = make_backward_call(variant, query, key, **fields)
    parameters = process.pack(variant, call)["parameters"]
    (batch, rows, heads, head_dim), (kv_batch, keys, kv_heads, _) = query, key
    value_width = call.value.shape[-1]
    lengths = fields.get("lengths", (False, False))
    given = {"query_lengths": lengths[0], "key_lengths": lengths[1]}
    addresses = ("dquery", "sums", "marks", "lse", "delta", "scale", "dquery_factor", *given)
    expected = {
        "query_dims": struct.pack("<4i", rows, head_dim, heads, batch),
        "key_dims": struct.pack("<4i", keys, head_dim, kv_heads, kv_batch),
        "value_dims": struct.pack("<4i", keys, value_width, kv_heads, kv_batch),
        "dout_dims": struct.pack("<4i", rows, value_width, heads, batch),
        "dkey_dims": struct.pack("<4i", keys, head_dim, kv_heads, kv_batch),
        "dvalue_dims": struct.pack("<4i", keys, value_width, kv_heads, kv_batch),
        **{
            array: struct.pack("<Q", getattr(call, array).data if given.get(array, True) else 0)
            for array in addresses
        },
        "window_left": struct.pack("<i", min(call.window_left, keys)),
        "window_right": struct.pack("<i", min(call.window_right, rows)),
        "group": struct.pack("<i", heads // kv_heads),
        "kv_repeat": struct.pack("<i", call.kv_repeat),
        "kv_inner": struct.pack("<i", call.kv_inner),
        "slots": struct.pack("<i", fields.get("slots", batch * heads)),
        "together": struct.pack("<i", call.together),
        "lag": struct.pack("<i", call.lag),
        "deterministic": struct.pack("<i", call.deterministic),
    }
    assert {name: parameters[name] for name in expected} == expected
    assert parameters.keys() == expected.keys() | {f"{array}_map" for array in MAPPED["backward"]}


def test_calls_tell_parameters_apart(process: StubProcess):
    """`test_parameters` notices two parameters of one size in the wrong order: they differ in some call."""
    values: dict[str, list[bytes]] = {}
    for query, key, fields in CASES.values():
        for name, value in process.pack(FP16, make_backward_call(FP16, query, key, **fields))[
            "parameters"
        ].items():
            values.setdefault(name, []).append(value)
    # dkey has the shape of key, and dvalue that of value; their maps tell them apart.
    alike = {"dkey_dims", "dvalue_dims"}
    assert len({tuple(value) for name, value in values.items() if name not in alike}) == len(values) - 2


# Refusals. Each row: what is changed in a valid call, and what the error has to say.

VALID = make_backward_call(
    BF16, (4, 200, 8, 128), (2, 500, 2, 128), 64, lengths=(True, True), deterministic=1, lag=2, slots=28
)
SUMS = ("sums_zeros", "sums")
MARKS = ("marks_zeros", "marks")


def in_slots(slots: int, lag: int, together: int = 1) -> BackwardCall:
    """`VALID`, whose keys have 4 heads, each of which 8 of the 32 heads of the query share."""
    call = VALID.change(*SUMS, shape=(slots, 4, 64 * 128)).change(*MARKS, shape=(slots, 6))
    return dataclasses.replace(call, together=together, lag=lag)


def shaped(query: tuple[int, ...], key: tuple[int, ...] | None = None, **fields: Any) -> BackwardCall:
    return make_backward_call(BF16, query, key, **fields)  # type: ignore[arg-type]


REFUSALS = {
    # What the passes share is checked by the same function; test_launch.py has the rest of its rules.
    "dtype-query": (VALID.change("query", dtype="fp16"), r"query: expected dtype bfloat16; got float16"),
    "head-dim-key": (
        VALID.change("key", shape=(2, 500, 2, 64)),
        r"key: expected shape \(2, 500, 2, 128\), with the head dim of query; got shape \(2, 500, 2, 64\)",
    ),
    "head-dim-wide": (
        shaped((2, 16, 2, 136)),
        r"query: expected a head dim that is a multiple of 8, at most 128 for variant "
        r"'bwd_bf16_d128_causal'; got 136",
    ),
    "dtype-scale": (VALID.change("scale", dtype="bf16"), r"scale: expected dtype float32; got bfloat16"),
    "shape-lengths": (
        VALID.change("query_lengths", shape=(3,)),
        r"query_lengths: expected shape \(4\), the batch of query; got shape \(3\)",
    ),
    "repeat": (
        shaped((6, 16, 2, 128), (2, 16, 2, 128), kv_repeat=2),
        r"kv_repeat: expected query's batch 6 to be key's batch 2 times kv_repeat; got 2",
    ),
    "left-negative": (
        dataclasses.replace(VALID, window_left=-1),
        r"window_left: expected 0\.\.536870912; got -1",
    ),
    # The backward pass's own.
    **{
        f"dtype-{name}": (
            VALID.change(name, dtype="fp32"),
            rf"{name}: expected dtype bfloat16; got float32",
        )
        for name in ("dout", "dquery", "dkey", "dvalue")
    },
    **{
        f"dtype-{name}": (VALID.change(name, dtype="bf16"), rf"{name}: expected dtype float32; got bfloat16")
        for name in ("lse", "delta", "dquery_factor", *SUMS)
    },
    **{
        f"dtype-{name}": (VALID.change(name, dtype="fp32"), rf"{name}: expected dtype int32; got float32")
        for name in MARKS
    },
    **{
        f"rank-{name}": (
            VALID.change(name, shape=(2,)),
            rf"{name}: expected rank {rank}; got rank 1",
        )
        for rank, names in (
            (0, ("dquery_factor",)),
            (2, MARKS),
            (3, ("lse", "delta", *SUMS)),
            (4, ("dout", "dquery", "dkey", "dvalue")),
        )
        for name in names
    },
    **{
        f"null-{name}": (
            VALID.change(name, data=0),
            rf"{name}: expected a device address; got a null pointer",
        )
        for name in ("dout", "lse", "delta", "dquery_factor", "dquery", "dkey", "dvalue", *SUMS, *MARKS)
    },
    **{
        f"aligned-{name}": (
            VALID.change(name, data=0x7F0000000008),
            rf"{name}: expected an address that is a multiple of 16; got 0x7f0000000008",
        )
        for name in ("dout", "lse", "delta", "dquery", "dkey", "dvalue", *SUMS)
    },
    **{
        f"aligned-{name}": (
            VALID.change(name, data=0x7F0000000002),
            rf"{name}: expected an address that is a multiple of 4; got 0x7f0000000002",
        )
        for name in ("dquery_factor", *MARKS)
    },
    "shape-dout": (
        VALID.change("dout", shape=(4, 200, 8, 128)),
        r"dout: expected shape \(4, 200, 8, 64\), as query with the head dim of value; got shape "
        r"\(4, 200, 8, 128\)",
    ),
    "shape-dquery": (
        VALID.change("dquery", shape=(4, 256, 8, 128)),
        r"dquery: expected shape \(4, 200, 8, 128\), that of query; got shape \(4, 256, 8, 128\)",
    ),
    "shape-dkey": (
        VALID.change("dkey", shape=(2, 500, 8, 128)),
        r"dkey: expected shape \(2, 500, 2, 128\), that of key; got shape \(2, 500, 8, 128\)",
    ),
    "shape-dvalue": (
        VALID.change("dvalue", shape=(2, 500, 2, 128)),
        r"dvalue: expected shape \(2, 500, 2, 64\), that of value; got shape \(2, 500, 2, 128\)",
    ),
    **{
        f"shape-{name}": (
            VALID.change(name, shape=(4, 8, 200)),
            rf"{name}: expected shape \(4, 8, 256\), \(batch, heads, rows of whole tiles\) of query; got "
            r"shape \(4, 8, 200\)",
        )
        for name in ("lse", "delta")
    },
    **{
        f"shape-{name}": (
            VALID.change(name, shape=shape),
            rf"{name}: expected shape \(28, 4, 8192\), \(slots of sums_zeros, tiles of query, elements of a "
            rf"tile\); got shape \({', '.join(map(str, shape))}\)",
        )
        for name, shape in (("sums_zeros", (28, 4, 4096)), ("sums", (28, 3, 8192)), ("sums", (29, 4, 8192)))
    },
    **{
        f"shape-{name}-{shape[0]}": (
            VALID.change(name, shape=shape),
            rf"{name}: expected shape \(28, 6\), \(slots of sums_zeros, tiles of query and 2\); got shape "
            rf"\({', '.join(map(str, shape))}\)",
        )
        for name in MARKS
        for shape in ((28, 4), (27, 6))
    },
    **{
        f"alias-{name}": (
            VALID.change(name, data=0x7A0000000000),
            rf"{name}: expected the address of {name}_zeros, {getattr(VALID, name).data:#x}; got "
            r"0x7a0000000000",
        )
        for name in ("sums", "marks")
    },
    # Which thread blocks wait for which; `test_backward_call` reasons about these rules.
    **{
        f"lag-{lag}": (dataclasses.replace(VALID, lag=lag), rf"lag: expected 1\.\.4; got {lag}")
        for lag in (-1, 0, 5, 2**40)
    },
    **{
        f"together-{together}": (
            dataclasses.replace(VALID, together=together),
            rf"together: expected 1\.\.4; got {together}",
        )
        for together in (-1, 0, 5, 2**40)
    },
    **{
        f"lag-{lag}-of-groups-of-{together}": (
            dataclasses.replace(VALID, together=together, lag=lag),
            rf"lag: expected 1\.\.{groups}; got {lag}",
        )
        for together, groups, lag in ((2, 2, 3), (3, 2, 3), (4, 1, 2), (4, 1, 0))
    },
    **{
        f"slots-{slots}-{lag}-{together}": (
            in_slots(slots, lag, together),
            rf"sums: expected {least}\.\.32 slots: at least {8 * together} for each of lag \+ 1 = "
            rf"{lag + 1} groups of heads of key, or one for each head of query, and no more; got {slots}",
        )
        for least, slots, lag, together in (
            (16, 1, 1, 1),
            (16, 15, 1, 1),
            (24, 23, 2, 1),
            (32, 31, 3, 1),
            (32, 31, 4, 1),
            (16, 33, 1, 1),
            (32, 31, 1, 2),
            (32, 31, 1, 3),
            (32, 31, 1, 4),
            (32, 33, 2, 2),
        )
    },
    "deterministic": (
        dataclasses.replace(VALID, deterministic=2),
        r"deterministic: expected 0\.\.1; got 2",
    ),
    "tiles": (
        shaped((2**20, 64 * 512 + 1, 1, 8), (1, 16, 1, 8)),
        r"query: expected batch times heads times blocks of 64 rows to be at most 536870912; got 1048576 "
        r"times 1 times 513",
    ),
    "thread-blocks": (
        shaped((2**20, 1, 2, 8), (2**20, 128 * 1024, 2, 8)),
        r"key: expected batch times heads times blocks of 128 rows to be at most 2147483647; got 1048576 "
        r"times 2 times 1024",
    ),
    "thread-blocks-with-lag": (
        shaped((2**20, 1, 2, 8), (2**20, 128 * 1023, 2, 8), lag=2051),
        r"lag: expected key's batch times heads plus lag times together, times blocks of 128 rows, to be "
        r"at most 2147483647; got 2097152 plus 2051, times 1023",
    ),
    "thread-blocks-with-groups": (
        shaped((2**20, 1, 2, 8), (2**20, 128 * 1023, 2, 8), together=3, lag=684),
        r"lag: expected key's batch times heads plus lag times together, times blocks of 128 rows, to be "
        r"at most 2147483647; got 2097152 plus 2052, times 1023",
    ),
    "map-reach": (
        shaped((1, 64, 8, 128), (1, 2**29, 8, 128)),
        r"key: expected less than 2\^40 bytes in one batch entry, which is as far as TMA reaches; got "
        r"\(536870912, 8, 128\) elements of 2 bytes",
    ),
    "forward-kernel": (
        dataclasses.replace(VALID, variant=FORWARD.name),
        r"variant: expected a backward kernel; got the forward kernel 'fwd_bf16_d128_causal'",
    ),
    "backward-kernel": (
        make_call(BF16, (2, 16, 2, 128)),
        r"variant: expected a forward kernel; got the backward kernel 'bwd_bf16_d128_causal'",
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


def test_most_thread_blocks(process: StubProcess):
    """One more place is refused, in the row "thread-blocks-with-lag" of `REFUSALS`."""
    call = shaped((2**20, 1, 2, 8), (2**20, 128 * 1023, 2, 8), lag=2050)
    assert process.pack(BF16, call)["grid"] == [(2**21 + 2050) * 1023, 1, 1]
    call = dataclasses.replace(call, together=3, lag=683)
    assert process.pack(BF16, call)["grid"] == [(2**21 + 2049) * 1023, 1, 1]


@pytest.mark.parametrize(
    ("slots", "lag", "together"),
    [
        *((16, 1, 1), (24, 2, 1), (25, 2, 1), (32, 1, 1), (32, 3, 1), (32, 4, 1)),
        *((32, 1, 2), (32, 2, 2), (32, 1, 3), (32, 2, 3), (32, 1, 4)),
    ],
)
def test_rings_that_will_do(process: StubProcess, slots: int, lag: int, together: int):
    packed = process.pack(BF16, in_slots(slots, lag, together))
    got = [packed["parameters"][name] for name in ("slots", "together", "lag")]
    assert got == [struct.pack("<i", number) for number in (slots, together, lag)]
    # 4 blocks of 128 keys.
    assert packed["grid"] == [(4 + lag * together) * 4, 1, 1]


def test_both_passes_in_one_process(process: StubProcess):
    """Each kernel gets its own parameters, and both are counted."""
    before = process.counters()["launches"]
    forward = process.pack(FORWARD, make_call(FORWARD, (2, 200, 8, 128)))
    backward = process.pack(BF16, VALID)
    assert forward["parameters"].keys() == {parameter.name for parameter in FORWARD.parameters}
    assert backward["parameters"].keys() == {parameter.name for parameter in BF16.parameters}
    assert process.counters()["launches"] == before + 2


def test_first_launch_loads_and_later_ones_do_not():
    enter = ["cuStreamGetCtx", "cuCtxPushCurrent", "cuCtxGetId"]
    launch = ["cuTensorMapEncodeTiled"] * 6 + ["cuLaunchKernelEx", "cuCtxPopCurrent"]
    with StubProcess() as process:
        process.add(BF16, cubin="made up")
        first = [row["call"] for row in process.launch(VALID)]
        assert (first[: len(enter)], first[-len(launch) :]) == (enter, launch)
        assert "cuLibraryLoadData" in first
        assert [row["call"] for row in process.launch(VALID)] == enter + launch


def test_null_arguments_are_refused(process: StubProcess):
    message = "INVALID_ARGUMENT: launch: expected a value; got a null pointer"
    assert error_of(process.launch_null, "backward") == message


def test_another_versions_structs_are_refused(process: StubProcess):
    error = error_of(process.launch_with_struct_size, dataclasses.asdict(VALID), 8)
    assert re.match(r"INVALID_ARGUMENT: R2pBackward\.struct_size: expected \d+; got 8: .* reinstall", error)


# Registration.


def test_parameters_are_those_of_the_role(process: StubProcess):
    """A kernel of one role with the parameters of the other is refused, whatever it is called."""
    maps = ("out_map", "dout_map")
    for variant, role, (expected, got) in ((BF16, 1, maps), (FORWARD, 2, maps[::-1])):
        message = rf"'other', parameter \d: expected {expected} of 128 bytes; got {got} of 128 bytes"
        with pytest.raises(LibraryError, match=message):
            process.add(variant, name="other", role=role, cubin="made up")


@pytest.mark.parametrize("change", ["name", "size", "order", "missing"])
def test_variants_with_other_parameters_are_refused(process: StubProcess, change: str):
    listed = [(parameter.name, parameter.size) for parameter in BF16.parameters]
    expected = "parameter 1: expected query_dims of 16 bytes; got "
    if change == "name":
        listed[1] = ("surprise", 16)
        expected += "surprise of 16 bytes"
    elif change == "size":
        listed[1] = ("query_dims", 24)
        expected += "query_dims of 24 bytes"
    elif change == "order":
        listed[1], listed[3] = listed[3], listed[1]
        expected += "key_dims of 16 bytes"
    else:
        del listed[-1]
        expected = "parameters: expected 30; got 29"
    with pytest.raises(LibraryError, match=f"variant 'other', {expected}"):
        process.add(BF16, name="other", parameters=listed, cubin="made up")


def test_a_name_has_one_role(process: StubProcess):
    listed = [(parameter.name, parameter.size) for parameter in FORWARD.parameters]
    with pytest.raises(LibraryError, match=f"variant: '{BF16.name}' is registered already, with other"):
        process.add(BF16, role=1, parameters=listed, cubin="made up")
