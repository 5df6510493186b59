"""Put the committed results into the documentation, so that no number there is typed.

python benchmarks/render.py           rewrites the blocks between <!-- begin: X --> and end, and
                                      the paper's figures whose numbers have changed
python benchmarks/render.py --check   exits with 1 where one is not what the results say
"""

from __future__ import annotations

import re
import statistics
import sys
from itertools import takewhile
from typing import Any

from bytes_blocks import BLOCKS as BYTES_BLOCKS
from bytes_blocks import FIGURES as BYTES_FIGURES
from committed import ROOT, machine, result
from drawn import draw, stamp_in, stamp_of
from first_blocks import BLOCKS as FIRST_BLOCKS
from guide_blocks import BLOCKS as GUIDE_BLOCKS
from hostile_blocks import BLOCKS as HOSTILE_BLOCKS
from hostile_blocks import FIGURES as HOSTILE_FIGURES
from kin_blocks import BLOCKS as KIN_BLOCKS
from kin_blocks import FIGURES as KIN_FIGURES
from paper_blocks import BLOCKS as PAPER_BLOCKS
from paper_blocks import FIGURES as PAPER_FIGURES
from peers_blocks import BLOCKS as PEERS_BLOCKS
from privacy_blocks import BLOCKS as PRIVACY_BLOCKS
from privacy_blocks import FIGURES as PRIVACY_FIGURES
from screening_blocks import BLOCKS as SCREENING_BLOCKS
from security_blocks import BLOCKS as SECURITY_BLOCKS
from study_blocks import BLOCKS as STUDY_BLOCKS
from study_blocks import FIGURES as STUDY_FIGURES
from successor_blocks import BLOCKS as SUCCESSOR_BLOCKS
from use_blocks import BLOCKS as USE_BLOCKS
from versions_blocks import BLOCKS as VERSIONS_BLOCKS

from perfed.bench import render as render_bench
from perfed.runs.tables import spread, summary

DOCUMENTS = (
    "README.md",
    "docs/findings.md",
    "docs/engines.md",
    "docs/reproduction.md",
    "docs/federation.md",
    "docs/index.md",
    "docs/choosing.md",
    "docs/options.md",
    "docs/successor.md",
    "docs/kin-parts.md",
    "docs/benchmark.md",
    "docs/one-table.md",
    "docs/security.md",
    "docs/privacy.md",
    "docs/methods.md",
    "docs/bytes.md",
    "docs/hostile.md",
    "docs/rounding.md",
    "docs/use.md",
    "docs/install.md",
)


def comparison(name: str) -> str:
    record = result(name)
    lines = [summary(record["runs"]).text(), *record["failures"]]
    return "\n".join(["```", *lines, "```", machine(record["environment"])])


def batchnorm() -> str:
    lines = ["| data | setting | separate | private | shared |", "|---|---|---|---|---|"]
    notes = []
    for name, title in (("digits", "digits, CNN"), ("cifar10", "CIFAR-10 / 100, VGG11")):
        record = result(f"public_batchnorm_{name}")
        cells: dict[str, dict[str, str]] = {}
        for row in record["rows"]:
            values = row["validation_accuracy"]
            cells.setdefault(row["setting"], {})[row["mode"]] = spread(values)
        for setting, by_mode in cells.items():
            best = max(by_mode, key=lambda mode: float(by_mode[mode].split()[0]))
            by_mode[best] = f"**{by_mode[best]}**"
            shown = " | ".join(by_mode[mode] for mode in ("separate", "private", "shared"))
            lines.append(f"| {title} | {setting} | {shown} |")
        seeds = sorted({seed for row in record["rows"] for seed in row["seeds"]})
        source = f"{record['data']}; " if "data" in record else ""
        notes.append(f"{title}: {source}seeds {seeds} {machine(record['environment'])}.")
    return "\n".join([*lines, "", *notes])


def tuning() -> str:
    """Validation accuracy by step size, and how many seeds diverged."""
    rates = ("0.1", "0.2")
    cells: dict[str, dict[str, str]] = {}
    for rate in rates:
        record = result(f"tuning_{rate}")
        values: dict[str, list[float]] = {}
        for run in record["runs"]:
            last = next(iter(run["models"].values()))["last"]
            values.setdefault(run["algorithm"], []).append(last["validation_accuracy"])
        for algorithm, found in values.items():
            cells.setdefault(algorithm, {})[rate] = spread(found)
        for failure in record["failures"]:
            algorithm = failure.partition(", seed")[0]
            row = cells.setdefault(algorithm, {})
            lost = sum(other.startswith(f"{algorithm}, seed") for other in record["failures"])
            row[rate] = f"{lost} of {lost + len(values.get(algorithm, []))} seeds diverged"
    lines = [f"| | {' | '.join(f'η = {rate}' for rate in rates)} |", "|---|---|---|"]
    for algorithm, row in cells.items():
        lines.append(f"| {algorithm} | {' | '.join(row[rate] for rate in rates)} |")
    return "\n".join(lines)


def against_local(name: str) -> str:
    """Points above local training, seed by seed, for all clients and by training-set size, and who
    is harmed."""
    harm = result(name)["against_local"]["methods"]
    accuracy: dict[str, dict[int, dict[str, float]]] = {}
    for run in result(name)["runs"]:
        last = next(iter(run["models"].values()))["last"]  # the model a client would use
        groups = {"all": last["test_accuracy"]} | last["test_accuracy_by_train_size"]
        accuracy.setdefault(run["algorithm"], {})[run["seed"]] = groups
    sizes = sorted(
        {g for runs in accuracy.values() for row in runs.values() for g in row}, key=size_order
    )
    head = " | ".join("all clients" if size == "all" else f"{size} samples" for size in sizes)
    lines = [f"| | {head} | harmed % |", "|---" * (len(sizes) + 2) + "|"]
    for algorithm, runs in accuracy.items():
        if algorithm in ("local", "majority"):
            continue
        cells = []
        for size in sizes:
            gains = [
                100 * (row[size] - accuracy["local"][seed][size])
                for seed, row in runs.items()
                if size in row
            ]
            deviation = f" ± {statistics.stdev(gains):.1f}" if len(gains) > 1 else ""
            cells.append(f"{statistics.mean(gains):+.1f}{deviation}")
        losing = statistics.mean(seed["losing"] for seed in harm[algorithm].values())
        cells.append(f"{100 * losing:.0f}")
        lines.append(f"| {algorithm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def engines(name: str) -> str:
    """Both engines on the same work."""
    record = result(name)
    notes = [machine(record["environment"])]
    if "left_out" in record:
        notes.append(f"Left out: {record['left_out']}.")
    return "\n".join(["```", render_bench(record), "```", *notes])


BETWEEN = "between kernels (below zero: kernels ran side by side)"
KERNELS = {
    "convolution, forward and input gradient": ("_conv_kernel", "_small_forward"),
    "convolution, weight gradient": ("_conv_weight", "_small_weight"),
    "BatchNorm, ReLU and pooling, both ways": ("_norm", "_stats"),
    "the update": ("_descend", "multi_tensor_apply"),
    "weights to bf16, other copies": ("copy",),
}


def profile() -> str:
    """The step's kernels by what they are for."""
    record = result("profile_h200")
    rest = "classifier, loss, drawing of samples, counters"
    sums: dict[str, tuple[float, int]] = dict.fromkeys([*KERNELS, rest], (0.0, 0))
    for row in record["rows"]:
        kind = next(
            (kind for kind, names in KERNELS.items() if any(n in row["kernel"] for n in names)),
            rest,
        )
        time, calls = sums[kind]
        sums[kind] = (time + row["microseconds"], calls + row["calls"])
    lines = ["| | ms | kernels |", "|---|---|---|"]
    lines += [f"| {kind} | {time / 1e3:.2f} | {calls} |" for kind, (time, calls) in sums.items()]
    busy = sum(time for time, _ in sums.values()) / 1e3
    lines.append(f"| {BETWEEN} | {record['step_ms'] - busy:.2f} | |")
    lines.append(f"| **a step** | **{record['step_ms']:.2f}** | |")
    bench = result("bench_h200")
    step = next(row for row in bench["rows"] if row["precision"] == "bf16")
    convolutions = sum(time for time, _ in [sums[kind] for kind in list(KERNELS)[:2]]) / 1e6
    rate = step["flops_per_step"] / convolutions
    share = rate / bench["peak_flops"]["bf16"]
    note = (
        "By their own times, which other kernels beside them lengthen, the convolutions run at "
        f"{rate / 1e12:.0f} TFLOP/s, {100 * share:.0f} % of what a large matrix product reaches "
        f"here {machine(record['environment'])}."
    )
    return "\n".join([*lines, "", note])


PARTS = {
    "convolution, forward and input gradient": ("_conv_kernel", "_small_forward"),
    "convolution, weight gradient": ("_conv_weight", "_small_weight"),
    "depthwise convolution": ("_depthwise",),
    "matrix products": ("nvjet", "cutlass"),
    "attention": ("flash", "_attention"),
    "norms, with the sum and ReLU after them": ("_norm", "_stats", "_layer_norm", "_group_norm"),
    "biases, GELU, and the sums of their gradients": ("_bias", "_gelu", "_sums"),
    "the update": ("_descend", "multi_tensor_apply"),
    "sums of gradients": ("reduce_kernel", "CUDAFunctor_add"),
}


def profile_networks() -> str:
    """Networks side by side, their kernels by what they are for."""
    record = result("profile_networks_h200")
    titles = {"{name: resnet18, norm: group}": "resnet18, GroupNorm"}
    names = list(record["networks"])
    rest = "copies, classifier, loss, drawing of samples"
    columns = []
    for name in names:
        times = dict.fromkeys([*PARTS, rest], 0.0)
        for row in record["networks"][name]["rows"]:
            kinds = (
                kind for kind, parts in PARTS.items() if any(n in row["kernel"] for n in parts)
            )
            times[next(kinds, rest)] += row["microseconds"] / 1e3
        times[BETWEEN] = record["networks"][name]["step_ms"] - sum(times.values())
        columns.append(times)
    lines = [
        "| ms of a step | " + " | ".join(titles.get(name, name) for name in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for kind in columns[0]:
        cells = [f"{times[kind]:.2f}" if abs(times[kind]) >= 0.005 else "" for times in columns]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    wholes = [f"**{record['networks'][name]['step_ms']:.2f}**" for name in names]
    lines.append(f"| **a step** | {' | '.join(wholes)} |")
    return "\n".join([*lines, "", machine(record["environment"])])


def single_precision() -> str:
    """Steps in float32 and tf32, by what the GPU's libraries make of the same shapes."""
    record = result("single_precision_h200")
    lines = [
        "| | precision | a step, ms | the libraries' best, ms | ratio |",
        "|---|---|---|---|---|",
    ]
    for network in record["networks"].values():
        for precision, row in network["precisions"].items():
            numbers = f"{row['step_ms']:.1f} | {row['floor_ms']:.1f} | {row['ratio']:.2f}"
            lines.append(f"| {network['title']} | {precision} | {numbers} |")
    return "\n".join([*lines, "", machine(record["environment"])])


def networks(name: str) -> str:
    """Networks × engines × precisions: ms of a step, the lightest network first."""
    record = result(name)
    ordered = sorted(record["networks"].values(), key=lambda network: network["flops_per_step"])
    pairs = [(row["engine"], row["precision"]) for network in ordered for row in network["rows"]]
    ways = list(dict.fromkeys(pairs))
    heads = [*(" ".join(way) for way in ways), "the fastest, against sequential float32"]
    lines = [f"| ms of a step | parameters | {' | '.join(heads)} |"]
    lines.append("|---" * (len(heads) + 2) + "|")
    for network in ordered:
        rows = {(row["engine"], row["precision"]): row for row in network["rows"]}
        times = [row["step_ms"] for row in rows.values() if "step_ms" in row]
        ratio = rows["sequential", "float32"]["step_ms"] / min(times)
        cells = [f"{network['parameters']:,}", *(_step(rows.get(way)) for way in ways)]
        cells.append(f"{ratio:.1f}×" if len(times) > 1 else "–")
        lines.append(f"| {network['title']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", machine(record["environment"])])


def networks_cpu() -> str:
    """The same on a CPU, beside the floor: the arithmetic at the rate of a large matrix product."""
    record = result("networks_cpu")
    rate = record["peak_flops"]["float32"]
    heads = ["ms of a step", "parameters", "sequential", "stacked", "against sequential"]
    heads += ["floor", "sequential / floor", "stacked / floor"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for network in sorted(record["networks"].values(), key=lambda one: one["flops_per_step"]):
        rows = {row["engine"]: row for row in network["rows"]}
        one, all_ = (rows[engine]["step_ms"] for engine in ("sequential", "stacked"))
        floor = 1e3 * network["flops_per_step"] / rate
        cells = [f"{network['parameters']:,}", _step(rows["sequential"]), _step(rows["stacked"])]
        cells += [f"{one / all_:.2f}×", _ms(floor), f"{one / floor:.1f}", f"{all_ / floor:.1f}"]
        lines.append(f"| {network['title']} | {' | '.join(cells)} |")
    rate_words = f"A large matrix product reaches {rate / 1e9:.0f} GFLOP/s here"
    return "\n".join([*lines, "", f"{rate_words} {machine(record['environment'])}."])


def _step(row: dict[str, Any] | None) -> str:
    if row is None or "step_ms" not in row:
        return "–" if row is None else row.get("error", "–")
    return _ms(row["step_ms"]) + ("" if row["finite"] else " (not finite)")


def _ms(value: float) -> str:
    """With three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table1_time() -> str:
    record = result("table1_time")
    phases = record["phases"]
    rest = record["seconds"] - sum(phases.values())
    return (
        f"**{record['seconds']:.0f} s** for {record['rounds']} rounds: clients "
        f"{phases['clients']:.0f} s, clustering {phases['merge']:.0f} s, evaluations "
        f"{phases['evaluate']:.0f} s, and {rest:.0f} s for checkpoints, the final models, the "
        f"start and checks {machine(record['environment'])}."
    )


def bf16() -> str:
    record = result("bf16_accuracy")
    titles = {
        "digits-groups": "the embedded default, 40 rounds",
        "vgg11-bn-0.01": "CIFAR, VGG11 with BatchNorm, 12 rounds, η = 0.01",
        "vgg11-bn-0.05": "the same, η = 0.05",
    }
    lines = ["| | float32 | bf16 | bf16 − float32, seed by seed |", "|---|---|---|---|"]
    for name, title in titles.items():
        runs = {r["precision"]: r["test_accuracy"] for r in record["rows"] if r["name"] == name}
        gaps = [100 * (b - a) for a, b in zip(runs["float32"], runs["bf16"], strict=True)]
        lines.append(
            f"| {title} | {spread(runs['float32'])} | {spread(runs['bf16'])} | "
            f"{', '.join(f'{gap:+.1f}' for gap in gaps)} |"
        )
    where = machine(record["rows"][0]["environment"])
    return "\n".join(
        [*lines, "", f"PerFed-CKT, seeds {record['seeds']}; {record['data']} {where}."]
    )


def scale() -> str:
    record = result("scale")
    lines = [
        "| K | a round | memory at its peak | until the first round |",
        "|---|---|---|---|",
    ]
    for row in record["clients"]:
        lines.append(
            f"| {row['clients']:,} | {row['round_ms']:.0f} ms | {row['peak_memory_gib']:.2f} GiB | "
            f"{row['build_seconds']:.1f} s |"
        )
    ratio = f"{record['round_ratio']:.2f}"
    each = f"{record['model']['bytes_per_client']:.0f}"
    return "\n".join(
        [
            *lines,
            "",
            f"A round at K = 1,000,000 takes {ratio} times that at K = 1,000. A client that is not "
            f"at work costs {each} bytes {machine(record['environment'])}.",
        ]
    )


def scale_machines() -> str:
    record = result("scale")
    lines = ["| machines | seconds a round | by the model below |", "|---|---|---|"]
    for row in record["model"]["checked"]:
        seconds, modelled = row["round_seconds"], row["modelled_seconds"]
        lines.append(f"| {row['machines']} | {seconds:.2f} | {modelled:.2f} |")
    sums = {row["sum"] for row in record["machines"]}
    last = record["machines"][-1]
    alike = "the same to the bit" if len(sums) == 1 else "NOT the same"
    disturbed = "the same" if sums == {last["disturbed_sum"]} else "NOT the same"
    return "\n".join(
        [
            *lines,
            "",
            f"Run directories of four workers on one, two and four machines: {alike}. With one of "
            f"four machines lost in a round and one that joins two rounds later: {disturbed} "
            f"{machine(record['environment'])}.",
        ]
    )


def scale_model() -> str:
    record = result("scale")
    model, measured = record["model"], record["measured"]
    assumed, parts = model["assumed"], model["seconds"]
    each = model["bytes_per_client"]
    memory = each * assumed["clients"] / 2**30
    rows = {
        f"training, {model['busiest']:.0f} clients one after another on the machine that has most "
        "of them (ten on average)": parts["training"],
        f"asking {assumed['machines']:,} workers, "
        f"{1e3 * measured['call_seconds']:.2f} ms each": parts["calls"],
        "replies through the network of one machine": parts["network"],
        "packing, unpacking and merging there": parts["messages"],
    }
    lines = ["| | seconds a round |", "|---|---|"]
    lines += [f"| {what} | {seconds:.1f} |" for what, seconds in rows.items()]
    lines += [
        f"| **together, if nothing overlaps** | **{sum(rows.values()):.0f}** |",
        "",
        f"Memory where the run is started: {model['replies_gib']:.0f} GiB of replies, held until "
        f"they are merged. Every worker: {memory:.2f} GiB for {assumed['clients']:,} clients "
        f"({each:.0f} bytes each), and {model['build_seconds']:.0f} s until it can begin.",
    ]
    return "\n".join(lines)


def federation_pace() -> str:
    record = result("federation_pace")
    lines = ["| sites | from nothing | forked |", "|---|---|---|"]
    for one in record["settings"]:
        cells = [
            f"{one['median'][way]:.1f} s" if way in one["median"] else "not measured"
            for way in ("from nothing", "forked")
        ]
        lines.append(f"| {one['sites']} | {cells[0]} | {cells[1]} |")
    rounds = len(record["settings"][0]["seconds"]["forked"])
    same = all(one["same_models"] is not False for one in record["settings"])
    compared = [one["sites"] for one in record["settings"] if one["same_models"] is not None]
    machine = record["environment"]
    lines += [
        "",
        f"Median seconds a round, over {rounds} rounds each, on two cores that other programs "
        f"wanted, too: the load was {record['load'][1]:.0f}. Models compared bit by bit with "
        f"{', '.join(map(str, compared))} sites: {'the same' if same else 'NOT the same'} "
        f"(torch {machine['packages']['torch']}, Python {machine['python'].split()[0]}).",
    ]
    return "\n".join(lines)


def restarted_site() -> str:
    record = result("restarted_site")
    lines = [
        "| | kills | rounds missed, at most | the round in which it was killed took | "
        "its next round was done after |",
        "|---|---|---|---|---|",
    ]
    for keys, name in ((False, "without keys"), (True, "TLS and node keys")):
        kills = [one for one in record["kills"] if one["node_keys"] == keys]
        waited = statistics.median(k["seconds_of_the_round_in_which_it_was_killed"] for k in kills)
        back = statistics.median(k["seconds_until_its_first_round_was_done"] for k in kills)
        most = max(kill["missed"] for kill in kills)
        lines.append(f"| {name} | {len(kills)} | {most} | {waited:.0f} s | {back:.0f} s |")
    load = record["load"][1]
    lines += [
        "",
        f"Medians, on two cores that other programs wanted, too: the load was {load:.0f}.",
    ]
    return "\n".join(lines)


def federation() -> str:
    record = result("federation")
    lines = [
        "| | seconds a round | bytes a round, channel | through the sockets | more |",
        "|---|---|---|---|---|",
    ]
    for one in record["settings"]:
        setting, numbers = one["setting"], one["summary"]
        name = {"perfed-ckt": "PerFed-CKT", "fedavg": "FedAvg"}[setting["algorithm"]["name"]]
        if name == "PerFed-CKT":
            title = (
                f"{name}, c={setting['algorithm']['clusters']}, {setting['public']} public samples"
            )
        else:
            title = f"{name}, {'-'.join(map(str, setting['model']['hidden']))} hidden units"
        title += ", TLS and node keys" if setting.get("tls") else ""
        lines.append(
            f"| {title} | {numbers['seconds']:.1f} | {numbers['channel_bytes']:,.0f} | "
            f"{numbers['socket_bytes']:,.0f} | {100 * numbers['over_channel']:.1f} % |"
        )
    more = [
        (one["summary"]["socket_bytes"] - one["summary"]["channel_bytes"]) / 3000
        for one in record["settings"]
    ]
    idle = [sum(one["idle_bytes_per_second"].values()) / 3 for one in record["settings"]]
    return "\n".join(
        [
            *lines,
            "",
            f"More, in kB per site and round: {', '.join(f'{kb:.0f}' for kb in more)}. "
            f"A site that has nothing to do: {min(idle):.0f} to {max(idle):.0f} bytes a second "
            f"{machine(record['environment'])}.",
        ]
    )


def size_order(group: str) -> int:
    """All clients first, then by size: "1-9", "10-99", "1000+"."""
    return 0 if group == "all" else int(re.split("[-+]", group)[0])


BLOCKS = {
    "all-algorithms": lambda: comparison("all_algorithms"),
    "digits-dirichlet": lambda: comparison("digits-dirichlet"),
    "digits-dirichlet-gains": lambda: against_local("digits-dirichlet"),
    "digits-groups-gains": lambda: against_local("all_algorithms"),
    "batchnorm": batchnorm,
    "tuning": tuning,
    **FIRST_BLOCKS,
    **PAPER_BLOCKS,
    **GUIDE_BLOCKS,
    **SUCCESSOR_BLOCKS,
    **KIN_BLOCKS,
    **SCREENING_BLOCKS,
    **SECURITY_BLOCKS,
    **BYTES_BLOCKS,
    **PEERS_BLOCKS,
    **PRIVACY_BLOCKS,
    **STUDY_BLOCKS,
    **HOSTILE_BLOCKS,
    **USE_BLOCKS,
    **VERSIONS_BLOCKS,
    "bench-h200": lambda: engines("bench_h200"),
    "bench-cpu": lambda: engines("bench_cpu"),
    "profile": profile,
    "profile-networks": profile_networks,
    "networks-h200": lambda: networks("networks_h200"),
    "single-precision": single_precision,
    "networks-cpu": networks_cpu,
    "table1-time": table1_time,
    "bf16": bf16,
    "scale": scale,
    "scale-machines": scale_machines,
    "scale-model": scale_model,
    "federation": federation,
    "federation-pace": federation_pace,
    "restarted-site": restarted_site,
}
EVERY_FIGURE = {
    **PAPER_FIGURES,
    **BYTES_FIGURES,
    **HOSTILE_FIGURES,
    **PRIVACY_FIGURES,
    **KIN_FIGURES,
    **STUDY_FIGURES,
}


NUMBER = re.compile(r"\**[<+\-−]?\d[\d.,]*( ± [\d.,]+)?( ?(%|×|ms|s|[kMG]|[kMG]?B|[MG]iB))?\**|–")


def aligned(text: str) -> str:
    """Of its tables, the columns that hold mostly numbers to the right."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if not re.fullmatch(r"(\|-{3,}:?)+\|", line):
            continue
        rest = (row for row in lines[at + 1 :])
        body = [_cells(row) for row in takewhile(lambda row: row.startswith("|"), rest)]
        marks = line.strip("|").split("|")
        for column, cells in enumerate(zip(*body, strict=True)):
            if column and 2 * sum(bool(NUMBER.fullmatch(cell)) for cell in cells) > len(cells):
                marks[column] = "---:"
        lines[at] = f"|{'|'.join(marks)}|"
    return "\n".join(lines)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def rendered(text: str) -> str:
    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{aligned(BLOCKS[match[2]]())}\n{match[3]}"

    pattern = r"(<!-- begin: (\S+) -->).*?(<!-- end: \2 -->)"
    return re.sub(pattern, block, text, flags=re.S)


def main() -> None:
    wrong = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text("utf-8")
        new = rendered(text)
        if new != text:
            wrong.append(name)
            if "--check" not in sys.argv:
                path.write_text(new, "utf-8")
    for name, plot in EVERY_FIGURE.items():
        path, figure = ROOT / "docs" / f"{name}.png", plot()
        if stamp_in(path) != stamp_of(figure):
            wrong.append(f"docs/{path.name}")
            if "--check" not in sys.argv:
                draw(path, figure)
    if wrong and "--check" in sys.argv:
        sys.exit(f"not what the results say: {', '.join(wrong)}; run python benchmarks/render.py")


if __name__ == "__main__":
    main()
