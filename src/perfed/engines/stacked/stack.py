"""One stack: a network and its training step as functions of stacked tensors.

``tensor[k]`` is client *k*'s. An algorithm's objective is written for one client;
``torch.func.vmap`` maps it over the stack.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from perfed.core.algorithm import (
    Network,
    Objective,
    Private,
    Public,
    free_parameters,
    trainable,
)
from perfed.core.augmentation import CODES, augmented
from perfed.core.errors import ConfigError
from perfed.core.gradients import Noise, check_sample_gradients, clipped_gradient
from perfed.core.inputs import precision_of
from perfed.core.network import declared, head_outputs, outputs
from perfed.core.own_code import objective_with
from perfed.core.pixels import samples_at
from perfed.core.predictor import What
from perfed.core.randomness import addressed, dice_of
from perfed.core.streams import uniform_indices_of
from perfed.core.tree import Weights, identity
from perfed.engines.base import PLACES, Sgd, Trained, noise_keys, private_draws, step_keys
from perfed.engines.stacked import hopper
from perfed.engines.stacked.alone import LoneModule
from perfed.engines.stacked.attention import mapped_attention
from perfed.engines.stacked.losses import MappedLosses
from perfed.engines.stacked.mappable import make_mappable
from perfed.engines.stacked.plan import Plan, mapped, mapped_both, plan_of, with_rules


class Bounds(NamedTuple):
    """How far a mapped module may be from one client alone, by the size of each tensor."""

    outputs: float
    gradients: float


PRECISE = Bounds(1e-6, 1e-6)
"""In float64. On a GPU torch's weight norm computes in float32 even there."""
ROUGH = Bounds(1e-2, 0.2)
"""In float32: differences grow with depth. What cannot be mapped is off by far more."""

DICE = "it asks Python's or NumPy's generator for random numbers, which a recording would freeze"


class StackedModule:
    """Copies of a module for training and for evaluation, with the rules for stacks."""

    def __init__(self, module: nn.Module, few: Tensor, head: str = "") -> None:
        self.head = head
        self._module, self._few = module, few
        with dice_of(module):  # to look at a module may throw them, too
            self._prepare(module, plan_of)
            self.obstacle = self._obstacle(module, few)
            if self.obstacle is not None and self.plans != {True: None, False: None}:
                self._prepare(module, lambda copied: None)  # what a plan misses, vmap may not
                self.obstacle = self._obstacle(module, few)

    @functools.cached_property
    def alone(self) -> LoneModule:
        """The same for a stack of one client."""
        return LoneModule(self._module, self._few, self.head)

    def _prepare(self, module: nn.Module, plan_of: Callable[[nn.Module], Plan | None]) -> None:
        self.training = copy.deepcopy(module).train()
        self.evaluating = copy.deepcopy(module).eval()
        self.plans: dict[bool, Plan | None] = {}
        for copied in (self.training, self.evaluating):
            self.plans[copied.training] = plan_of(copied)
            make_mappable(copied)
            if self.plans[copied.training] is None:
                with_rules(copied, self.head)

    def _obstacle(self, module: nn.Module, x: Tensor) -> str | None:
        """Why the module cannot be mapped, found by trying: two clients against one."""
        wide = x.double() if x.is_floating_point() else x
        if self._tried(copy.deepcopy(module).double(), wide, PRECISE) is None:
            return None
        return self._tried(module, x, ROUGH)  # some modules insist on their own precision

    def _tried(self, module: nn.Module, x: Tensor, bounds: Bounds) -> str | None:
        devices = [x.device] if x.is_cuda else []
        try:
            with torch.random.fork_rng(devices):  # whoever asked keeps the numbers that are next
                # Not its own weights: where they are zero, differences would not show.
                moved = {
                    name: t.detach() + 0.1 * torch.randn(t.shape).to(t)
                    for name, t in module.named_parameters()
                }
                tensors = moved | dict(module.named_buffers())
                # cuDNN has no gradients of recurrent layers in evaluation.
                with torch.backends.cudnn.flags(enabled=False), dice_of(module) as were_thrown:
                    difference = self._difference(module, tensors, x, bounds)
                    return DICE if were_thrown() else difference
        except Exception as error:  # whatever a user's module can stumble over
            if "randomness" in str(error):
                return "it draws random numbers in a way that has no stream for each client"
            return str(error).split("\n")[0].split(". ")[0]

    def _difference(
        self, module: nn.Module, one: dict[str, Tensor], x: Tensor, bounds: Bounds
    ) -> str | None:
        two = {name: torch.stack([t, t]) for name, t in one.items()}
        both, key = torch.stack([x, x]), torch.tensor([1, 1], device=x.device)
        names = [name for name, _ in module.named_parameters()]
        for mode in (True, False):
            module.train(mode)
            forward = vmap(functools.partial(self.outputs, mode, "logits"), randomness="different")
            with addressed(key[0]):
                plain = _outputs_and_gradients(
                    functools.partial(functional_call, module), one, names, x
                )
            with addressed(key):
                mapped = _outputs_and_gradients(forward, two, names, both)
            if not _all_close(mapped, plain, bounds):
                return "mapped over clients it gives other numbers"
        halves = [forward(_copied(two), part) for part in both.chunk(2, 1)]
        if not _all_close([torch.cat(halves, 1)], plain[:1], bounds):
            return "in evaluation its output for a sample depends on other samples"
        return None

    def outputs(self, training: bool, what: What, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """One client's logits or features; inside ``vmap``."""
        plan = self._plan(training, what)
        y = None if plan is None else mapped(plan, tensors, x)
        if y is None:
            module = self.training if training else self.evaluating
            with mapped_attention():
                return outputs(module, self.head, tensors, x, what)
        return y.to(precision_of(x))

    def head_outputs(self, tensors: dict[str, Tensor], features: Tensor) -> Tensor:
        """What one client's last layer makes of features; inside ``vmap``."""
        plan = self.plans[True]
        if plan is not None and self._head_is_last(plan):
            y = mapped(plan.last(), tensors, features)
            if y is not None:
                return y.to(features.dtype)
        return head_outputs(self.training, self.head, tensors, features)

    def _plan(self, training: bool, what: What) -> Plan | None:
        """The steps to what is asked for."""
        plan = self.plans[training]
        if what == "logits" or plan is None:
            return plan
        return plan.before_last() if self._head_is_last(plan) else None

    def _head_is_last(self, plan: Plan) -> bool:
        return plan.steps[-1].at == f"{declared(self.head)}."


def _outputs_and_gradients(
    run: Callable[[dict[str, Tensor], Tensor], Tensor],
    tensors: dict[str, Tensor],
    names: Sequence[str],
    x: Tensor,
) -> list[Tensor]:
    """Logits, and the gradient of something made of them for each tensor that has a name here."""
    tensors = _copied(tensors)
    attached = [tensors[name].requires_grad_() for name in names]
    logits = run(tensors, x)
    loss = (logits * torch.linspace(-1, 1, logits.shape[-1]).to(logits)).sum()
    gradients = torch.autograd.grad(loss, attached, materialize_grads=True)
    return [logits.detach(), *gradients]


def _all_close(mapped: Sequence[Tensor], plain: Sequence[Tensor], bounds: Bounds) -> bool:
    """By the size of each tensor."""
    norms = [float(t.norm()) for t in plain]
    floor = 1e-3 * max(1.0, *norms)
    allowed = [bounds.outputs, *[bounds.gradients] * (len(plain) - 1)]
    differences = [float((a - b).norm()) for a, b in zip(mapped, plain, strict=True)]
    together = zip(differences, norms, allowed, strict=True)
    return all(difference <= bound * (norm + floor) for difference, norm, bound in together)


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in tensors.items()}


class StackedNetwork(Network):
    """The network an objective sees, inside ``vmap``.

    Where it is known that the objective will ask for the logits of one private and one public
    mini-batch, ``together``, both go through the network at once when it asks for the first.
    """

    def __init__(
        self,
        module: StackedModule | LoneModule,
        weights: Weights,
        public_batchnorm: str,
        rounded: dict[str, Tensor],
        asked: list[tuple[str, Tensor]],
        together: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(module.training, weights, public_batchnorm, module.head)
        self._stacked = module
        self._rounded = rounded
        self._asked = asked
        self._together = together
        self._logits: tuple[Tensor, Tensor] | None = None

    def at(self, params: dict[str, Tensor], moves_statistics: bool = False) -> Network:
        weights = self._weights_at(params, moves_statistics)
        return StackedNetwork(self._stacked, weights, self._public_batchnorm, {}, [])

    def __call__(self, x: Tensor) -> Tensor:
        self._asked.append(("private", x))
        if self._together is not None and x is self._together[0]:
            return self._both()[0].to(precision_of(x))
        return super().__call__(x)

    def public(self, x: Tensor) -> Tensor:
        self._asked.append(("public", x))
        if self._together is not None and x is self._together[1]:
            return self._both()[1].to(precision_of(x))
        return super().public(x)

    def features(self, x: Tensor) -> Tensor:
        self._asked.append(("features", x))
        return super().features(x)

    def public_features(self, x: Tensor) -> Tensor:
        self._asked.append(("features", x))
        return super().public_features(x)

    def head(self, features: Tensor) -> Tensor:
        return self._stacked.head_outputs(self._weights.params | self._rounded, features)

    def _both(self) -> tuple[Tensor, Tensor]:
        assert self._together is not None
        if self._logits is None:
            plan = self._stacked.plans[True]
            assert plan is not None
            params, buffers, public_buffers = self._weights
            self._logits = mapped_both(
                plan, params | self._rounded, buffers, public_buffers, *self._together
            )
            assert self._logits is not None
        return self._logits

    def _outputs(self, x: Tensor, buffers: dict[str, Tensor], what: What) -> Tensor:
        tensors = self._weights.params | self._rounded | buffers
        return self._stacked.outputs(True, what, tensors, x)


class Samples(NamedTuple):
    """The samples of all simulations that share a stack, one after another."""

    x: Tensor
    y: Tensor
    public_x: Tensor


class Drawn(NamedTuple):
    """Which samples a stack sees; clients first, then steps, or of one step."""

    private: list[Tensor]
    """Positions in :class:`Samples`, a tensor for each of a step's private mini-batches."""
    codes: list[Tensor]
    """How each of those samples is changed (:mod:`perfed.core.augmentation`); empty: not at all."""
    public: list[Tensor]
    """Numbers within the client's public set; empty where there is none."""
    keys: list[Tensor]
    """Of the random numbers that networks draw; empty where they draw none."""
    filled: list[Tensor]
    """Which places of the mini-batch count, where training is private."""
    noise: list[Tensor]
    """The keys of the noise, where training is private."""


class Draws(NamedTuple):
    """All that a stack's training sees."""

    drawn: Drawn
    public_start: Tensor
    """Where each client's public set begins in :class:`Samples`."""
    counts: list[int]
    """How many steps each client makes."""


class Moving(NamedTuple):
    """What a step changes in place: stacked tensors, by network."""

    models: dict[str, Weights]
    states: dict[str, Any]
    """Of the optimizer."""


Named = list[tuple[str, Tensor]]  # a gradient or direction, and of which parameter
_TENSOR = object()  # where one of the inputs is a tensor, and not the same for all clients


class StackedStep:
    """One training step of a stack of clients, as a function of stacked tensors."""

    def __init__(
        self, modules: Mapping[str, StackedModule | LoneModule], first: Sgd, alone: bool = False
    ) -> None:
        """``alone``: a stack has one client, and nothing is mapped."""
        self._modules = dict(modules)
        self._alone = alone
        self._single = first.single
        self._objective = first.objective
        self._batches = first.batches
        self._sample_clip = first.sample_clip
        self._noise = (first.noise_deviation, first.samples_a_step)
        training = first.client.population.training
        self._optimizer = training.optimizer
        self._augment = training.augment
        self._public_batchnorm = training.public_batchnorm
        if first.sample_clip is not None:
            check_sample_gradients([m.training for m in modules.values()], first.batches)
        leaves, self._form = tree_flatten(first.inputs)
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._joins = None if self._may_join(first) else False
        """Whether private and public samples go through the network together; None: not known."""
        self._tried = False

    def _may_join(self, first: Sgd) -> bool:
        if len(self._modules) > 1 or first.batches > 1 or first.sample_clip is not None:
            return False
        if first.draws_numbers:  # which belong to one pass, or to the other
            return False
        ((name, module),) = self._modules.items()
        weights = first.models[name]
        separate = bool(weights.public_buffers) or not weights.buffers
        return separate and module.plans[True] is not None

    def __call__(
        self,
        moving: Moving,
        inputs: list[Tensor],
        samples: Samples,
        drawn: Drawn,
        public_start: Tensor,
        rate: Tensor,
        kept: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Change ``moving`` in place, and the rounded copies that are kept beside it."""
        seen = self._seen(samples, drawn, public_start)
        if not self._tried:  # try it on a copy, which tells what the objective asks for
            self._try({name: w.clone() for name, w in moving.models.items()}, inputs, seen)
        attached = {
            name: Weights({n: t.detach() for n, t in w.params.items()}, *w[1:])
            for name, w in moving.models.items()
        }
        kept = kept or {}
        gradients = self._gradients(attached, inputs, seen, kept)
        with torch.no_grad():
            for network, own in gradients.items():
                weights = attached[network]
                free = trainable(self._modules[network].training, weights)
                params = {name: tensor.detach() for name, tensor in free.items()}
                copies = kept.get(network, {})
                moves = [
                    hopper.Move(params[name], direction, copies.get(name))
                    for name, direction in self._directions(own, params, moving.states[network])
                ]
                hopper.descend(moves, rate)

    def _try(self, models: dict[str, Weights], inputs: list[Tensor], seen: Seen) -> None:
        try:
            if self._sample_clip is None:
                self._losses(models, {}, inputs, seen)
        except torch.OutOfMemoryError:  # of the stack, which then takes turns
            raise
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            raise ConfigError(
                f"the objective cannot be mapped over clients, only run one by one: {reason}",
                "--engine stacked",
            ) from error
        self._tried = True

    def _seen(self, samples: Samples, drawn: Drawn, public_start: Tensor) -> Seen:
        images = [samples_at(samples.x, where) for where in drawn.private]
        if drawn.codes:
            pairs = zip(images, drawn.codes, strict=True)
            images = [augmented(x, codes, self._augment) for x, codes in pairs]
        labels = [samples.y[where] for where in drawn.private]
        publics: tuple[Tensor, ...] = ()
        for public in drawn.public:
            publics = samples_at(samples.public_x, public + public_start[:, None]), public
        keys = drawn.keys[0] if drawn.keys else None
        noised = (*drawn.filled, *drawn.noise)
        return Seen([*zip(images, labels, strict=True)], publics, keys, noised)

    def _gradients(
        self,
        models: dict[str, Weights],
        inputs: list[Tensor],
        seen: Seen,
        kept: Mapping[str, Mapping[str, Tensor]],
    ) -> dict[str, Named]:
        """By network. Where a matrix was rounded there may be two: of what the network used, and
        of what the objective did with the parameter itself."""
        params = {name: trainable(self._modules[name].training, w) for name, w in models.items()}
        if self._sample_clip is not None:
            return self._clipped(models, params, inputs, seen)
        copies = kept or self.rounded(models)
        rounded = {
            network: {name: tensor.detach().requires_grad_() for name, tensor in own.items()}
            for network, own in copies.items()
        }
        loss = self._losses(models, rounded, inputs, seen).sum()
        if loss.is_cuda:
            hopper.weight_gradients_beside(loss)
        places = [
            (network, name, tensor)
            for tensors in (params, rounded)
            for network, own in tensors.items()
            for name, tensor in own.items()
        ]
        found = torch.autograd.grad(loss, [t for *_, t in places], allow_unused=True)
        gradients: dict[str, Named] = {network: [] for network in models}
        for (network, name, _), gradient in zip(places, found, strict=True):
            if gradient is not None:
                gradients[network].append((name, gradient))
        return gradients

    def _clipped(
        self,
        models: dict[str, Weights],
        params: dict[str, dict[str, Tensor]],
        inputs: list[Tensor],
        seen: Seen,
    ) -> dict[str, Named]:
        """Of each client, the mean of its samples' gradients, none longer than the bound."""
        assert self._sample_clip is not None
        bound = self._sample_clip
        here = {name: {n: t.detach() for n, t in own.items()} for name, own in params.items()}

        def of_one(
            at: dict[str, dict[str, Tensor]],
            models: dict[str, Weights],
            privates: list[tuple[Tensor, Tensor]],
            publics: tuple[Tensor, ...],
            inputs: list[Tensor],
            noised: tuple[Tensor, ...],
        ) -> dict[str, dict[str, Tensor]]:
            def loss(
                objective: Objective, at: dict[str, dict[str, Tensor]], one: Private | None
            ) -> Tensor:
                moved = {n: w._replace(params=w.params | at[n]) for n, w in models.items()}
                return self._loss_at(objective, moved, {}, one, publics, inputs)

            given = (loss, self._objective, at, Private(*privates[0]), bound)
            if not noised:
                return clipped_gradient(*given)
            filled, key = noised
            return clipped_gradient(*given, filled, Noise(key, *self._noise))

        detached = {name: weights.detached() for name, weights in models.items()}
        means: dict[str, dict[str, Tensor]] = self._mapped(
            of_one, seen, here, detached, seen.privates, seen.publics, inputs, seen.noised
        )
        return {network: [*own.items()] for network, own in means.items()}

    def _directions(self, gradients: Named, params: dict[str, Tensor], state: Any) -> Named:
        """Where each parameter goes; moves the optimizer's state."""
        if self._optimizer.is_plain():
            return gradients
        whole = {name: torch.zeros_like(param) for name, param in params.items()}
        for name, gradient in gradients:
            whole[name] += gradient.to(whole[name].dtype)
        directions: Mapping[str, Tensor]
        directions, after = vmap(self._optimizer.update)(whole, params, state)
        # An optimizer may hand on tensors of its old state, whose places are written to next.
        places = {tensor.data_ptr() for tensor in tree_flatten(state)[0]}
        moves = [(name, _apart_from(places, d)) for name, d in directions.items()]
        _overwrite(state, _apart_from(places, after))
        return moves

    def _losses(
        self,
        models: dict[str, Weights],
        rounded: dict[str, dict[str, Tensor]],
        inputs: list[Tensor],
        seen: Seen,
    ) -> Tensor:
        losses: Tensor = self._mapped(
            self._loss_of_one, seen, models, rounded, seen.privates, seen.publics, inputs
        )
        return losses

    def _mapped(self, function: Callable[..., Any], seen: Seen, *stacked: Any) -> Any:
        if self._alone:
            with addressed(None if seen.keys is None else seen.keys[0]):
                made = function(*tree_map(lambda t: t.squeeze(0), stacked))
            return tree_map(lambda t: t.unsqueeze(0), made)
        randomness = "error" if seen.keys is None else "different"
        with addressed(seen.keys):
            return vmap(function, randomness=randomness)(*stacked)

    def rounded(self, models: Mapping[str, Weights]) -> dict[str, dict[str, Tensor]]:
        """Under autocast, the matrices as each network uses them. Their gradients are taken in that
        precision, and need not be widened before they meet the weights."""
        return {name: self._rounded(self._modules[name], own) for name, own in models.items()}

    def _rounded(self, module: StackedModule | LoneModule, weights: Weights) -> dict[str, Tensor]:
        plan, params = module.plans[True], weights.params
        kind = next((t.device.type for t in params.values()), "cpu")
        if plan is None or self._sample_clip is not None or not torch.is_autocast_enabled(kind):
            return {}
        free = free_parameters(module.training)
        dtype = torch.get_autocast_dtype(kind)
        return {name: params[name].detach().to(dtype) for name in plan.matrices() if name in free}

    def _loss_of_one(
        self,
        models: dict[str, Weights],
        rounded: dict[str, dict[str, Tensor]],
        privates: list[tuple[Tensor, Tensor]],
        publics: tuple[Tensor, ...],
        inputs: list[Tensor],
    ) -> Tensor:
        batches = tuple(Private(x, y) for x, y in privates)
        private = batches if self._batches > 1 else batches[0]
        return self._loss_at(self._objective, models, rounded, private, publics, inputs)

    def _loss_at(
        self,
        objective: Objective,
        models: dict[str, Weights],
        rounded: dict[str, dict[str, Tensor]],
        private: Private | tuple[Private, ...] | None,
        publics: tuple[Tensor, ...],
        inputs: list[Tensor],
    ) -> Tensor:
        asked: list[tuple[str, Tensor]] = []
        first = private if isinstance(private, Private) else None
        together = (first.x, publics[0]) if self._joins and first is not None else None
        networks = {
            name: StackedNetwork(
                self._modules[name],
                weights,
                self._public_batchnorm,
                rounded.get(name, {}),
                asked,
                together,
            )
            for name, weights in models.items()
        }
        given = iter(inputs)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self._leaves]
        public = Public(publics[0], publics[1]) if publics else None
        with MappedLosses(), objective_with(public):
            loss = objective(
                next(iter(networks.values())) if self._single else networks,
                private,
                public,
                *tree_unflatten(leaves, self._form),
            )
        if self._joins is None and first is not None:
            both = {("private", id(first.x)), *(("public", id(x)) for x in publics[:1])}
            found = [(how, id(x)) for how, x in asked]
            self._joins = len(found) == 2 == len(both) and set(found) == both
        return loss


class Seen(NamedTuple):
    """What one step of a stack looks at."""

    privates: list[tuple[Tensor, Tensor]]
    publics: tuple[Tensor, ...]
    """Samples and their numbers, where there are any."""
    keys: Tensor | None
    """Of the random numbers that networks draw, one for each client."""
    noised: tuple[Tensor, ...]
    """Which places count, and the key of the noise; empty where training is not private."""


def _apart_from(places: set[int], tree: Any) -> Any:
    """The same numbers, in none of these places."""
    if isinstance(tree, Tensor):
        return tree.clone() if tree.data_ptr() in places else tree
    return {name: _apart_from(places, inside) for name, inside in tree.items()}


def _overwrite(old: Any, new: Any) -> None:
    """Put the tensors of a tree into the places of another."""
    for name, value in old.items():
        if isinstance(value, Tensor):
            value.copy_(new[name])
        else:
            _overwrite(value, new[name])


def stack_inputs(stack: Sequence[Sgd]) -> list[Tensor]:
    """The tensors among the objectives' inputs, stacked."""
    if not stack[0].inputs:
        return []
    columns = zip(*(tree_flatten(request.inputs)[0] for request in stack), strict=True)
    return [torch.stack(column) for column in columns if isinstance(column[0], Tensor)]


def stack_tensors(
    models: Sequence[Mapping[str, Tensor]], to_look_at: bool = False
) -> dict[str, Tensor]:
    """``to_look_at``: not to change. What all of them share, like a model that the server has sent
    to everybody, is then not copied."""
    return {name: _stacked([model[name] for model in models], to_look_at) for name in models[0]}


def _stacked(tensors: Sequence[Tensor], to_look_at: bool) -> Tensor:
    first = tensors[0].detach()
    if to_look_at and len({identity(tensor) for tensor in tensors}) == 1:
        return first.expand(len(tensors), *first.shape)
    return torch.stack([tensor.detach() for tensor in tensors])


def stack_of_one(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """To look at, not to change: it is the model itself. But for what shares its memory with other
    tensors, where a tape would look in the wrong place."""
    stack: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        own = whole and tensor.data_ptr() not in memory
        memory.add(tensor.data_ptr())
        stack[name] = (tensor.detach() if own else tensor.detach().clone()).unsqueeze(0)
    return stack


def stack_weights(models: Sequence[Weights], to_look_at: bool) -> Weights:
    return Weights(*(stack_tensors(parts, to_look_at) for parts in zip(*models, strict=True)))


def stack_moving(stack: Sequence[Sgd], to_look_at: bool) -> Moving:
    """What the requests of a stack begin with."""
    models = {
        name: stack_weights([r.models[name] for r in stack], to_look_at) for name in stack[0].models
    }
    return Moving(models, stack_trees([dict(request.states) for request in stack]))


def stack_trees(trees: Sequence[Any]) -> Any:
    if isinstance(trees[0], Tensor):
        return torch.stack([tensor.detach() for tensor in trees])
    return {name: stack_trees([tree[name] for tree in trees]) for name in trees[0]}


def unstack(moving: Moving, lanes: Sequence[int], copied: bool = True) -> dict[int, Trained]:
    """These clients' own tensors: copies, unless told otherwise, for a view would keep the whole
    stack in memory."""
    if not lanes:
        return {}
    tensors: list[Tensor] = []
    for leaf in tree_flatten(moving)[0]:
        of_all = leaf.detach().unbind()
        tensors += [of_all[lane] for lane in lanes]
    own = iter(_copies(tensors) if copied else tensors)
    each = _of_each(moving, own, len(lanes))
    return {lane: Trained(*one) for lane, one in zip(lanes, each, strict=True)}


def _of_each(stacked: Any, tensors: Iterator[Tensor], count: int) -> list[Any]:
    """The same form for each of ``count`` clients, from their tensors: those of all clients for a
    leaf, then those for the next. Torch's own way there takes longer than a small model."""
    if isinstance(stacked, Tensor):
        return list(islice(tensors, count))
    if not stacked:
        return [stacked] * count
    if isinstance(stacked, tuple):
        parts = [_of_each(inside, tensors, count) for inside in stacked]
        return [type(stacked)(*one) for one in zip(*parts, strict=True)]
    columns = [_of_each(inside, tensors, count) for inside in stacked.values()]
    return [dict(zip(stacked, one, strict=True)) for one in zip(*columns, strict=True)]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    if not all(tensor.is_cuda for tensor in tensors):
        return [tensor.clone() for tensor in tensors]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    for dtype in {tensor.dtype for tensor in tensors}:  # one kernel for many
        torch._foreach_copy_(
            [copy for copy in copies if copy.dtype == dtype],
            [tensor for tensor in tensors if tensor.dtype == dtype],
        )
    return copies


def draw(stack: Sequence[Sgd], starts: Mapping[int, tuple[int, int]]) -> Draws:
    """What the streams of a stack's clients say. ``starts`` has each population's first sample."""
    first = stack[0]
    population = first.client.population
    training = population.training
    lanes = _Lanes(stack, starts)
    shape = (first.room, training.batch_size)
    private, codes = [], []
    for number in range(first.batches):
        if first.privacy is not None:
            width = places(stack)
            drawn = torch.stack([_filled_up(r.chosen.which, r.room, width) for r in stack])
        elif training.epochs:
            drawn = pad_sequence(
                [private_draws(request, request.private_keys()[number]) for request in stack],
                batch_first=True,
            )
            drawn = pad(drawn, (0, 0, 0, shape[0] - drawn.shape[1]))
        else:
            drawn = uniform_indices_of(lanes.private_keys[number], shape, lanes.sizes)
        private.append(lanes.positions(drawn))
        if training.augment:
            kinds = torch.full_like(lanes.sizes, CODES)
            codes.append(uniform_indices_of(lanes.augmentation_keys[number], shape, kinds))
    public = []
    if population.algorithm.trains_on_public_set:
        shape = (first.room, training.public_batch_size)
        public.append(uniform_indices_of(lanes.public_keys, shape, lanes.public_sizes))
    counts = [request.steps for request in stack]
    keys = [step_keys(stack)] if first.draws_numbers else []
    filled, noise = [], []
    if first.privacy is not None:
        width = places(stack)
        filled = [torch.stack([_filled_up(r.chosen.filled, r.room, width) for r in stack])]
        noise = [noise_keys(stack)]
    drawn_all = Drawn(private, codes, public, keys, filled, noise)
    return Draws(drawn_all, lanes.public_starts, counts)


def places(stack: Sequence[Sgd]) -> int:
    """How many samples a step of a stack has room for, where training is private; else 0."""
    if stack[0].privacy is None:
        return 0
    most: int = max(request.chosen.which.shape[1] for request in stack)
    return -(-most // PLACES) * PLACES


def _filled_up(table: Tensor, steps: int, width: int) -> Tensor:
    """With steps that are not made, and places that do not count: False, or the first sample."""
    return pad(table, (0, width - table.shape[1], 0, steps - table.shape[0]))


class _Lanes:
    """What the draws of a stack start from, brought to the device in one piece: to wait for it
    takes longer than to send a few numbers more."""

    def __init__(self, stack: Sequence[Sgd], starts: Mapping[int, tuple[int, int]]) -> None:
        population = stack[0].client.population
        augments = bool(population.training.augment)
        with_public = population.algorithm.trains_on_public_set
        places = [request.client.population for request in stack]
        held = [
            place.places(request.client.id, "train") + starts[id(place)][0]
            for place, request in zip(places, stack, strict=True)
        ]
        sizes = np.array([len(one) for one in held])
        columns = [
            sizes,
            np.cumsum(sizes) - sizes,
            [starts[id(place)][1] for place in places],
            [len(place.public_x) for place in places],
            [request.public_key() if with_public else 0 for request in stack],
            *zip(*(request.private_keys() for request in stack), strict=True),
            *zip(*(request.augmentation_keys() for request in stack if augments), strict=True),
        ]
        sent = np.concatenate([*np.asarray(columns, dtype=np.int64), *held])
        numbers, batches = len(stack) * len(columns), stack[0].batches
        table = torch.as_tensor(sent, device=population.device)
        self._held = table[numbers:]
        self.sizes, self._firsts, self.public_starts, self.public_sizes, self.public_keys, *keys = (
            table[:numbers].view(len(columns), len(stack))
        )
        self.private_keys, self.augmentation_keys = keys[:batches], keys[batches:]

    def positions(self, drawn: Tensor) -> Tensor:
        """Where the training samples are that have these numbers with their clients."""
        return self._held[drawn + self._firsts[:, None, None]]
