"""Sequences that are generated: small problems to try networks for sequences with, without a
download. They are measurements of nothing; each seed draws its own.

In both, a client is of one of three kinds, which nobody tells the server, and samples of different
kinds look different. So a client with few samples has kin to learn from. Each client has its own
mix of labels.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from perfed.core.inputs import Tokens
from perfed.core.schema import option
from perfed.core.streams import numpy_stream
from perfed.data.datasets import Dataset, Samples, datasets

Random = np.random.Generator
KINDS = 3  # ways to wear a sensor, languages
STEPS, AXES = 16, 3
TOPICS, TOPIC_WORDS, OTHER_WORDS = 6, 20, 60  # in each language
LANGUAGE_WORDS = TOPICS * TOPIC_WORDS + OTHER_WORDS
SHORTEST, LONGEST = 8, 20  # tokens of a phrase


@dataclass(frozen=True)
class Generated(Dataset):
    """Base of both: clients with samples of their kind, and public samples of all kinds."""

    clients: int = option(30, "clients the data names: as many as the experiment has", ge=1)
    each: int = option(80, "samples of each client", ge=3)
    public: int = option(200, "unlabeled public samples, of all kinds", ge=0)

    @abstractmethod
    def draw(self, kinds: np.ndarray, labels: np.ndarray, random: Random) -> np.ndarray:
        """Samples of these kinds and labels."""

    def generated(self, seed: int, classes: int, tokens: Tokens | None = None) -> Samples:
        random = numpy_stream(seed, f"generated/{self.registered_name}")
        mixes = random.dirichlet(np.ones(classes), self.clients)  # each does some things more often
        owner = np.repeat(np.arange(self.clients), self.each)
        labels = np.array([random.choice(classes, p=mixes[client]) for client in owner])
        x = self.draw(owner % KINDS, labels, random)
        public = self.draw(
            random.integers(KINDS, size=self.public),
            random.integers(classes, size=self.public),
            random,
        )
        return Samples(
            x,
            labels,
            np.arange(len(x)),
            public,
            np.arange(len(public)),
            classes,
            client_ids=owner,
            tokens=tokens,
        )


@datasets.register("sensors")
@dataclass(frozen=True)
class Sensors(Generated):
    """Generated: six movements, slow or fast along one of three axes, 16 steps × 3 numbers.

    A client wears its motion sensor in one of three ways: another axis points down, and gravity is
    on it. Public samples are unlabeled movements of all three.
    """

    noise: float = option(0.3, "deviation of the noise; a movement has amplitude 1", ge=0)

    def load(self, seed: int) -> Samples:
        return self.generated(seed, classes=2 * AXES)

    def draw(self, kinds: np.ndarray, labels: np.ndarray, random: Random) -> np.ndarray:
        axes, count = np.arange(AXES), len(labels)
        swings = np.where(labels < AXES, 1.0, 3.0) * random.uniform(0.85, 1.15, count)
        phase = random.uniform(0, 2 * np.pi, (count, 1, AXES))
        time = np.arange(STEPS)[:, None] / STEPS
        wave = np.sin(2 * np.pi * swings[:, None, None] * time + phase)
        strength = np.where(axes == labels[:, None] % AXES, 1.0, 0.2)
        gravity = np.where(axes == kinds[:, None], 2.0, 0.0)
        noise = self.noise * random.standard_normal((count, STEPS, AXES))
        return (strength[:, None] * wave + gravity[:, None] + noise).astype(np.float32)


@datasets.register("phrases")
@dataclass(frozen=True)
class Phrases(Generated):
    """Generated: phrases of 8 to 20 tokens on six topics, filled up to 20 with token 0.

    A client writes in one of three languages, which have no word in common. A language has 20 words
    for each topic and 60 others. Public samples are unlabeled phrases of all three.
    """

    telling: float = option(0.4, "share of the words that are of the topic", ge=0, le=1)

    def load(self, seed: int) -> Samples:
        return self.generated(seed, TOPICS, Tokens(1 + KINDS * LANGUAGE_WORDS))

    def draw(self, kinds: np.ndarray, labels: np.ndarray, random: Random) -> np.ndarray:
        shape = (len(labels), LONGEST)
        of_topic = labels[:, None] * TOPIC_WORDS + random.integers(TOPIC_WORDS, size=shape)
        other = TOPICS * TOPIC_WORDS + random.integers(OTHER_WORDS, size=shape)
        word = np.where(random.random(shape) < self.telling, of_topic, other)
        token = 1 + kinds[:, None] * LANGUAGE_WORDS + word
        lengths = random.integers(SHORTEST, LONGEST + 1, (len(labels), 1))
        return np.where(np.arange(LONGEST) < lengths, token, 0)
