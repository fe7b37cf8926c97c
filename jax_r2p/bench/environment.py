"""What a measurement was taken with: recorded in every row, so that a row can be judged alone."""

from __future__ import annotations

import datetime
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version

_SMI_SECONDS = 30.0
"""As long as nvidia-smi may take."""


def describe(commit: str) -> dict[str, str]:
    """Returns the device, the driver, versions and the date (UTC). What is not there is "none".

    Args:
      commit: What the installed package was built from; it does not know that itself.
    """
    import jax

    device = jax.devices()[0]
    platform = str(device.client.platform_version)
    cuda = re.search(r"cuda[^0-9]*([0-9.]+)", platform)
    return {
        "device": device.device_kind,
        "driver": driver_version() or "none",
        "cuda": cuda.group(1) if cuda else "none",
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "jax_r2p": _version("jax-r2p"),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def driver_version() -> str | None:
    """Returns the NVIDIA driver's version, or None where nvidia-smi is missing or finds no driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    # One line a GPU, and the driver is the same for all.
    return done.stdout.partition("\n")[0].strip() or None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
