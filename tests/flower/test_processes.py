"""What the tests of federations start, see ``processes.py``, ends with them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from tests import warm
from tests.flower.processes import PATIENCE, Process, descendants, wait_until

ROOT = Path(__file__).parents[2]
TESTS = """
import os, sys, time
from pathlib import Path
from tests import warm
from tests.flower.processes import Process, descendants, wait_until

warm.IMPORTED = ()
script = Path(sys.argv[1])
path = {"PATH": f"{warm.programs()}{os.pathsep}{os.environ['PATH']}"}
started = Process(["sleep", "1000"], script.with_name("started.log"), path)
forked = Process(["perfed", str(script)], script.with_name("forked.log"), path)
wait_until(lambda: "waits" in forked.text(), "it is forked")
print(*descendants(os.getpid()), flush=True)
time.sleep(1000)
"""


def waiting(folder: Path) -> str:
    script = folder / "wait.py"
    script.write_text("import time\nprint('waits', flush=True)\ntime.sleep(1000)\n")
    return str(script)


def ends(process: int, seconds: float) -> bool:
    ended, _, _ = select.select([process], [], [], seconds)
    os.close(process)
    return bool(ended)


def test_a_killed_run_of_the_tests_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TESTS, waiting(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as tests:
        assert tests.stdout is not None
        pids = [int(pid) for pid in tests.stdout.readline().split()]
        processes = [os.pidfd_open(pid) for pid in pids]
        tests.kill()
    # The one that forks, the one that was started, the one that asked, the one that was forked.
    assert len(processes) == 4
    assert all(ends(process, PATIENCE) for process in processes)


def test_killing_a_program_kills_what_was_forked_for_it(tmp_path: Path) -> None:
    path = {"PATH": f"{warm.programs()}{os.pathsep}{os.environ['PATH']}"}
    process = Process(["perfed", waiting(tmp_path)], tmp_path / "log", path)
    wait_until(lambda: "waits" in process.text(), "it is forked")
    (forked,) = descendants(process.pid)
    with open(f"/proc/{forked}/stat") as file:
        assert f" {process.pid} " not in file.read()  # not its child
    watched = os.pidfd_open(forked)
    process.kill()
    assert ends(watched, 0)
