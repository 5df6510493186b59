"""Tables of docs/use.md."""

from __future__ import annotations

import statistics

from committed import machine, result


def exports() -> str:
    record = result("exports")
    lines = ["| network | ONNX | TorchScript |", "|---|---|---|"]
    for name, by_kind in record["differences"].items():
        lines.append(f"| `{name}` | {by_kind['ONNX']:.0e} | {by_kind['TorchScript']:.0e} |")
    return "\n".join([*lines, "", machine(record["environment"])])


def later_clients() -> str:
    record = result("later_clients")
    partitions = list(record["accuracies"])
    lines = [f"| | {' | '.join(partitions)} |", f"|---|{'---|' * len(partitions)}"]
    for method in record["settings"]["methods"]:
        cells = []
        for partition in partitions:
            found = record["accuracies"][partition]
            means = [100 * statistics.mean(one) for one in found[method]]
            cell = f"{statistics.mean(means):.1f} ± {statistics.stdev(means):.1f}"
            if method != "local":
                gains = [
                    100 * (a - b)
                    for ours, alone in zip(found[method], found["local"], strict=True)
                    for a, b in zip(ours, alone, strict=True)
                ]
                harmed = sum(gain < 0 for gain in gains) / len(gains)
                cell += f" ({statistics.mean(gains):+.1f}; {100 * harmed:.0f} % harmed)"
            cells.append(cell)
        lines.append(f"| {method} | {' | '.join(cells)} |")
    later = len(record["accuracies"][partitions[0]]["local"][0])
    note = (
        f"{len(record['seeds'])} seeds, {later} later clients of "
        f"{record['settings']['clients']} each, {record['later_rounds']} rounds of training "
        f"{machine(record['environment'])}."
    )
    return "\n".join([*lines, "", note])


BLOCKS = {"exports": exports, "later-clients": later_clients}
