"""Run every benchmark: `make bench`, or one of them with `python -m benchmarks.core`."""

from importlib import import_module

PARTS = ("core", "masks", "tokens", "loader", "images", "teachers")


def main() -> None:
    for part in PARTS:
        print(f"\n=== benchmarks.{part}")
        import_module(f"benchmarks.{part}").main()


if __name__ == "__main__":
    main()
