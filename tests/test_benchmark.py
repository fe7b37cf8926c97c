"""`jax-r2p bench`: its pure parts, and runs of all of it as a user would, much too small to time anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numerics import bounds, visible

from jax_r2p.bench import cold, environment, measure, report, rivals, workloads

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("window", [None, (0, 0), (3, 0), (0, 4), (2, 5), (100, 1), (1, 100), (100, 100)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("t", "s"), [(1, 1), (7, 7), (16, 5), (5, 16), (1, 9), (9, 1), (0, 4), (4, 0), (33, 32)]
)
def test_visible_pairs(t, s, is_causal, window):
    """Counted without going through them, against counting a mask."""
    want = int(visible(t, s, *bounds(is_causal, window)).sum())
    assert workloads.visible_pairs(t, s, is_causal, window) == want


def test_flops_of_known_cases():
    full, causal = (workloads.select(f"{kind}_d128_s8192")[0] for kind in ("full", "causal"))
    assert full.flops() == 4 * 4 * 16 * 128 * 8192 * 8192
    assert causal.flops() == 4 * 4 * 16 * 128 * (8192 * 8193 // 2)
    [gqa] = workloads.select("causal_gqa8_d128_s8192")
    assert (gqa.heads, gqa.kv_heads, gqa.head_dim, gqa.batch) == (32, 4, 128, 4)
    [wide] = workloads.select("causal_d192v128_s8192")
    assert wide.flops() == 2 * 4 * 10 * (192 + 128) * (8192 * 8193 // 2)
    assert wide.bytes_moved() == 2 * 4 * 8192 * 2 * 10 * (192 + 128) + 4 * 4 * 8192 * 10
    # 4 tensors of 128 MiB, and a float32 a row
    assert full.bytes_moved() == 4 * 2**27 + 4 * 4 * 8192 * 16


def test_table_of_workloads():
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


@pytest.mark.parametrize("module", [workloads, rivals])
@pytest.mark.parametrize("names", ["nonsense", "", "nonsense,causal_d128_s113", "all,nonsense"])
def test_unknown_names_are_refused(module, names):
    with pytest.raises(ValueError, match=r"must be .* got '"):
        module.select(names)


def test_a_name_given_twice_counts_once():
    assert [rival.name for rival in rivals.select("xla,jax_r2p,xla")] == ["xla", "jax_r2p"]
    assert [w.name for w in workloads.select("causal_d128_s113,causal_d128_s113")] == ["causal_d128_s113"]


def test_masks_in_words():
    words = {name: workloads.select(name)[0].mask for name in ("full_d64_s8192", "causal_d64_s8192")}
    assert words == {"full_d64_s8192": "full", "causal_d64_s8192": "causal"}
    assert workloads.select("local128_128_d64_s8192")[0].mask == "window (128, 128)"


def _rival(name, build=None, *, module="jax_r2p"):
    return rivals.Rival(name, "for this test", module, "no-such-package", build)


def test_a_rival_that_is_missing_or_refuses_is_listed():
    [w] = workloads.select("causal_d128_s113")
    absent = _rival("absent", module="no_such_module")
    assert not absent.is_installed()
    assert absent.package_version() is None
    assert rivals.prepare(absent, w, (1.0, 1.0, 1.0)) == rivals.Unavailable("not installed")

    def refuse(w):
        def f(q, k, v):
            raise RuntimeError("head dim 128 is not supported\nand more")

        return f

    answer = rivals.prepare(_rival("refusing", refuse), w, (1.0, 1.0, 1.0))
    assert answer.reason == "refused: RuntimeError: head dim 128 is not supported"

    def lack(w):
        raise ModuleNotFoundError("No module named 'its_compiler'")

    answer = rivals.prepare(_rival("broken", lack), w, (1.0, 1.0, 1.0))
    assert answer.reason == "refused: ModuleNotFoundError: No module named 'its_compiler'"


def test_cold_start_of_a_rival_that_is_missing():
    advanced = []
    rows = cold.time_starts(
        [_rival("absent", module="no_such_module")],
        repeats=2,
        commit="abc",
        scale_down=1,
        advance=advanced.append,
    )
    assert rows == [
        {"case": "cold_causal_d128_s2048", "impl": "absent", "status": "not installed", "commit": "abc"}
    ]
    assert advanced == ["absent", "absent"]
    assert report.cold_cells(rows)[1] == [["causal_d128_s2048", "absent", "not installed", ""]]


@pytest.mark.parametrize(
    ("script", "version"),
    [
        ("echo 580.159.04; echo 580.159.04", "580.159.04"),  # two GPUs
        ("echo no driver >&2; exit 9", None),
        ("", None),
        (None, None),
    ],
)
def test_driver_version(tmp_path, monkeypatch, script, version):
    """Against an nvidia-smi that answers so, or that is not there."""
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.driver_version() == version
    assert environment.describe("abc")["driver"] == (version or "none")


def test_rivals_take_turns():
    """Each once a round in changing order, the first round dropped, inputs rotated, every sample counted."""
    log, advanced = [], []

    def rival(name):
        def f(x):
            log.append((name, x))
            return np.zeros(())

        return f

    functions = {name: rival(name) for name in "abc"}
    samples = measure.alternate(
        functions,
        [(0,), (1,)],
        rounds=3,
        sample_seconds=0.0,
        warm_up_seconds=0.0,
        advance=lambda: advanced.append(1),
    )
    calls = measure.CALLS[0]
    assert {s.calls for s in samples.values()} == {calls}
    assert all(len(s.total) == len(s.queued) == 3 for s in samples.values())
    assert len(advanced) == 3 * 4
    per_sample = calls + 1
    # after one call each to warm up, and one sample each, which sets the number of calls
    assert [name for name, _ in log[:3]] == list("abc")
    turns = log[3 + 3 * per_sample :]
    order = "".join(turns[i][0] for i in range(0, len(turns), per_sample))
    rounds = [order[i : i + 3] for i in range(0, 12, 3)]
    assert [sorted(each) for each in rounds] == [["a", "b", "c"]] * 4
    assert len(set(rounds)) > 1
    assert [x for _, x in turns[1:per_sample]] == [i % 2 for i in range(calls)]


def test_host_bound():
    samples = measure.Samples
    assert samples(10, total=[1.0, 1.1], queued=[0.95, 1.0]).host_bound()
    assert not samples(10, total=[1.0, 1.1], queued=[0.1, 0.2]).host_bound()


def _rows():
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
        {"case": causal.name, "impl": "fa4", "status": "not installed"},
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


def test_rows():
    rows = _rows()
    ours = rows[0]
    assert ours["tflops"] == pytest.approx(
        workloads.select("causal_d128_s8192")[0].flops() / 1.5e-3 / 1e12, rel=1e-3
    )
    assert (ours["best_rival"], ours["ratio_to_best_rival"]) == ("fa3", 0.9375)
    assert ours["rounds_ms"] == [1.4, 1.5, 1.6]
    assert rows[1]["ratio_to_best_rival"] == 1.25
    assert "ratio_to_best_rival" not in rows[3]
    assert rows[5]["ratio_to_best_rival"] == 1.0


def test_table():
    header, lines = report.table_cells(_rows())
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


def test_what_the_cells_leave_out():
    rows = _rows()
    assert report.fastest_cells(rows) == {(0, 1), (1, 2)}
    assert report.notes(rows) == [
        "jax_r2p refused: NotImplementedError: head_dim=256 (full_d256_s8192)",
        "* the host may have limited this time",
    ]


def test_markdown_goes_between_the_markers():
    text = report.markdown(_rows())
    assert "NVIDIA H200, driver 1.2, jax 0.9, jax_r2p 0.1.0 at commit abc, 2026-01-02." in text
    assert "| causal_d128_s8192 | 1.500 | 2.000* | 1.600 | not installed | 733 | 0.938 (fa3) |" in text
    document = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    once = report.insert_table(document, text)
    assert once == f"before\n{report.BEGIN}\n{text}{report.END}\nafter\n"
    assert report.insert_table(once, text) == once
    with pytest.raises(ValueError, match="once each"):
        report.insert_table("no markers", text)
    report.insert_table((ROOT / "README.md").read_text("utf-8"), text)


def test_plot(tmp_path):
    report.plot(_rows(), tmp_path / "bars.png", "png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_plot_over_the_length(tmp_path):
    cases = workloads.select("full_d64_s512,full_d64_s8192,local256_d128_s512,local256_d128_s131072")
    rows = [report.timed_row(w, "jax_r2p", 2 * w.byte_floor_ms(), [1.0]) for w in cases]
    report.plot_lengths([*rows, *_rows()], tmp_path / "lengths.png", "png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_lengths():
    """Each mask and head dim at each length; longer ones than the tokens of the others are one sequence."""
    cases = workloads.select("lengths")
    assert len(cases) == 3 * 3 * 5
    assert {w.batch * w.length for w in cases} == {workloads.TOKENS, 131_072}
    [w] = workloads.select("full_d128_s131072")
    # Four arrays of 131072 x 2048 in bf16 and a float32 a row and head, at 4.3 TB/s.
    assert w.byte_floor_ms() == pytest.approx((4 * 2**29 + 4 * 131_072 * 16) / 4.3e12 * 1e3)


def test_rows_are_read_as_written(tmp_path):
    rows = _rows()
    report.write_rows(tmp_path / "new" / "rows.jsonl", rows[:2])
    report.write_rows(tmp_path / "new" / "rows.jsonl", rows[2:])
    assert report.read_rows(tmp_path / "new" / "rows.jsonl") == rows


def test_recorded_rows_are_rows():
    """Those of every release can be shown; counters and the checks of several GPUs have rows of their own."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*/*.jsonl"))
    files = [file for file in files if file.name not in ("counters.jsonl", "multi_gpu.jsonl")]
    assert files
    for file in files:
        rows = report.read_rows(file)
        assert all(report.is_cold(row) == (file.name == "cold.jsonl") for row in rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no rows"),
        ("\n\n", "it has no rows"),
        ("case,impl,ms", "line 1 is not JSON"),
        ('[{"case": "a"}]', "line 1 is not a row"),
        ('{"case": "a", "impl": "b", "status": "refused"}\n7', "line 2 is not a row of the benchmark: 7"),
        ('{"case": "a", "impl": "b"}', "line 1 is not a row"),
        ('{"case": "a", "impl": "b", "ms": "1", "tflops": 1}', "line 1 is not a row"),
        ('{"case": "cold_a", "impl": "b", "median_s": 1, "seconds": ["x"]}', "line 1 is not a row"),
        ('{"case": "a", "impl": "b", "ms": 1, "tflops": 1, "ratio_to_best_rival": 1}', "line 1 is not a row"),
    ],
)
def test_what_is_no_row_is_refused(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        report.read_rows(tmp_path / "rows.jsonl")


def _bench(*arguments, cwd, unimportable=()):
    """Runs the command as a user would, on the CPU, in a folder that is no checkout.

    `unimportable` are modules that this process must not import, or behaves as if they were not installed.
    """
    shadows = cwd.parent / f"{cwd.name}_shadows"
    shadows.mkdir(exist_ok=True)
    for name in unimportable:
        (shadows / f"{name}.py").write_text(f"raise ImportError('{name} was imported')")
    path = os.pathsep.join(filter(None, [str(shadows), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        # -P: the installed package, not the checkout that a test run starts in.
        [sys.executable, "-P", "-m", "jax_r2p", "bench", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
    )


QUICK = ("--rounds", "2", "--sample-ms", "1", "--scale-down", "64")


def test_whole_run(tmp_path):
    """Rows, document and plot of a real run; the rival that demands a GPU is listed as refusing."""
    (tmp_path / "doc.md").write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    done = _bench(
        *(
            "--cases",
            "causal_d128_s2048,local64_d64_s8192",
            "--impls",
            "reference,xla,jax_r2p",
            *QUICK,
            "--json",
        ),
        *("--out", "new/rows.jsonl", "--plot", "bars.svg", "--into", "doc.md", "--commit", "0123abc"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert rows == report.read_rows(tmp_path / "new" / "rows.jsonl")
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
    assert "<svg" in (tmp_path / "bars.svg").read_text()
    document = (tmp_path / "doc.md").read_text()
    assert "| causal_d128_s2048 |" in document
    assert document.endswith("after\n")
    assert "old" not in document

    # The rows alone give the same, with no jax.
    def show(*arguments):
        done = _bench("--show", "new/rows.jsonl", *arguments, cwd=tmp_path, unimportable=["jax"])
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(show("--json")) == rows
    assert document == f"before\n{report.BEGIN}\n{show('--markdown')}{report.END}\nafter\n"
    table = show("--plot", "bars.png")
    assert "local64_d64_s8192" in table
    assert "jax_r2p refused: NotImplementedError: " in table
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_timed(tmp_path):
    done = _bench(
        "--cases", "causal_d128_s113", "--impls", "jax_r2p", *QUICK, "--plot", "bars.png", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "jax_r2p refused: NotImplementedError" in done.stdout
    assert "jax-r2p bench: nothing was timed" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_cold_start(tmp_path):
    done = _bench(
        *(
            "--cold",
            "--impls",
            "reference,xla",
            "--repeats",
            "2",
            "--scale-down",
            "64",
            "--out",
            "cold.jsonl",
        ),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = report.read_rows(tmp_path / "cold.jsonl")
    assert [r["impl"] for r in rows] == ["reference", "xla"]
    for row in rows:
        assert len(row["seconds"]) == 2
        assert 0.1 < row["median_s"] < 120
        assert row["case"] == "cold_causal_d128_s2048"
        assert f"{row['median_s']:.3f}" in done.stdout
    assert "Seconds from process start to first result" in done.stdout
    shown = _bench("--show", "cold.jsonl", cwd=tmp_path, unimportable=["jax"])
    assert (shown.returncode, shown.stdout) == (0, done.stdout)


def test_cold_start_that_fails(tmp_path):
    """What the fresh process said is what the user reads; on the CPU there is no kernel."""
    done = _bench(
        *("--cold", "--impls", "jax_r2p", "--scale-down", "64", "--out", "cold.jsonl"), cwd=tmp_path
    )
    assert done.returncode == 1
    assert "jax-r2p bench: jax_r2p failed in a fresh process:" in done.stderr
    assert "NotImplementedError: implementation='r2p'" in done.stderr
    assert (tmp_path / "cold.jsonl").read_text() == ""


def test_list(tmp_path):
    done = _bench("--list", "--json", cwd=tmp_path, unimportable=["jax"])
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert [case["name"] for case in listed["cases"]] == [w.name for w in workloads.WORKLOADS]
    assert listed["cases"][0] == {
        "name": "full_d64_s8192",
        "batch": 4,
        "length": 8192,
        "heads": 32,
        "kv_heads": 32,
        "head_dim": 64,
        "value_head_dim": 64,
        "is_causal": False,
        "window": None,
    }
    assert [row["name"] for row in listed["implementations"]] == list(rivals.RIVALS)
    for row in listed["implementations"]:
        rival = rivals.RIVALS[row["name"]]
        assert (row["installed"], row["version"]) == (rival.is_installed(), rival.package_version())

    table = _bench("--list", cwd=tmp_path, unimportable=["jax"])
    assert table.returncode == 0, table.stderr
    for name in (*rivals.RIVALS, *(w.name for w in workloads.WORKLOADS), "window (64, 0)", "kv heads"):
        assert name in table.stdout


def test_help(tmp_path):
    done = _bench("--help", cwd=tmp_path, unimportable=["jax", "numpy", "matplotlib", "rich"])
    assert done.returncode == 0, done.stderr
    assert "Time attention implementations side by side." in done.stdout


def test_missing_matplotlib(tmp_path):
    """Said before anything is timed."""
    done = _bench(
        *("--out", "rows.jsonl", "--plot", "bars.png"), cwd=tmp_path, unimportable=["jax", "matplotlib"]
    )
    assert done.returncode == 1
    assert "jax-r2p bench: --plot needs matplotlib: pip install 'jax_r2p[bench]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


TIMED = b'{"case": "full_d64_s8192", "impl": "xla", "ms": 1.0, "tflops": 2.0}\n'
STARTED = b'{"case": "cold_a", "impl": "xla", "median_s": 1.0, "seconds": [1.0]}\n'
REFUSED = b'{"case": "a", "impl": "xla", "status": "refused: no"}\n'
FILES = {
    "timed.jsonl": TIMED,
    "cold.jsonl": STARTED,
    "refused.jsonl": REFUSED,
    "empty.jsonl": b"",
    "text.md": b"no markers\n",
    "binary.jsonl": b"\xff\xfe\x00",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--cases nonsense",
            "--cases must be all, headline, lengths, or some of full_d64_.*; got 'nonsense'",
        ),
        ("--cases headline,causal_d64_s8192", "--cases must be .*; got 'headline'"),
        ("--impls xla,nonsense", "--impls must be default, or some of jax_r2p, .*; got 'nonsense'"),
        ("--cold --impls nonsense", "--impls must be .*; got 'nonsense'"),
        ("--rounds 0", "argument --rounds: must be a whole number above 0, got '0'"),
        ("--rounds 1.5", "argument --rounds: must be a whole number above 0, got '1.5'"),
        ("--repeats -1 --cold", "argument --repeats: must be a whole number above 0, got '-1'"),
        ("--scale-down none", "argument --scale-down: must be a whole number above 0, got 'none'"),
        ("--sample-ms 0", "argument --sample-ms: must be a number above 0, got '0'"),
        ("--sample-ms nan", "argument --sample-ms: must be a number above 0, got 'nan'"),
        ("--sample-ms inf", "argument --sample-ms: must be a number above 0, got 'inf'"),
        (
            "--show absent.jsonl",
            "--show must be a file that --out has written, got absent.jsonl: .*No such file",
        ),
        ("--show .", "--show must be a file that --out has written, got .: .*Is a directory"),
        ("--show empty.jsonl", "got empty.jsonl: it has no rows"),
        ("--show text.md", "got text.md: line 1 is not JSON"),
        ("--show binary.jsonl", "got binary.jsonl: .*can't decode"),
        (
            "--show cold.jsonl --markdown",
            "--markdown needs rows of timed calls, got none in --show cold.jsonl",
        ),
        ("--show cold.jsonl --into text.md", "--into needs rows of timed calls, got none"),
        ("--show refused.jsonl --plot bars.png", "--plot needs rows of timed calls, got none"),
        (
            "--into absent.md",
            "--into must be a document with a measured table, got absent.md: .*No such file",
        ),
        ("--into text.md", "--into must be .*, got text.md: it needs the lines <!-- measured: begin --> and"),
        ("--plot absent/bars.png", "--plot must be a file in a folder that exists, got absent/bars.png"),
        ("--plot .", "--plot must be a file in a folder that exists, got ."),
        ("--plot bars.xyz", "--plot must end in a file type that matplotlib can write, .* got bars.xyz: "),
        ("--plot bars", "--plot must end in a file type that matplotlib can write, .* got bars: "),
        ("--out .", "--out must be a file to append to, got .: .*Is a directory"),
        ("--out text.md/rows.jsonl", "--out must be a file to append to, got text.md/rows.jsonl: "),
        ("--show timed.jsonl --cold", "argument --cold: not allowed with argument --show"),
        ("--list --cold", "argument --cold: not allowed with argument --list"),
        ("--show timed.jsonl --rounds 3", "--rounds does not go with --show"),
        ("--show timed.jsonl --out rows.jsonl", "--out does not go with --show"),
        ("--list --impls xla", "--impls does not go with --list"),
        ("--cold --cases headline", "--cases does not go with --cold"),
        ("--cold --plot bars.png", "--plot does not go with --cold"),
        ("--cold --markdown", "--markdown does not go with --cold"),
        ("--repeats 3", "--repeats needs --cold"),
        ("--markdown --json", "--markdown does not go with --json"),
        ("nonsense", "unrecognized arguments: nonsense"),
    ],
)
def test_wrong_arguments_are_refused_at_once(tmp_path, arguments, message):
    """Exit status 2 and one line that says why, before jax is imported and before anything is written."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    given = arguments.split()
    if not {"--show", "--list", "--out"} & set(given):
        given += ["--out", "new/rows.jsonl"]
    done = _bench(*given, cwd=tmp_path, unimportable=["jax"])
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.match(f"jax-r2p( bench)?: error: .*{message}", last), done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == FILES
