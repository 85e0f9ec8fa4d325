"""Records as pictures and lines; nothing here prints."""

from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType

from forebay.cache.records import (
    BuildReport,
    CleanReport,
    CopyReport,
    Estimate,
    Gaps,
    ImportReport,
    RefreshReport,
    RekeyReport,
    RepairReport,
    Status,
    Summary,
    VerifyReport,
)
from forebay.cli.drawing.estimate import draw_dry_run, draw_estimate
from forebay.cli.drawing.findings import draw_refresh, draw_repair, draw_verify
from forebay.cli.drawing.images import draw_image_sheet, draw_images
from forebay.cli.drawing.packed_rows import draw_packed_rows
from forebay.cli.drawing.peek import draw_peek
from forebay.cli.drawing.reports import draw_build, draw_clean, draw_copy, draw_demo, draw_rekey
from forebay.cli.drawing.status import draw_gaps, draw_status
from forebay.cli.drawing.summary import draw_summary
from forebay.cli.drawing.taught import draw_import, draw_taught_sheet
from forebay.cli.drawing.teachers import draw_alignment, draw_teacher_estimate
from forebay.cli.drawing.tiers import draw_tier, draw_tier_clear, draw_tier_verify, draw_warm
from forebay.cli.records import DemoReport, DryRun, ImagePeek, ImageSheet, PackedPeek, Peek, TaughtSheet
from forebay.teachers import Alignment, TeacherEstimate
from forebay.tiers.records import TierClearReport, TierSummary, TierVerifyReport, WarmReport

DRAWINGS: dict[type[Any], Callable[[Any], RenderableType]] = {
    Alignment: draw_alignment,
    BuildReport: draw_build,
    CleanReport: draw_clean,
    CopyReport: draw_copy,
    DemoReport: draw_demo,
    DryRun: draw_dry_run,
    Estimate: draw_estimate,
    Gaps: draw_gaps,
    ImagePeek: draw_images,
    ImageSheet: draw_image_sheet,
    ImportReport: draw_import,
    PackedPeek: draw_packed_rows,
    Peek: draw_peek,
    RefreshReport: draw_refresh,
    RekeyReport: draw_rekey,
    RepairReport: draw_repair,
    Status: draw_status,
    Summary: draw_summary,
    TaughtSheet: draw_taught_sheet,
    TeacherEstimate: draw_teacher_estimate,
    TierClearReport: draw_tier_clear,
    TierSummary: draw_tier,
    TierVerifyReport: draw_tier_verify,
    VerifyReport: draw_verify,
    WarmReport: draw_warm,
}


def draw(record: Any) -> RenderableType:
    """A record, or a list of them, as a person reads it."""
    if isinstance(record, (list, tuple)):
        return Group(*map(draw, record))
    return DRAWINGS[type(record)](record)
