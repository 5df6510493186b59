"""CIFAR-10 and CIFAR-100, once ``perfed data get`` has stored them.

Train and test images are one set here, train first: every client makes parts of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from perfed.core.errors import ConfigError
from perfed.core.schema import option
from perfed.data.cache import Arrays, ImageSet, Source, default_root, find, load
from perfed.data.datasets import (
    Dataset,
    Samples,
    Unlabeled,
    datasets,
    drawn,
    finished,
    hold_out_public,
)
from perfed.data.readers import PickledBatches, PixelRows

CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange
orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit
raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip
turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR10 = ImageSet(
    name="cifar10",
    source=Source(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
    ),
    classes=tuple(CIFAR10_NAMES.split()),
    layouts=(
        PickledBatches(
            "official archive",
            archive="cifar-10-python.tar.gz",
            files=(*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
            labels="labels",
        ),
        PixelRows(),
    ),
)

CIFAR100 = ImageSet(
    name="cifar100",
    source=Source(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
    ),
    classes=tuple(CIFAR100_NAMES.split()),
    layouts=(
        PickledBatches(
            "official archive",
            archive="cifar-100-python.tar.gz",
            files=("train", "test"),
            labels="fine_labels",
        ),
    ),
)

IMAGE_SETS = {each.name: each for each in (CIFAR10, CIFAR100)}

SAMPLES_HELP = "use this many private images, for a quick run; 0: all"
FOLDER_HELP = "the folder of the stored sets; empty: where 'perfed data get' puts them"


@datasets.register("cifar10")
@dataclass(frozen=True)
class Cifar10(Dataset):
    """CIFAR-10, all 60,000 images; the public set is drawn from CIFAR-100, as in the paper."""

    public: int = option(2000, "how many unlabeled images are the public set", ge=0)
    public_from: Literal["cifar100", "itself"] = option(
        "cifar100", "whose images these are; its own are held out of the 60,000"
    )
    samples: int = option(0, SAMPLES_HELP, ge=0)
    folder: str = option("", FOLDER_HELP)

    def load(self, seed: int) -> Samples:
        private = _stored(CIFAR10, self.folder)
        if self.public_from == "itself":
            return finished(_held_out(private, CIFAR10, self.public, seed), self.samples, seed)
        public = private.pixels[:0]
        if self.public:
            public = _stored(CIFAR100, self.folder).pixels
        if self.public > len(public):
            raise ConfigError(
                f"{self.public} public images of the {len(public)} stored of cifar100",
                "data.public",
            )
        public_index = drawn(self.public, len(public), seed, "public-set")
        samples = Samples(
            private.pixels,
            _labels(private, CIFAR10),
            np.arange(len(private.pixels)),
            public[public_index],
            public_index,
            len(CIFAR10.classes),
        )
        return finished(samples, self.samples, seed)


@datasets.register("cifar100")
@dataclass(frozen=True)
class Cifar100(Dataset):
    """CIFAR-100, all 60,000 images and 100 classes; the public set is held out of them, so that
    nothing else needs to be stored."""

    public: int = option(2000, "how many samples are held out as the unlabeled public set", ge=0)
    samples: int = option(0, SAMPLES_HELP, ge=0)
    folder: str = option("", FOLDER_HELP)

    def load(self, seed: int) -> Samples:
        held = _held_out(_stored(CIFAR100, self.folder), CIFAR100, self.public, seed)
        return finished(held, self.samples, seed)

    def unlabeled(self, seed: int) -> Unlabeled:
        pixels = _stored(CIFAR100, self.folder).pixels  # with or without labels
        index = drawn(self.samples or len(pixels), len(pixels), seed, "public-set")
        return Unlabeled(pixels[index], index, pixels=True)


def _held_out(stored: Arrays, of: ImageSet, public: int, seed: int) -> Samples:
    """The images of a set, some of them as the public set."""
    held = hold_out_public(stored.pixels, _labels(stored, of), public, seed)
    return dataclasses.replace(held, classes=len(of.classes))


def _stored(wanted: ImageSet, folder: str) -> Arrays:
    root = Path(folder).expanduser() if folder else default_root()
    stored = find(wanted.name, root)
    if stored is None:
        command = f"perfed data get {wanted.name}" + (f" --to {folder}" if folder else "")
        raise ConfigError(f"{wanted.name} is not in {root}; get it with: {command}", "data")
    return load(stored)


def _labels(arrays: Arrays, wanted: ImageSet) -> np.ndarray:
    if arrays.labels is None:
        raise ConfigError(
            f"the stored {wanted.name} has no labels: it can serve as a public set only", "data"
        )
    return arrays.labels
