"""Head counts, head sharing, head dims, batch dims: where each query head finds its keys, and each result its
place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Call, check, kernel, poisoned
from numerics import check as compare
from numerics import expected

import jax_r2p

HEAD_DIMS = range(8, 257, 8)
WIDTHS = [(64, 64), (128, 128), (96, 96), (192, 192), (192, 128), (256, 256)]  # of every variant


@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"window": (40, 9)}], ids=["none", "causal", "window"]
)
@pytest.mark.parametrize("h", [64, 128])
def test_groups(mask, h):
    """Groups 1..8 over 1, 2 and 3 key heads (multi-query included), and counts of real models."""
    heads = [(g * k, k) for k in (1, 2, 3) for g in range(1, 9)] + [
        (28, 4),
        (32, 8),
        (40, 8),
        (71, 1),
        (14, 2),
    ]
    check([Call(t=70, s=133, b=2, n=n, k=k, h=h, **mask) for n, k in heads])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"window": (40, 9)}], ids=["none", "causal", "window"]
)
def test_head_dims(dtype, mask):
    """Every multiple of 8 up to 256; lanes past the head dim must count as zero, and the scale is that of the
    true one.

    https://github.com/Dao-AILab/flash-attention/issues/1290
    """
    check([Call(t=t, s=150, b=2, n=4, k=2, h=h, dtype=dtype, **mask) for h in HEAD_DIMS for t in (65, 150)])


@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"window": (40, 9)}], ids=["none", "causal", "window"]
)
def test_value_widths(mask):
    """Values narrower and wider than keys, in every variant that such a call can get."""
    widths = [(192, 128), (192, 8), (136, 104), (160, 128), (64, 128), (8, 256), (256, 8), (128, 64)]
    widths += [(64, 96), (96, 24), (200, 136), (128, 192)]
    check([Call(t=t, s=150, b=2, n=4, k=2, h=h, hv=hv, **mask) for h, hv in widths for t in (65, 230)])


@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"window": (40, 9)}], ids=["none", "causal", "window"]
)
def test_widths_that_are_padded(mask):
    """No multiple of 8: through wider copies, with the scale of the true width."""
    widths = [(1, 1), (7, 7), (12, 12), (65, 65), (100, 33), (33, 100), (191, 127), (249, 255)]
    calls = [Call(t=70, s=150, n=4, k=2, h=h, hv=hv, **mask) for h, hv in widths]
    check(calls, direct=False)


@pytest.mark.parametrize("h", [40, 128])
def test_strange_counts(h):
    """Batch times heads 1, prime, one more and one less than a multiple of the number of SMs (132)."""
    counts = [(1, 1), (7, 1), (1, 13), (131, 1), (19, 7), (1, 133), (263, 1), (53, 5)]
    check([Call(t=40, b=b, n=n, k=n, h=h, is_causal=True) for b, n in counts])


@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"window": (20_000, 5)}], ids=["none", "causal", "window"]
)
def test_sections_that_do_not_divide(mask):
    """Keys and values so long that few heads share the L2 cache, and numbers of heads that few divide."""
    check(
        [
            Call(t=130, s=32_771, b=1, n=5, k=5, h=128, **mask),  # 16 MiB a key head: one to a section
            Call(
                t=130, s=32_771, b=3, n=9, k=3, h=64, **mask
            ),  # shared heads, and sections across batch entries
            Call(t=65, s=16_390, b=5, n=7, k=7, h=128, **mask),
        ]
    )


@pytest.mark.parametrize(("h", "hv"), WIDTHS)
@pytest.mark.parametrize(
    "mask", [{}, {"is_causal": True}, {"window": (90, 20)}], ids=["none", "causal", "window"]
)
def test_more_tiles_than_the_gpu_holds(h, hv, mask):
    """CTAs go on to further tiles: of other heads, other batch entries and shared keys, partial ones too.

    At least 900 tiles, of which an H200 holds 132 to 396 at a time, and enough that causal CTAs take several.
    """
    check(
        [
            Call(t=700, b=10, n=24, k=24, h=h, hv=hv, **mask),
            Call(t=389, s=517, b=9, n=36, k=4, h=h, hv=hv, **mask),
            # short, and what rows see many keys of, have causal kernels of their own
            Call(t=200, b=40, n=16, k=16, h=h, hv=hv, **mask),
            *([Call(t=400, s=3100, b=20, n=16, k=16, h=h, hv=hv, **mask)] if h == 64 else []),
        ]
    )


@pytest.mark.parametrize("lead", [(), (3,), (1,), (2, 3), (1, 4, 1), (2, 1, 2, 2)], ids=str)
def test_leading_dims(lead):
    """Any number of leading dims is the same as one."""
    call = Call(t=67, s=90, b=int(np.prod(lead)), n=6, k=2, h=64, window=(30, 2))
    p = call.problem()
    arrays = [jnp.asarray(x).reshape(*lead, *x.shape[1:]) for x in (p.query, p.key, p.value)]
    out, residual = poisoned(lambda *a: kernel(*a, **call.keywords()), *arrays)
    assert out.shape == arrays[0].shape
    assert out.dtype == arrays[0].dtype
    assert residual.shape == (*lead, 6, 67)
    assert residual.dtype == jnp.float32
    [want] = expected([p])
    compare(
        np.asarray(out).reshape(p.query.shape),
        np.swapaxes(np.asarray(residual).reshape(-1, 6, 67), 1, 2),
        want,
        name=f"leading dims {lead}",
    )


def test_public_residual_has_queries_before_heads():
    call = Call(t=67, s=90, b=2, n=6, k=2)
    p = call.problem()
    out, residual = jax.jit(lambda *a: jax_r2p.attention(*a, return_residual=True, implementation="r2p"))(
        p.query, p.key, p.value
    )
    assert residual.shape == (2, 67, 6)
    [want] = expected([p])
    compare(out, residual, want, name=str(call))
