"""`jax-r2p bench`: its pure parts, and runs of all of it as a user would, much too small to time anything."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numerics import bounds, visible

from jax_r2p import _dispatch
from jax_r2p._manifest import load_manifest
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
    assert workloads.MATMUL.flops() == 2 * 8192**3
    assert workloads.MATMUL.bytes_moved() == 3 * 2**27


def test_flops_of_training():
    """Five matmuls for the backward pass, and 12 tensors in all: 4 forward, 5 read and 3 written backward."""
    for w in workloads.select("training"):
        assert _training(w).flops() == 3.5 * w.flops()
    full = _training(workloads.select("full_d128_s8192")[0])
    assert full.bytes_moved() == 12 * 2**27 + 2 * 4 * 4 * 8192 * 16
    wide = _training(workloads.select("causal_d192v128_s8192")[0])
    assert wide.flops() == 2 * 4 * 10 * (4 * 192 + 3 * 128) * (8192 * 8193 // 2)


def _training(w):
    return dataclasses.replace(w, training=True)


def test_table_of_workloads():
    names = [w.name for w in workloads.WORKLOADS]
    assert len(names) == len(set(names))
    assert set(workloads.HEADLINE) <= set(names)
    assert len(workloads.select("training")) == len(workloads.TRAINING) == 10
    for w in (*workloads.WORKLOADS, *workloads.LENGTHS, *workloads.TUNING):
        assert workloads.TABLE[w.name] == w  # those of one name are the same
    assert not {w.name for w in workloads.TUNING} & set(names)
    assert workloads.MATMUL_WITH in workloads.TRAINING
    for w in workloads.WORKLOADS:
        assert w.heads % w.kv_heads == 0
        if w.length >= 384:
            assert 0 <= workloads.TOKENS - w.batch * w.length < w.length
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


@pytest.mark.parametrize("name", [rivals.OURS, rivals.DETERMINISTIC])
def test_gradients_without_a_backward_kernel_are_not_timed(name, monkeypatch):
    """By the table of kernels, here one without wide heads, and before anything is compiled."""
    manifest = load_manifest()
    few = tuple(v for v in manifest.variants if v.role == "forward" or v.head_dim <= 128)
    monkeypatch.setattr(_dispatch, "load_manifest", lambda: dataclasses.replace(manifest, variants=few))
    for w in map(_training, (*workloads.WORKLOADS, *workloads.LENGTHS)):
        answer = rivals.RIVALS[name].lacks(w)
        assert (answer is None) == (max(w.head_dim, w.value_head_dim) <= 128), w
        if answer:
            found = rivals.prepare(rivals.RIVALS[name], w, ())
            assert found == rivals.Unavailable(f"not timed: {answer}")
            assert "no backward kernel" in found.reason


def test_what_is_for_training_only():
    assert rivals.DETERMINISTIC in [rival.name for rival in rivals.select("default", pass_="training")]
    assert rivals.DETERMINISTIC not in [rival.name for rival in rivals.select("default")]
    with pytest.raises(ValueError, match="got 'jax_r2p_deterministic'"):
        rivals.select(rivals.DETERMINISTIC)


def test_deterministic_gradients_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(
        rivals.jax_r2p, "attention", lambda q, k, v, **arguments: asked.append(arguments["deterministic"])
    )
    [w] = workloads.select("causal_d128_s113")
    for name in (rivals.OURS, rivals.DETERMINISTIC):
        rivals.RIVALS[name].build(w)(None, None, None)
    assert asked == [False, True]


def test_inputs_are_random_and_of_the_shapes_of_a_workload():
    w = dataclasses.replace(workloads.select("causal_d192v128_s8192")[0], batch=1, length=16, kv_heads=5)
    query, key, value = (1, 16, 10, 192), (1, 16, 5, 192), (1, 16, 5, 128)
    for each, shapes in ((w, [query, key, value]), (_training(w), [query, key, value, (1, 16, 10, 128)])):
        first, second = measure.input_sets(each, 0, least_bytes=0)
        assert [x.shape for x in first] == shapes
        arrays = [np.asarray(x, np.float32) for x in (*first, *second)]
        assert all(0.8 < x.std() < 1.2 for x in arrays)
        assert len({x.tobytes()[:64] for x in arrays}) == len(arrays)


def test_calls_of_one_program():
    """Each has keys and values of its own, and the query that the one before gave out."""
    [w] = workloads.select("causal_d128_s113_x10")
    assert (w.calls, w.heads, w.head_dim, w.value_head_dim) == (10, w.kv_heads, 128, 128)
    w = dataclasses.replace(w, batch=1, length=4, heads=1, kv_heads=1, head_dim=2, value_head_dim=2, calls=3)
    sets = [[np.asarray(x, np.float32) for x in arrays] for arrays in measure.input_sets(w, 0, least_bytes=0)]
    assert len(sets) == 3

    def f(query, key, value):
        return 2 * query + key - value

    query = sets[0][0]
    for _, key, value in sets:
        query = f(query, key, value)
    np.testing.assert_allclose(measure.in_one_program(f, 3)(*sets), query, rtol=1e-6)
    np.testing.assert_allclose(
        measure.in_one_program(f, 2)(*sets), (query - sets[2][1] + sets[2][2]) / 2, rtol=1e-5
    )


def test_time_of_a_program_is_divided_among_its_calls(monkeypatch):
    monkeypatch.setattr(measure, "_sample", lambda f, inputs, calls: (6.0, 4.0, 2.0))
    samples = measure.alternate({"f": lambda: 0.0}, [()], rounds=2, sample_seconds=0.0, calls_each=2)
    assert (samples["f"].median(), samples["f"].median_queued(), samples["f"].median_host()) == (
        3.0,
        2.0,
        1.0,
    )


def test_each_function_runs_for_a_while_before_its_samples(monkeypatch):
    """0.2 s of calls of 0.07 s are three, for each of two rounds and the one that is thrown away."""
    now, called = [0.0], []

    def f():
        now[0] += 0.07
        called.append(now[0])
        return 0.0

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure, "_sample", lambda *_: (1.0, 1.0, 1.0))
    quick = {"rounds": 2, "sample_seconds": 0.0, "warm_up_seconds": 0.0}
    measure.alternate({"f": f}, [()], **quick)
    assert len(called) == 1
    measure.alternate({"f": f}, [()], **quick, settle_seconds=0.2)
    assert len(called) == 1 + 1 + 3 * 3


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "kv_heads": 2},
        {"window": (5, 0)},
        {"window": (7, 9), "kv_heads": 1},
    ],
)
def test_error_of_gradients(change):
    """Tiny for the right ones; that of the worst of the three for others, and NaN for NaN."""
    w = workloads.Workload(
        name="small",
        batch=2,
        length=33,
        heads=4,
        **{"kv_heads": 4, **change},
        head_dim=32,
        value_head_dim=16,
        training=True,
    )
    arrays = [x.astype(np.float32) for x in measure.input_sets(w, 0, least_bytes=0)[0]]
    right = rivals.RIVALS["reference"].timed(w)
    assert measure.relative_error(right, w, arrays) < 1e-5
    for place in range(3):

        def wrong(*arrays, factor=1.25, place=place):
            return [x * (factor if i == place else 1) for i, x in enumerate(right(*arrays))]

        assert measure.relative_error(wrong, w, arrays) == pytest.approx(0.25, rel=1e-4)
        assert np.isnan(measure.relative_error(lambda *arrays, f=wrong: f(*arrays, factor=np.nan), w, arrays))


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
    assert samples(10, total=[1.0, 1.1], queued=[0.95, 1.0], host=[0.95, 1.0]).host_bound()
    # What is queued late because so much is under way already has not waited for the host.
    assert not samples(100, total=[1.0, 1.1], queued=[0.9, 0.9], host=[0.1, 0.2]).host_bound()


def test_host_time_is_that_of_the_first_calls(monkeypatch):
    """16 calls at 1 s each, and 4 more at 10 s, as if each waited for one before."""
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    calls = []

    def f(x):
        calls.append(x)
        clock[0] += 1.0 if len(calls) <= 1 + measure.HOST_CALLS else 10.0
        return np.zeros(())

    assert measure._sample(f, [(0,)], 20) == (56e3 / 20, 56e3 / 20, 1e3)


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


def _training_rows():
    """One case with every kind of cell, one without a kernel, and the matmul."""
    full, wide = (
        _training(w)
        for w in (workloads.select("full_d128_s8192")[0], workloads.select("causal_d256_s8192")[0])
    )
    rows = [
        report.timed_row(full, "jax_r2p", 12.0, [12.0], host_ms=0.0205),
        report.timed_row(full, "jax_r2p_deterministic", 11.0, [11.0], host_ms=0.0215),
        report.timed_row(full, "cudnn", 15.0, [15.0], host_ms=0.0301),
    ]
    none = {
        "case": wide.name,
        "impl": "jax_r2p",
        "pass": "training",
        "status": "not timed: no backward kernel",
    }
    second = [none, report.timed_row(wide, "cudnn", 20.0, [20.0])]
    for each in (rows, second):
        report.add_ratios(each)
    matmul = dataclasses.replace(workloads.MATMUL, pass_="training")
    return [*rows, report.timed_row(matmul, "xla", 1.6, [1.6]), *second]


def test_table_of_training():
    """Our deterministic gradient is no rival, and the matmul no line."""
    rows = _training_rows()
    assert {row["pass"] for row in rows} == {"training"}
    header, lines = report.table_cells(rows)
    assert header == ["case", "jax_r2p", "jax_r2p_deterministic", "cudnn", "TFLOP/s", "time / best rival"]
    flops = 3.5 * workloads.select("full_d128_s8192")[0].flops()
    ours, matmul = flops / 12e-3 / 1e12, 2 * 8192**3 / 1.6e-3 / 1e12
    assert lines == [
        ["full_d128_s8192", "12.000", "11.000", "15.000", f"{ours:.0f}", "0.800 (cudnn)"],
        ["causal_d256_s8192", "no kernel", "", "20.000", "", ""],
    ]
    assert report.fastest_cells(rows) == {(0, 2), (1, 3)}
    note = (
        f"matmul_8192 by xla, in turn with full_d128_s8192: 1.600 ms, {matmul:.0f} TFLOP/s; "
        f"jax_r2p {ours:.0f}, {ours / matmul:.3f} of it"
    )
    assert report.notes(rows) == ["jax_r2p not timed: no backward kernel (causal_d256_s8192)", note]
    text = report.markdown(rows)
    assert text.startswith("Forward and backward, bf16, median milliseconds a call")
    assert text.endswith(f"|\n\n{note}.\n")


def test_host_table():
    header, lines = report.host_cells(_training_rows())
    assert header == ["case", "jax_r2p", "jax_r2p_deterministic", "cudnn"]
    assert lines == [["full_d128_s8192", "20.5", "21.5", "30.1"]]
    assert "| full_d128_s8192 | 20.5 | 21.5 | 30.1 |\n" in report.host_markdown(_training_rows())


def test_rows_by_pass():
    """Rows of before there was a pass are of the forward; cold starts are in no table."""
    old = [{k: v for k, v in row.items() if k != "pass"} for row in _rows()]
    cold_row = {"case": "cold_a", "impl": "xla", "status": "not installed"}
    found = report.by_pass([*_training_rows(), cold_row, *old])
    assert found == {"forward": old, "training": _training_rows()}
    assert list(found) == ["forward", "training"]
    assert report.markdown(old) == report.markdown(_rows())


def test_tables_of_both_passes_have_their_own_markers():
    begin, end = report.MARKERS["training"]
    document = f"{report.BEGIN}\n1\n{report.END}\nbetween\n{begin}\n2\n{end}\n"
    changed = report.insert_table(document, "new\n", "training")
    assert changed == f"{report.BEGIN}\n1\n{report.END}\nbetween\n{begin}\nnew\n{end}\n"
    assert report.insert_table(changed, "1\n") == changed
    with pytest.raises(ValueError, match="<!-- measured training: begin -->"):
        report.insert_table(f"{report.BEGIN}\n{report.END}\n", "new\n", "training")
    report.insert_table((ROOT / "README.md").read_text("utf-8"), "new\n", "training")


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
    report.plot([*_rows(), *_training_rows()], tmp_path / "bars.png", "png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_plot_over_the_length(tmp_path):
    cases = workloads.select("full_d64_s512,full_d64_s8192,local256_d128_s512,local256_d128_s131072")
    rows = [report.timed_row(w, "jax_r2p", 2 * w.byte_floor_ms(), [1.0]) for w in cases]
    report.plot_lengths([*rows, *_rows(), *_training_rows()], tmp_path / "lengths.png", "png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def _ours(tflops):
    """Rows of jax_r2p, by the speed of each case."""
    timed = ((workloads.TABLE[case], speed) for case, speed in tflops.items())
    return [report.timed_row(w, "jax_r2p", w.flops() / speed / 1e9, []) for w, speed in timed]


def test_calls_that_differ_in_length_only():
    """Others are lines of their own, the shortest first; programs of several calls are in none."""
    rows = _ours({w.name: 500.0 for w in workloads.WORKLOADS})[::-1]
    rows += [dict(row, **{"pass": "training"}) for row in rows if row["case"] == "causal_d128_s8192"]
    rows += [dict(rows[0], case="of another table"), dict(rows[0], impl="xla")]
    lines = {
        name: [w.length for w, _ in points]
        for name, points in report.over_lengths(rows).items()
        if name.startswith("causal")
    }
    assert lines == {
        "causal, d64": [8192],
        "causal, d96": [8192],
        "causal, d128": [113, 384, 512, 2048, 8192, 16_384],
        "causal, d128, 8 heads a key head": [8192],
        "causal, d192": [8192],
        "causal, d192v128": [8192],
        "causal, d256": [8192],
        "causal, d128, training": [8192],
    }
    lines = report.over_lengths(_ours({w.name: 500.0 for w in workloads.LENGTHS}))
    assert len(lines) == 2 * 6 + 2 + 3
    assert [w.name for w, _ in lines["window (64, 0), d64"]] == [
        f"local64_d64_s{length}" for length in (512, 2048, 8192, 32_768, 131_072)
    ]


def test_time_follows_the_arithmetic():
    """A pair may take a tenth more than at the length before; not of short lengths, nor of other calls."""

    def rows(calls, *tflops):
        names = (f"{calls}_s{length}" for length in (512, 2048, 8192, 32_768, 131_072))
        return _ours(dict(zip(names, tflops, strict=True)))

    assert report.growth(rows("causal_d128", 500.0, 400.0, 600.0, 550.0, 501.0)) == []
    slow = rows("causal_d128", 500.0, 400.0, 600.0, 500.0, 520.0)
    note = "jax_r2p causal, d128: at 32768 tokens a query-key pair takes 1.20 times what it does at 8192"
    assert report.growth(slow) == [note]
    assert report.notes(slow) == [note]
    others = _ours({"causal_gqa8_d128_s8192": 9.0, "causal_d192_s8192": 6.0, "causal_d192v128_s8192": 3.0})
    assert report.growth([*others, *slow]) == [note]
    assert report.growth([dict(row, impl="xla") for row in slow]) == []
    # Windows too: their pairs grow with the length, not with its square.
    windows = rows("local64_d128", 50.0, 90.0, 60.0, 60.0, 60.0)
    assert [line.partition(":")[0] for line in report.growth(windows)] == ["jax_r2p window (64, 0), d128"]


def test_lengths():
    """Each kernel's mask and head dims; longer ones than the tokens of the others are one sequence."""
    cases = workloads.select("lengths")
    assert len(cases) == len(workloads.LENGTHS) == (2 * 3 + 2 + 3) * 5 + 2 * 3 * 4
    shipped = {(v.head_dim, v.value_head_dim) for v in load_manifest().variants if v.role == "forward"}
    for mask in ("full", "causal"):
        assert {(w.head_dim, w.value_head_dim) for w in cases if w.mask == mask} == shipped
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
    """Those of every release can be shown; counters, checks of several GPUs and curves are other rows."""
    files = sorted((ROOT / "benchmarks" / "results").glob("*/*.jsonl"))
    others = ("counters.jsonl", "multi_gpu.jsonl", "train-r2p.jsonl", "train-cudnn.jsonl")
    files = [file for file in files if file.name not in others]
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
        ('{"case": "a", "impl": "b", "ms": 1, "tflops": 1, "pass": "backward"}', "line 1 is not a row"),
        ('{"case": "a", "impl": "b", "ms": 1, "tflops": 1, "host_ms": "1"}', "line 1 is not a row"),
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
            "causal_d128_s2048,local64_d64_s8192,causal_d128_s113_x10",
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
        for case in ("causal_d128_s2048", "local64_d64_s8192", "causal_d128_s113_x10")
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
            assert row["calls_each"] == (10 if row["case"].endswith("_x10") else 1)
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
    hosts = show("--host").partition("microseconds of the host")[2]
    assert "local64_d64_s8192" in hosts
    assert "_x10" not in hosts
    table = show("--plot", "bars.png")
    assert "local64_d64_s8192" in table
    assert "jax_r2p refused: NotImplementedError: " in table
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_whole_run_of_training(tmp_path):
    """Gradients and a matmul in turn; tables of both passes from the rows of both."""
    begin, end = report.MARKERS["training"]
    document = f"{report.BEGIN}\nold\n{report.END}\n{begin}\nold\n{end}\n"
    (tmp_path / "doc.md").write_text(document)
    done = _bench(
        *("--pass", "training", "--cases", "full_d128_s8192,causal_d256_s8192,causal_gqa8_d128_s8192"),
        *("--impls", "jax_r2p,jax_r2p_deterministic,xla", "--rounds", "2", "--sample-ms", "1"),
        *("--scale-down", "128", "--matmul", "--host", "--out", "rows.jsonl", "--into", "doc.md"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = report.read_rows(tmp_path / "rows.jsonl")
    assert all(row["pass"] == "training" for row in rows)
    assert [
        (r["case"], r["impl"]) for r in rows if r["impl"] not in ("jax_r2p", "jax_r2p_deterministic")
    ] == [
        ("full_d128_s8192", "xla"),
        ("matmul_8192", "xla"),
        ("causal_gqa8_d128_s8192", "xla"),
        ("causal_d256_s8192", "xla"),
    ]
    for row in rows:
        if row["impl"] == "xla":
            assert len(row["rounds_ms"]) == 2
            assert row["host_ms"] > 0
            assert row["case"] == "matmul_8192" or row["relative_error"] < 0.02
        else:
            [w] = workloads.select(row["case"])
            lacks = rivals.RIVALS[row["impl"]].lacks(_training(w))
            wanted = f"not timed: {lacks}" if lacks else "refused: NotImplementedError"
            assert row["status"].startswith(wanted)
    assert "Forward and backward: milliseconds a call" in done.stdout
    assert "matmul_8192 by xla, in turn with full_d128_s8192: " in done.stdout
    assert "Forward and backward: microseconds of the host to queue a call" in done.stdout
    written = (tmp_path / "doc.md").read_text()
    assert written.startswith(f"{report.BEGIN}\nold\n{report.END}\n{begin}\nForward and backward, bf16")

    # With the forward in the same file each table goes where it belongs.
    with (tmp_path / "rows.jsonl").open("ab") as file:
        file.write(TIMED)
    shown = _bench(
        "--show", "rows.jsonl", "--into", "doc.md", "--markdown", "--host", cwd=tmp_path, unimportable=["jax"]
    )
    assert shown.returncode == 0, shown.stderr
    head, _, tail = (tmp_path / "doc.md").read_text().partition(begin)
    assert head.startswith(f"{report.BEGIN}\nForward, bf16")
    assert begin + tail == written.partition(report.END)[2].lstrip("\n")
    assert shown.stdout.startswith(head.partition("\n")[2].partition(report.END)[0])
    assert "microseconds of the host" in shown.stdout


def test_nothing_timed(tmp_path):
    done = _bench(
        "--cases", "causal_d128_s113", "--impls", "jax_r2p", *QUICK, "--plot", "bars.png", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "jax_r2p refused: NotImplementedError" in done.stdout
    assert "jax-r2p bench: nothing was timed" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_gradients_of_programs_of_several_calls(tmp_path):
    done = _bench("--pass", "training", "--cases", "causal_d128_s113_x10", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert "--cases causal_d128_s113_x10: a program of several calls is forward only" in done.stderr


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
        "calls": 1,
    }
    assert [row["name"] for row in listed["implementations"]] == list(rivals.RIVALS)
    for row in listed["implementations"]:
        rival = rivals.RIVALS[row["name"]]
        assert (row["installed"], row["version"]) == (rival.is_installed(), rival.package_version())
        assert row["passes"] == list(rival.passes)

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
    "forward.md": f"{report.BEGIN}\n{report.END}\n".encode(),
    "binary.jsonl": b"\xff\xfe\x00",
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--cases nonsense",
            "--cases must be all, headline, training, lengths, or some of full_d64_.*; got 'nonsense'",
        ),
        ("--cases headline,causal_d64_s8192", "--cases must be .*; got 'headline'"),
        ("--impls xla,nonsense", "--impls must be default, or some of jax_r2p, .*; got 'nonsense'"),
        ("--impls jax_r2p_deterministic", "--impls must be .*; got 'jax_r2p_deterministic'"),
        ("--pass backward", "argument --pass: invalid choice: 'backward'"),
        ("--cold --pass training", "--pass does not go with --cold"),
        (
            "--pass training --into forward.md",
            "--into must be .*: it needs the lines <!-- measured training: ",
        ),
        ("--matmul --cases causal_d64_s8192", "--matmul needs full_d128_s8192 among --cases"),
        ("--show timed.jsonl --matmul", "--matmul does not go with --show"),
        ("--show timed.jsonl --host", "--host needs rows of timed calls with host_ms, got none"),
        ("--host --json", "--host does not go with --json"),
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
