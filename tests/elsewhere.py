"""A GPU that is not there, for machines without one.

It computes on the CPU, and refuses what a GPU refuses: an operation on tensors of which some are
there and others are not. (A number may be anywhere, and positions may be on the CPU.) So a tensor
that was made on the wrong device is found by every test run, and not by the first user with a GPU.
What it cannot tell: kernels, CUDA graphs, precision, time. ``engines/test_cuda.py`` is for these.

Torch keeps a device for a backend of one's own (``PrivateUse1``), and its operations can be written
in Python. That cannot be undone, so whoever does so needs a process of its own:

    python tests/elsewhere.py '[["a name", "stacked", {"algorithm": "fedavg"}], …]'

runs each of these experiments here and there, and prints what came out as JSON. In the place of an
engine there may be "sites": these have the device, and their coordinator has none.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

NAME = "elsewhere"
aten = torch.ops.aten
CROSS = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
TAKE_POSITIONS = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class There(Tensor):
    """A tensor on the device. What it holds is on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        there: There = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        return there

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return performed(operation, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"There({self.held!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> There:
        memo[id(self)] = copied = There(self.held.clone())
        copied.requires_grad_(self.requires_grad)
        return copied

    def __getitem__(self, at: Any) -> Tensor:
        return super().__getitem__(torch.tensor(at) if isinstance(at, list) else at)

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor of a GPU has no NumPy array: .cpu() first")

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()


def performed(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = any(isinstance(t, There) for t in tensors)
    if there and operation not in CROSS:
        _check_one_device(operation, tensors[:1] if operation in TAKE_POSITIONS else tensors)
    wanted = kwargs.get("device")
    here = kwargs if wanted is None else kwargs | {"device": torch.device("cpu")}
    made = operation(*tree_map(_held, args), **tree_map(_held, here))
    if operation is aten.copy_.default:
        return args[0]
    if not (there if wanted is None else torch.device(wanted).type == NAME):
        return made
    wrapped = tree_map(lambda t: There(t) if isinstance(t, Tensor) else t, made)
    return return_and_correct_aliasing(operation, args, kwargs, wrapped)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, There) else leaf


def _check_one_device(operation: Any, tensors: Sequence[Tensor]) -> None:
    if any(not isinstance(t, There) and t.dim() for t in tensors):
        shapes = ", ".join(f"{list(t.shape)} on {t.device}" for t in tensors)
        raise RuntimeError(f"{operation} of tensors on two devices: {shapes}")


def made_here_and_moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor`` and its like copy in C++, where no operation in Python is asked."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made


def supported() -> bool:
    """Whether this torch can have a backend in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def set_up() -> torch.library.Library:
    """The device, as long as what is returned is kept."""

    class Module(backend_registration._DummyBackendModule):  # type: ignore[name-defined,misc]
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(
        lambda operation, *args, **kwargs: performed(operation, args, kwargs), "PrivateUse1"
    )
    torch.tensor = made_here_and_moved(torch.tensor)
    torch.as_tensor = made_here_and_moved(torch.as_tensor)
    return library


def losses(change: Mapping[str, Any], engine: str, device: str) -> list[float]:
    """Test losses of each kind of model, at the end. The engine stacked is as on a GPU: its steps
    would be recorded."""
    import perfed
    from perfed import Execution
    from perfed.config import parse
    from perfed.engines.precision import PRECISIONS
    from perfed.engines.sequential import SequentialEngine
    from perfed.engines.stacked import StackedEngine

    class Chosen(Execution):
        def build_engine(self) -> Any:
            plain = PRECISIONS["float32"]
            return SequentialEngine(plain) if engine == "sequential" else StackedEngine(plain, True)

    experiment = parse(SMALL | change)
    assert isinstance(experiment, perfed.Experiment)
    result = perfed.run(experiment, how=Chosen(device=device, save_models=False))
    return [kind["last"]["test_loss"] for kind in result.summary["models"].values()]


def losses_at_sites(change: Mapping[str, Any], device: str) -> list[float]:
    """The same of a federation."""
    from perfed.flower.coordinator import coordinate
    from tests.flower.setting import desk, write_federation

    with tempfile.TemporaryDirectory() as parent:
        folder = write_federation(Path(parent, "federation"), rounds=2, **change)
        for site in folder.glob("site-*.yaml"):
            site.write_text(site.read_text().replace("device: cpu", f"device: {device}"))

        def told(line: str) -> None:
            if "left out" in line:  # it would be asked again and again
                raise RuntimeError(line)

        result = coordinate(folder / "coordinator.yaml", desk(folder), told)
        return [kind["last"]["test_loss"] for kind in result.summary["models"].values()]


SMALL: dict[str, Any] = {
    "rounds": 2,
    "evaluate_every": 2,
    "clients": 5,
    "clients_per_round": 3,
    "data": {"name": "digits", "public": 40},
    "partition": {"name": "dirichlet", "alpha": 0.5, "minimum": 20},
    "models": ["mlp"],
    "training": {"learning_rate": 0.1, "steps": 2, "batch_size": 8, "public_batch_size": 8},
}


def main(cases: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
    found: dict[str, Any] = {}
    for name, engine, change in cases:
        try:
            if engine == "sites":
                found[name] = [losses_at_sites(change, device) for device in ("cpu", NAME)]
            else:
                found[name] = [losses(change, engine, device) for device in ("cpu", NAME)]
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # of the tests' own modules
    kept = set_up()
    main(json.loads(sys.argv[1]))
