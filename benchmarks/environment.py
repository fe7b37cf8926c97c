"""What a measurement was taken with: recorded in every row, so that a row can be judged alone."""

from __future__ import annotations

import datetime
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version

import jax


def describe(commit: str) -> dict[str, str]:
    """Device, driver, versions, date (UTC) and the commit that the installed package was built from.

    commit: as given by the caller; an installed package does not know its own.
    """
    device = jax.devices()[0]
    platform = str(device.client.platform_version)
    cuda = re.search(r"cuda[^0-9]*([0-9.]+)", platform)
    return {
        "device": device.device_kind,
        "driver": _driver(),
        "cuda": cuda.group(1) if cuda else "none",
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "jax_r2p": _version("jax-r2p"),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    """The NVIDIA driver's version, or "none" where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.splitlines()[0].strip()
