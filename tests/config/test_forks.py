"""Rules are matched in children of `os.fork`, which come when they come."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

CHILDREN = """
    import os, random, signal, sys, threading
    from zarr_manifests.config.path_regex import PathSet, matches_path
    path = "/" + "".join(random.Random(5).choices("ab", k=3000))
    hung = 0
    for n in range(20):
        regexes = [rf"/(?:a|b)*a(?:a|b){{9}}|x{n}_{i}" for i in range(30)]
        if sys.argv[1] == "set":
            sets = [PathSet([regex, ".*y"]) for regex in regexes]
            matches = [lambda one=one: one.matching(path) for one in sets]
        else:
            matches = [lambda regex=regex: matches_path(regex, path) for regex in regexes]
        begun = threading.Event()
        def match():
            for number, one in enumerate(matches):
                if number == n:
                    begun.set()
                one()
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
        if hung:
            break
    print(hung)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["set", "each"])
def test_a_child_can_match_while_threads_of_its_parent_do(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CHILDREN), how],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)
