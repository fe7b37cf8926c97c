"""`benchmarks/ablation.py`: its arithmetic, its tables and plot, and a build of one kernel, none timed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys

import ablation
import bundle
import numpy as np
import pytest
from numerics import bounds, visible

from jax_r2p._manifest import load_manifest, parse_manifest, read_cubin
from jax_r2p.aot import audit, sass
from jax_r2p.aot.compile import CompiledVariant
from jax_r2p.aot.variants import VARIANTS
from jax_r2p.bench import report, workloads
from jax_r2p.bench.workloads import Workload

SHIPPED = {variant.name: variant for variant in load_manifest().variants}


def workload(length, *, is_causal=False, window=None):
    return Workload(
        name="small",
        batch=1,
        length=length,
        heads=1,
        kv_heads=1,
        head_dim=64,
        value_head_dim=64,
        is_causal=is_causal,
        window=window,
    )


def variant_for(w, tile_m, tile_n):
    mask = "window" if w.window else "causal" if w.is_causal else "none"
    return dataclasses.replace(SHIPPED[f"fwd_bf16_d64_{mask}"], tile_m=tile_m, tile_n=tile_n)


def count_visits(w, variant):
    """By the definition: which blocks of the mask hold a visible pair, and which bound crosses them."""
    mask = visible(w.length, w.length, *bounds(w.is_causal, w.window))
    query, key = np.indices(mask.shape)
    no_left, no_right = w.window is None, w.window is None and not w.is_causal
    left = np.zeros_like(mask) if no_left else key < query - w.window[0]
    right = np.zeros_like(mask) if no_right else key > query + (0 if w.is_causal else w.window[1])
    assert ((left | right) == ~mask).all()
    total = dict.fromkeys((audit.FIRST, *audit.LOOPS[variant.mask]), 0)
    for row in range(0, w.length, variant.tile_m):
        tile = slice(row, row + variant.tile_m)
        blocks = [slice(key, key + variant.tile_n) for key in range(0, w.length, variant.tile_n)]
        _, *others = reversed([block for block in blocks if mask[tile, block].any()])
        total[audit.FIRST] += 1
        for block in others:
            if right[tile, block].any():
                total[audit.RIGHT] += 1
            elif left[tile, block].any():
                total[audit.LEFT] += 1
            else:
                assert mask[tile, block].all()
                total[audit.INTERIOR] += 1
    return total


# Lengths off and on the tiles' edges; windows narrower and wider than a tile, and than all.
@pytest.mark.parametrize("length", [1, 16, 61, 96])
@pytest.mark.parametrize(
    ("is_causal", "window"),
    [
        *((False, None), (True, None)),
        *((False, window) for window in ((0, 0), (3, 0), (20, 0), (200, 0), (5, 9), (40, 30))),
        (True, (20, 20)),
    ],
)
@pytest.mark.parametrize("tile", [(4, 4), (12, 4), (4, 12), (16, 8)])
def test_visits(length, is_causal, window, tile):
    w = workload(length, is_causal=is_causal, window=window)
    variant = variant_for(w, *tile)
    assert ablation.visits(w, variant) == count_visits(w, variant)


def test_visits_of_a_known_case():
    """8192 tokens, causal, square tiles of 128: 64 rows of 1 to 64 blocks, of which the last is masked."""
    [w] = (case.workload for case in ablation.cases() if case.name == "causal_d128_s8192")
    visited = ablation.visits(w, variant_for(w, 128, 128))
    assert visited == {audit.FIRST: 64, audit.RIGHT: 0, audit.INTERIOR: 64 * 63 // 2}


def test_instructions():
    """Of one tile, on average: those of a part as often as it runs, over the number of tiles."""
    visited = {audit.FIRST: 4, audit.RIGHT: 2, audit.INTERIOR: 10}
    counts = {audit.WHOLE: 9999, audit.FIRST: 600, audit.RIGHT: 500, audit.INTERIOR: 400}
    parts = {name: {audit.TOTAL: number} for name, number in counts.items()}
    assert ablation.instructions(visited, parts) == 600 + 500 * 2 / 4 + 400 * 10 / 4


def test_gain():
    """Round by round, so that what slows both in one round cancels."""
    fast = {"rounds_ms": [1.0, 2.0, 4.0, 1.0, 1.0]}
    slow = {"rounds_ms": [1.1, 2.4, 5.2, 1.4, 1.5]}
    assert ablation.gain(slow, fast) == pytest.approx((0.3, 0.2, 0.4))
    assert ablation.gain(fast, fast) == (0, 0, 0)


def test_cases_start_with_the_kernel_that_runs():
    """By the width of what a row sees, for causal masks and windows alike."""
    first = {case.name: case.kernels[0] for case in ablation.cases()}
    assert first["causal_d64_s8192"] == "fwd_bf16_d64_causal_wide"
    assert first["causal_d128_s8192"] == "fwd_bf16_d128_causal_wide"
    assert first["local64_d128_s8192"] == "fwd_bf16_d128_window"
    assert first["local1024_d128_s8192"] == "fwd_bf16_d128_window_wide"
    assert set(ablation.SHAPES) <= set(first.values())


def test_kernels_of_every_case_are_built_or_shipped():
    rows = list(ablation.kernel_rows())
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    assert not set(names) & set(SHIPPED)
    known = {row.name: row.config for row in (*VARIANTS.values(), *rows)}
    used = set()
    for case in ablation.cases():
        used |= set(case.kernels)
        for name in case.kernels:
            config = known[name]
            assert config.head_dim == case.workload.head_dim
            assert config.mask_lowering == ("compare" if name.endswith("_compare") else "r2p")
            assert config.mask_every_block == ("_every" in name)
    assert set(names) <= used, "nothing is built in vain"


# Tables and plot -------------------------------------------------------------------------------------------

ABOUT = {
    "device": "NVIDIA H200",
    "driver": "1.2",
    "jax": "3.4",
    "jax_r2p": "5.6",
    "commit": "0123456789abcdef",
    "date": "2026-01-02T03:04:05",
}


def timed(case, name, milliseconds, instructions):
    variant = SHIPPED[ablation._base(dict.fromkeys(case.kernels))]
    tile = [variant.tile_m, variant.tile_n, variant.min_blocks]
    if "x" in name.removesuffix("_compare").rpartition("_")[2]:
        tile = [int(part) for part in name.removesuffix("_compare").rpartition("_")[2].split("x")]
    variant = dataclasses.replace(variant, tile_m=tile[0], tile_n=tile[1], min_blocks=tile[2])
    row = report.timed_row(
        case.workload,
        name,
        milliseconds,
        [milliseconds * factor for factor in (0.9, 1.0, 1.1)],
        host_bound=name.endswith("_every"),
        tile=tile,
        visits=ablation.visits(case.workload, variant),
        instructions_per_tile=instructions,
    )
    return {**row, "case": case.name, **ABOUT}


@pytest.fixture
def rows(tmp_path):
    """Two cases with every kernel: R2P takes 1 ms and 1000 instructions, compare 1.25 ms and 1250."""
    for case in ablation.cases():
        if case.name in ("local64_d64_s8192", "causal_d128_s8192", "local64_d64_s8192_in_l2"):
            lines = []
            for name in case.kernels:
                slower = 1.25 if name.endswith("_compare") else 1.0
                every = 2.0 if "_every" in name else 1.0
                lines.append(timed(case, name, slower * every, 1000 * slower))
            report.write_rows(tmp_path / "rows.jsonl", lines)
    return tmp_path / "rows.jsonl"


CASES = ["causal_d128_s8192", "local64_d64_s8192", "local64_d64_s8192_in_l2"]


def test_lowering_section(rows):
    _, header, lines = ablation.lowering_section(report.by_case(report.read_rows(rows)))
    table = [dict(zip(header, line, strict=True)) for line in lines]
    assert [row["case"] for row in table] == CASES
    for row in table:
        assert (row["compare, ms"], row["R2P, ms"]) == ("1.2500", "1.0000")
        assert row["gain (middle half)"] == "+25.0% (+25.0% to +25.0%)"
        assert row["instructions saved"] == "20.0%"
    assert [row["published gain, H100"] for row in table] == ["-0.4%", "+13.9%", ""]
    for row, case in zip(table, ("causal_d128_s8192", "local64_d64_s8192"), strict=False):
        [w] = workloads.select(case)
        variant = bundle.shipped(w)
        assert row["tile"].startswith(f"{variant.tile_m} x {variant.tile_n}")
        visited = ablation.visits(w, variant)
        assert row["masked blocks"] == f"{1 - visited[audit.INTERIOR] / sum(visited.values()):.0%}"


def test_blocks_section(rows):
    _, header, lines = ablation.blocks_section(report.by_case(report.read_rows(rows)))
    table = [dict(zip(header, line, strict=True)) for line in lines]
    assert [(row["case"], row["lowering"]) for row in table] == [
        (case, lowering) for case in CASES for lowering in ("R2P", "compare")
    ]
    assert [row["every block masked, ms"] for row in table[:2]] == ["2.0000*", "2.5000"]
    assert {row["gain (middle half)"] for row in table} == {"+100.0% (+100.0% to +100.0%)"}
    # 1 ms more, of 132 SMs, over the unmasked blocks of 4 x 16 heads.
    case = next(case for case in ablation.cases() if case.name == CASES[0])
    unmasked = ablation.visits(case.workload, SHIPPED["fwd_bf16_d128_causal_wide"])[audit.INTERIOR]
    assert table[0]["a masked block more, ns of an SM"] == f"{1e6 * 132 / (unmasked * 4 * 16):.0f}"
    assert [row["R2P gain, every block masked"] for row in table[:2]] == ["+25.0% (+25.0% to +25.0%)", ""]


def test_tiles_section(rows):
    _, header, lines = ablation.tiles_section(report.by_case(report.read_rows(rows)))
    table = [dict(zip(header, line, strict=True)) for line in lines if line[0] == CASES[0]]
    shapes = ablation.SHAPES["fwd_bf16_d128_causal_wide"]
    assert [row["tile"].endswith(" shipped") for row in table] == [True] + [False] * len(shapes)
    for row, (tile_m, tile_n, ctas, *_) in zip(table[1:], shapes, strict=True):
        assert row["tile"] == f"{tile_m} x {tile_n}" + (f", {ctas} CTAs an SM" if ctas > 1 else "")
        # A causal mask computes the triangle, and half a tile beyond it.
        assert 1 < float(row["scores computed / visible"]) < 1.05
        assert row["R2P gain (middle half)"] == "+25.0% (+25.0% to +25.0%)"


def test_show(rows, tmp_path, capsys):
    """Prints the tables, puts them between the markers of a document, and draws the plot."""
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib: pip install jax_r2p[bench]")
    document, plot = tmp_path / "r2p.md", tmp_path / "r2p.png"
    document.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    assert ablation.main(["show", str(rows), "--into", str(document), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    text = document.read_text()
    head, _, rest = text.partition(report.BEGIN)
    middle, _, tail = rest.partition(report.END)
    assert (head, tail) == ("before\n\n", "\n\nafter\n")
    assert "old" not in middle
    assert middle.startswith(
        "\nNVIDIA H200, driver 1.2, jax 3.4, jax_r2p 5.6 at commit 0123456789abcdef, 2026-01-02. bf16; "
        "medians of 3 rounds, the kernels of a case alternating. Where a time has a star the host may have "
        "limited it.\n\n**R2P against "
    )
    sections = (ablation.lowering_section, ablation.blocks_section, ablation.tiles_section)
    for section in sections:
        title, header, lines = section(report.by_case(report.read_rows(rows)))
        assert f"**{title}**\n\n| {' | '.join(header)} |\n" in middle
        for line in lines:
            assert f"| {' | '.join(line)} |\n" in middle
        assert title in printed
    assert plot.read_bytes()[:4] == b"\x89PNG"


# Building --------------------------------------------------------------------------------------------------


def test_build(tmp_path, monkeypatch, capsys):
    """One kernel, taken from the package in place of a compilation."""
    if importlib.util.find_spec("nvidia") is None:
        pytest.skip("needs nvdisasm: pip install jax_r2p[audit]")
    row = next(ablation.kernel_rows())
    variant = SHIPPED[row.config.name]

    def compile_variants(rows):
        assert rows == [row]
        built = dataclasses.replace(variant, name=row.name, file=f"{row.name}.cubin")
        yield CompiledVariant(built, read_cubin(variant), load_manifest().toolchain)

    monkeypatch.setattr(ablation, "kernel_rows", lambda: iter([row]))
    monkeypatch.setattr(bundle, "compile_variants", compile_variants)
    backward = next(v for v in load_manifest().variants if v.role == "backward")  # not compared, not counted
    shipped = dataclasses.replace(load_manifest(), variants=(backward, variant))
    monkeypatch.setattr(ablation, "load_manifest", lambda: shipped)
    folder = tmp_path / "folder"
    assert ablation.main(["build", str(folder)]) == 0
    assert capsys.readouterr().out == f"1 kernels in {folder}\n"
    assert {path.name for path in folder.iterdir()} == {f"{row.name}.cubin", "manifest.json", "counts.json"}
    [built] = parse_manifest((folder / "manifest.json").read_text()).variants
    assert read_cubin(built, folder) == read_cubin(variant)
    counts = json.loads((folder / "counts.json").read_text())
    assert set(counts) == {row.name, variant.name}
    assert counts[row.name] == counts[variant.name]
    kernel = sass.disassemble(read_cubin(variant))
    assert counts[variant.name] == audit.count_parts(kernel, variant.mask, audit.OPCODES)


# Counters --------------------------------------------------------------------------------------------------

NCU = """#!{python}
import sys
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
print("==PROF== Connected")
print('"ID","Kernel Name","Metric Name","Metric Value"')
names = sys.argv[sys.argv.index("once") + 3 :]
launches = [(name, call) for name in names for call in (1, 2)]
for launch, (name, call) in enumerate(launches):
    for number, metric in enumerate(metrics):
        print(f'"{{launch}}","r2p_{{name}}_0","{{metric}}","{{1000 * call + number:,}}"')
"""


def test_counters(tmp_path, monkeypatch):
    """Two kernels of a case in one process; of the two calls of a kernel the second, warm one counts."""
    ncu = tmp_path / "ncu"
    ncu.write_text(NCU.format(python=sys.executable))
    ncu.chmod(0o755)
    monkeypatch.setattr(ablation, "COUNTED_CASES", ("local64_d64_s8192",))
    out = tmp_path / "counters.jsonl"
    arguments = ["counters", str(tmp_path), "--out", str(out), "--commit", "c", "--ncu", str(ncu)]
    assert ablation.main(arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["impl"] for row in rows] == ["fwd_bf16_d64_window", "fwd_bf16_d64_window_compare"]
    for row in rows:
        assert row["case"] == "local64_d64_s8192"
        assert row["ms"] == pytest.approx(2000e-6)
        assert [row[field] for field in list(ablation.COUNTERS)[1:]] == [2001, 2002, 2003, 2004, 2005]
    _, header, lines = ablation.counters_section(report.by_case(rows))
    assert lines[1][:2] == ["local64_d64_s8192", "compare"]
    assert len(header) == len(lines[0])
