"""Networks and labels by client."""

from perfed.paper import figure2
from perfed.runs.simulation import Simulation


def test_it_shows_what_a_run_of_the_table_has() -> None:
    result = figure2.figure2(quick=True)
    chosen = figure2.table_run(2, quick=True)
    simulation = Simulation(chosen.experiment({"name": "local"}, chosen.fractions[0], 0))
    example = result["example"]
    assert example["architectures"] == simulation.population.architectures
    assert example["train_sizes"] == simulation.federation.train_sizes.tolist()
    assert sum(map(sum, example["labels"])) == 1797 - 400
    for name in result["order"]:
        assert result["shares"][name][0] == example["architectures"].count(name) / 30
    bars, bubbles = figure2.plot(result).axes
    assert [round(bar.get_height()) for bar in bars.patches] == [
        example["architectures"].count(name) for name in result["order"]
    ]
    drawn = sum(len(points.get_offsets()) for points in bubbles.collections)
    assert drawn == sum(count > 0 for client in example["labels"] for count in client)
    assert len(figure2.tables(result)[0].rows) == 3 + 8
    assert result["never_in_500"][0] <= result["never_in_100"][0] < 30
