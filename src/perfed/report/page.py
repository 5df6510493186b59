"""The report: one HTML file that needs nothing else, made from run directories."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from perfed.config import Experiment, dump_yaml
from perfed.core.layout import Table
from perfed.core.tensorfile import write_atomically
from perfed.report import gather, theme
from perfed.report.charts import Chart, charts
from perfed.report.document import details, document, figures_html, line_mark, table_card
from perfed.report.gather import Run, Series
from perfed.runs.result import hostile_words_of
from perfed.runs.tables import HEADER, against_local, cells, footnote, quantity, rows, standing

RELOAD_SECONDS = 4
FIGURES = ("png", "pdf")


@dataclass(frozen=True)
class Report:
    """What runs say, drawn once: as a page, and as figures in files."""

    paths: Sequence[Path]
    runs: Sequence[Run]
    curves: Sequence[Series]
    charts: Sequence[Chart]
    over: bool
    """Whether all there will ever be is in it."""

    def write(self, path: Path, watched: bool = False) -> Path:
        """The page; one that is watched reloads itself until its runs are over."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with gather.reading(self.paths):
            text = html(self, watched and not self.over)
        write_atomically(path, text.encode())
        return path

    def write_figures(self, folder: Path, kind: str) -> list[Path]:
        """Each chart as a PNG or PDF file."""
        return write_figures(self.charts, folder, kind)


def write_figures(charts: Iterable[Chart], folder: Path, kind: str) -> list[Path]:
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for chart in charts:
        files.append(folder / f"{chart.name}.{kind}")
        with mpl.rc_context(theme.RC):
            chart.figure.savefig(files[-1], dpi=200)
    return files


def draw(paths: Sequence[Path]) -> Report:
    """Of run directories and comparisons, finished or not."""
    import matplotlib as mpl

    with gather.reading(paths), mpl.rc_context(theme.RC):
        runs = gather.read(paths)
        # Asked before the rounds are read: a run may end meanwhile.
        over = len(runs) == gather.planned(paths) and all(run.over for run in runs)
        curves = gather.series(runs)
        return Report(paths, runs, curves, charts(runs, curves), over)


def watch(paths: Sequence[Path], out: Path) -> Report:
    """Write the page again whenever there is something new, until the runs are over."""
    shown = None
    while True:
        there = gather.written(paths)
        if there != shown:
            report, shown = draw(paths), there
            report.write(out, watched=True)
            if report.over:
                return report
        time.sleep(RELOAD_SECONDS / 2)


def html(report: Report, reload: bool = False) -> str:
    figures = figures_html(report.charts)
    lead, rest = figures[:2], figures[2:]
    body = f"""
{_about(report)}
{_state(report)}
{_tiles(report)}
{_summary(report)}
{_against_local(report)}
<div class="lead">
{"".join(lead)}
</div>
<div class="charts">
{"".join(rest)}
</div>
{_configuration(report)}
"""
    return document(_title(report), body, RELOAD_SECONDS if reload else 0)


def _title(report: Report) -> str:
    names = list(dict.fromkeys(run.result.experiment.name for run in report.runs))
    if not names:
        return report.paths[0].name
    what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    methods = {run.method for run in report.runs}
    if len(methods) > 1:
        return f"{what}: {len(methods)} methods compared"
    return f"{what}: {report.runs[0].result.experiment.algorithm.label()}"


def _about(report: Report) -> str:
    """What the runs have in common; what they have not is in their names, or the configuration."""
    if not report.runs:
        return ""
    experiments = [run.result.experiment for run in report.runs]
    about = _same(experiment.about for experiment in experiments)
    by_seeds = _labels_by_seeds(report.runs)
    facts = [
        _same(_clients(e) for e in experiments),
        _same(f"{e.clients_per_round} selected a round" for e in experiments),
        _same(f"{e.rounds} rounds" for e in experiments),
        _same(_data(run) for run in report.runs),
        _same(f"shifted by {e.shift.label()}" if e.shift else "" for e in experiments),
        _same(f"hostile clients: {e.hostile.label()}" if e.hostile else "" for e in experiments),
        _seeds(report.runs) if len(by_seeds) == 1 else "",
    ]
    sentence = f"<p>{escape(about)}</p>" if about else ""
    said = f'{sentence}<p class="about">{escape(" · ".join(filter(None, facts)))}</p>'
    if len(by_seeds) > 1:
        words = "; ".join(f"{seeds}: {', '.join(labels)}" for seeds, labels in by_seeds.items())
        said += (
            '<p class="about">Not all have the same seeds, and another seed divides the data in '
            f"another way. {escape(words)}.</p>"
        )
    return said


def _clients(experiment: Experiment) -> str:
    text, partition = f"{experiment.clients} clients", experiment.partition
    if not partition.leaves_out_small():
        return text
    return f"of {text} those with at least {partition.minimum_size()} samples"


def _data(run: Run) -> str:
    if run.is_federation:
        return "each site has its own data"
    experiment = run.result.experiment
    return f"{experiment.data.label()} divided by {experiment.partition.label()}"


def _seeds(runs: Sequence[Run]) -> str:
    numbers = sorted({run.seed for run in runs})
    several = f"seeds {', '.join(map(str, numbers))}"
    return several if len(numbers) > 1 else f"one seed ({numbers[0]})"


def _labels_by_seeds(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Which methods have which seeds; ``seeds 0, 1`` is a key."""
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.label, set()).add(run.seed)
    found: dict[str, list[str]] = {}
    for label, own in seeds.items():
        words = f"seed{'s' if len(own) > 1 else ''} {', '.join(map(str, sorted(own)))}"
        found.setdefault(words, []).append(label)
    return found


def _same(texts: Iterable[str]) -> str:
    """What all of them say, or nothing."""
    said = set(texts)
    return said.pop() if len(said) == 1 else ""


def _state(report: Report) -> str:
    """What is not finished, and what never will be."""
    boxes = [
        f'<div class="state failed">{escape(run.title)} has no result: {escape(run.failure)}</div>'
        for run in report.runs
        if run.failure
    ]
    if not report.over:
        boxes.append(f'<div class="state">{escape(_unfinished(report))}</div>')
    return "\n".join(boxes)


def _unfinished(report: Report) -> str:
    """How far the runs are, and of those that nobody works on how they go on."""
    planned = gather.planned(report.paths)
    waiting = planned - len(report.runs)
    stopped = [run for run in report.runs if run.stopped]
    going = [run for run in report.runs if run not in stopped and not run.over]
    words = [f"{sum(run.over for run in report.runs)} of {planned} runs finished"]
    words += [f"{run.title}: round {_progress(run)}" for run in going]
    words += [f"{run.title}: stopped after round {_progress(run)}" for run in stopped]
    words += [f"{waiting} not begun"] if waiting else []
    ways = dict.fromkeys(_way_on(run, report.paths) for run in stopped)
    state = "Still going on" if going else "Stopped" if stopped else "Not finished"
    return " ".join([f"{state}. {'; '.join(words)}.", *ways])


def _progress(run: Run) -> str:
    return f"{len(run.rounds)} of {run.result.experiment.rounds}"


def _way_on(run: Run, paths: Sequence[Path]) -> str:
    if run.is_federation:
        return f"To go on with {run.path}, start its coordinator again."
    whole = run.path if run.path in paths else run.path.parent  # the comparison it is of
    return f"To go on: perfed run --resume {whole}"


def _tiles(report: Report) -> str:
    """One method in a few numbers: the highest, where all are on the same data."""
    if not report.curves or not gather.same_data(report.curves):
        return ""
    best = max(report.curves, key=Series.last)
    when = "at the end" if report.over else "so far"
    mean = f"mean test accuracy over all {gather.clients_word(report.runs)} {when}"
    tiles = [(f"{100 * best.last():.1f} %", mean)]
    local = gather.alone(best, report.curves)
    if local and best is not local:
        alone = f"above training alone ({100 * local.last():.1f} %)"
        tiles.append((f"{100 * (best.last() - local.last()):+.1f} points", alone))
    tenth = f"mean over the worst tenth of the {gather.clients_word(report.runs)}"
    tiles.append((f"{100 * best.worst_tenth():.1f} %", tenth))
    if sent := best.cost(best.rounds[-1], "bytes"):
        tiles.append((quantity(sent, "B"), f"sent {'in all' if report.over else 'so far'}"))
    boxes = "".join(
        f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in tiles
    )
    return f'{_tiles_title(report, best, when)}<div class="tiles">{boxes}</div>'


def _tiles_title(report: Report, best: Series, when: str) -> str:
    """Whose numbers the tiles are."""
    if len(report.curves) == 1:
        return ""
    mark = line_mark(best.number, best.second)
    one_seed = ", with one seed" if len(best.seeds) == 1 else ""
    words = f"{best.label} has the highest mean test accuracy {when}{one_seed}"
    return f'<h2 class="whose">{mark}{escape(words)}</h2>'


def _summary(report: Report) -> str:
    begun = [run for run in report.runs if run.evaluated]
    if not begun:
        return '<p class="note">No round has been evaluated yet.</p>'
    table = rows([run.summary() for run in begun])
    looks = {(c.runs[0].label, c.kind): (c.number, c.second) for c in report.curves}
    marks = [line_mark(*looks[row.algorithm, row.kind]) for row in table]
    finished = _finished(report)
    early = [f"{run.title} (round {max(run.evaluated) + 1})" for run in begun if not run.over]
    note = footnote(table)
    if hostile := hostile_words_of([run.result for run in begun]):
        note += f" {hostile}"
    if early:
        note += f" Not finished, so after the last evaluation: {'; '.join(early)}."
    bold = set()
    if begun == finished and (found := standing([run.result for run in finished])):
        note += f" {found.note()}"
        bold = found.bold(table)
    elif len({run.seed for run in begun}) == 1:
        note += " One seed: how much another would change is not known."
    summary = Table("Summary", HEADER, [cells(row) for row in table], note, names=2, bold=bold)
    return table_card("summary", summary, marks)


def _against_local(report: Report) -> str:
    """The table that ``perfed compare`` prints, of the finished runs."""
    table = against_local([run.result for run in _finished(report)])
    return "" if table is None else table_card("against-local", table)


def _finished(report: Report) -> list[Run]:
    """The finished runs, where they can be compared."""
    finished = [run for run in report.runs if run.directory.finished]
    return finished if _comparable(finished) else []


def _comparable(runs: Sequence[Run]) -> bool:
    """Whether runs differ in nothing but algorithm and seed, and their clients are known."""
    return len({repr(run.setting) for run in runs}) == 1 and all(
        run.label == run.result.experiment.algorithm.label() and run.knows_labels for run in runs
    )


def _configuration(report: Report) -> str:
    """Where the numbers come from: settings, machine, folders."""
    algorithms = {run.label: run.result.experiment.to_mapping()["algorithm"] for run in report.runs}
    sections = [details("Algorithms", dump_yaml(algorithms))]
    for title, say in (("Configuration", _settings), ("Machine and versions", _machine)):
        for text, titles in _grouped(report.runs, say).items():
            which = f" of {'; '.join(titles)}" if len(titles) < len(report.runs) else ""
            sections.append(details(title + which, text))
    folders = "\n".join(f"{run.title}: {run.path}" for run in report.runs)
    sections.append(details("Run directories", folders))
    return f'<section class="card" id="configuration">{"".join(sections)}</section>'


def _grouped(runs: Sequence[Run], say: Callable[[Run], str]) -> dict[str, list[str]]:
    """What several runs say alike is said once."""
    grouped: dict[str, list[str]] = {}
    for run in runs:
        if text := say(run):
            grouped.setdefault(text, []).append(run.title)
    return grouped


def _settings(run: Run) -> str:
    mapping = run.result.experiment.to_mapping()
    alone = ("algorithm", "seed")
    return dump_yaml({key: value for key, value in mapping.items() if key not in alone})


def _machine(run: Run) -> str:
    if not (run.path / "environment.json").is_file():
        return ""
    facts = run.directory.read_json("environment.json")
    return dump_yaml({key: value for key, value in facts.items() if key != "started"})
