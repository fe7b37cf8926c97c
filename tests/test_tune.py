"""`benchmarks/tune.py`: which candidates fit, the folder it leaves, the table; nothing is timed."""

from __future__ import annotations

import dataclasses
import re

import bundle
import numpy as np
import pytest
import tune

from jax_r2p._manifest import load_manifest, parse_manifest, read_cubin
from jax_r2p.aot import output
from jax_r2p.aot.compile import BuildError, CompiledVariant
from jax_r2p.aot.variants import BACKWARD, FORWARD
from jax_r2p.bench import measure, report, workloads
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


def _given(choice):
    """What `--with` makes of an argument."""
    return dict([tune._choice(choice)])


@pytest.mark.parametrize(
    ("choice", "suffix", "changed"),
    [
        ("stages=3", "_stages3_64x128x1q", {"stages": 3}),
        ("query_stages=2", "_query_stages2_64x128x1q", {"query_stages": 2}),
        ("own_blocks=true", "_own_blocks_64x128x1q", {"own_blocks": True}),
        ("early_scores=false", "_no_early_scores_64x128x1q", {"early_scores": False}),
        ("rescale_late=true", "_rescale_late_64x128x1q", {"rescale_late": True}),
        ("skip_rescale=true", "_skip_rescale_64x128x1q", {"skip_rescale": True}),
    ],
)
def test_further_choices(choice, suffix, changed):
    """They change that and nothing else, and the name, which still ends in the tiles."""
    row = FORWARD["fwd_bf16_d128_causal"]
    plain, other = (tune.candidate(row, 64, 128, 1, True, **choices) for choices in ({}, _given(choice)))
    assert other.name == row.name + suffix
    assert other.config == dataclasses.replace(plain.config, **changed)


def test_further_choices_come_before_what_fits():
    """Scores of the next tile need its query, so without `--with` only one place of it is tried."""
    row = FORWARD["fwd_bf16_d128_none"]
    assert "early_scores needs the query in registers" in tune.candidate(row, 128, 96, 1, False)
    assert not tune.candidate(row, 128, 96, 1, False, **_given("early_scores=false")).config.early_scores
    assert "bytes of shared memory" in tune.candidate(row, 128, 96, 1, True, **_given("stages=9"))
    under = FORWARD["fwd_bf16_d256_none"]
    assert not tune.candidate(under, 64, 64, 1, False, **_given("out_in_query=false")).config.out_in_query
    assert "out_in_query needs" in tune.candidate(under, 64, 64, 1, True, **_given("out_in_query=true"))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            ("--variant", next(iter(BACKWARD))),
            "--variant: must be a forward kernel of bf16, .* got 'bwd_bf16_",
        ),
        (
            ("--variant", "fwd_fp16_d64_none"),
            "--variant: must be a forward kernel of bf16, .* got 'fwd_fp16_d64_none'",
        ),
        *(
            (("--with", text), f"--with: must be one of stages=NUMBER, .*=true|false; got '{text}'")
            for text in ("stages", "stages=0", "stages=true", "own_blocks=1", "tile_m=64")
        ),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, capsys, argument, message):
    with pytest.raises(SystemExit, match="2"):
        tune.main(["build", str(tmp_path), "--variant", CAUSAL.name, *argument])
    assert re.search(f"error: argument {message}", capsys.readouterr().err)


def test_unknown_cases_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        tune.main(["run", str(tmp_path), "--out", str(tmp_path / "rows.jsonl"), "--cases", "nonsense"])
    assert "error: argument --cases: must be all, headline, " in capsys.readouterr().err


@pytest.mark.parametrize("name", tune.TUNED)
def test_every_kernel_has_workloads(name):
    variant = next(v for v in load_manifest().variants if v.name == name)
    assert tune.served(variant, tune.CASES)


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
    assert tune.main([*arguments, "--with", "rescale_late=true", "--with", "early_scores=false"]) == 0
    built = parse_manifest((tmp_path / "manifest.json").read_text()).variants
    given = f"{CAUSAL.name}_rescale_late_no_early_scores"
    assert {v.name for v in built} == {f"{given}_{x}" for x in (only[0], only[2])}
    with pytest.raises(SystemExit, match="no kernel was built"):
        tune.main(["build", str(tmp_path), "--variant", CAUSAL.name, "--only", "nonsense"])
    assert parse_manifest((tmp_path / "manifest.json").read_text()).variants == built


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One with a candidate that adds up its arguments, which are 1; the sum is its time."""
    variant = next(v for v in load_manifest().variants if v.name == CAUSAL.name)
    other = dataclasses.replace(variant, name=f"{CAUSAL.name}_128x128x1q", file="other.cubin")
    built = CompiledVariant(other, read_cubin(variant), load_manifest().toolchain)
    output.write(tmp_path, [built], keep_others=False)
    monkeypatch.setattr(bundle, "register", lambda _: {v.name: v for v in (variant, other)})
    monkeypatch.setattr(bundle, "call", lambda w, variant: lambda query, key, value: query + key + value)
    ones = (np.float32(1), np.float32(1), np.float32(1))
    monkeypatch.setattr(measure, "input_sets", lambda w, seed: [ones] * 10)
    monkeypatch.setattr(measure, "relative_error", lambda f, w, arrays: float(f(*arrays)))

    def alternate(functions, inputs, *, rounds, sample_seconds, calls_each, advance):
        results = {name: float(f(*inputs[0])) for name, f in functions.items()}
        return {name: measure.Samples(1, total=[x / calls_each] * rounds) for name, x in results.items()}

    monkeypatch.setattr(measure, "alternate", alternate)
    return tmp_path


def test_run(folder):
    """A program of ten calls of 1 + 1 added to what the one before gave, from 1, is 21, a tenth each."""
    arguments = ["run", str(folder), "--out", str(folder / "rows.jsonl"), "--rounds", "2"]
    assert tune.main([*arguments, "--cases", "causal_d128_s113_x10,causal_d128_s113,causal_d64_s8192"]) == 0
    rows = report.read_rows(folder / "rows.jsonl")
    assert {(r["case"], r["calls_each"], r["ms"], r["relative_error"]) for r in rows} == {
        ("causal_d128_s113", 1, 3.0, 3.0),
        ("causal_d128_s113_x10", 10, 2.1, 3.0),
    }
    assert [r["impl"] for r in rows if r["shipped"]] == [CAUSAL.name] * 2
    assert len(rows) == 4


def test_nothing_to_time(folder):
    with pytest.raises(SystemExit, match=f"the mask of {CAUSAL.name}, got full_d128_s512, causal_d64_s8192"):
        tune.main(
            ["run", str(folder), "--out", str(folder / "new"), "--cases", "full_d128_s512,causal_d64_s8192"]
        )
    assert not (folder / "new").exists()


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
