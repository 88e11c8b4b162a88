"""The transcripts of this folder, played: each command has the outcome that stands below it (play.py)."""

from __future__ import annotations

import pytest

from tests.protocol.play import HERE, play, transcripts

ALL = [(file.name, title) for file in sorted(HERE.glob("*.txt")) for title in transcripts(file)]


@pytest.mark.parametrize(("file", "title"), ALL, ids=[f"{file}::{title.replace(' ', '_')}" for file, title in ALL])
def test_transcript(file: str, title: str):
    lines = transcripts(HERE / file)[title]
    assert play(lines) == lines
