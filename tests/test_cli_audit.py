"""`jax-r2p audit`, as a user runs it: tables, masks, expected counts, and where something is missing."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import time

import pytest
from command_line import copy_package, run_command

from jax_r2p._manifest import FILE_NAME, FOLDER, Manifest, load_manifest, package_file
from jax_r2p.aot import audit, sass
from jax_r2p.cli.audit import DEFAULT

VARIANTS = {variant.name: variant for variant in load_manifest().variants}
SMALL = "fwd_bf16_d64_window"
OTHER = "fwd_bf16_d64_none"

LONGEST_SECONDS = 60
"""For the default, compilation included, on two cores."""

HIDE_COMPILER = "import sys; sys.modules['cutlass'] = None\n"
HIDE_DISASSEMBLER = "import sys; sys.modules['nvidia'] = None\n"

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the kernel compiler: pip install jax_r2p[aot]"
)


@pytest.fixture(autouse=True, scope="module")
def _disassembler():
    try:
        sass.find_nvdisasm()
    except sass.NvdisasmNotFoundError as error:
        pytest.skip(str(error))


def run_audit(*arguments, status=0, **kwargs):
    """Runs it, checks the exit status, and that only a failure writes to standard error."""
    done = run_command("audit", *map(str, arguments), **kwargs)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == (status != 0 and not done.stdout), done.stderr
    return done


def at_start(folder, code):
    """Runs `code` at the start of processes that have `folder` on their path; adds to what is there."""
    with (folder / "sitecustomize.py").open("a") as file:
        file.write(code)
    return folder


# Tables ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled_cache(tmp_path_factory):
    """The user's cache folder, which the first run fills."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def default_run(compiled_cache, tmp_path_factory):
    """What the command prints without arguments, and the seconds that it takes; compiles three kernels."""
    start = time.perf_counter()
    done = run_audit(cwd=tmp_path_factory.mktemp("work"), XDG_CACHE_HOME=str(compiled_cache))
    return done.stdout, time.perf_counter() - start


@pytest.fixture(scope="module")
def documents(default_run, compiled_cache, tmp_path_factory):
    """The same as JSON, by variant, from a run that finds the kernels in the cache.

    A compiler that cannot be imported stands before the real one.
    """
    folder = tmp_path_factory.mktemp("no-compiler")
    break_compiler(folder)
    done = run_audit("--json", cwd=folder, first=folder, XDG_CACHE_HOME=str(compiled_cache))
    document = json.loads(done.stdout)
    assert document.keys() == {"variants"}
    return {variant["name"]: variant for variant in document["variants"]}


def break_compiler(folder):
    """Puts a compiler into `folder` that can be found but not imported, before the real one."""
    (folder / "cutlass").mkdir()
    (folder / "cutlass" / "__init__.py").write_text("raise ImportError('compiled again')")
    at_start(
        folder, f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    )  # a .pth file leads to the real one


def read_tables(text):
    """Returns {variant: (title, {part: {"without", "with R2P" or "difference": cells}})} and the columns."""
    tables, columns, part = {}, [], ""
    for line in text.splitlines():
        if line.startswith("fwd_"):
            name, _, title = line.partition(": ")
            tables[name] = title, {}
        elif line.split()[:2] == ["part", "masks"]:
            columns = line.split()[2:]
        elif match := re.fullmatch(r" (.*?) +(without|with R2P|difference) +(-?\+?\d.*?) *", line):
            part = match[1].strip() or part
            cells = match[3].replace(" (", "(").split()
            tables[name][1].setdefault(part, {})[match[2]] = cells
    return tables, columns


@needs_compiler
def test_default_takes_less_than_a_minute(default_run):
    """Three tables, of one kernel with each mask, and the compilation of their counterparts."""
    text, seconds = default_run
    assert list(read_tables(text)[0]) == list(DEFAULT)
    assert [VARIANTS[name].mask for name in DEFAULT] == ["none", "causal", "window"]
    assert seconds < LONGEST_SECONDS


@needs_compiler
def test_tables_have_every_part(default_run):
    tables, columns = read_tables(default_run[0])
    assert columns == [*("total", "R2P", "FSEL", "ISETP", "SHF", "LOP3", "MUFU", "HGMMA"), "LDL/STL"]
    for name in DEFAULT:
        title, parts = tables[name]
        variant = VARIANTS[name]
        assert list(parts) == [audit.WHOLE, audit.FIRST, *audit.LOOPS[variant.mask]]
        assert all(list(rows) == ["without", "with R2P", "difference"] for rows in parts.values())
        assert f"tiles {variant.tile_m} x {variant.tile_n}, " in title
        assert re.search(rf"registers \d+ -> {variant.registers}, ", title)
        assert re.search(rf"bytes of shared memory \d+ -> {variant.shared_memory}$", title)


@needs_compiler
def test_json_has_the_numbers_of_the_tables(default_run, documents):
    tables, columns = read_tables(default_run[0])
    assert list(documents) == list(DEFAULT)
    keys = {"without": "without_r2p", "with R2P": "with_r2p", "difference": "difference"}
    for name, document in documents.items():
        assert list(document["parts"]) == list(tables[name][1])
        assert document["registers"]["with_r2p"] == VARIANTS[name].registers
        for part, rows in tables[name][1].items():
            counts = document["parts"][part]
            for label, cells in rows.items():
                numbers = {opcode: counts[opcode][keys[label]] for opcode in counts}
                local = f"{numbers.pop('LDL')}/{numbers.pop('STL')}"
                printed = dict(zip(columns, cells, strict=True))
                assert printed.pop("LDL/STL").replace("+", "") == local
                assert {opcode: int(cell.partition("(")[0]) for opcode, cell in printed.items()} == numbers
            total = counts["total"]
            assert total["difference"] == total["with_r2p"] - total["without_r2p"]
            share = f"({total['difference'] / total['without_r2p']:+.0%})"
            assert rows["difference"][0].endswith(share)


@needs_compiler
def test_r2p_saves_instructions_where_a_bound_crosses(documents):
    """And none in the interior. What is printed is what this package is for."""
    for name, document in documents.items():
        for part, counts in document["parts"].items():
            assert counts["R2P"]["without_r2p"] == 0
            if part == audit.INTERIOR:
                assert counts["R2P"]["with_r2p"] == 0
                assert (
                    abs(counts["total"]["difference"]) <= audit.TOTAL_TOLERANCE * counts["total"]["with_r2p"]
                )
            else:
                assert counts["R2P"]["with_r2p"] > 0, (name, part)
                assert counts["total"]["difference"] < 0, (name, part)
                assert counts["ISETP"]["difference"] < 0, (name, part)


@needs_compiler
def test_a_damaged_kernel_in_the_cache_is_compiled_again(documents, compiled_cache, tmp_path):
    name = DEFAULT[2]
    shutil.copytree(compiled_cache / "jax_r2p", tmp_path / "cache")
    [file] = (tmp_path / "cache").glob(f"*/{name}_compare.cubin")
    before = file.read_bytes()
    file.write_bytes(before[:1000])
    done = run_audit("--variant", name, "--json", "--cache", tmp_path / "cache", cwd=tmp_path)
    assert json.loads(done.stdout)["variants"] == [documents[name]]
    assert file.read_bytes() == before


@needs_compiler
def test_says_why_it_did_not_compile(tmp_path):
    break_compiler(tmp_path)
    arguments = ("--variant", SMALL, "--jobs", "1", "--cache", tmp_path / "cache")
    done = run_command("audit", *map(str, arguments), cwd=tmp_path, first=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"jax-r2p audit: {SMALL}_compare: ")
    assert "ImportError: compiled again\n--no-compare counts the shipped kernels alone" in done.stderr


def test_two_variants_without_compiling(tmp_path):
    """In the order in which they are asked for, each once; no compiler is needed."""
    at_start(tmp_path, HIDE_COMPILER)
    arguments = ["--no-compare", *("--variant", SMALL), *("--variant", OTHER), *("--variant", SMALL)]
    done = run_audit(*arguments, cwd=tmp_path, first=tmp_path)
    tables, _ = read_tables(done.stdout)
    assert list(tables) == [SMALL, OTHER]
    for name, (title, parts) in tables.items():
        assert list(parts) == [audit.WHOLE, audit.FIRST, *audit.LOOPS[VARIANTS[name].mask]]
        assert all(list(rows) == ["with R2P"] for rows in parts.values())
        assert "->" not in title
    expected = audit.load_expected()[SMALL]
    assert {part: int(rows["with R2P"][0]) for part, rows in tables[SMALL][1].items()} == {
        part: counts["total"] for part, counts in expected.items()
    }


def test_backward_kernel(tmp_path):
    """Counted as it is shipped, compiler or not, by its own parts."""
    name = "bwd_bf16_d64_window"
    at_start(tmp_path, HIDE_COMPILER)
    done = run_audit("--variant", name, "--json", cwd=tmp_path, first=tmp_path)
    [document] = json.loads(done.stdout)["variants"]
    assert (document["name"], document["role"]) == (name, "backward")
    expected = audit.load_expected()[name]
    assert list(document["parts"]) == list(expected) == [audit.WHOLE, audit.STEP, audit.MASKED]
    for part, counts in document["parts"].items():
        assert {opcode: counts[opcode] for opcode in ("total", "R2P", "HGMMA")} == {
            opcode: {"with_r2p": expected[part][opcode]} for opcode in ("total", "R2P", "HGMMA")
        }
    shown = run_audit("--show", "--variant", name, cwd=tmp_path, first=tmp_path).stdout
    titles = [line for line in shown.splitlines() if line.startswith("bwd_")]
    assert titles == [
        f"{name}, masked: 2 words of mask bits, 16 instructions turn them into predicates for 64 scores"
    ]


# Masks -----------------------------------------------------------------------------------------------------


def test_show(tmp_path):
    """Every part that masks; no compiler is needed."""
    at_start(tmp_path, HIDE_COMPILER)
    done = run_audit("--show", "--variant", SMALL, cwd=tmp_path, first=tmp_path)
    titles = [line for line in done.stdout.splitlines() if line.startswith("fwd_")]
    assert titles == [
        f"{SMALL}, {part}: 2 words of mask bits, 8 instructions turn them into predicates for 32 scores"
        for part in ("first block", "right-masked", "left-masked")
    ]
    lines = [re.split(" {2,}", line.strip()) for line in done.stdout.splitlines()]
    r2p = [line for line in lines if line[0].startswith("R2P")]
    assert len(r2p) == 12
    assert all(re.fullmatch(r"R2P PR, R\d+(\.reuse)?(\.B1)?, 0x7f", line[0]) for line in r2p)
    scores = "0:8=32 0:9=33 0:10=40 0:11=41 0:12=48 0:13=49 0:14=56"
    assert ["word 0: bits 8-14 -> P0-P6", scores] in [line[1:] for line in r2p]
    assert sum("makes word 1: ones between the two bounds" in line for line in lines) == 2
    assert sum("makes word 1: ones from the lower bound on" in line for line in lines) == 1


def test_show_json(tmp_path):
    done = run_audit("--show", "--variant", OTHER, "--json", cwd=tmp_path)
    [site] = json.loads(done.stdout)["sites"]
    variant = VARIANTS[OTHER]
    assert (site["variant"], site["part"], site["scores"]) == (OTHER, "first block", variant.tile_n // 2)
    assert [word["meaning"] for word in site["words"]] == ["makes word 0: ones below the upper bound"]
    scores = sorted(score for test in site["tests"] for score in test["scores"])
    columns = [pair * 8 + odd for pair in range(variant.tile_n // 8) for odd in (0, 1)]
    assert scores == sorted(f"{row}:{e}={column}" for row in (0, 1) for e, column in enumerate(columns))
    kernel = {
        i.address: i for i in sass.disassemble(package_file(FOLDER, variant.file).read_bytes()).instructions
    }
    for test in site["tests"]:
        instruction = kernel[test["address"]]
        assert test["instruction"] == f"{instruction.opcode} {instruction.operands}"


# Expected counts, in a copy of the package that has two kernels --------------------------------------------


@pytest.fixture
def package(tmp_path):
    copy = copy_package(tmp_path)
    manifest = Manifest(toolchain=load_manifest().toolchain, variants=(VARIANTS[OTHER], VARIANTS[SMALL]))
    (copy / FOLDER / FILE_NAME).write_text(manifest.to_json())
    return copy


def edit_table(package, change):
    path = package / "aot" / audit.EXPECTED_FILE
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def test_check(package, tmp_path):
    """Of all kernels, if none is named; no compiler is needed."""
    at_start(tmp_path, HIDE_COMPILER)
    done = run_audit("--check", cwd=tmp_path, first=tmp_path)
    assert done.stdout == "2 kernels have the expected instructions\n"
    done = run_audit("--check", "--json", "--variant", SMALL, cwd=tmp_path, first=tmp_path)
    assert json.loads(done.stdout) == {"checked": [SMALL], "deviations": []}


def test_check_finds_what_is_not_expected(package, tmp_path):
    def change(table):
        table[SMALL]["interior"]["R2P"] = 7
        table[SMALL]["left-masked"]["total"] *= 2
        del table[OTHER]

    total = audit.load_expected()[SMALL]["left-masked"]["total"]
    edit_table(package, change)
    done = run_audit("--check", cwd=tmp_path, first=tmp_path, status=1)
    lines = [
        f"{OTHER}: has no expected counts",
        f"{SMALL}, interior: expected 7 R2P, got 0",
        f"{SMALL}, left-masked: expected {2 * total} instructions within 3%, got {total}",
    ]
    assert done.stdout.splitlines() == lines
    done = run_audit("--check", "--json", cwd=tmp_path, first=tmp_path, status=1)
    assert json.loads(done.stdout) == {"checked": [OTHER, SMALL], "deviations": lines}


def test_update(package, tmp_path):
    """Writes what it found, says what changed, and drops kernels that are no longer there."""
    path = package / "aot" / audit.EXPECTED_FILE
    original = audit.load_expected()
    edit_table(package, lambda table: table[SMALL]["interior"].update(R2P=7))
    done = run_audit("--update", cwd=tmp_path, first=tmp_path)
    assert done.stdout.splitlines() == [
        f"{SMALL}, interior: expected 7 R2P, got 0",
        f"wrote the counts of 2 kernels to {path}",
    ]
    assert json.loads(path.read_text()) == {name: original[name] for name in (OTHER, SMALL)}
    assert path.read_text().count("\n") == 2 + sum(2 + len(original[name]) for name in (OTHER, SMALL))
    assert '    "interior": {"total": ' in path.read_text()
    run_audit("--check", cwd=tmp_path, first=tmp_path)


def test_update_of_one_kernel_keeps_the_others(package, tmp_path):
    path = package / "aot" / audit.EXPECTED_FILE
    edit_table(package, lambda table: (table.pop(SMALL), table[OTHER]["interior"].update(R2P=9)))
    done = run_audit("--update", "--json", "--variant", SMALL, cwd=tmp_path, first=tmp_path)
    assert json.loads(done.stdout) == {"written": str(path), "changes": [f"{SMALL}: has no expected counts"]}
    table = json.loads(path.read_text())
    assert table[SMALL] == audit.load_expected()[SMALL]
    assert table[OTHER]["interior"]["R2P"] == 9


def test_all_kernels(package, tmp_path):
    done = run_audit("--all", "--no-compare", "--json", cwd=tmp_path, first=tmp_path)
    assert [document["name"] for document in json.loads(done.stdout)["variants"]] == [OTHER, SMALL]


# What can be wrong -----------------------------------------------------------------------------------------


def test_altered_cubin(package, tmp_path):
    file = package / FOLDER / f"{SMALL}.cubin"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for how in ("--no-compare", "--show", "--check"):
        done = run_audit(how, "--variant", SMALL, cwd=tmp_path, first=tmp_path, status=1)
        assert done.stdout == ""
        assert done.stderr.startswith(f"jax-r2p audit: {file} is altered: expected sha256 ")


def test_missing_table(package, tmp_path):
    (package / "aot" / audit.EXPECTED_FILE).unlink()
    done = run_audit("--check", "--variant", SMALL, cwd=tmp_path, first=tmp_path, status=1)
    assert f"{audit.EXPECTED_FILE} is missing. Reinstall" in done.stderr


def test_no_compiler(tmp_path):
    at_start(tmp_path, HIDE_COMPILER)
    done = run_audit("--variant", SMALL, cwd=tmp_path, first=tmp_path, status=1)
    assert done.stderr.splitlines() == [
        "jax-r2p audit: the kernel compiler nvidia-cutlass-dsl is not installed: pip install jax_r2p[aot]",
        "--no-compare counts the shipped kernels alone, without it",
    ]


@pytest.mark.parametrize("how", [(), ("--no-compare",), ("--show",), ("--check",)], ids=" ".join)
def test_no_disassembler(tmp_path, how):
    """Said before anything is compiled."""
    at_start(tmp_path, HIDE_DISASSEMBLER)
    cache = tmp_path / "cache"
    done = run_audit(*how, "--cache", cache, cwd=tmp_path, first=tmp_path, status=1, PATH="")
    assert done.stderr == ("jax-r2p audit: no nvdisasm: `pip install 'jax_r2p[audit]'`, or put it on PATH\n")
    assert not cache.exists()


@needs_compiler
@pytest.mark.parametrize("place", ["file", "/proc/nowhere"])
def test_no_place_for_the_cache(tmp_path, place):
    (tmp_path / "file").write_text("")
    done = run_audit("--variant", SMALL, "--cache", place, cwd=tmp_path, status=1)
    assert re.fullmatch(
        rf"jax-r2p audit: compiled kernels cannot be kept: .*'{place}.*'; --cache DIR sets another place\n",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--variant", "fwd_bf16_d80_none"),
            f"jax-r2p audit: error: --variant must be one of {', '.join(VARIANTS)}, got fwd_bf16_d80_none\n",
        ),
        (("--all", "--variant", SMALL), "argument --variant: not allowed with argument --all"),
        (("--show", "--check"), "argument --check: not allowed with argument --show"),
        (("--jobs", "0"), "jax-r2p audit: error: --jobs must be at least 1, got 0\n"),
        (("--jobs", "many"), "argument --jobs: invalid int value: 'many'"),
        (("--everything",), "unrecognized arguments: --everything"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_arguments(tmp_path, arguments, message):
    done = run_audit(*arguments, cwd=tmp_path, status=2)
    assert done.stdout == ""
    assert message in done.stderr
