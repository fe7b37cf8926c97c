"""Check that the kernels will be used here, or say why not.

Looks at the versions of jax, jaxlib and the NVIDIA driver, at the GPUs, and at every file of the package.
Where there is a Hopper GPU, each kernel is run once on it and compared with the reference: forward kernels by
what they compute, backward kernels by the gradients. The last line is
the verdict.

Exit status: 0 if the kernels will be used, 1 otherwise; 2 after wrong arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import os

from jax_r2p.cli.diagnosis import Diagnosis, diagnose
from jax_r2p.cli.output import EXIT_FAILED, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand, which has none of its own."""


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit status."""
    # A GPU that is in use has no three quarters of its memory left, which jax would take at its start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    diagnosis = diagnose()
    if options.json:
        print_json(_to_json(diagnosis))
    else:
        _print(diagnosis)
    return 0 if diagnosis.will_be_used else EXIT_FAILED


def _to_json(diagnosis: Diagnosis) -> dict[str, object]:
    return {
        "will_be_used": diagnosis.will_be_used,
        "reason": diagnosis.reason,
        "checks": [dataclasses.asdict(finding) for finding in diagnosis.findings],
        "gpus": [dataclasses.asdict(gpu) for gpu in diagnosis.gpus],
        "versions": dict(diagnosis.versions),
    }


def _print(diagnosis: Diagnosis) -> None:
    """Prints a line for each finding, in full length: a hash or a path that is cut off helps nobody."""
    names = max(len(finding.name) for finding in diagnosis.findings)
    for finding in diagnosis.findings:
        print(f"{finding.status:11}  {finding.name:{names}}  {finding.detail}")
    print(_verdict(diagnosis))


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.will_be_used:
        return "The kernels will be used."
    count = len(diagnosis.problems)
    more = f" This is the first of {count} problems." if count > 1 else ""
    return f"The kernels will not be used: {diagnosis.reason}.{more}"
