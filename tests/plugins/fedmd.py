"""FedMD (Li and Wang 2019), without labels of the public set: clients digest, then revisit.

All send their logits on the public set; the mean is the consensus. In a round a client first
learns to say what the consensus says, on public samples, then trains on its own.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import l1_loss

from perfed.core.algorithm import Algorithm, supervised
from perfed.core.declaration import REALS, Array, Messages
from perfed.core.message import Message
from perfed.core.schema import option


@dataclass(frozen=True)
class FedMD(Algorithm):
    digest_steps: int = option(5, "steps a round on the consensus", ge=0)

    needs_public_set = trains_on_public_set = has_opening = True

    def messages(self):
        logits = Array(("P", "N"), REALS)
        return Messages(up={"logits": logits}, down={"consensus": logits}, evaluation={})

    def first_message(self, client):
        return Message(logits=client.logits())

    def merge(self, server, state, replies):
        return {"consensus": torch.stack([r.message["logits"] for r in replies]).mean(0)}

    def broadcast(self, server, state, client):
        return Message(consensus=state["consensus"])

    def client_round(self, client, message):
        digested = client.sgd(
            client.weights, self.digest, message["consensus"], steps=self.digest_steps
        )
        client.weights = client.sgd(digested, supervised)
        return self.first_message(client)

    def digest(self, model, private, public, consensus):
        return l1_loss(model.public(public.x), consensus[public.index])
