"""Follows the bits of mask words through machine code: word to predicate, predicate to score.

A masked part of a kernel makes a 32-bit word for each row and 32 of its scores, turns its bits into
predicates, and selects scores by them. Following the predicates in the order of the instructions tells which
bit keeps which score. A backward kernel masks weights, which a chain of instructions has made of the scores:
there that chain is followed too, from the matmul on.

Needs no compiler: where a register's score stands is the hardware's layout of accumulators, written down here
once more, from the machine's side.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jax_r2p.aot import sass

WORD = 32
"""Bits of a mask word, which is a register."""

_R2P = re.compile(r"PR, (?P<register>R\d+)(?:\.reuse)?(?:\.B(?P<byte>[0-3]))?, (?P<mask>0x[0-9a-f]+)")
_AND_TEST = re.compile(
    r"(?P<predicate>P\d), RZ, (?P<register>R\d+)(?:\.reuse)?, (?P<mask>0x[0-9a-f]+), RZ, 0xc0, !PT"
)
_SIGN_TEST = re.compile(r"(?P<predicate>P\d), PT, (?P<register>R\d+)(?:\.reuse)?, -0x1, PT")
_SELECT = re.compile(
    r"R\d+, (?P<source>R\d+)(?:\.reuse)?, (?P<hidden>-INF|RZ) ?, (?P<inverse>!?)(?P<predicate>P\d)"
)
_SAVE = re.compile(r"(?P<register>R\d+), PR, RZ, (?P<mask>0x[0-9a-f]+)")
_RESTORE = re.compile(r"(?P<predicate>P\d), PT, (?P<register>R\d+), RZ, PT")
_SHAPE = re.compile(r"HGMMA\.64x(?P<columns>\d+)x16\.")
# With the query in shared memory, or in registers.
_ACCUMULATOR = re.compile(r"R(?P<first>\d+), (?:R\d+, )?gdesc\[UR\d+\], RZ, !UPT")
_WRITTEN_PREDICATE = re.compile(r"P\d")
_WRITTEN_REGISTER = re.compile(r"R\d+")
_READ_REGISTER = re.compile(r"(?<=, )-?(R\d+)")
# What makes weights of scores, in place or not.
_EXPONENTIAL = ("FMUL", "FFMA", "FADD", "MUFU.EX2")


@dataclasses.dataclass(frozen=True)
class Test:
    """An instruction that turns bits of a mask word into predicates.

    Attributes:
      instruction: `R2P`, or the test of a single bit.
      word: Number of the word, in the order in which R2P reads them.
      made_by: The instruction that made the word.
      bits: The bit that each predicate stands for.
      inverse: Whether the predicate holds where the bit is not set.
    """

    instruction: sass.Instruction
    word: int
    made_by: sass.Instruction
    bits: dict[str, int]
    inverse: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a predicate comes from: a test, and the bit of its word."""

    test: Test
    bit: int


@dataclasses.dataclass(frozen=True)
class Selection:
    """An instruction that keeps a score or sets it to -inf; or a weight, and sets it to 0.

    Attributes:
      instruction: The `FSEL`.
      test: The test whose predicate decides.
      bit: The bit of its word.
      row: 0 or 1, the row of the thread.
      element: Number of the score in its row, of those that the thread holds.
    """

    instruction: sass.Instruction
    test: Test
    bit: int
    row: int
    element: int

    @property
    def column(self) -> int:
        """Tile column of the score, counted from the thread's first one."""
        return self.element // 2 * 8 + self.element % 2


@dataclasses.dataclass(frozen=True)
class Site:
    """The masking of one part of a kernel: its tests and selections, in the order of the instructions."""

    tests: tuple[Test, ...]
    selections: tuple[Selection, ...]


def trace(code: sass.Code, *, matmuls: sass.Code | None = None, before: sass.Code | None = None) -> Site:
    """Follows the mask words of a part of a kernel that masks by R2P.

    Args:
      code: The part.
      matmuls: Where the matmuls stand that make the scores, which all have the same accumulator; None for
        the part itself.
      before: What runs before it and makes the weights that it masks; None where it masks the scores.

    Raises:
      sass.SassError: There is no matmul that begins a block's scores, there are several with accumulators of
        their own, or bits are used in an unknown way.
    """
    if before is None:
        registers, *others = dict.fromkeys(_accumulators(matmuls or code))
        if others:
            raise sass.SassError(f"scores in the registers {registers} and {others}: which are masked?")
        scores, hidden = {register: place for place, register in enumerate(registers)}, "-INF"
    else:
        scores, hidden = _weight_registers(before), "RZ"
    words = _find_words(code)
    makers: dict[str, sass.Instruction] = {}
    live: dict[str, Source] = {}
    saved: dict[str, Source] = {}
    tests, selections = [], []
    for instruction in code.instructions:
        if (selection := _selection(instruction, live, scores, hidden)) is not None:
            selections.append(selection)
        if (test := _test(instruction, makers, words)) is not None:
            tests.append(test)
            live |= {predicate: Source(test, bit) for predicate, bit in test.bits.items()}
        else:
            for predicate in _overwritten_predicates(instruction):
                live.pop(predicate, None)
            live |= _restored(instruction, saved)
        if written := _WRITTEN_REGISTER.match(instruction.operands):
            makers[written[0]] = instruction
            saved.pop(written[0], None)
            saved |= _saved(instruction, live)
    return Site(tuple(tests), tuple(selections))


def describe_word(made_by: sass.Instruction) -> str:
    """Says which scores a mask word keeps, by the instruction that makes it."""
    if made_by.is_a("SHF.R"):
        return "ones below the upper bound"
    if made_by.is_a("SHF.L"):
        return "ones from the lower bound on"
    return "ones between the two bounds"


def _find_words(code: sass.Code) -> dict[tuple[str, int], int]:
    """Numbers the words that R2P reads, each known by its register and the address of what made it."""
    words: dict[tuple[str, int], int] = {}
    makers: dict[str, int] = {}
    for instruction in code.instructions:
        if instruction.is_a("R2P") and (match := _R2P.match(instruction.operands)):
            register = match["register"]
            if register not in makers:
                raise sass.SassError(f"R2P {instruction.operands} reads what this part did not make")
            words.setdefault((register, makers[register]), len(words))
        if written := _WRITTEN_REGISTER.match(instruction.operands):
            makers[written[0]] = instruction.address
    return words


def describe_bits(test: Test) -> str:
    """Says which bits of the word go to which predicates."""
    if test.instruction.is_a("R2P"):
        predicates, bits = list(test.bits), list(test.bits.values())
        return f"bits {bits[0]}-{bits[-1]} -> {predicates[0]}-{predicates[-1]}"
    [(predicate, bit)] = test.bits.items()
    how = f"by the sign, kept by !{predicate}" if test.inverse else "by itself"
    return f"bit {bit} -> {predicate}, {how}"


def _accumulators(code: sass.Code) -> list[range]:
    """Numbers of the registers that hold a thread's scores: two rows, a quarter of the columns of each.

    One for each matmul that begins such scores, in order.
    """
    found = []
    for instruction in code.instructions:
        shape = _SHAPE.match(instruction.opcode)
        if shape and (match := _ACCUMULATOR.match(instruction.operands)):
            first = int(match["first"])
            found.append(range(first, first + int(shape["columns"]) // 2))
    if not found:
        raise sass.SassError("no HGMMA that overwrites its accumulator: where are the scores?")
    return found


def _weight_registers(code: sass.Code) -> dict[int, int]:
    """Place of the score from which each register's number was made, of those that hold such a number."""
    first = _accumulators(code)[0]
    places: dict[int, int] = {}
    begun = False
    for instruction in code.instructions:
        if not begun:
            # All matmuls of the scores have the accumulator of the first.
            begun = instruction.is_a("HGMMA") and instruction.operands.startswith(f"R{first.start},")
            places = {register: place for place, register in enumerate(first)} if begun else {}
            continue
        written = _WRITTEN_REGISTER.match(instruction.operands)
        if written is None or instruction.is_a("HGMMA"):
            continue
        source = None
        if instruction.opcode.startswith(_EXPONENTIAL):
            read = (int(register[1:]) for register in _READ_REGISTER.findall(instruction.operands))
            source = next((places[register] for register in read if register in places), None)
        if source is None:
            places.pop(int(written[0][1:]), None)
        else:
            places[int(written[0][1:])] = source
    return places


def _test(
    instruction: sass.Instruction,
    makers: dict[str, sass.Instruction],
    words: dict[tuple[str, int], int],
) -> Test | None:
    """The test of a mask word that `instruction` is, if it is one."""
    pattern = {"R2P": _R2P, "LOP3": _AND_TEST, "ISETP": _SIGN_TEST}.get(instruction.opcode.partition(".")[0])
    match = pattern.match(instruction.operands) if pattern else None
    if match is None or match["register"] not in makers:
        return None
    made_by = makers[match["register"]]
    word = words.get((match["register"], made_by.address))
    if word is None:
        return None
    if instruction.is_a("R2P"):
        start, mask = 8 * int(match["byte"] or 0), int(match["mask"], 16)
        return Test(instruction, word, made_by, {f"P{i}": start + i for i in range(7) if mask >> i & 1})
    if instruction.is_a("ISETP.GT"):
        return Test(instruction, word, made_by, {match["predicate"]: WORD - 1}, inverse=True)
    if instruction.is_a("LOP3") and (mask := int(match["mask"], 16)).bit_count() == 1:
        return Test(instruction, word, made_by, {match["predicate"]: mask.bit_length() - 1})
    return None


def _selection(
    instruction: sass.Instruction, live: dict[str, Source], scores: dict[int, int], hidden: str
) -> Selection | None:
    match = _SELECT.match(instruction.operands) if instruction.is_a("FSEL") else None
    if match is None or match["hidden"] != hidden or match["predicate"] not in live:
        return None
    source = live[match["predicate"]]
    if source.test.inverse != (match["inverse"] == "!"):
        raise sass.SassError(f"{instruction.operands} keeps a score where its bit is not set")
    register = int(match["source"][1:])
    if register not in scores:
        raise sass.SassError(f"{instruction.operands} selects no score")
    # Two neighbours of the first row, two of the second, the next two of the first, ...
    pair, place = divmod(scores[register], 4)
    return Selection(instruction, source.test, source.bit, row=place // 2, element=2 * pair + place % 2)


def _saved(instruction: sass.Instruction, live: dict[str, Source]) -> dict[str, Source]:
    """The register in which `instruction` keeps a predicate for later, when there are too few of them."""
    match = _SAVE.match(instruction.operands) if instruction.is_a("P2R") else None
    if match is None or (mask := int(match["mask"], 16)).bit_count() != 1:
        return {}
    predicate = f"P{mask.bit_length() - 1}"
    return {match["register"]: live[predicate]} if predicate in live else {}


def _restored(instruction: sass.Instruction, saved: dict[str, Source]) -> dict[str, Source]:
    match = _RESTORE.match(instruction.operands) if instruction.opcode == "ISETP.NE.AND" else None
    if match is None or match["register"] not in saved:
        return {}
    return {match["predicate"]: saved[match["register"]]}


def _overwritten_predicates(instruction: sass.Instruction) -> list[str]:
    """Predicates among the results of an instruction: what its operands begin with."""
    if instruction.is_a("R2P"):
        return [f"P{i}" for i in range(7)]
    results = []
    for operand in instruction.operands.split(", "):
        if _WRITTEN_PREDICATE.fullmatch(operand):
            results.append(operand)
        elif operand != "PT":
            break
    return results


def document(variant: str, part: str, site: Site) -> dict[str, Any]:
    """A site in plain words and numbers: what made each word, then a line for each test of its bits.

    The scores of a line are those that its predicates keep, as "row:element=column".
    """
    words = {test.word: test.made_by for test in site.tests}
    lines = []
    for test in site.tests:
        kept = sorted((s.row, s.element, s.column) for s in site.selections if s.test is test)
        lines.append(
            {
                "address": test.instruction.address,
                "instruction": _text(test.instruction),
                "meaning": f"word {test.word}: {describe_bits(test)}",
                "scores": [f"{row}:{element}={column}" for row, element, column in kept],
            }
        )
    return {
        "variant": variant,
        "part": part,
        "words": [
            {"instruction": _text(made_by), "meaning": f"makes word {word}: {describe_word(made_by)}"}
            for word, made_by in sorted(words.items())
        ],
        "tests": lines,
        "scores": len(site.selections),
    }


def _text(instruction: sass.Instruction) -> str:
    return f"{instruction.opcode} {instruction.operands}"
