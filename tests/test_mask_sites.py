"""Following mask bits through machine code, on assembly written by hand. The kernels: test_sass_gates.py."""

from __future__ import annotations

import pytest

from jax_r2p.aot import mask_sites, sass

# Scores of 64 x 32: 8 elements in each of a thread's two rows, registers R24 to R39.
SCORES = "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT"


def code(*lines: str) -> sass.Kernel:
    return sass.parse("\n".join(f"/*{16 * n:04x}*/ {line} ;" for n, line in enumerate(lines)))


def decided(site: mask_sites.Site) -> list[tuple[int, int, int, int]]:
    return [(s.test.word, s.bit, s.row, s.element) for s in site.selections]


def test_bytes_signs_and_single_bits() -> None:
    site = mask_sites.trace(
        code(
            SCORES,
            "SHF.R.U32.HI R2, RZ, R4, R3",
            "R2P PR, R2, 0x7f",
            "FSEL R24, R24, -INF , P0",
            "FSEL R5, R25.reuse, -INF , P1",
            "FSEL R28, R28, -INF , P2",
            "LOP3.LUT P1, RZ, R2.reuse, 0x80, RZ, 0xc0, !PT",
            "FSEL R37, R37, -INF , P1",
            "SHF.L.U32 R2, R4, R3, RZ",  # the same register, another word
            "R2P PR, R2.reuse.B1, 0x7",
            "FSEL R26, R26, -INF , P1",
            "ISETP.GT.AND P0, PT, R2, -0x1, PT",
            "FSEL R39, R39, -INF , !P0",
            "FSEL R9, R9, RZ, !P2",  # of no score
        )
    )
    assert decided(site) == [
        *((0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 0, 2), (0, 7, 0, 7)),
        *((1, 9, 1, 0), (1, 31, 1, 7)),
    ]
    assert [s.column for s in site.selections] == [0, 1, 8, 25, 0, 25]
    assert [mask_sites.describe_bits(test) for test in site.tests] == [
        "bits 0-6 -> P0-P6",
        "bit 7 -> P1, by itself",
        "bits 8-10 -> P0-P2",
        "bit 31 -> P0, by the sign, kept by !P0",
    ]
    assert [mask_sites.describe_word(test.made_by) for test in site.tests] == [
        *["ones below the upper bound"] * 2,
        *["ones from the lower bound on"] * 2,
    ]


def test_a_predicate_that_is_kept_in_a_register() -> None:
    site = mask_sites.trace(
        code(
            SCORES,
            "LOP3.LUT R2, R4, R3, RZ, 0xc0, !PT",
            "R2P PR, R2, 0x7f",
            "P2R R7, PR, RZ, 0x8",
            "R2P PR, R2.B1, 0x7f",
            "ISETP.NE.AND P3, PT, R7, RZ, PT",
            "FSEL R29, R29, -INF , P3",
        )
    )
    assert decided(site) == [(0, 3, 0, 3)]


def test_a_predicate_that_was_overwritten_decides_nothing() -> None:
    site = mask_sites.trace(
        code(
            SCORES,
            "SHF.R.U32.HI R2, RZ, R4, R3",
            "R2P PR, R2, 0x7f",
            "ISETP.NE.AND P0, PT, R9, RZ, PT",
            "FSEL R24, R24, -INF , P0",
            "FSEL R25, R25, -INF , P1",
        )
    )
    assert decided(site) == [(0, 1, 0, 1)]


WORD = ("SHF.R.U32.HI R2, RZ, R4, R3", "R2P PR, R2, 0x7f")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (WORD, "no HGMMA that overwrites its accumulator"),
        (
            (SCORES, SCORES.replace("R24", "R88"), *WORD),
            r"range\(24, .* and \[range\(88, .*: which are masked",
        ),
        ((SCORES, "R2P PR, R2, 0x7f"), r"R2P PR, R2, 0x7f reads what this part did not make"),
        ((SCORES, *WORD, "FSEL R40, R40, -INF , P0"), "R40, R40, -INF , P0 selects no score"),
        ((SCORES, *WORD, "FSEL R24, R24, -INF , !P0"), "keeps a score where its bit is not set"),
        (
            (SCORES, *WORD, "ISETP.GT.AND P0, PT, R2, -0x1, PT", "FSEL R24, R24, -INF , P0"),
            "keeps a score where its bit is not set",
        ),
    ],
)
def test_refuses(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(sass.SassError, match=message):
        mask_sites.trace(code(*lines))


def test_layout_is_that_of_the_kernels_source() -> None:
    """Both are written down once: here from the registers, there from the scores."""
    mask = pytest.importorskip(
        "jax_r2p.kernels.mask", reason="needs the kernel compiler", exc_type=ImportError
    )
    scores = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT"
    for row in range(2):
        for element in range(64):
            register = f"R{24 + mask.score_index(row, element)}"
            selection = f"FSEL {register}, {register}, -INF , P0"
            [found] = mask_sites.trace(code(scores, *WORD, selection)).selections
            assert (found.row, found.element) == (row, element)
            assert found.column == mask.element_column(element)
    assert mask_sites.WORD == mask.WORD
