"""The parser of machine code, on assembly written by hand: instructions, loops, and the parts of a round."""

from __future__ import annotations

import textwrap

import pytest

from jax_r2p.aot import sass


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


def test_opcodes_hold_lower_case_letters() -> None:
    """As the shape of a matmul does, whose "x" once ended the opcode."""
    (matmul,) = (i for i in assembly(WAIT_IN_LOOP).instructions if i.is_a("HGMMA"))
    assert matmul.opcode == "HGMMA.64x64x16.F32.BF16"
    assert matmul.operands == "R24, gdesc[UR4], R24, gsb0"
    assert matmul.is_a("HGMMA.64x64x16")
    assert not matmul.is_a("HGMMA.64")


def test_loops_take_in_what_was_moved_away() -> None:
    outer, inner = assembly(WAIT_IN_LOOP).loops()
    assert addresses(outer) == [0x20, 0x30, 0x40, 0x50, 0x60, 0x80, 0x90, 0xA0]
    assert addresses(inner) == [0x30, 0x40, 0x80, 0x90]
    assert (outer.head, inner.head) == (0x20, 0x30)


def test_head_of_a_loop_that_is_entered_in_the_middle() -> None:
    """Its head is where each round begins, which need not be its lowest address."""
    (loop,) = assembly("""
        /*0000*/      BRA `(.L_head) ;
    .L_body:
        /*0010*/      IADD3 R0, R0, 0x1, RZ ;
    .L_head:
        /*0020*/      ISETP.GT.AND P0, PT, R0, R1, PT ;
        /*0030*/  @P0 BRA `(.L_body) ;
        /*0040*/      EXIT ;
    """).loops()
    assert addresses(loop) == [0x10, 0x20, 0x30]
    assert loop.head == 0x20


def test_innermost_loops_with_an_opcode() -> None:
    code = assembly(WAIT_IN_LOOP)
    outer, inner = code.loops()
    assert code.innermost_loops("SYNCS") == (inner,)
    assert code.innermost_loops("SYNCS", "HGMMA") == (outer,)
    assert code.innermost_loops("MUFU") == ()


# One round over tiles (0x10 to 0xc0): code before the first loop, with a wait (0x20) whose slow path stands
# behind the end; two loops over blocks in the order 0x80, 0x50, against that of their addresses; code after.
ROUND = """
        /*0000*/      MOV R0, 0x400 ;
    .L_tile:
        /*0010*/      MOV R1, RZ ;
        /*0020*/      SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R0], R2 ;
        /*0030*/ @!P1 BRA `(.L_slow) ;
    .L_ready:
        /*0040*/  @P2 BRA `(.L_first) ;
    .L_second:
        /*0050*/      MUFU.EX2 R4, R4 ;
        /*0060*/  @P0 BRA `(.L_second) ;
        /*0070*/      BRA `(.L_after) ;
    .L_first:
        /*0080*/      HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0090*/  @P0 BRA `(.L_first) ;
        /*00a0*/      BRA `(.L_second) ;
    .L_after:
        /*00b0*/      STG.E [R2], R4 ;
        /*00c0*/  @P3 BRA `(.L_tile) ;
        /*00d0*/      EXIT ;
    .L_slow:
        /*00e0*/      SYNCS.PHASECHK.TRANS64 P1, [R0], R2 ;
        /*00f0*/ @!P1 BRA `(.L_slow) ;
        /*0100*/      BRA `(.L_ready) ;
"""


def loop_at(code: sass.Kernel, head: int) -> sass.Loop:
    (loop,) = (loop for loop in code.loops() if loop.head == head)
    return loop


def test_divide_round() -> None:
    code = assembly(ROUND)
    outer, second, first = (loop_at(code, head) for head in (0x10, 0x50, 0x80))
    for inner in ((second, first), (first, second)):
        before, loops = code.divide_round(outer, inner)
        assert loops == (first, second)
        assert addresses(before) == [0x10, 0x20, 0x30, 0x40, 0xE0, 0xF0, 0x100], "neither setup nor the end"


def test_divide_round_at_one_loop() -> None:
    """What stands before it includes the other loop, but nothing behind it."""
    code = assembly(ROUND)
    outer, second = loop_at(code, 0x10), loop_at(code, 0x50)
    before, loops = code.divide_round(outer, [second])
    assert loops == (second,)
    assert addresses(before) == [0x10, 0x20, 0x30, 0x40, 0x80, 0x90, 0xA0, 0xE0, 0xF0, 0x100]


# Loops at 0x20 and 0x40 in one over tiles (0x10 to 0x60): a round runs through one of them.
EITHER = """
        /*0000*/      MOV R0, 0x400 ;
    .L_tile:
        /*0010*/  @P2 BRA `(.L_other) ;
    .L_one:
        /*0020*/  @P0 BRA `(.L_one) ;
        /*0030*/      BRA `(.L_after) ;
    .L_other:
        /*0040*/  @P0 BRA `(.L_other) ;
    .L_after:
        /*0050*/      STG.E [R2], R4 ;
        /*0060*/  @P3 BRA `(.L_tile) ;
        /*0070*/      EXIT ;
"""

# Loops at 0x30 and 0x40 in one over tiles (0x10 to 0x60): the second may be followed by the first.
AGAIN = """
        /*0000*/      MOV R0, 0x400 ;
    .L_tile:
        /*0010*/      MOV R1, RZ ;
    .L_again:
        /*0020*/      MOV R2, RZ ;
    .L_one:
        /*0030*/  @P0 BRA `(.L_one) ;
    .L_other:
        /*0040*/  @P0 BRA `(.L_other) ;
        /*0050*/  @P1 BRA `(.L_again) ;
        /*0060*/  @P3 BRA `(.L_tile) ;
        /*0070*/      EXIT ;
"""


@pytest.mark.parametrize(
    ("text", "heads"), [(EITHER, (0x20, 0x40)), (AGAIN, (0x30, 0x40))], ids=["either", "again"]
)
def test_divide_round_refuses_loops_in_no_fixed_order(text: str, heads: tuple[int, int]) -> None:
    code = assembly(text)
    outer, inner = loop_at(code, 0x10), [loop_at(code, head) for head in heads]
    with pytest.raises(sass.SassError, match=r"the loops at 0x\d0, 0x40 have no fixed order"):
        code.divide_round(outer, inner)


def test_divide_round_refuses_no_loops() -> None:
    code = assembly(ROUND)
    with pytest.raises(sass.SassError, match="no loops to divide a round at"):
        code.divide_round(loop_at(code, 0x10), [])


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
    with pytest.raises(sass.NvdisasmNotFoundError, match=r"pip install 'jax_r2p\[audit\]'"):
        sass.find_nvdisasm()
