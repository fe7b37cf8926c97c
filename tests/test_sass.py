"""The machine code of the installed kernels: masks by R2P but not in the interior, no spills, no waits."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import textwrap

import pytest

from jax_r2p._manifest import FOLDER, Variant, load_manifest, package_file
from jax_r2p.aot import sass
from jax_r2p.aot.variants import VARIANTS

ROWS_OF_THREAD = 2
MATMUL_DEPTH = 16
"""Columns of A that one WGMMA of a 16-bit type takes."""

MASKED_LOOPS = {"none": 0, "causal": 1, "window": 2}
"""Loops over key blocks that a bound crosses: the right one, then the left one."""


@functools.cache
def disassemble(name: str) -> tuple[Variant, sass.Kernel]:
    (variant,) = [variant for variant in load_manifest().variants if variant.name == name]
    return variant, sass.disassemble(package_file(FOLDER, variant.file).read_bytes())


@pytest.fixture(params=VARIANTS)
def kernel(request: pytest.FixtureRequest) -> tuple[Variant, sass.Kernel]:
    try:
        return disassemble(request.param)
    except sass.NvdisasmNotFoundError as error:
        pytest.skip(str(error))


def r2p_of_a_row(variant: Variant) -> int:
    """One R2P takes a byte of a mask word. A thread has a quarter of a row's columns, 32 to a word."""
    elements = variant.tile_n // 4
    return sum(-(-min(32, elements - start) // 8) for start in range(0, elements, 32))


def matmuls_of_a_block(variant: Variant) -> int:
    """S = Q K^T runs over the head dim, O += P V over the keys of the block."""
    return variant.head_dim // MATMUL_DEPTH + variant.tile_n // MATMUL_DEPTH


def loops_over_blocks(code: sass.Kernel) -> tuple[list[sass.Code], list[sass.Code]]:
    """The consumers' loops over key blocks: those that mask, and those that do not."""
    loops = code.innermost_loops("HGMMA", "MUFU")
    return [loop for loop in loops if "R2P" in loop], [loop for loop in loops if "R2P" not in loop]


def test_loops(kernel: tuple[Variant, sass.Kernel]) -> None:
    variant, code = kernel
    masked, interior = loops_over_blocks(code)
    assert (len(masked), len(interior)) == (MASKED_LOOPS[variant.mask], 1)


def test_masks_expand_by_r2p(kernel: tuple[Variant, sass.Kernel]) -> None:
    variant, code = kernel
    masked, _ = loops_over_blocks(code)
    words = r2p_of_a_row(variant)
    # The end of the keys is the same for both rows, so they share its words. Other bounds move by row.
    first_block = words * (1 if variant.mask == "none" else ROWS_OF_THREAD)
    assert [loop.count("R2P") for loop in masked] == [words * ROWS_OF_THREAD] * len(masked)
    assert code.count("R2P") == first_block + len(masked) * words * ROWS_OF_THREAD


def test_masked_blocks_have_no_compare_per_element(kernel: tuple[Variant, sass.Kernel]) -> None:
    variant, code = kernel
    elements = ROWS_OF_THREAD * variant.tile_n // 4
    for loop in loops_over_blocks(code)[0]:
        assert loop.count("FSEL") >= elements, "every score is kept or not"
        # One bit in eight is tested on its own, mostly by LOP3. Counters and waits need a few compares too.
        assert loop.count("ISETP") < elements // 4


def test_interior_has_no_mask(kernel: tuple[Variant, sass.Kernel]) -> None:
    _, code = kernel
    (interior,) = loops_over_blocks(code)[1]
    assert interior.counts(["R2P", "FSEL"]) == {"R2P": 0, "FSEL": 0}


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="cutlass is not installed")
def test_compare_lowering_masks_by_compares() -> None:
    """The second lowering: no R2P, and two compares an element where a window has two bounds."""
    from jax_r2p.aot.compile import compile_variants

    row = VARIANTS["fwd_bf16_d64_window"]
    config = dataclasses.replace(row.config, mask_lowering="compare")
    [compiled] = compile_variants([dataclasses.replace(row, config=config)])
    try:
        code = sass.disassemble(compiled.cubin)
    except sass.NvdisasmNotFoundError as error:
        pytest.skip(str(error))
    elements = ROWS_OF_THREAD * config.tile_n // 4
    loops = sorted((loop.count("ISETP") for loop in code.innermost_loops("HGMMA", "MUFU")), reverse=True)
    assert code.count("R2P") == 0
    # Both bounds, the left one alone, and none.
    assert loops[0] >= 2 * elements
    assert elements <= loops[1] < 2 * elements
    assert loops[2] < elements // 2


def test_no_local_memory(kernel: tuple[Variant, sass.Kernel]) -> None:
    variant, code = kernel
    spilled = code.count("LDL") + code.count("STL")
    assert (spilled > 0) == (VARIANTS[variant.name].declared_spills > 0)
    for loop in code.innermost_loops("HGMMA"):
        assert loop.counts(["LDL", "STL"]) == {"LDL": 0, "STL": 0}


def test_matmuls(kernel: tuple[Variant, sass.Kernel]) -> None:
    variant, code = kernel
    matmuls = matmuls_of_a_block(variant)
    masked, interior = loops_over_blocks(code)
    assert {loop.count("HGMMA") for loop in masked + interior} == {matmuls}
    # The first scores before the loops and the last values after them make one more block.
    assert code.count("HGMMA") == (len(masked + interior) + 1) * matmuls


def test_matmuls_stay_in_flight(kernel: tuple[Variant, sass.Kernel]) -> None:
    """One wait per group of matmuls: where the compiler puts them in series, each has its own."""
    _, code = kernel
    masked, interior = loops_over_blocks(code)
    groups = 2
    assert [loop.count("WARPGROUP.DEPBAR") for loop in masked + interior] == [groups] * len(masked + interior)
    assert code.count("WARPGROUP.DEPBAR") == (len(masked + interior) + 1) * groups


def test_registers_move_once_per_role(kernel: tuple[Variant, sass.Kernel]) -> None:
    """The producer gives registers away, the consumers take them."""
    _, code = kernel
    assert code.count("USETMAXREG") == 2


def assembly(text: str) -> sass.Kernel:
    return sass.parse(textwrap.dedent(text))


# A loop over blocks (0x20) around a wait (0x30), whose slow path was moved behind the end and jumps back.
WAIT_IN_LOOP = """
    .text.kernel:
            /*0000*/              MOV R0, 0x400 ;
            /*0010*/              ISETP.GT.AND P0, PT, R0, R1, PT ;
    .L_x_0:
            /*0020*/              HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
    .L_x_1:
            /*0030*/              SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R0], R2 ;
            /*0040*/         @!P1 BRA `(.L_x_3) ;
    .L_x_2:
            /*0050*/              R2P PR, R9.B1, 0x7f ;
            /*0060*/          @P0 BRA `(.L_x_0) ;
            /*0070*/              EXIT ;
    .L_x_3:
            /*0080*/              SYNCS.PHASECHK.TRANS64 P1, [R0], R2 ;
            /*0090*/         @!P1 BRA `(.L_x_1) ;
            /*00a0*/              BRA `(.L_x_2) ;
    .L_x_4:
            /*00b0*/              BRA `(.L_x_4);
"""


def addresses(code: sass.Code) -> list[int]:
    return [instruction.address for instruction in code.instructions]


def test_parse() -> None:
    code = assembly(WAIT_IN_LOOP)
    assert len(code) == 12
    assert code.instructions[4] == sass.Instruction(0x40, "BRA", "`(.L_x_3)", guard="!P1")
    assert code.counts(["SYNCS", "SYNCS.PHASECHK", "SYNC", "R2P", "BAR"]) == {
        "SYNCS": 2,
        "SYNCS.PHASECHK": 2,
        "SYNC": 0,
        "R2P": 1,
        "BAR": 0,
    }


def test_loops_take_in_what_was_moved_away() -> None:
    outer, inner = assembly(WAIT_IN_LOOP).loops()
    assert addresses(outer) == [0x20, 0x30, 0x40, 0x50, 0x60, 0x80, 0x90, 0xA0]
    assert addresses(inner) == [0x30, 0x40, 0x80, 0x90]


def test_innermost_loops_with_an_opcode() -> None:
    code = assembly(WAIT_IN_LOOP)
    outer, inner = code.loops()
    assert code.innermost_loops("SYNCS") == (inner,)
    assert code.innermost_loops("SYNCS", "HGMMA") == (outer,)
    assert code.innermost_loops("MUFU") == ()


def test_no_loops() -> None:
    code = assembly("""
        /*0000*/  @P0 BRA `(.L_x_0) ;
        /*0010*/      MOV R0, 0x400 ;
    .L_x_0:
        /*0020*/      EXIT ;
    """)
    assert code.loops() == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here", "no instructions"),
        ("/*0000*/ NOP ;\n/*0000*/ NOP ;", "more than one kernel"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(sass.SassError, match=message):
        sass.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/*0000*/ BRA `(.L_x_9) ;", "no target for BRA"),
        ("/*0000*/ BRX R2 -0x10 ;", "cannot follow BRX at 0x0"),
    ],
)
def test_loops_refuse_unknown_jumps(text: str, message: str) -> None:
    with pytest.raises(sass.SassError, match=message):
        sass.parse(text).loops()


def test_disassembler_error_is_passed_on() -> None:
    try:
        sass.find_nvdisasm()
    except sass.NvdisasmNotFoundError as error:
        pytest.skip(str(error))
    with pytest.raises(sass.SassError, match="nvdisasm failed with exit code"):
        sass.disassemble(b"not a cubin")


def test_missing_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(sass.NvdisasmNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        sass.find_nvdisasm()
