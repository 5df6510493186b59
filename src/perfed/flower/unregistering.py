"""A site that may not come in any more: it left, or somebody else has its key.

Flower lists nodes by numbers that nobody knows, and without their keys. Here a site goes by the
file of its public key, as it does where it is registered.
"""

from __future__ import annotations

from pathlib import Path

import click
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from perfed.core.errors import ConfigError, RunError

ENDING = ".unregistered"  # 'serve' registers what ends in .pub


def unregister(file: Path) -> Path:
    """At once, also while a run goes on; returns what the file is called now."""
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
    from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest
    from flwr.supercore.constant import NodeStatus

    key = public_key(file)
    try:
        client = init_http_client_from_connection(read_superlink_connection(None))
        try:
            with flwr_cli_exc_handler():
                nodes = client.ListNodes(ListNodesRequest()).nodes_info
                known = [
                    node.node_id
                    for node in nodes
                    if node.public_key == key and node.status != NodeStatus.UNREGISTERED
                ]
                if not known:
                    raise RunError(f"the superlink knows no site with the key in {file}")
                for node in known:
                    client.UnregisterNode(UnregisterNodeRequest(node_id=node))
        finally:
            client.close()
    except click.ClickException as error:
        raise RunError(error.format_message()) from None
    return file.rename(file.with_name(f"{file.name}{ENDING}"))


def public_key(file: Path) -> bytes:
    """As Flower has it, in PEM."""
    try:
        key = load_ssh_public_key(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"{file} is no public key of a site: 'certificates' has them") from None
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
