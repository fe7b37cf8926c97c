"""Runs the code of a page of `docs`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def check_page(name: str, folder: Path) -> None:
    """Runs each Python block as a script of its own, one after the other in `folder`.

    What it prints is what its comments say.
    """
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / name).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert blocks
    for number, block in enumerate(blocks):
        script = folder / f"block{number}.py"
        script.write_text(block, "utf-8")
        done = subprocess.run(
            [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        said = re.findall(r"print\(.*\) *# (.*)$", block, re.MULTILINE)
        assert said == done.stdout.splitlines(), block
