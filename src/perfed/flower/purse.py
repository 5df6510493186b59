"""What a site has spent of its samples' privacy, over all runs and coordinators.

``state/privacy.json`` has the number of samples that was told, once, the noise that was on it, and
every noised training. A training is written there before it begins: killed at any moment, a site
has counted too much, never too little. The seed of the noise is drawn anew for every task and kept
nowhere: a folder that is restored from a backup does not bring the same noise again. But it has
forgotten what was spent since.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from perfed.core import tensorfile
from perfed.core.accounting import Spending
from perfed.core.errors import RunError
from perfed.core.privacy import Privacy, told_number
from perfed.core.streams import numpy_stream

PURSE = "privacy.json"


class Purse:
    """The file, read and written as a whole."""

    def __init__(self, state: Path) -> None:
        self._path = state / PURSE
        self._content: dict[str, Any] = {}
        self.secret = secrets.randbits(256)
        if self._path.is_file():
            try:
                self._content = json.loads(self._path.read_text("utf-8"))
                self.told = int(self._content["told"])
                self.telling = Spending(1, 1.0, float(self._content["count_noise"]))
                self.spent = [Spending(*one) for one in self._content["spent"]]
            except (ValueError, TypeError, KeyError):
                raise RunError(
                    f"{self._path} is corrupt: without it nobody knows what this site has spent"
                ) from None

    @classmethod
    def open(cls, state: Path, privacy: Privacy, samples: int) -> Purse:
        """Of a site with so many training samples; what it told first counts."""
        purse = cls(state)
        if not purse._content:
            draw = numpy_stream(purse.secret, "told samples").standard_normal()
            told = told_number(samples, privacy, draw)
            # Kept: site.yaml may say another later, when the number is out.
            purse._content = {"told": told, "count_noise": privacy.count_noise, "spent": []}
            purse._write()
            purse = cls(state)
        return purse

    def spend(self, spending: Spending) -> None:
        self.spent.append(spending)
        self._content["spent"] = [list(one) for one in self.spent]
        self._write()

    def _write(self) -> None:
        tensorfile.write_atomically(self._path, json.dumps(self._content).encode())
