"""A client outside any job, for tests that do its work step by step."""

from perfed.engines import Population, SequentialEngine
from perfed.engines.base import EngineClient


def working_client(population: Population, number: int, round: int) -> EngineClient:
    """One whose requests are answered at once."""
    client = population.client(number, round)
    client.ask = SequentialEngine().answer
    return client
