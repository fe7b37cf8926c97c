"""What a call becomes in a program for CUDA and for other platforms. Nothing here needs a GPU."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_r2p
from jax_r2p import _dispatch, _ffi
from jax_r2p._manifest import load_manifest

TARGET = _ffi.TARGET
UNBOUNDED = 1 << 29
kernel = functools.partial(jax_r2p.attention, implementation="r2p")


def struct(*shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


QUERY, KEY = struct(2, 5, 4, 64), struct(2, 7, 2, 64)
SCALE = struct(dtype="float32")
LENGTHS = struct(2, dtype="int32")
NO_LENGTHS = ["0xi32"] * 2


def lower(function, *structs, platforms=("cuda",)) -> str:
    # A new function each time: jit would remember what it lowered before.
    return (
        jax.jit(lambda *args: function(*args)).trace(*structs).lower(lowering_platforms=platforms).as_text()
    )


class Call:
    """One custom call of a program's text."""

    def __init__(self, line: str):
        config = re.search(r"mhlo\.backend_config = \{([^}]*)\}", line)
        assert config, line
        self.attributes = dict(item.split(" = ") for item in config[1].split(", "))
        signature = re.search(r": \(([^()]*)\) -> \(([^()]*)\)\s*$", line)
        assert signature, line
        self.operands, self.results = (
            [re.sub(r"^tensor<|>$", "", item) for item in side.split(", ")] for side in signature.groups()
        )

    @property
    def variant(self) -> str:
        return self.attributes["variant"].strip('"')


def calls(text: str, target: str = TARGET) -> list[Call]:
    return [Call(line) for line in text.splitlines() if f"custom_call @{target}(" in line]


def the_call(function, *structs) -> Call:
    (call,) = calls(lower(function, *structs))
    return call


def test_names_types_and_attributes():
    """The whole interface to the library: a change here needs a new target name."""
    function = functools.partial(kernel, local_window_size=(3, 1), return_residual=True)
    call = the_call(function, QUERY, KEY, KEY)
    assert call.operands == ["2x5x4x64xbf16", "2x7x2x64xbf16", "2x7x2x64xbf16", "f32", *NO_LENGTHS]
    assert call.results == ["2x5x4x64xbf16", "2x4x5xf32"]
    assert call.attributes == {
        "variant": '"fwd_bf16_d64_window"',
        "window_left": "3 : i32",
        "window_right": "1 : i32",
        "kv_repeat": "1 : i64",
        "kv_inner": "1 : i64",
    }


LENGTHS_GIVEN = {
    "neither": ((), NO_LENGTHS),
    "query": (("query_seq_lengths",), ["2xi32", "0xi32"]),
    "key": (("key_value_seq_lengths",), ["0xi32", "2xi32"]),
    "both": (("query_seq_lengths", "key_value_seq_lengths"), ["2xi32", "2xi32"]),
}


@pytest.mark.parametrize(("names", "operands"), LENGTHS_GIVEN.values(), ids=LENGTHS_GIVEN.keys())
def test_lengths_are_operands(names, operands):
    def function(q, k, lengths):
        return kernel(q, k, k, is_causal=True, **dict.fromkeys(names, lengths))

    call = the_call(function, QUERY, KEY, LENGTHS)
    assert call.operands[4:] == operands
    assert call.variant == "fwd_bf16_d64_causal"
    assert call.attributes["window_right"] == "0 : i32"


def test_lengths_of_shared_keys_are_those_of_the_queries():
    """`vmap` of queries and lengths copies no keys: each sequence has its own length of the same keys."""
    function = jax.vmap(lambda q, k, s: kernel(q, k, k, key_value_seq_lengths=s), (0, None, 0))
    call = the_call(function, add(QUERY, 3), KEY, struct(3, 2, dtype="int32"))
    assert call.operands == ["6x5x4x64xbf16", "2x7x2x64xbf16", "2x7x2x64xbf16", "f32", "0xi32", "6xi32"]
    assert (call.attributes["kv_repeat"], call.attributes["kv_inner"]) == ("3 : i64", "2 : i64")


def test_lengths_of_single_sequences():
    function = jax.vmap(lambda q, k, s: kernel(q, k, k, key_value_seq_lengths=s))
    call = the_call(function, QUERY, KEY, LENGTHS)
    assert call.operands[4:] == ["0xi32", "2xi32"]


def test_layouts_are_row_major():
    text = lower(kernel, QUERY, KEY, KEY)
    (line,) = (line for line in text.splitlines() if TARGET in line)
    rank4 = "dense<[3, 2, 1, 0]> : tensor<4xindex>"
    rank1, rank0 = "dense<0> : tensor<1xindex>", "dense<> : tensor<0xindex>"
    assert f"operand_layouts = [{rank4}, {rank4}, {rank4}, {rank0}, {rank1}, {rank1}]" in line
    assert f"result_layouts = [{rank4}, dense<[2, 1, 0]> : tensor<3xindex>]" in line


@pytest.mark.parametrize(
    ("mask", "lengths", "variant", "left", "right"),
    [
        ({}, (5, 7), "none", UNBOUNDED, UNBOUNDED),
        ({"is_causal": True}, (5, 7), "causal", UNBOUNDED, 0),
        ({"is_causal": True}, (1, 7), "none", UNBOUNDED, UNBOUNDED),
        ({"local_window_size": 2}, (5, 7), "window", 2, 2),
        ({"local_window_size": (2, 9)}, (5, 7), "window", 2, UNBOUNDED),
        ({"local_window_size": (9, 2)}, (5, 7), "window", UNBOUNDED, 2),
        ({"local_window_size": (9, 2), "is_causal": True}, (5, 7), "causal", UNBOUNDED, 0),
        ({"local_window_size": (9, 9)}, (5, 7), "none", UNBOUNDED, UNBOUNDED),
        ({"local_window_size": (1 << 40, 1 << 40)}, (5, 7), "none", UNBOUNDED, UNBOUNDED),
    ],
    ids=str,
)
def test_masks(mask, lengths, variant, left, right):
    t, s = lengths
    key = struct(2, s, 2, 64)
    call = the_call(lambda q, k: kernel(q, k, k, **mask), struct(2, t, 4, 64), key)
    assert call.variant == f"fwd_bf16_d64_{variant}"
    assert call.attributes["window_left"] == f"{left} : i32"
    assert call.attributes["window_right"] == f"{right} : i32"


@pytest.mark.parametrize(
    ("dtype", "h", "variant"),
    [
        ("bfloat16", 8, "bf16_d64"),
        ("float16", 64, "fp16_d64"),
        ("bfloat16", 72, "bf16_d96"),
        ("float16", 104, "fp16_d128"),
        ("bfloat16", 256, "bf16_d256"),
        ("float16", 128, "fp16_d128"),
    ],
)
def test_head_dims_and_dtypes(dtype, h, variant):
    query, key = struct(2, 5, 4, h, dtype=dtype), struct(2, 7, 2, h, dtype=dtype)
    call = the_call(kernel, query, key, key)
    assert call.variant == f"fwd_{variant}_none"
    assert call.operands[0] == f"2x5x4x{h}x{'bf16' if dtype == 'bfloat16' else 'f16'}"


@pytest.mark.parametrize(
    ("h", "hv", "variant"), [(192, 128, "d192v128"), (64, 256, "d256"), (64, 8, "d64"), (136, 192, "d192")]
)
def test_value_of_another_width(h, hv, variant):
    call = the_call(kernel, struct(2, 5, 4, h), struct(2, 7, 2, h), struct(2, 7, 2, hv))
    assert call.variant == f"fwd_bf16_{variant}_none"
    assert call.operands[1:3] == [f"2x7x2x{h}xbf16", f"2x7x2x{hv}xbf16"]
    assert call.results == [f"2x5x4x{hv}xbf16", "2x4x5xf32"]


@pytest.mark.parametrize(
    ("h", "hv", "pads", "slices"), [(64, 64, 0, 0), (12, 12, 3, 1), (12, 16, 2, 0), (16, 12, 1, 1)]
)
def test_odd_widths_are_padded(h, hv, pads, slices):
    """Each array only if it has to be, and the result is cut to the width of value."""
    text = lower(kernel, struct(2, 5, 4, h), struct(2, 7, 2, h), struct(2, 7, 2, hv))
    (call,) = calls(text)
    wide = h + -h % 8
    assert call.operands[:2] == [f"2x5x4x{wide}xbf16", f"2x7x2x{wide}xbf16"]
    assert call.results[0] == f"2x5x4x{hv + -hv % 8}xbf16"
    assert text.count("stablehlo.pad") == pads
    assert text.count("stablehlo.slice") == slices
    assert f"-> (tensor<2x5x4x{hv}xbf16>" in text


def test_default_scale_is_that_of_the_width_before_padding():
    text = lower(kernel, *[struct(2, 5, 4, 12)] * 3)
    assert np.float32(re.search(r"stablehlo.constant dense<(0\.2\d+)> : tensor<f32>", text)[1]) == np.float32(
        12**-0.5
    )


def test_scale_is_an_operand():
    """A Python number, too; and one that is traced, of whatever type, arrives as float32."""
    texts = [lower(lambda q, k, s=s: kernel(q, k, k, scale=s), QUERY, KEY) for s in (0.25, 0.75)]
    assert calls(texts[0])[0].attributes == calls(texts[1])[0].attributes
    call = the_call(lambda q, k, s: kernel(q, k, k, scale=s), QUERY, KEY, struct(dtype="bfloat16"))
    assert call.operands[3] == "f32"


@pytest.mark.parametrize("batch", [(), (3,), (3, 2)], ids=str)
def test_leading_dimensions_are_folded(batch):
    size = int(np.prod(batch))
    call = the_call(lambda q, k: kernel(q, k, k), struct(*batch, 5, 4, 64), struct(*batch, 7, 2, 64))
    assert call.operands[:2] == [f"{size}x5x4x64xbf16", f"{size}x7x2x64xbf16"]
    assert call.results == [f"{size}x5x4x64xbf16", f"{size}x4x5xf32"]


def add(x: jax.ShapeDtypeStruct, size: int) -> jax.ShapeDtypeStruct:
    return struct(size, *x.shape, dtype=x.dtype)


def test_vmap_of_queries_copies_no_keys():
    function = jax.vmap(lambda q, k, v, s: kernel(q, k, v, scale=s), (0, None, None, None))
    call = the_call(function, add(QUERY, 3), KEY, KEY, SCALE)
    assert call.operands[:4] == ["6x5x4x64xbf16", "2x7x2x64xbf16", "2x7x2x64xbf16", "f32"]
    assert call.attributes["kv_repeat"] == "3 : i64"
    assert call.attributes["kv_inner"] == "2 : i64"


def test_nested_vmap_of_queries_copies_no_keys():
    """One sample's keys for five queries each, in two ways: keys mapped outside, or inside."""
    one_query, one_key = struct(5, 4, 64), struct(7, 2, 64)
    queries = add(add(one_query, 5), 3)
    keys_outside = jax.vmap(jax.vmap(kernel, (0, None, None)), (0, 0, 0))
    call = the_call(keys_outside, queries, add(one_key, 3), add(one_key, 3))
    assert call.operands[:2] == ["15x5x4x64xbf16", "3x7x2x64xbf16"]
    assert (call.attributes["kv_repeat"], call.attributes["kv_inner"]) == ("5 : i64", "1 : i64")

    keys_inside = jax.vmap(jax.vmap(kernel, (0, 0, 0)), (0, None, None))
    call = the_call(keys_inside, queries, add(one_key, 5), add(one_key, 5))
    assert call.operands[:2] == ["15x5x4x64xbf16", "5x7x2x64xbf16"]
    assert (call.attributes["kv_repeat"], call.attributes["kv_inner"]) == ("3 : i64", "5 : i64")


def test_vmap_of_keys_alone_copies_the_query():
    call = the_call(jax.vmap(kernel, (None, 0, 0)), QUERY, add(KEY, 3), add(KEY, 3))
    assert call.operands[:3] == ["6x5x4x64xbf16", "6x7x2x64xbf16", "6x7x2x64xbf16"]
    assert call.attributes["kv_repeat"] == "1 : i64"


def test_vmap_of_one_of_key_and_value_copies_the_other():
    call = the_call(jax.vmap(kernel, (0, 0, None)), add(QUERY, 3), add(KEY, 3), KEY)
    assert call.operands[1:3] == ["6x7x2x64xbf16", "6x7x2x64xbf16"]
    assert call.attributes["kv_repeat"] == "1 : i64"


def test_vmap_of_scale_calls_in_a_loop():
    function = jax.vmap(lambda q, k, v, s: kernel(q, k, v, scale=s), (None, None, None, 0))
    text = lower(function, QUERY, KEY, KEY, add(SCALE, 3))
    (call,) = calls(text)
    assert "stablehlo.while" in text
    assert call.operands[:4] == ["2x5x4x64xbf16", "2x7x2x64xbf16", "2x7x2x64xbf16", "f32"]


def gradient(function):
    return jax.grad(lambda *a: jnp.sum(function(*a).astype(jnp.float32)), (0, 1, 2))


BACKWARD = _ffi.BACKWARD_TARGET
causal = functools.partial(kernel, is_causal=True)


@pytest.fixture
def backward_kernels(monkeypatch):
    """A build that has a backward kernel for every forward one."""
    manifest = load_manifest()
    forward = [v for v in manifest.variants if v.role == "forward"]
    backward = [dataclasses.replace(v, role="backward", name=v.name.replace("fwd", "bwd")) for v in forward]
    prepare = [v for v in manifest.variants if v.role == "preprocess"]
    manifest = dataclasses.replace(manifest, variants=(*backward, *forward, *prepare))
    monkeypatch.setattr(_dispatch, "load_manifest", lambda: manifest)


def test_gradient_without_a_backward_kernel(monkeypatch):
    """Keeps the kernel for the result, demanded or not, and says once what runs as plain XLA."""
    forward = [v for v in load_manifest().variants if v.role == "forward"]
    manifest = dataclasses.replace(load_manifest(), variants=tuple(forward))
    monkeypatch.setattr(_dispatch, "load_manifest", lambda: manifest)
    text, messages = warned(gradient(causal), QUERY, KEY, KEY)
    assert [call.variant for call in calls(text)] == ["fwd_bf16_d64_causal"]
    assert calls(text, BACKWARD) == []
    assert messages == [
        "derivatives of jax_r2p.attention run as plain XLA: this build has no backward kernel. "
        "implementation='xla' does that without a warning."
    ]
    assert warned(gradient(causal), QUERY, KEY, KEY)[1] == []


def test_gradient_where_there_is_no_kernel_at_all():
    """One reason, not two."""
    x = struct(2, 5, 4, 64, dtype="float32")
    _, (message,) = warned(gradient(jax_r2p.attention), x, x, x)
    assert "jax_r2p.attention runs as plain XLA: no kernel takes dtype float32" in message


@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_names_types_and_attributes(backward_kernels, deterministic):
    """The whole interface to the library: a change here needs a new target name."""
    function = functools.partial(causal, deterministic=deterministic)
    text = lower(gradient(function), QUERY, KEY, KEY)
    assert [call.variant for call in calls(text)] == ["fwd_bf16_d64_causal"]
    (call,) = calls(text, BACKWARD)
    (variant,) = (
        v for v in _dispatch.load_manifest().variants if f'"{v.name}"' == call.attributes["variant"]
    )
    # One tile holds the 5 queries, and so few heads have a slot each.
    rows, sums = f"2x4x{variant.tile_m}xf32", f"8x1x{variant.tile_m * variant.head_dim}xf32"
    inputs = ["2x5x4x64xbf16", "2x7x2x64xbf16", "2x7x2x64xbf16", "2x5x4x64xbf16", rows, rows, "f32", "f32"]
    assert call.operands == [*inputs, *NO_LENGTHS, sums, "8x3xi32"]
    assert call.results == ["2x5x4x64xbf16", "2x7x2x64xbf16", "2x7x2x64xbf16", sums, "8x3xi32"]
    assert call.attributes == {
        "variant": '"bwd_bf16_d64_causal"',
        "window_left": f"{UNBOUNDED} : i32",
        "window_right": "0 : i32",
        "kv_repeat": "1 : i64",
        "kv_inner": "1 : i64",
        # In a fixed order of additions a head starts after the other.
        "together": f"{1 if deterministic else 4} : i64",
        "lag": f"{4 if deterministic else 1} : i64",
        "deterministic": str(deterministic).lower(),
    }
    (line,) = (line for line in text.splitlines() if BACKWARD in line)
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d+)", line)
    assert aliases == [("3", "10"), ("4", "11")], "sums and marks start as zeros"


def test_results_go_by_a_barrier(backward_kernels):
    """XLA may fuse a call with what stacks its result in a scan; for other users it then calls once more."""
    lines = lower(gradient(causal), QUERY, KEY, KEY).splitlines()
    for target, returned in ((TARGET, 2), (BACKWARD, 3)):
        (number,) = (n for n, line in enumerate(lines) if f"custom_call @{target}(" in line)
        name = lines[number].split()[0].partition(":")[0]
        users = [line for line in lines[number + 1 :] if re.search(rf"{name}#\d", line)]
        assert ["optimization_barrier" in line for line in users] == [True]
        assert re.findall(rf"{name}#(\d)", users[0]) == [str(n) for n in range(returned)]


@pytest.mark.parametrize("mapped", [False, True], ids=["", "mapped"])
@pytest.mark.parametrize("argnums", [(0,), (1, 2), (3,), (0, 1, 2, 3)], ids=str)
def test_gradient_of_scale_is_a_second_call(backward_kernels, argnums, mapped):
    """With a constant as the factor of dquery in place of scale; no other gradient takes it."""

    def function(query, key, value, scale):
        return jnp.sum(causal(query, key, value, scale=scale).astype(jnp.float32))

    function = jax.grad(function, argnums)
    if mapped:  # a loop over scales
        function = jax.vmap(function, (None, None, None, 0))
    text = lower(function, QUERY, KEY, KEY, add(SCALE, 3) if mapped else SCALE)
    assert len(calls(text, BACKWARD)) == 1 + (3 in argnums)
    # Names of the scale and the factor of each call.
    given = re.findall(rf"custom_call @{re.escape(BACKWARD)}\(([^)]*)\)", text)
    (scale, factor), *second = [x.split(", ")[6:8] for x in given]
    assert factor == scale
    for again, constant in second:
        assert again == scale
        assert constant != scale
        assert f"{constant} = stablehlo.constant dense<1.250000e-01> : tensor<f32>" in text  # 64**-0.5


def test_backward_of_shared_keys_and_odd_widths(backward_kernels):
    function = jax.vmap(lambda q, k, v: causal(q, k, v), (0, None, None))
    query, key, value = struct(3, 2, 5, 4, 60), struct(2, 7, 2, 60), struct(2, 7, 2, 12)
    (call,) = calls(lower(gradient(function), query, key, value), BACKWARD)
    assert call.operands[:4] == ["6x5x4x64xbf16", "2x7x2x64xbf16", "2x7x2x16xbf16", "6x5x4x16xbf16"]
    assert call.results[1:3] == ["2x7x2x64xbf16", "2x7x2x16xbf16"]
    assert (call.attributes["kv_repeat"], call.attributes["kv_inner"]) == ("3 : i64", "2 : i64")


@pytest.mark.parametrize("lengths", [False, True])
def test_dout_is_copied_only_where_rows_may_be_empty(backward_kernels, lengths):
    """The cotangent of a row that sees no key is cut off, which otherwise is not needed."""

    def function(q, k, v, s):
        out = causal(q, k, v, key_value_seq_lengths=s if lengths else None)
        return jnp.sum(out.astype(jnp.float32))

    text = lower(jax.grad(function), QUERY, KEY, struct(2, 7, 2, 32), LENGTHS)
    assert ("tensor<2x5x4x32xi1>" in text) == lengths


def test_jvp_calls_no_backward_kernel(backward_kernels):
    text, messages = warned(lambda *a: jax.jvp(causal, a, a), QUERY, KEY, KEY)
    assert calls(text, BACKWARD) == []
    assert messages == []


@pytest.mark.parametrize("sizes", [(0, 5, 7, 4), (2, 0, 7, 4), (2, 5, 0, 4), (2, 5, 7, 0)], ids=str)
def test_nothing_to_compute_calls_no_kernel(sizes):
    """Demanded or not, and without a warning: there is nothing to fall back from."""
    b, t, s, n = sizes
    for implementation in ("r2p", None):
        for platform in ("cuda", "cpu"):
            text = lower(
                lambda q, k, i=implementation: jax_r2p.attention(q, k, k, implementation=i),
                struct(b, t, n, 64),
                struct(b, s, 2, 64),
                platforms=(platform,),
            )
            assert calls(text) == []


def test_implementation_xla_calls_no_kernel():
    assert calls(lower(lambda q, k: jax_r2p.attention(q, k, k, implementation="xla"), QUERY, KEY)) == []


def test_shard_map_calls_with_local_shapes():
    from jax.sharding import AbstractMesh, AxisType
    from jax.sharding import PartitionSpec as P

    spec = P("x", None, "y")
    mesh = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    function = jax.shard_map(
        lambda q, k, v: kernel(q, k, v, is_causal=True),
        mesh=mesh,
        in_specs=(spec, spec, spec),
        out_specs=spec,
    )
    call = the_call(function, QUERY, KEY, KEY)
    assert call.operands[:2] == ["1x5x2x64xbf16", "1x7x1x64xbf16"]


def test_explicit_mesh_folds_what_its_types_would_not_merge():
    """A new dimension and a batch that is sharded. No rule of the mesh may get into the way of the fold.

    For one device: where there are several, `test_sharding` looks at each one's calls.
    """
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, P(None, "x", None, "y"))
    query, key = (jax.ShapeDtypeStruct((3, *x.shape), x.dtype, sharding=sharding) for x in (QUERY, KEY))
    scales = jax.ShapeDtypeStruct((3,), jnp.float32)
    with jax.set_mesh(mesh):
        call = the_call(jax.vmap(kernel), query, key, key)
        assert call.operands[:2] == ["6x5x4x64xbf16", "6x7x2x64xbf16"]
        function = jax.vmap(lambda q, k, v, s: kernel(q, k, v, scale=s, is_causal=True))
        call = the_call(function, query, key, key, scales)
        assert call.operands[:2] == ["2x5x4x64xbf16", "2x7x2x64xbf16"]


# Where there is no kernel


def warned(function, *structs, **keywords) -> tuple[str, list[str]]:
    """The program's text, and the warnings given while it was made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = lower(function, *structs, **keywords)
    assert {w.category for w in caught} <= {jax_r2p.FallbackWarning}
    return text, [str(w.message) for w in caught]


def self_attention(x, **keywords):
    return jax_r2p.attention(x, x, x, **keywords)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (
            struct(2, 5, 4, 64, dtype="float32"),
            "no kernel takes dtype float32; bfloat16 and float16 have one",
        ),
        (struct(2, 5, 4, 512), "no kernel takes head_dim=512; heads of up to 256 elements have one"),
    ],
)
def test_falls_back_with_one_warning(x, reason):
    text, messages = warned(self_attention, x)
    assert calls(text) == []
    assert messages == [
        f"jax_r2p.attention runs as plain XLA: {reason}. implementation='xla' does that without a warning."
    ]
    again, messages = warned(lambda x: self_attention(x, is_causal=True), x)
    assert calls(again) == []
    assert messages == []

    message = re.escape(f"implementation='r2p' was asked for, but {reason}.")
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(self_attention, implementation="r2p"), x)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids="{0[0]}.{0[1]}".format)
def test_other_gpus(monkeypatch, capability):
    """github.com/jax-ml/jax/issues/29148"""
    monkeypatch.setattr(_dispatch, "cuda_capabilities", lambda: frozenset({capability}))
    reason = f"no kernel for compute capability {capability[0]}.{capability[1]}; 9.0 (Hopper) has one"
    text, (message,) = warned(self_attention, QUERY)
    assert calls(text) == []
    assert reason in message
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        lower(functools.partial(self_attention, implementation="r2p"), QUERY)


@pytest.mark.parametrize("present", [frozenset(), frozenset({(9, 0)})], ids=["no GPU", "Hopper"])
def test_hopper(monkeypatch, present):
    monkeypatch.setattr(_dispatch, "cuda_capabilities", lambda: present)
    text, messages = warned(self_attention, QUERY)
    assert [call.variant for call in calls(text)] == ["fwd_bf16_d64_none"]
    assert messages == []


@pytest.mark.parametrize("platform", ["cpu", "rocm", "tpu"])
def test_other_platforms(platform):
    reason = f"the kernels run on NVIDIA Hopper GPUs, and this is for platform {platform}"
    text, (message,) = warned(self_attention, QUERY, platforms=(platform,))
    assert calls(text) == []
    assert reason in message
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        lower(functools.partial(self_attention, implementation="r2p"), QUERY, platforms=(platform,))


def test_running_on_cpu():
    """The same through a call: with the kernel demanded it fails, else it warns once and computes."""
    x = jnp.ones((2, 5, 4, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="this is for platform cpu"):
        self_attention(x, implementation="r2p")
    with pytest.warns(jax_r2p.FallbackWarning, match="this is for platform cpu"):
        out = self_attention(x, is_causal=True)
    np.testing.assert_array_equal(out, self_attention(x, is_causal=True, implementation="xla"))


def test_two_platforms_in_one_program():
    """The platform decides, not this process: the CUDA branch has the kernel, the CPU branch has not."""
    text, (message,) = warned(self_attention, QUERY, platforms=("cpu", "cuda"))
    assert len(calls(text)) == 1
    assert "stablehlo.case" in text
    assert "this is for platform cpu" in message


def test_symbolic_batch_size_exports():
    (b,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, 5, 4, 64), jnp.bfloat16)
    with pytest.warns(jax_r2p.FallbackWarning, match="no kernel takes symbolic dimensions"):
        exported = jax.export.export(jax.jit(self_attention), platforms=("cuda",))(x)
    assert TARGET not in exported.mlir_module()
    with pytest.warns(jax_r2p.FallbackWarning, match="this is for platform cpu"):
        exported = jax.export.export(jax.jit(self_attention), platforms=("cpu",))(x)
    array = jnp.ones((3, 5, 4, 64), jnp.bfloat16)
    np.testing.assert_array_equal(exported.call(array), self_attention(array, implementation="xla"))
