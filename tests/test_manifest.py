"""The installed manifest and cubins say the same, and what the sources say."""

from __future__ import annotations

import hashlib
import re

import pytest

from jax_r2p._manifest import FILE_NAME, FOLDER, Variant, load_manifest, package_file, parse_manifest
from jax_r2p.aot import checks, elf, parameters
from jax_r2p.aot.variants import ARCH, VARIANTS


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Variant:
    (variant,) = [variant for variant in load_manifest().variants if variant.name == request.param]
    return variant


def read_cubin(variant: Variant) -> bytes:
    return package_file(FOLDER, variant.file).read_bytes()


def test_every_variant_is_installed() -> None:
    assert sorted(VARIANTS) == [variant.name for variant in load_manifest().variants]


def test_nothing_else_is_installed() -> None:
    files = {file.name for file in package_file(FOLDER).iterdir()}
    assert files == {FILE_NAME} | {variant.file for variant in load_manifest().variants}


def test_names_are_unique() -> None:
    variants = load_manifest().variants
    for field in ("name", "file", "entry", "sha256"):
        values = {getattr(variant, field) for variant in variants}
        assert len(values) == len(variants), f"two variants share a {field}"


def test_file_is_the_one_that_was_built(variant: Variant) -> None:
    cubin = read_cubin(variant)
    assert (len(cubin), hashlib.sha256(cubin).hexdigest()) == (variant.size, variant.sha256)


def test_kernel_is_what_the_manifest_says(variant: Variant) -> None:
    facts = elf.read_kernel(read_cubin(variant))
    assert facts.entry == variant.entry
    assert facts.arch == variant.arch == ARCH
    assert facts.threads == (variant.threads, 1, 1)
    assert facts.registers == variant.registers
    assert facts.frame_size == variant.spills == VARIANTS[variant.name].declared_spills
    assert facts.cuda_version == load_manifest().toolchain.cuda
    assert [(slot.offset, slot.size) for slot in facts.parameters] == [
        (parameter.offset, parameter.size) for parameter in variant.parameters
    ]


def test_parameters_are_what_the_launcher_packs(variant: Variant) -> None:
    assert [(p.name, p.size) for p in variant.parameters] == list(parameters.load_parameters(variant.role))


def test_tensor_maps_are_aligned(variant: Variant) -> None:
    """A tensor map must lie on 64 bytes. Offsets count from 0x210 in the bank of constants."""
    for parameter in variant.parameters:
        if parameter.name.endswith("_map"):
            assert (0x210 + parameter.offset) % 64 == 0, parameter


def test_row_is_the_config(variant: Variant) -> None:
    config = VARIANTS[variant.name].config
    for field in ("dtype", "head_dim", "value_head_dim", "mask", "tile_m", "tile_n", "threads"):
        assert getattr(variant, field) == getattr(config, field), field
    for field in ("shared_memory", "min_blocks"):
        assert getattr(variant, field) == getattr(config, field), field
    value = "" if variant.value_head_dim == variant.head_dim else f"v{variant.value_head_dim}"
    wide = "_wide" if variant.least_span else ""
    assert variant.role == config.role
    prefix = {"forward": "fwd", "backward": "bwd", "preprocess": "pre"}[variant.role]
    mask = "" if variant.role == "preprocess" else f"_{variant.mask}"
    assert variant.name == f"{prefix}_{variant.dtype}_d{variant.head_dim}{value}{mask}{wide}"
    assert variant.least_span == VARIANTS[variant.name].least_span
    assert variant.file == f"{variant.name}.cubin"
    assert variant.name in variant.entry


def test_build_rules_hold(variant: Variant) -> None:
    problems = checks.check_kernel(
        VARIANTS[variant.name],
        elf.read_kernel(read_cubin(variant)),
        entry=variant.entry,
        shared_memory=variant.shared_memory,
        parameters=parameters.load_parameters(variant.role),
    )
    assert problems == []


def test_nothing_of_the_machine_leaks(variant: Variant) -> None:
    """No path of the build, so that its place does not change the bytes."""
    texts = re.findall(rb"[ -~]{12,}", read_cubin(variant))
    assert any(variant.entry.encode() in text for text in texts)
    assert [text for text in texts if b"/" in text] == []


def test_text_is_canonical() -> None:
    text = package_file(FOLDER, FILE_NAME).read_text("utf-8")
    assert parse_manifest(text).to_json() == text


def test_parameters_refuse_what_they_cannot_read() -> None:
    good = "// comment\n\nR2P_PARAMETER(scale, 8)\n"
    assert parameters.parse_parameters(good, "some.def") == (("scale", 8),)
    for line, message in [
        ("R2P_PARAMETER(scale)", "some.def:4: expected R2P_PARAMETER"),
        ("R2P_PARAMETER(lse, 0)", "some.def:4: expected R2P_PARAMETER"),
        ("R2P_PARAMETER(lse, 8) R2P_PARAMETER(key, 8)", "some.def:4: expected R2P_PARAMETER"),
        ("R2P_PARAMETER(scale, 4)", "some.def:4: parameter 'scale' is listed twice"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            parameters.parse_parameters(good + line, "some.def")


def test_elf_reader_refuses_what_is_no_cubin() -> None:
    cubin = read_cubin(load_manifest().variants[0])
    for data, message in [
        (b"", "not an ELF64 file"),
        (b"\x7fELF\x01\x01" + cubin[6:], "not an ELF64 file"),
        (cubin[:0x12] + b"\x3e\x00" + cubin[0x14:], "for machine 62, CUDA is 190"),
        (cubin[:32], "cut short or damaged"),
        (cubin[: len(cubin) // 2], "cut short"),
        (cubin.replace(b".text.", b".test."), "exactly one kernel, got 0"),
        (cubin.replace(b".nv.info\0", b".nv.inf_\0"), "has no section '.nv.info'"),
    ]:
        with pytest.raises(elf.ElfError, match=re.escape(message)):
            elf.read_kernel(data)
