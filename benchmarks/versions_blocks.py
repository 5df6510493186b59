"""The table of docs/install.md."""

from __future__ import annotations

import re
from typing import Any

from committed import ROOT, result


def versions() -> str:
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert pinned is not None
    card = result("bench_h200")["environment"]
    lines = [
        "| Python | torch | other packages | what was run | passed | failed | skipped |",
        "|---|---|---|---|---:|---:|---:|",
        f"| 3.11 | {pinned[1]} | as in `constraints.txt` | the whole suite, `make test` | | | |",
    ]
    lines += [_row(line) for line in result("versions").values()]
    torch = card["packages"]["torch"].partition("+")[0]
    where = card["device"].removeprefix("cuda: ")
    lines.append(f"| {card['python']} | {torch} | | the records made on a GPU ({where}) | | | |")
    late = sum(len(line.get("second_try", ())) for line in result("versions").values())
    if late:
        lines += ["", f"{late} of these tests failed at first, and passed in a second run."]
    return "\n".join(lines)


def _row(line: dict[str, Any]) -> str:
    torch = line["packages"]["torch"].partition("+")[0]
    failed = line["failed"] + line["errors"]
    return (
        f"| {line['python']} | {torch} | the {line['which']} | tests without large extras, "
        f"{line['date']} | {line['passed']:,} | {failed:,} | {line['skipped']:,} |"
    )


BLOCKS = {"versions": versions}
