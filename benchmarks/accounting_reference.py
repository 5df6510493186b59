"""What opacus' accountant says, for tests/core/test_accounting.py to compare with.

    pip install --no-deps --target /tmp/reference opacus opt_einsum
    PYTHONPATH=/tmp/reference python benchmarks/accounting_reference.py

opacus is no dependency, not even of the tests: it would bring its own optimizers and models for
one formula.
"""

from __future__ import annotations

import json
import warnings
from importlib.metadata import version
from pathlib import Path

SETTINGS = [  # rate q, noise σ, steps
    (0.01, 1.0, 1000),
    (0.1, 2.0, 500),
    (0.5, 0.5, 10),
    (0.8, 1.0, 133),
    (0.3, 6.0, 300),
    (0.001, 4.0, 100_000),
    (1.0, 3.0, 50),
]
ORDERS = [1.1, 1.5, 2.0, 2.7, 5.0, 10.9, 32.0, 63.0]
DELTA = 1e-5


def main() -> None:
    from opacus.accountants.analysis import rdp as theirs

    warnings.simplefilter("ignore")
    lines = []
    usual = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))  # its accountant's own
    for rate, noise, steps in SETTINGS:
        how = {"q": rate, "noise_multiplier": noise}
        one = theirs.compute_rdp(**how, steps=1, orders=ORDERS)
        spent = theirs.compute_rdp(**how, steps=steps, orders=usual)
        epsilon, _ = theirs.get_privacy_spent(orders=usual, rdp=spent, delta=DELTA)
        lines.append(
            {
                "rate": rate,
                "noise": noise,
                "steps": steps,
                "rdp": [float(x) for x in one],
                "epsilon": float(epsilon),
            }
        )
    record = {"opacus": version("opacus"), "orders": ORDERS, "delta": DELTA, "settings": lines}
    path = Path(__file__).parent / "results" / "accounting_reference.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
