from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import perfed
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
    for side in (16, 28, 31, 32, 48):
        build_module(architectures.build(name), (1, side, side), 7)
    with pytest.raises(ConfigError, match=f"'{name}' needs images of at least 16×16; .* 1×8×8"):
        build_module(architectures.build(name), (1, 8, 8), 10)


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


class Fixed(nn.Module):
    """For one shape of data and three classes: it takes no arguments."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Lazy(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.LazyLinear(classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def makes_three(input_shape: tuple[int, ...] = (4,), classes: int = 9) -> nn.Module:
    return nn.Linear(input_shape[0], classes)


BUILT = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    "given",
    [f"{__name__}:Fixed", Fixed, Lazy, makes_three, BUILT, f"{__name__}:BUILT", nn.Linear(4, 3)],
)
def test_a_users_own_module_in_every_way_it_can_be_given(given: object) -> None:
    (architecture,) = Models.expand(given)["architectures"]
    architecture = architectures.build(architecture)
    build_module(architecture, (4,), 3)
    weights = initial_weights(architecture, (4,), 3, seed=0)
    again = initial_weights(architecture, (4,), 3, seed=0)
    other = initial_weights(architecture, (4,), 3, seed=0, client=1)
    for name, tensor in weights.params.items():
        assert torch.equal(tensor, again.params[name])
    assert any(not torch.equal(t, other.params[n]) for n, t in weights.params.items())


def test_the_same_file_in_another_folder_begins_with_the_same_weights(tmp_path: Path) -> None:
    """Sites agree on initial weights, wherever each keeps its files."""
    found = []
    for folder in ("north", "south"):
        path = tmp_path / folder / "net.py"
        path.parent.mkdir()
        path.write_text(
            "from torch import nn\n\n\nclass Net(nn.Linear):\n"
            "    def __init__(self):\n        super().__init__(4, 3)\n"
        )
        net = architectures.build(f"{path}:Net")
        found.append(initial_weights(net, (4,), 3, seed=0).params["weight"])
    assert torch.equal(*found)


def test_a_built_module_starts_as_it_was_built() -> None:
    weights = initial_weights(architectures.build(BUILT), (4,), 3, seed=7)
    for name, parameter in BUILT.named_parameters():
        assert torch.equal(weights.params[name], parameter)
    assert architectures.build(BUILT) == architectures.build(BUILT)
    same_form = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    assert architectures.build(same_form).label() != architectures.build(BUILT).label()


class Gives(nn.Module):
    """Something that is no row of logits for each sample."""

    def __init__(self, what: object) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.what = what

    def forward(self, x: torch.Tensor) -> object:
        return self.what(self.layer(x)) if callable(self.what) else self.what


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def raises(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    raise RuntimeError("no weights\nfound")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Linear(4, 5), "gives 5 numbers for one sample, but the data has 3 classes: its last"),
        (nn.Linear(5, 3), "mat1 and mat2 shapes cannot be multiplied (2x4 and 5x3)"),
        (Gives((1, 2)), "gives a tuple: it must give a tensor, 3 numbers"),
        (Gives(torch.sum), "gives a tensor of shape () for 2 samples: it must give a row of 3"),
        (Gives(lambda z: z[:, 0]), "gives a tensor of shape (2,) for 2 samples"),
        (Gives(lambda z: z.missing), "cannot take samples of shape 4: 'Tensor' object has no"),
        (nn.Identity(), "gives 4 numbers"),
        (raises, "raises(input_shape=(4,), classes=3) failed: RuntimeError: no weights"),
        (lambda shape, classes: 3, "made a int, not an nn.Module"),
        (nn.Linear(4, 3).requires_grad_(False), "has no parameters to train"),
        (f"{__name__}:__name__", "is neither an nn.Module nor makes one"),
    ],
)
def test_a_module_that_does_not_fit_is_one_line(given: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_module(architectures.build(given), (4,), 3)
    assert message in str(caught.value)
    assert str(caught.value).startswith("models: ")


def test_a_built_module_that_cannot_be_drawn_anew_says_so() -> None:
    architecture = architectures.build(NoReset())
    initial_weights(architecture, (4,), 3, seed=0)
    with pytest.raises(ConfigError, match=r"no reset_parameters\(\) .* give its class instead"):
        initial_weights(architecture, (4,), 3, seed=0, number=1)


def test_shares_are_kept_to_the_client() -> None:
    models = Models(architectures=("mlp", "cnn", "vgg11"), assign="shares", shares=(0.5, 0.3, 0.2))
    for clients in range(1, 40):
        dealt = [a.registered_name for a in models.deal(np.ones(clients), clients)]
        for name, share in zip(("mlp", "cnn", "vgg11"), (0.5, 0.3, 0.2), strict=True):
            assert abs(dealt.count(name) - share * clients) < 1
    one, other = ([a.label() for a in models.deal(np.ones(20), seed)] for seed in (0, 1))
    assert one != other
    for wrong, message in (
        ({"shares": (0.5, 0.5)}, "given, but assign is not 'shares'"),
        ({"assign": "shares", "shares": (0.5,)}, "1 for 2 architectures: must be one for each"),
        ({"assign": "shares", "shares": (0.5, 0.6)}, "sum to 1.1: must sum to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Models(architectures=("mlp", "cnn"), **wrong)


class Spoils(nn.Module):
    """Changes its input, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.last = way, nn.Linear(4, 3)
        self.first: nn.Module = nn.Dropout(inplace=True) if way == "dropout" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "zero":
            x.zero_()
        elif self.way == "relu":
            x.view(-1).relu_()
        elif self.way == "noise" and self.training:
            x += 0.1
        elif self.way == "data":
            x.data.add_(1)
        elif self.way == "copy":
            x = x.clone().zero_()
        out: torch.Tensor = self.last(self.first(x))
        return out


@pytest.mark.attack(66)
@pytest.mark.parametrize("way", ["zero", "relu", "noise", "data", "dropout"])
def test_a_network_that_changes_its_input_is_refused(way: str) -> None:
    models = perfed.Experiment(models=Spoils(way)).models
    with pytest.raises(ConfigError, match=r"models: .* changes its input in place, the clients'"):
        build_module(models.architectures[0], (4,), 3)


def test_a_network_may_change_a_copy() -> None:
    build_module(perfed.Experiment(models=Spoils("copy")).models.architectures[0], (4,), 3)
