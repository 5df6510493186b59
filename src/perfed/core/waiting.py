"""Threads of one operation sleep while they wait for each other.

torch's threads (OpenMP's) keep a core busy while they wait. Where other programs want the cores,
the one that is waited for cannot get on: an operation on two threads then takes ten times as long
and more. How threads wait is read once, when torch is loaded, so this comes first; what the
environment says already stays.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
