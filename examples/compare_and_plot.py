"""Several methods, several seeds: a table, perfed's figure, and one of your own.

python examples/compare_and_plot.py    ten seconds
"""

import matplotlib
import pandas as pd

import perfed

matplotlib.use("Agg")  # files, no windows
import matplotlib.pyplot as plt

LOCAL, OURS = "local", "perfed-ckt (c=3, λ=1)"

comparison = perfed.Comparison(
    experiment=perfed.Experiment(
        name="compared",
        rounds=10,
        clients=12,
        clients_per_round=6,
        training={"learning_rate": 0.1},
    ),
    algorithms=["majority", LOCAL, "fedavg", {"name": "perfed-ckt", "clusters": 3, "weight": 1.0}],
    seeds=[0, 1],
)
result = perfed.compare(comparison)
print(result.table())
print("figure:", result.plot())  # accuracy by round, and by parameters communicated

# Who gained, and who lost? A row per client and seed, of the last round.
frames = []
for run in result.results:
    frame = run.per_client()
    frame = frame[frame["round"] == frame["round"].max()]
    frames.append(frame.assign(method=run.experiment.algorithm.label(), seed=run.experiment.seed))
rows = pd.concat(frames).set_index(["seed", "client"])
by_method = {name: rows[rows["method"] == name] for name in (LOCAL, OURS)}
gain = 100 * (by_method[OURS]["test_accuracy"] - by_method[LOCAL]["test_accuracy"])

figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
axes.axhline(0, color="#999999")
axes.scatter(by_method[LOCAL]["train_size"], gain, color="#0072B2")
axes.set(xlabel="training samples of the client", ylabel="points above local training")
figure.savefig(result.path / "gains.png", dpi=150)
print("figure:", result.path / "gains.png")
print(f"{(gain > 0).sum()} clients gained, {(gain < 0).sum()} lost")
