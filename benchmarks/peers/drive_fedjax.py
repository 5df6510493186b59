"""fedjax: its federated_averaging and hyp_cluster, with networks written in haiku.

The variant ``tf32`` lets a GPU round to TF32, as jax by itself does; else nothing does.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from stand_ins import stand_in_for
from work import Arrays, Models, Work

PACKAGES = ["jax", "jaxlib", "dm-haiku", "numpy"]
STOOD_IN = ["the network is the comparison's, written in haiku, channels last"]


class Peer:
    def __init__(self, work: Work, variant: str, source: str) -> None:
        sys.path.insert(0, source)
        stand_in_for("requests")
        import fedjax
        import jax

        self.jax, self.work = jax, work
        rounded = "tensorfloat32" if variant == "tf32" else "float32"
        jax.config.update("jax_default_matmul_precision", rounded)
        self.shape = work.train[0][0].shape[1:]
        self.data = [
            fedjax.ClientDataset({"x": channels_last(x), "y": y.astype(np.int32)})
            for x, y in work.train
        ]
        batches = fedjax.ShuffleRepeatBatchHParams(
            batch_size=work.batch_size, num_steps=work.steps, num_epochs=None, seed=0
        )
        model = build_model(fedjax, work, self.data[0])
        sgd, keep = fedjax.optimizers.sgd(work.learning_rate), fedjax.optimizers.sgd(1.0)
        if work.algorithm == "fedavg":
            self.algorithm = fedjax.algorithms.fed_avg.federated_averaging(
                fedjax.model_grad(model), sgd, keep, batches
            )
            self.state = self.algorithm.init(self._initial(0))
        elif work.algorithm == "hypcluster":
            self.algorithm = fedjax.algorithms.hyp_cluster.hyp_cluster(
                fedjax.model_per_example_loss(model),
                sgd,
                keep,
                maximization_batch_hparams=fedjax.PaddedBatchHParams(batch_size=256),
                expectation_batch_hparams=batches,
            )
            self.state = self.algorithm.init([self._initial(n) for n in range(work.clusters)])
        else:
            raise NotImplementedError(f"fedjax has no {work.algorithm}")
        self.random = np.random.default_rng(0)
        self.rounds = 0
        self.cluster_of: dict[int, int] = {}

    def _initial(self, number: int) -> Any:
        return to_haiku(self.work.initial(number), self.shape)

    def round(self) -> None:
        jax, work = self.jax, self.work
        selected = self.random.choice(work.clients, work.clients_per_round, replace=False)
        keys = jax.random.split(jax.random.PRNGKey(self.rounds), len(selected))
        clients = [(int(k), self.data[k], key) for k, key in zip(selected, keys, strict=True)]
        self.state, said = self.algorithm.apply(self.state, clients)
        jax.block_until_ready(self.state)
        if work.algorithm == "hypcluster":
            self.cluster_of |= {k: int(said[k]["cluster_id"]) for k in said}
        self.rounds += 1

    def counted_round(self) -> int:
        self.round()
        return self.work.clients_per_round * self.work.steps  # told as num_steps

    def models(self) -> Models:
        if self.work.algorithm == "hypcluster":
            clusters = [from_haiku(params, self.shape) for params in self.state.cluster_params]
            return {"personal": [clusters[self.cluster_of[k]] for k in range(self.work.clients)]}
        return {"global": [from_haiku(self.state.params, self.shape)]}

    def close(self) -> None:
        pass


def device_memory(work: Work) -> int | None:
    if work.device == "cpu":
        return None
    import jax

    return int(jax.devices()[0].memory_stats()["peak_bytes_in_use"])


def channels_last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x


def build_model(fedjax: Any, work: Work, sample: Any) -> Any:
    import haiku as hk
    import jax

    def cnn(batch: Any) -> Any:
        x = batch["x"]
        for name, channels in (("0", 32), ("3", 64)):
            x = jax.nn.relu(hk.Conv2D(channels, 5, padding="VALID", name=f"layer{name}")(x))
            x = hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(hk.Linear(512, name="layer7")(hk.Flatten()(x)))
        return hk.Linear(work.classes, name="layer9")(x)

    def mlp(batch: Any) -> Any:
        x = jax.nn.relu(hk.Linear(64, name="layer0")(batch["x"]))
        return hk.Linear(work.classes, name="layer2")(x)

    def loss(batch: Any, logits: Any) -> Any:
        chosen = jax.nn.log_softmax(logits)
        return -jax.numpy.take_along_axis(chosen, batch["y"][:, None], axis=-1)[:, 0]

    network = hk.transform({"Cnn": cnn, "Mlp": mlp}[work.network])
    batch = {name: array[:1] for name, array in sample.all_examples().items()}
    return fedjax.create_model_from_haiku(network, batch, loss)


def to_haiku(arrays: Arrays, shape: tuple[int, ...]) -> dict[str, Arrays]:
    """torch's parameters in haiku's order of dimensions."""
    layers: dict[str, Arrays] = {}
    for name, array in arrays.items():
        number, kind = name.split(".")
        if kind == "weight":
            array = _weight_to_haiku(array, number, shape)
        layers.setdefault(f"layer{number}", {})[{"weight": "w", "bias": "b"}[kind]] = array
    return layers


def from_haiku(layers: Any, shape: tuple[int, ...]) -> Arrays:
    found = {}
    for layer, arrays in layers.items():
        number = layer.removeprefix("layer")
        found[f"{number}.weight"] = _weight_from_haiku(np.asarray(arrays["w"]), number, shape)
        found[f"{number}.bias"] = np.asarray(arrays["b"])
    return found


def _side(shape: tuple[int, ...]) -> int:
    """Of the pictures that the first linear layer of the CNN sees."""
    return ((shape[1] - 4) // 2 - 4) // 2


def _weight_to_haiku(array: np.ndarray, number: str, shape: tuple[int, ...]) -> np.ndarray:
    if array.ndim == 4:
        return np.ascontiguousarray(array.transpose(2, 3, 1, 0))
    if number == "7":  # flattened with channels first there, last here
        side = _side(shape)
        array = array.reshape(len(array), -1, side, side).transpose(0, 2, 3, 1)
        array = array.reshape(len(array), -1)
    return np.ascontiguousarray(array.T)


def _weight_from_haiku(array: np.ndarray, number: str, shape: tuple[int, ...]) -> np.ndarray:
    if array.ndim == 4:
        return array.transpose(3, 2, 0, 1)
    array = array.T
    if number == "7":
        side = _side(shape)
        array = array.reshape(len(array), side, side, -1).transpose(0, 3, 1, 2)
        array = array.reshape(len(array), -1)
    return array
