from typing import Any

def resize_planes(
    out: Any,
    arrow_array: Any,
    size: tuple[int, int],
    new_size: tuple[int, int],
    kernel: int,
    down_first: bool,
    fast: bool,
    /,
) -> None: ...
