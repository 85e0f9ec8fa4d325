"""What a build will take, or would do."""

from rich.console import Group, RenderableType
from rich.text import Text

from forebay.cache.records import Estimate
from forebay.cli.drawing.pieces import facts, listing, title
from forebay.cli.records import DryRun
from forebay.cli.words import counted, human_bytes, human_time, in_ranges


def draw_estimate(estimate: Estimate) -> RenderableType:
    notes = listing("notes", ((note,) for note in estimate.notes), "yellow")
    return Group(title("estimate", _sampled(estimate)), _table(estimate), *notes)


def draw_dry_run(run: DryRun) -> RenderableType:
    return Group(
        title(run.root, f"layer {run.layer}", "dry run, nothing was written"),
        facts([("would build", _todo(run))]),
        draw_estimate(run.estimate),
    )


def _table(estimate: Estimate) -> RenderableType:
    return facts(
        [
            ("source", f"{counted(estimate.files, 'file')}, {_weight(estimate, estimate.source_weight)}"),
            ("chunks", f"{estimate.chunks:,}"),
            ("rows", f"{estimate.rows:,}"),
            ("tokens", _tokens(estimate)),
            ("decoded", human_bytes(estimate.raw_bytes)),
            ("stored", f"{human_bytes(estimate.stored_bytes)}{_ratio(estimate)}"),
            ("by codec", _by_codec(estimate)),
            ("time", f"{human_time(estimate.seconds)} with {counted(estimate.workers, 'worker')}"),
            ("failures", f"about {counted(estimate.failures, 'sample')}" if estimate.failures else ""),
            ("free disk", _room(estimate)),
        ]
    )


def _tokens(estimate: Estimate) -> str:
    """What a recipe of packed tokens counts; nothing for others."""
    counts = estimate.statistics
    if "tokens_in" not in counts:
        return ""
    lost = f", {counts['tokens_dropped']:,} dropped" if counts["tokens_dropped"] else ""
    documents = f"{counts['documents']:,} documents, {counts['documents_split']:,} of them split"
    return f"{counts['tokens_in']:,} in {documents}{lost}"


def _by_codec(estimate: Estimate) -> str:
    return ", ".join(f"{codec} {human_bytes(size)}" for codec, size in estimate.by_codec.items())


def _sampled(estimate: Estimate) -> str:
    return f"from a sample of {_weight(estimate, estimate.sampled_weight)}"


def _weight(estimate: Estimate, weight: int) -> str:
    return human_bytes(weight) if estimate.unit == "bytes" else counted(weight, "sample")


def _ratio(estimate: Estimate) -> str:
    return f" ({estimate.stored_bytes / estimate.raw_bytes:.0%} of decoded)" if estimate.raw_bytes else ""


def _room(estimate: Estimate) -> Text | str:
    if estimate.free_bytes is None:
        return ""
    verdict = ("enough", "green") if estimate.fits else ("not enough", "bold red")
    return Text.assemble(f"{human_bytes(estimate.free_bytes)}, ", verdict)


def _todo(run: DryRun) -> str:
    if run.missing is None:
        return f"about {counted(run.estimate.chunks, 'chunk')} of a new cache"
    if not run.missing:
        return "nothing, all chunks asked for are there"
    return f"{counted(len(run.missing), 'chunk')} of {run.planned:,} planned: {in_ranges(run.missing)}"
