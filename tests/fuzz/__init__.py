"""Fuzzing: whatever comes from outside is accepted rightly or refused in one line.

``make fuzz`` mutates valid inputs 100,000 times (``python -m tests.fuzz``), guided by coverage
where atheris is installed, by hypothesis elsewhere. ``test_fuzz.py`` is the bounded part for every
change. A target is one file here; a fault that was found is a test in ``test_found.py``.
"""
