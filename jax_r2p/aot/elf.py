"""Read the facts that a cubin states about its kernel.

A cubin is an ELF64 file. The layout of the kernel's parameters, the threads per block, the registers and the
stack frame stand in its `.nv.info` sections as records, so they can be checked with no GPU, driver or CUDA
tool. What a launch needs and no cubin holds: the grid and the dynamic shared memory.
"""

import dataclasses
import struct
from collections.abc import Iterator

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_MACHINE_CUDA = 190
_SECTION_NOBITS = 8
_INFO = ".nv.info"
_TEXT = ".text."

# e_flags of a cubin: the low byte is the SM number, this bit the "a" of sm_90a.
_FLAG_ARCH_SPECIFIC = 0x800

# Attributes of .nv.info records. A record is u8 format, u8 attribute and then, for format 4, u16 size and a
# body; every other format is followed by two bytes of value.
_FORMAT_SIZED = 4
_ATTR_REQUIRED_THREADS = 0x10
_ATTR_FRAME_SIZE = 0x11
_ATTR_PARAMETER = 0x17
_ATTR_REGISTERS = 0x2F
_ATTR_CUDA_VERSION = 0x37


class ElfError(ValueError):
    """The bytes are not a cubin with exactly one kernel, or a record has an unexpected form."""


@dataclasses.dataclass(frozen=True)
class ParameterSlot:
    """Where one kernel parameter lies: both numbers in bytes, the offset relative to the parameter block."""

    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class KernelFacts:
    """What a cubin says about its only kernel.

    Attributes:
      entry: Symbol to ask the driver for.
      arch: Target as the compiler spells it, for example "sm_90a".
      parameters: One slot per kernel parameter, in order.
      threads: Threads per block along x, y and z which the kernel demands.
      registers: Registers per thread at launch (before any `setmaxnreg`).
      frame_size: Bytes of local memory per thread. Not zero as soon as one register is spilled.
      static_shared_memory: Bytes of shared memory beyond the dynamic part, the driver's own share included.
      cuda_version: CUDA version of the assembler, for example "12.9".
    """

    entry: str
    arch: str
    parameters: tuple[ParameterSlot, ...]
    threads: tuple[int, int, int]
    registers: int
    frame_size: int
    static_shared_memory: int
    cuda_version: str


@dataclasses.dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    size: int
    body: bytes


def read_kernel(cubin: bytes) -> KernelFacts:
    """Returns the facts of the one kernel in `cubin`.

    Raises:
      ElfError: `cubin` is no complete ELF64 file for CUDA, holds not exactly one kernel, or lacks a record.
    """
    try:
        return _read_kernel(cubin)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ElfError(f"cubin of {len(cubin)} bytes is cut short or damaged: {error}") from error


def _read_kernel(cubin: bytes) -> KernelFacts:
    flags, sections = _read_sections(cubin)
    entries = [name.removeprefix(_TEXT) for name in sections if name.startswith(_TEXT)]
    if len(entries) != 1:
        raise ElfError(f"cubin must hold exactly one kernel, got {len(entries)}: {entries}")
    (entry,) = entries

    # The file-wide section has a record for each symbol. One kernel means one symbol that uses registers.
    shared_records = list(_records(sections, _INFO))
    own_records = list(_records(sections, f"{_INFO}.{entry}"))
    x, y, z = _values(own_records, _ATTR_REQUIRED_THREADS, "<III", entry)
    _, registers = _values(shared_records, _ATTR_REGISTERS, "<II", entry)
    frames = [
        struct.unpack("<II", body) for attribute, body in shared_records if attribute == _ATTR_FRAME_SIZE
    ]
    (version,) = _values(own_records, _ATTR_CUDA_VERSION, "<I", entry)
    shared = sections.get(f".nv.shared.{entry}")
    return KernelFacts(
        entry=entry,
        arch=f"sm_{flags & 0xFF}{'a' if flags & _FLAG_ARCH_SPECIFIC else ''}",
        parameters=_parameters(own_records),
        threads=(x, y, z),
        registers=registers,
        frame_size=max((size for _, size in frames), default=0),
        static_shared_memory=shared.size if shared else 0,
        cuda_version=f"{version // 10}.{version % 10}",
    )


def _read_sections(cubin: bytes) -> tuple[int, dict[str, _Section]]:
    """Returns the ELF flags and the sections by name."""
    if not cubin.startswith(_ELF64_LITTLE_ENDIAN):
        raise ElfError(f"not an ELF64 file: starts with {cubin[:6]!r}")
    (machine,) = struct.unpack_from("<H", cubin, 0x12)
    if machine != _MACHINE_CUDA:
        raise ElfError(f"ELF file is for machine {machine}, CUDA is {_MACHINE_CUDA}")
    (table_offset,) = struct.unpack_from("<Q", cubin, 0x28)
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    header_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)

    headers = [struct.unpack_from("<IIQQQQ", cubin, table_offset + i * header_size) for i in range(count)]
    names_offset = headers[names_index][4]
    sections = {}
    for name_offset, kind, _, _, offset, size in headers:
        start = names_offset + name_offset
        name = cubin[start : cubin.index(0, start)].decode("ascii")
        body = b"" if kind == _SECTION_NOBITS else cubin[offset : offset + size]
        if kind != _SECTION_NOBITS and len(body) != size:
            raise ElfError(
                f"cubin of {len(cubin)} bytes is cut short: section {name!r} ends at {offset + size}"
            )
        sections[name] = _Section(name, kind, size, body)
    return flags, sections


def _records(sections: dict[str, _Section], name: str) -> Iterator[tuple[int, bytes]]:
    """Yields (attribute, body) of each record of one `.nv.info` section."""
    if name not in sections:
        raise ElfError(f"cubin has no section {name!r}")
    data = sections[name].body
    position = 0
    while position < len(data):
        record_format, attribute, value = struct.unpack_from("<BBH", data, position)
        position += 4
        if record_format == _FORMAT_SIZED:
            yield attribute, data[position : position + value]
            position += value
        else:
            yield attribute, struct.pack("<H", value)


def _values(records: list[tuple[int, bytes]], attribute: int, layout: str, entry: str) -> tuple[int, ...]:
    """Returns the numbers in the only record of an attribute."""
    bodies = [body for found, body in records if found == attribute]
    if len(bodies) != 1:
        raise ElfError(f"kernel {entry!r} must have one record {attribute:#x} in .nv.info, got {len(bodies)}")
    return struct.unpack(layout, bodies[0])


def _parameters(records: list[tuple[int, bytes]]) -> tuple[ParameterSlot, ...]:
    slots = {}
    for attribute, body in records:
        if attribute == _ATTR_PARAMETER:
            _, ordinal, offset, flags = struct.unpack("<IHHI", body)
            slots[ordinal] = ParameterSlot(offset=offset, size=flags >> 18)
    if sorted(slots) != list(range(len(slots))):
        raise ElfError(f"kernel parameters must be numbered 0..{len(slots) - 1}, got {sorted(slots)}")
    return tuple(slots[i] for i in range(len(slots)))
