"""Where there is a GPU, every algorithm gives there what it gives on the CPU."""

import functools
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import perfed
from perfed import Execution
from perfed.core.algorithm import Client
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.core.pixels import numbers
from perfed.core.schema import from_mapping
from perfed.engines.precision import PRECISIONS
from perfed.engines.stacked import StackedEngine, hopper
from perfed.engines.stacked.layers import Tensors
from perfed.engines.stacked.plan import plan_of
from perfed.engines.stacked.stack import StackedModule
from perfed.models.pictures import Added, _inception, _inverted, _normed
from perfed.runs.simulation import Simulation
from tests.conftest import MLP_50, spec, tiny
from tests.engines.test_layers import LAYERS, compare
from tests.engines.test_pixels import experiment as pictures
from tests.engines.test_pixels import written
from tests.engines.test_sequences import GRU, PHRASES, SENSORS, TOKEN
from tests.engines.test_sequences import experiment as sequences
from tests.engines.test_training import BASE
from tests.engines.test_training import SETTINGS as TRAININGS
from tests.engines.test_vendor import SHAPES as CONVOLUTIONS
from tests.engines.test_vendor import by_pytorch, by_vendor, leaves
from tests.methods import CASES as METHODS
from tests.methods import case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def losses(device: str, engine: str, **changes: Any) -> list[float]:
    """The test losses of all clients after three rounds."""
    return losses_of(tiny(**changes), device=device, engine=engine)


def losses_of(experiment: perfed.Experiment, **how: str) -> list[float]:
    simulation = Simulation(experiment, how=from_mapping(Execution, how))
    channel = Channel()
    simulation.begin(channel)
    for round in range(3):
        simulation.play_round(round, channel)
    if isinstance(simulation.engine, StackedEngine):
        assert all(module.obstacle is None for module in simulation.engine._modules.values())
    messages = simulation.evaluation_messages(3)
    columns = simulation.population.evaluate(messages, 3)
    return [value for kind in columns.values() for value in kind["test_loss"].tolist()]


def of_preset(name: str) -> perfed.Experiment:
    """The last of its algorithms."""
    comparison = perfed.load(name)
    assert isinstance(comparison, perfed.Comparison)
    return comparison.experiments()[-1]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float64", "bf16"])
def test_a_stacked_layer_is_what_one_client_at_a_time_gives(name: str, autocast: bool) -> None:
    # On a GPU torch's weight norm computes in float32 even here.
    exact = 1e-6 if name == "weight norm" else 1e-10
    dtype, tolerance = (torch.float32, 0.1) if autocast else (torch.float64, exact)
    compare(name, dtype, "cuda", tolerance, autocast)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_pictures_that_stay_bytes_are_the_same_on_the_gpu(engine: str, tmp_path: Path) -> None:
    """To the bit, as those that are numbers from the beginning."""
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(numbers(every.cuda()).cpu(), numbers(every))
    found = [
        losses_of(pictures(data), device="cuda", engine=engine)
        for data in written(tmp_path).values()
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("model", ["WithDropout", "Dropping"])
def test_masks_are_the_same_on_every_engine_and_device(model: str) -> None:
    models = [f"tests.engines.test_stacked:{model}"]
    expected = losses("cpu", "sequential", models=models)
    for engine in ("sequential", "stacked"):
        assert losses("cuda", engine, models=models) == pytest.approx(expected, rel=1e-3)


SEQUENCES = {
    "gru": sequences(SENSORS, GRU),
    "token-mean and token-gru": sequences(PHRASES, TOKEN),
    "sensors-placements": of_preset("sensors-placements"),
    "phrases-languages": of_preset("phrases-languages"),
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_sequences_and_tokens_on_the_gpu(name: str, engine: str) -> None:
    expected = losses_of(SEQUENCES[name], device="cpu", engine="sequential")
    found = losses_of(SEQUENCES[name], device="cuda", engine=engine)
    assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_and_tokens_in_bf16(name: str) -> None:
    """Rounding moves every client's loss a little, and their mean hardly."""
    exact = np.array(losses_of(SEQUENCES[name], device="cuda", engine="sequential"))
    for engine in ("sequential", "stacked"):
        how = {"device": "cuda", "engine": engine, "precision": "bf16"}
        rounded = np.array(losses_of(SEQUENCES[name], **how))
        np.testing.assert_allclose(rounded, exact, rtol=0.05)
        np.testing.assert_allclose(rounded.mean(), exact.mean(), rtol=0.01)


@pytest.mark.parametrize("algorithm", ["perfed-ckt", "perfed-kin", "fedfomo"])
def test_a_run_resumes_on_the_gpu(algorithm: str, tmp_path: Path) -> None:
    class Stop(perfed.Callback):
        def on_round(self, report: perfed.runs.RoundReport) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perfed.run(
            tiny(algorithm=algorithm),
            tmp_path / "run",
            callbacks=[Stop()],
            how=Execution(device="cuda", checkpoint_seconds=0),
        )
    assert perfed.resume(tmp_path / "run", how=Execution(device="cuda")).summary["finished"]


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("name", list(perfed.algorithms))
def test_the_same_numbers_on_the_gpu(name: str, engine: str) -> None:
    changes = {"algorithm": spec(name), "models": [MLP_50, {"name": "cnn", "batchnorm": True}]}
    expected = losses("cpu", "sequential", **changes)
    assert losses("cuda", engine, **changes) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", TRAININGS)
def test_the_same_training_on_the_gpu(name: str) -> None:
    """Every optimizer, by steps and by epochs, with and without augmentation."""
    changes = {"models": ["mlp", "cnn"], "training": BASE | TRAININGS[name]}
    expected = losses("cpu", "sequential", **changes)
    assert losses("cuda", "stacked", **changes) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_methods_on_the_gpu(name: str) -> None:
    """Features, heads, and two networks at once."""
    expected = losses("cpu", "sequential", **case(name))
    assert losses("cuda", "stacked", **case(name)) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("name", TRAININGS)
def test_in_bf16_with_its_own_kernels_it_stays_finite(name: str) -> None:
    how = Execution(device="cuda", engine="stacked", precision="bf16")
    data = {"name": "npz", "path": str(noise()), "public": 0}
    simulation = Simulation(
        tiny(
            data=data,
            models=["vgg11-bn"],
            partition="iid",
            training=BASE | {"learning_rate": 1e-3} | TRAININGS[name],
        ),
        how=how,
    )
    channel = Channel()
    simulation.begin(channel)
    simulation.play_round(0, channel)  # ends with an error where a number is not finite
    kept = simulation.records.values()
    assert all(t.isfinite().all() for record in kept for t in record.weights.params.values())


@functools.cache
def noise() -> Path:
    """Images that show nothing, in a file."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (600, 3, 32, 32), dtype=np.uint8)
    path = Path(tempfile.mkdtemp()) / "noise.npz"
    np.savez(path, x=images[:500], y=random.integers(0, 10, 500), public=images[500:])
    return path


class Drawing(perfed.Algorithm):
    """Draws on its device after a request, from the client's own stream."""

    def client_round(self, client: Client, message: Message) -> Message:
        said = client.soft_decisions()
        client.state = {"noise": torch.rand(2, device=said.device)}
        return Message()


def test_clients_draw_on_the_gpu_from_their_own_streams() -> None:
    drawn = {}
    for engine in ("sequential", "stacked"):
        experiment = tiny(algorithm="local")
        object.__setattr__(experiment, "algorithm", Drawing())
        simulation = Simulation(experiment, how=Execution(device="cuda", engine=engine))  # type: ignore[arg-type]
        simulation.play_round(0, Channel())
        records = simulation.population.records
        drawn[engine] = {client: records[client].state["noise"].tolist() for client in records}
    assert drawn["stacked"] == drawn["sequential"]


def test_no_steps_leave_a_model_as_it_is_on_the_gpu() -> None:
    experiment = tiny(algorithm={"name": "per-fedavg", "adaptation_steps": 0})
    simulation = Simulation(experiment, how=Execution(device="cuda", engine="stacked"))
    simulation.begin(Channel())
    evaluated = simulation.population.models(0, simulation.evaluation_messages(0)[0], 0)
    adapted, model = (evaluated[kind].params for kind in ("personal", "global"))  # type: ignore[union-attr]
    assert all(torch.equal(adapted[name], model[name]) for name in model)


def test_the_kernels_give_what_pytorch_gives() -> None:
    """VGG's layers in bf16, forward and backward, to what bf16 can tell apart."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("there are kernels for Hopper GPUs only")
    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(3, 64, 3, padding=1),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(64, 128, 3, padding=1),
        torch.nn.BatchNorm2d(128),
        torch.nn.ReLU(),
    ]
    module = torch.nn.Sequential(*layers).cuda().train()
    plan = plan_of(module)
    assert plan is not None
    stacked = {
        name: torch.stack([t.detach(), t.detach()])
        for name, t in (*module.named_parameters(), *module.named_buffers())
    }
    weight = stacked["0.weight"].requires_grad_()
    x = torch.randn(2, 64, 3, 32, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        fast = plan.run(Tensors(stacked), x)
    (found,) = torch.autograd.grad(fast.float().square().mean(), weight)
    plain = torch.stack([module(images) for images in x])
    (wanted,) = torch.autograd.grad(plain.square().mean(), module[0].weight)
    torch.testing.assert_close(fast.float(), plain, rtol=0.05, atol=0.05)
    assert (found.sum(0) - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("tf32", 2e-3)])
def test_the_vendors_convolutions(name: str, precision: str, tolerance: float) -> None:
    """In single precision; float32 is no tf32."""
    exact = leaves(CONVOLUTIONS[name])
    plain = by_pytorch(name, *exact)
    weigh = torch.randn_like(plain)
    wanted = [plain, *torch.autograd.grad((plain * weigh).sum(), exact)]
    on_gpu = [t.detach().float().cuda().requires_grad_() for t in exact]
    with PRECISIONS[precision].active(torch.device("cuda")):
        fast = by_vendor(name, *on_gpu)
        found = [fast, *torch.autograd.grad((fast * weigh.float().cuda()).sum(), on_gpu)]
    for one, other in zip(found, wanted, strict=True):
        assert (one.double().cpu() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_run_on_the_gpu_can_be_repeated(precision: str) -> None:
    """To the bit."""
    data = {"name": "npz", "path": str(noise()), "public": 0}
    training = {"steps": 3, "batch_size": 16, "public_batch_size": 16, "learning_rate": 0.01}
    networks = ["resnet4", "mobilenet-v2"]
    experiment = tiny(data=data, models=networks, partition="iid", training=training)
    how = {"device": "cuda", "engine": "stacked", "precision": precision}
    assert losses_of(experiment, **how) == losses_of(experiment, **how)


def test_weight_gradients_beside_the_others_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: a stream that does not wait for another would show."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("there are kernels for Hopper GPUs only")
    data = {"name": "npz", "path": str(noise()), "public": 0}
    training = {"steps": 20, "batch_size": 32, "public_batch_size": 32, "learning_rate": 0.01}
    networks = ["resnet10", "mobilenet-v2", "vgg11-bn"]
    experiment = tiny(data=data, models=networks, partition="iid", training=training)
    how = {"device": "cuda", "engine": "stacked", "precision": "bf16"}
    beside = losses_of(experiment, **how)
    monkeypatch.setattr(hopper, "weight_gradients_beside", lambda loss: None)
    assert losses_of(experiment, **how) == beside


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_transformer_gives_what_one_client_at_a_time_gives(precision: str) -> None:
    """With the kernels for linear layers, LayerNorm and, in bf16, attention."""
    torch.manual_seed(0)
    module = perfed.architectures.build("vit").build((3, 32, 32), 10).cuda()
    plan = plan_of(module)
    assert plan is not None
    stacked = {
        name: torch.stack([t.detach() * factor for factor in (1.0, 1.1)]).requires_grad_()
        for name, t in module.named_parameters()
    }
    x, weigh = torch.randn(2, 8, 3, 32, 32).cuda(), torch.randn(2, 8, 10).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        fast = plan.run(Tensors(stacked), x)
    each = [
        functional_call(module, {name: t[k] for name, t in stacked.items()}, (x[k],))
        for k in range(2)
    ]
    plain = torch.stack(each)
    bound = 0.03 if precision == "bf16" else 5e-3  # autocast itself is off by 0.01
    assert (fast.float() - plain).norm() < bound * plain.norm()
    found = torch.autograd.grad((fast.float() * weigh).sum(), list(stacked.values()))
    wanted = torch.autograd.grad((plain * weigh).sum(), list(stacked.values()))
    for name, a, b in zip(stacked, found, wanted, strict=True):
        assert (a - b).norm() < bound * b.norm(), name


BLOCKS: dict[str, Callable[[], list[nn.Module]]] = {
    "inception": lambda: [_inception(64, 32, 32, 48, 16, 32, 16), nn.MaxPool2d(3, 2, padding=1)],
    "inverted": lambda: [_inverted(64, 64, 6, 1), _inverted(64, 96, 6, 2)],
    "residual": lambda: [Added(nn.Sequential(*_normed(64, 64, 3)), nn.Identity()), nn.ReLU()],
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_kernels_give_what_pytorch_gives_where_paths_part_and_meet(name: str) -> None:
    """bf16 alone makes a tenth of difference in these gradients, a lost one much more."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("there are kernels for Hopper GPUs only")
    torch.manual_seed(0)
    module = nn.Sequential(*_normed(3, 64, 3), nn.ReLU(), *BLOCKS[name]()).cuda().train()
    plan = plan_of(module)
    assert plan is not None
    stacked = {
        name: torch.stack([t.detach(), t.detach()])
        for name, t in (*module.named_parameters(), *module.named_buffers())
    }
    kernels = {name: t for name, t in module.named_parameters() if t.ndim == 4}
    leaves = [stacked[name].requires_grad_() for name in kernels]
    x = torch.randn(2, 16, 3, 16, 16, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        fast = plan.run(Tensors(stacked), x).float()
    plain = torch.stack([module(images) for images in x])
    assert (fast - plain).norm() < 0.05 * plain.norm()
    weigh = torch.randn_like(plain)
    found = torch.autograd.grad((fast * weigh).sum(), leaves)
    wanted = torch.autograd.grad((plain * weigh).sum(), [*kernels.values()])
    for own, other in zip(found, wanted, strict=True):
        assert (own.sum(0) - other).norm() < 0.3 * other.norm()


@pytest.mark.parametrize("name", ["vgg11-bn", "vgg13", "cnn"])
def test_the_papers_networks_are_mapped_on_the_gpu(name: str) -> None:
    """cuDNN's convolutions are coarse by default: that must not look like an obstacle."""
    module = perfed.architectures.build(name).build((3, 32, 32), 10).cuda()
    images = torch.randn(4, 3, 32, 32, device="cuda")
    assert StackedModule(module, images).obstacle is None


@pytest.mark.parametrize("algorithm", ["perfed-ckt", "perfed-evidence"])
def test_a_ray_worker_on_the_gpu_gives_what_stacked_gives(algorithm: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    models = ["mlp", {"name": "cnn", "batchnorm": True}]
    spec = {"name": algorithm, "clusters": 2} if algorithm == "perfed-ckt" else algorithm
    found = {}
    for engine, workers in (("stacked", 0), ("ray", 1)):
        how = Execution(device="cuda", engine=engine, workers=workers)
        result = perfed.run(tiny(algorithm=spec, models=models), tmp_path / engine, how=how)
        found[engine] = result.per_client()["test_loss"].tolist()
    assert found["ray"] == pytest.approx(found["stacked"], rel=1e-6)


def test_clients_beyond_the_memory_of_the_gpu_take_turns(caplog: pytest.LogCaptureFixture) -> None:
    """With half of the memory that all of them took at once: gigabytes, beside which what libraries
    keep for themselves is little."""
    data = {"name": "npz", "path": str(noise()), "public": 0}
    training = {"steps": 2, "batch_size": 512, "learning_rate": 0.01}
    work: dict[str, Any] = {"algorithm": "fedavg", "models": ["vgg11-bn"], "partition": "iid"}
    work |= {"data": data, "training": training, "clients_per_round": 6}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    whole = losses("cuda", "stacked", **work)
    share = torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share / 2)
    try:
        limited = losses("cuda", "stacked", **work)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    np.testing.assert_allclose(limited, whole, rtol=1e-3, atol=1e-3)
    assert "they take turns" in caplog.text
