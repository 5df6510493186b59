"""Every layer of torch.nn that classification networks use: stacked is what one client at a time
gives, values and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from perfed.core.randomness import addressed
from perfed.engines.stacked.stack import StackedModule

CLIENTS, BATCH, CLASSES = 3, 4, 5
Make = Callable[[], nn.Module]


class Flat(nn.Sequential):
    """Layers on pictures of 4×6×6, and a head."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers, nn.Flatten(), nn.LazyLinear(CLASSES))


class On(nn.Module):
    """Layers on the picture in another shape: 24 steps of 6 numbers, say."""

    def __init__(self, shape: tuple[int, ...], *layers: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(layers)
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Any = x.reshape(len(x), *self.shape)
        for layer in self.layers:
            y = layer(y)
            y = y[0] if isinstance(y, tuple) else y
        logits: Tensor = self.head(y.flatten(1))
        return logits


class Attention(nn.Module):
    """Over 24 steps of 6 numbers; ``how`` gives the options of the call."""

    def __init__(self, dropout: float = 0.0, **how: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(6, CLASSES)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        steps = x.reshape(len(x), 24, 6)
        how = dict(self.how)
        if how.pop("padding", False):
            how["key_padding_mask"] = steps[:, :, 0] > 1
        if how.pop("mask", False):
            how["attn_mask"] = torch.ones(24, 24, dtype=torch.bool, device=x.device).triu(1)
        seen, _ = self.attention(steps, steps, steps, **how)
        logits: Tensor = self.head((steps + seen).mean(1))
        return logits


class Scaled(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.project = nn.Linear(6, 18)
        self.head = nn.Linear(6, CLASSES)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x.reshape(len(x), 24, 6)).reshape(len(x), 24, 3, 2, 3)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        how = dict(self.how)
        if how.pop("mask", False):
            how["attn_mask"] = torch.zeros(24, 24, dtype=x.dtype, device=x.device).fill_diagonal_(1)
        if "dropout_p" in how and not self.training:
            how["dropout_p"] = 0.0
        seen = F.scaled_dot_product_attention(query, key, value, **how)
        logits: Tensor = self.head(seen.transpose(1, 2).flatten(2).mean(1))
        return logits


class Tokens(nn.Module):
    """Looks numbers up in a table."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x.flatten(1)[:, :20].abs() * 4).long().clamp(max=9))
        logits: Tensor = self.head(rows.mean(1) if rows.ndim == 3 else rows)
        return logits


class Residual(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.dense = dense
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(8 if dense else 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        y = torch.cat([x, y], 1) if self.dense else x + y
        logits: Tensor = self.head(y.mean((2, 3)))
        return logits


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(144, 144), nn.Linear(144, 144)
        self.second.weight = self.first.weight
        self.head = nn.Linear(144, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(x.flatten(1)).tanh()))
        return logits


class Counting(nn.Module):
    """Has a buffer that training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(144))
        self.layer = nn.Linear(144, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        logits: Tensor = self.layer(x - self.mean)
        return logits


class Noisy(nn.Module):
    """Noise on its input, and whole samples left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(144, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            x = x + torch.randn_like(x)
            x = x * (torch.rand(len(x), 1, device=x.device) > 0.3)
            x = x + x.new_empty(len(x), 1).bernoulli_(0.5) + torch.zeros_like(x).uniform_()
        logits: Tensor = self.layer(x)
        return logits


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Make:
    return lambda: On((24, 6), kind(6, 5, batch_first=True, **options))


LAYERS: dict[str, Make] = {
    "conv": lambda: Flat(nn.Conv2d(4, 6, 3)),
    "conv grouped": lambda: Flat(nn.Conv2d(4, 6, 3, groups=2)),
    "conv depthwise": lambda: Flat(nn.Conv2d(4, 8, 3, groups=4, padding=1)),
    "conv dilated": lambda: Flat(nn.Conv2d(4, 6, 3, dilation=2)),
    "conv strided": lambda: Flat(nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)),
    "conv 1×1": lambda: Flat(nn.Conv2d(4, 6, 1)),
    "conv 1×1 strided": lambda: Flat(nn.Conv2d(4, 6, 1, stride=2)),
    "conv same": lambda: Flat(nn.Conv2d(4, 6, 3, padding="same")),
    "conv circular": lambda: Flat(nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular")),
    "conv oblong": lambda: Flat(nn.Conv2d(4, 6, (1, 3), stride=(2, 1), padding=(0, 1))),
    "conv transposed": lambda: Flat(nn.ConvTranspose2d(4, 3, 3, stride=2)),
    "conv transposed grouped": lambda: Flat(nn.ConvTranspose2d(4, 4, 2, groups=2)),
    "conv 1d": lambda: On((4, 36), nn.Conv1d(4, 6, 5, stride=2)),
    "conv 1d transposed": lambda: On((4, 36), nn.ConvTranspose1d(4, 2, 3)),
    "conv 3d": lambda: On((1, 4, 6, 6), nn.Conv3d(1, 3, 3, padding=1)),
    "batch norm": lambda: Flat(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
    "batch norm plain": lambda: Flat(nn.BatchNorm2d(4, affine=False)),
    "batch norm cumulative": lambda: Flat(nn.BatchNorm2d(4, momentum=None)),
    "batch norm 1d": lambda: On((144,), nn.Linear(144, 8), nn.BatchNorm1d(8)),
    "batch norm 3d": lambda: On((2, 2, 6, 6), nn.BatchNorm3d(2)),
    "group norm": lambda: Flat(nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6)),
    "layer norm": lambda: On((24, 6), nn.LayerNorm(6), nn.Linear(6, 6)),
    "layer norm 2d": lambda: Flat(nn.LayerNorm([4, 6, 6])),
    "rms norm": lambda: On((24, 6), nn.RMSNorm(6)),
    "instance norm": lambda: Flat(nn.InstanceNorm2d(4, affine=True)),
    "instance norm tracked": lambda: Flat(nn.InstanceNorm2d(4, track_running_stats=True)),
    "response norm": lambda: Flat(nn.LocalResponseNorm(2)),
    "max pool": lambda: Flat(nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2)),
    "max pool 3/2": lambda: Flat(nn.Conv2d(4, 4, 1), nn.MaxPool2d(3, 2, padding=1)),
    "max pool ceil": lambda: Flat(nn.Conv2d(4, 4, 1), nn.MaxPool2d(4, 4, ceil_mode=True)),
    "max pool 1d": lambda: On((4, 36), nn.Conv1d(4, 4, 1), nn.MaxPool1d(3)),
    "max pool 3d": lambda: On((1, 4, 6, 6), nn.Conv3d(1, 2, 1), nn.MaxPool3d(2)),
    "average pool": lambda: Flat(nn.Conv2d(4, 4, 1), nn.AvgPool2d(3, 2, padding=1)),
    "adaptive average 1": lambda: Flat(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1)),
    "adaptive average 4": lambda: Flat(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d((4, 3))),
    "adaptive max": lambda: Flat(nn.Conv2d(4, 4, 1), nn.AdaptiveMaxPool2d(2)),
    "power pool": lambda: Flat(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.LPPool2d(2, 2)),
    "attention": lambda: Attention(),
    "attention unweighted": lambda: Attention(need_weights=False),
    "attention masked": lambda: Attention(need_weights=False, mask=True),
    "attention padded": lambda: Attention(padding=True),
    "attention dropout": lambda: Attention(0.3, need_weights=False),
    "attention dropout weighted": lambda: Attention(0.3),
    "scaled attention": lambda: Scaled(),
    "scaled attention causal": lambda: Scaled(is_causal=True),
    "scaled attention masked": lambda: Scaled(mask=True),
    "scaled attention dropout": lambda: Scaled(dropout_p=0.3),
    "transformer": lambda: On(
        (24, 6), nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
    ),
    "embedding": lambda: Tokens(nn.Embedding(10, 6)),
    "embedding padding": lambda: Tokens(nn.Embedding(10, 6, padding_idx=0)),
    "embedding bag": lambda: Tokens(nn.EmbeddingBag(10, 6)),
    "embedding bag max": lambda: Tokens(nn.EmbeddingBag(10, 6, mode="max")),
    "rnn": recurrent(nn.RNN),
    "rnn relu": recurrent(nn.RNN, nonlinearity="relu", bias=False),
    "gru": recurrent(nn.GRU),
    "gru two levels": recurrent(nn.GRU, num_layers=2, bidirectional=True, dropout=0.4),
    "lstm": recurrent(nn.LSTM),
    "lstm projected": recurrent(nn.LSTM, num_layers=2, proj_size=3, bidirectional=True),
    "lstm dropout": recurrent(nn.LSTM, num_layers=3, dropout=0.2),
    "dropout": lambda: Flat(nn.Dropout(0.4)),
    "dropout in place": lambda: Flat(nn.Conv2d(4, 4, 1), nn.Dropout(0.4, inplace=True)),
    "dropout 1d": lambda: On((4, 36), nn.Dropout1d(0.4)),
    "dropout 2d": lambda: Flat(nn.Dropout2d(0.4)),
    "dropout 3d": lambda: On((2, 2, 6, 6), nn.Dropout3d(0.4)),
    "dropout alpha": lambda: Flat(nn.AlphaDropout(0.4)),
    "dropout feature alpha": lambda: Flat(nn.FeatureAlphaDropout(0.4)),
    "dropout twice": lambda: Flat(nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.4)),
    "residual": lambda: Residual(dense=False),
    "dense": lambda: Residual(dense=True),
    "tied": Tied,
    "weight norm": lambda: On((144,), parametrizations.weight_norm(nn.Linear(144, 8))),
    "weight norm of all": lambda: Flat(parametrizations.weight_norm(nn.Conv2d(4, 4, 3), dim=-1)),
    "orthogonal": lambda: On((144,), parametrizations.orthogonal(nn.Linear(144, 8))),
    "buffer": Counting,
    "noise": Noisy,
    "activations": lambda: Flat(
        nn.PReLU(), nn.Softplus(), nn.Hardswish(), nn.Mish(), nn.ReLU6(), nn.CELU(), nn.SELU()
    ),
    "relu in place": lambda: Flat(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)),
    "gated": lambda: On((24, 6), nn.GLU(), nn.Softmax(-1), nn.LogSoftmax(-1)),
    "upsample": lambda: Flat(nn.Upsample(scale_factor=2, mode="bilinear"), nn.PixelUnshuffle(2)),
    "shuffle": lambda: Flat(nn.ChannelShuffle(2), nn.PixelShuffle(2), nn.ZeroPad2d(1)),
    "bilinear": lambda: Flat(nn.Unfold(3), nn.ConstantPad1d(1, 0.5)),
}


NOT_STACKED: dict[str, tuple[Make, str]] = {
    "batch norm untracked": (
        lambda: Flat(nn.BatchNorm2d(4, track_running_stats=False)),
        "in evaluation its output for a sample depends on other samples",
    ),
    "spectral norm": (
        lambda: On((144,), parametrizations.spectral_norm(nn.Linear(144, 8))),
        "Batching rule not implemented",
    ),
    "embedding that renormalises": (lambda: Tokens(nn.Embedding(10, 6, max_norm=1)), "max_norm"),
    "padding in a function": (
        lambda: Tokens(Looking()),
        "mapped over clients it gives other numbers",
    ),
    "random order": (lambda: Flat(Shuffling()), "it draws random numbers in a way"),
    "random slopes": (lambda: Flat(nn.RReLU()), "do not yet support aten::rrelu"),
}


class Looking(nn.Module):
    """As torch maps it, row 0 would learn."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(10, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.rows, padding_idx=0)


class Shuffling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, torch.randperm(x.shape[1])] if self.training else x


@pytest.mark.parametrize("name", NOT_STACKED)
def test_what_is_not_stacked_says_why_in_one_line(name: str) -> None:
    make, reason = NOT_STACKED[name]
    module = initialised(make, torch.float32, "cpu")
    obstacle = StackedModule(module, samples(torch.float32, "cpu")[0][0]).obstacle
    assert obstacle is not None
    assert reason in obstacle
    assert "\n" not in obstacle


def initialised(make: Make, dtype: torch.dtype, device: str) -> nn.Module:
    with torch.random.fork_rng([]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lazy layers
        torch.manual_seed(5)
        module = make().to(device, dtype)
        module.eval()(torch.zeros(2, 4, 6, 6, device=device, dtype=dtype))
    return module


def samples(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(CLIENTS, BATCH, 4, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (CLIENTS, BATCH), generator=generator)
    return x.to(device, dtype), y.to(device)


def own_tensors(module: nn.Module) -> list[dict[str, Tensor]]:
    """Of clients that differ."""
    generator = torch.Generator().manual_seed(9)

    def moved(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t.clone()
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return t.detach() * (1 + 0.2 * noise.abs().to(t))

    named = dict(module.named_parameters()) | dict(module.named_buffers())
    return [{name: moved(t) for name, t in named.items()} for _ in range(CLIENTS)]


def losses_and_gradients(
    run: Callable[[dict[str, Tensor], Tensor], Tensor],
    tensors: dict[str, Tensor],
    names: list[str],
    x: Tensor,
    y: Tensor,
) -> dict[str, Tensor]:
    """The logits, the gradients and the buffers afterwards."""
    attached = {n: t.clone().requires_grad_(n in names) for n, t in tensors.items()}
    tensors = {n: t if n in names else t.detach() for n, t in attached.items()}
    logits = run(tensors, x)
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide, y.flatten(), reduction="sum")
    found = torch.autograd.grad(loss, [attached[n] for n in names], materialize_grads=True)
    buffers = {n: t for n, t in tensors.items() if n not in names}
    return {"logits": logits.detach()} | dict(zip(names, found, strict=True)) | buffers


def compare(
    name: str, dtype: torch.dtype, device: str, tolerance: float, autocast: bool = False
) -> None:
    module = initialised(LAYERS[name], dtype, device)
    x, y = samples(dtype, device)
    stacked = StackedModule(module, x[0])
    if torch.__version__.startswith("2.4.") and "random" in str(stacked.obstacle):
        pytest.skip("this torch has no dropout in attention for a stack: one client at a time")
    assert stacked.obstacle is None
    clients = own_tensors(module)
    names = [n for n, _ in module.named_parameters()]
    keys = torch.arange(11, 11 + CLIENTS, device=device)
    for training in (True, False):

        def plain(tensors: dict[str, Tensor], x: Tensor, training: bool = training) -> Tensor:
            logits: Tensor = functional_call(module.train(training), tensors, (x,))
            return logits

        def mapped(tensors: dict[str, Tensor], x: Tensor, training: bool = training) -> Tensor:
            function = lambda t, x: stacked.outputs(training, "logits", t, x)  # noqa: E731
            logits: Tensor = vmap(function, randomness="different")(tensors, x)
            return logits

        # cuDNN has no gradients of recurrent layers in evaluation.
        without_cudnn = torch.backends.cudnn.flags(enabled=False)
        with without_cudnn, torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            each = []
            for k, tensors in enumerate(clients):
                with addressed(keys[k]):
                    each.append(losses_and_gradients(plain, tensors, names, x[k], y[k]))
            together = {n: torch.stack([one[n] for one in clients]) for n in clients[0]}
            with addressed(keys):
                at_once = losses_and_gradients(mapped, together, names, x, y)
        # In front of BatchNorm a bias has no gradient, only rounding.
        floor = max(
            1e-3, 0.05 * max(float(one.double().norm()) for one in at_once.values()) * autocast
        )
        for what, stack in at_once.items():
            reference = torch.stack([one[what] for one in each]).double()
            difference = (stack.double() - reference).norm()
            assert difference <= tolerance * (reference.norm() + floor), (what, training)


@pytest.mark.parametrize("name", LAYERS)
def test_a_stacked_layer_is_what_one_client_at_a_time_gives(name: str) -> None:
    compare(name, torch.float64, "cpu", 1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_a_stacked_layer_in_bf16_is_close_to_that(name: str) -> None:
    compare(name, torch.float32, "cpu", 0.1, autocast=True)
