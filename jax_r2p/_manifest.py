"""The manifest: one row per compiled kernel, written by the build and read at run time.

It is the only thing that the two sides share, so this module imports neither jax nor the kernel compiler.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.resources
import json
import typing
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from typing import Any, Literal, TypeVar

_Row = TypeVar("_Row", "Parameter", "Toolchain", "Variant")
_PYTHON_TYPES = {"int": int, "tuple[Parameter, ...]": tuple}

Role = Literal["forward", "backward", "preprocess"]

FORMAT = 1
"""Version of the file's layout. A reader refuses any other."""

FOLDER = "cubins"
"""Folder of the manifest and the cubin files, in the package."""

FILE_NAME = "manifest.json"

HEAD_DIM_MULTIPLE = 8
"""Elements: the tensor memory accelerator wants strides of whole 16 bytes."""


class InstallationError(RuntimeError):
    """A file of the installed package is missing, altered or of another version."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One kernel parameter.

    Attributes:
      name: What the launcher calls it.
      offset: Bytes from the start of the parameter block.
      size: Bytes.
    """

    name: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One compiled kernel.

    Attributes:
      name: Key of the row, for example "fwd_bf16_d128_causal".
      role: What it computes: attention, or the cotangents of query, key and value, or what the kernel for
        these reads beside its operands.
      file: Name of the cubin file, in the manifest's folder.
      sha256: Hash of the file, in lower-case hexadecimal digits.
      size: Bytes of the file.
      entry: Symbol of the kernel in the file.
      arch: What it was compiled for, "sm_90a".
      dtype: Of query, key, value and out: "bf16" or "fp16".
      head_dim: Columns of a query or key tile; heads of 8 to `head_dim` elements run in it.
      value_head_dim: Columns of a value or out tile, likewise.
      mask: The masks it can apply, besides the end of the keys.
      tile_m: Query rows of a thread block; of a backward kernel, those of one step.
      tile_n: Keys of one block of keys; of a backward kernel, those of a thread block. 0 for a preprocess
        kernel, which reads none.
      threads: Threads of a thread block.
      shared_memory: Bytes of dynamic shared memory of a thread block.
      min_blocks: Thread blocks that fit on an SM together.
      least_span: Keys of a row's window from which on this kernel is faster than those with a smaller number.
      parameters: The kernel's parameters in order.
      registers: Registers of a thread at launch.
      spills: Bytes of local memory of a thread.
    """

    name: str
    role: Role
    file: str
    sha256: str
    size: int
    entry: str
    arch: str
    dtype: Literal["bf16", "fp16"]
    head_dim: int
    value_head_dim: int
    mask: Literal["none", "causal", "window"]
    tile_m: int
    tile_n: int
    threads: int
    shared_memory: int
    min_blocks: int
    least_span: int
    parameters: tuple[Parameter, ...]
    registers: int
    spills: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toolchain:
    """Versions that decide the bytes of the kernels.

    Attributes:
      cutlass_dsl: The `nvidia-cutlass-dsl` package.
      nvvm: The compiler from NVVM IR to PTX.
      ptx: The PTX language.
      cuda: The assembler from PTX to machine code.
    """

    cutlass_dsl: str
    nvvm: str
    ptx: str
    cuda: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Every kernel of the package, and what compiled them.

    Attributes:
      toolchain: Shared by all rows.
      variants: Sorted by name, each name once.
    """

    toolchain: Toolchain
    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if names != sorted(set(names)):
            raise ValueError(f"variants must be sorted by name and each name used once, got {names}")

    def to_json(self) -> str:
        """Returns the text of the file; equal manifests give equal bytes."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2, sort_keys=True) + "\n"


def parse_manifest(text: str) -> Manifest:
    """Returns the manifest whose `to_json` is `text`.

    Raises:
      ValueError: `text` is not JSON, has another format, or a field is missing, unknown or of another type.
    """
    document = json.loads(text)
    _require_fields("manifest", document, {"format", "toolchain", "variants"})
    if document["format"] != FORMAT:
        raise ValueError(f"format must be {FORMAT}, got {document['format']!r}")
    return Manifest(
        toolchain=_build(Toolchain, document["toolchain"]),
        variants=tuple(_parse_variant(row) for row in _require_list("variants", document["variants"])),
    )


def _parse_variant(row: Mapping[str, Any]) -> Variant:
    _require_fields("Variant", row, _field_names(Variant))
    rows = _require_list("Variant.parameters", row["parameters"])
    parameters = tuple(_build(Parameter, parameter) for parameter in rows)
    return _build(Variant, {**row, "parameters": parameters})


def _build(cls: type[_Row], values: Mapping[str, Any]) -> _Row:
    """Returns `cls(**values)` after checking that `values` has the names and types of its fields."""
    _require_fields(cls.__name__, values, _field_names(cls))
    for field in dataclasses.fields(cls):
        expected = _PYTHON_TYPES.get(str(field.type), str)
        value = values[field.name]
        if type(value) is not expected:
            raise ValueError(
                f"{cls.__name__}.{field.name} must be of type {expected.__name__}, got {value!r}"
            )
    for name, hint in typing.get_type_hints(cls).items():
        if typing.get_origin(hint) is Literal and values[name] not in typing.get_args(hint):
            raise ValueError(
                f"{cls.__name__}.{name} must be one of {list(typing.get_args(hint))}, got {values[name]!r}"
            )
    return cls(**values)


def _field_names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _require_fields(what: str, values: object, names: set[str]) -> None:
    got = sorted(values) if isinstance(values, dict) else type(values).__name__
    if got != sorted(names):
        raise ValueError(f"{what} must be an object with the fields {sorted(names)}, got {got}")


def _require_list(what: str, values: object) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"{what} must be a list, got {values!r}")
    return values


def package_file(*parts: str) -> Traversable:
    """Returns a file of the installed package.

    By `importlib.resources`, since an editable install keeps built files away from the Python sources.
    """
    return importlib.resources.files("jax_r2p").joinpath(*parts)


def repair_hint(name: str | None = None) -> str:
    """Returns what to do when kernel `name`, or any kernel, is missing or altered; ends an error."""
    only = "" if name is None else f" --only {name}"
    return f"Reinstall jax_r2p, or rebuild with `python -m jax_r2p.aot --out {package_file(FOLDER)}{only}`."


@functools.cache
def load_manifest() -> Manifest:
    """Returns the manifest of the installed package; the file is read once per process.

    Raises:
      InstallationError: The file is missing or cannot be understood.
    """
    file = package_file(FOLDER, FILE_NAME)
    try:
        return parse_manifest(file.read_text("utf-8"))
    except FileNotFoundError:
        raise InstallationError(f"{file} is missing. {repair_hint()}") from None
    except (OSError, ValueError) as error:
        raise InstallationError(f"{file} cannot be read: {error}. {repair_hint()}") from error


def find_preprocess(
    variants: Sequence[Variant], arch: str, dtype: str, value_head_dim: int
) -> Variant | None:
    """Returns the kernel that prepares what backward kernels read; None if there is none.

    Args:
      variants: What to choose from.
      arch: Of the backward kernel; and so is `dtype`.
      dtype: "bf16" or "fp16".
      value_head_dim: Of the call.
    """
    fitting = [
        variant
        for variant in variants
        if (variant.role, variant.arch, variant.dtype) == ("preprocess", arch, dtype)
        and variant.value_head_dim >= value_head_dim
    ]
    return min(fitting, key=lambda variant: variant.value_head_dim, default=None)


def read_cubin(variant: Variant, folder: Traversable | None = None) -> bytes:
    """Returns the kernel's code, from the installed package or from another folder of compiled kernels.

    Raises:
      InstallationError: The file is missing, or is not the one that the manifest describes.
    """
    file = (package_file(FOLDER) if folder is None else folder).joinpath(variant.file)
    try:
        cubin = file.read_bytes()
    except FileNotFoundError:
        raise InstallationError(f"{file} is missing. {repair_hint(variant.name)}") from None
    except OSError as error:
        raise InstallationError(f"{file} cannot be read: {error}. {repair_hint(variant.name)}") from error
    found = hashlib.sha256(cubin).hexdigest()
    if found != variant.sha256:
        raise InstallationError(
            f"{file} is altered: expected sha256 {variant.sha256}, found {found}. {repair_hint(variant.name)}"
        )
    return cubin
