"""Kernels that are compiled on demand: once, unless what was kept is damaged or the sources are others."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from jax_r2p._manifest import FILE_NAME, load_manifest, package_file, read_cubin
from jax_r2p.aot import cache
from jax_r2p.aot.compile import BuildError, CompiledVariant
from jax_r2p.aot.variants import VARIANTS

ROWS = [VARIANTS["fwd_bf16_d64_none"], VARIANTS["fwd_bf16_d64_window"]]
NAMES = [row.name for row in ROWS]


@pytest.fixture
def compiled(monkeypatch):
    """Names of what is compiled, in place of a compiler: the code is that of the installed kernels."""
    names = []
    shipped = {variant.name: variant for variant in load_manifest().variants}

    def compile_variants(rows, *, jobs):
        for row in rows:
            names.append(row.name)
            variant = shipped[row.name]
            yield CompiledVariant(variant, read_cubin(variant), load_manifest().toolchain)

    monkeypatch.setattr(cache, "require_compiler", lambda: None)
    monkeypatch.setattr(cache, "compile_variants", compile_variants)
    monkeypatch.setattr(cache.importlib.metadata, "version", lambda name: f"version of {name}")
    return names


def only_folder(root: Path) -> Path:
    [folder] = root.iterdir()
    return folder


def test_compiles_once(tmp_path, compiled):
    ready = []
    first = cache.get(ROWS[:1], root=tmp_path, advance=ready.append)
    both = cache.get(ROWS, root=tmp_path, advance=ready.append)
    assert cache.get(ROWS, root=tmp_path, advance=ready.append) == both
    assert compiled == NAMES
    assert ready == [NAMES[0], *NAMES, *NAMES]
    assert {name: variant.name for name, (variant, _) in both.items()} == dict(zip(NAMES, NAMES, strict=True))
    assert all(cubin == read_cubin(variant) for variant, cubin in both.values())
    assert first[NAMES[0]] == both[NAMES[0]]


@pytest.mark.parametrize("damage", [b"", b"\x7fELF, but shorter", None])
def test_a_damaged_kernel_is_compiled_again(tmp_path, compiled, damage):
    before = cache.get(ROWS, root=tmp_path)
    file = only_folder(tmp_path) / f"{NAMES[1]}.cubin"
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    for _ in range(2):
        assert cache.get(ROWS, root=tmp_path) == before
    assert compiled == [*NAMES, NAMES[1]]


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe"])
def test_a_damaged_manifest_costs_all(tmp_path, compiled, damage):
    before = cache.get(ROWS, root=tmp_path)
    (only_folder(tmp_path) / FILE_NAME).write_bytes(damage)
    for _ in range(2):
        assert cache.get(ROWS, root=tmp_path) == before
    assert compiled == [*NAMES, *NAMES]


@pytest.mark.parametrize("change", ["kernels/forward.py", "aot/parameters_forward.def", "compiler"])
def test_other_sources_or_another_compiler_compile_anew(tmp_path, monkeypatch, compiled, change):
    sources = tmp_path / "sources"
    for folder in ("kernels", "aot"):
        (sources / folder).mkdir(parents=True)
        for file in package_file(folder).iterdir():
            if file.is_file():
                (sources / folder / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(cache, "package_file", sources.joinpath)
    root = tmp_path / "cache"
    cache.get(ROWS[:1], root=root)
    (sources / "aot" / "expected_sass.json").write_text("of no matter")
    cache.get(ROWS[:1], root=root)
    assert compiled == NAMES[:1]
    if change == "compiler":
        monkeypatch.setattr(cache.importlib.metadata, "version", lambda name: "another")
    else:
        with (sources / change).open("a") as file:
            file.write("# changed\n")
    cache.get(ROWS[:1], root=root)
    assert compiled == NAMES[:1] * 2
    assert len(list(root.iterdir())) == 2, "the old ones stay"


@pytest.mark.skipif(importlib.util.find_spec("platformdirs") is None, reason="platformdirs is not installed")
def test_is_kept_in_the_users_cache(tmp_path, monkeypatch, compiled):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.get(ROWS[:1])
    assert (only_folder(tmp_path / "jax_r2p") / f"{NAMES[0]}.cubin").exists()


def test_says_what_is_missing(tmp_path, monkeypatch, compiled):
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(BuildError, match=r"platformdirs is not installed: pip install jax_r2p\[aot\]"):
        cache.get(ROWS[:1])
    assert cache.get(ROWS[:1], root=tmp_path).keys() == set(NAMES[:1])


def test_nothing_is_compiled_for_a_folder_that_cannot_be(tmp_path, compiled):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        cache.get(ROWS, root=tmp_path / "file")
    with pytest.raises(OSError, match="/proc/jax_r2p"):
        cache.get(ROWS, root=Path("/proc/jax_r2p"))
    assert compiled == []
