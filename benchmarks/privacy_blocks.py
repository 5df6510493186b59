"""What docs/privacy.md shows of the results of privacy.py and privacy_attacks.py."""

from __future__ import annotations

import statistics

from committed import machine, result
from drawn import COLOUR_OF
from matplotlib.figure import Figure
from privacy import BUDGETS, METHODS, accuracies

from perfed.core import layout
from perfed.core.layout import Table
from perfed.runs.study import machines
from perfed.runs.tables import spread

WITHOUT = BUDGETS[-1] * 2.2  # where runs without privacy stand


def epsilon_figure() -> Figure:
    """Accuracy against ε; a band for one standard deviation over the seeds."""
    record = result("privacy")
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    alone = statistics.mean(accuracies(record, "local", None))
    axes.axhline(alone, color="0.4", lw=1.2, ls="--", label="local: sends nothing, ε = 0")
    for method in METHODS:
        values = [accuracies(record, method, budget) for budget in BUDGETS]
        means, widths = [*map(statistics.mean, values)], [*map(statistics.stdev, values)]
        colour = COLOUR_OF[method]
        axes.plot(BUDGETS, means, marker="o", color=colour, label=method)
        both = [*zip(means, widths, strict=True)]
        low, high = [m - s for m, s in both], [m + s for m, s in both]
        axes.fill_between(BUDGETS, low, high, color=colour, alpha=0.15, lw=0)
        open_end = statistics.mean(accuracies(record, method, None))
        axes.plot([WITHOUT], [open_end], marker="s", color=colour, ls="none")
    axes.set_xscale("log", base=2)
    axes.set_xticks([*BUDGETS, WITHOUT], [f"{budget:g}" for budget in BUDGETS] + ["none"])
    axes.set_xlabel("ε, the most that a client spends (δ = 1e-5); none: without privacy")
    axes.set_ylabel("test accuracy, %")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def epsilon_table() -> str:
    record = result("privacy")

    def shown(method: str, budget: float | None) -> str:
        return spread([value / 100 for value in accuracies(record, method, budget)])

    header = ("method", *[f"ε ≤ {budget:g}" for budget in BUDGETS], "without")
    rows = [[method, *[shown(method, b) for b in (*BUDGETS, None)]] for method in METHODS]
    rows.append(["local", *["" for _ in BUDGETS], shown("local", None)])
    seeds = sorted({run["seed"] for run in record["runs"].values()})
    note = f"Test accuracy in %, mean and standard deviation over seeds {seeds} "
    return (
        layout.markdown([Table("", header, rows)]) + f"\n\n{note}{machine(record['environment'])}."
    )


def link_table() -> str:
    record = result("privacy_link")
    budget = next(r["privacy"]["epsilon"] for r in record["runs"].values() if r["privacy"])
    rows = []
    for method in METHODS:
        plain, noised = (accuracies(record, method, b) for b in (None, budget))
        costs = [after - before for before, after in zip(plain, noised, strict=True)]
        cells = [spread([value / 100 for value in values]) for values in (plain, noised)]
        rows.append([method, *cells, f"{statistics.mean(costs):+.1f}"])
    rows.append(["local", spread([v / 100 for v in accuracies(record, "local", None)]), "", ""])
    table = Table("", ("method", "without", f"--link private, ε ≤ {budget:g}", "points"), rows)
    return layout.markdown([table]) + f"\n\n{machine(record['environment'])}"


def attacks_table() -> str:
    record = result("privacy_attacks")
    header = (
        "method",
        "link",
        "accuracy",
        "membership, AUC",
        "members found at 0.1 % false alarms",
        "label mix, off by",
        "number of samples, off by",
        "pictures, correlation",
    )
    rows = []
    for row in record["rows"]:
        likeness = row["likeness"]
        rows.append(
            [
                row["method"],
                row["link"],
                f"{100 * row['accuracy']:.1f} %",
                f"{row['auc']:.3f}",
                f"{100 * row['found']:.2f} %",
                f"{100 * row['label_mix']:.0f} %",
                f"{100 * row['count_error']:.0f} %",
                "–" if likeness is None else f"{likeness:.2f}",
            ]
        )
    guessed = record["rows"][0]["label_mix_guessed"]
    shadows = " or ".join(map(str, sorted({row["shadows"] for row in record["rows"]})))
    run_on = machines({str(number): row for number, row in enumerate(record["rows"])})
    note = (
        f"{shadows} federations of {record['clients']} clients for each line. By chance: "
        f"AUC 0.500, 0.10 % found, and a label mix off by {100 * guessed:.0f} % for who guesses "
        f"that of all clients. With privacy fedproto is refused "
        f"{' and '.join(map(machine, run_on))}."
    )
    return layout.markdown([Table("", header, rows)]) + f"\n\n{note}"


FIGURES = {"privacy-epsilon": epsilon_figure}
BLOCKS = {
    "privacy-epsilon": epsilon_table,
    "privacy-link": link_table,
    "privacy-attacks": attacks_table,
}
