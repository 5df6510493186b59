"""Clients with different networks, which learn from each other all the same.

python examples/heterogeneous_models.py    a few seconds
"""

import perfed

experiment = perfed.Experiment(
    name="heterogeneous",
    rounds=15,
    clients=12,
    clients_per_round=6,
    models={
        "architectures": [
            {"name": "mlp", "hidden": [32]},
            {"name": "mlp", "hidden": [128]},
            {"name": "cnn", "batchnorm": True},
        ],
        "assign": "list",  # without this, clients with more data get a larger one, by chance
        "per_client": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2],
    },
    training={"learning_rate": 0.1},
    algorithm={"name": "perfed-ckt", "clusters": 3, "weight": 1.0},
)
result = perfed.run(experiment)

clients = result.per_client()
last = clients[clients["round"] == clients["round"].max()]
print("test accuracy by network:")
print(last.groupby("architecture")["test_accuracy"].agg(["mean", "count"]).round(3))

traffic = result.summary["traffic"]
crossed = traffic["up_parameters"] + traffic["down_parameters"]
largest = max(sum(p.numel() for p in result.model(c).parameters()) for c in range(12))
print(f"{crossed:,} numbers crossed in all; the largest network has {largest:,} parameters,")
print(f"so sending it up and down instead would have been {2 * 6 * 15 * largest:,}")
