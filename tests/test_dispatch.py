"""Which kernel a call gets, or which reason: a pure function, and `explain`, which asks it."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

import jax_r2p
from jax_r2p import _dispatch
from jax_r2p._dispatch import HOPPER, choose
from jax_r2p._manifest import Variant, load_manifest
from jax_r2p._spec import UNBOUNDED, AttentionSpec

NONE, CAUSAL, WINDOW = AttentionSpec(), AttentionSpec(right=0), AttentionSpec(left=3, right=0)


def chosen(
    spec=NONE,
    *,
    t=64,
    s=64,
    n=4,
    k=2,
    h=64,
    hv=None,
    batch=(2,),
    dtype="bfloat16",
    capability=HOPPER,
    **keywords,
):
    """`hv`: the width of value; None for `h`."""
    query, key, value = (*batch, t, n, h), (*batch, s, k, h), (*batch, s, k, h if hv is None else hv)
    choice = choose(spec, query, key, value, jnp.dtype(dtype), capability, **keywords)
    return choice.name if isinstance(choice, Variant) else choice


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize(
    ("h", "hv", "widths"),
    [
        *[(h, h, "64") for h in (8, 40, 64)],
        *[(h, h, "96") for h in (65, 72, 96)],
        *[(h, h, "128") for h in (104, 120, 128)],
        *[(h, h, "192") for h in (136, 192)],
        *[(h, h, "256") for h in (200, 249, 256)],
        # Both have to fit, and of those that do the narrowest query decides first.
        (192, 128, "192v128"),
        (136, 8, "192v128"),
        (129, 127, "192v128"),
        (192, 136, "192"),
        (200, 128, "256"),
        (128, 64, "128"),
        (64, 128, "128"),
        (8, 65, "96"),
        (128, 129, "192"),
        (192, 200, "256"),
        (1, 256, "256"),
    ],
)
@pytest.mark.parametrize(("dtype", "short"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_the_narrowest_kernel_that_fits(dtype, short, h, hv, widths, mask):
    spec = {"none": NONE, "causal": CAUSAL, "window": WINDOW}[mask]
    assert chosen(spec, h=h, hv=hv, dtype=dtype) == f"fwd_{short}_d{widths}_{mask}"


@pytest.mark.parametrize(
    ("spec", "lengths", "wide"),
    [
        (AttentionSpec(left=767, right=0), {}, True),
        (AttentionSpec(left=766, right=0), {}, False),
        (AttentionSpec(left=300, right=467), {}, True),
        (AttentionSpec(left=None, right=7), {}, True),
        # No query can see more keys than there are.
        (AttentionSpec(left=400, right=400), {"s": 767}, False),
        (AttentionSpec(left=400, right=400), {"s": 768}, True),
    ],
)
def test_wide_windows_have_their_own_kernel(spec, lengths, wide):
    """From 768 keys a row on, where there is one; other widths and masks take what they have."""
    sizes = {"t": 1024, "s": 1024, **lengths}
    assert chosen(spec, h=128, **sizes) == "fwd_bf16_d128_window" + ("_wide" if wide else "")
    assert chosen(spec, h=64, **sizes) == "fwd_bf16_d64_window"


@pytest.mark.parametrize(("h", "least"), [(64, 3072), (128, 256)])
@pytest.mark.parametrize("queries", [7, 4096])
def test_long_causal_calls_have_larger_tiles(h, least, queries):
    assert chosen(CAUSAL, h=h, t=queries, s=least - 1) == f"fwd_bf16_d{h}_causal"
    assert chosen(CAUSAL, h=h, t=queries, s=least) == f"fwd_bf16_d{h}_causal_wide"


def test_a_width_that_has_to_be_padded():
    assert [_dispatch.padded_head_dim(width) for width in (1, 8, 9, 12, 249, 256)] == [8, 8, 16, 16, 256, 256]


@pytest.mark.parametrize(
    ("spec", "lengths", "mask"),
    [
        (CAUSAL, (1, 64), "none"),  # decoding
        (CAUSAL, (2, 64), "causal"),
        (WINDOW, (64, 4), "causal"),  # no query has more than three keys before its own
        (WINDOW, (64, 5), "window"),
        (AttentionSpec(left=63, right=63), (64, 64), "none"),
        (AttentionSpec(left=62, right=63), (64, 64), "window"),
    ],
)
def test_bounds_that_hide_nothing_cost_nothing(spec, lengths, mask):
    t, s = lengths
    assert chosen(spec, t=t, s=s) == f"fwd_bf16_d64_{mask}"


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"dtype": "float32"}, "no kernel takes dtype float32; bfloat16 and float16 have one"),
        ({"dtype": "float64"}, "no kernel takes dtype float64; bfloat16 and float16 have one"),
        ({"h": 257}, "no kernel takes head_dim=257; heads of up to 256 elements have one"),
        ({"h": 512}, "no kernel takes head_dim=512; heads of up to 256 elements have one"),
        ({"hv": 264}, "no kernel takes value_head_dim=264; heads of up to 256 elements have one"),
        ({"t": UNBOUNDED + 1}, f"no kernel takes T = {UNBOUNDED + 1}; at most {UNBOUNDED} has one"),
        ({"s": UNBOUNDED + 1}, f"no kernel takes S = {UNBOUNDED + 1}; at most {UNBOUNDED} has one"),
        (
            {"batch": (1 << 15, 1 << 14), "n": 4},
            f"no kernel takes batch size times N = {1 << 31}; at most {UNBOUNDED} has one",
        ),
        (
            {"t": 1 << 29, "n": 16},
            f"no kernel takes query of shape (2, {1 << 29}, 16, 64); "
            "less than 2^40 bytes in a batch entry has one",
        ),
        # Of the width that is padded to, and of the result, too.
        (
            {"t": 1 << 25, "n": 64, "h": 249},
            f"no kernel takes query of shape (2, {1 << 25}, 64, 249); "
            "less than 2^40 bytes in a batch entry has one",
        ),
        (
            {"t": 1 << 25, "n": 64, "h": 8, "hv": 256},
            f"no kernel takes out of shape (2, {1 << 25}, 64, 256); "
            "less than 2^40 bytes in a batch entry has one",
        ),
        (
            {"batch": (1 << 20,), "n": 16, "t": 64 * 128},
            f"no kernel takes {43 << 24} tiles of 192 query rows; at most {UNBOUNDED} has one",
        ),
    ],
)
def test_calls_without_a_kernel(keywords, reason):
    assert chosen(**keywords) == reason


@pytest.mark.parametrize(
    "capability", [(7, 0), (8, 0), (8, 9), (9, 1), (10, 0), (12, 0)], ids="{0[0]}.{0[1]}".format
)
def test_kernels_run_on_hopper_only(capability):
    """Code for sm_90a is no portable code. github.com/jax-ml/jax/issues/29148"""
    major, minor = capability
    assert chosen(capability=capability) == (
        f"no kernel for compute capability {major}.{minor}; 9.0 (Hopper) has one"
    )


def test_symbolic_sizes_have_no_kernel():
    (b,) = jax.export.symbolic_shape("b")
    assert chosen(batch=(b,)) == (
        "no kernel takes symbolic dimensions, got query (b, 64, 4, 64) and key (b, 64, 2, 64)"
    )


def test_role():
    """Kernels of another role do not count, and reasons name the role."""
    prepare = [v for v in load_manifest().variants if v.role == "preprocess"]
    forward = [v for v in load_manifest().variants if v.role == "forward"]
    assert chosen(variants=forward, role="backward") == "this build has no backward kernel"
    backward = [
        dataclasses.replace(v, role="backward", name=f"bwd{v.name[3:]}") for v in forward if v.head_dim <= 128
    ]
    variants = forward + backward + prepare
    assert chosen(CAUSAL, variants=variants) == "fwd_bf16_d64_causal"
    assert chosen(CAUSAL, variants=variants, role="backward") == "bwd_bf16_d64_causal"
    assert chosen(h=192, variants=variants, role="backward") == (
        "no backward kernel takes head_dim=192; heads of up to 128 elements have one"
    )


@pytest.mark.parametrize(
    ("dtype", "h", "hv", "name"),
    [
        *(("bfloat16", 64, 8, "pre_bf16_d64"), ("bfloat16", 64, 64, "pre_bf16_d64")),
        *(("bfloat16", 64, 65, "pre_bf16_d128"), ("float16", 192, 128, "pre_fp16_d128")),
        *(("float16", 8, 129, "pre_fp16_d256"), ("bfloat16", 256, 256, "pre_bf16_d256")),
    ],
)
@pytest.mark.parametrize("spec", [NONE, CAUSAL, WINDOW], ids=["none", "causal", "window"])
def test_what_prepares_a_backward_pass(spec, dtype, h, hv, name):
    """Depends on the dtype and on the width of value, and on nothing else."""
    assert chosen(spec, h=h, hv=hv, dtype=dtype, role="preprocess") == name


def test_backward_kernels_need_what_prepares_for_them():
    variants = [v for v in load_manifest().variants if v.role != "preprocess"]
    assert chosen(CAUSAL, variants=variants) == "fwd_bf16_d64_causal"
    assert chosen(CAUSAL, variants=variants, role="backward") == (
        "this build has no preprocess kernel for sm_90a, bf16, value_head_dim=64"
    )
    narrow = [*variants, *(v for v in load_manifest().variants if v.name == "pre_bf16_d64")]
    assert chosen(CAUSAL, variants=narrow, role="backward") == "bwd_bf16_d64_causal"
    assert chosen(CAUSAL, h=128, variants=narrow, role="backward") == (
        "this build has no preprocess kernel for sm_90a, bf16, value_head_dim=128"
    )


def test_a_backward_kernel_needs_few_enough_tiles_of_keys():
    """Its thread blocks are tiles of keys."""
    variant = dataclasses.replace(load_manifest().variants[0], role="backward", mask="none")
    prepare = [v for v in load_manifest().variants if v.role == "preprocess"]
    most = UNBOUNDED // 2**10 * variant.tile_n
    call = functools.partial(
        chosen, t=1, batch=(2**10,), n=1, k=1, h=8, variants=[variant, *prepare], role="backward"
    )
    assert call(s=most) == variant.name
    assert "tiles of" in call(s=most + 1)


def test_partial_build():
    """`python -m jax_r2p.aot --only ...` leaves others out."""
    variants = [v for v in load_manifest().variants if v.mask == "causal"]
    assert chosen(CAUSAL, variants=variants) == "fwd_bf16_d64_causal"
    assert chosen(NONE, variants=variants) == (
        "this build has no kernel for sm_90a, bfloat16, mask 'none', head_dim=64, value_head_dim=64"
    )
    assert chosen(variants=[]) == "this build has no kernel"


@pytest.mark.parametrize(
    ("present", "used"),
    [
        ([], HOPPER),  # lowering for another machine
        ([(9, 0)], HOPPER),
        ([(8, 0)], (8, 0)),
        ([(9, 0), (10, 0)], (10, 0)),  # the program may be run on either
        ([(12, 0), (8, 9)], (8, 9)),
    ],
    ids=str,
)
def test_capability_to_lower_for(monkeypatch, present, used):
    monkeypatch.setattr(_dispatch, "cuda_capabilities", lambda: frozenset(present))
    assert _dispatch.lowering_capability() == used


def test_capabilities_are_those_of_the_devices(monkeypatch):
    class Device:
        def __init__(self, compute_capability):
            self.compute_capability = compute_capability

    asked = []

    def local_devices(*, backend):
        asked.append(backend)
        return [Device("9.0"), Device("9.0"), Device("12.0")]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert _dispatch.cuda_capabilities() == {(9, 0), (12, 0)}
    assert asked == ["cuda"]


def test_warns_once_for_each_reason():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for reason in ("reason one", "reason two", "reason one"):
            _dispatch.warn_fallback(reason)
    assert [str(w.message).split(": ")[1].split(".")[0] for w in caught] == ["reason one", "reason two"]
    assert {w.category for w in caught} == {jax_r2p.FallbackWarning}


def test_warning_that_is_an_error_stays_one():
    """The first raise must not count as given."""
    for _ in range(2):
        with pytest.raises(jax_r2p.FallbackWarning, match="runs as plain XLA: a reason"):
            _dispatch.warn_fallback("a reason")


# explain


def explain(h=64, dtype="bfloat16", b=2, hv=None, **keywords):
    query, key, value = (
        jax.ShapeDtypeStruct((b, 64, n, width), jnp.dtype(dtype))
        for n, width in ((4, h), (2, h), (2, h if hv is None else hv))
    )
    return jax_r2p.explain(query, key, value, **keywords)


@pytest.fixture
def gpu(monkeypatch):
    """Makes this process look as if it had CUDA GPUs of these capabilities."""

    def pretend(*capabilities):
        monkeypatch.setattr(_dispatch, "cuda_capabilities", lambda: frozenset(capabilities))
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    return pretend


def test_explain_on_hopper(gpu):
    gpu((9, 0))
    explanation = explain(is_causal=True, return_residual=True)
    assert explanation == jax_r2p.Explanation("r2p", "fwd_bf16_d64_causal", None)
    assert str(explanation) == "Runs kernel fwd_bf16_d64_causal."
    assert explain(implementation="r2p").implementation == "r2p"
    assert explain(local_window_size=7, h=128, dtype="float16").variant == "fwd_fp16_d128_window"
    assert explain(h=192, hv=128).variant == "fwd_bf16_d192v128_none"
    assert explain(h=100).implementation == "r2p"  # by padding
    assert explain(h=512) == jax_r2p.Explanation(
        "xla", None, "no kernel takes head_dim=512; heads of up to 256 elements have one"
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids="{0[0]}.{0[1]}".format)
def test_explain_on_other_gpus(gpu, capability):
    gpu(capability)
    reason = f"no kernel for compute capability {capability[0]}.{capability[1]}; 9.0 (Hopper) has one"
    assert explain() == jax_r2p.Explanation("xla", "fwd_bf16_d64_none", reason)
    assert explain(implementation="r2p") == jax_r2p.Explanation(None, "fwd_bf16_d64_none", reason)


def test_explain_on_cpu():
    explanation = explain()
    reason = "the kernels run on NVIDIA Hopper GPUs, and this is for platform cpu"
    assert explanation == jax_r2p.Explanation("xla", "fwd_bf16_d64_none", reason)
    assert str(explanation) == (
        f"Runs as plain XLA: {reason}. A Hopper GPU can run kernel fwd_bf16_d64_none."
    )
    assert str(explain(implementation="r2p")).startswith(f"Raises NotImplementedError: {reason}.")


def test_explain_on_a_gpu_that_is_not_cuda(gpu):
    gpu()
    assert explain().reason == "the kernels run on NVIDIA Hopper GPUs, and this is for platform gpu"


def test_explain_says_what_is_wrong_with_the_call_first():
    """No GPU would help, so the missing one is not the reason."""
    explanation = explain(dtype="float32")
    assert explanation == jax_r2p.Explanation(
        "xla", None, "no kernel takes dtype float32; bfloat16 and float16 have one"
    )
    assert str(explanation) == f"Runs as plain XLA: {explanation.reason}."


def test_explain_the_reference(gpu):
    gpu((9, 0))
    assert explain(implementation="xla") == jax_r2p.Explanation(
        "xla", "fwd_bf16_d64_none", "implementation='xla' was asked for"
    )


def test_explain_nothing_to_do(gpu):
    gpu((9, 0))
    assert explain(b=0) == jax_r2p.Explanation("xla", None, "there is nothing to compute")


def test_explain_takes_lengths():
    """They change nothing, but are checked: arrays, structs or lists."""
    for lengths in (jax.ShapeDtypeStruct((2,), jnp.int32), jnp.zeros(2, jnp.int32), [3, 4]):
        explanation = explain(is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths)
        assert explanation == explain(is_causal=True)
    with pytest.raises(TypeError, match="query_seq_lengths must have dtype int32, got float32"):
        explain(query_seq_lengths=jax.ShapeDtypeStruct((2,), jnp.float32))


def test_explain_takes_arrays_and_computes_nothing():
    query = jnp.zeros((64, 4, 64), jnp.bfloat16)
    assert jax_r2p.explain(query, query, query).variant == "fwd_bf16_d64_none"
    seen = []
    jax.eval_shape(lambda x: seen.append(jax_r2p.explain(x, x, x, is_causal=True)), query)
    assert seen[0].variant == "fwd_bf16_d64_causal"
