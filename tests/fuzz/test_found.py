"""Faults that fuzzing has found, each as the input that showed it."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from tests.fuzz.__main__ import TARGETS

_zip = io.BytesIO()
with zipfile.ZipFile(_zip, "w", zipfile.ZIP_LZMA) as _archive:
    _archive.writestr("a\nb", b"")
NEWLINE = _zip.getvalue()

FOUND = {
    # A key of a record, which is the other side's text, was a line of its own in the refusal.
    "envelopes": [b'{"kind": "join", "roun\\n\\u001b[2Jd": -1, "facts": {}, "refusal": ""}'],
    # What pickle says of an id that it cannot look up has two lines.
    # In a pickle of 20 bytes, the number of a part took 16 GB.
    "archives": [b"\x02\x80\x02Q.", b"\x02\x80\x02}r\xff\xff\xff\x7f."],
    # The name of a member was a line of its own.
    "arrays": [NEWLINE],
}


@pytest.mark.attack("fuzzed")
@pytest.mark.parametrize("name", FOUND)
def test_what_was_a_fault_is_none(name: str, tmp_path: Path) -> None:
    target = TARGETS[name](tmp_path)
    for data in FOUND[name]:
        assert not target.accepts(data)
