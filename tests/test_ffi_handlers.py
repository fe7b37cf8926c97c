"""The FFI handlers, run on call frames made by hand. No GPU: see launch_stub.py."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import pytest
from launch_stub import (
    BackwardCall,
    Call,
    LibraryError,
    PreprocessCall,
    StubProcess,
    make_backward_call,
    make_backward_variant,
    make_call,
    make_preprocess_call,
    make_preprocess_variant,
)

from jax_r2p._manifest import load_manifest

VARIANTS = {variant.name: variant for variant in load_manifest().variants if variant.role == "forward"}
VARIANT = VARIANTS["fwd_bf16_d64_window"]
CALL = make_call(
    VARIANT,
    (6, 300, 4, 40),
    (2, 500, 2, 40),
    window_left=9,
    window_right=2,
    kv_repeat=3,
    kv_inner=2,
    lengths=(False, True),
)
BACKWARD_VARIANT = make_backward_variant()
BACKWARD = make_backward_call(
    BACKWARD_VARIANT,
    (6, 300, 4, 40),
    (2, 500, 2, 40),
    24,
    window_left=9,
    window_right=2,
    kv_repeat=3,
    kv_inner=2,
    lengths=(False, True),
    together=2,
    lag=1,
    slots=24,
    deterministic=1,
)
PREPROCESS_VARIANT = make_preprocess_variant()
PREPROCESS = make_preprocess_call(PREPROCESS_VARIANT, (6, 300, 4, 24), 384, (24, 3, 128 * 96), lengths=True)
CALLS = {"forward": CALL, "backward": BACKWARD, "preprocess": PREPROCESS}
AnyCall = Call | BackwardCall | PreprocessCall
COMMAND_BUFFER_COMPATIBLE = 1


@pytest.fixture
def process():
    with StubProcess(ffi_headers=jax.ffi.include_dir()) as process:
        for variant in VARIANTS.values():
            process.add(variant)
        process.add(BACKWARD_VARIANT, cubin="made up")
        process.add(PREPROCESS_VARIANT, cubin="made up")
        yield process


def without_handles(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Driver calls without what differs between two loads and two encodings of the same."""
    handles = {"function", "number", "parameters"}
    return [{field: call[field] for field in call.keys() - handles} for call in log]


@pytest.mark.parametrize("role", CALLS)
def test_initialize_loads_and_execute_launches(process: StubProcess, role: str):
    loading = [call["call"] for call in process.initialize(CALLS[role])]
    assert "cuKernelGetFunction" in loading
    assert "cuLaunchKernelEx" not in loading
    launching = [call["call"] for call in process.execute(CALLS[role])]
    assert "cuKernelGetFunction" not in launching
    assert launching.count("cuLaunchKernelEx") == 1


@pytest.mark.parametrize("name", [*VARIANTS, BACKWARD_VARIANT.name, PREPROCESS_VARIANT.name])
def test_execute_is_the_launch_of_the_c_interface(process: StubProcess, name: str):
    """Every buffer and attribute arrives where the same field of R2pLaunch, or of its like, does."""
    call: AnyCall = PREPROCESS if name == PREPROCESS_VARIANT.name else BACKWARD
    if name in VARIANTS:
        call = dataclasses.replace(CALL, variant=name)
        call = call.change("query", "key", "value", "out", dtype=VARIANTS[name].dtype)
    process.load(name, call.stream)
    by_frame, by_struct = process.execute(call), process.launch(call)
    assert without_handles(by_frame) == without_handles(by_struct)
    parameters = [
        next(row["parameters"] for row in log if row["call"] == "cuLaunchKernelEx")
        for log in (by_frame, by_struct)
    ]
    same_but_maps = [
        [value for value in values if len(value) != 2 * 128]  # a map's bytes are the number of its encoding
        for values in parameters
    ]
    assert same_but_maps[0] == same_but_maps[1]


def test_execute_alone_loads(process: StubProcess):
    """An executable may come to a device whose `initialize` was for another context."""
    assert {"cuLibraryLoadData", "cuLaunchKernelEx"} <= {call["call"] for call in process.execute(CALL)}


@pytest.mark.parametrize("role", CALLS)
@pytest.mark.parametrize(("stage", "traits"), [("initialize", 0), ("execute", COMMAND_BUFFER_COMPATIBLE)])
def test_metadata(process: StubProcess, stage: str, traits: int, role: str):
    """What XLA reads at registration: a version that every jaxlib takes, and leave to capture it."""
    assert process.metadata(stage, role) == {"major": 0, "minor": 1, "traits": traits}


ERRORS: dict[str, tuple[AnyCall, dict[str, Any], str]] = {
    "launcher": (CALL.change("query", dtype="fp16"), {}, "INVALID_ARGUMENT: query: expected dtype bfloat16"),
    "rank": (CALL.change("lse", shape=(6, 4)), {}, "INVALID_ARGUMENT: lse: expected rank 3; got rank 2"),
    "unknown-variant": (
        CALL,
        {"attributes": {"variant": ["string", "fwd_fp8"]}},
        "NOT_FOUND: variant: expected one of 'bwd_fp16_d96v64_window', .*; got 'fwd_fp8'",
    ),
    "int64-window": (
        CALL,
        {"attributes": {"window_left": ["int64", 5]}},
        r"INVALID_ARGUMENT: [\s\S]*bad operands at: 10[\s\S]*expected S32 but got S64",
    ),
    "int32-repeat": (
        CALL,
        {"attributes": {"kv_repeat": ["int32", 3]}},
        r"INVALID_ARGUMENT: [\s\S]*bad operands at: 12[\s\S]*expected S64 but got S32",
    ),
    "missing-attribute": (
        CALL,
        {"attributes": {"kv_inner": None}},
        "INVALID_ARGUMENT: Wrong number of attributes: expected 5 but got 4",
    ),
    "unknown-attribute": (
        CALL,
        {"attributes": {"causal": ["int32", 1]}},
        "INVALID_ARGUMENT: Wrong number of attributes: expected 5 but got 6",
    ),
    "missing-argument": (CALL, {"arguments": 5}, "INVALID_ARGUMENT: Wrong number of arguments: expected 6"),
    "backward-launcher": (
        BACKWARD.change("sums", data=0x7A0000000000),
        {},
        "INVALID_ARGUMENT: sums: expected the address of sums_zeros",
    ),
    "backward-rank": (
        BACKWARD.change("marks", shape=(6, 4, 2)),
        {},
        "INVALID_ARGUMENT: marks: expected rank 2; got rank 3",
    ),
    "backward-missing-argument": (
        BACKWARD,
        {"arguments": 11},
        "INVALID_ARGUMENT: Wrong number of arguments: expected 12",
    ),
    "backward-missing-attribute": (
        BACKWARD,
        {"attributes": {"lag": None}},
        "INVALID_ARGUMENT: Wrong number of attributes: expected 8 but got 7",
    ),
    "backward-together": (
        BACKWARD,
        {"attributes": {"together": ["int64", 5]}},
        r"INVALID_ARGUMENT: together: expected 1\.\.4; got 5",
    ),
    "backward-lag": (
        BACKWARD,
        {"attributes": {"lag": ["int64", 5]}},
        r"INVALID_ARGUMENT: lag: expected 1\.\.2; got 5",
    ),
    "backward-int32-lag": (
        BACKWARD,
        {"attributes": {"lag": ["int32", 2]}},
        r"INVALID_ARGUMENT: [\s\S]*expected S64 but got S32",
    ),
    "backward-int32-deterministic": (
        BACKWARD,
        {"attributes": {"deterministic": ["int32", 1]}},
        r"INVALID_ARGUMENT: [\s\S]*expected PRED but got S32",
    ),
    "backward-int64-window": (
        BACKWARD,
        {"attributes": {"window_right": ["int64", 5]}},
        r"INVALID_ARGUMENT: [\s\S]*expected S32 but got S64",
    ),
    "preprocess-launcher": (
        PREPROCESS.change("sums", shape=(24, 3, 6)),
        {},
        "INVALID_ARGUMENT: sums: expected tiles of a multiple of 4 elements; got 6",
    ),
    "preprocess-rank": (
        PREPROCESS.change("delta", shape=(6, 4)),
        {},
        "INVALID_ARGUMENT: delta: expected rank 3; got rank 2",
    ),
    "preprocess-missing-argument": (
        PREPROCESS,
        {"arguments": 4},
        "INVALID_ARGUMENT: Wrong number of arguments: expected 5",
    ),
    "preprocess-missing-attribute": (
        PREPROCESS,
        {"attributes": {"variant": None}},
        "INVALID_ARGUMENT: Wrong number of attributes: expected 1 but got 0",
    ),
    "preprocess-unknown-attribute": (
        PREPROCESS,
        {"attributes": {"lag": ["int64", 1]}},
        "INVALID_ARGUMENT: Wrong number of attributes: expected 1 but got 2",
    ),
    "no-preprocess-kernel": (
        dataclasses.replace(PREPROCESS, variant=BACKWARD_VARIANT.name),
        {},
        "INVALID_ARGUMENT: variant: expected a preprocess kernel; got the backward kernel "
        f"'{BACKWARD_VARIANT.name}'",
    ),
    "forward-kernel": (
        dataclasses.replace(BACKWARD, variant=VARIANT.name),
        {},
        f"INVALID_ARGUMENT: variant: expected a backward kernel; got the forward kernel '{VARIANT.name}'",
    ),
    "backward-kernel": (
        dataclasses.replace(CALL, variant=BACKWARD_VARIANT.name),
        {},
        "INVALID_ARGUMENT: variant: expected a forward kernel; got the backward kernel "
        f"'{BACKWARD_VARIANT.name}'",
    ),
    "no-stream": (
        CALL,
        {"stream_fails": True},
        r"INVALID_ARGUMENT: [\s\S]*Failed to get platform stream: no stream here",
    ),
    "stage": (CALL, {"handler_stage": "initialize"}, "INVALID_ARGUMENT: Wrong execution stage"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_execute_errors(process: StubProcess, case: str):
    call, changes, message = ERRORS[case]
    with pytest.raises(LibraryError) as caught:
        process.execute(call, **changes)
    assert re.match(message, str(caught.value)), caught.value
    assert process.counters()["launches"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attributes": {"variant": None}},
            r"INVALID_ARGUMENT: variant: expected a string attribute; [\s\S]*variant",
        ),
        (
            {"attributes": {"variant": ["int32", 1]}},
            r"INVALID_ARGUMENT: variant: expected a string attribute; [\s\S]*Wrong attribute type",
        ),
        ({"attributes": {"variant": ["string", "x"]}}, r"NOT_FOUND: variant: expected one of .*; got 'x'"),
        ({"stream_fails": True}, r"INVALID_ARGUMENT: [\s\S]*no stream here"),
    ],
)
def test_initialize_errors(process: StubProcess, changes: dict[str, Any], message: str):
    with pytest.raises(LibraryError) as caught:
        process.initialize(CALL, **changes)
    assert re.match(message, str(caught.value)), caught.value
    assert process.counters()["loads"] == 0


def test_driver_failures_are_internal_errors(process: StubProcess):
    process.fail("cuLibraryLoadData", 209, 1)
    with pytest.raises(LibraryError, match=r"INTERNAL: cuLibraryLoadData failed for .*NO_BINARY_FOR_GPU"):
        process.initialize(CALL)
    process.fail("cuLaunchKernelEx", 209, 1)
    with pytest.raises(LibraryError, match=r"INTERNAL: cuLaunchKernelEx failed for .*NO_BINARY_FOR_GPU"):
        process.execute(CALL)


def test_broken_variants_are_failed_preconditions(process: StubProcess):
    process.add_broken_variant("fwd_broken", "fwd_broken.cubin is altered")
    for stage in (process.initialize, process.execute):
        with pytest.raises(LibraryError, match=r"^FAILED_PRECONDITION: fwd_broken.cubin is altered$"):
            stage(dataclasses.replace(CALL, variant="fwd_broken"))


def test_initialize_does_not_look_at_the_other_arguments(process: StubProcess):
    """XLA may call it before buffers have addresses."""
    empty = CALL.change("query", data=0).change("key", data=0).change("lse", data=0)
    process.initialize(empty)
    assert process.counters() == {"loads": 1, "launches": 0}
