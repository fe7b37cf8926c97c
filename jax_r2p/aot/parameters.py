"""The kernel parameters that the launcher packs, read from `parameters.def`."""

import importlib.resources
import re

_ENTRY = re.compile(r"R2P_PARAMETER\((?P<name>[a-z][a-z0-9_]*), (?P<size>[1-9][0-9]*)\)")


def load_parameters() -> tuple[tuple[str, int], ...]:
    """Returns (name, size in bytes) of each kernel parameter, in order."""
    return parse_parameters(
        importlib.resources.files("jax_r2p.aot").joinpath("parameters.def").read_text("utf-8")
    )


def parse_parameters(text: str) -> tuple[tuple[str, int], ...]:
    """Returns (name, size in bytes) of each `R2P_PARAMETER(name, size)` line of `text`.

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
            raise ValueError(f"parameters.def:{number}: expected R2P_PARAMETER(name, size), got {line!r}")
        if match["name"] in parameters:
            raise ValueError(f"parameters.def:{number}: parameter {match['name']!r} is listed twice")
        parameters[match["name"]] = int(match["size"])
    return tuple(parameters.items())
