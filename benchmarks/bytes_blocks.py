"""What the documentation shows of codecs: accuracy against bytes, and how 'tiny' was chosen."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from committed import RESULTS, machine, result
from drawn import COLOUR_OF
from matplotlib.figure import Figure

from perfed.core import layout
from perfed.core.layout import Table

Row = Mapping[str, Any]
COMMAND = "python benchmarks/bytes.py cifar --device cuda --precision bf16"
MARKS = {"perfed-ckt": "o", "perfed-kin": "s", "fedavg": "^"}


def table(name: str, part: str) -> str:
    """Codec by codec: how many times fewer bytes, and what it costs."""
    if not (RESULTS / f"bytes_{name}.json").is_file():
        return f"Not measured yet. On a GPU: `{COMMAND}`."
    record = result(f"bytes_{name}")
    columns = list(dict.fromkeys((row["setting"], row["method"]) for row in record["rows"]))
    several = len({setting for setting, _ in columns}) > 1
    codecs = list(dict.fromkeys(row["codec"] for row in record["rows"]))
    rows = [
        [codec, *(_cell(_pairs(record["rows"], *column, codec), part) for column in columns)]
        for codec in codecs
    ]
    heads = [f"{method}, {setting}" if several else method for setting, method in columns]
    seeds = sorted({row["seed"] for row in record["rows"]})
    kind = {"test": "test", "validation": "validation"}[part]
    note = (
        f"Times fewer bytes than float32, up and down together; then {kind} accuracy of the "
        "model that clients use, against float32 with the same seeds, in points, mean ± standard "
        "deviation. Of "
        f"float32: bytes and accuracy. Mean of the last {record['last']} evaluations, seeds "
        f"{', '.join(map(str, seeds))} {machine(record['environment'])}."
    )
    if record["missing"]:
        note += f" {record['missing']} runs are missing."
    return layout.markdown([Table("", ("codec", *heads), rows, note)])


def _pairs(rows: Iterable[Row], setting: str, method: str, codec: str) -> list[tuple[Row, Row]]:
    """The runs of a codec, each beside that of float32 with the same seed."""
    found = {
        (row["codec"], row["seed"]): row
        for row in rows
        if (row["setting"], row["method"]) == (setting, method) and "failed" not in row
    }
    return [
        (row, found["float32", seed])
        for (name, seed), row in found.items()
        if name == codec and ("float32", seed) in found
    ]


def _cell(pairs: list[tuple[Row, Row]], part: str) -> str:
    if not pairs:
        return ""
    if pairs[0][0] is pairs[0][1]:
        mean = statistics.mean(plain[part] for _, plain in pairs)
        return f"{_bytes(pairs, 1) / len(pairs) / 1e6:.2f} MB, {mean:.1f} %"
    lost = [coded[part] - plain[part] for coded, plain in pairs]
    deviation = f" ± {statistics.stdev(lost):.1f}" if len(lost) > 1 else ""
    return f"{fewer(pairs):.0f}×, {statistics.mean(lost):+.1f}{deviation}"


def _bytes(pairs: list[tuple[Row, Row]], which: int) -> int:
    return sum(pair[which]["up_bytes"] + pair[which]["down_bytes"] for pair in pairs)


def fewer(pairs: list[tuple[Row, Row]]) -> float:
    return _bytes(pairs, 1) / _bytes(pairs, 0)


def paper() -> str:
    """A round of the paper's setting, in bytes."""
    record = result("bytes_paper")
    rows = [
        [
            f"{row['method']}, {row['classes']} classes",
            f"{row['largest']:.2f}",
            _size(row["float32"]),
            _size(row["tiny"]),
            f"{row['float32'] / row['tiny']:.0f}×",
            f"{record['fedfomo'] / row['tiny']:,.0f}×" if row["classes"] == 10 else "",
        ]
        for row in record["rows"]
    ]
    prototypes = record["prototypes"]
    note = (
        f"Bytes of a round with {record['clients']} clients and {record['public']:,} public "
        "samples, up and down, in the encoding that is sent. Outputs are drawn, not trained; "
        "'largest' is the mean of the largest probability of a row, and networks that are surer "
        f"send less. FedFomo with VGG11 sends {_size(record['fedfomo'])} a round. Prototypes of "
        f"100 classes with 512 features (FedProto) take {_size(prototypes['float32'])} in float32 "
        f"and {_size(prototypes['8 bits, deflate'])} with number-bits and deflate."
    )
    heads = ("method", "largest", "float32", "tiny", "less than float32", "less than FedFomo")
    return layout.markdown([Table("", heads, rows, note)])


def _size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def figure(name: str) -> Figure:
    """Test accuracy against bytes, a point for each codec."""
    record = result(f"bytes_{name}")
    drawn = Figure(figsize=(7, 4.6), layout="constrained")
    axis = drawn.subplots()
    for setting, method in dict.fromkeys((r["setting"], r["method"]) for r in record["rows"]):
        codecs = dict.fromkeys(row["codec"] for row in record["rows"])
        found = {codec: _pairs(record["rows"], setting, method, codec) for codec in codecs}
        points = {
            codec: (
                _bytes(pairs, 0) / len(pairs),
                statistics.mean(coded["test"] for coded, _ in pairs),
            )
            for codec, pairs in found.items()
            if pairs
        }
        axis.plot(
            *zip(*points.values(), strict=True),
            MARKS[method],
            color=COLOUR_OF[method],
            label=method,
        )
        for codec in ("float32", "tiny", "hard labels"):
            if codec in points:
                axis.annotate(
                    codec,
                    points[codec],
                    xytext=(5, 5),
                    textcoords="offset points",
                    color=COLOUR_OF[method],
                    fontsize=8,
                )
    axis.set_xscale("log")
    axis.set_xlabel("bytes of a run, up and down")
    axis.set_ylabel("test accuracy, %")
    axis.grid(alpha=0.25)
    axis.margins(x=0.08)  # the last name is inside
    axis.spines[["top", "right"]].set_visible(False)
    drawn.legend(loc="outside lower center", ncols=3, frameon=False)
    return drawn


BLOCKS = {
    "bytes-digits": lambda: table("digits", "test"),
    "bytes-cifar": lambda: table("cifar", "test"),
    "bytes-tune": lambda: table("tune", "validation"),
    "bytes-paper": paper,
}
FIGURES = {"bytes-digits": lambda: figure("digits")}
"""That of CIFAR-10 is drawn with figure("cifar")."""
