"""What a flipped bit does: forebay and its peers, the same rows, the same number of flips, each with its own defaults.

python -m benchmarks.comparison.flips [--flips 300] [--environments DIR]
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.lib.peers import Peer, PeerFailed, run_peer
from benchmarks.peers.flips import PEERS

PACKAGES = ("torch", "numpy", "litdata", "mosaicml-streaming", "datasets", "webdataset", "zarr", "pylance", "lmdb",
            "safetensors")  # fmt: skip
OUTCOMES = ("served", "died", "refused", "right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "forebay-peers")
    asked = parser.parse_args()
    print("| reader | flips | wrong rows served | process died | refused | right rows (a bit that means nothing) |")
    print("|---|---|---|---|---|---|")
    for name in PEERS:
        ours = name.startswith("forebay")
        peer = Peer(name, "flips.py", () if ours else PACKAGES, home="flips")
        with tempfile.TemporaryDirectory() as folder:
            try:
                output = run_peer(peer, asked.environments, Path(folder) / "data", name, asked.flips)
            except PeerFailed as error:
                print(f"| {error} |")
                continue
        found = json.loads(output.splitlines()[-1])
        counts = " | ".join(str(found[outcome]) for outcome in OUTCOMES)
        print(f"| {name} ({found['version']}) | {asked.flips} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
