"""What docs/security.md shows: everything that was tried, and the tests that show what happens."""

from __future__ import annotations

import sys
from typing import Any

from committed import ROOT, machine, result

sys.path.insert(0, str(ROOT))
from tests import attacks


def tried() -> str:
    record = result("attacks")
    tests = {row["entry"]: row["tests"] for row in record["rows"]}
    lines = []
    for part in attacks.parts():
        lines += [f"### {part['part']}", "", "| | Tried | What happens | Shown by |"]
        lines += ["|---|---|---|---|"]
        lines += [_row(one, tests.get(one["entry"], {})) for one in part["entries"]]
        lines.append("")
    passed: dict[str, int] = {}  # a test may show several entries
    for name, outcomes in (pair for found in tests.values() for pair in found.items()):
        passed[name] = max(passed.get(name, 0), outcomes.get("passed", 0))
    lines.append(f"{sum(passed.values())} tests passed {machine(record['environment'])}.")
    return "\n".join(lines)


def _row(one: dict[str, Any], tests: dict[str, dict[str, int]]) -> str:
    number = one["entry"] if isinstance(one["entry"], int) else ""
    now = one["now"]
    if "remains" in one:
        now += f" **Cannot be closed:** {one['remains']}"
    cells = [str(number), one["tried"], now.strip(), _shown_by(tests)]
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"


def _shown_by(tests: dict[str, dict[str, int]]) -> str:
    """Files, and how many tests of each passed; a test that did not is named."""
    files: dict[str, int] = {}
    wrong = []
    for name, outcomes in tests.items():
        file, _, test = name.partition("::")
        passed = outcomes.get("passed", 0)
        if passed:
            file = file.removeprefix("tests/")
            files[file] = files.get(file, 0) + passed
        if outcomes.get("failed") or not passed:
            wrong.append(f"{test}: {', '.join(outcomes)}")
    return "; ".join([*(f"`{file}` ({number})" for file, number in files.items()), *wrong]) or "–"


def fuzzed() -> str:
    record = result("fuzz")
    lines = ["| Read | Mutations | Accepted | Faults |", "|---|---:|---:|---:|"]
    for row in record["rows"]:
        name = row["target"].replace("-", " ")
        cells = (name, *(f"{row[key]:,}" for key in ("mutations", "accepted", "faults")))
        lines.append(f"| {' | '.join(cells)} |")
    total = sum(row["mutations"] for row in record["rows"])
    guides = " and ".join(sorted({row["guided_by"] for row in record["rows"]}))
    note = f"{total:,} mutations, guided by {guides} {machine(record['environment'])}."
    return "\n".join([*lines, "", note])


def soaked() -> str:
    record = result("soak")
    same = "the same bytes as" if record["same_results"] else "**other results than**"
    return (
        f"{record['rounds']:,} rounds, {record['lost']:,} messages lost, "
        f"{record['not_admitted']:,} not admitted, killed after rounds "
        f"{', '.join(map(str, record['killed_after']))}: logs, summary and models are {same} "
        f"without the kills. Memory {record['memory_mb']} MB, "
        f"{record['growth_kb_per_round']:+.2f} kB a round {machine(record['environment'])}."
    )


BLOCKS = {"attacks": tried, "fuzz": fuzzed, "soak": soaked}
