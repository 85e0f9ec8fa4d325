"""What the tests of reading run in processes of their own, so that a crash there is a failed test here.

python -m tests.integration.reading_process COMMAND ROOT …
"""

import hashlib
import multiprocessing
import os
import pickle
import random
import re
import resource
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from tests.helpers.layer_recipes import flip

import forebay as fb
from forebay.errors import ChunkCorrupt


def expect(cache: fb.Cache, numbers: list[int]) -> None:
    """Rows as `numbered_chunks` made them: every column says which row it is."""
    read = cache.read(numbers)
    wanted = np.array(numbers, np.int64)
    assert np.array_equal(read["plain"][:, 0], wanted), "plain"
    assert np.array_equal(read["other"], wanted * 2), "other"
    assert np.array_equal(read["packed"], wanted * 3), "packed"
    assert np.array_equal(read["ragged"].lengths, wanted % 3), "ragged"
    assert np.array_equal(read["ragged"].values, np.repeat(wanted, wanted % 3)), "ragged"


def hammer(root: str, threads: str, seconds: str, max_maps: str) -> None:
    """Many threads read random rows while maps are closed under them all the time."""
    cache = fb.open_cache(root, max_maps=int(max_maps), memory=3000)
    count, end = len(cache), time.monotonic() + float(seconds)
    reads, troubles = [0] * int(threads), []
    sys.setswitchinterval(1e-5)

    def run(number: int) -> None:
        choose = random.Random(number)
        try:
            while (time.monotonic() < end or not reads[number]) and not troubles:
                expect(cache, [choose.randrange(count) for _ in range(choose.choice([1, 2, 5, 40]))])
                assert cache.statistics().bytes <= 3000
                reads[number] += 1
        except BaseException:
            troubles.append(traceback.format_exc())

    started = [threading.Thread(target=run, args=(number,)) for number in range(int(threads))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not troubles, troubles[0]
    assert min(reads) > 0
    print(f"{sum(reads)} reads")


def send_digest(cache: fb.Cache, answers: Connection) -> None:
    """In a child: all rows, hashed; and that nothing came along decoded or mapped."""
    assert cache.statistics().misses == 0
    answers.send((len(cache), digest(cache), os.getpid()))


def digest(cache: fb.Cache) -> str:
    read = cache.read(np.arange(len(cache)))
    running = hashlib.sha256()
    for name in sorted(read):
        values = read[name]
        running.update(values.values if isinstance(values, fb.Ragged) else np.ascontiguousarray(values))
    return running.hexdigest()


def children(root: str, method: str) -> None:
    """A cache that was read here is read by a child process, while threads here go on reading."""
    context = multiprocessing.get_context(method)
    cache = fb.open_cache(root, max_maps=3)
    expected = (len(cache), digest(cache))
    stopped = threading.Event()

    def read_on() -> None:
        while not stopped.is_set():
            cache.read([0, len(cache) - 1])
            time.sleep(0.001)

    threads = [threading.Thread(target=read_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6 if method == "fork" else 1):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=send_digest, args=(cache, there))
            process.start()
            assert here.poll(60), "the child does not answer"
            *answer, pid = here.recv()
            process.join(60)
            assert tuple(answer) == expected
            assert pid != os.getpid()
            assert process.exitcode == 0
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    print("same rows")


def fork_checks_again(root: str, path: str, position: str) -> None:
    """A block that the parent had checked is checked by a forked child too."""
    cache = fb.open_cache(root)
    expect(cache, [0])
    flip(Path(path), int(position))
    pid = os.fork()
    if pid == 0:
        try:
            cache.read([0])
        except ChunkCorrupt as error:
            print(error, flush=True)
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def few_files(root: str, limit: str) -> None:
    """All chunks of a cache under a small limit of open files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
    cache = fb.open_cache(root)
    count = len(cache)
    assert len(cache.generation.table("stored")) > 10 * int(limit)
    rows = np.random.default_rng(0).permutation(count)
    for start in range(0, count, 1000):
        expect(cache, rows[start : start + 1000].tolist())
    assert sum(len(chunk["plain"]) for chunk in cache.chunks(["plain"])) == count
    assert len(pickle.dumps(cache)) < 1000
    print(f"{count} rows, {len(os.listdir('/proc/self/fd'))} files open")


def anonymous_memory(root: str) -> None:
    """Rows of many times the allowance go through; what this process holds for itself stays."""
    cache = fb.open_cache(root)
    count, sizes = len(cache), []
    rows = np.random.default_rng(0).permutation(count)
    for start in range(0, count, 64):
        cache.read(rows[start : start + 64])
        sizes.append(int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
    print(sizes[len(sizes) // 10], sizes[-1])


COMMANDS = {
    "hammer": hammer,
    "children": children,
    "fork-checks-again": fork_checks_again,
    "few-files": few_files,
    "anonymous-memory": anonymous_memory,
}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
