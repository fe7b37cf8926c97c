"""What the README shows is what happens: its code runs, its masks are the masks, its files exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numerics import bounds, visible

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_python_blocks_run(tmp_path):
    """Each as a script of its own, outside the checkout; what it prints is what its comments say."""
    blocks = _blocks("python")
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block{number}.py"
        script.write_text(block, "utf-8")
        done = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        said = re.findall(r"print\(.*\) *# (.*)$", block, re.MULTILINE)
        for want, got in zip(said, done.stdout.splitlines(), strict=False):
            assert want == got, block


def test_the_ten_lines_are_ten():
    assert len([line for line in _blocks("python")[0].splitlines() if line.strip()]) <= 10


MASKS = {
    "causal": (4, 4, True, None),
    "window (1, 1)": (4, 4, False, (1, 1)),
    "window (2, 0)": (4, 4, False, (2, 0)),
    "causal, T = 2": (2, 4, True, None),
    "causal, S = 2": (4, 2, True, None),
}


@pytest.mark.parametrize("name", MASKS)
def test_drawn_masks(name):
    """The 4 x 4 drawings, column by column, against the definition."""
    [drawing] = [b for b in _blocks("text") if "causal, T = 2" in b]
    head, *body = drawing.splitlines()
    start = head.index(name)
    following = [head.index(other) for other in MASKS if head.index(other) > start]
    end = min(following, default=max(map(len, body)))
    rows = [re.findall(r"[01]", line[start:end]) for line in body]
    got = np.array([row for row in rows if row], int)
    t, s, is_causal, window = MASKS[name]
    np.testing.assert_array_equal(got, visible(t, s, *bounds(is_causal, window)))


def test_files_that_are_named_exist():
    """In the file map and in links."""
    file_map = README.split("## Files")[1].split("## ")[0]
    named = re.findall(r"^\| `([\w./-]+)`", file_map, re.MULTILINE)
    named += re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(named) > 10
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_quickstart_says_what_ran(tmp_path):
    """The README's first command ends with it. Here on whatever the machine has; a GPU machine runs the
    kernel.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "fwd_bf16_d64_causal" in done.stdout, "names the kernel of a Hopper GPU"
    assert re.search(r"^What ran: (plain XLA|kernel fwd_bf16_d64_causal)\.$", done.stdout, re.MULTILINE)
    assert "the last two queries alone give the same rows: True" in done.stdout
