"""The attacks of benchmarks/privacy_attacks.py find what is there, and nothing where nothing is."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from privacy_attacks import FALSE_ALARMS, LINKS, area, found_at, lira  # noqa: E402


@pytest.mark.parametrize("numbers", [1, 5])
def test_membership_is_found_where_it_shows_and_nowhere_else(numbers: int) -> None:
    draw = np.random.default_rng(0)
    member = draw.random((40, 200)) < 0.5
    noise = draw.normal(size=(40, 200, numbers))
    hardness = draw.normal(size=(1, 200, numbers)) * 3  # of a sample, in or out: no evidence
    assert lira(noise + hardness, member)["auc"] == pytest.approx(0.5, abs=0.03)
    shown = lira(noise + hardness + 2 * member[..., None], member)
    assert shown["auc"] > 0.85
    assert shown["found"] > 0.05


def test_the_area_and_the_share_found_are_as_defined() -> None:
    draw = np.random.default_rng(1)
    truth = draw.random(5000) < 0.4
    ratio = np.round(draw.normal(size=5000) + truth, 1)  # with equals
    assert area(ratio, truth) == pytest.approx(roc_auc_score(truth, ratio))
    bound = np.quantile(ratio[~truth], 0.99)
    assert found_at(ratio, truth, 0.01) <= (ratio[truth] >= bound).mean()
    assert (ratio[~truth] > np.sort(ratio[~truth])[::-1][int(0.01 * (~truth).sum())]).mean() <= 0.01


def test_no_attack_on_record_finds_more_than_the_account_allows() -> None:
    record = json.loads((ROOT / "benchmarks/results/privacy_attacks.json").read_text())
    assert record["links"] == LINKS
    for row in record["rows"]:
        privacy = LINKS[row["link"]].get("privacy")
        if privacy is not None:
            allowed = math.exp(privacy["epsilon"]) * FALSE_ALARMS + privacy["delta"]
            assert row["found"] <= allowed
            assert row["auc"] < 0.65
