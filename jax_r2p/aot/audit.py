"""What the compiler made of a kernel, counted by part, and the counts that a kernel must have.

A whole kernel's count says little about its time: most of its instructions run once a tile or never. So the
round of a forward kernel's consumers, which computes one tile, is divided at its loops over key blocks, and
each is counted on its own. A backward kernel has one loop, over query tiles; of its step the part that masks
is counted once more by itself. A preprocess kernel runs through once, and is counted as a whole.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from jax_r2p._manifest import InstallationError, Role, package_file, repair_hint
from jax_r2p.aot import mask_sites, sass
from jax_r2p.kernels.config import Mask

WHOLE, FIRST = "whole kernel", "first block"
RIGHT, INTERIOR, LEFT = "right-masked", "interior", "left-masked"

LOOPS: dict[Mask, tuple[str, ...]] = {
    "none": (INTERIOR,),
    "causal": (RIGHT, INTERIOR),
    "window": (RIGHT, INTERIOR, LEFT),
}
"""Loops over key blocks in the order in which a tile runs through them, after its first block."""

STEP, MASKED = "step", "masked"
"""Parts of a backward kernel: the loop over query tiles, and what of it tiles run through that a bound or the
end of the keys crosses."""

TOTAL = "total"
OPCODES = ("R2P", "FSEL", "ISETP", "SHF", "LOP3", "MUFU", "HGMMA", "LDL", "STL")
"""What the tables show beside the total."""

WAIT = "WARPGROUP.DEPBAR"
"""A wait for matmuls in flight. Where the compiler puts matmuls in series it adds one for each."""

REDUCE = "UBLKRED"
"""A bulk copy that adds to global memory."""

GATED = ("R2P", "FSEL", "ISETP", "HGMMA", WAIT, "LDL", "STL")
"""What has to be exactly as expected."""

GATED_BACKWARD = (*GATED, REDUCE)
"""The same of a backward kernel."""

TOTAL_TOLERANCE = 0.03
"""By how much of itself a total may move."""

EXPECTED_FILE = "expected_sass.json"

Counts = dict[str, int]
Parts = dict[str, Counts]


def parts(kernel: sass.Kernel, mask: Mask, role: Role = "forward") -> dict[str, sass.Code]:
    """Divides a kernel of this package.

    A forward kernel: the whole, a tile's first block, and each loop over key blocks. A backward kernel: the
    whole, the loop over query tiles, and the part of it that masks. A preprocess kernel: the whole.

    Raises:
      sass.SassError: The kernel has other loops than its mask asks for, or masks where it should not.
    """
    if role == "preprocess":
        return {WHOLE: kernel}
    inner = kernel.innermost_loops("HGMMA", "MUFU")
    around = [
        loop
        for loop in kernel.loops()
        if all(set(part.instructions) < set(loop.instructions) for part in inner)
    ]
    if role == "backward":
        if len(inner) != 1 or not around:
            raise sass.SassError(
                f"a backward kernel must have one loop over query tiles inside one over query heads, got "
                f"{len(inner)} inside {len(around)}"
            )
        masked, _ = kernel.skipped(inner[0], "R2P")
        return {WHOLE: kernel, STEP: inner[0], MASKED: masked}
    names = LOOPS[mask]
    if len(inner) != len(names) or not around:
        raise sass.SassError(
            f"a kernel with mask {mask!r} must have {len(names)} loops over key blocks inside one over "
            f"tiles, got {len(inner)} inside {len(around)}"
        )
    first, ordered = kernel.divide_round(around[-1], inner)
    return {WHOLE: kernel, FIRST: first, **dict(zip(names, ordered, strict=True))}


def mask_site(kernel: sass.Kernel, part: str, code: sass.Code) -> mask_sites.Site:
    """Follows the mask words of a part of `parts` that has R2P.

    Raises:
      sass.SassError: As `mask_sites.trace`.
    """
    if part != MASKED:
        # The scores of a first block may come from matmuls at the end of the tile before.
        return mask_sites.trace(code, matmuls=kernel)
    (step,) = kernel.innermost_loops("HGMMA", "MUFU")
    return mask_sites.trace(code, before=kernel.skipped(step, "R2P")[1])


def gated(role: Role) -> tuple[str, ...]:
    """The instructions of which a kernel must have exactly as many as expected."""
    return GATED_BACKWARD if role == "backward" else GATED


def count(code: sass.Code, opcodes: Sequence[str]) -> Counts:
    """Number of instructions in all, and of each of `opcodes`."""
    return {TOTAL: len(code), **code.counts(opcodes)}


def count_parts(kernel: sass.Kernel, mask: Mask, opcodes: Sequence[str], role: Role = "forward") -> Parts:
    """`count` of each of `parts`."""
    return {name: count(code, opcodes) for name, code in parts(kernel, mask, role).items()}


# Gates -----------------------------------------------------------------------------------------------------


def load_expected() -> dict[str, Parts]:
    """Returns the expected counts of each variant's parts, from the package's own file.

    Raises:
      InstallationError: The file is missing or cannot be understood.
    """
    file = package_file("aot", EXPECTED_FILE)
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except FileNotFoundError:
        raise InstallationError(f"{file} is missing. {repair_hint()}") from None
    except ValueError as error:
        raise InstallationError(f"{file} cannot be read: {error}. {repair_hint()}") from error


def save_expected(path: pathlib.Path, counts: Mapping[str, Parts]) -> None:
    """Writes the file that `load_expected` reads: one line a part, so that a change shows what it changed."""
    blocks = []
    for name in sorted(counts):
        lines = [f"    {json.dumps(part)}: {json.dumps(row)}" for part, row in counts[name].items()]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    part_file = path.with_name(f".{path.name}.new")
    part_file.write_text("{\n" + ",\n".join(blocks) + "\n}\n", "utf-8")
    part_file.replace(path)


def deviations(name: str, found: Parts, expected: Parts | None) -> Iterator[str]:
    """Yields each count of variant `name` that is not as expected: variant, part, expected and got."""
    if expected is None:
        yield f"{name}: has no expected counts"
        return
    if found.keys() != expected.keys():
        yield f"{name}: expected the parts {', '.join(expected)}, got {', '.join(found)}"
        return
    for part, wanted in expected.items():
        got = found[part]
        if got.keys() != wanted.keys():
            yield f"{name}, {part}: expected counts of {', '.join(wanted)}, got {', '.join(got)}"
            continue
        for opcode in (name for name in wanted if name != TOTAL):
            if got[opcode] != wanted[opcode]:
                yield f"{name}, {part}: expected {wanted[opcode]} {opcode}, got {got[opcode]}"
        if abs(got[TOTAL] - wanted[TOTAL]) > TOTAL_TOLERANCE * wanted[TOTAL]:
            yield (
                f"{name}, {part}: expected {wanted[TOTAL]} instructions within {TOTAL_TOLERANCE:.0%}, "
                f"got {got[TOTAL]}"
            )
