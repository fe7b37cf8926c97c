"""The folder that a build writes: one cubin per variant and the manifest."""

import os
import pathlib
from collections.abc import Sequence

from jax_r2p._manifest import FILE_NAME, Manifest, Variant, parse_manifest
from jax_r2p.aot.compile import CompiledVariant


class OutputError(Exception):
    """The folder does not hold what the build must add to or compare with."""


def write(folder: pathlib.Path, compiled: Sequence[CompiledVariant], *, keep_others: bool) -> None:
    """Writes cubins and manifest to `folder`, which is made if it is not there.

    Each file is replaced in one step and the manifest comes last, so that an interrupted build leaves old or
    new files, but none that is cut short.

    Args:
      folder: Where to.
      compiled: What to write, at least one.
      keep_others: Whether variants that `folder` holds and `compiled` does not stay. If not, their files go.

    Raises:
      OutputError: The others were built with another toolchain, so that no manifest can describe both, or the
        present manifest cannot be read.
    """
    toolchain = compiled[0].toolchain
    others: dict[str, Variant] = {}
    if (folder / FILE_NAME).exists():
        present = _read_to_replace(folder, needed=keep_others)
        others = {variant.name: variant for variant in present.variants} if present else {}
        for built in compiled:
            others.pop(built.variant.name, None)
        if present and keep_others and others and present.toolchain != toolchain:
            raise OutputError(
                f"{folder} was built with {present.toolchain}, this is {toolchain}: "
                f"build all variants, without --only"
            )
    kept = others if keep_others else {}

    folder.mkdir(parents=True, exist_ok=True)
    for built in compiled:
        _replace(folder / built.variant.file, built.cubin)
    variants = [*kept.values(), *(built.variant for built in compiled)]
    manifest = Manifest(
        toolchain=toolchain, variants=tuple(sorted(variants, key=lambda variant: variant.name))
    )
    _replace(folder / FILE_NAME, manifest.to_json().encode())
    for name in others.keys() - kept.keys():
        (folder / others[name].file).unlink(missing_ok=True)


def differences(folder: pathlib.Path, compiled: Sequence[CompiledVariant], *, whole: bool) -> list[str]:
    """Returns how `folder` differs from a new build, one line per variant, starting with its name.

    Args:
      folder: What was built before.
      compiled: The new build.
      whole: Whether `compiled` is all that `folder` should hold.

    Raises:
      OutputError: There is no manifest that can be read.
    """
    manifest = _read(folder)
    present = {variant.name: variant for variant in manifest.variants}
    lines = []
    for built in compiled:
        name = built.variant.name
        path = folder / built.variant.file
        if name not in present:
            lines.append(f"{name}: not in {folder / FILE_NAME}")
        elif not path.exists():
            lines.append(f"{name}: there is no {path}")
        elif path.read_bytes() != built.cubin:
            lines.append(f"{name}: {path} is not what these sources build, sha256 {built.variant.sha256}")
        elif present[name] != built.variant or manifest.toolchain != built.toolchain:
            lines.append(f"{name}: the cubin is the same, but its facts in {folder / FILE_NAME} are not")
    if whole:
        known = {built.variant.name for built in compiled}
        lines += [
            f"{name}: in {folder / FILE_NAME}, but no variant of these sources"
            for name in sorted(present.keys() - known)
        ]
    return lines


def _read_to_replace(folder: pathlib.Path, *, needed: bool) -> Manifest | None:
    """The manifest that a build replaces; None if it cannot be read, as one of another version, and need not.

    The files that it lists then stay.
    """
    try:
        return _read(folder)
    except OutputError:
        if needed:
            raise
        return None


def _read(folder: pathlib.Path) -> Manifest:
    path = folder / FILE_NAME
    try:
        return parse_manifest(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot read {path}: {error}") from error


def _replace(path: pathlib.Path, contents: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(contents)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
