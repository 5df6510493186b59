"""Theorem 2: the λ and the weights with which knowledge transfer helps most, in linear regression.

Client *i*'s true model is w_i = θ + ζ_i with ζ_i ~ N(0, υ_i² I), θ anything; its least-squares
estimate is w̃_i ~ N(w_i, σ²/β I). With transfer from everyone's estimates, by weights α_i that sum
to one, client *k* has

    ŵ_k = (β w̃_k + λν Σ_i α_i w̃_i) / (β + λν).

The theorem gives λ_k* = σ²/(υ_k² ν) and α_i* = B_k / (σ² + βυ_i²), with
A_k = (Σ_{i≠k} 1/(σ² + βυ_i²))⁻¹. Its B_k is misprinted. The weights must sum to one, and

    1 = Σ_i α_i* = B_k (1/A_k + 1/(σ² + βυ_k²))   gives   B_k = A_k (σ²+βυ_k²) / (σ²+βυ_k²+A_k),

where the paper prints A_k (σ²+βυ_k²) / (σ² + A_k βυ_k²), whose denominator adds a variance to a
product of two. Below, both, beside the best that any linear combination can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perfed.core.layout import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWS, QUICK_DRAWS = 200_000, 20_000
RULES = ("local", "uniform", "printed", "derived", "optimum")
TITLES = ("local", "uniform", "B as printed", "B derived", "optimum")


@dataclass(frozen=True)
class Problem:
    """The example's constants are arbitrary; the derived weights are optimal for any."""

    spread: tuple[float, ...] = (0.5, 1.0, 2.0, 6.0)
    """υ_i: how far each client's true model is from θ."""
    dimensions: int = 3
    data: float = 2.0
    """β: XᵀX = β I."""
    public: float = 1.5
    """ν: pᵀp = ν I."""
    noise: float = 3.0
    """σ²."""

    def total_variances(self) -> np.ndarray:
        """σ² + βυ_i²."""
        return np.asarray(self.noise + self.data * np.square(self.spread))

    def best_weight(self, client: int) -> float:
        """λ_k*."""
        return self.noise / (self.spread[client] ** 2 * self.public)

    def scale(self, client: int, printed: bool) -> float:
        """B_k."""
        totals = self.total_variances()
        others = 1 / np.delete(1 / totals, client).sum()  # A_k
        divisor = (
            self.noise + others * self.data * self.spread[client] ** 2
            if printed
            else totals[client] + others
        )
        return float(others * totals[client] / divisor)

    def combination(self, client: int, rule: str) -> np.ndarray:
        """What ŵ_k takes of each client's estimate."""
        own = np.eye(len(self.spread))[client]
        if rule == "local":
            return np.asarray(own)
        if rule == "optimum":
            return self._best_combination(client)
        if rule == "uniform":
            weights = np.full(len(self.spread), 1 / len(self.spread))
        else:
            weights = self.scale(client, rule == "printed") / self.total_variances()
        pull = self.best_weight(client) * self.public
        return np.asarray((self.data * own + pull * weights) / (self.data + pull))

    def _best_combination(self, client: int) -> np.ndarray:
        """The linear combination with the least error among those that sum to one: a system of
        linear equations, which knows nothing of the theorem."""
        count = len(self.spread)
        variances = np.square(self.spread) + self.noise / self.data
        system = np.ones((count + 1, count + 1))
        system[:count, :count] = np.diag(2 * variances)
        system[count, count] = 0
        right = np.append(2 * np.eye(count)[client] * self.spread[client] ** 2, 1.0)
        return np.asarray(np.linalg.solve(system, right)[:count])

    def error(self, client: int, combination: np.ndarray) -> float | None:
        """E‖ŵ_k − w_k‖²; None where θ does not cancel, since θ may be anything."""
        if not np.isclose(combination.sum(), 1):
            return None
        variances = np.square(self.spread) + self.noise / self.data
        own = self.spread[client] ** 2 * (1 - 2 * combination[client])
        return float(self.dimensions * (combination**2 @ variances + own))

    def drawn_error(
        self, client: int, combination: np.ndarray, draws: int, random: np.random.Generator
    ) -> float:
        """The same by drawing, θ uniform from −10 to 10 as in the paper's example."""
        shape = (draws, len(self.spread), self.dimensions)
        theta = random.uniform(-10, 10, (draws, 1, self.dimensions))
        true = theta + random.normal(size=shape) * np.array(self.spread)[:, None]
        estimates = true + random.normal(size=shape) * np.sqrt(self.noise / self.data)
        transferred = np.einsum("i,nid->nd", combination, estimates)
        return float(np.square(transferred - true[:, client]).sum(axis=1).mean())


def theorem2(quick: bool = False, problem: Problem | None = None) -> dict[str, Any]:
    """Every rule's error for every client."""
    problem, draws = problem or Problem(), QUICK_DRAWS if quick else DRAWS
    random = np.random.default_rng(0)
    rows = []
    for client, spread in enumerate(problem.spread):
        errors = {}
        for rule in RULES:
            combination = problem.combination(client, rule)
            errors[rule] = {
                "closed_form": problem.error(client, combination),
                "drawn": problem.drawn_error(client, combination, draws, random),
                "sum_of_weights": float(combination.sum()),
            }
        weight = problem.best_weight(client)
        rows.append({"client": client, "spread": spread, "lambda": weight, "errors": errors})
    constants = {"β": problem.data, "ν": problem.public, "σ²": problem.noise}
    return {"constants": constants, "draws": draws, "rows": rows}


def tables(result: dict[str, Any]) -> list[Table]:
    constants = ", ".join(f"{name}={value:g}" for name, value in result["constants"].items())
    title = f"Theorem 2: E‖ŵ − w‖² by {result['draws']:,} draws ({constants})"
    header = ("client", "υ", "λ*", *TITLES)
    rows = [
        (
            str(row["client"]),
            f"{row['spread']:g}",
            f"{row['lambda']:.2f}",
            *(f"{row['errors'][rule]['drawn']:.2f}" for rule in RULES),
        )
        for row in result["rows"]
    ]
    return [Table(title, header, rows, NOTE)]


NOTE = (
    "optimum: the best linear combination of all clients' estimates, from the normal equations.\n"
    "With B as printed the weights do not sum to one, so that θ itself enters the error; derived\n"
    "from the paper's own conditions, B = A(σ²+βυ²)/(σ²+βυ²+A), they are the optimum."
)


def plot(result: dict[str, Any]) -> Figure:
    """Every rule's error for every client."""
    from matplotlib.figure import Figure  # not pyplot: a notebook's own backend stays as it is

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    colours = ("#999999", "#56B4E9", "#D55E00", "#0072B2", "#000000")
    for number, (rule, title, colour) in enumerate(zip(RULES, TITLES, colours, strict=True)):
        where = np.arange(len(result["rows"])) + 0.16 * (number - 2)
        errors = [row["errors"][rule]["drawn"] for row in result["rows"]]
        axis.bar(where, errors, 0.15, color=colour, label=title)
    names = [f"client {row['client']}\nυ = {row['spread']:g}" for row in result["rows"]]
    axis.set_xticks(range(len(names)), names)
    axis.set(yscale="log", ylabel="E‖ŵ − w‖²")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.15), fontsize=8)
    return figure
