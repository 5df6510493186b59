"""FML (Shen et al. 2020): each client trains its own network and a small shared one together.

The two learn from each other's opinion of the client's samples; only the small one is sent and
averaged. An opinion is a constant in the other's loss, as in the authors' code.
"""

from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from perfed.core.algorithm import Algorithm, OfNetwork, weighted_average
from perfed.core.declaration import SAMPLES, Messages, Model
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.models import Architecture


@dataclass(frozen=True)
class FML(Algorithm):
    small: Architecture = option("mlp", "the network that is shared")
    labels: float = option(0.5, "share of the labels in each loss", ge=0, le=1)

    evaluated_with_server = True

    def messages(self):
        model = {"model": Model("small")}
        return Messages(up=model | {"samples": SAMPLES}, down=model, evaluation=model)

    def networks(self):
        return {"small": self.small}

    def start(self, server):
        return {"model": server.initial("small", 0)}

    def broadcast(self, server, state, client):
        return Message(**state)

    evaluation_message = broadcast

    def client_round(self, client, message):
        both = client.sgd({"own": client.weights, "small": message["model"]}, self.objective)
        client.weights = both["own"]
        return Message(model=both["small"], samples=client.samples)

    def objective(self, models, private, public):
        own, small = models["own"](private.x), models["small"](private.x)
        return self.learnt(own, small, private.y) + self.learnt(small, own, private.y)

    def learnt(self, student, teacher, y):
        taught = cross_entropy(student, teacher.detach().softmax(1))  # KL, up to a constant
        return self.labels * cross_entropy(student, y) + (1 - self.labels) * taught

    def merge(self, server, state, replies):
        weights = [reply.weight for reply in replies]
        return {"model": weighted_average([r.message["model"] for r in replies], weights)}

    def models(self, client, message):
        return {"personal": client.weights, "global": OfNetwork(message["model"], "small")}
