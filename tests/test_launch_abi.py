"""The launcher packs what the kernel's own host code packs: grid, threads, memory, and every parameter."""

from __future__ import annotations

import importlib.util
import math
import shutil
from typing import Any

import pytest
from host_launch import HostCall, capture
from launch_stub import (
    UNBOUNDED,
    Array,
    BackwardCall,
    Call,
    PreprocessCall,
    StubProcess,
    make_backward_call,
    make_call,
    make_preprocess_call,
)

from jax_r2p._manifest import Variant, load_manifest
from jax_r2p.aot.variants import VARIANTS

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for the stand-ins")
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the kernel compiler: pip install jax_r2p[aot]"
)


def calls_of(variant: Variant) -> dict[str, Call]:
    """Shapes that tell every extent, stride and divisor from its neighbours."""
    head_dim, value_head_dim = variant.head_dim, variant.value_head_dim
    calls = {
        "one tile": make_call(variant, (1, variant.tile_m, 1, head_dim)),
        "one element of each": make_call(variant, (1, 1, 1, 8)),
        "ragged, grouped heads": make_call(
            variant, (3, 1021, 10, head_dim), (3, 333, 5, head_dim), window_left=100, window_right=7
        ),
        "narrow head": make_call(
            variant,
            (2, 130, 6, head_dim - 24),
            (2, 515, 6, head_dim - 24),
            window_left=0,
            lengths=(True, False),
        ),
        "shared keys": make_call(
            variant,
            (24, 200, 9, head_dim),
            (8, 64, 3, head_dim),
            kv_repeat=3,
            kv_inner=4,
            window_right=0,
            lengths=(True, True),
        ),
        # Keys and values of a head fill the L2 budget, so a section is one group of heads.
        "several sections": make_call(variant, (5, 300, 14, head_dim), (5, 80_000, 7, head_dim)),
        "over 2^31 elements": make_call(variant, (2, 70_000, 128, head_dim), window_left=UNBOUNDED - 1),
        "narrow values": make_call(
            variant, (2, 130, 6, head_dim), (2, 515, 3, head_dim), value_head_dim - 24
        ),
        "narrow keys": make_call(variant, (2, 130, 6, 24), (2, 515, 3, 24), value_head_dim),
    }
    # Otherwise as wide as each other, or as the widest that the kernel takes.
    return {name: fit(call, value_head_dim) for name, call in calls.items()}


def fit(call: Call, widest: int) -> Call:
    """The same call with value and out not wider than the kernel takes."""
    for name in ("value", "out"):
        *rest, width = getattr(call, name).shape
        call = call.change(name, shape=(*rest, min(width, widest)))
    return call


def backward_calls_of(variant: Variant) -> dict[str, BackwardCall]:
    """The same for a backward kernel."""
    head_dim = variant.head_dim
    return {
        "one tile": make_backward_call(variant, (1, variant.tile_m, 1, head_dim)),
        "one element of each": make_backward_call(variant, (1, 1, 1, 8), deterministic=1),
        "ragged, grouped heads": make_backward_call(
            variant, (3, 1021, 10, head_dim), (3, 333, 5, head_dim), window_left=100, window_right=7
        ),
        "narrow head": make_backward_call(
            variant,
            (2, 130, 6, head_dim - 24),
            (2, 515, 6, head_dim - 24),
            window_left=0,
            lengths=(True, False),
        ),
        "narrow values": make_backward_call(
            variant, (2, 130, 6, head_dim), (2, 515, 3, head_dim), head_dim - 32, lengths=(False, True)
        ),
        "shared keys": make_backward_call(
            variant,
            (24, 200, 9, head_dim),
            (8, 64, 3, head_dim),
            kv_repeat=3,
            kv_inner=4,
            window_right=0,
            lengths=(True, True),
            deterministic=1,
            together=5,
            lag=2,
            slots=137,
        ),
        "over 2^31 elements": make_backward_call(
            variant, (2, 70_000, 128, head_dim), window_left=UNBOUNDED - 1, lag=100, slots=103
        ),
    }


def preprocess_calls_of(variant: Variant) -> dict[str, PreprocessCall]:
    """The same for a preprocess kernel."""
    head_dim = variant.value_head_dim
    return {
        "one tile": make_preprocess_call(variant, (1, variant.tile_m, 1, head_dim)),
        "one element of each": make_preprocess_call(variant, (1, 1, 1, 8), 1, (1, 1, 4)),
        "ragged": make_preprocess_call(variant, (3, 1021, 10, head_dim), 1088, (13, 17, 64 * head_dim)),
        "narrow head": make_preprocess_call(
            variant, (2, 130, 6, head_dim - 24), 192, (12, 3, 64 * head_dim), lengths=True
        ),
        "over 2^31 elements": make_preprocess_call(
            variant, (2, 70_000, 128, head_dim), 70_016, (256, 1094, 64 * 256)
        ),
    }


def calls(variant: Variant) -> dict[str, Any]:
    makers: dict[str, Any] = {
        "forward": calls_of,
        "backward": backward_calls_of,
        "preprocess": preprocess_calls_of,
    }
    return makers[variant.role](variant)


def array(x: Array) -> tuple[str, int, tuple[int, ...]]:
    """An array as host code takes it: of rank 4, or flat."""
    return ("array", x.data, x.shape if len(x.shape) == 4 else (math.prod(x.shape),))


def address(x: Array) -> int:
    """Of an array that there may not be."""
    return x.data if x.shape != (0,) else 0


def numbers(*values: int) -> list[tuple[str, int]]:
    return [("int32", value) for value in values]


def host_call(call: Call | BackwardCall | PreprocessCall, launched: dict[str, Any]) -> HostCall:
    """The same call for the kernel's host code, which leaves some choices to its caller.

    How the tiles are dealt out is the launcher's own decision. And it passes on a window end that is beyond
    all rows or keys as one that just reaches them all, to stay clear of 32-bit overflow.
    """
    arguments: list[tuple[Any, ...]]
    if isinstance(call, PreprocessCall):
        arguments = [
            *(array(x) for x in (call.out, call.dout, call.lse, call.dlse)),
            ("int64", address(call.query_lengths)),
            *(array(x) for x in (call.lse_base2, call.delta, call.sums)),
            ("int64", call.marks.data),
            *(("int64", math.prod(x.shape)) for x in (call.sums, call.marks)),
            *numbers(call.out.shape[1], call.lse_base2.shape[2], *call.out.shape[2:]),
            *numbers(launched["grid"][0]),
        ]
        return HostCall(arguments=arguments, stream=call.stream)
    windows = min(call.window_left, call.key.shape[1]), min(call.window_right, call.query.shape[1])
    lengths = [("int64", address(x)) for x in (call.query_lengths, call.key_lengths)]
    scale = ("pointer", call.scale.data)
    if isinstance(call, BackwardCall):
        arguments = [
            *(array(x) for x in (call.query, call.key, call.value, call.dout, call.dkey, call.dvalue)),
            *(array(x) for x in (call.dquery, call.sums, call.marks, call.lse, call.delta)),
            scale,
            ("pointer", call.dquery_factor.data),
            *lengths,
            *numbers(*windows, call.query.shape[2] // call.key.shape[2], call.kv_repeat, call.kv_inner),
            *numbers(call.sums.shape[0], call.together, call.lag, call.deterministic),
            *numbers(launched["grid"][0]),
        ]
    else:
        section_heads, paired_tiles = (
            int.from_bytes(launched["parameters"][name], "little")
            for name in ("section_heads_size", "paired_tiles")
        )
        arguments = [
            *(array(x) for x in (call.query, call.key, call.value, call.out, call.lse)),
            scale,
            *lengths,
            *numbers(*windows, section_heads, call.kv_repeat * call.kv_inner, call.kv_inner),
            *numbers(launched["grid"][0], paired_tiles),
        ]
    return HostCall(arguments=arguments, stream=call.stream)


# Types of elements: their numbers in a descriptor, and in the driver's interface.
DESCRIPTOR_TYPES = {6: 6, 10: 9}


def decode_map(descriptor: bytes) -> dict[str, Any]:
    """Returns the fields of a tensor map of rank 4 as cuTensorMapEncodeTiled takes them.

    The format is not documented. These are the fields that were seen to change with each argument; the driver
    sets others in its own way. The host code fills the first 64 of the 128 bytes.
    """
    words = [int.from_bytes(descriptor[start : start + 8], "little") for start in range(0, 64, 8)]
    low, high = 2**32 - 1, 32
    return {
        "address": words[0],
        "rank": (words[1] >> 4 & 7) + 1,
        "type": DESCRIPTOR_TYPES[words[1] >> 7 & 15],
        "swizzle": words[1] >> 13 & 3,
        "strides": [16 * (words[1] >> high), 16 * (words[2] & low), 16 * (words[2] >> high)],
        "dims": [extent + 1 for word in words[4:6] for extent in (word & low, word >> high)],
        "box": [
            (words[6] >> 56) + 1,
            (words[7] & 255) + 1,
            (words[7] >> 8 & 255) + 1,
            (words[7] >> 16 & 255) + 1,
        ],
    }


# A divisor ends with two bytes that nothing reads or sets.
DIVISOR_SIZE, DIVISOR_PADDING = 12, 2


def without_padding(parameter: bytes) -> bytes:
    return parameter[:-DIVISOR_PADDING] if len(parameter) == DIVISOR_SIZE else parameter


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Variant:
    (variant,) = [variant for variant in load_manifest().variants if variant.name == request.param]
    return variant


@pytest.fixture
def launched(variant: Variant) -> dict[str, dict[str, Any]]:
    """What the launcher makes of each call."""
    with StubProcess() as process:
        process.add(variant)
        return {name: process.pack(variant, call) for name, call in calls(variant).items()}


@needs_compiler
def test_launcher_packs_what_host_code_packs(variant: Variant, launched: dict[str, dict[str, Any]]) -> None:
    given = calls(variant)
    host_launches = capture(
        variant.name,
        [parameter.size for parameter in variant.parameters],
        [host_call(call, launched[name]) for name, call in given.items()],
    )
    for (name, call), host in zip(given.items(), host_launches, strict=True):
        ours = launched[name]
        assert host.shared_memory == variant.shared_memory
        for field in ("grid", "block", "shared_memory"):
            assert ours[field] == getattr(host, field), f"{name}: {field}"
        assert host.stream == call.stream
        assert host.attributes == [], "the launcher sets none"

        names = [parameter.name for parameter in variant.parameters]
        for parameter, theirs in zip(names, host.parameters, strict=True):
            if parameter.endswith("_map"):
                fields = decode_map(theirs)
                encoded = ours["maps"][parameter.removesuffix("_map")]
                assert {field: encoded[field] for field in fields} == fields, f"{name}: {parameter}"
            else:
                packed = without_padding(ours["parameters"][parameter]).hex()
                assert packed == without_padding(theirs).hex(), f"{name}: {parameter}"


def test_calls_tell_parameters_apart(variant: Variant, launched: dict[str, dict[str, Any]]) -> None:
    """The comparison notices two parameters of one size in the wrong order: they differ in some call."""
    values = {
        parameter.name: [ours["parameters"][parameter.name] for ours in launched.values()]
        for parameter in variant.parameters
    }
    # Cotangents have the shapes of what they belong to; their maps tell them apart.
    alike = {f"{name}_dims" for name in ("dkey", "dvalue")} & values.keys()
    told = {name: tuple(value) for name, value in values.items() if name not in alike}
    assert len(set(told.values())) == len(told)
