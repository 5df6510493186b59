"""What clients said of the public set, as comparisons of classes, and the table that agrees with
a group of them best. PerFed-Evidence makes one table, PerFed-Kin one for each kind of client.

Constants are shares of what a client says of one class on average, so that they mean the same for
two classes and for a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import normalize

# A probability so far below that of a guess is said with more certainty than a network of a few
# samples has.
SMALLEST_PROBABILITY = 1e-3
# Weight of a class that a client never speaks of; keeps logarithms and the linear system finite,
# and is far below one sample.
SMALLEST_SHARE = 1e-3
# Keeps classes that nobody ties together near zero.
RIDGE = 1e-2


@dataclass(frozen=True)
class Witnesses:
    """What m clients said, and what each adds to the linear system of a table."""

    spoken: Tensor
    """q: how much each speaks of each class, (m, N)."""
    samples: Tensor
    right: Tensor
    """What each adds to the right-hand side: its log-ratios, less their mean under q, times samples
    and q, (m, N, |P|)."""

    @classmethod
    def hear(cls, decisions: Tensor, samples: Tensor) -> Witnesses:
        """From soft decisions, (m, |P|, N), and numbers of samples."""
        decisions, samples = decisions.double(), samples.to(decisions.device).double()
        classes = decisions.shape[2]
        spoken = decisions.mean(1) + SMALLEST_SHARE / classes
        spoken = spoken / spoken.sum(1, keepdim=True)
        ratios = decisions.clamp(min=SMALLEST_PROBABILITY / classes).log() - spoken.log()[:, None]
        # The best c_k(x) is the mean under q of what is left over.
        ratios = ratios - torch.einsum("mpy,my->mp", ratios, spoken)[..., None]
        right = ((samples[:, None] * spoken)[:, None] * ratios).mT.contiguous()
        return cls(spoken, samples, right)

    def __len__(self) -> int:
        return len(self.samples)

    def only(self, chosen: Tensor) -> Witnesses:
        """Some of them, by number."""
        some = Witnesses(*(getattr(self, field.name)[chosen] for field in fields(self)))
        vars(some).update({name: vars(self)[name][chosen] for name in MADE if name in vars(self)})
        return some

    @property
    def voice(self) -> Tensor:
        """How many samples stand behind a client's comparisons: none, if it has one class."""
        return self.samples * (1 - (self.spoken**2).sum(1))

    @property
    def heard(self) -> Tensor:
        """How much a client's comparisons say, from 0 to 1."""
        return self.voice / (self.voice + 1)

    @cached_property
    def laplacian(self) -> Tensor:
        """What each adds to the system: that of a graph of classes, (m, N, N)."""
        weights = self.samples[:, None] * self.spoken
        return torch.diag_embed(weights) - weights[:, :, None] * self.spoken[:, None]

    @cached_property
    def products(self) -> Tensor:
        """Of any two classes of a client, the sum over the public set of the products of what it
        adds to the right-hand side, (m, N, N)."""
        return self.right @ self.right.mT

    def table(self, members: Tensor | None = None) -> Tensor:
        """The evidence of some of them, or of all, |P|×N; every row sums to zero."""
        chosen = torch.ones_like(self.samples) if members is None else members.to(self.samples)
        weights = (chosen * self.samples)[:, None] * self.spoken
        system = weights.sum(0).diag() - weights.T @ self.spoken
        system = system + _ridge(system, (chosen @ self.samples) / chosen.sum())
        table: Tensor = torch.linalg.solve(system, self._sum(chosen)).T
        return table - table.mean(1, keepdim=True)

    @cached_property
    def _fits(self) -> dict[bytes, Tensor]:
        return {}

    def fit(self, members: Tensor) -> Tensor:
        """ρ: the correlation of each client's comparisons with the table of the *other* members,
        over public samples and the client's classes, each class in proportion to q.

        Who looks for groups asks for the same ones again and again: each is answered once.
        """
        who = members.cpu().numpy().tobytes()
        if who not in self._fits:
            self._fits[who] = self._fit(members)
        return self._fits[who]

    def _fit(self, members: Tensor) -> Tensor:
        """Sums over the public set are made first, and a member's own part is taken out of them:
        so no table of |P|×N numbers is made for each client."""
        chosen = members.double()
        own, mine = chosen[:, None, None], self.products
        everything = self._sum(chosen)
        with_me = torch.einsum("ap,kbp->kab", everything, self.right)
        squares = everything @ everything.T - own * (with_me + with_me.mT - mine)
        system = torch.einsum("j,jab->ab", chosen, self.laplacian) - own * self.laplacian
        left = (chosen.sum() - chosen).clamp(min=1)
        system = system + _ridge(system, (chosen @ self.samples - chosen * self.samples) / left)
        solved = torch.linalg.inv(system)
        both = torch.einsum("kab,kba->k", solved, with_me - own * mine)
        theirs = torch.einsum("kab,kab->k", solved @ squares @ solved.mT, self.laplacian)
        yours = torch.einsum("kaa,ka->k", mine, 1 / self.spoken)
        scale = (theirs.clamp(min=0) * yours / self.samples).sqrt()
        return torch.where(scale > 1e-12, both / scale.clamp(min=1e-12), 0.0)

    def leftovers(self) -> Tensor:
        """What the table of all leaves unexplained of each client's comparisons, as vectors; a
        client's comparisons have length one, each class in proportion to √q."""
        table = self.table().T
        told = table - torch.einsum("yp,my->mp", table, self.spoken)[:, None]
        root = self.spoken.sqrt()[..., None]
        said, told = normalize((self.right / root).flatten(1)), normalize((told * root).flatten(1))
        return said - (said * told).sum(1, keepdim=True) * told

    def _sum(self, chosen: Tensor) -> Tensor:
        return torch.einsum("m,myp->yp", chosen, self.right)


MADE = ("laplacian", "products")  # once, for all groups a client is tried in


def _ridge(system: Tensor, samples: Tensor) -> Tensor:
    """In proportion to what a client says of a class: its samples on average, by classes."""
    unit = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    return RIDGE / system.shape[-1] * samples.clamp(min=1e-9)[..., None, None] * unit
