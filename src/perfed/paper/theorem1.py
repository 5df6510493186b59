"""Theorem 1: the gradient of each client's objective Φ_k(w_k; s̄_k) goes to zero.

It is for τ=1, everybody taking part, and a step that decays as it must. The package's own
PerFed-CKT runs on handwritten digits, once with a linear model, which satisfies the assumptions on
any bounded set, and once with a network; η_t = η/(1 + t/100) has an infinite sum and a finite sum
of squares. Beside them a constant step, for which the theorem promises nothing. The gradient is the
full one: all of a client's samples, the whole public set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.func import functional_call

from perfed.algorithms.clustering import nearest
from perfed.config import Experiment
from perfed.core.algorithm import Network, Private, Public
from perfed.core.channel import Channel
from perfed.core.layout import Table
from perfed.core.pixels import numbers, samples_at
from perfed.core.schema import from_mapping
from perfed.core.threads import cpu_threads
from perfed.core.tree import Weights
from perfed.engines import Execution
from perfed.runs.simulation import Simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS, QUICK_ROUNDS = 3000, 300


@dataclass(frozen=True)
class Case:
    title: str
    hidden: tuple[int, ...]
    decay: float


CASES = (
    Case("linear model, decaying step", (), 0.01),
    Case("network, decaying step", (32,), 0.01),
    Case("linear model, constant step", (), 0.0),
)


def experiment(case: Case, rounds: int) -> Experiment:
    return from_mapping(
        Experiment,
        {
            "name": "theorem1",
            "rounds": rounds,
            "clients": 6,
            "clients_per_round": 6,
            "data": {"name": "digits", "public": 60},
            "partition": {"name": "groups", "groups": 2},
            "models": [{"name": "mlp", "hidden": list(case.hidden)}],
            "training": {
                "learning_rate": 0.5,
                "decay": case.decay,
                "steps": 1,
                "batch_size": 8,
                "public_batch_size": 16,
            },
            "algorithm": {"name": "perfed-ckt", "clusters": 2, "weight": 2.0},
        },
    )


def gradient_norms(simulation: Simulation) -> list[float]:
    """‖∇Φ_k(w_k; s̄_k)‖ of every client, as they stand between two rounds."""
    population, centroids = simulation.population, simulation.progress.state["centroids"]
    norms = []
    for k in range(simulation.experiment.clients):
        weights = population.record(k).weights
        module = population.modules[population.architectures[k]].eval()
        where = population.positions(k, "train")
        public = Public(numbers(population.public_x), torch.arange(len(population.public_x)))
        with torch.no_grad():
            said = functional_call(module, weights.params, (public.x,)).softmax(1)
        params = {name: t.clone().requires_grad_() for name, t in weights.params.items()}
        loss = simulation.algorithm.objective(  # type: ignore[attr-defined]
            Network(module, Weights(params, {}), "private"),
            Private(samples_at(population.x, where), population.y[where]),
            public,
            centroids[nearest(centroids, said)],
        )
        gradients = torch.autograd.grad(loss, list(params.values()))
        norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
    return norms


def theorem1(quick: bool = False) -> dict[str, Any]:
    """The largest and the mean gradient norm over clients, at about logarithmic intervals."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    wanted = sorted(
        {0, rounds, *(round(10 ** (n / 8)) for n in range(64))} & set(range(rounds + 1))
    )
    return {
        "rounds": wanted,
        "cases": {case.title: _curve(case, rounds, set(wanted)) for case in CASES},
    }


def _curve(case: Case, rounds: int, wanted: set[int]) -> dict[str, list[float]]:
    simulation = Simulation(experiment(case, rounds), how=Execution(device="cpu"))
    channel = Channel()
    curve: dict[str, list[float]] = {"largest": [], "mean": []}
    with cpu_threads(1):
        simulation.begin(channel)
        for done in range(rounds + 1):
            if done in wanted:
                norms = gradient_norms(simulation)
                curve["largest"].append(max(norms))
                curve["mean"].append(sum(norms) / len(norms))
            if done < rounds:
                simulation.play_round(done, channel)
    return curve


def tables(result: dict[str, Any]) -> list[Table]:
    last = len(result["rounds"]) - 1
    shown = [
        n for n, done in enumerate(result["rounds"]) if done in (0, 10, 100, 1000) or n == last
    ]
    title = "Theorem 1: ‖∇Φ_k(w_k; s̄_k)‖ of the client with the largest, after rounds"
    header = ("", *(f"{result['rounds'][n]:,}" for n in shown))
    rows = [
        (case, *(f"{curve['largest'][n]:.4f}" for n in shown))
        for case, curve in result["cases"].items()
    ]
    return [Table(title, header, rows, NOTE)]


NOTE = (
    "As the theorem says. That the constant step gets there, too, is these clients' doing: their\n"
    "few samples can be fitted, and where each sample's gradient is zero there is no noise left."
)


def plot(result: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure  # not pyplot: a notebook's own backend stays as it is

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    for colour, (title, curve) in zip(
        ("#0072b2", "#e69f00", "#999999"), result["cases"].items(), strict=True
    ):
        rounds = [done + 1 for done in result["rounds"]]
        axis.loglog(rounds, curve["largest"], color=colour, label=title)
        axis.loglog(rounds, curve["mean"], color=colour, ls=":")
    axis.set_xlabel("communication round")
    axis.set_ylabel(r"$\|\nabla\Phi_k(w_k;\bar s_k)\|$: largest client, mean dotted")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure
