"""Runs the `jax-r2p` command as a user does, in a process of its own; also from a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax_r2p
from jax_r2p._ffi import LIBRARY
from jax_r2p._manifest import FOLDER, package_file

# An editable install finds the package by an import hook of its own, which would come before any folder.
_NO_IMPORT_HOOK = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""


def run_command(
    *arguments: str,
    cwd: Path,
    first: Path | None = None,
    stdout: int = subprocess.PIPE,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs `jax-r2p` with these arguments, outside of the checkout.

    cwd: where; first: a folder whose packages come before all others; stdout: where its output goes.
    """
    path = [str(first)] if first else []
    path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return subprocess.run(
        # -P: the installed package, not the folder that the process starts in.
        [sys.executable, "-P", "-m", "jax_r2p", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )


def copy_package(folder: Path) -> Path:
    """Copies the installed package into `folder`, to be damaged, and returns the copy."""
    copy = folder / "jax_r2p"
    shutil.copytree(Path(jax_r2p.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / FOLDER).mkdir(exist_ok=True)
    for file in (*package_file(FOLDER).iterdir(), package_file(LIBRARY)):
        name = file.name if file.name == LIBRARY else f"{FOLDER}/{file.name}"
        (copy / name).write_bytes(file.read_bytes())
    (folder / "sitecustomize.py").write_text(_NO_IMPORT_HOOK)
    return copy


def write_broken_jax(folder: Path, statement: str) -> None:
    """Puts a jax into `folder` that runs `statement` when it is imported."""
    (folder / "jax").mkdir()
    (folder / "jax" / "__init__.py").write_text(statement)
