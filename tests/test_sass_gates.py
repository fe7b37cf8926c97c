"""The machine code of the installed kernels: against the expected counts, by rules, and bit by bit."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from command_line import run_command

from jax_r2p._manifest import FOLDER, InstallationError, Variant, load_manifest, package_file, read_cubin
from jax_r2p.aot import audit, sass
from jax_r2p.aot.compile import compile_variants
from jax_r2p.aot.variants import VARIANTS, without_r2p
from jax_r2p.cli.audit import DEFAULT
from jax_r2p.kernels import blocks
from jax_r2p.kernels.config import ROWS_AT_ONCE, VECTOR, BackwardConfig, ForwardConfig, PreprocessConfig

SHIPPED = {variant.name: variant for variant in load_manifest().variants}

FORWARD, BACKWARD, PREPROCESS = (
    [name for name, variant in SHIPPED.items() if variant.role == role]
    for role in ("forward", "backward", "preprocess")
)

ROWS_OF_THREAD = 2
MATMUL_DEPTH = 16
"""Columns of A that one WGMMA of a 16-bit type takes."""


@functools.cache
def disassemble(name: str) -> sass.Kernel:
    return sass.disassemble(read_cubin(SHIPPED[name]))


@pytest.fixture(scope="module")
def disassembler() -> Path:
    try:
        return sass.find_nvdisasm()
    except sass.NvdisasmNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(params=SHIPPED)
def shipped(request: pytest.FixtureRequest, disassembler: Path) -> Variant:
    return SHIPPED[request.param]


@pytest.fixture(params=FORWARD)
def variant(request: pytest.FixtureRequest, disassembler: Path) -> Variant:
    return SHIPPED[request.param]


@pytest.fixture(params=BACKWARD)
def backward(request: pytest.FixtureRequest, disassembler: Path) -> Variant:
    return SHIPPED[request.param]


@pytest.fixture
def parts(variant: Variant) -> dict[str, sass.Code]:
    return audit.parts(disassemble(variant.name), variant.mask)


@pytest.fixture
def backward_parts(backward: Variant) -> dict[str, sass.Code]:
    return audit.parts(disassemble(backward.name), backward.mask, "backward")


def loops(variant: Variant, parts: dict[str, sass.Code]) -> list[sass.Code]:
    return [parts[name] for name in audit.LOOPS[variant.mask]]


def masked(variant: Variant) -> list[str]:
    """The parts that a bound crosses."""
    return [audit.FIRST, *(name for name in audit.LOOPS[variant.mask] if name != audit.INTERIOR)]


def is_early(variant: Variant) -> bool:
    """Whether the first scores of a tile are made at the end of the tile before."""
    config = VARIANTS[variant.name].config
    assert isinstance(config, ForwardConfig)
    return config.early_scores


def elements_of_a_row(variant: Variant) -> int:
    """A thread has a quarter of a row's columns."""
    return variant.tile_n // 4


# The table of expected counts ------------------------------------------------------------------------------


def test_as_expected(shipped: Variant) -> None:
    opcodes = audit.gated(shipped.role)
    found = audit.count_parts(disassemble(shipped.name), shipped.mask, opcodes, shipped.role)
    problems = list(audit.deviations(shipped.name, found, audit.load_expected().get(shipped.name)))
    assert not problems, "\n" + "\n".join(problems)


def test_table_has_the_shipped_kernels_and_no_others() -> None:
    assert list(audit.load_expected()) == sorted(SHIPPED)


def test_table_is_written_with_a_line_a_part(tmp_path: Path) -> None:
    """So the file in the repository is what `jax-r2p audit --update` makes of its own contents."""
    expected = audit.load_expected()
    audit.save_expected(tmp_path / "expected.json", expected)
    text = (tmp_path / "expected.json").read_text("utf-8")
    assert text == package_file("aot", audit.EXPECTED_FILE).read_text("utf-8")
    assert json.loads(text) == expected
    assert text.count("\n") == 2 + sum(2 + len(rows) for rows in expected.values())


@pytest.mark.parametrize(
    ("text", "message"), [(None, r"expected_sass\.json is missing"), ("{", "cannot be read: Expecting")]
)
def test_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / audit.EXPECTED_FILE).write_text(text)
    monkeypatch.setattr(audit, "package_file", lambda folder, name: tmp_path / name)
    with pytest.raises(InstallationError, match=message):
        audit.load_expected()


# Rules that need no table ----------------------------------------------------------------------------------


def test_loops_are_those_of_the_kernels_source() -> None:
    names = {(True, True): audit.RIGHT, (True, False): audit.RIGHT, (False, True): audit.LEFT}
    for mask, expected in audit.LOOPS.items():
        bounds = {"has_right": mask != "none", "has_left": mask == "window"}
        found = blocks.BlockRange(0, 0, 0, 1).loops(**bounds)
        assert tuple(names.get((loop.right, loop.left), audit.INTERIOR) for loop in found) == expected


def test_masks_expand_by_r2p(variant: Variant, parts: dict[str, sass.Code]) -> None:
    # One R2P takes a byte of a mask word, of which there is one for every 32 elements.
    bytes_of_a_row = -(-elements_of_a_row(variant) // 8)
    # The end of the keys is the same for both rows, so they share its words. Other bounds move by row.
    rows = 1 if variant.mask == "none" else ROWS_OF_THREAD
    found = {name: code.count("R2P") for name, code in parts.items()}
    assert found.pop(audit.WHOLE) == rows * bytes_of_a_row * len(masked(variant))
    assert {name for name, number in found.items() if number} == set(masked(variant))
    assert {found[name] for name in masked(variant)} == {rows * bytes_of_a_row}


def test_masked_blocks_have_no_compare_per_element(variant: Variant, parts: dict[str, sass.Code]) -> None:
    elements = ROWS_OF_THREAD * elements_of_a_row(variant)
    for name in masked(variant):
        assert parts[name].count("FSEL") >= elements, "every score is kept or not"
        # One bit in eight is tested on its own, mostly by LOP3. Counters, waits and, in the first block, the
        # place of the tile and its lengths need up to a dozen compares too, and as many again where a
        # warpgroup has a range of blocks of its own.
        others = 16 if name == audit.FIRST and VARIANTS[variant.name].config.own_blocks else 8
        assert parts[name].count("ISETP") < elements // 4 + others


def test_interior_has_no_mask(variant: Variant, parts: dict[str, sass.Code]) -> None:
    assert parts[audit.INTERIOR].counts(["R2P", "FSEL"]) == {"R2P": 0, "FSEL": 0}


def test_correction_is_of_rounded_products(variant: Variant, parts: dict[str, sass.Code]) -> None:
    """One FFMA a score and one a row for its sum. One more for each row is a correction whose product was
    fused with the difference and so not rounded: then blocks of equal scores do not weigh the same.
    """
    scores = ROWS_OF_THREAD * elements_of_a_row(variant)
    for loop in loops(variant, parts):
        assert loop.count("FFMA") == scores + ROWS_OF_THREAD


def test_rescaling_is_left_out_by_a_vote(variant: Variant, parts: dict[str, sass.Code]) -> None:
    """Where the table says so: then a round can jump over the multiplications of what is summed of O."""
    config = VARIANTS[variant.name].config
    assert isinstance(config, ForwardConfig)
    labels = disassemble(variant.name).labels
    for loop in loops(variant, parts):
        assert loop.count("VOTE") == config.skip_rescale
        if config.skip_rescale:
            votes = [number for number, i in enumerate(loop.instructions) if i.is_a("VOTE")]
            jump = next(i for i in loop.instructions[votes[0] :] if i.is_a("BRA") and i.guard)
            target = labels[jump.operands.strip().removeprefix("`(").removesuffix(")")]
            left_out = [i.opcode for i in loop.instructions if jump.address < i.address < target]
            assert left_out.count("FMUL") == ROWS_OF_THREAD * variant.value_head_dim // 4


def test_no_local_memory(variant: Variant, parts: dict[str, sass.Code]) -> None:
    spilled = parts[audit.WHOLE].count("LDL") + parts[audit.WHOLE].count("STL")
    assert (spilled > 0) == (VARIANTS[variant.name].declared_spills > 0)
    for loop in loops(variant, parts):
        assert loop.counts(["LDL", "STL"]) == {"LDL": 0, "STL": 0}


def test_matmuls(variant: Variant, parts: dict[str, sass.Code]) -> None:
    """S = Q K^T runs over the head dim, O += P V over the keys of the block."""
    scores, output = variant.head_dim // MATMUL_DEPTH, variant.tile_n // MATMUL_DEPTH
    early = is_early(variant)
    assert parts[audit.FIRST].count("HGMMA") == (0 if early else scores)
    assert {loop.count("HGMMA") for loop in loops(variant, parts)} == {scores + output}
    # The first scores before the loops and the last values after them make one more block. Early scores stand
    # behind the loops, and for a CTA's first tile before all.
    whole = (len(loops(variant, parts)) + 1) * (scores + output) + early * scores
    assert parts[audit.WHOLE].count("HGMMA") == whole


def test_matmuls_are_as_wide_as_keys_and_values(variant: Variant, parts: dict[str, sass.Code]) -> None:
    """So that no tile is computed in pieces, which would read its other operand again for each."""
    for loop in loops(variant, parts):
        shapes = [i.opcode.split(".")[1] for i in loop.instructions if i.is_a("HGMMA")]
        wanted = {f"64x{variant.tile_n}x16": variant.head_dim // MATMUL_DEPTH}
        wanted = collections.Counter(wanted) + collections.Counter(
            {f"64x{variant.value_head_dim}x16": variant.tile_n // MATMUL_DEPTH}
        )
        assert collections.Counter(shapes) == wanted


def test_matmuls_stay_in_flight(variant: Variant, parts: dict[str, sass.Code]) -> None:
    """One wait per group of matmuls: where the compiler puts them in series, each has its own."""
    groups, early = 2, is_early(variant)
    assert parts[audit.FIRST].count(audit.WAIT) == (0 if early else 1)
    assert {loop.count(audit.WAIT) for loop in loops(variant, parts)} == {groups}
    assert parts[audit.WHOLE].count(audit.WAIT) == (len(loops(variant, parts)) + 1) * groups + early


def test_query_stage_is_released_when_matmuls_have_read_it(
    variant: Variant, parts: dict[str, sass.Code]
) -> None:
    """An arrival does not wait for copies into registers that are under way, and TMA may be faster than they.

    Rows beyond the array are zeros, which it need not fetch. They stood in place of the last 16 columns of
    rows before, in some runs of some calls on a busy GPU.
    """
    config = VARIANTS[variant.name].config
    assert isinstance(config, ForwardConfig)
    instructions = parts[audit.WHOLE].instructions
    copies = [index for index, i in enumerate(instructions) if i.is_a("LDSM")]
    assert bool(copies) == config.query_in_registers
    if copies:
        after = [i for i in instructions[copies[-1] :] if i.is_a("SYNCS.ARRIVE") or i.is_a(audit.WAIT)]
        assert after[0].is_a(audit.WAIT)


def test_registers_move_once_per_role(variant: Variant, parts: dict[str, sass.Code]) -> None:
    """The producer gives registers away, the consumers take them."""
    assert parts[audit.WHOLE].count("USETMAXREG") == 2


# Backward kernels ------------------------------------------------------------------------------------------


def column_parts(variant: Variant) -> int:
    """Parts that warpgroups divide the columns of dK and dV into, and the queries of the scores."""
    config = VARIANTS[variant.name].config
    assert isinstance(config, BackwardConfig)
    return config.consumer_warpgroups if config.split_columns else 1


def dq_passes(variant: Variant) -> int:
    """Tiles of 64 x 64 elements of dQ that a warpgroup computes in a step."""
    return variant.tile_m * variant.head_dim // (consumer_warpgroups(variant) * 64 * 64)


def queries_of_a_key(variant: Variant) -> int:
    """Elements that a thread has of each of its two keys."""
    return variant.tile_m // column_parts(variant) // 4


def consumer_warpgroups(variant: Variant) -> int:
    return variant.threads // 128 - 1


def test_backward_masks_expand_by_r2p(backward: Variant, backward_parts: dict[str, sass.Code]) -> None:
    """In the masked part alone, which unmasked tiles jump over: `audit.parts` refuses another place."""
    number = ROWS_OF_THREAD * -(-queries_of_a_key(backward) // 8)
    assert {name: code.count("R2P") for name, code in backward_parts.items()} == dict.fromkeys(
        (audit.WHOLE, audit.STEP, audit.MASKED), number
    )
    selections = ROWS_OF_THREAD * queries_of_a_key(backward)
    assert {code.count("FSEL") for code in backward_parts.values()} == {selections}


def test_backward_masks_have_no_compare_per_element(
    backward: Variant, backward_parts: dict[str, sass.Code]
) -> None:
    # The sign bit of a word, and which of the two keys are there.
    words = ROWS_OF_THREAD * -(-queries_of_a_key(backward) // 32)
    masked, step = (backward_parts[part].count("ISETP") for part in (audit.MASKED, audit.STEP))
    assert masked <= words + ROWS_OF_THREAD
    # Barriers, and whether a tile is masked or crosses the end of the queries: none of it by element.
    assert step - masked < 20


@pytest.mark.parametrize("name", PREPROCESS)
def test_preprocess_kernels_load_all_at_once(name: str, disassembler: Path) -> None:
    """All rows of a thread, 16 bytes at a time, before anything is added up; and few exchanges of sums."""
    kernel = disassemble(name)
    config = VARIANTS[name].config
    assert isinstance(config, PreprocessConfig)
    loads, exchanges = (
        [i.address for i in kernel.instructions if i.is_a(opcode)] for opcode in ("LDG.E.128", "SHFL")
    )
    assert len(loads) == 2 * ROWS_AT_ONCE
    assert len(exchanges) == ROWS_AT_ONCE - 1 + (config.lanes // ROWS_AT_ONCE).bit_length() - 1
    assert max(loads) < min(exchanges)
    sums = [i.address for i in kernel.instructions if i.is_a("FFMA")]
    assert len(sums) >= ROWS_AT_ONCE * (VECTOR - 1)
    assert max(loads) < min(sums)
    assert kernel.counts(["LDL", "STL", "HGMMA"]) == {"LDL": 0, "STL": 0, "HGMMA": 0}


def test_backward_has_no_local_memory(backward: Variant, backward_parts: dict[str, sass.Code]) -> None:
    assert VARIANTS[backward.name].declared_spills == 0
    assert backward_parts[audit.WHOLE].counts(["LDL", "STL"]) == {"LDL": 0, "STL": 0}


def test_backward_matmuls(backward: Variant, backward_parts: dict[str, sass.Code]) -> None:
    """S^T and dP^T over the head dims, dV and dK over the queries of a step, dQ over the CTA's keys."""
    parts = column_parts(backward)
    wanted = collections.Counter[str]()
    for columns, depth in (
        (backward.tile_m // parts, backward.head_dim),
        (backward.tile_m // parts, backward.value_head_dim),
        (backward.value_head_dim // parts, backward.tile_m),
        (backward.head_dim // parts, backward.tile_m),
        (64, dq_passes(backward) * backward.tile_n),
    ):
        wanted[f"64x{columns}x16"] += depth // MATMUL_DEPTH
    step = backward_parts[audit.STEP]
    assert wanted == collections.Counter(i.opcode.split(".")[1] for i in step.instructions if i.is_a("HGMMA"))
    # dQ of the last step is computed after it where it is delayed.
    after = VARIANTS[backward.name].config.delay_dquery * (backward.tile_n // MATMUL_DEPTH)
    assert backward_parts[audit.WHOLE].count("HGMMA") == step.count("HGMMA") + after


def test_backward_matmuls_stay_in_flight(backward: Variant, backward_parts: dict[str, sass.Code]) -> None:
    """A wait for S^T, dP^T, dV and each pass of dQ; and one for dK, after the last step or in each.

    A delayed dQ has ended when dV has, and is waited for after the last step.
    """
    config = VARIANTS[backward.name].config
    assert isinstance(config, BackwardConfig)
    waits = 3 + (0 if config.delay_dquery else dq_passes(backward)) + (not config.overlap_dkey)
    assert backward_parts[audit.STEP].count(audit.WAIT) == waits
    after = config.overlap_dkey + config.delay_dquery
    assert backward_parts[audit.WHOLE].count(audit.WAIT) == waits + after


def test_backward_roles(backward: Variant, backward_parts: dict[str, sass.Code]) -> None:
    """Registers move once a role, and each 64 x 64 part of dQ is added by one bulk copy a step."""
    assert backward_parts[audit.WHOLE].count("USETMAXREG") == 2
    assert backward_parts[audit.WHOLE].count(audit.REDUCE) == consumer_warpgroups(backward) * dq_passes(
        backward
    )
    assert backward_parts[audit.STEP].count(audit.REDUCE) == 0


def test_each_weight_is_decided_once_by_its_bit(
    backward: Variant, backward_parts: dict[str, sass.Code]
) -> None:
    site = audit.mask_site(disassemble(backward.name), audit.MASKED, backward_parts[audit.MASKED])
    weights = {(row, e) for row in range(ROWS_OF_THREAD) for e in range(queries_of_a_key(backward))}
    decided = [(selection.row, selection.element) for selection in site.selections]
    assert len(decided) == len(weights)
    assert set(decided) == weights
    words: dict[int, set[tuple[int, int]]] = {}
    for selection in site.selections:
        assert selection.bit == selection.element % 32, selection
        words.setdefault(selection.test.word, set()).add((selection.row, selection.element // 32))
    owners = [owner for (owner,) in words.values()]  # no word serves two
    assert sorted(owners) == sorted({(row, e // 32) for row, e in weights})
    # Ones from the first query on that sees the key; with a left bound, up to the last one too.
    maker = "LOP3.LUT" if backward.mask == "window" else "SHF.L"
    assert all(test.made_by.is_a(maker) for test in site.tests)


# The masks, bit by bit -------------------------------------------------------------------------------------


def test_each_score_is_decided_once_by_its_bit(variant: Variant, parts: dict[str, sass.Code]) -> None:
    scores = {(row, e) for row in range(ROWS_OF_THREAD) for e in range(elements_of_a_row(variant))}
    # The end of the keys is the same for both rows.
    shared = variant.mask == "none"
    for name in masked(variant):
        site = audit.mask_site(disassemble(variant.name), name, parts[name])
        decided = [(selection.row, selection.element) for selection in site.selections]
        assert len(decided) == len(scores), name
        assert set(decided) == scores, name
        words: dict[int, set[tuple[int, int]]] = {}
        for selection in site.selections:
            assert selection.bit == selection.element % 32, (name, selection)
            owner = (0 if shared else selection.row, selection.element // 32)
            words.setdefault(selection.test.word, set()).add(owner)
        owners = [owner for (owner,) in words.values()]  # no word serves two
        assert sorted(owners) == sorted({(0 if shared else row, e // 32) for row, e in scores}), name


def test_words_are_made_by_the_bounds_of_their_part(variant: Variant, parts: dict[str, sass.Code]) -> None:
    """By a right shift of ones for a right bound, a left shift for a left one, and both by their AND."""
    both = "LOP3.LUT" if variant.mask == "window" else "SHF.R"
    makers = {audit.FIRST: both, audit.RIGHT: both, audit.LEFT: "SHF.L"}
    for name in masked(variant):
        for test in audit.mask_site(disassemble(variant.name), name, parts[name]).tests:
            assert test.made_by.is_a(makers[name]), (name, test)


# Damage ----------------------------------------------------------------------------------------------------

BASE = "fwd_bf16_d64_window"
"""It has all kinds of loops."""

R2P = ROWS_OF_THREAD * -(-elements_of_a_row(SHIPPED[BASE]) // 8)
"""In each of its masked parts, of which it has three."""


@pytest.fixture(scope="module")
def damaged(disassembler: Path) -> dict[str, sass.Kernel]:
    """The kernel compiled with each of the two baselines of ablations."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs the kernel compiler: pip install jax_r2p[aot]")
    row = VARIANTS[BASE]
    every = dataclasses.replace(row.config, mask_every_block=True)
    rows = {
        "no R2P": without_r2p(row),
        "interior masked": dataclasses.replace(row, config=every, suffix="_every"),
    }
    compiled = {done.variant.name: done.cubin for done in compile_variants(list(rows.values()), jobs=2)}
    return {kind: sass.disassemble(compiled[row.name]) for kind, row in rows.items()}


def deviations(kernel: sass.Kernel) -> list[str]:
    found = audit.count_parts(kernel, SHIPPED[BASE].mask, audit.GATED)
    return list(audit.deviations(BASE, found, audit.load_expected()[BASE]))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("no R2P", f"{BASE}, first block: expected {R2P} R2P, got 0"),
        ("no R2P", f"{BASE}, right-masked: expected {R2P} R2P, got 0"),
        ("no R2P", f"{BASE}, left-masked: expected {R2P} R2P, got 0"),
        ("no R2P", f"{BASE}, whole kernel: expected {3 * R2P} R2P, got 0"),
        ("interior masked", f"{BASE}, interior: expected 0 R2P, got {R2P}"),
        ("interior masked", f"{BASE}, whole kernel: expected {3 * R2P} R2P, got {4 * R2P}"),
    ],
)
def test_damage_is_noticed(damaged: dict[str, sass.Kernel], kind: str, line: str) -> None:
    assert line in deviations(damaged[kind])


def test_compare_lowering_masks_by_compares(damaged: dict[str, sass.Kernel]) -> None:
    """The second lowering: no R2P, and two compares an element where a window has two bounds."""
    parts = audit.parts(damaged["no R2P"], "window")
    elements = ROWS_OF_THREAD * elements_of_a_row(SHIPPED[BASE])
    assert parts[audit.WHOLE].count("R2P") == 0
    assert parts[audit.FIRST].count("ISETP") >= 2 * elements
    assert parts[audit.RIGHT].count("ISETP") >= 2 * elements
    assert elements <= parts[audit.LEFT].count("ISETP") < 2 * elements
    assert parts[audit.INTERIOR].count("ISETP") < elements // 2


def insert(kernel: sass.Kernel, after: Iterable[sass.Instruction], opcode: str) -> sass.Kernel:
    """Puts an instruction behind each of `after`, between two addresses."""
    chosen, instructions = set(after), []
    for instruction in kernel.instructions:
        instructions.append(instruction)
        if instruction in chosen:
            instructions.append(sass.Instruction(instruction.address + 8, opcode, ""))
    return sass.Kernel(tuple(instructions), kernel.labels)


@pytest.fixture
def base(disassembler: Path) -> tuple[sass.Kernel, sass.Code]:
    """A kernel as it is shipped, and its interior."""
    kernel = disassemble(BASE)
    return kernel, audit.parts(kernel, "window")[audit.INTERIOR]


def test_spills_are_noticed(base: tuple[sass.Kernel, sass.Code]) -> None:
    """One register, stored after a matmul and loaded after another."""
    kernel, interior = base
    store, load, *_ = (i for i in interior.instructions if i.is_a("HGMMA"))
    spilled = insert(insert(kernel, [store], "STL"), [load], "LDL.LU")
    assert deviations(spilled) == [
        f"{BASE}, {part}: expected 0 {opcode}, got 1"
        for part in ("whole kernel", "interior")
        for opcode in ("LDL", "STL")
    ]


def test_matmuls_in_series_are_noticed(base: tuple[sass.Kernel, sass.Code]) -> None:
    """The compiler then waits for each matmul before it issues the next."""
    kernel, interior = base
    matmuls = [i for i in interior.instructions if i.is_a("HGMMA")]
    whole = kernel.count("WARPGROUP.DEPBAR")
    # Of the instructions alone: more of them than 3 % may be another deviation.
    assert deviations(insert(kernel, matmuls, "WARPGROUP.DEPBAR.LE"))[:2] == [
        f"{BASE}, whole kernel: expected {whole} WARPGROUP.DEPBAR, got {whole + len(matmuls)}",
        f"{BASE}, interior: expected 2 WARPGROUP.DEPBAR, got {2 + len(matmuls)}",
    ]


def test_a_loop_that_has_grown_is_noticed(base: tuple[sass.Kernel, sass.Code]) -> None:
    kernel, interior = base
    allowed = int(audit.TOTAL_TOLERANCE * len(interior))
    multiplications = [i for i in interior.instructions if i.is_a("FMUL")]
    assert deviations(insert(kernel, multiplications[:allowed], "FMUL")) == []
    assert deviations(insert(kernel, multiplications[: allowed + 1], "FMUL")) == [
        f"{BASE}, interior: expected {len(interior)} instructions within 3%, "
        f"got {len(interior) + allowed + 1}"
    ]


def test_a_lost_matmul_is_noticed(base: tuple[sass.Kernel, sass.Code]) -> None:
    kernel, interior = base
    matmul = next(i for i in interior.instructions if i.is_a("HGMMA"))
    rest = tuple(i for i in kernel.instructions if i != matmul)
    number = interior.count("HGMMA")
    line = f"{BASE}, interior: expected {number} HGMMA, got {number - 1}"
    assert line in deviations(sass.Kernel(rest, kernel.labels))


BACKWARD_BASE = "bwd_bf16_d128_window"


def backward_deviations(kernel: sass.Kernel) -> list[str]:
    found = audit.count_parts(kernel, "window", audit.GATED_BACKWARD, "backward")
    return list(audit.deviations(BACKWARD_BASE, found, audit.load_expected()[BACKWARD_BASE]))


def test_damage_to_a_backward_kernel_is_noticed(disassembler: Path) -> None:
    kernel = disassemble(BACKWARD_BASE)
    step = audit.parts(kernel, "window", "backward")[audit.STEP]
    assert backward_deviations(kernel) == []
    matmuls = [i for i in step.instructions if i.is_a("HGMMA")]
    waits = step.count(audit.WAIT)
    assert (
        f"{BACKWARD_BASE}, step: expected {waits} WARPGROUP.DEPBAR, got {waits + len(matmuls)}"
        in backward_deviations(insert(kernel, matmuls, "WARPGROUP.DEPBAR.LE"))
    )
    assert backward_deviations(insert(kernel, matmuls[:1], "STL")) == [
        f"{BACKWARD_BASE}, {part}: expected 0 STL, got 1" for part in (audit.WHOLE, audit.STEP)
    ]
    copies = [i for i in kernel.instructions if i.is_a("UBLKRED")]
    rest = sass.Kernel(tuple(i for i in kernel.instructions if i != copies[0]), kernel.labels)
    assert backward_deviations(rest) == [f"{BACKWARD_BASE}, whole kernel: expected 2 UBLKRED, got 1"]


def test_masks_outside_their_branch_are_refused(disassembler: Path) -> None:
    """A second masked part, or one that every tile runs through."""
    kernel = disassemble(BACKWARD_BASE)
    step = audit.parts(kernel, "window", "backward")[audit.STEP]
    matmul = next(i for i in step.instructions if i.is_a("HGMMA"))
    with pytest.raises(sass.SassError, match=r"2 parts of the loop at .* have R2P, expected one"):
        audit.parts(insert(kernel, [matmul], "R2P"), "window", "backward")
    (loop,) = kernel.innermost_loops("HGMMA", "MUFU")
    part, before = kernel.skipped(loop, "R2P")
    branch = before.instructions[-1]
    assert branch.is_a("BRA")
    rest = sass.Kernel(tuple(i for i in kernel.instructions if i != branch), kernel.labels)
    with pytest.raises(sass.SassError, match="stand behind no branch that skips them"):
        audit.parts(rest, "window", "backward")
    assert part.instructions[0].address > branch.address


def test_a_forward_kernel_is_no_backward_kernel(base: tuple[sass.Kernel, sass.Code]) -> None:
    message = "must have one loop over query tiles inside one over query heads, got 3 inside"
    with pytest.raises(sass.SassError, match=message):
        audit.parts(base[0], "window", "backward")


def test_other_tables_are_named() -> None:
    counts = {"interior": {"total": 3, **dict.fromkeys(audit.GATED, 0)}}
    assert list(audit.deviations("x", counts, None)) == ["x: has no expected counts"]
    assert list(audit.deviations("x", counts, counts)) == []
    assert list(audit.deviations("x", counts, {**counts, "whole kernel": {}})) == [
        "x: expected the parts interior, whole kernel, got interior"
    ]
    assert list(audit.deviations("x", counts, {"interior": {"total": 3}})) == [
        f"x, interior: expected counts of total, got total, {', '.join(audit.GATED)}"
    ]


def test_other_loops_are_refused(base: tuple[sass.Kernel, sass.Code]) -> None:
    message = "mask 'causal' must have 2 loops over key blocks inside one over tiles, got 3 inside"
    with pytest.raises(sass.SassError, match=message):
        audit.parts(base[0], "causal")


# Counted another way ---------------------------------------------------------------------------------------

WHOLE_KERNEL = r"""
"$1" -c "$2" 2>/dev/null > kernel.sass
for pattern in '^ +/\*[0-9a-f]+\*/ ' ' R2P ' ' FSEL ' ' ISETP[.]' ' HGMMA[.]'; do
  grep -cE "$pattern" kernel.sass || true
done
"""

# A loop is what stands between a label and a jump back to it; the smallest with matmuls and no R2P is the
# interior. Behind the end of the kernel stand the slow paths of its waits: straight code that jumps into it.
INTERIOR = r"""
"$1" -c "$2" 2>/dev/null > kernel.sass
awk '/^\.L/ { sub(":", ""); at[$1] = NR }
     / BRA / && match($0, /\.L[0-9_a-z]+/) {
       label = substr($0, RSTART, RLENGTH)
       if (label in at) print NR - at[label], at[label], NR
     }' kernel.sass | sort -n | while read -r _ first last; do
  sed -n "$first,${last}p" kernel.sass > loop.sass
  if grep -q HGMMA loop.sass && ! grep -q R2P loop.sass; then
    awk -v first="$first" -v last="$last" '
      /^\.L/ && NR >= first && NR <= last { sub(":", ""); inside[$1] }
      !/^ +\/\*[0-9a-f]+\*\// { next }
      NR >= first && NR <= last { count++ }
      NR > last { run++ }
      NR > last && /\*\/ +BRA / && match($0, /\.L[0-9_a-z]+/) {
        if (substr($0, RSTART, RLENGTH) in inside) count += run
        run = 0
      }
      END { print count }' kernel.sass
    for pattern in ' R2P ' ' FSEL ' ' ISETP[.]' ' HGMMA[.]'; do
      grep -cE "$pattern" loop.sass || true
    done
    break
  fi
done
"""

COUNTED = (audit.TOTAL, "R2P", "FSEL", "ISETP", "HGMMA")


def count_by_shell(script: str, disassembler: Path, name: str, folder: Path) -> dict[str, int]:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(package_file(FOLDER, SHIPPED[name].file).read_bytes())
    done = subprocess.run(
        ["bash", "-euc", script, "count", disassembler, cubin], cwd=folder, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return dict(zip(COUNTED, map(int, done.stdout.split()), strict=True))


def test_counts_agree_with_grep(tmp_path: Path, disassembler: Path) -> None:
    done = run_command("audit", "--no-compare", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    documents = {document["name"]: document["parts"] for document in json.loads(done.stdout)["variants"]}
    assert list(documents) == list(DEFAULT)

    def printed(name: str, part: str) -> dict[str, int]:
        return {opcode: documents[name][part][opcode]["with_r2p"] for opcode in COUNTED}

    for name in DEFAULT:
        assert printed(name, audit.WHOLE) == count_by_shell(WHOLE_KERNEL, disassembler, name, tmp_path), name
    name = "fwd_bf16_d128_causal_wide"
    assert printed(name, audit.INTERIOR) == count_by_shell(INTERIOR, disassembler, name, tmp_path)


def test_document_has_the_numbers() -> None:
    """docs/r2p.md: the counts with R2P in its table are those of the kernels."""
    document = (Path(__file__).parents[1] / "docs" / "r2p.md").read_text("utf-8")
    table = document.partition("<!-- counted: begin -->")[2].partition("<!-- counted: end -->")[0]
    header, _, *lines = table.strip().splitlines()
    names = [cell.strip() for cell in header.strip("|").split("|")]
    rows = [
        dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True)) for line in lines
    ]
    assert [row["mask"] for row in rows] == ["sequence end only", "causal", "window"]
    for row, name in zip(rows, DEFAULT, strict=True):
        variant = SHIPPED[name]
        expected = audit.load_expected()[variant.name][audit.WHOLE]
        assert row["tile"] == f"{variant.tile_m} x {variant.tile_n}"
        for opcode in ("total", "R2P", "FSEL", "ISETP"):
            assert int(row[opcode].split("->")[1].split("(")[0]) == expected[opcode], (row["mask"], opcode)
