"""The charts of a report, each with a caption that says what to see in it, in the runs' numbers.

A chart is a matplotlib figure: the page shows it as SVG, and the same figure is saved as PNG or
PDF. A function here returns None where the runs have not recorded what it would show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perfed.report import theme
from perfed.report.clusters import Membership, letter, membership
from perfed.report.gather import Run, Series, alone, clients_word, first_of_each, same_data
from perfed.runs.tables import HARM, quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIPS_ON_A_CURVE = 60
NAMED = 4  # methods in a caption; of more, the chart itself must tell
LEAST_SHARE = 0.01  # of probability, of a class that an answer is said to name
PHASES = ("broadcast", "clients", "merge", "evaluate")
GAIN, LOSS, EVEN = theme.COLOURS[4], theme.COLOURS[6], theme.COLOURS[0]
NO_METHOD = theme.GROUPS[4]  # the colour of what belongs to no method, or to all of them


@dataclasses.dataclass
class Chart:
    name: str
    title: str
    figure: Figure
    caption: str = ""
    tips: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """What each mark of a group says when it is pointed at; groups are named in the SVG."""

    def tip(self, texts: Sequence[str]) -> str:
        """The name of a new group of marks with these texts."""
        name = f"{self.name}-marks-{len(self.tips)}"
        self.tips[name] = list(texts)
        return name


def charts(runs: Sequence[Run], curves: Sequence[Series]) -> list[Chart]:
    """All that can be drawn of these runs."""
    return [chart for chart in _candidates(runs, curves) if chart is not None]


def _candidates(runs: Sequence[Run], curves: Sequence[Series]) -> Iterator[Chart | None]:
    if curves:
        yield accuracy_by_round(curves)
        yield accuracy_by_communication(curves)
        yield clients_by_round(curves)
        yield distribution(curves)
        yield gains(curves)
    clustering = [r for r in first_of_each(runs) if (found := membership(r)) and found.count > 1]
    for number, run in enumerate(clustering, start=1):
        yield cluster_membership(run, number)
        yield centroid_similarity(run, number)
    yield labels_per_client(runs)
    yield classes_heard(runs)
    yield time_by_phase(runs)


# Accuracy.


def accuracy_by_round(curves: Sequence[Series]) -> Chart | None:
    columns = _legend_columns(curves)
    figure, axes = theme.canvas(3.1, legend=_legend_rows(curves, columns))
    chart = Chart("accuracy", "Accuracy by round", figure)
    for curve in curves:
        rounds = np.array(curve.rounds)
        means = [100 * curve.means(round) for round in rounds]
        middle = np.array([mean.mean() for mean in means])
        over_seeds = np.array([mean.std(ddof=1) if len(mean) > 1 else 0 for mean in means])
        if len(curves) == 1:
            _client_bands(axes, curve)
        _band(
            axes, rounds + 1, middle - over_seeds, middle + over_seeds, theme.colour(curve.number)
        )
        _curve(axes, rounds + 1, middle, curve)
        _tips_on_curve(
            chart,
            axes,
            rounds + 1,
            middle,
            [
                f"{curve.label}\nround {round + 1}: {_spread(mean)}"
                for round, mean in zip(rounds, means, strict=True)
            ],
        )
    axes.set(xlabel="communication round", ylabel="mean test accuracy (%)")
    whole_rounds(axes)
    theme.legend(figure, axes, columns)
    ranked = sorted(curves, key=Series.last, reverse=True) if same_data(curves) else curves
    highest = "highest, " if len(curves) > 1 and same_data(curves) else ""
    how = f"{'ends' if _over(curves) else 'is'} {highest}at"
    said = [f"{ranked[0].label} {how} {_end(ranked[0])}"]
    shown = len(ranked) if len(ranked) <= 6 else 5
    said += [f"{curve.label} at {_end(curve)}" for curve in ranked[1:shown]]
    whose = clients_word(run for curve in curves for run in curve.runs)
    chart.caption = f"Test accuracy, mean over all {whose}, after each round. {listed(said)}."
    if highest and len(ranked) > shown:
        chart.caption += f" The other {len(ranked) - shown} are lower."
    if not same_data(curves):
        chart.caption += " Not all are on the same data, so none is called the highest."
    for curve in curves:
        best = max(curve.rounds, key=curve.mean)
        if curve.mean(best) - curve.last() > 0.01:
            chart.caption += (
                f" {curve.label} was higher before: {_percent(curve.mean(best))} after round"
                f" {best + 1}."
            )
    if len(curves) == 1:
        chart.caption += " " + _band_words(curves[0])
    seeds = max(len(curve.runs) for curve in curves)
    if seeds > 1:
        chart.caption += f" Bands: ± one standard deviation over {seeds} seeds."
    return chart


def accuracy_by_communication(curves: Sequence[Series]) -> Chart | None:
    talking = [curve for curve in curves if curve.cost(curve.rounds[-1]) > 0]
    if not talking:
        return None
    columns = _legend_columns(curves)
    figure, axes = theme.canvas(3.1, legend=_legend_rows(curves, columns))
    chart = Chart("communication", "Accuracy against communication", figure)
    for curve in curves:
        rounds = _paid(curve)
        middle = np.array([100 * curve.mean(round) for round in rounds])
        if curve not in talking:
            axes.axhline(
                100 * curve.mean(curve.rounds[-1]),
                color=theme.colour(curve.number),
                ls=(0, (1, 2)),
                lw=1.4,
                label=curve.label,
            )
            continue
        cost = np.array([curve.cost(round) for round in rounds])
        _curve(axes, cost, middle, curve)
        end = {"ms": 2.5 if curve.second else 5, "zorder": 3, "clip_on": False}
        axes.plot(cost[-1], middle[-1], "o", color=theme.colour(curve.number), **end)
        _tips_on_curve(
            chart,
            axes,
            cost,
            middle,
            [
                f"{curve.label}\nround {round + 1}: {value:.1f} %\n{quantity(sent)} parameters, "
                f"{quantity(curve.cost(round, 'bytes'), 'B')}"
                for round, value, sent in zip(rounds, middle, cost, strict=True)
            ],
        )
    axes.set(xlabel="parameters sent, both ways (log scale)", ylabel="mean test accuracy (%)")
    plain_log(axes)
    theme.legend(figure, axes, columns)
    chart.caption = "Further left is cheaper, further up is better."
    if same_data(curves):
        chart.caption += f" {_price(talking)}"
    silent = [curve.label for curve in curves if curve not in talking]
    if silent:
        chart.caption += f" Dotted: {listed(silent)}, without any communication."
    return chart


def _paid(curve: Series) -> list[int]:
    """The rounds until which something was sent: a scale of logarithms has no zero. Nothing was
    where all who were selected first have dropped out."""
    return [round for round in curve.rounds if curve.cost(round) > 0]


def _price(talking: Sequence[Series]) -> str:
    """What methods on the same data pay for the accuracy that all of them reach."""
    goal = min(max(map(curve.mean, _paid(curve))) for curve in talking)
    paid = {
        curve.label: curve.cost(next(r for r in _paid(curve) if curve.mean(r) >= goal))
        for curve in talking
    }
    cheapest = sorted(paid, key=lambda label: paid[label])
    whom = "Every method that communicates reaches" if len(paid) > 1 else "The highest mean is"
    words = _highest_and_lowest(
        [(-cost, f"{label} after {quantity(cost)} parameters") for label, cost in paid.items()]
    )
    said = f"{whom} {_percent(goal)}: {words}."
    if len(paid) > 1 and paid[cheapest[-1]] > 1.5 * paid[cheapest[0]]:
        ratio = paid[cheapest[-1]] / paid[cheapest[0]]
        said += f" {cheapest[-1]} needs {ratio:.1f} times as many as {cheapest[0]}."
    return said


def clients_by_round(curves: Sequence[Series]) -> Chart | None:
    if len(curves) == 1:  # the first chart shows them
        return None
    rows = -(-len(curves) // 2)
    figure, panels = _panels(rows, 1.45, "communication round", "test accuracy (%)")
    chart = Chart("clients", "The clients behind the mean", figure)
    _hide_spare(panels, len(curves))
    for curve, axes in zip(curves, panels, strict=False):
        rounds = np.array(curve.rounds)
        _client_bands(axes, curve)
        middle = np.array([100 * curve.mean(round) for round in rounds])
        _curve(axes, rounds + 1, middle, curve)
        axes.set_title(_short(curve.label))
        whole_rounds(axes)
        texts = []
        for round in rounds:
            low, first, third, high = _quantiles(curve, round)
            texts.append(
                f"{curve.label}\nround {round + 1}: half of the clients {first:.0f}–{third:.0f} %, "
                f"four fifths {low:.0f}–{high:.0f} %"
            )
        _tips_on_curve(chart, axes, rounds + 1, middle, texts)
    ends = {curve.label: _quantiles(curve, curve.rounds[-1]) for curve in curves}
    widest = max(ends, key=lambda label: ends[label][2] - ends[label][1])
    closest = min(ends, key=lambda label: ends[label][2] - ends[label][1])
    chart.caption = (
        "Line: the mean. The darker band holds the middle half of the clients, the lighter one "
        "four fifths of them."
    )
    if same_data(curves) and _range(ends[closest][1:3]) != _range(ends[widest][1:3]):
        chart.caption += (
            f" {_when(curves).capitalize()} clients differ least with {closest} (middle half: "
            f"{_range(ends[closest][1:3])}) and most with {widest} ({_range(ends[widest][1:3])})."
        )
    return chart


def distribution(curves: Sequence[Series]) -> Chart | None:
    figure, axes = theme.canvas(0.6 + 0.66 * len(curves), left=0.12)
    title = f"Where the clients {'end' if _over(curves) else 'are so far'}"
    chart = Chart("distribution", title, figure)
    words = []
    for place, curve in enumerate(reversed(curves)):
        values, texts = [], []
        for run in curve.runs:
            round = max(run.client_numbers)
            for client, accuracy in enumerate(run.accuracies(curve.kind, round)):
                if not np.isnan(accuracy):
                    values.append(100 * accuracy)
                    texts.append(
                        f"{run.title}, {run.client_name(client)}: {100 * accuracy:.1f} %\n"
                        f"{run.train_sizes[client]} training samples"
                    )
        axes.scatter(
            values,
            place + _apart(values),
            s=9,
            color=theme.colour(curve.number),
            alpha=0.45,
            lw=0,
            gid=chart.tip(texts),
            clip_on=False,
        )
        first, middle, third = np.percentile(values, [25, 50, 75])
        below = place - 0.35  # the bar hides no dot, and no name of the next row
        look = {"color": theme.INK, "lw": 1.6, "solid_capstyle": "butt", "clip_on": False}
        axes.plot([first, third], [below, below], **look)
        axes.plot([middle, middle], [below - 0.07, below + 0.07], **look)
        _name_row(axes, place + 0.42, curve.label)
        tenth = float(np.mean(np.sort(values)[: max(1, len(values) // 10)]))
        text = f"{curve.label}: median {middle:.0f} %, worst tenth {tenth:.0f} %"
        words.append((float(middle), text))
    axes.set(
        xlabel="test accuracy of a client (%)", ylim=(-0.5, len(curves) - 0.35), xlim=(-2, 102)
    )
    _without_y(axes)
    chart.caption = (
        "A dot is a client after its last evaluation. The bar below spans the middle half, and its "
        f"mark is the median. {_highest_and_lowest(words, ranked=same_data(curves))}."
    )
    return chart


def gains(curves: Sequence[Series]) -> Chart | None:
    """Against the client's own local model, of the same seed and after the same round."""
    found = [
        (curve, pairs)
        for curve in curves
        if curve.algorithm.learns_from_others
        and (local := alone(curve, curves))
        and (pairs := _pairs(curve, local))
    ]
    if not found:
        return None
    rows = -(-len(found) // 2)
    figure, panels = _panels(
        rows, 1.5, "training samples of the client (log scale)", "points above local"
    )
    chart = Chart("gains", "Who gains and who loses against training alone", figure)
    words = []
    _hide_spare(panels, len(found))
    everybody = [pair for _, pairs in found for pair in pairs]  # all panels have the same axes
    fewest, most = (kind(size for size, _, _ in everybody) for kind in (min, max))
    lowest, highest = (kind(gain for _, gain, _ in everybody) for kind in (min, max))
    room = 0.06 * max(highest - lowest, 2)
    for (curve, pairs), axes in zip(found, panels, strict=False):
        sizes = np.array([size for size, _, _ in pairs])
        gained = np.array([gain for _, gain, _ in pairs])
        colours = [GAIN if gain > HARM else LOSS if gain < -HARM else EVEN for gain in gained]
        axes.axhline(0, color=theme.MUTED, lw=1)
        axes.set_xlim(max(fewest, 1) / 1.25, max(most, 1) * 1.25)
        axes.set_ylim(min(lowest - room, -1), max(highest + room, 1))
        axes.scatter(
            sizes * np.exp(_beside(sizes, gained)),
            gained,
            s=11,
            c=colours,
            alpha=0.6,
            lw=0,
            gid=chart.tip([text for _, _, text in pairs]),
            clip_on=False,
        )
        for low, high, mean in _by_size(sizes, gained):
            axes.plot([low, high], [mean, mean], color=theme.INK, lw=2, solid_capstyle="butt")
        plain_log(axes)
        axes.set_title(_short(curve.label))
        text = (
            f"{curve.label}: {(gained > HARM).sum()} of {len(gained)} clients gain, "
            f"{(gained < -HARM).sum()} lose, {_points(gained.mean())} points on average"
        )
        words.append((float(gained.mean()), text))
    chart.caption = (
        f"Each dot is a client. It gains (blue) if it is more than {HARM:g} points above its own "
        f"local model, and loses (vermilion) if it is more than {HARM:g} points below. "
        "Each bar is the mean of a third of the clients, sorted by their number of samples. "
        f"{_highest_and_lowest(words, '. ', same_data(curves))}."
    )
    return chart


# Clusters.


def cluster_membership(run: Run, number: int) -> Chart | None:
    found = membership(run)
    if found is None:
        return None
    rows = len(found.order)
    figure, axes = theme.canvas(min(4.2, max(2.0, 0.9 + 0.085 * rows)), left=0.6, legend=1)
    chart = Chart(f"clusters-{number}", f"Clusters: {run.title}", figure)
    axes.imshow(
        _picture(found),
        aspect="auto",
        interpolation="none",
        extent=(0.5, found.rounds + 0.5, rows - 0.5, -0.5),
        gid=chart.tip([_grid_tip(run, found)]),
    )
    axes.grid(visible=False)
    axes.set(xlabel="communication round", ylabel="client")
    if rows <= 40:
        numbers = [str(run.numbers[place]) for place in found.order]
        axes.set_yticks(range(rows), numbers, fontsize=5.5)
        axes.tick_params(axis="y", length=0)
    else:
        axes.set_yticks([])
    whole_rounds(axes)
    for cluster in range(found.count):
        axes.plot([], [], "s", color=theme.group_colour(cluster), label=letter(cluster))
    theme.legend(figure, axes, min(found.count, 6))
    again, same = found.returns()
    did = (
        "it answered and the coordinator put its answer into that cluster (which one it chose "
        "itself, only the site knows); pale: until it answers again"
        if found.by_server
        else "it was selected and chose that cluster; pale: until it is selected again"
    )
    chart.caption = (
        f"Each row is a client. Strong colour: the round in which {did}. "
        f"Last seen in {listed(_populations(found))}."
    )
    if again:
        chart.caption += (
            " In the second half of the run, a client that was selected again "
            f"{'was in' if found.by_server else 'chose'} the same cluster as before "
            f"in {same} of {again} cases ({100 * same / again:.0f} %)."
        )
    if found.traced:
        chart.caption += (
            " The server forms new clusters in every round. A centroid keeps the letter of the "
            "earlier one that it is most like."
        )
    elif found.networks > 1:
        chart.caption += (
            f" Rows are sorted by network, of which there are {found.networks}: a method that "
            "averages weights has clusters of its own for each."
        )
    return chart


def centroid_similarity(run: Run, number: int) -> Chart | None:
    found = membership(run)
    if found is None or not found.overlaps:
        return None
    last = found.overlaps[max(found.overlaps)]
    if len(last) < 2:
        return None
    figure, (now, over) = theme.canvas(
        2.6, 1, 2, left=0.35, top=0.35, width_ratios=(1, 1.35), gridspec_kw={"wspace": 0.45}
    )
    chart = Chart(f"centroids-{number}", f"How alike the centroids are: {run.title}", figure)
    ids = found.ids[max(found.overlaps) + 1]
    order = sorted(range(len(ids)), key=lambda place: ids[place])
    names = [letter(ids[place]) for place in order]
    table = np.array(last)[np.ix_(order, order)]
    _overlap_table(chart, now, table, names)
    rounds = sorted(found.overlaps)
    pairs = [_off_diagonal(found.overlaps[round]) for round in rounds]
    x = np.array(rounds) + 1
    _band(over, x, [p.min() for p in pairs], [p.max() for p in pairs], NO_METHOD)
    middle = np.array([pair.mean() for pair in pairs])
    over.plot(x, middle, color=NO_METHOD)
    over.set(xlabel="communication round", ylim=(0, 1))
    over.set_title("overlap of pairs")
    whole_rounds(over)
    _tips_on_curve(
        chart,
        over,
        x,
        middle,
        [
            f"after round {round + 1}: {pair.mean():.2f}, from {pair.min():.2f} to {pair.max():.2f}"
            for round, pair in zip(rounds, pairs, strict=True)
        ],
    )
    (a, b), (c, d) = _extremes(table)
    chart.caption = (
        "Overlap: the share of probability that two centroids give to the same classes, as a mean "
        "over the public set. 1: they teach the same. 0: they agree on nothing."
    )
    began = f"began at {middle[0]:.2f} and is now {middle[-1]:.2f}"
    if len(names) == 2:  # one pair, which is both the least and the most alike
        chart.caption += f" That of {names[a]} and {names[b]} {began}."
        return chart
    chart.caption += (
        f" After round {max(found.overlaps) + 1} the least alike are {names[a]} and {names[b]} "
        f"({table[a, b]:.2f}), the most alike {names[c]} and {names[d]} ({table[c, d]:.2f}). "
        f"Right: mean, smallest and largest overlap of all pairs. The mean {began}."
    )
    return chart


# Data and time.


def labels_per_client(runs: Sequence[Run]) -> Chart | None:
    run = next((run for run in sorted(runs, key=lambda run: run.seed) if run.knows_labels), None)
    if run is None:
        return None
    counts = np.array([client["labels"]["train"] for client in run.clients if client])
    several = len({repr(other.clients_setting) for other in runs}) > 1
    whose = run.title if several else f"seed {run.seed}"
    chart = _bubbles(
        "labels",
        f"Training labels of each client: {whose}",
        run,
        dict(enumerate(counts)),
        lambda client, label, amount: (
            f"{run.client_name(client)}: {amount} of label {label}\n"
            f"{counts[client].sum()} training samples in all"
        ),
    )
    classes, held, sizes = counts.shape[1], (counts > 0).sum(1), counts.sum(1)
    chart.caption = (
        f"The area of a bubble is how many training samples of a label a client has, at most "
        f"{counts.max()}. Clients are sorted by their most frequent label. A client has "
        f"{sizes.min()} to {sizes.max()} training samples (median {np.median(sizes):g}) and "
        f"{held.min()} to {held.max()} of the {classes} labels (median {np.median(held):g})."
    )
    if len({other.seed for other in runs}) > 1:
        chart.caption += " Another seed divides the data in another way."
    return chart


def classes_heard(runs: Sequence[Run]) -> Chart | None:
    """Of the sites of a federation, whose labels nobody else knows."""
    run = next((run for run in runs if run.classes_heard), None)
    if run is None:
        return None
    shares = {client: np.array(own) for client, own in run.classes_heard.items()}
    chart = _bubbles(
        "heard",
        f"Classes that each site's answers name: {run.title}",
        run,
        {client: np.where(own < LEAST_SHARE, 0, own) for client, own in shares.items()},
        lambda client, label, share: f"{run.client_name(client)}: {_percent(share)} class {label}",
    )
    chart.figure.axes[0].set_ylabel("class")
    named = sorted({int((own >= LEAST_SHARE).sum()) for own in shares.values()})
    from_to = f"{named[0]}" if len(named) == 1 else f"{named[0]} to {named[-1]}"
    chart.caption = (
        "What the coordinator knows of the sites' labels. The area of a bubble is the share of "
        "probability that a site's newest answer gives to a class, as a mean over the public set. "
        f"Shares below {100 * LEAST_SHARE:g} % are left out. Clients are sorted by the class that "
        f"they name most. An answer names {from_to} of the "
        f"{len(next(iter(shares.values())))} classes. The site's real labels stay at the site."
    )
    return chart


def _bubbles(
    name: str,
    title: str,
    run: Run,
    rows: Mapping[int, np.ndarray],
    words: Callable[[int, str, Any], str],
) -> Chart:
    """How much of each class a client has, by the client's place in ``run.clients``."""
    who, amounts = list(rows), np.array(list(rows.values()))
    clients, classes = amounts.shape
    names = [_short(name, 16) for name in run.class_names] or list(map(str, range(classes)))
    left = 0.4 + 0.07 * max(map(len, names))
    figure, axes = theme.canvas(0.75 + min(2.6, 0.22 * classes + 0.2), left=left)
    chart = Chart(name, title, figure)
    totals = amounts.sum(1)
    centre = amounts @ np.arange(classes) / np.where(totals > 0, totals, 1)
    order = sorted(range(clients), key=lambda row: (amounts[row].argmax(), centre[row]))
    places, labels = np.nonzero(amounts[order])
    shown = amounts[order][places, labels]
    across = 72 * (theme.WIDTH - 0.6) / clients  # points that a client has in width
    largest = min(max(across * 1.8, 6.0), 13.0) ** 2
    texts = [
        words(who[order[place]], names[label], amount)
        for place, label, amount in zip(places, labels, shown, strict=True)
    ]
    axes.scatter(
        places,
        labels,
        s=np.maximum(largest * shown / shown.max(), 1.5),
        color=NO_METHOD,
        alpha=0.65,
        lw=0,
        clip_on=False,
        gid=chart.tip(texts),
    )
    if clients <= 40:
        numbers = [str(run.numbers[who[row]]) for row in order]
        upright = clients <= 20
        look = {"fontsize": 8 if upright else 6, "rotation": 0 if upright else 90}
        axes.set_xticks(range(clients), numbers, **look)
    else:
        axes.set_xticks([])
    if classes <= 20:
        axes.set_yticks(range(classes), names)
    axes.set(
        xlabel="client", ylabel="label", xlim=(-0.8, clients - 0.2), ylim=(-0.7, classes - 0.3)
    )
    return chart


def time_by_phase(runs: Sequence[Run]) -> Chart | None:
    seconds: dict[str, dict[str, float]] = {}
    for label in dict.fromkeys(run.label for run in runs):
        lines = [
            line
            for run in runs
            if run.label == label
            for line in run.directory.lines("timing.jsonl")
        ]
        if lines:
            seconds[label] = {
                phase: float(np.mean([line.get(phase, 0.0) for line in lines])) for phase in PHASES
            }
    if not seconds:
        return None
    figure, axes = theme.canvas(0.6 + 0.46 * len(seconds), left=0.12, legend=1)
    chart = Chart("time", "Time of a round by phase", figure)
    for number, phase in enumerate(PHASES):
        for place, (label, times) in enumerate(reversed(seconds.items())):
            before = sum(times[earlier] for earlier in PHASES[:number])
            axes.barh(
                place,
                times[phase],
                0.45,
                left=before,
                color=theme.group_colour(number),
                label=phase if place == 0 else None,
                gid=chart.tip([f"{label}\n{phase}: {_seconds(times[phase])} a round"]),
            )
    for place, label in enumerate(reversed(seconds)):
        _name_row(axes, place + 0.38, label)
    axes.set(xlabel="seconds a round, mean over rounds", ylim=(-0.4, len(seconds) - 0.35))
    _without_y(axes)
    theme.legend(figure, axes, 4)
    words = [
        (
            sum(times.values()),
            f"{label}: {_seconds(sum(times.values()))} a round, "
            f"{100 * times['clients'] / max(sum(times.values()), 1e-9):.0f} % of it clients",
        )
        for label, times in seconds.items()
    ]
    chart.caption = (
        "Broadcast and merge are the server's work, clients is local training, evaluate tests "
        f"every client's models. {_highest_and_lowest(words)}. The machine may have had other "
        "work at the time."
    )
    return chart


# What several charts need.


def _panels(rows: int, height: float, x: str, y: str) -> tuple[Figure, list[Axes]]:
    """Two columns of small charts with common axes."""
    top, bottom, gap = 0.3, 0.5, 0.35
    total = top + bottom + rows * height + (rows - 1) * gap
    figure, grid = theme.canvas(
        total,
        rows,
        2,
        left=0.65,
        top=top,
        sharex=True,
        sharey=True,
        squeeze=False,
        gridspec_kw={"hspace": gap / height, "wspace": 0.1},
    )
    figure.supxlabel(x, fontsize=9.5, y=0.04 / total, va="bottom")
    figure.supylabel(y, fontsize=9.5, x=0.005, ha="left")
    return figure, list(grid.flat)


def _hide_spare(panels: Sequence[Axes], used: int) -> None:
    """The panel above an empty place shows the axis that the place would have shown."""
    for spare in panels[used:]:
        spare.set_visible(False)
        if used > 1:
            panels[used - 2].tick_params(labelbottom=True)


def _curve(axes: Axes, x: Any, y: Any, curve: Series) -> None:
    marker = "o" if len(x) == 1 else None  # a line of one point is not seen
    look = {
        "color": theme.colour(curve.number),
        "ls": theme.style(curve.number, curve.second),
        "zorder": 2.5 if curve.second else 2,  # above: what is beneath shows in its gaps
        "ms": 2.5 if curve.second else 4,
    }
    axes.plot(x, y, **look, marker=marker, label=curve.label)


def _band(axes: Axes, x: Any, low: Any, high: Any, colour: str, alpha: float = 0.18) -> None:
    axes.fill_between(x, low, high, color=colour, alpha=alpha, lw=0)


def _client_bands(axes: Axes, curve: Series) -> None:
    colour = theme.colour(curve.number)
    rounds = np.array(curve.rounds)
    low, first, third, high = np.array([_quantiles(curve, round) for round in rounds]).T
    _band(axes, rounds + 1, low, high, colour, 0.12)
    _band(axes, rounds + 1, first, third, colour, 0.22)


def _quantiles(curve: Series, round: int) -> list[float]:
    """Of the clients' accuracies, in %: the tenth, the quarters, the nine tenths."""
    return [100 * float(q) for q in np.percentile(curve.pooled(round), [10, 25, 75, 90])]


def _tips_on_curve(chart: Chart, axes: Axes, x: Any, y: Any, texts: Sequence[str]) -> None:
    """Marks that are not seen until they are pointed at; on a long curve, some of its points."""
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), TIPS_ON_A_CURVE)).round().astype(int))
    axes.scatter(
        np.asarray(x)[kept],
        np.asarray(y)[kept],
        s=60,
        color=theme.MUTED,
        alpha=0.0,
        lw=0,
        gid=chart.tip([texts[place] for place in kept]),
    )


def whole_rounds(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _legend_columns(curves: Sequence[Series]) -> int:
    return 2 if max(len(curve.label) for curve in curves) <= 24 else 1


def _legend_rows(curves: Sequence[Series], columns: int) -> int:
    return -(-len(curves) // columns)


def _apart(values: Sequence[float]) -> np.ndarray:
    """How far each dot of a row is moved up or down, so that dots of one accuracy (as far as a dot
    is wide) are above each other and not on each other."""
    return _fan([(round(value),) for value in values], 0.075, 0.26)


def _beside(sizes: np.ndarray, gained: np.ndarray) -> np.ndarray:
    """The same to the left and right, on a log axis, of dots with one size and gain."""
    places = [(int(size), round(gain / 2)) for size, gain in zip(sizes, gained, strict=True)]
    return _fan(places, 0.05, 0.2)


def _fan(places: Sequence[tuple[int, ...]], step: float, most: float) -> np.ndarray:
    """Offsets for dots in one place: evenly around it, ``step`` apart, at most ``most`` away."""
    together: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(places):
        together.setdefault(place, []).append(number)
    offsets = np.zeros(len(places))
    for numbers in together.values():
        reach = min(most, step * (len(numbers) - 1) / 2)
        offsets[numbers] = np.linspace(-reach, reach, len(numbers))
    return offsets


def _pairs(curve: Series, local: Series) -> list[tuple[int, float, str]]:
    """Of every client that trains: samples, points gained, and who it is."""
    by_seed = {run.seed: run for run in local.runs}
    pairs = []
    for run in curve.runs:
        other = by_seed.get(run.seed)
        common = set(run.client_numbers) & set(other.client_numbers) if other else set()
        if other is None or not common or len(run.clients) != len(other.clients):
            continue
        round = max(common)
        # With the digits of the tables, so that both count the same clients.
        with_others = run.accuracies(curve.kind, round).round(5)
        without = other.accuracies(local.kind, round).round(5)
        for client, gain in enumerate(100 * (with_others - without)):
            if not np.isnan(gain):
                size = int(run.train_sizes[client])
                text = (
                    f"{run.title}, {run.client_name(client)}: {_points(gain)} points\n"
                    f"{100 * without[client]:.1f} % alone, {100 * with_others[client]:.1f} % here; "
                    f"{size} training samples"
                )
                pairs.append((size, float(gain), text))
    return pairs


def _by_size(sizes: np.ndarray, gained: np.ndarray) -> list[tuple[int, int, float]]:
    """Of each third of the clients, from few samples to many: from, to, and the mean gain."""
    thirds = np.array_split(np.argsort(sizes, kind="stable"), 3)
    return [
        (int(sizes[third].min()), int(sizes[third].max()), float(gained[third].mean()))
        for third in thirds
        if len(third)
    ]


def _name_row(axes: Axes, height: float, label: str) -> None:
    """A name above its row, where it has all the width."""
    axes.text(
        0, height, label, transform=axes.get_yaxis_transform(), va="center", fontsize=9, zorder=5
    )


def _without_y(axes: Axes) -> None:
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def plain_log(axes: Axes, unit: str = "") -> None:
    """A log axis of plain numbers: 20, 50, 100 k, 1 M; where it is short, more of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(xscale="log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value, unit)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(which="minor", axis="x", alpha=0.35)


def _picture(found: Membership) -> np.ndarray:
    """A pixel for every client and round."""
    from matplotlib.colors import to_rgb

    pixels = np.zeros((len(found.order), found.rounds, 4))
    for row, client in enumerate(found.order):
        now = None
        for round in range(found.rounds):
            chosen = found.chosen[client].get(round)
            now = now if chosen is None else chosen
            if now is not None:
                pixels[row, round, :3] = to_rgb(theme.group_colour(now))
                pixels[row, round, 3] = 1.0 if chosen is not None else 0.3
    return pixels


def _grid_tip(run: Run, found: Membership) -> str:
    """Rows and columns for the page to look up what is under the pointer."""
    import json

    rows = []
    for client in found.order:
        about = run.clients[client]
        network = about["architecture"] if about else ""
        choices = "".join(
            letter(found.chosen[client][round]) if round in found.chosen[client] else "."
            for round in range(found.rounds)
        )
        rows.append([f"{run.client_name(client)}, {network}", choices])
    return "grid:" + json.dumps(rows, separators=(",", ":"))


def _populations(found: Membership) -> list[str]:
    last = [choices[max(choices)] for choices in found.chosen.values() if choices]
    counts = {c: last.count(c) for c in range(found.count) if c in last}
    words = [f"{letter(c)}: {n} client{'s' if n > 1 else ''}" for c, n in counts.items()]
    never = len(found.chosen) - len(last)
    return words + ([f"never selected: {never}"] if never else [])


def _overlap_table(chart: Chart, axes: Axes, table: np.ndarray, names: Sequence[str]) -> None:
    from matplotlib.colors import to_rgb

    shades = np.zeros((*table.shape, 4))
    shades[..., :3] = to_rgb(NO_METHOD)
    shades[..., 3] = 0.08 + 0.6 * table
    axes.imshow(shades, interpolation="none")
    axes.grid(visible=False)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title("now")
    if len(names) <= 6:
        for (row, column), value in np.ndenumerate(table):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)


def _off_diagonal(table: Any) -> np.ndarray:
    values = np.array(table)
    if len(values) == 1:
        return np.ones(1)
    result: np.ndarray = values[~np.eye(len(values), dtype=bool)]
    return result


def _extremes(table: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]]:
    pairs = [(a, b) for a in range(len(table)) for b in range(a + 1, len(table))]
    by: Callable[[tuple[int, int]], float] = lambda pair: float(table[pair])  # noqa: E731
    return min(pairs, key=by), max(pairs, key=by)


def _band_words(curve: Series) -> str:
    low, first, third, high = _quantiles(curve, curve.rounds[-1])
    return (
        "The darker band holds the middle half of the clients, the lighter one four fifths: "
        f"{_when([curve])} {_range((first, third))} and {_range((low, high))}."
    )


def _range(ends: Any) -> str:
    return f"{ends[0]:.0f}–{ends[1]:.0f} %"


def _end(curve: Series) -> str:
    """Where it ends, or where it has got to."""
    return _percent(curve.last()) + ("" if curve.over else " so far")


def _over(curves: Sequence[Series]) -> bool:
    return all(curve.over for curve in curves)


def _when(curves: Sequence[Series]) -> str:
    return "in the end" if _over(curves) else "so far"


def _points(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _spread(values: np.ndarray) -> str:
    """Of percentages."""
    mean = f"{values.mean():.1f}"
    return f"{mean} %" if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.1f} %"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _short(label: str, most: int = 24) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _highest_and_lowest(
    words: Sequence[tuple[float, str]], separator: str = "; ", ranked: bool = True
) -> str:
    """Ordered by their values from high to low, where they can be ranked; of many, the two ends."""
    texts = [text for _, text in (sorted(words, key=lambda w: -w[0]) if ranked else words)]
    if len(texts) > NAMED:
        texts = [*texts[: NAMED // 2], "…", *texts[-NAMED // 2 :]]
    return separator.join(texts).replace("….", "…")
