"""`benchmarks/tune.py`: which candidates fit, the folder it leaves, the table; nothing is timed."""

from __future__ import annotations

import dataclasses

import bundle
import pytest
import tune

from jax_r2p._manifest import load_manifest, parse_manifest, read_cubin
from jax_r2p.aot.compile import BuildError, CompiledVariant
from jax_r2p.aot.variants import BACKWARD, FORWARD
from jax_r2p.bench import report, workloads
from jax_r2p.kernels.config import REGISTER_FILE

CAUSAL = FORWARD["fwd_bf16_d128_causal"]


@pytest.mark.parametrize("name", [name for name in FORWARD if "bf16" in name])
def test_shipped_kernels_are_candidates(name):
    """With the registers that are shipped: nothing better was left out by the arithmetic.

    But for those that no consumer can have: the producer need not take them.
    """
    row = FORWARD[name]
    c = row.config
    found = tune.candidate(row, c.tile_m, c.tile_n, c.min_blocks, c.query_in_registers)
    assert dataclasses.replace(found.config, producer_registers=c.producer_registers) == c
    assert found.config.producer_registers - c.producer_registers < 8 * c.consumer_warpgroups


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        ((192, 192, 1, False), "tiles need 295936 bytes of shared memory, 232448 are left to each of 1 CTAs"),
        (
            (128, 176, 1, True),
            "scores 88 + weights 44 + out 64 + query 32 + others 24 = 252 registers and has",
        ),
        (
            (192, 64, 1, True),
            "scores 32 + weights 16 + out 64 + query 32 + others 24 = 168 registers and has",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_sum(tile, reason):
    config = dataclasses.replace(CAUSAL.config, stages=1) if tile[1] == 176 else CAUSAL.config
    assert reason in tune.candidate(dataclasses.replace(CAUSAL, config=config), *tile)


def test_names_are_unique_and_registers_sum_up():
    rows = [row for _, row in tune.candidates(CAUSAL) if not isinstance(row, str)]
    assert len({row.name for row in rows}) == len(rows) > 10
    for row in rows:
        c = row.config
        used = c.consumer_registers * c.consumer_warpgroups + c.producer_registers
        at_entry = REGISTER_FILE // (c.threads * c.min_blocks) // 8 * 8
        assert used <= at_entry * (c.consumer_warpgroups + 1)


def test_backward_kernels_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        tune.main(["build", str(tmp_path), "--variant", next(iter(BACKWARD))])
    assert "argument --variant: invalid choice" in capsys.readouterr().err


def test_build(tmp_path, monkeypatch, capsys):
    """What does not compile is listed with the compiler's reason, and the others are built."""
    variant = next(v for v in load_manifest().variants if v.name == CAUSAL.name)

    def compile_variants(rows):
        for row in rows:
            if row.name.endswith("64x64x2q"):
                raise BuildError(f"{row.name}: uses 8 bytes of local memory\nmore")
            built = dataclasses.replace(variant, name=row.name, file=f"{row.name}.cubin")
            yield CompiledVariant(built, read_cubin(variant), load_manifest().toolchain)

    monkeypatch.setattr(bundle, "compile_variants", compile_variants)
    only = ["128x128x1q", "64x64x2q", "64x64x1q"]
    arguments = ["build", str(tmp_path), "--variant", CAUSAL.name, "--only", *only]
    assert tune.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "uses 8 bytes of local memory" in printed
    assert "192 x 192, 1 CTAs an SM, query in registers" in printed
    assert f"2 kernels in {tmp_path}" in printed
    built = parse_manifest((tmp_path / "manifest.json").read_text()).variants
    assert {v.name for v in built} == {f"{CAUSAL.name}_{x}" for x in (only[0], only[2])}


def test_table():
    cases = workloads.select("causal_d128_s512,causal_d128_s2048")
    times = {CAUSAL.name: (1.0, 2.0), "slow": (1.5, 3.0), "fast": (0.5, 2.0)}
    rows = [
        {**report.timed_row(w, name, ms[i], [ms[i]]), "shipped": name == CAUSAL.name}
        for i, w in enumerate(cases)
        for name, ms in times.items()
    ]
    header, lines = tune.table(rows)
    assert header == ["kernel", *(w.name for w in cases), "mean ratio"]
    assert [line[0] for line in lines] == ["fast", CAUSAL.name, "slow"]
    fast = dict(zip(header, lines[0], strict=True))
    assert [fast[w.name] for w in cases] == [
        f"{times['fast'][i]:.4f} ({times['fast'][i] / times[CAUSAL.name][i]:.3f})" for i in range(2)
    ]
    assert fast["mean ratio"] == "0.750"
