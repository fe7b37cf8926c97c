"""`jax-r2p doctor` where there is no GPU, from broken installations, and its logic for machines with GPUs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import types

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from command_line import copy_package, run_command, write_broken_jax

import jax_r2p
from jax_r2p import _dispatch, _ffi
from jax_r2p._ffi import LIBRARY
from jax_r2p._manifest import FILE_NAME, FOLDER, load_manifest
from jax_r2p.cli import diagnosis, doctor, trial

VARIANTS = load_manifest().variants
FORWARD, BACKWARD = (
    [variant for variant in VARIANTS if variant.role == role] for role in ("forward", "backward")
)
ALWAYS = [
    *("platform", "jax_r2p", "jax", "jaxlib", "NVIDIA driver", "environment", "CUDA backend"),
    *("manifest", "cubins", "library", "XLA", "calls", "runs"),
]


def run_doctor(folder, *, copied=False, **environment):
    """The JSON document of `jax-r2p doctor` on a machine that has no GPU, or hides it."""
    environment = {"JAX_PLATFORMS": "cpu", **environment}
    done = run_command("doctor", "--json", cwd=folder, first=folder if copied else None, **environment)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout)
    assert document["will_be_used"] is False
    assert document["reason"]
    return document


def by_name(document):
    return {check["name"]: check for check in document["checks"]}


def statuses(document, *names):
    return [by_name(document)[name]["status"] for name in names]


# As a command, where no GPU is seen.


def test_says_why_not(tmp_path):
    done = run_command("doctor", cwd=tmp_path, JAX_PLATFORMS="cpu", XLA_FLAGS="", CUDA_VISIBLE_DEVICES="1")
    assert done.returncode == 1
    *lines, verdict = done.stdout.splitlines()
    assert [line[:11].rstrip() for line in lines] == [
        next(s for s in ("ok", "problem", "not checked") if line.startswith(s)) for line in lines
    ]
    assert [name for name, line in zip(ALWAYS, lines, strict=True) if not line[13:].startswith(name)] == []
    assert verdict.startswith("The kernels will not be used: CUDA backend: jax finds no CUDA GPU (")
    assert "JAX_PLATFORMS='cpu', CUDA_VISIBLE_DEVICES='1'" in verdict
    (settings,) = (line for line in lines if "environment" in line)
    assert settings.endswith("XLA_FLAGS='', JAX_PLATFORMS='cpu', CUDA_VISIBLE_DEVICES='1'")


def test_json(tmp_path):
    document = run_doctor(tmp_path)
    assert document.keys() == {"will_be_used", "reason", "checks", "gpus", "versions"}
    assert [check["name"] for check in document["checks"]] == ALWAYS
    assert all(check.keys() == {"name", "status", "detail"} for check in document["checks"])
    problems = [check["name"] for check in document["checks"] if check["status"] == "problem"]
    assert problems == ["CUDA backend"]
    assert document["reason"].startswith("CUDA backend: jax finds no CUDA GPU")
    assert document["gpus"] == []
    assert document["versions"]["jax"] == jax.__version__
    assert document["versions"].keys() == {"python", "jax_r2p", "jax", "jaxlib", "driver"}
    assert statuses(document, "jax", "jaxlib", "manifest", "cubins", "library", "XLA") == ["ok"] * 6
    assert statuses(document, "calls", "runs") == ["not checked"] * 2
    assert f"{len(VARIANTS)} files" in by_name(document)["cubins"]["detail"]


def test_cuda_demanded_where_there_is_none(tmp_path):
    """jax 0.10.2 ends in an AssertionError without a text then."""
    document = run_doctor(tmp_path, JAX_PLATFORMS="cuda", CUDA_VISIBLE_DEVICES="")
    assert "JAX_PLATFORMS='cuda'" in document["reason"]
    assert statuses(document, "XLA") == ["ok"]


# As a command, from a broken installation.


def test_broken_cubins(tmp_path):
    package = copy_package(tmp_path)
    missing, altered = VARIANTS[1], VARIANTS[4]
    (package / FOLDER / missing.file).unlink()
    with (package / FOLDER / altered.file).open("ab") as file:
        file.write(b"one byte more")
    document = run_doctor(tmp_path, copied=True)
    checks = by_name(document)
    broken = [name for name in checks if name.startswith("cubin")]
    assert broken == [f"cubin {missing.name}", f"cubin {altered.name}"]
    assert statuses(document, *broken) == ["problem"] * 2
    assert checks[broken[0]]["detail"].startswith(f"{package / FOLDER / missing.file} is missing. ")
    assert f"{altered.file} is altered: expected sha256 {altered.sha256}" in checks[broken[1]]["detail"]
    assert [name for name in checks if name not in broken] == [name for name in ALWAYS if name != "cubins"]
    assert statuses(document, "manifest", "library", "XLA") == ["ok"] * 3


def test_broken_manifest_and_library(tmp_path):
    """Both at once, which saves a process: neither keeps the other from being found."""
    package = copy_package(tmp_path)
    (package / FOLDER / FILE_NAME).write_text("{}")
    (package / LIBRARY).write_bytes(b"no library")
    document = run_doctor(tmp_path, copied=True)
    checks = by_name(document)
    assert list(checks) == ALWAYS
    assert statuses(document, "manifest", "library") == ["problem"] * 2
    assert f"{package / FOLDER / FILE_NAME} cannot be read: " in checks["manifest"]["detail"]
    assert f"{package / LIBRARY} cannot be loaded: " in checks["library"]["detail"]
    assert statuses(document, "cubins", "XLA", "calls", "runs") == ["not checked"] * 4
    assert statuses(document, "jax", "jaxlib") == ["ok"] * 2


@pytest.mark.parametrize("name", [f"{FOLDER}/{FILE_NAME}", LIBRARY])
def test_missing_file(tmp_path, name):
    package = copy_package(tmp_path)
    (package / name).unlink()
    document = run_doctor(tmp_path, copied=True)
    assert list(by_name(document)) == ALWAYS
    check = {FILE_NAME: "manifest", LIBRARY: "library"}[(package / name).name]
    assert statuses(document, check) == ["problem"]
    assert str(package / name) in by_name(document)[check]["detail"]
    assert "Reinstall jax_r2p" in by_name(document)[check]["detail"]


@pytest.mark.parametrize(
    "error", ["ImportError('libcudart is gone')", "AttributeError('numpy has no libcudart')"]
)
def test_jax_that_cannot_be_imported(tmp_path, error):
    """A mix of versions raises what it likes."""
    write_broken_jax(tmp_path, f"raise {error}")
    document = run_doctor(tmp_path, copied=True)
    assert document["reason"].startswith(f"jax: cannot be imported: {error.partition('(')[0]}: ")
    assert "libcudart" in document["reason"]
    assert list(by_name(document)) == ALWAYS
    assert statuses(document, "manifest", "cubins") == ["ok"] * 2
    after = ("jaxlib", "CUDA backend", "library", "XLA", "calls", "runs")
    assert statuses(document, *after) == ["not checked"] * len(after)


# Versions.


def test_jax_that_is_too_old(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy", "jaxlib>=98", "jax>=99.1"])
    finding = diagnosis._check_jax()
    assert finding.status == "problem"
    assert f"needs jax 99.1 or later, found {jax.__version__}" in finding.detail


def test_jaxlib_that_is_too_old(monkeypatch):
    monkeypatch.setattr(jaxlib.version, "__version__", "0.7.1")
    finding = diagnosis._check_jaxlib()
    assert finding.status == "problem"
    assert "needs jaxlib 0.7.2 or later, found 0.7.1" in finding.detail


def test_jax_whose_interfaces_are_gone(monkeypatch):
    """A jax of the future: `import jax` works, that of jax_r2p's functions does not."""
    import_module = diagnosis.importlib.import_module

    def fail(name):
        if name == "jax_r2p._attention":
            raise AttributeError("module 'jax.extend.core' has no attribute 'Primitive'")
        return import_module(name)

    monkeypatch.setattr(diagnosis.importlib, "import_module", fail)
    finding = diagnosis._check_jax()
    assert finding.status == "problem"
    assert "does not go with this jax_r2p: AttributeError: module 'jax.extend.core'" in finding.detail


def test_other_machine(monkeypatch):
    monkeypatch.setattr(diagnosis.platform, "machine", lambda: "aarch64")
    finding = diagnosis._check_platform()
    assert finding.status == "problem"
    assert finding.detail.endswith("on Linux aarch64; the library is for Linux on x86_64")


# With GPUs, which are pretended.


@dataclasses.dataclass
class Device:
    device_kind: str
    compute_capability: str
    id: int = 0
    client: object = dataclasses.field(
        default_factory=lambda: types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    )


HOPPER, AMPERE = Device("NVIDIA H200", "9.0"), Device("NVIDIA A100", "8.0", id=1)


@pytest.fixture
def machine(monkeypatch):
    """Pretends that this process has GPUs, and that their kernels run as told: name -> what went wrong."""

    def pretend(*devices, messages=None, default="gpu"):
        asked = []

        def run_kernels(variants, device):
            asked.append((device, [variant.name for variant in variants]))
            return {variant.name: (messages or {}).get(variant.name) for variant in variants}

        monkeypatch.setattr(_dispatch, "cuda_devices", lambda: list(devices))
        monkeypatch.setattr(jax, "default_backend", lambda: default)
        monkeypatch.setattr(trial, "run_kernels", run_kernels)
        monkeypatch.setattr(diagnosis, "driver_version", lambda: "580.159.04")
        return asked

    return pretend


def find(result, name):
    (finding,) = (finding for finding in result.findings if finding.name == name)
    return finding


def test_hopper(machine, capsys):
    asked = machine(HOPPER)
    assert doctor.run(argparse.Namespace(json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "The kernels will be used."
    assert any(line.endswith("NVIDIA H200, compute capability 9.0") for line in lines)
    assert lines[-2].endswith(f"{len(VARIANTS)} kernels ran on GPU 0 and agree with jax_r2p.reference")
    assert asked == [(HOPPER, [variant.name for variant in VARIANTS])]
    assert doctor.run(argparse.Namespace(json=True)) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["will_be_used"], document["reason"]) == (True, None)
    assert document["gpus"] == [{"name": "NVIDIA H200", "compute_capability": "9.0"}]
    assert document["versions"]["driver"] == "580.159.04"


def test_backend_is_told_in_one_line(machine):
    machine(HOPPER)
    assert find(diagnosis.diagnose(), "CUDA backend").detail.endswith("PJRT C API cuda 13000")


def test_a_kernel_that_does_not_run(machine):
    machine(HOPPER, messages={VARIANTS[2].name: "INTERNAL: no binary for this GPU"})
    result = diagnosis.diagnose()
    assert result.reason == f"run {VARIANTS[2].name}: INTERNAL: no binary for this GPU"
    assert len(result.problems) == 1
    assert not result.will_be_used


def test_kernels_with_broken_files_are_not_run(machine, monkeypatch):
    asked = machine(HOPPER)
    broken = VARIANTS[5]

    def read_cubin(variant):
        if variant == broken:
            raise diagnosis.InstallationError("it is altered.")

    monkeypatch.setattr(diagnosis, "read_cubin", read_cubin)
    result = diagnosis.diagnose()
    assert result.reason == f"cubin {broken.name}: it is altered"
    ((_, names),) = asked
    assert names == [variant.name for variant in VARIANTS if variant != broken]


def test_other_gpu(machine):
    asked = machine(AMPERE)
    result = diagnosis.diagnose()
    assert result.reason == (
        "GPU 1: NVIDIA A100, compute capability 8.0: no kernel for compute capability 8.0; "
        "9.0 (Hopper) has one"
    )
    assert [find(result, name).status for name in ("calls", "runs")] == ["not checked"] * 2
    assert asked == []


def test_other_gpu_beside_a_hopper(machine):
    machine(HOPPER, AMPERE)
    result = diagnosis.diagnose()
    assert find(result, "GPU 0").status == "ok"
    assert find(result, "GPU 1").status == "problem"
    assert find(result, "GPU 1").detail.endswith("hide it by CUDA_VISIBLE_DEVICES")


def test_gpu_that_is_not_the_default(machine):
    """JAX_PLATFORMS=cpu,cuda: then a plain call runs on the CPU."""
    asked = machine(HOPPER, default="cpu")
    result = diagnosis.diagnose()
    assert result.reason is not None
    assert result.reason.startswith(f"calls: a call for {VARIANTS[0].name} does not run it.")
    assert "this is for platform cpu" in result.reason
    assert asked == []


def test_no_gpu_for_this_process(machine):
    machine()
    assert "jax finds no CUDA GPU (this process has none)" in str(diagnosis.diagnose().reason)


def test_plugin_that_finds_no_gpu(machine, monkeypatch):
    monkeypatch.setattr(diagnosis, "_installed", {"jax-cuda13-plugin": "0.10.2"}.get)
    machine()
    reason = str(diagnosis.diagnose().reason)
    assert "though jax-cuda13-plugin 0.10.2 is installed. See whether nvidia-smi lists one" in reason
    assert "pip install" not in reason


@pytest.mark.parametrize("error", [RuntimeError("it is of version 9"), ValueError("registered twice\nat")])
def test_library_that_xla_refuses(machine, monkeypatch, error):
    def register():
        raise error

    machine(HOPPER)
    monkeypatch.setattr(_ffi, "register", register)
    result = diagnosis.diagnose()
    assert result.reason == f"XLA: does not accept the library: {str(error).splitlines()[0]}"


# The run of the kernels, with the reference in their place.


def attention(*arrays, implementation, change=lambda variant, out: out, **keywords):
    out, residual = jax_r2p.attention(*arrays, **keywords, implementation="xla")
    return (out if implementation == "xla" else change(arrays[0], out)), residual


def run_kernels(monkeypatch, variants, change):
    """The reference's results take the place of the kernels', after `change` of the first of each."""

    def gradients(arrays, rows, cotangents, *, spec):
        dquery, *others = true_gradients(arrays, rows, cotangents, spec=spec)
        return change(arrays[0], dquery), *others

    true_gradients = trial.gradients
    monkeypatch.setattr(trial, "gradients", gradients)
    monkeypatch.setattr(trial, "attention", lambda *a, **k: attention(*a, **k, change=change))
    monkeypatch.setattr(trial, "_require_backward_kernels", lambda calls, text: None)
    return trial.run_kernels(variants, jax.devices()[0])


def test_each_kernel_has_its_call(monkeypatch):
    monkeypatch.setattr(_dispatch, "cuda_capabilities", lambda: frozenset({(9, 0)}))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for variant in VARIANTS:
        call = trial.call_of(variant)
        assert call.chosen() == variant
        explanation = jax_r2p.explain(*call.arrays, **call.keywords)
        assert explanation.implementation == "r2p"
        assert (explanation.variant == variant.name) == (variant.role == "forward")


def test_kernels_that_are_right(monkeypatch):
    messages = run_kernels(monkeypatch, VARIANTS, lambda _, out: out)
    assert messages == dict.fromkeys(v.name for v in VARIANTS)
    assert list(messages) == [v.name for v in VARIANTS]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 0.0], ids=str)
@pytest.mark.parametrize(("variants", "what"), [(FORWARD, "out"), (BACKWARD, "dquery")], ids=["out", "dq"])
def test_a_result_that_is_wrong_in_one_place(monkeypatch, variants, what, wrong):
    narrow, wide = (next(v for v in variants if v.head_dim == width) for width in (64, 128))

    def change(query, out):
        largest = jnp.unravel_index(jnp.argmax(jnp.abs(out)), out.shape)
        return out.at[largest].set(wrong) if query.shape[-1] == 128 else out

    messages = run_kernels(monkeypatch, (wide, narrow), change)
    assert messages[narrow.name] is None
    assert f"{what} differs from the reference by " in str(messages[wide.name])


@pytest.mark.parametrize("variants", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_a_kernel_that_fails_is_named(monkeypatch, variants):
    """The others are still run, each by itself."""
    calls = []

    def change(query, out):
        calls.append(query.dtype.name)
        if query.dtype == jnp.float16:
            raise RuntimeError("INTERNAL: cannot be loaded\nand more lines")
        return out

    half = next(variant for variant in variants if variant.dtype == "fp16")
    messages = run_kernels(monkeypatch, (variants[0], half), change)
    assert messages == {variants[0].name: None, half.name: "INTERNAL: cannot be loaded"}
    assert calls == ["bfloat16", "float16", "bfloat16", "float16"]


def test_a_mask_that_is_off_by_one(monkeypatch):
    """Gradients of a window that shows one key more: what a kernel with a wrong bound would give."""
    variants = [variant for variant in BACKWARD if variant.mask == "window"]
    true_gradients = trial.gradients

    def gradients(arrays, rows, cotangents, *, spec):
        return true_gradients(arrays, rows, cotangents, spec=dataclasses.replace(spec, left=spec.left + 1))

    monkeypatch.setattr(trial, "_require_backward_kernels", lambda calls, text: None)
    monkeypatch.setattr(trial, "gradients", gradients)
    messages = trial.run_kernels(variants, jax.devices()[0])
    assert all("differs from the reference" in str(message) for message in messages.values())


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (FORWARD, "this is for platform cpu"),
        (BACKWARD, f"the gradients of a call for {BACKWARD[0].name} run as plain XLA"),
    ],
    ids=["forward", "backward"],
)
def test_where_no_kernel_runs(variants, message):
    """A fallback does not pass for a kernel."""
    messages = trial.run_kernels(variants[:1], jax.devices("cpu")[0])
    assert message in str(messages[variants[0].name])


def test_gradients_without_a_kernel_are_told(machine, monkeypatch):
    """A build that has lost a backward kernel: its calls would run as plain XLA."""
    machine(HOPPER)
    monkeypatch.setattr(_dispatch, "cuda_capabilities", lambda: frozenset({(9, 0)}))
    monkeypatch.setattr(trial.Call, "chosen", lambda call: "this build has no backward kernel")
    reason = str(diagnosis.diagnose().reason)
    assert reason.startswith(f"calls: a call for {VARIANTS[0].name} does not run it. ")
    assert reason.endswith("Its gradients: this build has no backward kernel")
