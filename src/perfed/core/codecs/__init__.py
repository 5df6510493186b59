"""Codecs: stages of the wire that make messages smaller.

What a codec adds to a message it names with a ``|``, which no name of an algorithm has once it is
escaped. Every codec checks sizes before it makes anything of what has come.
"""

from perfed.core.codecs.cached import Cached
from perfed.core.codecs.deflate import Deflate
from perfed.core.codecs.number_bits import NumberBits
from perfed.core.codecs.probability_bits import ProbabilityBits
from perfed.core.codecs.top_changes import TopChanges
from perfed.core.codecs.top_probabilities import TopProbabilities

__all__ = [
    "Cached",
    "Deflate",
    "NumberBits",
    "ProbabilityBits",
    "TopChanges",
    "TopProbabilities",
]
