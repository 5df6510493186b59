"""Clients outside any call, for tests that do their work step by step."""

from collections.abc import Callable, Mapping
from typing import Any

from perfed.core.message import Message
from perfed.core.streams import torch_stream
from perfed.engines import ClientRecord, Population, SequentialEngine
from perfed.engines.base import EngineClient


def working_client(population: Population, number: int, round: int) -> EngineClient:
    """One whose requests are answered at once."""
    client = population.client(number, round)
    client.ask = SequentialEngine().answers
    return client


def run_task(
    population: Population,
    task: Callable[[Any, Message], Message | None],
    messages: Mapping[int, Message],
    round: int,
) -> tuple[dict[int, Message], dict[int, ClientRecord]]:
    """Each client's reply to its message, and what those that changed then hold; not stored."""
    replies: dict[int, Message] = {}
    records: dict[int, ClientRecord] = {}
    for number, message in messages.items():
        client = working_client(population, number, round)
        with torch_stream(population.seed, "module", number, round):
            reply = task(client, message)
        if reply is not None:
            replies[number] = reply
        if client.changed():
            records[number] = client.record()
    return replies, records
