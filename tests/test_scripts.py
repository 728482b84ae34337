"""The scripts of the repository, called from elsewhere."""

import subprocess
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_a_relative_environment_is_one_of_the_caller(tmp_path):
    python = tmp_path / "mine" / "bin" / "python"  # stands in for one that is there already
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "called $0" >&2\nexit 1\n')
    python.chmod(0o755)
    done = subprocess.run(
        [str(SCRIPTS / "test.sh"), "--venv", "mine"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and f"called {python}\n" in done.stderr
