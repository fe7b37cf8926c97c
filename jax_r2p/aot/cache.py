"""Kernels that are compiled on demand and kept, in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import pathlib
from collections.abc import Callable, Sequence

from jax_r2p._manifest import FILE_NAME, InstallationError, Variant, package_file, parse_manifest, read_cubin
from jax_r2p.aot import output
from jax_r2p.aot.compile import COMPILER, BuildError, compile_variants, require_compiler
from jax_r2p.aot.variants import VariantRow


def get(
    rows: Sequence[VariantRow],
    *,
    root: pathlib.Path | None = None,
    jobs: int | None = None,
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, tuple[Variant, bytes]]:
    """Returns facts and code of each of `rows` by name, compiled only if the same was not compiled before.

    Args:
      rows: What to compile.
      root: Where compiled kernels are kept; None for `jax_r2p` in the user's cache folder.
      jobs: How many to compile at once; None for one per processor.
      advance: Called with the name of each that is ready.

    Raises:
      BuildError: There is no compiler, or a kernel does not compile.
      OSError: The folder cannot be written.
    """
    require_compiler()
    folder = (root or _user_folder()) / _key()
    found = _read(folder)
    ready = {row.name: found[row.name] for row in rows if row.name in found}
    for name in ready:
        advance(name)
    missing = [row for row in rows if row.name not in ready]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)  # here, so that it does not fail after a compilation
    for done in compile_variants(missing, jobs=jobs):
        output.write(folder, [done], keep_others=True)
        ready[done.variant.name] = done.variant, done.cubin
        advance(done.variant.name)
    return ready


def _user_folder() -> pathlib.Path:
    try:
        from platformdirs import user_cache_path
    except ImportError:
        raise BuildError("platformdirs is not installed: pip install jax_r2p[aot]") from None
    return user_cache_path("jax_r2p")


def _key() -> str:
    """Hash of everything that decides what is compiled: the sources and the version of the compiler."""
    digest = hashlib.sha256()
    for folder in ("kernels", "aot"):
        for file in sorted(package_file(folder).iterdir(), key=lambda file: file.name):
            if file.name.endswith((".py", ".def")):
                digest.update(f"{folder}/{file.name}\0".encode() + file.read_bytes())
    digest.update(importlib.metadata.version(COMPILER).encode())
    return digest.hexdigest()[:32]


def _read(folder: pathlib.Path) -> dict[str, tuple[Variant, bytes]]:
    """What a folder holds whole; a file that was cut short or altered is compiled again."""
    try:
        manifest = parse_manifest((folder / FILE_NAME).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        (folder / FILE_NAME).unlink()  # or nothing could be added
        return {}
    found = {}
    for variant in manifest.variants:
        with contextlib.suppress(InstallationError):
            found[variant.name] = variant, read_cubin(variant, folder)
    return found
