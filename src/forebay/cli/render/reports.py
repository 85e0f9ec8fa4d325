"""Draw reports of builds, copies, checks and repairs, and estimates."""

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay.cache.reports import GONE, BuildReport, DryRun, Estimate, ImportReport, Problem, RepairReport, VerifyReport
from forebay.cli.render.drawing import draw
from forebay.installation import Check, DoctorReport
from forebay.preview.console import facts, listing, next_command, repair_command, reuse_command, stale_files, title
from forebay.preview.row_records import DemoReport
from forebay.preview.words import command_line, counted, human_bytes, human_time, in_ranges, printable


@draw.register
def draw_build(report: BuildReport) -> RenderableType:
    notes = listing("notes", ((note,) for note in report.notes), "yellow")
    if not (report.built or report.built_elsewhere or report.adopted or report.deaths):
        held = f"{counted(report.chunks, 'chunk')}, {counted(report.rows, 'row')}"
        return Group(title(report.root, f"layer {report.layer}", held, "nothing to do"), *notes)
    elsewhere = f", {report.built_elsewhere:,} built by others meanwhile" if report.built_elsewhere else ""
    present = f"{report.present - report.built_elsewhere:,} already present"
    built = f"{report.built:,} built, {present}{elsewhere}, {report.chunks:,} requested"
    parts: list[RenderableType] = [title(report.root, f"layer {report.layer}", f"generation {report.generation}")]
    parts.append(
        facts(
            [
                ("chunks", built),
                ("rows", _of_cache(report.built_rows, report.rows)),
                ("tokens", _token_counts(report)),
                ("text", _text_figures(report)),
                ("duplicates", f"{report.statistics['duplicates']:,} left out" if _has(report, "duplicates") else ""),
                ("failed", _failed(report)),
                ("written", f"{human_bytes(report.written_bytes)} in {human_time(report.seconds)}{_packed(report)}"),
            ]
        )
    )
    parts += listing("workers lost", ((death,) for death in report.deaths), "yellow")
    return Group(*parts, *notes, *_after_build(report))


def _after_build(report: BuildReport) -> list[Text]:
    """Look at failures, or at rows, and train."""
    if report.failures:
        return [next_command(command_line("status", report.root))]
    loader = Text.assemble("train: ", (f"forebay.torch.Loader({report.root!r}, global_batch_size=8)", "cyan"))
    return [next_command(command_line("peek", report.root)), loader]


def _of_cache(built: float, total: float) -> str:
    """A sum over the whole layer, and before it what this build added where it began with some."""
    return f"{total:,}" if built == total else f"{built:,} new, {total:,} in the cache"


def _has(report: BuildReport, name: str) -> bool:
    return bool(report.statistics.get(name))


def _token_counts(report: BuildReport) -> str:
    """How many tokens there are, how full the rows, and how fast this build made its own."""
    if not _has(report, "tokens"):
        return ""
    used = report.figures.get("utilization")
    tokens = _of_cache(report.built_statistics.get("tokens", 0), report.statistics["tokens"])
    parts = [tokens, f"{100 * used:.1f}% of positions used" if isinstance(used, float) else ""]
    parts.append(str(report.figures.get("tokens_stored", "")))
    speed = report.tokens_per_second
    return ", ".join(filter(None, [*parts, f"{speed:,.0f} per second" if speed and report.seconds >= 1 else ""]))


def _text_figures(report: BuildReport) -> str:
    each = report.figures.get("characters_per_token")
    return f"{each:.2f} characters per token" if isinstance(each, float) and each else ""


def _failed(report: BuildReport) -> str:
    if not report.failures:
        return ""
    total = f"{report.failures:,} of {counted(report.samples, 'sample')}"
    if report.built_failures in (0, report.failures):
        return f"{total}{_because(report.layer_reasons)}"
    return f"{report.built_failures:,} new{_because(report.reasons)}; {total} in the cache"


def _because(reasons: Mapping[str, int]) -> str:
    return ": " + ", ".join(f"{reason} {count:,}" for reason, count in reasons.items()) if reasons else ""


def _packed(report: BuildReport) -> str:
    ratio = report.figures.get("compression_ratio")
    return f", compressed {ratio:.1f}x" if isinstance(ratio, float) and ratio >= 1 else ""


@draw.register
def draw_demo(report: DemoReport) -> RenderableType:
    done = f"{counted(len(report.steps), 'command')} succeeded in {human_time(report.seconds)}"
    return Group(
        Text(done, style="bold green"),
        facts([("cache", report.root if report.exists else "removed; use --into to keep it")]),
    )


@draw.register
def draw_verify(report: VerifyReport) -> RenderableType:
    verdict = ("sound", "bold green") if report.sound else ("not sound", "bold red")
    speed = human_bytes(report.checked_bytes / max(report.seconds, 1e-3))
    checked = f"{counted(report.chunks, 'chunk')}, {human_bytes(report.checked_bytes)} at {speed}/s"
    head = title(report.root, f"generation {report.generation}", checked, "")
    parts: list[RenderableType] = [Text.assemble(head, " · ", verdict)]
    parts += [facts([("cache id", printable(report.cache_id)), ("digest", report.digest)])]
    parts += listing("bad", map(_bad_row, report.bad), "bold red")
    parts += listing("missing", _missing_rows(report), "bold red")
    parts += stale_files(report.stale)
    parts += listing("foreign files, left alone", ((key,) for key in report.foreign), "yellow")
    parts += [facts((f"layer {layer}", f"{counted(gap, 'chunk')} not built yet") for layer, gap in report.gaps.items())]
    if report.source_note:
        parts.append(Text(f"note: {printable(report.source_note)}", style="yellow"))
    return Group(*parts, _next_step(report))


@draw.register
def draw_repair(report: RepairReport) -> RenderableType:
    if not (report.restored or report.replaced or report.failed):
        return title(report.root, "nothing to repair")
    parts: list[RenderableType] = [title(report.root, f"generation {report.generation}")]
    parts += listing("restored, byte for byte", ((key,) for key in report.restored), "green")
    parts += listing("replaced by other bytes", report.replaced.items(), "yellow")
    parts += listing("failed", report.failed.items(), "bold red")
    parts += listing("notes", ((note,) for note in report.notes), "yellow")
    return Group(*parts, _after_repair(report))


def _after_repair(report: RepairReport) -> Text:
    """Suggest `verify`, or another source if `repair` failed; never the command that just ran."""
    if not report.failed:
        return next_command(command_line("verify", report.root))
    if any("--allow-network" in why for why in report.failed.values()):
        return next_command(command_line("repair", report.root, "--allow-network"))
    return Text.assemble(
        next_command(f"{command_line('repair', report.root, '--from')} COPY"),
        "\nWithout a copy: ",
        reuse_command(report.root, True),
    )


def _bad_row(bad: Problem) -> tuple[str, str, str]:
    return bad.key, ", ".join(_where(bad)), bad.problem


def _where(bad: Problem) -> Iterator[str]:
    if bad.chunk >= 0:
        yield f"layer {bad.layer} chunk {bad.chunk}"
    if bad.column:
        yield f"column {bad.column}"
    if bad.block >= 0:
        yield f"block {bad.block}"
    if bad.start >= 0:
        yield f"bytes {bad.start:,} to {bad.stop:,}"


def _missing_rows(report: VerifyReport) -> Iterator[tuple[str, str]]:
    for layer, chunks in report.missing.items():
        yield f"layer {layer}", f"{counted(len(chunks), 'chunk')}: {in_ranges(chunks)}"


def _next_step(report: VerifyReport) -> Text:
    if report.bad or report.missing:
        return repair_command(report.root, report.source_root, GONE in report.stale.values())
    if not report.sound:
        return reuse_command(report.root, report.reusable)
    return next_command(command_line("status" if report.gaps else "peek", report.root))


@draw.register
def draw_estimate(estimate: Estimate) -> RenderableType:
    notes = listing("notes", ((note,) for note in estimate.notes), "yellow")
    if not estimate.chunks:  # zeros would look like an estimate of a source without samples
        return Group(title("estimate", "nothing to build"), *notes)
    return Group(title("estimate", _sampled(estimate)), _table(estimate), *notes)


@draw.register
def draw_dry_run(run: DryRun) -> RenderableType:
    return Group(
        title(run.root, f"layer {run.layer}", "dry run, nothing was written"),
        facts([("would build", _todo(run))]),
        *([] if run.missing == () else [draw_estimate(run.estimate)]),
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
            ("time", f"{human_time(estimate.seconds)} with {counted(estimate.workers, 'worker')}"),
            ("failures", f"about {counted(estimate.failures, 'sample')}" if estimate.failures else ""),
            ("free disk", _room(estimate)),
        ]
    )


def _tokens(estimate: Estimate) -> str:
    """The token counts of a token recipe; empty for others."""
    counts = estimate.statistics
    if "tokens_in" not in counts:
        return ""
    lost = f", {counts['tokens_dropped']:,} dropped" if counts["tokens_dropped"] else ""
    documents = f"{counts['documents']:,} documents, {counts['documents_split']:,} of them split"
    return f"{counts['tokens_in']:,} in {documents}{lost}"


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
        return "nothing: all requested chunks are present"
    return f"{counted(len(run.missing), 'chunk')} of {run.planned:,} planned: {in_ranges(run.missing)}"


@draw.register
def draw_import(report: ImportReport) -> RenderableType:
    head = title(report.root, counted(report.rows, "row"), f"from {printable(report.old)}")
    layers = [(layer, _import_counts(built)) for layer, built in report.layers.items()]
    return Group(head, facts(layers), next_command(command_line("peek", report.root)))


def _import_counts(built: BuildReport) -> str:
    text = f"{counted(built.built, 'chunk')} built, {built.present:,} already present"
    return f"{text}; {counted(built.failures, 'row')} absent" if built.failures else text


_MARKS = {"ok": ("✓", "green"), "note": ("·", "dim"), "problem": ("✗", "bold red")}


@draw.register
def draw_doctor(report: DoctorReport) -> RenderableType:
    parts: list[RenderableType] = []
    for group in dict.fromkeys(check.group for check in report.checks):
        parts.append(Text(group, style="bold"))
        parts.append(_check_grid([check for check in report.checks if check.group == group]))
    bad = len(report.problems)
    parts.append(Text(counted(bad, "problem") if bad else "no problem found", style="bold red" if bad else "green"))
    return Group(*parts)


def _check_grid(checks: list[Check]) -> RenderableType:
    """A mark, a name and a detail in aligned columns; a long detail continues below itself."""
    grid = Table.grid(padding=(0, 1))
    for is_whole in (True, True, False):
        grid.add_column(no_wrap=is_whole, overflow="fold")
    for check in checks:
        sign, style = _MARKS[check.state]
        grid.add_row(Text(sign, style=style), printable(check.name), printable(check.detail))
        if check.command:
            grid.add_row("", "", Text(printable(check.command), style="cyan"))
    return Padding(grid, (0, 0, 0, 2), expand=False)
