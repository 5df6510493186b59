"""The shortest way: one experiment, its table, one client's model.

python examples/quickstart.py    a few seconds
"""

import torch

import perfed

experiment = perfed.Experiment(
    rounds=15,
    clients=12,
    clients_per_round=6,
    training={"learning_rate": 0.1},
    algorithm={"name": "perfed-ckt", "clusters": 3, "weight": 1.0},
)
result = perfed.run(experiment)
print(result.table())

model = result.model(client=0)  # an nn.Module in evaluation mode
print(
    "client 0 on a blank image:",
    model(torch.zeros(1, 1, 8, 8)).softmax(1).detach().numpy().round(2),
)
print("everything is in", result.path)
