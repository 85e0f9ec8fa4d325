"""What a user may name as a source."""

import click

STANDARD_INPUT = ("-", "/dev/stdin")
HUB = "hub:"


def is_on_hub(path: str) -> bool:
    """
    >>> is_on_hub("hub:HuggingFaceFW/fineweb-edu"), is_on_hub("data/hub.jsonl")
    (True, False)
    """
    return path.startswith(HUB)


def refuse_standard_input(ctx: click.Context, param: click.Parameter, paths: tuple[str, ...]) -> tuple[str, ...]:
    """A source is planned first and read again for repair, which a stream cannot be."""
    for path in paths:
        if path in STANDARD_INPUT:
            raise click.BadParameter(
                f"'{path}' is standard input, which cannot be read twice; save it first: `… > data.jsonl`, then name "
                "that file",
                ctx=ctx,
                param=param,
            )
    return paths
