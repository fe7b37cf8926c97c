"""`benchmarks/multi_gpu.py`: every part of it on two CPU devices, with no time judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_the_example_is_run_as_asked():
    """On one device of those that there are: its losses by step, and its tokens a second."""
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
    ("curves", "ok"),
    [
        (({1: 5.0, 9: 2.0}, {1: 5.01, 9: 1.96}), True),
        (({1: 5.0, 9: 2.0}, {1: 5.0, 9: 1.94}), False),
        (({1: 5.0, 9: 2.0}, {1: 5.0, 8: 2.0}), None),
    ],
    ids=["noise", "apart", "other steps"],
)
def test_training(tmp_path, curves, ok):
    """The curve of one device with the same batch is asked for; its runs are made up here."""
    out = tmp_path / "rows.jsonl"
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import multi_gpu\n"
        f"one, two, all = {curves[0]}, {curves[1]}, (0, 1)\n"
        "runs = {(all[:1], 2): (one, 12.0), (all[1:], 2): ({}, 10.0)}\n"
        "runs |= {(all, 2): (two, 11.0), (all, 4): ({}, 18.0)}\n"
        "multi_gpu.train_on = lambda run, devices, batch: runs[devices, batch]\n"
        f"sys.exit(multi_gpu.main(['--size', 'tiny', '--parts', 'train', '--out', {str(out)!r}]))"
    )
    done = start("-c", code, program=())
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert done.returncode == (0 if ok else 1), done.stdout + done.stderr
    if ok is None:
        assert "curves with other steps: [1, 9], [1, 8]" in rows[0]["error"]
        return
    curve, speed = rows
    assert (curve["ok"], curve["steps"], curve["last_losses"]) == (ok, 9, [2.0, curves[1][9]])
    assert speed["tokens_per_second"] == {"alone": [12.0, 10.0], "all": 18.0}
    assert speed["efficiency"] == 0.9


@pytest.mark.slow
def test_every_part(tmp_path):
    out = tmp_path / "new" / "rows.jsonl"
    done = start("--size", "tiny", "--out", str(out), "--commit", "abc")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    parts = {row["what"].partition(":")[0] for row in rows}
    assert parts == {"split", "share", "ring", "overlap", "balance", "last", "graphs"}
    assert not any(row["ok"] is False or "error" in row for row in rows)
    assert all((row["devices"], row["commit"], row["device"]) == (2, "abc", "cpu") for row in rows)
    # Nothing that stays where it is is sent, and the comparison without transfers has none.
    judged = {row["what"]: row for row in rows if row["ok"]}
    for how in ("jit, batch", "jit, heads", "shard_map, batch", "pmap"):
        for name in ("forward", "gradient"):
            assert judged[f"split: {how}, {name}"]["collectives"] == []
    for row in rows:
        if row["what"].startswith("overlap"):
            sent, kept = row["collectives"]
            assert sent > 0
            assert kept == 0
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
