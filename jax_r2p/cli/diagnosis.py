"""What decides whether the kernels are used here: collected as data, printed by `doctor`.

jax is imported by the checks that need it, so that the others run where jax is missing or broken.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import jax_r2p
from jax_r2p._manifest import InstallationError, Variant, load_manifest, read_cubin
from jax_r2p.bench.environment import driver_version
from jax_r2p.cli.output import first_line

if TYPE_CHECKING:
    import jax

Status = Literal["ok", "problem", "not checked"]

_SETTINGS = ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
"""Environment variables that change what jax finds or compiles."""

_HIDING = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
"""Those that can keep jax from seeing a GPU."""

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""The packages with jax's CUDA backend."""

_INSTALL_CUDA = "`pip install 'jax[cuda13]'` (or `'jax[cuda12]'`)"
_UPGRADE = "`pip install --upgrade 'jax[cuda13]'` (or `'jax[cuda12]'`)"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      name: What was checked.
      status: "problem" if it keeps kernels from being used; "not checked" if that was not possible.
      detail: What was found; with a problem, also what to do about it.
    """

    name: str
    status: Status
    detail: str


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A CUDA GPU that jax finds; `compute_capability` is, for example, "9.0"."""

    name: str
    compute_capability: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, in the order of the checks, and the facts among them.

    Attributes:
      findings: At least one for each check.
      gpus: The CUDA GPUs of this process.
      versions: Of python, jax_r2p, jax, jaxlib and the NVIDIA driver; None where there is none.
    """

    findings: tuple[Finding, ...]
    gpus: tuple[Gpu, ...]
    versions: Mapping[str, str | None]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that keep kernels from being used, the most basic one first."""
        return tuple(finding for finding in self.findings if finding.status == "problem")

    @property
    def will_be_used(self) -> bool:
        """Whether every kernel is used where a call has one."""
        return not self.problems

    @property
    def reason(self) -> str | None:
        """The most basic problem; None if there is none."""
        return next((f"{problem.name}: {problem.detail.rstrip('.')}" for problem in self.problems), None)


def diagnose() -> Diagnosis:
    """Makes all checks. What is found is returned, bad as it may be; nothing is raised for it."""
    driver = driver_version()
    jax_itself = _check_jax()
    both_jax = [jax_itself, _after("jaxlib", [jax_itself], _check_jaxlib)]

    backend = _after("CUDA backend", both_jax, _check_backend)
    devices = _devices() if backend.status == "ok" else []
    gpus = _check_gpus(devices)

    manifest = _check_manifest()
    variants = load_manifest().variants if manifest.status == "ok" else ()
    cubins = _check_cubins(variants) if variants else [_skipped("cubins", manifest)]
    library = _after("library", both_jax, _check_library)
    registration = _after("XLA", [*both_jax, manifest, library], _check_registration)
    calls = _after("calls", [backend, *gpus, registration], lambda: _check_calls(variants))
    broken = {finding.name for finding in cubins}
    intact = [variant for variant in variants if _cubin_name(variant) not in broken]
    runs = _check_runs(intact, devices[0]) if calls.status == "ok" else [_skipped("runs", calls)]

    return Diagnosis(
        findings=(
            _check_platform(),
            _check_package(),
            *both_jax,
            _describe_driver(driver),
            _describe_settings(),
            backend,
            *gpus,
            manifest,
            *cubins,
            library,
            registration,
            calls,
            *runs,
        ),
        gpus=tuple(Gpu(device.device_kind, device.compute_capability) for device in devices),
        versions={
            "python": platform.python_version(),
            "jax_r2p": _installed("jax_r2p"),
            "jax": _installed("jax"),
            "jaxlib": _installed("jaxlib"),
            "driver": driver,
        },
    )


def _after(name: str, earlier: Sequence[Finding], check: Callable[[], Finding]) -> Finding:
    """Makes a check that only makes sense if nothing is wrong with `earlier`."""
    for finding in earlier:
        if finding.status != "ok":
            return _skipped(name, finding)
    return check()


def _skipped(name: str, because: Finding) -> Finding:
    return Finding(name, "not checked", f"needs {because.name}, see there")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# What is installed.


def _check_platform() -> Finding:
    system, machine = platform.system(), platform.machine()
    detail = f"Python {platform.python_version()} on {system} {machine}"
    if (system, machine) != ("Linux", "x86_64"):
        return Finding("platform", "problem", f"{detail}; the library is for Linux on x86_64")
    return Finding("platform", "ok", detail)


def _check_package() -> Finding:
    version, place = _installed("jax_r2p"), os.path.dirname(str(jax_r2p.__file__))
    if version is None:
        return Finding("jax_r2p", "not checked", f"version unknown: {place} was not installed by pip")
    return Finding("jax_r2p", "ok", f"{version} in {place}")


def _check_jax() -> Finding:
    if error := _import_error("jax"):
        return Finding("jax", "problem", f"cannot be imported: {error}. {_INSTALL_CUDA} installs it")
    import jax

    from jax_r2p._ffi import release

    oldest = _oldest_demanded("jax")
    if oldest is not None and release(jax.__version__) < release(oldest):
        detail = f"jax_r2p needs jax {oldest} or later, found {jax.__version__}. Upgrade with {_UPGRADE}"
        return Finding("jax", "problem", detail)
    if error := _import_error("jax_r2p._attention"):
        detail = f"jax {jax.__version__} does not go with this jax_r2p: {error}. Upgrade jax_r2p"
        return Finding("jax", "problem", detail)
    return Finding("jax", "ok", jax.__version__)


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a package that is half installed may raise anything on import
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _oldest_demanded(package: str) -> str | None:
    """Returns the version from which on jax_r2p's metadata accepts a package; None if it is not told."""
    try:
        requirements = importlib.metadata.requires("jax_r2p") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [re.fullmatch(rf"{package} *>= *([\d.]+)", requirement) for requirement in requirements]
    return next((match[1] for match in found if match), None)


def _check_jaxlib() -> Finding:
    import jaxlib.version

    from jax_r2p import _ffi

    version = jaxlib.version.__version__
    try:
        _ffi.check_jaxlib(version)
    except InstallationError as error:
        return Finding("jaxlib", "problem", f"{error}. Upgrade with {_UPGRADE}")
    return Finding("jaxlib", "ok", version)


def _describe_driver(version: str | None) -> Finding:
    if version is None:  # no problem by itself: containers may have the driver without the program
        return Finding("NVIDIA driver", "not checked", "version unknown: nvidia-smi is missing or finds none")
    return Finding("NVIDIA driver", "ok", version)


def _describe_settings() -> Finding:
    found = _settings(_SETTINGS)
    return Finding("environment", "ok", found or f"{', '.join(_SETTINGS)} are not set")


def _settings(names: Sequence[str]) -> str:
    return ", ".join(f"{name}={os.environ[name]!r}" for name in names if name in os.environ)


# The GPUs.


def _devices() -> list[jax.Device]:
    from jax_r2p import _dispatch

    return _dispatch.cuda_devices()


def _check_backend() -> Finding:
    installed = [f"{name} {_installed(name)}" for name in _PLUGINS if _installed(name)]
    try:
        devices = _devices()
    # AssertionError: jax 0.10.2, where JAX_PLATFORMS demands CUDA and no NVIDIA GPU is visible.
    except (RuntimeError, AssertionError) as error:
        return Finding("CUDA backend", "problem", _without_gpu(installed, first_line(error)))
    if not devices:
        return Finding("CUDA backend", "problem", _without_gpu(installed, "this process has none"))
    version = " ".join(devices[0].client.platform_version.split())
    return Finding("CUDA backend", "ok", "; ".join([*installed, version]))


def _without_gpu(installed: Sequence[str], reason: str) -> str:
    """Returns what there is to do where jax finds no CUDA GPU."""
    what = f"jax finds no CUDA GPU ({reason})"
    if installed:
        what += f", though {' and '.join(installed)} is installed. See whether nvidia-smi lists one"
    else:
        what += f". Where there is an NVIDIA driver and a GPU, {_INSTALL_CUDA} lets jax use it"
    if hiding := _settings(_HIDING):
        what += f". See also whether {hiding} hides it"
    return what


def _check_gpus(devices: Sequence[jax.Device]) -> list[Finding]:
    if not devices:
        return []
    from jax_r2p import _dispatch

    reasons = [_dispatch.no_kernels(_dispatch.capability_of(device)) for device in devices]
    findings = []
    for device, reason in zip(devices, reasons, strict=True):
        detail = f"{device.device_kind}, compute capability {device.compute_capability}"
        if reason is not None:
            detail += f": {reason}"
            if None in reasons:
                detail += ". A program must run on every GPU that jax sees: hide it by CUDA_VISIBLE_DEVICES"
        findings.append(Finding(f"GPU {device.id}", "ok" if reason is None else "problem", detail))
    return findings


# The files.


def _check_manifest() -> Finding:
    try:
        manifest = load_manifest()
    except InstallationError as error:
        return Finding("manifest", "problem", str(error))
    if not manifest.variants:
        return Finding("manifest", "problem", "it lists no kernel. Reinstall jax_r2p")
    count, cuda = len(manifest.variants), manifest.toolchain.cuda
    return Finding("manifest", "ok", f"{count} kernels, compiled with CUDA {cuda}")


def _cubin_name(variant: Variant) -> str:
    return f"cubin {variant.name}"


def _check_cubins(variants: Sequence[Variant]) -> list[Finding]:
    """Returns one finding for each broken file, or one for all files."""
    findings = []
    for variant in variants:
        try:
            read_cubin(variant)
        except InstallationError as error:
            findings.append(Finding(_cubin_name(variant), "problem", str(error)))
    return findings or [Finding("cubins", "ok", f"{len(variants)} files have the hashes of the manifest")]


def _check_library() -> Finding:
    from jax_r2p import _ffi

    try:
        _ffi.load_library()
    except InstallationError as error:
        return Finding("library", "problem", str(error))
    return Finding("library", "ok", f"{_ffi.LIBRARY} is loaded")


def _check_registration() -> Finding:
    from jax_r2p import _ffi

    try:
        _ffi.register()
    except (RuntimeError, ValueError) as error:  # InstallationError is one; others are XLA's
        return Finding("XLA", "problem", f"does not accept the library: {first_line(error)}")
    targets = f"{_ffi.TARGET}, {_ffi.BACKWARD_TARGET} and {_ffi.PREPROCESS_TARGET}"
    return Finding("XLA", "ok", f"has registered {targets}")


# The kernels.


def _check_calls(variants: Sequence[Variant]) -> Finding:
    from jax_r2p.cli import trial

    for variant in variants:
        call = trial.call_of(variant)
        explanation = jax_r2p.explain(*call.arrays, **call.keywords)
        chosen = call.chosen()
        if explanation.implementation != "r2p" or chosen != variant:
            detail = f"a call for {variant.name} does not run it. {explanation}"
            if variant.role != "forward":
                detail += f" Its gradients: {chosen if isinstance(chosen, str) else chosen.name}."
            return Finding("calls", "problem", detail)
    return Finding("calls", "ok", f"each of the {len(variants)} kernels is chosen by calls")


def _check_runs(variants: Sequence[Variant], device: jax.Device) -> list[Finding]:
    """Returns one finding for each kernel that fails, or one for all."""
    from jax_r2p.cli import trial

    if not variants:
        return [Finding("runs", "not checked", "no cubin is intact")]
    try:
        messages = trial.run_kernels(variants, device)
    except RuntimeError as error:
        return [Finding("runs", "problem", f"the reference does not run: {first_line(error)}")]
    findings = [Finding(f"run {name}", "problem", text) for name, text in messages.items() if text]
    detail = f"{len(variants)} kernels ran on GPU {device.id} and agree with jax_r2p.reference"
    return findings or [Finding("runs", "ok", detail)]
