"""Whether a package that is installed here has a known vulnerability: ``python tests/audit.py``.

pip-audit asks the package index. Where that cannot be reached, or does not know a package, this
says so in one line, and is no fault. A vulnerability is one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SECONDS = 90
ACCEPTED: dict[str, str] = {}
"""Vulnerabilities that do not concern perfed, by their id, each with the reason."""


def main() -> None:
    command = [sys.executable, "-m", "pip_audit", "--format=json", "--skip-editable"]
    command += ["--progress-spinner=off", "--timeout=10"]
    why = f"no answer within {SECONDS} s"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        why = " ".join(done.stderr.splitlines()[-1:])[:200]
        packages = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        print(f"audit: no package could be checked: {why}")
        return
    lines, found = report(packages)
    print("\n".join(lines))
    sys.exit(found)


def report(packages: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """What to print, and whether there is something to mend."""
    unknown = [package for package in packages if "skip_reason" in package]
    vulnerable = [
        f"audit: {package['name']} {package['version']}: {one['id']}, "
        f"fixed in {', '.join(one['fix_versions']) or 'no version yet'}"
        for package in packages
        for one in package.get("vulns", ())
        if one["id"] not in ACCEPTED
    ]
    checked = len(packages) - len(unknown)
    first = f"audit: {checked} of {len(packages)} packages checked, {len(unknown)} could not be"
    return [f"{first}; {len(vulnerable)} vulnerabilities", *vulnerable], bool(vulnerable)


if __name__ == "__main__":
    main()
