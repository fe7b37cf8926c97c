"""`jax-r2p doctor` on a Hopper GPU: it runs every kernel, and names those that do not run."""

from __future__ import annotations

import hashlib
import json

import pytest
from command_line import copy_package, run_command

from jax_r2p._manifest import FILE_NAME, FOLDER, load_manifest

VARIANTS = load_manifest().variants


def _doctor(folder, *, status, **keywords):
    """The JSON document, and its checks by name."""
    done = run_command("doctor", "--json", cwd=folder, **keywords)
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    document = json.loads(done.stdout)
    return document, {check["name"]: check for check in document["checks"]}


def test_kernels_will_be_used(tmp_path, hopper):
    document, checks = _doctor(tmp_path, status=0)
    assert document["will_be_used"] is True
    assert document["reason"] is None
    assert {"name": hopper.device_kind, "compute_capability": "9.0"} in document["gpus"]
    assert [check for check in checks.values() if check["status"] == "problem"] == []
    assert checks["runs"]["status"] == "ok"
    assert checks["runs"]["detail"].startswith(f"{len(VARIANTS)} kernels ran on GPU ")


def test_altered_cubin_is_named_and_the_others_run(tmp_path):
    package = copy_package(tmp_path)
    altered = VARIANTS[0]
    (package / FOLDER / altered.file).write_bytes(b"no machine code")
    _, checks = _doctor(tmp_path, status=1, first=tmp_path)
    assert checks[f"cubin {altered.name}"]["status"] == "problem"
    assert checks["runs"]["detail"].startswith(f"{len(VARIANTS) - 1} kernels ran on GPU ")


@pytest.mark.parametrize("role", ["forward", "backward"])
def test_cubin_that_the_driver_refuses_is_named(tmp_path, role):
    """Its hash is right, so that only loading it can tell; the others run, those of the other role too."""
    package = copy_package(tmp_path)
    refused = next(variant for variant in VARIANTS if variant.role == role)
    cubin = b"no machine code"
    (package / FOLDER / refused.file).write_bytes(cubin)
    manifest = json.loads((package / FOLDER / FILE_NAME).read_text())
    row = next(row for row in manifest["variants"] if row["name"] == refused.name)
    row.update(sha256=hashlib.sha256(cubin).hexdigest(), size=len(cubin))
    (package / FOLDER / FILE_NAME).write_text(json.dumps(manifest))
    document, checks = _doctor(tmp_path, status=1, first=tmp_path)
    problems = [check["name"] for check in checks.values() if check["status"] == "problem"]
    assert problems == [f"run {refused.name}"]
    assert refused.name in document["reason"]
