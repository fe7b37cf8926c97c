"""The call of a backward kernel, and the ring it keeps its sums in. Nothing needs a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
import re
import runpy
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launch_stub import LibraryError, StubProcess, make_backward_call, make_backward_variant

from jax_r2p import _ffi
from jax_r2p._manifest import InstallationError, Variant, load_manifest
from jax_r2p._spec import AttentionSpec

WIDE = make_backward_variant(tile_m=128, head_dim=96)
NARROW = make_backward_variant(tile_m=64, head_dim=64)
BATCH, HEADS, KV_HEADS, KEYS = 3, 4, 2, 70


class Recorder:
    """Stands in for `jax.ffi.ffi_call`: keeps calls by target; returns numbers that tell results apart."""

    def __init__(self):
        self.results, self.aliases, self.operands, self.attributes = {}, {}, {}, {}

    def __call__(self, target, results, *, input_output_aliases=None):
        assert target not in self.results
        self.results[target], self.aliases[target] = results, input_output_aliases

        def call(*operands, **attributes):
            self.operands[target], self.attributes[target] = operands, attributes
            first = 10 if target == _ffi.PREPROCESS_TARGET else 0
            return [jnp.full(x.shape, first + i, x.dtype) for i, x in enumerate(results)]

        return call


def arguments(queries: int, head_dim: int = 40, value_head_dim: int = 24) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(queries)
    shapes = {
        "query": (BATCH, queries, HEADS, head_dim),
        "key": (BATCH, KEYS, KV_HEADS, head_dim),
        "value": (BATCH, KEYS, KV_HEADS, value_head_dim),
        "out": (BATCH, queries, HEADS, value_head_dim),
        "dout": (BATCH, queries, HEADS, value_head_dim),
        "lse": (BATCH, HEADS, queries),
        "dlse": (BATCH, HEADS, queries),
    }
    rows = {
        name: rng.standard_normal(shape).astype("float32" if name in ("lse", "dlse") else "float16")
        for name, shape in shapes.items()
    }
    return {**rows, "scale": np.float32(0.5), "dquery_factor": np.float32(0.25)}


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
def recorder(monkeypatch):
    """In the place of XLA's call."""
    recorder = Recorder()
    monkeypatch.setattr(jax.ffi, "ffi_call", recorder)
    return recorder


LENGTHS = ("query_lengths", "key_lengths")
OPERANDS = ("query", "key", "value", "dout", "lse", "delta", "scale", "dquery_factor", *LENGTHS)
PREPARED = ("lse", "delta", "sums", "marks")


@pytest.mark.parametrize("variant", [WIDE, NARROW], ids=["128", "64"])
@pytest.mark.parametrize("queries", [1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("lengths", [None, (0, 1, 1000)])
def test_what_the_preprocess_kernel_is_asked_for(recorder, variant: Variant, queries: int, lengths):
    """Rows in whole tiles of the backward kernel, and what that one adds to; both take the same lengths."""
    operands = arguments(queries)
    if lengths:
        operands["query_lengths"] = jnp.asarray(lengths, jnp.int32)
    call(variant, **operands)

    names = ("out", "dout", "lse", "dlse", "query_lengths")
    given = dict(zip(names, recorder.operands[_ffi.PREPROCESS_TARGET], strict=True))
    for name in names[:4]:
        np.testing.assert_array_equal(given[name], operands[name])
    assert recorder.attributes[_ffi.PREPROCESS_TARGET] == {"variant": "pre_fp16_d64"}
    assert recorder.aliases[_ffi.PREPROCESS_TARGET] is None
    tiles = -(-queries // variant.tile_m)
    lse, delta, *_ = recorder.results[_ffi.PREPROCESS_TARGET]
    for rows in (lse, delta):
        assert (rows.shape, rows.dtype) == ((BATCH, HEADS, tiles * variant.tile_m), jnp.float32)

    taken = dict(zip((*OPERANDS, *PREPARED[2:]), recorder.operands[_ffi.BACKWARD_TARGET], strict=True))
    for number, name in enumerate(PREPARED, start=10):
        assert (taken[name] == number).all(), name
    for name in ("query", "key", "value", "dout", "scale", "dquery_factor"):
        np.testing.assert_array_equal(taken[name], operands[name])
    for lengths_of_queries in (given["query_lengths"], taken["query_lengths"]):
        np.testing.assert_array_equal(lengths_of_queries, np.asarray(lengths or (), np.int32))
    assert taken["key_lengths"].shape == (0,)


@pytest.mark.parametrize("mask", ["window", "causal"])
@pytest.mark.parametrize("variant", [WIDE, NARROW], ids=["128", "64"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_and_marks(recorder, variant: Variant, mask: str, deterministic: bool):
    variant = dataclasses.replace(variant, mask=mask)
    call(variant, deterministic=deterministic, **arguments(200))
    tiles = -(-200 // variant.tile_m)
    plan = _ffi.plan_sums(
        variant, BATCH * KV_HEADS, HEADS // KV_HEADS, 200, KEYS, deterministic=deterministic
    )
    sums, marks = recorder.operands[_ffi.BACKWARD_TARGET][10:]
    assert (sums.shape, sums.dtype) == ((plan.slots, tiles, variant.tile_m * variant.head_dim), jnp.float32)
    assert (marks.shape, marks.dtype) == ((plan.slots, 2 + tiles), jnp.int32)
    aliases = recorder.aliases[_ffi.BACKWARD_TARGET]
    assert aliases == {10: 3, 11: 4}
    for operand, result in aliases.items():
        aliased = recorder.operands[_ffi.BACKWARD_TARGET][operand]
        like = recorder.results[_ffi.BACKWARD_TARGET][result]
        assert (like.shape, like.dtype) == (aliased.shape, aliased.dtype)
    attributes = recorder.attributes[_ffi.BACKWARD_TARGET]
    assert [attributes[name] for name in ("together", "lag", "deterministic")] == [
        plan.together,
        plan.lag,
        deterministic,
    ]


@pytest.mark.parametrize(("value_head_dim", "name"), [(72, "pre_fp16_d128"), (200, "pre_fp16_d256")])
def test_wide_values_have_a_preprocess_kernel_of_their_own(recorder, value_head_dim: int, name: str):
    variant = dataclasses.replace(WIDE, value_head_dim=256)
    call(variant, **arguments(70, value_head_dim=value_head_dim))
    assert recorder.attributes[_ffi.PREPROCESS_TARGET] == {"variant": name}


def test_a_build_with_no_preprocess_kernel(recorder, monkeypatch):
    manifest = dataclasses.replace(load_manifest(), variants=())
    monkeypatch.setattr(_ffi, "load_manifest", lambda: manifest)
    monkeypatch.setattr(_ffi, "register", lambda: None)
    with pytest.raises(InstallationError, match=rf"no preprocess kernel for {WIDE.name}\. Reinstall"):
        call(WIDE, **arguments(70))


@pytest.mark.parametrize("variant", [WIDE, NARROW], ids=["128", "64"])
@pytest.mark.parametrize("queries", [1, 64, 129])
def test_results_are_finished(recorder, variant: Variant, queries: int):
    """They are the kernel's first three, of the types of what they are cotangents of."""
    operands = arguments(queries)
    for i, (got, like) in enumerate(zip(call(variant, **operands), ("query", "key", "value"), strict=True)):
        assert (got.shape, got.dtype) == (operands[like].shape, operands[like].dtype)
        assert (got == i).all()


# The ring of sums.

# Shapes of query and key; what shares keys is grouped heads, or batch entries.
RINGS = {
    "many short heads": ((256, 128, 32, 64), (256, 128, 32, 64)),
    "many short heads, grouped": ((64, 100, 32, 64), (64, 100, 4, 64)),
    "long heads": ((1, 8192, 32, 64), (1, 8192, 32, 64)),
    "long heads, grouped": ((2, 8192, 32, 64), (2, 8192, 8, 64)),
    "one long head": ((1, 1 << 20, 1, 64), (1, 1 << 20, 1, 64)),
    "one long head of keys": ((1, 1 << 17, 16, 64), (1, 1 << 17, 1, 64)),
    "repeated keys": ((48, 512, 4, 64), (16, 512, 2, 64)),
    "keys of one place": ((12, 512, 4, 64), (1, 512, 1, 64)),
    "few keys": ((8, 70_000, 8, 64), (8, 17, 4, 64)),
}
WINDOW_RINGS = [
    *((69, 1, 66), (552, 1, 66), (5, 1, 2), (20, 1, 2), (1, 1, 1)),
    *((16, 1, 1), (132, 1, 19), (48, 1, 1), (64, 1, 32)),
]
CAUSAL_RINGS = [
    *((410, 204, 1), (2048, 256, 1), (8, 3, 1), (32, 3, 1), (1, 1, 1)),
    *((16, 1, 1), (192, 32, 1), (48, 1, 1), (64, 2, 16)),
]
TWICE = dataclasses.replace(NARROW, min_blocks=2)
CAUSAL = dataclasses.replace(WIDE, mask="causal")
CAUSAL_TWICE = dataclasses.replace(TWICE, mask="causal")
PLANNED = {
    "128": WIDE,
    "64": NARROW,
    "64, two an SM": TWICE,
    "causal": CAUSAL,
    "causal, two an SM": CAUSAL_TWICE,
}


def ring_of(variant: Variant, query, key, *, deterministic: bool = False) -> tuple[int, int, _ffi.SumsPlan]:
    """Places, sharers and the plan."""
    places = key[0] * key[2]
    sharers = query[0] * query[2] // places
    plan = _ffi.plan_sums(variant, places, sharers, query[1], key[1], deterministic=deterministic)
    return places, sharers, plan


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
@pytest.mark.parametrize("variant", PLANNED.values(), ids=PLANNED.keys())
@pytest.mark.parametrize("shapes", RINGS.values(), ids=RINGS.keys())
def test_rings_are_small(variant: Variant, shapes, deterministic: bool):
    """For the heads that run at once and little more, and none with slots that nothing uses."""
    places, sharers, plan = ring_of(variant, *shapes, deterministic=deterministic)
    is_causal = variant.mask == "causal"
    at_once = math.ceil(132 * variant.min_blocks / math.ceil(shapes[1][1] / variant.tile_n))
    between = plan.lag * plan.together
    # What runs at once cannot come to the sums that it finishes itself. Causal heads differ in length.
    assert min(places, at_once + is_causal) <= between < min(places, at_once + is_causal) + plan.together
    assert plan.slots == min(places, between + plan.together + 2) * sharers


@pytest.mark.parametrize("variant", PLANNED.values(), ids=PLANNED.keys())
@pytest.mark.parametrize("shapes", RINGS.values(), ids=RINGS.keys())
def test_heads_that_start_together(variant: Variant, shapes):
    """Causal ones, two at least and as many as L2 has room for; but none that wait for one of their head."""
    places, _, plan = ring_of(variant, *shapes)
    head_bytes = 2 * shapes[0][1] * (variant.head_dim + variant.value_head_dim)
    if variant.mask == "causal":
        assert plan.together <= min(2, places) or plan.together * head_bytes <= 2**23
        assert plan.together == places or (plan.together >= 2 and (plan.together + 1) * head_bytes > 2**23)
    else:
        assert plan.together == 1
    assert ring_of(variant, *shapes, deterministic=True)[2].together == 1


def test_rings_that_are_known():
    """Slots, together and lag. Blocks have 80 keys."""
    assert [tuple(ring_of(WIDE, *shapes)[2]) for shapes in RINGS.values()] == WINDOW_RINGS
    assert [tuple(ring_of(CAUSAL, *shapes)[2]) for shapes in RINGS.values()] == CAUSAL_RINGS


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
def test_the_launcher_takes_the_rings(deterministic: bool):
    with StubProcess() as process:
        for name, variant in PLANNED.items():
            variant = dataclasses.replace(variant, name=name)
            process.add(variant, cubin="made up")
            for query, key in RINGS.values():
                _, _, plan = ring_of(variant, query, key, deterministic=deterministic)
                call = make_backward_call(variant, query, key, deterministic=deterministic, **plan._asdict())
                process.launch(call)


class Ring(NamedTuple):
    """What the order and the waiting of thread blocks follow from; `blocks` are those of a place."""

    places: int
    sharers: int
    blocks: int
    slots: int
    together: int
    lag: int


def in_order(ring: Ring, *, deterministic: bool) -> list[tuple[int, int]]:
    """Place and block of each thread block that has keys."""
    blocks = range(ring.blocks)
    return [
        (place, block)
        for first in range(0, ring.places, ring.together)
        for block in (reversed(blocks) if deterministic else blocks)
        for place in range(first, min(first + ring.together, ring.places))
    ]


def awaited(ring: Ring, *, deterministic: bool):
    """Yields, for each thread block, its number and those of all that it waits for."""
    order = in_order(ring, deterministic=deterministic)
    numbers = {owner: number for number, owner in enumerate(order)}
    first_to_finish = ring.lag * ring.together * ring.blocks

    def all_of(place: int) -> set[int]:
        return {numbers[place, block] for block in range(ring.blocks)}

    for number in range(len(order) + first_to_finish):
        waits = set()
        if number < len(order):
            place, block = order[number]
            # Before it adds to a slot: all that finished what was in it.
            for head in range(place * ring.sharers, (place + 1) * ring.sharers):
                if head >= ring.slots:
                    waits |= {
                        first_to_finish + other for other in all_of((head - ring.slots) // ring.sharers)
                    }
            if deterministic:
                # Before it adds to a tile: the blocks after it, as far as they add to that.
                waits |= {numbers[place, other] for other in range(block + 1, ring.blocks)}
        if number >= first_to_finish:
            # Before it finishes sums: all that add to them.
            waits |= all_of(order[number - first_to_finish][0])
        yield number, waits


def waits_for_lower_numbers_only(ring: Ring, *, deterministic: bool) -> bool:
    return all(
        other < number for number, waits in awaited(ring, deterministic=deterministic) for other in waits
    )


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
def test_waiting_comes_to_an_end(deterministic: bool):
    """Whatever the shape: thread blocks start in order, so those of lower numbers are running or done."""
    rng = np.random.default_rng(0)
    smaller_last_groups = 0
    for _ in range(300):
        places, sharers, keys = (int(rng.integers(1, most)) for most in (40, 7, 1500))
        # Long ones too, so that groups of few heads are among them.
        queries = int(2 ** rng.uniform(0, 17))
        variant = dataclasses.replace(
            WIDE,
            tile_n=int(rng.choice([64, 80, 128])),
            min_blocks=int(rng.choice([1, 2])),
            mask=str(rng.choice(["none", "causal"])),
        )
        plan = _ffi.plan_sums(variant, places, sharers, queries, keys, deterministic=deterministic)
        ring = Ring(places, sharers, math.ceil(keys / variant.tile_n), *plan)
        assert waits_for_lower_numbers_only(ring, deterministic=deterministic), ring
        smaller_last_groups += plan.together < places and places % plan.together != 0
    assert deterministic or smaller_last_groups >= 10


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
def test_the_launcher_refuses_rings_that_may_never_end(deterministic: bool):
    """All of them, and no others; but none with slots that nothing uses, nor with idle groups."""
    blocks = 3
    with StubProcess() as process:
        process.add(WIDE, cubin="made up")
        for places, sharers in itertools.product(range(1, 6), range(1, 4)):
            heads = places * sharers
            for slots, together in itertools.product(range(1, heads + 1), range(1, places + 1)):
                for lag in range(math.ceil(places / together) + 1):
                    call = make_backward_call(
                        WIDE,
                        (1, 9, heads, 64),
                        (1, WIDE.tile_n * blocks, places, 64),
                        slots=slots,
                        together=together,
                        lag=lag,
                        deterministic=deterministic,
                    )
                    try:
                        process.launch(call)
                        taken = True
                    except LibraryError as error:
                        assert re.match("(sums|lag): ", error.message), error  # noqa: PT017
                        taken = False
                    ring = Ring(places, sharers, blocks, slots, together, lag)
                    assert taken == waits_for_lower_numbers_only(ring, deterministic=deterministic), ring


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
def test_the_sanitizer_sees_slots_that_are_taken_again(deterministic: bool, monkeypatch):
    """In every kernel that tools/sanitize_cases.py runs, of heads that start together or one by one."""
    file = pathlib.Path(__file__).parents[1] / "tools" / "sanitize_cases.py"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as the file does
    cases = runpy.run_path(str(file))
    queries, keys, heads, places = cases["RING_SIZE"]
    for variant in _ffi.load_manifest().variants:
        if variant.role == "backward" and variant.head_dim in (64, 128):
            width = variant.head_dim
            monkeypatch.setattr(_ffi, "_TOGETHER_BYTES", cases["RING_TOGETHER"] * queries * 2 * width * 2)
            plan = _ffi.plan_sums(
                variant, places, heads // places, queries, keys, deterministic=deterministic
            )
            is_causal = variant.mask == "causal"
            assert plan.slots < heads
            assert plan.together == (cases["RING_TOGETHER"] if is_causal and not deterministic else 1)
            assert plan.together == 1 or places % plan.together


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


def the_call(text: str, target: str = _ffi.BACKWARD_TARGET) -> str:
    (line,) = (line for line in text.splitlines() if f"custom_call @{target}(" in line)
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
    ring = ["12x2x12288xf32", "12x4xi32"]
    assert operands == [
        *("3x200x4x40xf16", "3x70x2x40xf16", "3x70x2x24xf16", "3x200x4x24xf16"),
        *("3x4x256xf32", "3x4x256xf32", "f32", "f32", *counts, *ring),
    ]
    assert results == ["3x200x4x40xf16", "3x70x2x40xf16", "3x70x2x24xf16", *ring]
    config = re.search(r"mhlo\.backend_config = \{([^}]*)\}", line)
    assert config
    assert dict(item.split(" = ") for item in config[1].split(", ")) == {
        "variant": f'"{WIDE.name}"',
        "window_left": "9 : i32",
        "window_right": "2 : i32",
        "kv_repeat": "1 : i64",
        "kv_inner": "1 : i64",
        "together": "1 : i64",
        "lag": "6 : i64",
        "deterministic": str(deterministic).lower(),
    }


@pytest.mark.parametrize("lengths", [False, True])
def test_interface_of_the_preprocess_kernel(lengths: bool):
    """The same for what prepares a backward kernel."""
    line = the_call(lower(WIDE, lengths=lengths), _ffi.PREPROCESS_TARGET)
    operands, results = types(line)
    rows = ["3x200x4x24xf16"] * 2 + ["3x4x200xf32"] * 2
    assert operands == [*rows, "3xi32" if lengths else "0xi32"]
    assert results == ["3x4x256xf32", "3x4x256xf32", "12x2x12288xf32", "12x4xi32"]
    assert re.search(r'mhlo\.backend_config = \{variant = "pre_fp16_d64"\}', line)
    assert "output_operand_alias<" not in line
    rank4, rank3, rank2, rank1 = (
        f"dense<{list(reversed(range(rank))) if rank > 1 else 0}> : tensor<{rank}xindex>"
        for rank in (4, 3, 2, 1)
    )
    assert f"operand_layouts = [{', '.join([rank4, rank4, rank3, rank3, rank1])}]" in line
    assert f"result_layouts = [{', '.join([rank3, rank3, rank3, rank2])}]" in line


def test_results_alias_their_zeros():
    line = the_call(lower(WIDE))
    aliases = re.findall(
        r"output_operand_alias<output_tuple_indices = \[(\d+)\], operand_index = (\d+), "
        r"operand_tuple_indices = \[\]>",
        line,
    )
    assert sorted(aliases) == [("3", "10"), ("4", "11")]


def test_unbounded_windows_and_shared_keys():
    line = the_call(lower(NARROW, spec=AttentionSpec(), kv_repeat=3, kv_inner=2))
    for attribute in (
        f"window_left = {1 << 29} : i32",
        f"window_right = {1 << 29} : i32",
        "kv_repeat = 3 : i64",
        "kv_inner = 2 : i64",
        "together = 1 : i64",
        "lag = 6 : i64",
    ):
        assert attribute in line


def test_layouts_are_row_major():
    rank4, rank3 = "dense<[3, 2, 1, 0]> : tensor<4xindex>", "dense<[2, 1, 0]> : tensor<3xindex>"
    rank2 = "dense<[1, 0]> : tensor<2xindex>"
    rank1, rank0 = "dense<0> : tensor<1xindex>", "dense<> : tensor<0xindex>"
    line = the_call(lower(WIDE))
    operands = [*[rank4] * 4, rank3, rank3, rank0, rank0, rank1, rank1, rank3, rank2]
    assert f"operand_layouts = [{', '.join(operands)}]" in line
    assert f"result_layouts = [{', '.join([rank4, rank4, rank4, rank3, rank2])}]" in line


def test_the_library_takes_a_backward_kernel():
    """Its role and parameters reach the library as R2pVariant has them."""
    variant = make_backward_variant(name="made_up_backward")
    library = _ffi.load_library()
    _ffi._add_variant(library, variant, b"made up")
    with pytest.raises(
        InstallationError, match=r"'made_up_backward', parameter \d: expected out_map .*; got dout_map"
    ):
        _ffi._add_variant(library, dataclasses.replace(variant, role="forward"), b"made up")
