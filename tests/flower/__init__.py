import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perfed[flower]'")
