"""Parses the command line and runs a subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from jax_r2p._manifest import InstallationError
from jax_r2p.cli import audit, bench, doctor, variants
from jax_r2p.cli.output import EXIT_FAILED, EXIT_USAGE, CommandError, UsageError

_COMMANDS = {"audit": audit, "variants": variants, "doctor": doctor, "bench": bench}
"""Modules with a docstring, whose first line is the help, `add_arguments(parser)` and `run(options)`."""

_PROGRAM = "jax-r2p"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 if the command failed, or 2 after wrong usage."""
    try:
        try:
            return _run(arguments)
        finally:
            print(end="", flush=True)  # here, not at exit, where a closed pipe can no longer be caught
    except BrokenPipeError:
        # Whoever read the output has enough, as in `jax-r2p audit | head`. What is left in the buffer is
        # written at exit, so it needs a place to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _COMMANDS[options.command].run(options)
    except UsageError as error:
        print(f"{_PROGRAM} {options.command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (CommandError, InstallationError) as error:
        print(f"{_PROGRAM} {options.command}: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Look at the attention kernels of jax_r2p, check them and time them."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        text = str(module.__doc__)
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        module.add_arguments(command)
    return parser
