"""Which samples are tokens.

Whoever gives ``vocabulary`` says that they are. Without it, whole numbers may be either: where they
could be tokens they stay whole, and the network decides (:func:`perfed.models.inputs_for`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfed.core.errors import ConfigError, DataError
from perfed.core.inputs import Tokens

VOCABULARY_HELP = (
    "samples are tokens, whole numbers below this; 0: numbers, but integers (int16 or wider, "
    "samples × length) are tokens to a network for tokens"
)
MOST_FOUND = 1 << 20
"""Whole numbers beyond this are no tokens unless it is said: the largest vocabularies in use have
some 260,000."""


def tokens_in(x: np.ndarray, vocabulary: int, what: str) -> Tokens | None:
    """That ``x`` is tokens, by ``vocabulary`` or by how it looks; None: it is numbers."""
    if vocabulary:
        check_tokens(x, vocabulary, what)
        return Tokens(vocabulary)
    if x.ndim != 2 or x.dtype.kind not in "iu" or x.dtype.itemsize < 2 or not x.size:
        return None
    if x.min() < 0 or x.max() >= MOST_FOUND:
        return None
    return Tokens(int(x.max()) + 1, declared=False)


def check_tokens(x: np.ndarray, vocabulary: int, what: str) -> None:
    if x.dtype.kind == "f":
        wrong = np.argwhere(x != np.floor(x))
        if len(wrong):
            raise DataError(
                f"{what}: {x[tuple(wrong[0])]} at {wrong[0].tolist()} is no token: with a "
                "vocabulary, all must be whole numbers"
            )
    if x.size and (x.min() < 0 or x.max() >= vocabulary):
        where = np.argwhere((x < 0) | (x >= vocabulary))[0]
        raise DataError(
            f"{what}: token {int(x[tuple(where)])} at {where.tolist()} is out of range: with "
            f"vocabulary {vocabulary} they are 0 … {vocabulary - 1}"
        )


def common_tokens(private: Tokens | None, public: Tokens | None) -> Tokens | None:
    """Of private and public samples together. Where only one of the two looks like tokens, and
    nobody says that they are, both are numbers."""
    if private is None or public is None:
        if any(tokens is not None and tokens.declared for tokens in (private, public)):
            names = ("private", "public") if private else ("public", "private")
            raise ConfigError(
                f"{names[0]} samples are tokens, {names[1]} ones numbers: they must be alike; "
                "give 'vocabulary' for both",
                "data.public",
            )
        return None
    if private.declared and public.count > private.count:
        raise ConfigError(
            f"public samples have tokens up to {public.count - 1}, the vocabulary of private ones "
            f"is {private.count}: must be at least {public.count}",
            "data.vocabulary",
        )
    return all_tokens([private, public])


def all_tokens(parts: Sequence[Tokens | None]) -> Tokens | None:
    """Of samples that come in parts: one that is numbers makes numbers of all."""
    known = [tokens for tokens in parts if tokens is not None]
    if len(known) < len(parts):
        return None
    return Tokens(max(t.count for t in known), any(t.declared for t in known))
