"""`benchmarks/multi_gpu.py` on two, three and four CPU devices: its rows, and what it makes of failures.

No time is judged there, and no kernel runs. Times and the CUDA contexts are tested with made-up ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
import unittest.mock
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "multi_gpu.py"


def start(
    *arguments: str, devices: int = 2, program: tuple[str, ...] = (str(SCRIPT),)
) -> subprocess.CompletedProcess[str]:
    variables = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.run(
        [sys.executable, *program, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture
def script(monkeypatch):
    """The script as a module. What it sets in the environment is of this test only."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import multi_gpu

    return multi_gpu


@pytest.fixture
def run(script, tmp_path):
    """A run of the tiny size that may take its time, on the devices that tests have."""
    return script.Run(script.parse(["--size", "tiny", "--out", str(tmp_path / "rows.jsonl")]))


def test_the_example_is_run_as_asked():
    """On one CPU device: its losses by step, and its tokens a second."""
    code = (
        f"import json, sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import multi_gpu, types\n"
        "run = types.SimpleNamespace(size=multi_gpu.SIZES['tiny'], on_gpu=False)\n"
        "print(json.dumps(multi_gpu.train_on(run, (0,), 2)))"
    )
    done = start("-c", code, program=())
    assert done.returncode == 0, done.stdout + done.stderr
    losses, speed = json.loads(done.stdout.splitlines()[-1])
    assert set(losses) == {"1", "2", "3"}
    assert all(3 < loss < 7 for loss in losses.values())  # 256 bytes, all as likely: 5.5
    assert speed > 0


@pytest.mark.parametrize(
    ("given", "devices", "names"),
    [(None, (0, 2), "0,2"), ("", (1,), "1"), ("5,GPU-ab,3", (0, 2), "5,3"), ("5,GPU-ab,3", (1,), "GPU-ab")],
)
def test_gpus_of_a_process_are_among_those_given(script, monkeypatch, given, devices, names):
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert script.visible(devices) == names


@pytest.mark.parametrize(
    ("curves", "ok"),
    [
        (({1: 5.0, 9: 2.0}, {1: 5.01, 9: 1.96}), True),
        (({1: 5.0, 9: 2.0}, {1: 5.0, 9: 1.94}), False),
        (({1: 5.0, 9: 2.0}, {1: 5.0, 8: 2.0}), None),
    ],
    ids=["noise", "apart", "other steps"],
)
def test_training(script, run, monkeypatch, curves, ok):
    """The curve of one device with the same batch is asked for; the runs are made up here."""
    one, two = curves
    every = (0, 1)
    runs = {((0,), 2): (one, 12.0), ((1,), 2): ({}, 10.0), (every, 2): (two, 11.0), (every, 4): ({}, 18.0)}
    run.count = 2
    monkeypatch.setattr(script, "train_on", lambda run, devices, batch: runs[devices, batch])
    script.train(run)
    curve, speed = run.rows
    assert curve["what"] == "train: loss curve"
    if ok is None:
        assert curve["ok"] is False
        assert "curves with other steps: [1, 9], [1, 8]" in curve["error"]
    else:
        assert (curve["ok"], curve["steps"], curve["last_losses"]) == (ok, 9, [2.0, two[9]])
    assert speed["tokens_per_second"] == {"alone": [12.0, 10.0], "all": 18.0}
    assert speed["efficiency"] == 0.9


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_devices_can_split_the_batch_of_one(script, run, monkeypatch, count):
    seen = []
    run.count = count
    monkeypatch.setattr(script, "train_on", lambda run, *one: seen.append(one) or ({1: 5.0}, 1.0))
    script.train(run)
    assert len(seen) == len(set(seen)) == count + 2
    assert all(batch % len(devices) == 0 for devices, batch in seen)
    assert {batch for devices, batch in seen if len(devices) == 1} == {-(-2 // count) * count}


@pytest.mark.parametrize(
    ("begun", "skipped"),
    [(0, [True, True]), (1, [True, True]), (2, [False, True]), (3, [False, True]), (4, [False, False])],
)
def test_runs_of_the_example_that_are_late_are_not_begun(script, run, monkeypatch, begun, skipped):
    """The time is over once so many have begun: each of the two rows is there, with its reason."""
    seen = []

    def train_on(run, *one):
        seen.append(one)
        if len(seen) == begun:
            run.limit = -1
        return {1: 5.0}, 1.0

    run.count, run.limit = 2, 1e9 if begun else -1
    monkeypatch.setattr(script, "train_on", train_on)
    script.train(run)
    assert len(seen) == begun
    assert [row["what"] for row in run.rows] == ["train: loss curve", "train: tokens a second and device"]
    assert ["skipped" in row for row in run.rows] == skipped
    assert all(row["ok"] is None for row in run.rows if "skipped" in row)


PROGRAM = """
HloModule jit_send, is_scheduled=true, entry_computation_layout={(f32[2]{0})->f32[2]{0}}

ENTRY %main.9 (all-to-all: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0), metadata={op_name="all-reduce( x"}
  %recv.1 = (f32[2]{0:T(8,128)}, /*index=1*/u32[], token[]) fusion(%a), metadata={op_name="a send(x) recv("}
  ROOT %s = f32[2]{0} custom-call(%recv.1), custom_call_target="f", backend_config=" all-gather(x)"
}
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("  %r = (f32[2]{0}, u32[], token[]) recv(%t), channel_id=1", ["recv"]),
        ("  %s = (f32[2]{0}, u32[], token[]) send(%a, %t), channel_id=1", ["send"]),
        ("  %d = token[] send-done(%s), channel_id=1", []),
        ("  ROOT %x = f32[2]{0} ragged-all-to-all(%a, %a, %b), channel_id=1", ["ragged-all-to-all"]),
        ("  %g = (f32[1]{0}, f32[2]{0}) all-gather-start(%a), dimensions={0}", ["all-gather"]),
        ("  p = f32[2]{0} collective-permute(a), channel_id=1", ["collective-permute"]),
    ],
)
def test_what_is_sent_is_found(script, line, found):
    """And no name of the user's is taken for it."""
    text = PROGRAM.replace("  ROOT", f"{line}\n  ROOT", 1)
    program = types.SimpleNamespace(as_text=lambda: text)
    lowered = types.SimpleNamespace(compile=lambda: program)
    assert script.compiled(types.SimpleNamespace(lower=lambda: lowered)) == (program, found)
    assert script.opcodes(program).count("custom-call") == 1


def test_a_missing_number_is_no_small_error(script):
    want = np.ones((1, 2, 1, 1), np.float32)
    got = want * np.array([1, np.nan], np.float32)[:, None, None]
    assert np.isnan(script.compare([want, got], [want, want])["relative_error"])
    assert np.isnan(script.errors([want, got], [want, want], 2)).all()


def test_an_error_of_late_tokens_is_seen(script):
    """Of those a thousandth as large as the first: half of the last part is wrong."""
    want = np.array([1, 1, 1e-3, 1e-3], np.float32)[None, :, None, None]
    got = want * np.array([1, 1, 1, 2], np.float32)[:, None, None]
    error, of_part = script.errors([got], [want], 2)
    assert error < 1e-3
    assert of_part == pytest.approx(0.5**0.5, rel=1e-3)


@pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")
@pytest.mark.parametrize(
    ("context", "ok"), [(lambda calls: 7, True), (lambda calls: calls, False)], ids=["stays", "is changed"]
)
def test_context(script, run, monkeypatch, context, ok):
    """Another device's is current before each call. What stands in for the driver knows of no GPU."""
    asked, set_to = [], []

    def read():
        asked.append(None)
        return context(len(asked))

    run.devices = run.devices[:2]
    monkeypatch.setattr(script, "_contexts", lambda devices: (read, set_to.append))
    script.last(run)
    row = run.rows[-1]
    assert (row["what"], row["ok"]) == ("last: current context", ok)
    assert len(row["before_plain_ours"]) == 2
    assert set_to == [run.devices[i] for i in (1, 1, 0, 0)]


@pytest.mark.parametrize(
    ("left", "ok"), [([], None), (["send"], False)], ids=["same work", "a transfer is left"]
)
def test_a_time_over_that_of_other_work_is_false(script, run, monkeypatch, left, ok):
    """Transfers that are still there in what should have none."""
    run.devices, run.count = run.devices[:2], 2
    args = run.inputs(1, 8, 2, 2)
    program = unittest.mock.Mock(as_text=lambda: "")
    found = iter([["send"], left, left])
    monkeypatch.setattr(script, "compiled", lambda *_: (program, next(found)))
    monkeypatch.setattr(script, "times", lambda *_: {})
    monkeypatch.setattr(script, "medians", lambda _: {"ring": 1.0, "without": 1.0})
    script._overlap(run, "overlap: x", "forward", "no mask", args, None, 8)
    (row,) = run.rows
    assert (row["ok"], row["same_work"], row["copies"]) == (ok, ok is None, ok is False)


def test_what_one_device_cannot_hold_is_skipped(script, run):
    def of_one(is_causal):
        raise script.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    script._ring(run, "ring: x", "forward", "no mask", [], of_one)
    (row,) = run.rows
    assert (row["ok"], row["skipped"]) == (None, "one device cannot hold it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "parts"),
    [
        # Each part where it has most to show; all of them on each number would take two minutes.
        (2, ("split", "share", "overlap", "last", "graphs")),
        (3, ("split", "ring")),
        (4, ("split", "ring")),
    ],
)
def test_parts(tmp_path, devices, parts):
    """All but the example, which has tests of its own."""
    out = tmp_path / "new" / "rows.jsonl"
    arguments = ("--size", "tiny", "--out", str(out), "--commit", "abc", "--parts", ",".join(parts))
    done = start(*arguments, devices=devices)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    found = {row["what"].partition(":")[0] for row in rows}
    assert found == {*parts, *(("balance",) if "overlap" in parts else ())}
    assert not any(row["ok"] is False or "error" in row for row in rows)
    assert all((row["devices"], row["commit"], row["device"]) == (devices, "abc", "cpu") for row in rows)
    by_name = {row["what"]: row for row in rows}
    for name in ("forward", "gradient"):
        for how in ("jit, batch", "jit, heads", "shard_map, batch", "shard_map, heads", "pmap"):
            row = by_name[f"split: {how}, {name}"]
            assert (row["ok"], row["collectives"]) == (True, []), "nothing that stays where it is is sent"
        for how in ("jit, batch and heads", "shard_map, batch and heads"):
            row = by_name[f"split: {how}, {name}"]
            assert (row["ok"], "skipped" in row) == ((True, False) if devices == 4 else (None, True))
        for mask in ("causal zigzag", "causal contiguous", "no mask") if "ring" in parts else ():
            row = by_name[f"ring: 32 tokens a device, {mask}, {name}"]
            assert row["ok"]
            assert row["collectives"] > 0
        if "share" in parts:
            for how in ("jit, batch", "jit, heads", "shard_map, batch", "pmap"):
                assert by_name[f"share: 1 x 32 tokens a device, {how}, {name}"]["efficiency"] > 0
    for row in rows:
        if row["what"].startswith("overlap"):
            sent, kept = row["collectives"]
            assert sent > 0
            assert kept == 0, "the comparison without transfers has none"
            assert row["same_work"]
    assert "0 failed" in done.stdout.splitlines()[-1]


def test_a_failure_is_a_row_and_the_exit_status(tmp_path):
    """A part that breaks: here the graphs, whose process gets a flag that XLA does not know."""
    out = tmp_path / "rows.jsonl"
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import multi_gpu\n"
        "multi_gpu.GRAPHS['on'] = '--xla_no_such_flag=1'\n"
        "sys.exit(multi_gpu.main())\n"
    )
    program = ("-c", code)
    done = start("--size", "tiny", "--out", str(out), "--parts", "graphs,last", program=program)
    assert done.returncode == 1, done.stdout + done.stderr
    first, *others = (json.loads(line) for line in out.read_text("utf-8").splitlines())
    assert (first["what"], first["ok"]) == ("graphs", False)
    assert "exit status" in first["error"]
    assert [row["ok"] for row in others] == [True, True, None], "the next part ran"


@pytest.mark.parametrize(
    ("arguments", "devices", "message"),
    [
        ((), 2, "--out must be given"),
        (("--out", "x", "--parts", "split,nonsense"), 2, "--parts must be of split, share"),
        (("--out", "x"), 1, "jax must find two devices at least"),
    ],
    ids=["no file", "no such part", "one device"],
)
def test_wrong_arguments(arguments, devices, message, tmp_path):
    done = start(*arguments, devices=devices)
    assert done.returncode == 2
    assert message in done.stderr
