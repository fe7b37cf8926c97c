"""`jax-r2p variants`, and what all commands share: wrong arguments, closed pipes, narrow terminals."""

from __future__ import annotations

import dataclasses
import json
import os
import re

import pytest
from command_line import copy_package, run_command, write_broken_jax

from jax_r2p._manifest import FILE_NAME, FOLDER, load_manifest

VARIANTS = load_manifest().variants


def to_json(variant):
    return json.loads(json.dumps(dataclasses.asdict(variant)))


def widths(variant):
    if variant.value_head_dim == variant.head_dim:
        return f"8-{variant.head_dim}"
    return f"8-{variant.head_dim}/8-{variant.value_head_dim}"


def test_table_has_every_kernel(tmp_path):
    done = run_command("variants", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    for v in VARIANTS:
        assert rows[v.name] == [
            *(
                v.name,
                v.role,
                v.dtype,
                v.mask + (f">={v.least_span}" if v.least_span else ""),
                widths(v),
                str(v.tile_m),
                "x",
                str(v.tile_n),
                str(v.threads),
            ),
            *(str(v.min_blocks), str(v.shared_memory), str(v.registers), str(v.spills), str(v.size)),
            v.sha256[:12],
        ]
    toolchain = load_manifest().toolchain
    assert done.stdout.splitlines()[-1] == (
        f"Compiled with cutlass-dsl {toolchain.cutlass_dsl}, nvvm {toolchain.nvvm}, ptx {toolchain.ptx}, "
        f"cuda {toolchain.cuda}."
    )


def test_json_is_the_manifest(tmp_path):
    done = run_command("variants", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document.keys() == {"toolchain", "variants"}
    assert document["toolchain"] == dataclasses.asdict(load_manifest().toolchain)
    assert document["variants"] == [to_json(variant) for variant in VARIANTS]


def test_only_those_that_are_named(tmp_path):
    """Once each and in the order of the manifest, however they are asked for."""
    names = [VARIANTS[3].name, VARIANTS[1].name, VARIANTS[3].name]
    document = json.loads(run_command("variants", *names, "--json", cwd=tmp_path).stdout)
    assert document["variants"] == [to_json(VARIANTS[1]), to_json(VARIANTS[3])]


def test_needs_no_jax(tmp_path):
    write_broken_jax(tmp_path, "raise ImportError('no jax here')")
    done = run_command("variants", "--json", cwd=tmp_path, first=tmp_path)
    assert done.returncode == 0, done.stderr


def test_no_manifest(tmp_path):
    package = copy_package(tmp_path)
    (package / FOLDER / FILE_NAME).unlink()
    done = run_command("variants", cwd=tmp_path, first=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"jax-r2p variants: {package / FOLDER / FILE_NAME} is missing. Reinstall")
    assert len(done.stderr.splitlines()) == 1, "no traceback"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "jax-r2p: error: the following arguments are required: COMMAND"),
        (("variant",), "argument COMMAND: invalid choice: 'variant'"),
        (("variants", "--all"), "unrecognized arguments: --all"),
        (
            ("variants", VARIANTS[0].name, "fwd_bf16_d80_none", "x"),
            f"variants: error: no kernel is called fwd_bf16_d80_none, x; there are {VARIANTS[0].name}, ",
        ),
        (("doctor", "--jsn"), "unrecognized arguments: --jsn"),
        (("doctor", "gpu"), "unrecognized arguments: gpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_arguments(tmp_path, arguments, message):
    done = run_command(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [("variants", "Exit status: 0; 1 if"), ("doctor", "0 if the kernels will be used, 1 ")],
)
def test_help_says_what_the_exit_status_means(tmp_path, command, said):
    done = run_command(command, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert said in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("audit", "--no-compare", "--variant", VARIANTS[0].name),
        ("bench", "--list"),
        ("doctor", "--json"),
        ("variants",),
        ("variants", "--json"),
    ],
    ids=" ".join,
)
def test_a_reader_that_has_enough(tmp_path, arguments):
    """As in `jax-r2p variants | head -1`: no traceback, neither from the command nor at the end of Python."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        environment = {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": ""}
        done = run_command(*arguments, cwd=tmp_path, stdout=write_end, **environment)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_narrow_terminal_cuts_nothing_off(tmp_path):
    """A table wider than the terminal is broken by it, like any long line."""
    arguments = ("variants", VARIANTS[0].name)
    reader, terminal = os.openpty()
    try:
        done = run_command(*arguments, cwd=tmp_path, stdout=terminal, COLUMNS="40", TERM="xterm")
        assert (done.returncode, done.stderr) == (0, "")
        shown = os.read(reader, 100_000).decode()
    finally:
        os.close(reader)
        os.close(terminal)
    plain = run_command(*arguments, cwd=tmp_path).stdout
    assert max(map(len, plain.splitlines())) > 80
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r\n", "\n") == plain
