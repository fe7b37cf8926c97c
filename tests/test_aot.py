"""The build of the cubins: same sources same bytes, what it refuses, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

import jax_r2p
from jax_r2p._manifest import FILE_NAME, FOLDER, Manifest, load_manifest, package_file, parse_manifest
from jax_r2p.aot import __main__ as command_line
from jax_r2p.aot import checks, elf, output, parameters
from jax_r2p.aot.compile import BuildError, CompiledVariant, compile_variants
from jax_r2p.aot.variants import VARIANTS, VariantRow
from jax_r2p.kernels.config import BackwardConfig, ForwardConfig, box_columns

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="needs the kernel compiler: pip install jax_r2p[aot]"
)

NAME = "fwd_bf16_d64_none"
"""The variant that compiles fastest."""


def installed(name: str) -> CompiledVariant:
    manifest = load_manifest()
    (variant,) = [variant for variant in manifest.variants if variant.name == name]
    cubin = package_file(FOLDER, variant.file).read_bytes()
    return CompiledVariant(variant=variant, cubin=cubin, toolchain=manifest.toolchain)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def built(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder as a build of every variant leaves it."""
    folder = tmp_path / "cubins"
    output.write(folder, [installed(name) for name in VARIANTS], keep_others=False)
    return folder


# The command line ------------------------------------------------------------------------------------------


def run(
    *arguments: object, cwd: pathlib.Path, sources: pathlib.Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the build on its own, with the package in `sources` instead of the one under test if given."""
    package = pathlib.Path(jax_r2p.__path__[0])
    path = os.pathsep.join([str(sources or package.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "jax_r2p.aot", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def sources(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the package's sources elsewhere, beside a jax that cannot be imported."""
    folder = tmp_path / "other sources"
    package = pathlib.Path(jax_r2p.__path__[0])
    shutil.copytree(package, folder / "jax_r2p", ignore=shutil.ignore_patterns(FOLDER, "*.so", "__pycache__"))
    (folder / "jax.py").write_text("raise ImportError('the build must not need jax')\n")
    return folder


@needs_compiler
def test_same_sources_same_bytes(tmp_path: pathlib.Path, sources: pathlib.Path) -> None:
    """Neither the place of the sources, of the results and of temporary files nor the environment matters."""
    scratch = tmp_path / "temporary files"
    scratch.mkdir()
    out = tmp_path / "out" / "deep"
    done = run(
        *("--out", out, "--only", NAME),
        cwd=scratch,
        sources=sources,
        TMPDIR=str(scratch),
        PYTHONHASHSEED="1",
        CUTE_DSL_ARCH="sm_100a",
        CUTE_DSL_LINEINFO="1",
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = installed(NAME)  # Other than that? Then the installed kernels are older than the sources.
    assert contents(out) == {
        f"{NAME}.cubin": expected.cubin,
        FILE_NAME: Manifest(toolchain=expected.toolchain, variants=(expected.variant,)).to_json().encode(),
    }
    assert not [path for path in scratch.rglob("*") if path.is_file()], "temporary files are cleaned up"


@needs_compiler
def test_check_and_repair_of_one_variant(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = contents(built)
    cubin = built / f"{NAME}.cubin"
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"\xff")

    arguments = ("--out", "cubins", "--only", NAME, "--jobs", 2)
    found = run(*arguments, "--check", cwd=tmp_path)
    assert found.returncode == 1
    assert [line.partition(":")[0] for line in found.stderr.splitlines()] == [NAME]
    assert f"cubins/{NAME}.cubin is not what these sources build" in found.stderr

    repaired = run(*arguments, cwd=tmp_path)
    assert (repaired.returncode, repaired.stderr) == (0, "")
    assert repaired.stdout.splitlines()[0].startswith(f"{NAME}: ")
    assert f"wrote 1 of {len(VARIANTS)} variants to cubins" in repaired.stdout
    others = {file for file in before if file not in (cubin.name, FILE_NAME)}
    assert {file: before[file] for file in others} == {file: contents(built)[file] for file in others}
    rows = {variant.name: variant for variant in parse_manifest((built / FILE_NAME).read_text()).variants}
    assert list(rows) == sorted(VARIANTS)
    assert rows[NAME].sha256 == hashlib.sha256(cubin.read_bytes()).hexdigest()

    fine = run(*arguments, "--check", cwd=tmp_path)
    assert (fine.returncode, fine.stderr) == (0, "")


@needs_compiler
def test_wrong_parameters_fail_the_build(tmp_path: pathlib.Path, sources: pathlib.Path) -> None:
    listing = sources / "jax_r2p" / "aot" / "parameters_forward.def"
    listing.write_text(listing.read_text().replace("R2P_PARAMETER(scale, 8)\n", ""))
    done = run("--out", "out", "--only", NAME, cwd=tmp_path, sources=sources)
    count = len(parameters.load_parameters("forward"))
    assert done.returncode == 1
    assert f"{NAME}: the launcher packs {count - 1} parameters" in done.stderr
    assert f"the kernel takes {count}\n" in done.stderr
    assert f"{NAME}: parameter 14 must be window_left of 4 bytes, the kernel takes 8 bytes" in done.stderr
    assert not (tmp_path / "out").exists(), "nothing is written"


def test_unknown_names(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--out", str(tmp_path), "--only", NAME, "fwd_bf16", "nothing"]) == 2
    error = capsys.readouterr().err
    assert "unknown variants: fwd_bf16, nothing\n" in error
    assert all(name in error for name in VARIANTS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [[], ["--out"], ["--out", "x", "--jobs", "0"], ["--out", "x", "--only"]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command_line.main(arguments)
    assert error.value.code == 2
    assert "usage: python -m jax_r2p.aot" in capsys.readouterr().err


def test_failed_build_writes_nothing(
    built: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(rows, *, jobs):
        yield installed(rows[0].name)
        raise BuildError(f"{rows[1].name}: does not compile")

    (built / f"{NAME}.cubin").write_bytes(b"old")
    before = contents(built)
    monkeypatch.setattr(command_line, "compile_variants", fail)
    assert command_line.main(["--out", str(built)]) == 1
    assert capsys.readouterr().err == f"{list(VARIANTS)[1]}: does not compile\n"
    assert contents(built) == before


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="the bar needs rich: pip install jax_r2p[aot]")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with command_line._progress(2) as advance:
        advance("the first")
        advance("the second")
    text = terminal.getvalue()
    assert "the first\n" in text.replace("\r", "")
    assert "compiling" in text


# The folder ------------------------------------------------------------------------------------------------


def test_full_build_drops_what_is_no_longer_built(built: pathlib.Path) -> None:
    (built / "notes.txt").write_text("not ours")
    output.write(built, [installed(NAME)], keep_others=False)
    assert set(contents(built)) == {FILE_NAME, f"{NAME}.cubin", "notes.txt"}


def test_interrupted_write_leaves_whole_files(built: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(built)

    def interrupt(self: pathlib.Path, target: pathlib.Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pathlib.Path, "replace", interrupt)
    changed = dataclasses.replace(installed(NAME), cubin=b"new")
    with pytest.raises(KeyboardInterrupt):
        output.write(built, [changed], keep_others=True)
    assert contents(built) == before


def test_one_manifest_describes_one_toolchain(built: pathlib.Path) -> None:
    before = contents(built)
    one = installed(NAME)
    newer = dataclasses.replace(one, toolchain=dataclasses.replace(one.toolchain, ptx="99.9"))
    with pytest.raises(output.OutputError, match=r"ptx='99\.9'.*: build all variants, without --only"):
        output.write(built, [newer], keep_others=True)
    assert contents(built) == before
    output.write(built, [newer], keep_others=False)
    assert "99.9" in (built / FILE_NAME).read_text()


def test_unreadable_manifest(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (built / FILE_NAME).write_text("{}")
    for folder in (built, tmp_path / "nowhere"):
        with pytest.raises(output.OutputError, match=f"cannot read .*{FILE_NAME}"):
            output.differences(folder, [installed(NAME)], whole=False)
    with pytest.raises(output.OutputError, match=f"cannot read .*{FILE_NAME}"):
        output.write(built, [installed(NAME)], keep_others=True)


def test_full_build_replaces_a_manifest_of_another_version(built: pathlib.Path) -> None:
    (built / FILE_NAME).write_text("{}")
    output.write(built, [installed(NAME)], keep_others=False)
    assert [variant.name for variant in parse_manifest((built / FILE_NAME).read_text()).variants] == [NAME]


def test_differences(built: pathlib.Path) -> None:
    everything = [installed(name) for name in VARIANTS]
    first, second, third = everything[:3]
    assert output.differences(built, everything, whole=True) == []
    assert output.differences(built, [first], whole=False) == []

    without_first = output.differences(built, everything[1:], whole=True)
    assert without_first == [f"{first.variant.name}: in {built / FILE_NAME}, but no variant of these sources"]

    (built / second.variant.file).unlink()
    moved = dataclasses.replace(third, variant=dataclasses.replace(third.variant, registers=1))
    changed = output.differences(built, [first, second, moved], whole=False)
    assert [line.partition(":")[0] for line in changed] == [second.variant.name, third.variant.name]
    assert "there is no" in changed[0]
    assert "its facts" in changed[1]

    output.write(built, [first], keep_others=False)
    assert output.differences(built, [second], whole=False) == [
        f"{second.variant.name}: not in {built / FILE_NAME}"
    ]


# Choices of a kernel ---------------------------------------------------------------------------------------


def config_of(**changes: Any) -> ForwardConfig:
    """The dense d256 kernel, whose out tile takes the place of the query, with some choices changed."""
    return dataclasses.replace(VARIANTS["fwd_bf16_d256_none"].config, **changes)


def test_value_is_as_wide_as_key_by_default() -> None:
    fields = {field: value for field, value in vars(config_of()).items() if field != "value_head_dim"}
    assert ForwardConfig(**fields) == config_of()
    assert config_of().name == "fwd_bf16_d256_none"
    other = config_of(value_head_dim=32, out_in_query=False, tile_n=16)
    assert other.name == "fwd_bf16_d256v32_none"


def test_shared_memory_is_that_of_each_width() -> None:
    """Barriers; 128 rows of query and of out; two stages of 16 keys and values."""
    own = config_of(tile_n=16, head_dim=192, value_head_dim=96, out_in_query=False)
    assert own.shared_memory == 1024 + 2 * (128 * 192 + 128 * 96 + 2 * 16 * (192 + 96))
    shared = config_of(tile_n=16)
    assert shared.shared_memory == 1024 + 2 * (128 * 256 + 2 * 16 * 512)
    separate = config_of(tile_n=16, out_in_query=False)
    assert separate.shared_memory == shared.shared_memory + 2 * 128 * 256


def test_boxes_are_the_widest_that_divide_a_tile() -> None:
    assert {width: box_columns(width) for width in (32, 64, 96, 128, 160, 192, 256)} == {
        **dict.fromkeys((64, 128, 192, 256), 64),
        **dict.fromkeys((32, 96, 160), 32),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 80}, r"head_dim=80 must be a multiple of 32 in 32\.\.256"),
        ({"head_dim": 288}, r"head_dim=288 must be a multiple of 32 in 32\.\.256"),
        ({"value_head_dim": 0}, r"value_head_dim=0 must be a multiple of 32 in 32\.\.256"),
        ({"value_head_dim": 128}, "out_in_query needs .* got .* head_dim=256, value_head_dim=128"),
        ({"query_in_registers": True}, "out_in_query needs .* got query_in_registers=True"),
        ({"query_stages": 3}, "query_stages=3 must be 1 or 2"),
        ({"query_stages": 2}, "tiles need 295936 bytes"),
        ({"tile_n": 96}, "tiles need 263168 bytes of shared memory, 232448 are left to each of 1 CTAs"),
        ({"consumer_registers": 248}, "setmaxnreg asks for 520 registers .* the CTA's pool holds 504"),
    ],
    ids=str,
)
def test_impossible_choices(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


def backward_config_of(**changes: Any) -> BackwardConfig:
    """A backward kernel of head dim 128 with some choices changed."""
    config = VARIANTS["bwd_bf16_d128_none"].config
    assert isinstance(config, BackwardConfig)
    return dataclasses.replace(config, **changes)


def test_value_of_a_backward_kernel_is_as_wide_as_key_by_default() -> None:
    fields = {field: x for field, x in vars(backward_config_of()).items() if field != "value_head_dim"}
    assert BackwardConfig(**fields) == backward_config_of()
    assert backward_config_of(value_head_dim=64).name == "bwd_bf16_d128v64_none"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, r"head_dim=96 must be one of \(64, 128, 256\)"),
        ({"value_head_dim": 192}, r"value_head_dim=192 must be one of \(64, 128, 256\)"),
        ({"head_dim": 256}, "heads of more than 128 columns need tile_m=64 and tile_n=64, got 64 and 128"),
        (
            {"head_dim": 256, "value_head_dim": 64, "tile_n": 64},
            "parts of 64 at least, got head_dim=256 and value_head_dim=64",
        ),
        ({"tile_n": 192}, r"tile_n=192 must be one of \(64, 128\)"),
        ({"tile_m": 32}, r"tile_m=32 must be one of \(64, 128\)"),
        ({"tile_m": 128, "tile_n": 64}, "tile_m=128 must be at most tile_n=64"),
        (
            {"head_dim": 64},
            "tile_m=64 and head_dim=64 leave less than 64 x 64 elements of dQ to each of 2 warpgroups",
        ),
        (
            {"head_dim": 256, "tile_n": 64, "dout_stages": 1, "overlap_dkey": False, "delay_dquery": True},
            "delay_dquery is not for warpgroups that divide columns",
        ),
        (
            {"tile_n": 64, "delay_dquery": True},
            "delay_dquery is for 64 x 64 elements of dQ of each warpgroup, got tile_m=64, tile_n=64 and "
            "head_dim=128",
        ),
        ({"stages": 1}, "overlap_dkey needs 2 stages: a step's query rows stay until the next has begun"),
        ({"consumer_registers": 244}, r"consumer_registers=244 must be a multiple of 8 in 24\.\.256"),
        ({"producer_registers": 16}, r"producer_registers=16 must be a multiple of 8 in 24\.\.256"),
        ({"consumer_registers": 248}, "setmaxnreg asks for 520 registers .* the CTA's pool holds 504"),
        (
            {"min_blocks": 2, "consumer_registers": 104},
            "tiles need 206848 bytes .* are left to each of 2 CTAs",
        ),
    ],
    ids=str,
)
def test_impossible_choices_of_a_backward_kernel(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backward_config_of(**changes)


def test_chunks_of_dquery_take_what_room_there_is() -> None:
    """Two stages of 64 rows and 32 columns of float32 for two warps, or one of them, or one of 16 columns."""
    columns = 2 * 64 * 4

    def found(**changes: Any) -> tuple[int, int, int]:
        config = backward_config_of(**changes)
        return config.finish_columns, config.finish_stages, config.shared_memory

    # Barriers and statistics of rows; keys and values, and two stages of queries and douts; two tiles of dS,
    # and what is handed over of dQ.
    tiles = 2048 + 2 * (128 * 256 + 64 * 512) + 2 * 2 * 64 * 128 + 2 * 64 * 64 * 4
    assert found() == (32, 2, tiles + 2 * 32 * columns)
    small = {"tile_n": 64, "head_dim": 64, "value_head_dim": 64, "min_blocks": 2, "consumer_registers": 232}
    tiles = 2048 + 2 * (64 * 128 + 64 * 256) + 2 * 2 * 64 * 64 + 64 * 64 * 4
    assert found(**small) == (32, 1, tiles + 32 * columns)
    # One stage of douts, and a tile of weights.
    wide = {"tile_n": 64, "head_dim": 256, "value_head_dim": 256, "dout_stages": 1, "overlap_dkey": False}
    tiles = 1024 + 2 * (64 * 512 + 64 * 768) + 3 * 2 * 64 * 64 + 2 * 64 * 64 * 4
    assert found(**wide) == (16, 1, tiles + 16 * columns)


@needs_compiler
@pytest.mark.parametrize(
    "changes",
    [
        {"tile_n": 64, "value_head_dim": 64},
        {
            "head_dim": 64,
            "value_head_dim": 64,
            "tile_m": 128,
            "dout_stages": 1,
            "overlap_dkey": False,
            "delay_dquery": True,
        },
        {"tile_n": 64, "value_head_dim": 256, "dout_stages": 1, "overlap_dkey": False},
    ],
    ids=str,
)
def test_backward_kernels_allocate_what_is_counted(changes: dict[str, Any]) -> None:
    """Of choices that no variant has; the build checks those."""
    compiled = list(compile_variants([VariantRow(backward_config_of(**changes))]))
    assert [done.variant.shared_memory for done in compiled] == [backward_config_of(**changes).shared_memory]


# Rules -----------------------------------------------------------------------------------------------------


@needs_compiler
def test_spill_fails_the_build() -> None:
    """64 rows times 256 keys of scores and as many weights do not fit beside the output of 128 columns."""
    config = ForwardConfig(
        dtype="bf16",
        head_dim=128,
        mask="none",
        tile_m=128,
        tile_n=256,
        stages=1,
        producer_registers=24,
        consumer_registers=240,
    )
    message = (
        r"^fwd_bf16_d128_none: uses \d+ bytes of local memory per thread .*, 0 are declared in variants.py$"
    )
    with pytest.raises(BuildError, match=message):
        list(compile_variants([VariantRow(config)]))


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"nvidia-cutlass-dsl is not installed: pip install jax_r2p\[aot\]"):
        list(compile_variants(list(VARIANTS.values())))


@needs_compiler
def test_compiler_error_names_the_variant() -> None:
    config = dataclasses.replace(VARIANTS[NAME].config)
    object.__setattr__(config, "dtype", "fp64")
    with pytest.raises(BuildError, match=r"^fwd_fp64_d64_none: Traceback(?s:.*)KeyError: 'fp64'$"):
        list(compile_variants([VariantRow(config)]))


class Bomb:
    """Ends the process that receives it."""

    name = NAME

    def __reduce__(self):
        return os._exit, (1,)


@needs_compiler
def test_death_of_a_compiler_is_reported() -> None:
    with pytest.raises(BuildError, match=f"one of {NAME}: the compiler's process died"):
        list(compile_variants([Bomb()], jobs=1))  # type: ignore[list-item]


FACTS = elf.KernelFacts(
    entry=f"r2p_{NAME}_0",
    arch="sm_90a",
    parameters=(elf.ParameterSlot(48, 128), elf.ParameterSlot(176, 8), elf.ParameterSlot(184, 4)),
    threads=(512, 1, 1),
    registers=128,
    frame_size=0,
    static_shared_memory=1024,
    cuda_version="12.9",
)


def problems(
    row: VariantRow = VARIANTS[NAME],
    shared_memory: int | None = None,
    parameters: tuple[tuple[str, int], ...] = (("query_map", 128), ("scale", 8), ("window_left", 4)),
    **changes: object,
) -> list[str]:
    return checks.check_kernel(
        row,
        dataclasses.replace(FACTS, **changes),
        entry=FACTS.entry,
        shared_memory=row.config.shared_memory if shared_memory is None else shared_memory,
        parameters=parameters,
    )


def test_good_kernel_passes() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entry": "kernel"}, "entry symbol must be 'r2p_fwd_bf16_d64_none_0', got 'kernel'"),
        ({"arch": "sm_100a"}, "target must be sm_90a, got sm_100a"),
        ({"threads": (384, 1, 1)}, "threads per block must be (512, 1, 1), got (384, 1, 1)"),
        ({"frame_size": 16}, "uses 16 bytes of local memory per thread"),
        ({"registers": 129}, "needs 69632 registers, an SM has 65536 for each of 1 blocks"),
        ({"static_shared_memory": 200000}, "200000 of static shared memory, an SM has 233472 for each of 1"),
        (
            {"shared_memory": 91000},
            f"counts {VARIANTS[NAME].config.shared_memory} bytes of dynamic shared memory, the kernel "
            "allocates 91000",
        ),
        ({"parameters": (("query_map", 128), ("scale", 8))}, "packs 2 parameters (query_map, scale), the"),
        (
            {"parameters": (("query_map", 128), ("window_left", 4), ("scale", 8))},
            "parameter 1 must be window_left of 4 bytes, the kernel takes 8 bytes",
        ),
    ],
)
def test_each_rule(changes: dict[str, object], message: str) -> None:
    found = problems(**changes)  # type: ignore[arg-type]
    assert any(message in problem for problem in found), found


def test_shared_memory_is_divided_among_blocks() -> None:
    """The driver takes 1024 bytes of each block's share: two blocks have 115712 and not 116224 bytes each."""
    row = next(row for row in VARIANTS.values() if row.config.min_blocks == 2)
    facts = {"threads": (row.config.threads, 1, 1)}

    def budget_problems(shared_memory: int) -> list[str]:
        return [problem for problem in problems(row, shared_memory, **facts) if "an SM has" in problem]

    assert budget_problems(115712) == []
    assert len(budget_problems(115713)) == 1


def test_declared_spills_must_be_there() -> None:
    """A declaration that is no longer true must go, or it would hide the next spill."""
    row = dataclasses.replace(VARIANTS[NAME], declared_spills=16)
    assert problems(row, frame_size=16) == []
    assert "uses 0 bytes of local memory" in problems(row, frame_size=0)[0]
