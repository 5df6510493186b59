import numpy as np
import pytest
import torch
from torch import nn

from perfed.core.errors import ConfigError
from perfed.models import Models, architectures, build_module, initial_weights


def parameters(name: str, shape: tuple[int, ...] = (3, 32, 32)) -> int:
    return sum(p.numel() for p in architectures.build(name).build(shape, 10).parameters())


def test_vgg11_is_the_papers() -> None:
    """Its cost column has 9.75 million: the CIFAR classifier, not torchvision's."""
    assert parameters("vgg11-bn") == 9_756_426
    assert parameters("vgg11") == 9_750_922
    extra = 3 * 3 * 64 * 64 + 64 + 3 * 3 * 128 * 128 + 128  # VGG13's two further convolutions
    assert parameters("vgg13") == 9_750_922 + extra
    assert parameters("vgg13-bn") == parameters("vgg13") + 2 * (
        2 * 64 + 2 * 128 + 2 * 256 + 4 * 512
    )


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 8, 8), (1, 32, 32)])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_networks_fit_the_usual_images(name: str, shape: tuple[int, ...]) -> None:
    build_module(architectures.build(name), shape, 10)


def test_the_papers_cnn() -> None:
    module = architectures.build("cnn").build((3, 32, 32), 10)
    widths = [layer.out_features for layer in module if isinstance(layer, nn.Linear)]
    assert widths == [120, 100, 84, 50, 10]
    assert sum(isinstance(layer, nn.Conv2d) for layer in module) == 2
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in module) == 2


@pytest.mark.parametrize("name", ["vgg11", "vgg13-bn"])
def test_vgg_runs_and_says_what_it_needs(name: str) -> None:
    build_module(architectures.build(name), (1, 32, 32), 7)
    with pytest.raises(ConfigError, match=f"'{name}' needs images of at least 32×32; .* 1×28×28"):
        build_module(architectures.build(name), (1, 28, 28), 10)


class WrongWidth(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, classes + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))


def test_a_users_own_module_is_checked() -> None:
    own = architectures.build(f"{__name__}:WrongWidth")
    with pytest.raises(ConfigError, match=r"gives 11 numbers .* data has 10 classes"):
        build_module(own, (1, 8, 8), 10)
    with pytest.raises(ConfigError, match="cannot take"):
        build_module(own, (1, 9, 9), 10)


def test_larger_models_are_likelier_for_larger_datasets() -> None:
    sizes = np.repeat([0, 50, 100], 2000)
    models = Models(architectures=("mlp", "cnn"))
    dealt = np.array([a.registered_name == "cnn" for a in models.deal(sizes, 0)])
    shares = dealt.reshape(3, 2000).mean(axis=1)
    assert shares == pytest.approx([0, 0.5, 1], abs=0.04)


def test_an_explicit_list() -> None:
    models = Models(architectures=("mlp", "cnn"), assign="list", per_client=(1, 0, 1))
    names = [a.registered_name for a in models.deal(np.array([5, 6, 7]), 0)]
    assert names == ["cnn", "mlp", "cnn"]
    with pytest.raises(ConfigError, match="3 entries for 2 clients"):
        models.deal(np.array([5, 6]), 0)
    with pytest.raises(ConfigError, match="position 2 of 2"):
        Models(architectures=("mlp", "cnn"), assign="list", per_client=(2,))


def test_initial_weights_depend_on_the_address_alone() -> None:
    mlp = architectures.build("mlp")
    torch.manual_seed(1)
    first = initial_weights(mlp, (4,), 3, seed=0).params
    torch.manual_seed(2)
    again = initial_weights(mlp, (4,), 3, seed=0).params
    other = initial_weights(mlp, (4,), 3, seed=0, client=5).params
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["1.weight"], other["1.weight"])


def test_labels_tell_architectures_apart() -> None:
    labels = [
        architectures.build(spec).label()
        for spec in ("mlp", {"name": "mlp", "hidden": [3, 4]}, {"name": "cnn", "batchnorm": True})
    ]
    assert labels == ["mlp", "mlp(hidden=3-4)", "cnn(batchnorm=True)"]
