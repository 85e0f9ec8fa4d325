"""Options for what is on the Hugging Face hub."""

import click

from forebay.cli.options import Decorator, complete_folder

REVISION_OPTION: Decorator = click.option(
    "--revision", help="Which commit, tag or branch on the hub.  [default: the newest]"
)
DOWNLOAD_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--spool",
        metavar="DIR",
        shell_complete=complete_folder,
        help="Keep shards in DIR/forebay-shards while they are read.",
    ),
    click.option(
        "--download-retries",
        type=click.IntRange(min=0),
        help="How often to ask again for data (not for a tokenizer).  [default: 5]",
    ),
    click.option(
        "--download-timeout",
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds without a byte before asking again for data.  [default: 300]",
    ),
)
