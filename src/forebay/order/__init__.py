"""Orders, coins and splits as pure functions of numbers: no files, no state, no ranks."""
