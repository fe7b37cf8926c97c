"""docs/semantics.md: its code runs, and prints what its comments say."""

from __future__ import annotations

from pages import check_page


def test_code_of_the_page(tmp_path):
    check_page("semantics.md", tmp_path)
