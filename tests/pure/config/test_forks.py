"""Rules are matched in children of `os.fork`, which come when they come."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

CHILDREN = """
    import os, random, signal, threading
    from zarr_manifests.config.manifest_sets import matching
    path = "/" + "".join(random.Random(5).choices("ab", k=3000))
    hung = 0
    for n in range(20):
        regexes = [rf"/(?:a|b)*a(?:a|b){{9}}|x{n}_{i}" for i in range(30)]
        begun = threading.Event()
        def match():
            for number, regex in enumerate(regexes):
                if number == n:
                    begun.set()
                matching((regex,), path)
        thread = threading.Thread(target=match)
        thread.start()
        begun.wait()  # the others of the 30 are matched while this forks
        child = os.fork()
        if not child:
            signal.alarm(60)  # ends it, wherever it waits
            match()
            os._exit(0)
        thread.join()
        hung += os.waitpid(child, 0)[1] != 0
    print(hung)
"""


@pytest.mark.sweep
def test_a_child_can_match_while_threads_of_its_parent_do() -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CHILDREN)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)
