"""The figures of docs/idea.md: one drawn by hand, two from a run of the embedded default.

python benchmarks/idea_figures.py   writes docs/idea-*.svg, in half a minute

Colours are Okabe and Ito's, and every group has a shape of its own too. Each figure brings its own
background, light or dark as the reader's system is.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from perfed import Comparison, load, run
from perfed.algorithms.clustering import nearest
from perfed.algorithms.perfed_ckt import PerFedCKT
from perfed.config import Experiment
from perfed.data import build_federation

ROOT = Path(__file__).parents[1]
WIDTH = 600
PANELS = {0: "before training", 3: "after 3 rounds", 40: "after 40 rounds"}
SHOWN_ROUND = 6  # of which the third figure shows one client
STYLE = """
svg { --paper: #fff; --ink: #1f2933; --muted: #566070; --line: #c3ccd6; --soft: #eef2f6;
  --a: #0072b2; --b: #c65500; --c: #00805e; font: 16px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --paper: #1c212b; --ink: #e8ebf0; --muted: #aeb8c5;
  --line: #4a5563; --soft: #2a313d; --a: #56b4e9; --b: #f0a24a; --c: #35c79d; } }
text { fill: var(--ink); } .muted { fill: var(--muted); } .small { font-size: 14px; }
.bold { font-weight: 600; } .mid { text-anchor: middle; } .end { text-anchor: end; }
.box { fill: var(--soft); stroke: var(--line); } .line { stroke: var(--line); fill: none; }
.a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); }
.arrow { stroke: var(--muted); stroke-width: 2; fill: none; marker-end: url(#tip); }
"""
GROUPS = "abc"


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" class="{kind}"/>'
    )


def arrow(path: str) -> str:
    return f'<path d="{path}" class="arrow"/>'


def mark(x: float, y: float, group: int, size: float = 7) -> str:
    """A circle, square or triangle in its group's colour."""
    kind = GROUPS[group]
    if group == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}" class="{kind}"/>'
    if group == 1:
        return (
            f'<rect x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size:g}" '
            f'height="{2 * size:g}" class="{kind}"/>'
        )
    s = 1.25 * size
    return f'<path d="M{x:.1f} {y - s:.1f}l{s:g} {1.8 * s:g}h{-2 * s:g}z" class="{kind}"/>'


def drawn(title: str, height: float, parts: list[str]) -> str:
    """The whole SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0l10 5-10 5z" class="muted"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height:g}" rx="10" style="fill: var(--paper)"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def drawing(name: str, title: str, height: float, parts: list[str]) -> None:
    """Write docs/NAME.svg."""
    (ROOT / "docs" / f"{name}.svg").write_text(drawn(title, height, parts), "utf-8")


# --------------------------------------------------------------------- what crosses


def matrix(x: float, y: float, group: int, rows: int = 4, columns: int = 5) -> str:
    """A matrix of soft decisions; darker is likelier."""
    random = np.random.default_rng([group, rows])
    cells = []
    for row in range(rows):
        shares = random.dirichlet(np.full(columns, 0.3))
        for column, share in enumerate(shares):
            cells.append(
                f'<rect x="{x + 9 * column:g}" y="{y + 9 * row:g}" width="8" height="8" '
                f'class="{GROUPS[group]}" opacity="{0.15 + 0.85 * share:.2f}"/>'
            )
    return "".join(cells)


def draw_crossing() -> None:
    parts = [
        box(16, 16, 568, 96),
        text(300, 44, "server", "bold mid"),
        text(300, 66, "clusters what it got into c groups and keeps their means", "small mid"),
        text(300, 86, "no weights, no data, no labels", "small muted mid"),
    ]
    for group, (name, about) in enumerate(
        (("client 1", "small MLP"), ("client 2", "large MLP"), ("client 3", "CNN"))
    ):
        x = 16 + 194 * group
        parts += [
            box(x, 300, 180, 116),
            mark(x + 20, 322, group),
            text(x + 36, 328, name, "bold"),
            text(x + 14, 354, about, "small"),
            text(x + 14, 376, "its own labelled data", "small"),
            text(x + 14, 398, "stay here", "small muted"),
            arrow(f"M{x + 16} 296 V122"),
            matrix(x + 26, 192, group),
            text(x + 26, 168, "its own", "small muted"),
            arrow(f"M{x + 92} 118 V292"),
            text(x + 102, 168, "all c", "small muted"),
        ]
        parts += [matrix(x + 102 + 15 * i, 182 + 14 * i, i) for i in range(3)]
    parts += [
        box(16, 436, 568, 60),
        text(300, 460, "the public set P: a few hundred samples without labels", "mid"),
        text(
            300,
            482,
            "the same for everybody, and the only thing everybody looks at",
            "small muted mid",
        ),
    ]
    drawing("idea-crosses", "What crosses between clients and server", 512, parts)


# --------------------------------------------------------------------- from a real run


@dataclass(frozen=True)
class Recording(PerFedCKT):
    """PerFed-CKT, and a note of what the server got and kept in every round."""

    def merge(self, server: Any, state: Any, replies: Any) -> Any:
        new = super().merge(server, state, replies)
        got = {reply.client.id: reply.message["soft_decisions"].clone() for reply in replies}
        NOTES[server.round] = (got, new["centroids"].clone())
        return new


NOTES: dict[int, tuple[dict[int, torch.Tensor], torch.Tensor]] = {}


def played() -> Experiment:
    comparison = load("digits-groups")
    assert isinstance(comparison, Comparison)
    values = comparison.experiment.to_mapping()
    values["algorithm"] = Recording(clusters=3, weight=1.0)
    experiment = Experiment(**values)
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder) / "run")
    return experiment


def draw_clusters() -> None:
    """What the server got in three rounds, in the plane that shows most of the differences."""
    rounds = sorted(NOTES)
    chosen = {rounds[number]: title for number, title in PANELS.items()}  # from round −1
    everything = torch.cat([torch.stack(list(got.values())) for got, _ in NOTES.values()])
    flat = everything.flatten(1).double()
    mean = flat.mean(0)
    _, _, axes = torch.linalg.svd(flat - mean, full_matrices=False)
    plane = axes[:2].T

    def place(matrices: torch.Tensor) -> np.ndarray:
        return ((matrices.flatten(1).double() - mean) @ plane).numpy()

    corners = place(everything)
    low, high = corners.min(0), corners.max(0)
    side, top = 180, 52
    parts = []
    for number, (round, title) in enumerate(chosen.items()):
        got, centroids = NOTES[round]
        left = 16 + 194 * number
        parts += [text(left + side / 2, 34, title, "bold mid"), box(left, top, side, side)]

        def at(point: np.ndarray, left: float = left) -> tuple[float, float]:
            x, y = (point - low) / (high - low)
            return left + 16 + x * (side - 32), top + side - 16 - y * (side - 32)

        centres = place(centroids)
        points = place(torch.stack(list(got.values())))
        for matrix_, point in zip(got.values(), points, strict=True):
            (x, y), (u, v) = at(point), at(centres[int(nearest(centroids, matrix_))])
            parts.append(f'<path d="M{x:.1f} {y:.1f}L{u:.1f} {v:.1f}" class="line"/>')
        for client, point in zip(got, points, strict=True):
            parts.append(mark(*at(point), client % 3, 5.5))
        for centre in centres:
            x, y = at(centre)
            cross = f"M{x - 7:.1f} {y - 7:.1f}l14 14m-14 0l14-14"
            parts.append(f'<path d="{cross}" style="stroke: var(--ink); stroke-width: 3"/>')
    y = top + side + 32
    parts += [mark(28 + 16 * g, y - 5, g, 6) for g in range(3)]
    parts += [
        text(78, y, "a client's soft decisions, by its hidden group", "small"),
        f'<path d="M426 {y - 11}l12 12m-12 0l12-12" style="stroke: var(--ink); stroke-width: 3"/>',
        text(446, y, "a centroid", "small"),
    ]
    drawing("idea-clusters", "How clusters form", y + 20, parts)


def digit(x: float, y: float, image: np.ndarray, size: float = 9) -> str:
    cells = [f'<rect x="{x:g}" y="{y:g}" width="{8 * size:g}" height="{8 * size:g}" class="box"/>']
    for row in range(8):
        for column in range(8):
            ink = (float(image[row, column]) + 1) / 2
            if ink > 0.05:
                cells.append(
                    f'<rect x="{x + size * column:g}" y="{y + size * row:g}" width="{size:g}" '
                    f'height="{size:g}" style="fill: var(--ink)" opacity="{ink:.2f}"/>'
                )
    return "".join(cells)


def draw_objective(experiment: Experiment) -> None:
    """One client's two terms, with its numbers in the run."""
    federation = build_federation(
        experiment.data,
        experiment.partition,
        experiment.split,
        experiment.clients,
        experiment.seed,
    )
    got, centroids = NOTES[SHOWN_ROUND]
    client = min(got, key=lambda k: len(federation.splits[k].train))
    own, teacher = got[client], centroids[int(nearest(centroids, got[client]))]
    # The public sample on which the student is farthest from a teacher that is right. (Labels of
    # public samples are looked at for this picture only.)
    truth = torch.from_numpy(load_digits().target[federation.samples.public_index])
    right = teacher.argmax(1) == truth
    shown = int(torch.where(right, (own - teacher).square().sum(1), 0).argmax())
    data = federation.splits[client]
    private = federation.samples.x[data.train[0]][0]
    label = int(federation.samples.y[data.train[0]])
    parts = [
        text(300, 36, "cross-entropy + λ · squared distance", "bold mid"),
        box(16, 56, 180, 290),
        text(106, 80, "on its own data", "mid"),
        digit(62, 100, private, 11),
        text(106, 216, f"its label is {label}", "mid"),
        text(106, 256, f"it has {len(data.train)} samples", "small muted mid"),
        text(106, 276, "to train with", "small muted mid"),
        box(210, 56, 374, 290),
        text(397, 80, "on the public set, which has no labels", "mid"),
        digit(226, 100, federation.samples.public_x[shown][0], 11),
    ]
    base, scale = 296, 150
    for name in range(10):
        x = 336 + 24 * name
        mine, theirs = float(own[shown, name]), float(teacher[shown, name])
        parts += [
            f'<rect x="{x}" y="{base - scale * mine:.1f}" width="9" '
            f'height="{scale * mine:.1f}" class="a"/>',
            f'<rect x="{x + 10}" y="{base - scale * theirs:.1f}" width="9" '
            f'height="{scale * theirs:.1f}" class="b"/>',
            text(x + 9.5, base + 18, str(name), "small muted mid"),
        ]
    parts += [
        f'<path d="M332 {base}H576" class="line"/>',
        '<rect x="226" y="210" width="12" height="12" class="a"/>',
        text(244, 221, "it says", "small"),
        '<rect x="226" y="234" width="12" height="12" class="b"/>',
        text(244, 245, "its", "small"),
        text(226, 264, "centroid says", "small"),
        text(456, 336, "probability of each digit", "small muted mid"),
    ]
    drawing("idea-objective", "What a client minimises", 362, parts)
    print(f"client {client}, public sample {shown}")


if __name__ == "__main__":
    draw_crossing()
    setting = played()
    draw_clusters()
    draw_objective(setting)
