"""Which samples are tokens: what is said, and what is found; each fault a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from perfed.core.errors import ConfigError
from perfed.core.inputs import Tokens
from perfed.data import Dataset, Split, build_federation, datasets, partitions
from perfed.data.datasets import Samples

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 30, (24, 5))
WORDS[0, 0] = 29
LABELS = np.arange(24) % 3


def npz(folder: Path, x: np.ndarray, public: np.ndarray | None = None, **options: Any) -> Samples:
    more = {} if public is None else {"public": public}
    np.savez(folder / "a.npz", x=x, y=LABELS[: len(x)], **more)
    return datasets.build({"name": "npz", "path": str(folder / "a.npz"), **options}).load(0)


def test_with_a_vocabulary_samples_are_tokens_and_stay_whole(tmp_path: Path) -> None:
    for kind in (np.uint8, np.int32, np.int64, np.float32):
        samples = npz(tmp_path, WORDS.astype(kind), vocabulary=40)
        assert samples.tokens == Tokens(40)
        assert samples.x.dtype == np.int64
        assert (samples.x == WORDS).all()


@pytest.mark.parametrize(
    ("x", "tokens"),
    [
        (WORDS, Tokens(30, declared=False)),
        (WORDS.astype(np.uint16), Tokens(30, declared=False)),
        (WORDS.astype(np.uint8), None),  # pixels
        (WORDS.astype(np.float64), None),
        (WORDS - 1, None),
        (WORDS + (1 << 20), None),  # no vocabulary is that large
        (WORDS.reshape(8, 3, 5), None),
    ],
)
def test_without_one_wide_integers_may_be_tokens(
    x: np.ndarray, tokens: Tokens | None, tmp_path: Path
) -> None:
    samples = npz(tmp_path, x)
    assert samples.tokens == tokens
    assert samples.numbers(samples.x).dtype == (np.int64 if tokens else np.float32)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (WORDS, r"'x': token 29 at \[0, 0\] is out of range: with vocabulary 20 they are 0 … 19"),
        (np.where(WORDS > 18, -1, WORDS), "token -1 at .* is out of range"),
        (WORDS / 2, "14.5 at .* is no token: with a vocabulary, all must be whole numbers"),
    ],
)
def test_what_is_no_token_is_named(x: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        npz(tmp_path, x, vocabulary=20)
    assert "\n" not in str(caught.value)


def test_public_samples_are_of_the_same_vocabulary(tmp_path: Path) -> None:
    assert npz(tmp_path, WORDS, public=WORDS + 5).tokens == Tokens(35, declared=False)
    numbers = npz(tmp_path, WORDS, public=WORDS / 2)  # nobody says that they are tokens
    assert numbers.tokens is None
    assert numbers.public_x.dtype == numbers.x.dtype == np.float32
    public = {"name": "npz", "path": str(tmp_path / "public.npz")}
    np.savez(tmp_path / "public.npz", x=WORDS + 5)
    np.savez(tmp_path / "b.npz", x=WORDS, y=LABELS)
    options = {"name": "npz", "path": str(tmp_path / "b.npz"), "public": public}
    with pytest.raises(ConfigError, match="tokens up to 34, the vocabulary of private ones is 30"):
        datasets.build(options | {"vocabulary": 30}).load(0)
    np.savez(tmp_path / "public.npz", x=WORDS / 2)
    with pytest.raises(ConfigError, match="private samples are tokens, public ones numbers"):
        datasets.build(options | {"vocabulary": 30}).load(0)


def test_a_table_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "words.csv"
    rows = [f"{a},{b},{'xyz'[k]}" for (a, b, *_), k in zip(WORDS, LABELS, strict=True)]
    path.write_text("\n".join(["first,second,label", *rows]))
    options = {"name": "csv", "path": str(path), "public": 6}
    told = build_federation(
        datasets.build(options | {"vocabulary": 30}), partitions.build("iid"), Split(), 2, 0
    )
    assert told.inputs.vocabulary == 30
    assert (told.samples.x == WORDS[told.samples.index, :2]).all()  # nothing is standardised
    assert told.samples.x.dtype == told.samples.public_x.dtype == np.int64
    assert datasets.build(options).load(0).tokens is None  # columns of numbers are measurements
    with pytest.raises(ConfigError, match="line 2, column 'first': 29 is no token: with vocab"):
        datasets.build(options | {"vocabulary": 20}).load(0)


def test_a_torch_dataset_of_tokens() -> None:
    mine = TensorDataset(torch.as_tensor(WORDS), torch.as_tensor(LABELS))
    assert datasets.build({"name": "torch", "path": mine}).load(0).tokens == Tokens(30, False)
    ragged = [(torch.arange(n), 0) for n in (4, 5)]

    class Ragged(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(ragged)

        def __getitem__(self, number: int) -> Any:
            return ragged[number]

    with pytest.raises(ConfigError, match="all must be alike; fill up sequences to one length"):
        datasets.build({"name": "torch", "path": Ragged()})


def test_a_dataset_of_ones_own_need_not_say_it() -> None:
    class Mine(Dataset):
        def load(self, seed: int) -> Samples:
            return Samples(WORDS, LABELS, np.arange(24), WORDS[:0], np.arange(0), 3)

    federation = build_federation(Mine(), partitions.build("iid"), Split(), 2, 0)
    assert federation.inputs.tokens == Tokens(30, declared=False)


@pytest.mark.parametrize(("name", "shape"), [("sensors", (16, 3)), ("phrases", (20,))])
def test_generated_sets_are_drawn_by_seed(name: str, shape: tuple[int, ...]) -> None:
    made = datasets.build({"name": name, "clients": 6, "each": 10, "public": 7})
    first, again, other = made.load(0), made.load(0), made.load(1)
    assert first.x.shape == (60, *shape)
    assert first.public_x.shape == (7, *shape)
    assert (first.x == again.x).all()
    assert (first.x != other.x).any()
    assert set(np.asarray(first.client_ids)) == set(range(6))


def test_phrases_of_one_language_have_no_word_of_another() -> None:
    samples = datasets.build({"name": "phrases", "clients": 3, "each": 200}).load(0)
    assert samples.tokens is not None
    assert samples.x.max() < samples.tokens.count
    words = [set(samples.x[np.asarray(samples.client_ids) == k].flat) - {0} for k in range(3)]
    assert not words[0] & words[1]
    assert not words[1] & words[2]
    assert ((samples.x != 0).sum(1) >= 8).all()
