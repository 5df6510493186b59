"""PerFed-Kin against its formulas, written out by hand in NumPy, and what must follow from them."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import gammaln
from sklearn.datasets import load_digits

from perfed.algorithms.perfed_evidence import concentrations, label_mix
from perfed.algorithms.perfed_kin import (
    CAP,
    OF_OTHERS,
    PerFedKin,
    _moved,
    bounded,
    expected_mixes,
    found_kinds,
    kinship,
    no_label_excluded,
    prior,
    split,
)
from perfed.algorithms.witnesses import RIDGE, SMALLEST_PROBABILITY, SMALLEST_SHARE, Witnesses
from perfed.config import LINKS, read_mapping
from perfed.core.algorithm import Client, ClientInfo, Reply
from perfed.core.message import Message
from tests.algorithms.test_perfed_evidence import softmax
from tests.conftest import played, simulate
from tests.engines.clients import run_task

CLASSES = 5
ERRORS = PerFedKin().standard_errors
PUBLIC = 60


class ByHand:
    """The server's half, one client after the other, with every table made anew."""

    def __init__(self, decisions: np.ndarray, samples: np.ndarray) -> None:
        classes = decisions.shape[2]
        self.samples = np.minimum(samples, CAP * np.quantile(samples, 0.75))
        spoken = decisions.mean(1) + SMALLEST_SHARE / classes
        self.spoken = spoken / spoken.sum(1, keepdims=True)
        likely = np.maximum(decisions, SMALLEST_PROBABILITY / classes)
        self.ratios = np.log(likely / self.spoken[:, None])
        self.voice = self.samples * (1 - (self.spoken**2).sum(1))

    def table(self, members: list[int]) -> np.ndarray:
        """Least squares over ℓ(x, ·) and an offset for every client, x after x."""
        classes = self.spoken.shape[1]
        ridge = RIDGE / classes * self.samples[members].mean()
        rows, who = [np.sqrt(ridge) * np.eye(classes, classes + len(members))], []
        for place, k in enumerate(members):
            row = np.zeros((classes, classes + len(members)))
            row[:, :classes] = np.eye(classes)
            row[:, classes + place] = 1
            weight = np.sqrt(self.samples[k] * self.spoken[k])
            rows.append(weight[:, None] * row)
            who.append(weight[:, None] * self.ratios[k].T)
        zeros = np.zeros((classes, self.ratios.shape[1]))
        solved = np.linalg.lstsq(np.concatenate(rows), np.concatenate([zeros, *who]), rcond=None)
        table = solved[0][:classes].T
        return table - table.mean(1, keepdims=True)

    def fit(self, k: int, members: list[int]) -> float:
        """The correlation of client k's comparisons with those of the others."""
        table = self.table([j for j in members if j != k])
        weight = self.spoken[k]
        pair = [values - (values @ weight)[:, None] for values in (self.ratios[k], table)]
        own, told = ((np.sqrt(weight) * values).ravel() for values in pair)
        return float(own @ told / np.sqrt(own @ own * (told @ told)))

    def kinship(self, k: int, members: list[int]) -> float:
        """The posterior of two normal laws of its fit, from the fits of the others."""
        others = [j for j in members if j != k]
        if not others:
            return 0.5
        fits = np.array([self.fit(j, members) for j in others])
        weights = self.voice[others] / (self.voice[others] + 1)
        mean = max(0, np.average(fits, weights=weights))
        variance = (mean**2 + weights @ (fits - mean) ** 2) / weights.sum()
        variance /= self.voice[k] / (self.voice[k] + 1)
        mine = self.fit(k, members)
        kin, stranger = (np.exp(-((mine - at) ** 2) / (2 * variance)) for at in (mean, 0))
        return float(len(others) * kin / (len(others) * kin + stranger))

    def mix(self, k: int) -> np.ndarray:
        """What client k may expect: the others' mixes, by how likely they make what it speaks of,
        in proportion to its samples."""
        counts = self.samples[:, None] * self.spoken
        classes = counts.shape[1]
        mixes = [mix_by_hand(counts[j]) for j in range(len(counts)) if j != k]
        mixes.append(np.full(classes, 1 / classes))
        likely = np.array([np.prod(mix ** counts[k]) for mix in mixes])
        return OF_OTHERS * (likely @ np.array(mixes)) / likely.sum() + (1 - OF_OTHERS) / classes


def mix_by_hand(counts: np.ndarray, base: np.ndarray | float | None = None) -> np.ndarray:
    """The mean of Dirichlet laws around a mix, each as likely as it makes the counts."""
    base = np.full(len(counts), 1 / len(counts)) if base is None else base
    laws = [total * base for total in concentrations(len(counts))]
    likely = [np.exp(log_beta(law + counts) - log_beta(law)) for law in laws]
    means = [(law + counts) / (law + counts).sum() for law in laws]
    return np.asarray(np.average(means, axis=0, weights=likely))


def log_beta(law: np.ndarray) -> float:
    """The logarithm of ∫ Π p^(a − 1) over all mixes p."""
    return float(gammaln(law).sum() - gammaln(law.sum()))


def world(
    kinds: list[int], noise: float = 1.0, seed: int = 0, classes: int = CLASSES
) -> tuple[np.ndarray, np.ndarray]:
    """Soft decisions of witnesses who see the same thing, each with errors of its own; in kind g
    every label is the one g places further on."""
    random = np.random.default_rng(seed)
    truth = 1.5 * random.normal(size=(PUBLIC, classes))
    said = [np.roll(truth, kind, axis=1) for kind in kinds]
    errors = noise * random.normal(size=(len(kinds), PUBLIC, classes))
    return softmax(np.array(said) + errors), random.integers(10, 60, size=len(kinds)).astype(float)


def heard(decisions: np.ndarray, samples: np.ndarray) -> Witnesses:
    return Witnesses.hear(torch.tensor(decisions), bounded(torch.tensor(samples)))


def skewed(decisions: np.ndarray, seed: int = 1) -> np.ndarray:
    """The same of clients who know some classes only."""
    random = np.random.default_rng(seed)
    mixes = random.dirichlet(np.full(decisions.shape[2], 0.3), size=len(decisions))
    weighted = decisions * (mixes[:, None] + 1e-6)
    return np.asarray(weighted / weighted.sum(2, keepdims=True))


@pytest.mark.parametrize("change", [lambda decisions: decisions, skewed])
def test_fit_and_table_are_those_written_by_hand(change) -> None:
    decisions, samples = world([0, 0, 1, 1, 0, 1])
    decisions, samples[2] = change(decisions), 1e9  # counts like CAP times the upper quartile
    said, plain = heard(decisions, samples), ByHand(decisions, samples)
    members = [0, 1, 2, 4]
    chosen = torch.zeros(6, dtype=torch.bool)
    chosen[members] = True
    assert np.allclose(said.table(chosen).numpy(), plain.table(members), atol=1e-8)
    wanted = [plain.fit(k, members) for k in range(6)]  # of those who are not members, too
    assert np.allclose(said.fit(chosen).numpy(), wanted, atol=1e-8)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kinds", [[0] * 12, [0] * 40], ids=["12 clients", "40 clients"])
def test_clients_of_one_kind_stay_together(kinds: list[int], seed: int) -> None:
    """However much they err: half of them would be poorer witnesses."""
    for noise in (0.5, 2.0, 5.0):
        assert len(found_kinds(heard(*world(kinds, noise, seed)), ERRORS).unique()) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "kinds",
    [[0, 1] * 5, [0, 1, 2] * 5, [0] * 16 + [1] * 4, [0] * 38 + [1] * 2],
    ids=["two", "three", "a fifth", "two of forty"],
)
def test_kinds_are_found(kinds: list[int], seed: int) -> None:
    found = found_kinds(heard(*world(kinds, 1.0, seed)), ERRORS).tolist()
    pairs = set(zip(kinds, found, strict=True))
    assert len(pairs) == len(set(kinds)) == len(set(found))


def test_other_labels_alone_make_no_kind() -> None:
    """Clients that share few classes, or none, have no reason to part."""
    decisions, samples = world([0] * 20)
    assert len(found_kinds(heard(skewed(decisions), samples), ERRORS).unique()) == 1


@pytest.mark.parametrize("seed", range(5))
def test_clients_who_agree_on_nearly_all_stay_together(seed: int) -> None:
    """Along what little two halves do not agree on both would fit better apart, beyond chance."""
    decisions, samples = leaning(0.5, seed)
    said, half = heard(decisions, samples), torch.arange(20) < 10
    whole, sides = said.fit(torch.ones(20, dtype=torch.bool)), [half, ~half]
    gains = [(said.fit(side) - whole)[side] for side in sides]
    assert all(gain.mean() > 2 * gain.std() / 10**0.5 for gain in gains)
    assert len(found_kinds(said, ERRORS).unique()) == 1


def leaning(how_much: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Soft decisions of two halves who see the same thing, and each a little of its own."""
    random = np.random.default_rng(seed)
    truth = 1.5 * random.normal(size=(PUBLIC, CLASSES))
    own = 1.5 * how_much * random.normal(size=(2, PUBLIC, CLASSES))
    errors = 0.5 * random.normal(size=(20, PUBLIC, CLASSES))
    said = truth + own[np.arange(20) // 10] + errors
    return softmax(said), random.integers(10, 60, size=20).astype(float)


@pytest.mark.parametrize("seed", range(5))
def test_another_kind_explains_less_than_half_of_what_the_own_explains(seed: int) -> None:
    """ρ² of the other half is 1 / (1 + h²)² of the own one's: less than half from h = 0.64 on."""
    for how_much, kinds in ((0.55, 1), (0.8, 2)):
        assert len(found_kinds(heard(*leaning(how_much, seed)), ERRORS).unique()) == kinds


@pytest.mark.parametrize("seed", [0, 3, 7, 8, 9])
def test_in_the_end_nobody_would_fit_another_group_better(seed: int) -> None:
    """Groups were split one after the other; who was put on the wrong side early has moved. With
    other seeds nobody was, or moving ends early: a group would become too small."""
    said = heard(*world([0, 1, 2, 3] * 6, 4.0, seed))
    kind = found_kinds(said, ERRORS)
    fits = torch.stack([said.fit(kind == group) for group in range(int(kind.max()) + 1)])
    assert torch.equal(fits.argmax(0), kind)


@pytest.mark.parametrize("seed", [3, 14])
def test_in_the_end_no_group_can_be_split(seed: int) -> None:
    """Not even after clients have moved. With these seeds a split is found only then."""
    said = heard(*world([0, 1, 2, 3] * 4, 4.0, seed))
    kind = found_kinds(said, ERRORS)
    assert int(kind.max()) == 3
    for group in range(4):
        assert split(said.only(torch.where(kind == group)[0]), ERRORS) is None


@pytest.mark.parametrize("seed", [0, 1, 15])
def test_a_louder_kind_need_not_gain_by_parting(seed: int) -> None:
    """The table of both is nearly its own. The quiet kind would be taught what is wrong for it."""
    kinds = torch.tensor([0] * 14 + [1] * 4)
    decisions, _ = world(kinds.tolist(), 3.0, seed)
    said = heard(decisions, np.where(kinds == 0, 80.0, 4.0))
    loud, whole = kinds == 0, said.fit(torch.ones(18, dtype=torch.bool))
    gain = (said.fit(loud) - whole)[loud]
    assert gain.mean() < gain.std() / 14**0.5
    found = found_kinds(said, ERRORS)
    assert torch.equal(found == found[0], loud)


def test_nobody_is_left_alone_by_a_move() -> None:
    """One client is no kind: of two, the one that would fit the other group better stays."""
    said = heard(*world([0, 0, 0, 0, 0, 1]))
    kind = torch.tensor([0, 0, 0, 0, 1, 1])
    fits = torch.stack([said.fit(kind == group) for group in (0, 1)])
    assert fits.argmax(0).tolist() == [0, 0, 0, 0, 0, 1]
    assert _moved(said, kind).tolist() == kind.tolist()


def test_the_order_of_clients_does_not_matter() -> None:
    decisions, samples = world([0, 1, 2] * 5)
    order = np.random.default_rng(0).permutation(15)
    found = found_kinds(heard(decisions, samples), ERRORS).numpy()
    again = found_kinds(heard(decisions[order], samples[order]), ERRORS).numpy()
    assert len(set(zip(found[order], again, strict=True))) == 3


@pytest.mark.parametrize("seed", range(5))
def test_who_is_alone_with_its_labels_is_a_stranger(seed: int) -> None:
    decisions, samples = world([0] * 14 + [1], seed=seed)
    said = heard(decisions, samples)
    kind = found_kinds(said, ERRORS)
    assert len(kind.unique()) == 1
    kin = kinship(said, kind)
    assert float(kin[-1]) < 0.01
    assert (kin[:-1] > 0.99).all()


def test_kinship_is_that_written_by_hand() -> None:
    decisions, samples = world([0, 0, 0, 1, 1, 1, 0])
    decisions = skewed(decisions)
    kind = torch.tensor([0, 0, 0, 1, 1, 0, 0])
    plain = ByHand(decisions, samples)
    groups = [[j for j in range(7) if kind[j] == kind[k]] for k in range(7)]
    wanted = [plain.kinship(k, groups[k]) for k in range(7)]
    assert np.allclose(kinship(heard(decisions, samples), kind).numpy(), wanted, atol=1e-8)
    assert max(wanted) - min(wanted) > 0.3


def test_of_a_client_that_says_nothing_only_the_size_of_its_group_is_known() -> None:
    decisions, samples = world([0] * 6)
    decisions[5] = np.array([1 - 4e-12] + [1e-12] * 4)
    said = heard(decisions, samples)
    assert float(said.heard[5]) < 0.1
    kin = kinship(said, torch.zeros(6, dtype=torch.long))
    assert float(kin[5]) == pytest.approx(5 / 6, abs=0.05)


def test_where_nobody_agrees_a_fit_says_nothing() -> None:
    """Of two who say the opposite of each other neither is the stranger."""
    said = 2 * np.random.default_rng(0).normal(size=(PUBLIC, CLASSES))
    opposite = heard(softmax(np.array([said, -said])), np.full(2, 20.0))
    kind = torch.zeros(2, dtype=torch.long)
    assert (opposite.fit(kind == 0) < -0.5).all()
    assert torch.allclose(kinship(opposite, kind), torch.tensor(0.5).double())


@pytest.mark.parametrize(
    "decisions",
    [
        np.full((4, 3, CLASSES), 1 / CLASSES),
        np.eye(CLASSES)[np.zeros((4, 3), dtype=int)],
        np.eye(CLASSES)[np.arange(12).reshape(4, 3) % CLASSES],
        np.full((1, 1, CLASSES), 1 / CLASSES),
    ],
    ids=["uniform", "one class", "sure of all", "one client"],
)
def test_whatever_is_said_what_is_sent_is_finite(decisions: np.ndarray) -> None:
    for samples in (1.0, 1e9):
        said = heard(decisions, np.full(len(decisions), samples))
        kind = found_kinds(said, ERRORS)
        expected = prior(torch.full((len(said), 3, 4), -4.6), kind, kinship(said, kind))
        assert expected.isfinite().all()
        assert said.table(kind == 0).isfinite().all()


def test_what_helps_others_speaks_for_kin_and_against_strangers() -> None:
    """What a client itself told does not count, nor who has not been taught, nor another group."""
    gains = torch.tensor([1.0, 2.0, 0.0, 6.0, -3.0, -5.0])[:, None, None].expand(6, 3, 4)
    kind = torch.tensor([0, 0, 0, 0, 1, 1])
    kin = torch.tensor([1.0, 0.5, 0.0, 0.75, 1.0, 0.0])
    found = prior(gains, kind, kin)
    assert torch.allclose(found[:, 0, 0], torch.tensor([4.0, 0.0, -3.0, 0.75, -5.0, -3.0]))
    assert torch.equal(found, found[:, :1, :1].expand(6, 3, 4))


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_constants_mean_the_same_for_any_number_of_classes(classes: int) -> None:
    """A client of equal shares loses a thousandth of its weight to what it never speaks of, and
    who says the same of all classes compares nothing."""
    half = np.full((1, 1, classes), 1e-12)
    half[..., : classes // 2] = 2 / classes
    spoken = heard(half, np.array([10.0])).spoken[0]
    assert float(spoken[classes // 2 :].sum()) == pytest.approx(0.5e-3, rel=0.01)
    level = heard(np.full((3, 4, classes), 1 / classes), np.full(3, 10.0))
    assert float(level.table().abs().max()) < 1e-9


def test_a_client_that_lies_about_its_samples_counts_like_four_others() -> None:
    decisions, samples = world([0] * 9)
    samples[:] = 20
    decisions[0], everyone = np.roll(decisions[0], 2, axis=1), torch.ones(9, dtype=torch.bool)
    lied, four = samples.copy(), samples.copy()
    lied[0], four[0] = 1e12, CAP * 20
    tables = [heard(decisions, of).table(everyone) for of in (lied, four)]
    assert torch.allclose(*tables, atol=1e-9)


def test_two_classes() -> None:
    decisions, samples = world([0, 1] * 6, classes=2)
    found = found_kinds(heard(decisions, samples), ERRORS).tolist()
    assert len(set(zip([0, 1] * 6, found, strict=True))) == len(set(found)) == 2


@pytest.mark.usefixtures("float64")
def test_two_rounds_by_hand() -> None:
    """The server's state and what it sends, from what clients sent."""
    simulation = played(2, algorithm="perfed-kin", models={"architectures": ["mlp", "cnn"]})
    state = simulation.progress.state
    bank = {name: dict(sent) for name, sent in state["bank"].items()}
    decisions = np.array([sent["soft_decisions"].cpu().numpy() for sent in bank.values()])
    samples = np.array([float(sent["samples"]) for sent in bank.values()])
    plain = ByHand(decisions, samples)
    for row, name in enumerate(bank):
        kind = int(state["kind"][name])
        members = [j for j, other in enumerate(bank) if int(state["kind"][other]) == kind]
        others = [list(bank.values())[j]["gains"].cpu().numpy() for j in members if j != row]
        taught = [gains for gains in others if gains.any()]
        gains = np.mean(taught, axis=0) if taught else np.zeros_like(others[0])
        kin = plain.kinship(row, members)
        told = simulation.algorithm.broadcast(
            simulation.server(0), state, ClientInfo(int(name), "mlp", int(samples[row]))
        )
        assert np.allclose(told["evidence"].cpu().numpy(), plain.table(members), atol=1e-6)
        expected = kin * gains - (1 - kin) * np.abs(gains)
        assert np.allclose(told["gains"].cpu().numpy(), expected, atol=1e-6)
        assert np.allclose(told["mix"].cpu().numpy(), plain.mix(row), atol=1e-9)


def test_training_samples_speak_against_what_is_wrong_here() -> None:
    """Taught the true labels of the public set, a student knows its training samples nearly as well
    as the witness; taught each under the name of the next, it does not."""
    simulation = simulate(
        algorithm="perfed-kin",
        data={"name": "digits", "public": 400},
        models={"architectures": ["mlp"]},
        partition="iid",
        training={"learning_rate": 0.1, "steps": 200, "batch_size": 8, "public_batch_size": 16},
    )
    where = simulation.federation.samples.public_index
    labels = load_digits(return_X_y=True)[1][where]
    method = simulation.algorithm
    assert isinstance(method, PerFedKin)
    spoken = []

    def client_round(client: Client, message: Message) -> Message:
        answer = method.client_round(client, message)
        at_home = method.at_home(client, client.state["student"], client.state["mix"].log())
        assert isinstance(at_home, torch.Tensor)
        spoken[-1].append(float(at_home[1, -1]))  # as it is, and alone
        return answer

    for shift in (0, 1):
        evidence = 6 * torch.eye(10)[(labels + shift) % 10]
        message = Message(evidence=evidence, gains=torch.zeros(3, 4), mix=torch.full((10,), 0.1))
        spoken.append([])
        run_task(simulation.population, client_round, dict.fromkeys(range(6), message), 0)
    right, wrong = map(np.array, spoken)
    assert (wrong < right - 3).all()  # by more than the whole burden of proof


@pytest.mark.parametrize("count", [3, 30])
def test_the_mix_to_expect_is_that_of_those_with_the_same_labels(count: int) -> None:
    """Two groups, each with two of five labels; a client heard with one label of its group expects
    the other one, too, the more so the more others there are; and no label is excluded."""
    mixes = np.full((2, CLASSES), 1e-6)
    mixes[0, :2] = mixes[1, 2:4] = 0.5
    spoken = np.repeat(mixes, count, axis=0)
    spoken = np.concatenate([spoken, [[1.0, 1e-6, 1e-6, 1e-6, 1e-6]]])
    spoken /= spoken.sum(1, keepdims=True)
    samples = np.full(len(spoken), 20.0)
    samples[-1] = 2
    said = heard(spoken[:, None].repeat(PUBLIC, axis=1), samples)
    expected = expected_mixes(said).numpy()
    assert np.allclose(expected.sum(1), 1)
    assert expected[-1, :2].sum() > 0.75
    assert expected[-1, 2:].max() < 0.1
    assert (expected >= (1 - OF_OTHERS) / CLASSES).all()
    plain = ByHand(spoken[:, None].repeat(PUBLIC, axis=1), samples)
    assert np.allclose(expected, [plain.mix(k) for k in range(len(spoken))], atol=1e-6)
    counted = torch.tensor([2, 0, 0, 0, 0])
    alone, told = label_mix(counted), label_mix(counted, torch.tensor(expected[-1]))
    assert float(told[1]) > 2 * float(alone[1])
    assert np.allclose(told.numpy(), mix_by_hand(counted.numpy(), expected[-1]), atol=1e-6)


@pytest.mark.parametrize(
    "wire",
    [read_mapping("tiny", LINKS)["wire"], [{"name": "probability-bits", "bits": 1}]],
)
def test_a_mix_in_few_bits_excludes_no_label(wire: list[Any]) -> None:
    """Rounded to zero, a label made the whole mix a NaN, and with --link tiny a run ended."""
    simulation = played(3, algorithm="perfed-kin", wire=wire)
    for client in range(6):
        mix = simulation.population.record(client).state.get("mix", torch.ones(1))
        assert mix.isfinite().all()
        assert float(mix.min()) > 0


def test_what_was_told_whole_is_taken_as_it_is() -> None:
    told = torch.tensor([0.1, 0.02, 0.5, 0.02, 0.36])
    assert no_label_excluded(told) is told
    raised = no_label_excluded(torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0]))
    assert torch.allclose(raised, torch.tensor([0.02, 0.5, 0.5, 0.02, 0.02]) / 1.06)


def test_who_is_like_nobody_expects_the_uniform_mix() -> None:
    spoken = np.full((6, CLASSES), 1e-6)
    spoken[:5, 0] = spoken[5, 4] = 1.0
    spoken /= spoken.sum(1, keepdims=True)
    said = heard(spoken[:, None].repeat(PUBLIC, axis=1), np.full(6, 20.0))
    assert np.allclose(expected_mixes(said)[5].numpy(), 1 / CLASSES, atol=1e-3)
    alone = Witnesses.hear(torch.full((1, PUBLIC, CLASSES), 1 / CLASSES), torch.tensor([9.0]))
    assert np.allclose(expected_mixes(alone).numpy(), 1 / CLASSES)


def test_nobody_is_taught_before_anybody_was_heard() -> None:
    simulation = simulate(algorithm="perfed-kin")
    told = simulation.algorithm.broadcast(simulation.server(0), {}, ClientInfo(0, "mlp", 5))
    assert told == Message()


def test_a_newcomer_may_be_of_any_kind() -> None:
    """What the largest kind gains counts as far as a client is probably of it."""
    decisions, samples = world([0, 0, 0, 0, 1, 1, 1])
    gains = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    replies = [
        Reply(
            ClientInfo(k, "mlp", 5),
            Message(soft_decisions=torch.tensor(said), samples=int(number), gains=gains),
            1.0,
        )
        for k, (said, number) in enumerate(zip(decisions, samples, strict=True))
    ]
    state = PerFedKin().merge(simulate().server(0), {}, replies)
    assert [kind == state["largest"] for kind in state["kind"].values()] == [True] * 4 + [False] * 3
    largest = sum(state["told"][str(k)]["gains"] for k in range(4))
    torch.testing.assert_close(state["newcomers"]["gains"], largest / 7)
    mixes = [told["mix"] for told in state["told"].values()]
    torch.testing.assert_close(state["newcomers"]["mix"], torch.stack(mixes).mean(0))


def test_of_a_newcomer_only_the_share_of_the_largest_kind_is_known() -> None:
    state = {
        "tables": torch.tensor([[[0.0]], [[1.0]]]),
        "kind": {"0": torch.tensor(0)},
        "told": {"0": {"gains": torch.tensor([[2.0]]), "mix": torch.tensor([1.0])}},
        "largest": torch.tensor(1),
        "newcomers": {"gains": torch.tensor([[3.0]]), "mix": torch.tensor([1.0])},
    }
    method, server = PerFedKin(), simulate().server(0)
    heard_of = method.broadcast(server, state, ClientInfo(0, "mlp", 5))
    newcomer = method.broadcast(server, state, ClientInfo(7, "mlp", 5))
    assert (float(heard_of["evidence"]), float(heard_of["gains"])) == (0.0, 2.0)
    assert (float(newcomer["evidence"]), float(newcomer["gains"])) == (1.0, 3.0)
