"""What a user may name as a source."""

import click

STANDARD_INPUT = ("-", "/dev/stdin")


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
