"""A forked process is as one that was started: see ``tests/warm.py``."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests import warm

SCRIPT = """
import atexit, os, sys, threading, time
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
print(os.getcwd(), os.environ["MARK"], "HOME" in os.environ, sys.argv[1:], sys.path[0], input())
print("wrong", file=sys.stderr)
sys.exit(3)
"""


def test_streams_folder_environment_and_exit_code_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    place = {"cwd": tmp_path / "inner", "env": {"MARK": "x"}, "input": "said\n"}
    started = subprocess.run(
        [sys.executable, script, "a", "b"],
        **place,  # type: ignore[call-overload]
        capture_output=True,
        text=True,
    )
    forked = warm.perform([script, "a", "b"], **place)  # type: ignore[arg-type]
    assert started.returncode == forked.returncode == 3
    assert started.stdout == forked.stdout
    assert started.stderr == forked.stderr == "wrong\n"
    assert "'a', 'b'" in forked.stdout


def test_a_shell_finds_the_command(tmp_path: Path) -> None:
    path = os.pathsep.join([str(warm.programs()), os.environ["PATH"]])
    code = "perfed --version | tr a-z A-Z; perfed run gone.yaml"
    command = ["bash", "-c", code]
    done = subprocess.run(command, env={"PATH": path}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.startswith("PERFED ")
    assert done.stderr.startswith("perfed: no file and no preset is called 'gone.yaml'")


def test_it_can_be_killed(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import time\ntime.sleep(1000)\n")
    process = warm.start([tmp_path / "wait.py"])
    assert process.poll() is None
    process.kill()
    assert process.poll() == process.wait() == -signal.SIGKILL
