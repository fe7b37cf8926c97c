"""The benchmark's pure parts, and one run of all of it on the CPU with plain XLA, much too small to time
anything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numerics import bounds, visible

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """The benchmark's modules; they are scripts beside each other, not a package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import measure
    import report
    import rivals
    import workloads

    return {"measure": measure, "report": report, "rivals": rivals, "workloads": workloads}


@pytest.fixture
def workloads(modules):
    return modules["workloads"]


@pytest.fixture
def report(modules):
    return modules["report"]


@pytest.mark.parametrize("window", [None, (0, 0), (3, 0), (0, 4), (2, 5), (100, 1), (1, 100), (100, 100)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("t", "s"), [(1, 1), (7, 7), (16, 5), (5, 16), (1, 9), (9, 1), (0, 4), (4, 0), (33, 32)]
)
def test_visible_pairs(workloads, t, s, is_causal, window):
    """Counted without going through them, against counting a mask."""
    want = int(visible(t, s, *bounds(is_causal, window)).sum())
    assert workloads.visible_pairs(t, s, is_causal, window) == want


def test_flops_of_known_cases(workloads):
    full, causal = (workloads.select(f"{kind}_d128_s8192")[0] for kind in ("full", "causal"))
    assert full.flops() == 4 * 4 * 16 * 128 * 8192 * 8192
    assert causal.flops() == 4 * 4 * 16 * 128 * (8192 * 8193 // 2)
    [gqa] = workloads.select("causal_gqa8_d128_s8192")
    assert (gqa.heads, gqa.kv_heads, gqa.head_dim, gqa.batch) == (32, 4, 128, 4)
    # 4 tensors of 128 MiB, and a float32 a row
    assert full.bytes_moved() == 4 * 2**27 + 4 * 4 * 8192 * 16


def test_table_of_workloads(workloads):
    names = [w.name for w in workloads.WORKLOADS]
    assert len(names) == len(set(names))
    assert set(workloads.HEADLINE) <= set(names)
    for w in workloads.WORKLOADS:
        assert w.heads % w.kv_heads == 0
        if w.length >= 512:
            assert w.batch * w.length == workloads.TOKENS
    [local] = workloads.select("local128_128_d64_s8192")
    assert local.window == (128, 128)
    [local] = workloads.select("local64_d128_s8192")
    assert local.window == (64, 0)


@pytest.mark.parametrize("module", ["workloads", "rivals"])
def test_unknown_names_are_refused(modules, module):
    with pytest.raises(ValueError, match="nonsense"):
        modules[module].select("nonsense")


def test_a_rival_that_is_missing_or_refuses_is_listed(modules):
    rivals, workloads = modules["rivals"], modules["workloads"]
    [w] = workloads.select("causal_d128_s113")

    def missing(w):
        raise ModuleNotFoundError("No module named 'somewhere'")

    def refusing(w):
        def f(q, k, v):
            raise RuntimeError("head dim 128 is not supported\nand more")

        return f

    answer = rivals.prepare(rivals.Rival("a", "a", missing), w, (1.0, 1.0, 1.0))
    assert answer == rivals.Unavailable("not installed (No module named 'somewhere')")
    answer = rivals.prepare(rivals.Rival("b", "b", refusing), w, (1.0, 1.0, 1.0))
    assert answer.reason == "refused: RuntimeError: head dim 128 is not supported"
    assert rivals.Rival("c", "no-such-package", missing).package_version() is None


def test_rivals_take_turns(modules):
    """Order reversed from round to round, the first round dropped, inputs rotated, every sample counted."""
    measure = modules["measure"]
    log, advanced = [], []

    def rival(name):
        def f(x):
            log.append((name, x))
            return np.zeros(())

        return f

    functions = {name: rival(name) for name in "abc"}
    samples = measure.alternate(
        functions, [(0,), (1,)], rounds=3, sample_seconds=0.0, advance=lambda: advanced.append(1)
    )
    calls = measure.CALLS[0]
    assert {s.calls for s in samples.values()} == {calls}
    assert all(len(s.total) == len(s.queued) == 3 for s in samples.values())
    assert len(advanced) == 3 * 4
    per_sample = calls + 1
    turns = log[3 * per_sample :]  # after one sample each, which sets the number of calls
    order = "".join(turns[i][0] for i in range(0, len(turns), per_sample))
    assert order == "abccbaabccba"
    assert [x for _, x in turns[1:per_sample]] == [i % 2 for i in range(calls)]


def test_host_bound(modules):
    samples = modules["measure"].Samples
    assert samples(10, total=[1.0, 1.1], queued=[0.95, 1.0]).host_bound()
    assert not samples(10, total=[1.0, 1.1], queued=[0.1, 0.2]).host_bound()


def _rows(report, workloads):
    causal, full = workloads.select("causal_d128_s8192")[0], workloads.select("full_d256_s8192")[0]
    about = {
        "device": "NVIDIA H200",
        "driver": "1.2",
        "jax": "0.9",
        "jax_r2p": "0.1.0",
        "commit": "abc",
        "date": "2026-01-02T03:04:05+00:00",
    }
    first = [
        report.timed_row(causal, "jax_r2p", 1.5, [1.4, 1.5, 1.6]),
        report.timed_row(causal, "cudnn", 2.0, [2.0], host_bound=True),
        report.timed_row(causal, "fa3", 1.6, [1.6]),
        {"case": causal.name, "impl": "fa4", "status": "not installed (No module named 'fa4_jax')"},
    ]
    second = [
        {"case": full.name, "impl": "jax_r2p", "status": "refused: NotImplementedError: head_dim=256"},
        report.timed_row(full, "cudnn", 3.5, [3.5]),
    ]
    for rows in (first, second):
        report.add_ratios(rows)
        for row in rows:
            row.update(about)
    return first + second


def test_rows(report, workloads):
    rows = _rows(report, workloads)
    ours = rows[0]
    assert ours["tflops"] == pytest.approx(
        workloads.select("causal_d128_s8192")[0].flops() / 1.5e-3 / 1e12, rel=1e-3
    )
    assert (ours["best_rival"], ours["ratio_to_best_rival"]) == ("fa3", 0.9375)
    assert ours["rounds_ms"] == [1.4, 1.5, 1.6]
    assert rows[1]["ratio_to_best_rival"] == 1.25
    assert "ratio_to_best_rival" not in rows[3]
    assert rows[5]["ratio_to_best_rival"] == 1.0


def test_table(report, workloads):
    header, lines = report.table_cells(_rows(report, workloads))
    assert header == ["case", "jax_r2p", "cudnn", "fa3", "fa4", "TFLOP/s", "time / best rival"]
    assert lines[0] == [
        "causal_d128_s8192",
        "1.500",
        "2.000*",
        "1.600",
        "not installed",
        "733",
        "0.938 (fa3)",
    ]
    assert lines[1] == ["full_d256_s8192", "refused", "3.500", "", "", "", ""]


def test_printed_table(report, workloads, capsys):
    report.print_table(_rows(report, workloads))
    printed = capsys.readouterr().out
    assert "causal_d128_s8192" in printed
    assert "0.938 (fa3)" in printed


def test_markdown_goes_between_the_markers(report, workloads):
    text = report.markdown(_rows(report, workloads))
    assert "NVIDIA H200, driver 1.2, jax 0.9, jax_r2p 0.1.0 at commit abc, 2026-01-02." in text
    assert "| causal_d128_s8192 | 1.500 | 2.000* | 1.600 | not installed | 733 | 0.938 (fa3) |" in text
    document = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    once = report.insert_table(document, text)
    assert once == f"before\n{report.BEGIN}\n{text}{report.END}\nafter\n"
    assert report.insert_table(once, text) == once
    with pytest.raises(ValueError, match="once each"):
        report.insert_table("no markers", text)
    report.insert_table((ROOT / "README.md").read_text("utf-8"), text)


def test_plot(report, workloads, tmp_path):
    report.plot(_rows(report, workloads), tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def _bench(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, str(FOLDER / "bench.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_whole_run(tmp_path, report):
    """Rows, table and plot of a real run; the rival that demands a GPU is listed as refusing."""
    rows_file = tmp_path / "rows.jsonl"
    printed = _bench(
        *("--cases", "causal_d128_s2048,local64_d64_s8192", "--impls", "reference,xla,jax_r2p"),
        *("--rounds", "2", "--sample-ms", "1", "--scale-down", "64"),
        *("--out", str(rows_file), "--plot", str(tmp_path / "bars.png"), "--commit", "0123abc"),
        cwd=tmp_path,
    )
    rows = report.read_rows(rows_file)
    assert [(r["case"], r["impl"]) for r in rows] == [
        (case, impl)
        for case in ("causal_d128_s2048", "local64_d64_s8192")
        for impl in ("reference", "xla", "jax_r2p")
    ]
    for row in rows:
        assert row["commit"] == "0123abc"
        assert {"device", "driver", "cuda", "jax", "jaxlib", "jax_r2p", "date"} <= row.keys()
        if row["impl"] == "jax_r2p":
            assert row["status"].startswith("refused: NotImplementedError")
        else:
            assert row["ms"] == pytest.approx(np.median(row["rounds_ms"]), abs=1e-4)
            assert len(row["rounds_ms"]) == 2
            assert row["relative_error"] < 0.02
            assert row["best_rival"] == "xla"
    assert "local64_d64_s8192" in printed
    assert (tmp_path / "bars.png").exists()
    shown = _bench("--show", str(rows_file), "--markdown", cwd=tmp_path)
    assert "| causal_d128_s2048 |" in shown


def test_cold_start(tmp_path, report):
    out = tmp_path / "cold.jsonl"
    printed = _bench(
        *("--cold", "--impls", "reference,xla", "--repeats", "2", "--scale-down", "64", "--out", str(out)),
        cwd=tmp_path,
    )
    rows = report.read_rows(out)
    assert [r["impl"] for r in rows] == ["reference", "xla"]
    for row in rows:
        assert len(row["seconds"]) == 2
        assert 0.1 < row["median_s"] < 120
        assert row["case"] == "cold_causal_d128_s2048"
        json.dumps(row)
    assert printed.count("process start to first result: median") == 2
