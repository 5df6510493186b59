"""``python -m perfed`` is ``perfed``."""

from perfed.cli import main

main()
