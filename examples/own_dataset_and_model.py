"""Your own data and your own network: a table of numbers, not images.

    python examples/own_dataset_and_model.py    a few seconds

Both are named by where they are, here this very file; "my_package.my_module:WithSkip" does, too.
"""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import perfed
from perfed.core.schema import option
from perfed.data.datasets import Dataset, Samples, hold_out_public


@dataclass(frozen=True)
class BreastCancer(Dataset):
    """scikit-learn's 569 tumours, 30 measurements each, benign or malignant."""

    public: int = option(100, "how many are held out as the unlabeled public set", ge=0)

    def load(self, seed: int) -> Samples:
        x, y = load_breast_cancer(return_X_y=True)
        x = (x - x.mean(0)) / x.std(0)
        return hold_out_public(x.astype(np.float32), y.astype(np.int64), self.public, seed)


class WithSkip(nn.Module):
    """Called with the shape of a sample and the number of classes."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        (features,) = shape
        self.hidden = nn.Sequential(nn.Linear(features, 24), nn.ReLU())
        self.out = nn.Linear(24 + features, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.cat([self.hidden(x), x], dim=1))
        return logits


if __name__ == "__main__":
    experiment = perfed.Experiment(
        name="tumours",
        rounds=10,
        clients=20,
        clients_per_round=8,
        data={"name": f"{__file__}:BreastCancer", "public": 100},
        partition={"name": "dirichlet", "alpha": 0.5, "minimum": 10},
        models={"architectures": [f"{__file__}:WithSkip"]},
        algorithm={"name": "perfed-ckt", "clusters": 1, "weight": 1.0},
    )
    print(perfed.run(experiment).table())
