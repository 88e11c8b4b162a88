"""docs/config.md says what the dataclasses say."""

from __future__ import annotations

from tools.config_docs import DOCS, docs_markdown


def test_the_settings_page_is_fresh() -> None:
    assert DOCS.read_text(encoding="utf-8") == docs_markdown(), "docs/config.md is stale: run `make docs`"
