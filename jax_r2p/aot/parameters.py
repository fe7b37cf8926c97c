"""The kernel parameters that the launcher packs, read from `parameters_forward.def` and its like."""

import importlib.resources
import re

from jax_r2p._manifest import Role

_ENTRY = re.compile(r"R2P_PARAMETER\((?P<name>[a-z][a-z0-9_]*), (?P<size>[1-9][0-9]*)\)")


def load_parameters(role: Role) -> tuple[tuple[str, int], ...]:
    """Returns (name, size in bytes) of each parameter of the kernels of a role, in order."""
    file = f"parameters_{role}.def"
    return parse_parameters(importlib.resources.files("jax_r2p.aot").joinpath(file).read_text("utf-8"), file)


def parse_parameters(text: str, file: str) -> tuple[tuple[str, int], ...]:
    """Returns (name, size in bytes) of each `R2P_PARAMETER(name, size)` line of `text`.

    Args:
      text: The list.
      file: Its name, for errors.

    Raises:
      ValueError: A line is neither empty, nor a `//` comment, nor one entry; or a name is used twice.
    """
    parameters: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("//"):
            continue
        match = _ENTRY.fullmatch(line)
        if match is None:
            raise ValueError(f"{file}:{number}: expected R2P_PARAMETER(name, size), got {line!r}")
        if match["name"] in parameters:
            raise ValueError(f"{file}:{number}: parameter {match['name']!r} is listed twice")
        parameters[match["name"]] = int(match["size"])
    return tuple(parameters.items())
