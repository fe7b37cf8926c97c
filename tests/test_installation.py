"""A package whose files are missing, altered or of another version: errors name the file and the remedy."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import re
import threading
import time

import jax
import pytest
from launch_stub import build_native

from jax_r2p import _ffi, _manifest
from jax_r2p._manifest import FILE_NAME, FOLDER, InstallationError, Manifest, load_manifest, parse_manifest

REMEDY = r"Reinstall jax_r2p, or rebuild with `python -m jax_r2p\.aot --out .*cubins"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the installed package's built files, with one kernel, to be damaged."""
    variant = load_manifest().variants[0]
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / variant.file).write_bytes(_manifest.package_file(FOLDER, variant.file).read_bytes())
    manifest = Manifest(toolchain=load_manifest().toolchain, variants=(variant,))
    (tmp_path / FOLDER / FILE_NAME).write_text(manifest.to_json())
    for module in (_manifest, _ffi):
        monkeypatch.setattr(module, "package_file", tmp_path.joinpath)
    load_manifest.cache_clear()
    yield tmp_path
    load_manifest.cache_clear()


def damage(package, **changes):
    """Writes the manifest with fields of its only kernel changed; None drops one."""
    path = package / FOLDER / FILE_NAME
    document = json.loads(path.read_text())
    for name, value in changes.items():
        document["variants"][0][name] = value
        if value is None:
            del document["variants"][0][name]
    path.write_text(json.dumps(document))


def test_manifest_is_read_back(package):
    (variant,) = load_manifest().variants
    assert parse_manifest(load_manifest().to_json()) == load_manifest()
    assert _manifest.read_cubin(variant)[:4] == b"\x7fELF"


def test_missing_manifest(package):
    (package / FOLDER / FILE_NAME).unlink()
    with pytest.raises(InstallationError, match=rf"manifest\.json is missing\. {REMEDY}`"):
        load_manifest()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threads": None}, "Variant must be an object with the fields .*'threads'.*, got "),
        ({"cluster": 1}, "Variant must be an object with the fields .*, got .*'cluster'"),
        ({"threads": "384"}, "Variant.threads must be of type int, got '384'"),
        ({"threads": 384.0}, "Variant.threads must be of type int, got 384.0"),
        ({"file": 3}, "Variant.file must be of type str, got 3"),
        (
            {"parameters": [{"name": "lse", "size": 8}]},
            "Parameter must be an object with the fields .*'offset'",
        ),
        ({"parameters": 7}, "Variant.parameters must be a list, got 7"),
        ({"dtype": "fp8"}, r"Variant.dtype must be one of \['bf16', 'fp16'\], got 'fp8'"),
        ({"parameters": [7]}, "Parameter must be an object with the fields .*, got int"),
    ],
)
def test_wrong_fields(package, changes, message):
    damage(package, **changes)
    with pytest.raises(InstallationError, match=rf"manifest\.json cannot be read: {message}.*{REMEDY}"):
        load_manifest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "manifest must be an object .*, got list"),
        ('{"format": 1}', "manifest must be an object with the fields .*'variants'.*, got "),
        ('{"format": 2, "toolchain": {}, "variants": []}', "format must be 1, got 2"),
    ],
)
def test_no_manifest_at_all(package, text, message):
    (package / FOLDER / FILE_NAME).write_text(text)
    with pytest.raises(InstallationError, match=f"cannot be read: {message}"):
        load_manifest()


def test_variants_that_are_no_list(package):
    path = package / FOLDER / FILE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "variants": 12}))
    with pytest.raises(InstallationError, match="cannot be read: variants must be a list, got 12"):
        load_manifest()


def test_manifest_that_is_no_file(package):
    (package / FOLDER / FILE_NAME).unlink()
    (package / FOLDER / FILE_NAME).mkdir()
    with pytest.raises(InstallationError, match=rf"cannot be read: .*Is a directory.*{REMEDY}"):
        load_manifest()


def test_names_are_unique_and_sorted():
    first, second, *_ = load_manifest().variants
    for variants in ((second, first), (first, first)):
        with pytest.raises(ValueError, match="sorted by name and each name used once"):
            dataclasses.replace(load_manifest(), variants=variants)


def test_missing_cubin(package):
    (variant,) = load_manifest().variants
    (package / FOLDER / variant.file).unlink()
    with pytest.raises(
        InstallationError, match=rf"{variant.file} is missing\. {REMEDY} --only {variant.name}`"
    ):
        _manifest.read_cubin(variant)


def test_cubin_that_is_no_file(package):
    (variant,) = load_manifest().variants
    (package / FOLDER / variant.file).unlink()
    (package / FOLDER / variant.file).mkdir()
    with pytest.raises(InstallationError, match=rf"{variant.file} cannot be read: .* directory.*{REMEDY}"):
        _manifest.read_cubin(variant)


def test_altered_cubin(package):
    (variant,) = load_manifest().variants
    (package / FOLDER / variant.file).write_bytes(b"other bytes")
    found = hashlib.sha256(b"other bytes").hexdigest()
    message = rf"{variant.file} is altered: expected sha256 {variant.sha256}, found {found}\. {REMEDY}"
    with pytest.raises(InstallationError, match=rf"{message} --only {variant.name}`"):
        _manifest.read_cubin(variant)


def test_missing_library(package):
    with pytest.raises(InstallationError, match=r"libjax_r2p\.so cannot be loaded: .*\. Reinstall jax_r2p"):
        _ffi.load_library()


def test_library_of_another_version(package):
    """Any library that has none of the functions."""
    (package / _ffi.LIBRARY).symlink_to(build_native("driver_stub.c", "other.so"))
    with pytest.raises(InstallationError, match=r"libjax_r2p\.so is of another version: .*\. Reinstall"):
        _ffi.load_library()


@pytest.mark.parametrize(
    "version", ["0.7.2", "0.8.0", "0.10.2", "0.12.0.1", "1.0", "0.11.0.dev20260101", "0.8.0rc1", "0.7.2+here"]
)
def test_jaxlib_that_will_do(version):
    _ffi.check_jaxlib(version)


@pytest.mark.parametrize("version", ["0.7.1", "0.6.2", "0.4.38"])
def test_jaxlib_that_is_too_old(version):
    with pytest.raises(
        InstallationError, match=rf"needs jaxlib 0\.7\.2 or later, found {re.escape(version)}"
    ):
        _ffi.check_jaxlib(version)


class Recorder:
    """Stands for the library: keeps what it is told, and answers with `code`."""

    def __init__(self, code=0):
        self.code = code
        self.good, self.broken = [], []

    def __getitem__(self, symbol):
        return symbol

    def r2p_add_variant(self, variant, error, size):
        self.good.append(variant)
        error.value = b"what is wrong"
        return self.code

    def r2p_add_broken_variant(self, name, message, error, size):
        self.broken.append((name.decode(), message.decode()))
        return self.code


@pytest.fixture
def registered(monkeypatch):
    """Collects what is registered with XLA."""
    targets = []
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *a, **k: targets.append((a, k)))
    monkeypatch.setattr(jax.ffi, "pycapsule", lambda symbol: symbol)
    _ffi._register_once.cache_clear()
    yield targets
    _ffi._register_once.cache_clear()


def test_registers_once_from_many_threads(registered, monkeypatch):
    libraries = []

    def load():
        time.sleep(0.05)  # long enough for all threads to be waiting
        libraries.append(Recorder())
        return libraries[-1]

    monkeypatch.setattr(_ffi, "load_library", load)
    threads = [threading.Thread(target=_ffi.register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (library,) = libraries
    assert [v.name.decode() for v in library.good] == [v.name for v in load_manifest().variants]
    assert library.broken == []
    assert registered == [
        (
            (
                target,
                {stage: f"jax_r2p_attention_{role}_{stage}" for stage in ("initialize", "execute")},
            ),
            {"platform": "CUDA"},
        )
        for target, role in (
            (_ffi.TARGET, "forward"),
            (_ffi.BACKWARD_TARGET, "backward"),
            (_ffi.PREPROCESS_TARGET, "preprocess"),
        )
    ]


@pytest.mark.parametrize(("role", "code"), [("forward", 1), ("backward", 2), ("preprocess", 3)])
def test_what_the_library_is_told(registered, monkeypatch, role, code):
    library = Recorder()
    monkeypatch.setattr(_ffi, "load_library", lambda: library)
    _ffi.register()
    pairs = zip(load_manifest().variants, library.good, strict=True)
    variant, told = next((variant, told) for variant, told in pairs if variant.role == role)
    assert told.struct_size == ctypes.sizeof(told)
    assert told.entry.decode() == variant.entry
    # Read as a bytes object it would end at the first zero.
    address = ctypes.c_void_p.from_buffer(told, type(told).cubin.offset).value
    assert ctypes.string_at(address, told.cubin_size) == _manifest.read_cubin(variant)
    assert told.role == code
    for name in ("head_dim", "tile_m", "tile_n", "threads", "shared_memory"):
        assert getattr(told, name) == getattr(variant, name)
    assert {v.name.decode(): v.dtype for v in library.good} == {
        v.name: {"bf16": 16, "fp16": 10}[v.dtype] for v in load_manifest().variants
    }
    parameters = told.parameters[: told.parameter_count]
    assert [(p.name.decode(), p.size) for p in parameters] == [(p.name, p.size) for p in variant.parameters]


def test_a_broken_kernel_does_not_keep_others_from_running(package, registered, monkeypatch):
    library = Recorder()
    monkeypatch.setattr(_ffi, "load_library", lambda: library)
    (variant,) = load_manifest().variants
    (package / FOLDER / variant.file).unlink()
    _ffi.register()
    assert library.good == []
    ((name, message),) = library.broken
    assert name == variant.name
    assert f"{variant.file} is missing" in message
    assert len(registered) == 3


def test_a_failed_registration_can_be_repeated(registered, monkeypatch):
    monkeypatch.setattr(_ffi, "load_library", lambda: Recorder(code=1))
    with pytest.raises(InstallationError, match=r"libjax_r2p\.so refuses a kernel: what is wrong"):
        _ffi.register()
    assert registered == []
    monkeypatch.setattr(_ffi, "load_library", Recorder)
    _ffi.register()
    assert len(registered) == 3


@pytest.fixture
def folder(tmp_path):
    """Two kernels that a build has written elsewhere, under names of their own."""
    variants = []
    for number, variant in enumerate(load_manifest().variants[:2]):
        name = f"other_{number}"
        variants.append(dataclasses.replace(variant, name=name, file=f"{name}.cubin"))
        (tmp_path / f"{name}.cubin").write_bytes(_manifest.read_cubin(variant))
    manifest = Manifest(toolchain=load_manifest().toolchain, variants=tuple(variants))
    (tmp_path / FILE_NAME).write_text(manifest.to_json())
    return tmp_path


def test_kernels_of_a_folder(registered, monkeypatch, folder):
    """They come after the package's own."""
    library = Recorder()
    monkeypatch.setattr(_ffi, "load_library", lambda: library)
    variants = _ffi.register_folder(folder)
    assert [variant.name for variant in variants] == ["other_0", "other_1"]
    own = [variant.name for variant in load_manifest().variants]
    assert [told.name.decode() for told in library.good] == [*own, "other_0", "other_1"]
    for variant, told in zip(variants, library.good[-2:], strict=True):
        address = ctypes.c_void_p.from_buffer(told, type(told).cubin.offset).value
        cubin = ctypes.string_at(address, told.cubin_size)
        assert hashlib.sha256(cubin).hexdigest() == variant.sha256
    assert len(registered) == 3


@pytest.mark.parametrize(("contents", "problem"), [(b"other bytes", "altered"), (None, "missing")])
def test_a_broken_kernel_of_a_folder(registered, monkeypatch, folder, contents, problem):
    """Is an error at once: who measures it wants it."""
    library = Recorder()
    monkeypatch.setattr(_ffi, "load_library", lambda: library)
    (folder / "other_1.cubin").unlink()
    if contents is not None:
        (folder / "other_1.cubin").write_bytes(contents)
    with pytest.raises(InstallationError, match=rf"{re.escape(str(folder))}/other_1\.cubin is {problem}"):
        _ffi.register_folder(folder)
    assert library.broken == []


def test_a_name_that_is_in_use_for_another_kernel(registered, folder):
    """The library itself says so; the same kernel it takes again."""
    own = load_manifest().variants[0]
    other = dataclasses.replace(own, tile_m=own.tile_m + 64)
    (folder / own.file).write_bytes(_manifest.read_cubin(own))

    def write(variant):
        manifest = Manifest(toolchain=load_manifest().toolchain, variants=(variant,))
        (folder / FILE_NAME).write_text(manifest.to_json())

    write(own)
    assert _ffi.register_folder(folder) == (own,)
    write(other)
    message = rf"libjax_r2p\.so refuses a kernel: variant: '{own.name}' is registered already"
    with pytest.raises(InstallationError, match=message):
        _ffi.register_folder(folder)
