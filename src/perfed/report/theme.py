"""How charts look: sizes, and colours that a colour-blind reader can tell apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, and a lighter one of the same hues for a dark page. Black is not quite
# black: SVG leaves that out as its default, and then it could not be replaced.
_PALETTE = (
    ("#999999", "#a6a6a6"),
    ("#111111", "#f2f2f2"),
    ("#e69f00", "#f0b429"),
    ("#56b4e9", "#7cc8f2"),
    ("#0072b2", "#3d8fe0"),
    ("#009e73", "#2bbd92"),
    ("#d55e00", "#f27d2d"),
    ("#cc79a7", "#e29bc2"),
)
COLOURS = tuple(light for light, _ in _PALETTE)
STYLES: tuple[Any, ...] = ("-", "--", ":")
SECOND: Any = (0, (2, 2.4))
"""The style of a method's second model. Its gaps show a line beneath: Ditto's global model is
FedAvg's, number for number."""
GROUPS = ("#a050b8", "#9a9a2e", "#2f8f9d", "#d0546a", "#7a6cc4", "#96603c", "#7bab3a")
"""Of clusters and phases, which are no methods: none of these is a method's colour. They are read
on light ground and on dark, so that a picture's pixels and its legend have the same."""
SHAPES = {
    "o": "M5 0A5 5 0 1 1 5 10A5 5 0 1 1 5 0Z",
    "s": "M.5 .5H9.5V9.5H.5Z",
    "^": "M5 .3L10 9.3H0Z",
    "D": "M5 0L10 5L5 10L0 5Z",
    "P": "M3.3 0H6.7V3.3H10V6.7H6.7V10H3.3V6.7H0V3.3H3.3Z",
}
"""matplotlib's markers, and the same as SVG paths in a square of ten units."""
INK, MUTED, GRID, PAPER = "#222222", "#6a6a6a", "#dddddd", "#fefefe"

VARIABLES = {
    **{f"--colour-{n}": pair for n, pair in enumerate(_PALETTE)},
    "--ink": (INK, "#e8e8e8"),
    "--muted": (MUTED, "#a3a3a3"),
    "--grid": (GRID, "#3c3f44"),
    "--paper": (PAPER, "#1d1f22"),
    "--shadow": ("#a9a9a8", "#000001"),
}
"""Every colour of a chart: its name on the page, on light ground and on dark."""

WIDTH = 4.6  # inches, for every chart: as wide as a phone, so that nothing shrinks there
RC = {
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "axes.facecolor": "none",
    "svg.fonttype": "none",  # text stays text: small, and it can be searched
    "pdf.fonttype": 42,
}
LEGEND_ROW = 0.2  # inches
LEGEND_WIDTH = 52  # letters


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def group_colour(number: int) -> str:
    return GROUPS[number % len(GROUPS)]


def style(number: int, second: bool = False) -> Any:
    return SECOND if second else STYLES[number // len(COLOURS) % len(STYLES)]


def marker(number: int) -> str:
    """As a line has a style: the same colour comes again with another shape."""
    return [*SHAPES][number // len(COLOURS) % len(SHAPES)]


def canvas(
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    left: float = 0.55,
    right: float = 0.12,
    top: float = 0.12,
    bottom: float = 0.5,
    legend: int = 0,
    **options: Any,
) -> tuple[Figure, Any]:
    """A figure and its axes; margins in inches, and room for so many rows of a legend below."""
    from matplotlib.figure import Figure  # not pyplot: a notebook's own backend stays as it is

    height += LEGEND_ROW * legend
    bottom += LEGEND_ROW * legend
    figure = Figure(figsize=(WIDTH, height))
    figure.subplots_adjust(
        left=left / WIDTH,
        right=1 - right / WIDTH,
        top=1 - top / height,
        bottom=bottom / height,
    )
    return figure, figure.subplots(rows, columns, **options)


def legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Below the axes, what they show."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        [
            label if len(label) <= LEGEND_WIDTH else label[: LEGEND_WIDTH - 1] + "…"
            for label in labels
        ],
        loc="lower left",
        ncols=columns,
        bbox_to_anchor=(0.02, 0),
        borderaxespad=0.3,
        columnspacing=1.2,
        labelspacing=0.35,
    )
