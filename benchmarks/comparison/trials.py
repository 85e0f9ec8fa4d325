"""Try what the table of the README compares: forebay and five other ways from the same JSON lines to batches.

    python -m benchmarks.comparison.trials [--only NAME …] [--trials NAME …] [--environments DIR]

Every tool builds, reads, resumes and grows in processes of its own, by the script `benchmarks/peers/trial_NAME.py`. The
data are 16 files of documents whose tokens fill 64 rows of 512 each, so that no row is left over in an epoch.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store
from tests.remote.servers import free_port, request, s3_environment, s3_server

from benchmarks.lib.peers import SCRIPTS, Peer, python_of
from forebay.tokens.vocabulary import gpt2_json

PACKAGES = ("torch", "numpy", "litdata==0.2.76", "boto3", "mosaicml-streaming==0.13.0", "datasets==5.0.1", "s3fs>=2025",
            "torchdata", "webdataset==1.0.2", "tokenizers")  # fmt: skip
TOOLS = {
    "forebay": Peer("forebay", "trial_forebay.py", ()),
    "datasets": Peer("`datasets.map`", "trial_datasets.py", PACKAGES, home="trials"),
    "litdata": Peer("LitData", "trial_litdata.py", PACKAGES, home="trials"),
    "mosaic": Peer("MosaicML Streaming", "trial_mosaic.py", PACKAGES, home="trials"),
    "webdataset": Peer("WebDataset", "trial_webdataset.py", PACKAGES, home="trials"),
    "memmap": Peer("memmap script", "trial_memmap.py", PACKAGES, home="trials"),
}
FILES, ROWS_PER_FILE, LENGTH = 16, 64, 512
EARLY = FILES * 3 // 4  # the files that are there before the data grows
SECONDS = 240
# The share of the bytes at which a build is killed, where the middle of its rows is not half of the bytes: `datasets`
# saves the rows of `map` once more, and forebay begins with the tokenizer.
MIDDLE = {"datasets": 0.35, "forebay": 0.8}
BATCHES = 20  # of 64, before the state is saved
END_OF_JOB = "# The lines above are counted"


@dataclass
class Tool:
    """A tool, its folder, and how its script is run there."""

    name: str
    peer: Peer
    python: Path
    folder: Path
    tokenizer: str
    files: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    def place(self, name: str) -> str:
        return str(self.folder / name)

    def start(self, *words: object, ranks: int = 0, cache: str = "cache", **settings: Any) -> subprocess.Popen[str]:
        """A process group of its own, under torchrun if there are ranks."""
        run = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", free_port()] if ranks else []
        command = [self.python, *run, SCRIPTS / self.peer.script, *words]
        quiet = {
            **os.environ, **self.variables, "PYTHONWARNINGS": "ignore", "TRIAL_CACHE": self.place(cache),
            "TRIAL_ANSWERS": self.place("answers"), "DATA_OPTIMIZER_CACHE_FOLDER": self.place(f"{cache}-litdata"),
            "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
            "PYTHONDONTWRITEBYTECODE": "",
        }  # fmt: skip
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE}
        return subprocess.Popen(
            [str(word) for word in command], env=quiet, text=True, start_new_session=True, cwd=self.folder, **pipes
        )

    def run(self, *words: object, ranks: int = 0, cache: str = "cache") -> dict[str, Any]:
        """The answer of a verb; {"error": …} if it raised, hung or died."""
        shutil.rmtree(self.place("answers"), ignore_errors=True)
        os.mkdir(self.place("answers"))
        answer = ended(self.start(*words, ranks=ranks, cache=cache))
        if ranks and "error" not in answer:
            found = [json.loads(path.read_text())["rows"] for path in sorted(Path(self.place("answers")).iterdir())]
            return {"rows": [row for rank in found for row in rank]}
        return answer

    def build(self, out: str, files: list[str], cache: str = "cache") -> dict[str, Any]:
        return self.run("build", self.place(out), self.tokenizer, *files, cache=cache)

    def rows(self, out: str) -> dict[str, Any]:
        return self.run("read", self.place(out))

    @cached_property
    def right(self) -> list[str]:
        """The rows of an uninterrupted build."""
        return list(self.rows("full")["rows"])


def ended(process: subprocess.Popen[str], said: str = "") -> dict[str, Any]:
    try:
        out, err = process.communicate(said, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        kill(process)
        return {"error": f"hung: no end after {SECONDS} s"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    errors = [json.loads(line) for line in lines if line.startswith('{"error"')]
    if errors:
        return dict(errors[0])
    if process.returncode or not lines:
        return {"error": f"exit code {process.returncode}: {(err.strip() or 'nothing').splitlines()[-1]}"}
    return dict(json.loads(lines[-1]))


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def write_documents(folder: Path, tokenizer: Path) -> list[str]:
    """Files of documents of random words, each word one token: their lengths are known, and fill rows exactly."""
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    words = sorted(piece[1:] for piece in vocabulary if re.fullmatch("Ġ[a-z]{3,9}", piece))[:5000]
    chosen, files = random.Random(0), []
    for number in range(FILES):
        left, path = ROWS_PER_FILE * LENGTH, folder / f"{number:02d}.jsonl"
        with path.open("w") as file:
            while left:
                length = min(left, chosen.randint(20, 1200))
                length = left if left - length < 20 else length
                text = "".join(f" {chosen.choice(words)}" for _ in range(length - 1))  # and the end of the document
                file.write(json.dumps({"text": text}) + "\n")
                left -= length
        files.append(str(path))
    return files


def tree(folder: str) -> dict[str, tuple[int, int, int]]:
    """What identifies each file without reading it: inode, time and size."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        try:
            status = path.stat()
        except FileNotFoundError:  # moved meanwhile
            continue
        if path.is_file():
            found[str(path.relative_to(folder))] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def digests(folder: str) -> dict[str, str]:
    return {name: hashlib.sha256(Path(folder, name).read_bytes()).hexdigest() for name in tree(folder)}


def size(*folders: str) -> int:
    return sum(status[2] for folder in folders for status in tree(folder).values())


def short(error: str, width: int = 90) -> str:
    line = " ".join(error.replace("|", "/").split())
    return line if len(line) <= width else line[: width - 1] + "…"


def truncated(tool: Tool) -> str:
    """The largest file of rows, cut in half."""
    shutil.copytree(tool.place("full"), tool.place("cut"))
    files = [path for path in Path(tool.place("cut")).rglob("*") if path.is_file()]
    rows = [path for path in files if not path.name.startswith("constants")]  # of forebay: the tokenizer
    victim = max(rows, key=lambda path: path.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    right, found = tool.right, tool.rows("cut")
    if "error" in found:
        return f"`{short(found['error'], 240)}`{repaired(tool)}"
    wrong = len(set(found["rows"]) - set(right))
    lost = len(set(right) - set(found["rows"]))
    return f"no error: {wrong} wrong rows, {lost} of {len(right)} missing" if wrong or lost else "all rows right"


def repaired(tool: Tool) -> str:
    """What the tool's own repair makes of the cut file, where it has one."""
    found = tool.run("repair", tool.place("cut"))
    if "error" in found:
        return "" if "no attribute" in found["error"] else f"; repair: `{short(found['error'])}`"
    return f"; repair: {'same bytes' if digests(tool.place('cut')) == digests(tool.place('full')) else 'other bytes'}"


def killed(tool: Tool) -> str:
    """SIGKILL in the middle of the bytes, then the same command again; a reader gets a copy of what was there."""
    folders = [tool.place(name) for name in ("killed", "killed-cache", "killed-cache-litdata")]
    references = [tool.place(name) for name in ("full", "cache", "cache-litdata")]
    whole = size(*references)
    for share in (MIDDLE.get(tool.name, 0.5), 0.3, 0.15):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        process = tool.start("build", folders[0], tool.tokenizer, *tool.files, cache="killed-cache")
        until = time.monotonic() + SECONDS
        while process.poll() is None and size(*folders) < share * whole and time.monotonic() < until:
            time.sleep(0.005)
        if process.poll() is None:
            kill(process)
            break
        process.communicate()
    else:
        return "– (it ended before it could be killed)"
    reached = size(*folders) / whole
    before = {folder: tree(folder) for folder in folders}
    if os.path.exists(folders[0]):
        shutil.copytree(folders[0], tool.place("half"))
    half = tool.rows("half")
    half_said = f"`{short(half['error'], 60)}`" if "error" in half else f"{len(half['rows'])} rows without a word"
    again = tool.build("killed", tool.files, cache="killed-cache")
    said = f"killed at {reached:.0%} of the bytes; a reader then: {half_said}; the same command: "
    if "error" in again:
        return f"{said}`{short(again['error'])}`"
    kept = 0
    for folder, reference in zip(folders, references, strict=True):
        now, finished = tree(folder), tree(reference)  # what a killed build only leaves behind has other names
        kept += sum(
            status[2] for name, status in before[folder].items() if now.get(name) == status and name in finished
        )
    had = sum(status[2] for statuses in before.values() for status in statuses.values())
    whole_files, files = digests(tool.place("full")), digests(tool.place("killed"))
    differ = sorted(name for name in whole_files.keys() | files.keys() if whole_files.get(name) != files.get(name))
    right, found = tool.right, tool.rows("killed")
    if "error" in found:
        return f"{said}ends, then reading fails: `{short(found['error'])}`"
    lost, extra = len(set(right) - set(found["rows"])), len(found["rows"]) - len(right)
    same = "the same bytes" if not differ else f"{len(differ)} of {len(files)} files differ ({', '.join(differ[:3])})"
    same += f", {lost} rows missing, {extra:+d} rows" if lost or extra else ", every row"
    return f"{said}{kept / max(had, 1):.0%} of what was written is kept; {same}"


def batch(tool: Tool) -> str:
    found = tool.run("batch", tool.place("full"))
    if "error" in found:
        return f"`{short(found['error'])}`"
    documents = f"documents told apart by {', '.join(found['tells'])}" if found["tells"] else "documents run together"
    return f"{', '.join(found['keys'])}; {documents}"


def compared(seen: list[str], rest: dict[str, Any], whole: list[str]) -> str:
    """How an epoch in two parts differs from one in one part."""
    if "error" in rest:
        return f"`{short(rest['error'])}`"
    counts = Counter(seen) + Counter(rest["rows"])
    expected = Counter(whole)
    missing = (expected - counts).total()
    twice = sum(max(count - max(expected[row], 1), 0) for row, count in counts.items())
    if not missing and not twice:
        return "exact"
    return f"{missing} of {len(whole)} rows missing, {twice} twice"


def resumed(tool: Tool) -> str:
    """Two ranks save after some batches; two, then one, go on with the same global batch."""
    out, states = tool.place("full"), tool.place("states")
    whole = tool.run("train", out, 10**6, "", "", ranks=2)
    if "error" in whole:
        return f"two ranks: `{short(whole['error'])}`"
    seen = tool.run("train", out, BATCHES, "", states, ranks=2)
    if "error" in seen:
        return f"save: `{short(seen['error'])}`"
    parts = []
    for ranks in (2, 1):
        rest = tool.run("train", out, 10**6, states, "", ranks=ranks)
        parts.append(f"{ranks} ranks: {compared(seen['rows'], rest, whole['rows'])}".replace("1 ranks", "1 rank"))
    return "; ".join(parts)


def grown(tool: Tool) -> str:
    """More data while a reader is in the middle of an epoch; then its old state in a new process."""
    words = ("begin", tool.place("early"), tool.tokenizer, *tool.files[:EARLY])
    if "error" in (built := tool.run(*words, cache="early-cache")):
        return f"`{short(built['error'])}`"
    old = tool.rows("early")["rows"]
    reader = tool.start("grow", tool.place("early"), tool.place("early-states"), cache="early-cache")
    assert reader.stdout is not None
    for line in reader.stdout:
        if line.strip() == "ready":
            break
    files = tool.files if tool.name == "datasets" else tool.files[EARLY:]
    appended = tool.run("append", tool.place("early"), tool.tokenizer, *files, cache="early-cache")
    found = ended(reader, "\n")
    append = f"append: `{short(appended['error'], 60)}`" if "error" in appended else "append: done"
    if "error" in found:
        return f"{append}; the running reader: `{short(found['error'], 60)}`"
    epoch = compared(found["before"], {"rows": found["rest"]}, old)
    new = len(set(found["next"]) - set(old))
    after = "early-grown" if os.path.exists(tool.place("early-grown")) else "early"
    more = tool.rows(after)
    fresh = f"`{short(more['error'], 60)}`" if "error" in more else f"{len(set(more['rows']) - set(old))} new rows"
    rest = tool.run("train", tool.place(after), 10**6, tool.place("early-states"), "")
    state = compared(found["before"], rest, old)
    return (f"{append}; running epoch {epoch}; its next epoch has {new} new rows; a new reader {fresh}; "
            f"the old state: {state}")  # fmt: skip


def bucket(tool: Tool) -> str:
    """Build into a bucket, then by two builders at once; what is there is fetched and read."""
    with tempfile.TemporaryDirectory() as folder, s3_server(folder) as server:
        request("PUT", f"{server}/bench")
        tool.variables = {**s3_environment(server), "S3_ENDPOINT_URL": server, "AWS_DEFAULT_REGION": "us-east-1"}
        right = set(tool.right)
        alone = tool.run("bucket", f"s3://bench/{tool.name}-one", tool.tokenizer, *tool.files, cache="bucket-cache")
        if "error" in alone:
            return f"`{short(alone['error'])}`" if "NoneType" not in alone["error"] else "no API"
        said = f"one builder: {fetched(tool, f'{tool.name}-one', right)}"
        url = f"s3://bench/{tool.name}-two"
        if tool.name == "mosaic":
            words = [("build_part", url, tool.tokenizer, part, 2, *tool.files) for part in range(2)]
        else:
            words = [("bucket", url, tool.tokenizer, *tool.files)] * 2
        both = [tool.start(*each, cache=f"two-{number}") for number, each in enumerate(words)]
        answers = [ended(process) for process in both]
        if tool.name == "mosaic":
            answers.append(tool.run("merge", url))
        errors = [f"`{short(answer['error'], 60)}`" for answer in answers if "error" in answer]
        reports = [answer.get("report") for answer in answers]
        made = f" (chunks made: {reports[0]} and {reports[1]})" if tool.name == "forebay" else ""
        return f"{said}; two at once: {'; '.join([*errors, fetched(tool, f'{tool.name}-two', right)])}{made}"


def fetched(tool: Tool, prefix: str, right: set[str]) -> str:
    server = tool.variables["AWS_ENDPOINT_URL"]
    store = S3Store("bench", prefix=prefix, endpoint=server, access_key_id="test", secret_access_key="test",
                    region="us-east-1", client_options={"allow_http": True})  # fmt: skip
    out, count = tool.folder / f"fetched-{prefix}", 0
    for page in obstore.list(store):
        for entry in page:
            path = out / entry["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(obstore.get(store, entry["path"]).bytes()))
            count += 1
    if not count:
        return "nothing in the bucket"
    found = tool.rows(f"fetched-{prefix}")
    if "error" in found:
        return f"{count} objects, reading fails: `{short(found['error'], 60)}`"
    names = found["rows"]
    if sorted(names) == sorted(right):
        return f"{count} objects, every row once"
    extra = len(names) - len(right & set(names))
    return f"{count} objects, {len(right - set(names))} rows missing, {extra} extra"


def lines(tool: Tool) -> str:
    """Lines of its script from JSON lines to batches, without blanks, comments and the docstring."""
    job = (SCRIPTS / tool.peer.script).read_text().partition(END_OF_JOB)[0]
    code = re.sub(r'""".*?"""', "", job, flags=re.DOTALL).splitlines()
    counted = [line for line in code if line.strip() and "trial_torchvision" not in line]
    return str(len([line for line in counted if not line.strip().startswith("#")]))


TRIALS: dict[str, tuple[str, Callable[[Tool], str]]] = {
    "truncated": ("a truncated file", truncated),
    "killed": ("killed build", killed),
    "batch": ("a batch of packed text has", batch),
    "resumed": ("mid-epoch resume", resumed),
    "grown": ("grows while training reads it", grown),
    "lines": ("lines to write, JSON lines to batches", lines),
    "bucket": ("builds into a bucket", bucket),
}


def tried(tool: Tool, names: list[str]) -> Iterator[tuple[str, str]]:
    if (built := tool.build("full", tool.files)).get("error"):
        yield from ((name, f"build: `{short(built['error'])}`") for name in names)
        return
    for name in names:
        started = time.monotonic()
        try:
            yield name, TRIALS[name][1](tool)
        except Exception as error:
            yield name, f"– (the trial failed: {type(error).__name__}: {short(str(error))})"
        print(f"  {tool.name}, {name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--trials", nargs="+", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "forebay-peers")
    asked = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        (folder / "tokenizer.json").write_bytes(gpt2_json())
        (folder / "data").mkdir()
        files = write_documents(folder / "data", folder / "tokenizer.json")
        for name in asked.only:
            (folder / name).mkdir()
            python = python_of(TOOLS[name], asked.environments)
            tool = Tool(name, TOOLS[name], python, folder / name, str(folder / "tokenizer.json"), files)
            found[name] = {}
            for trial, cell in tried(tool, asked.trials):
                found[name][trial] = cell
                print(f"{name} | {trial} | {cell}", flush=True)
            shutil.rmtree(folder / name)
    print("\n| | " + " | ".join(TOOLS[name].name for name in found) + " |\n|" + "---|" * (len(found) + 1))
    for trial in asked.trials:
        print(f"| {TRIALS[trial][0]} | " + " | ".join(cells[trial] for cells in found.values()) + " |")


if __name__ == "__main__":
    main()
