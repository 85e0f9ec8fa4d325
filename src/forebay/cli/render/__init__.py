"""Draw records with rich; nothing here prints."""

from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType

from forebay.cache.records import (
    BuildReport,
    CleanReport,
    CopyReport,
    DoctorReport,
    DropReport,
    DryRun,
    Estimate,
    Gaps,
    ImportReport,
    RefreshReport,
    RekeyReport,
    RemoteEstimate,
    RepairReport,
    Status,
    Summary,
    TierClean,
    TierContents,
    TierFill,
    VerifyReport,
)
from forebay.cli.render.reports import (
    draw_build,
    draw_clean,
    draw_copy,
    draw_demo,
    draw_doctor,
    draw_drop,
    draw_dry_run,
    draw_estimate,
    draw_feature_sheet,
    draw_import,
    draw_refresh,
    draw_rekey,
    draw_repair,
    draw_verify,
)
from forebay.cli.render.rows import (
    draw_bundle,
    draw_image_sheet,
    draw_images,
    draw_packed_rows,
    draw_peek,
    draw_viewing,
)
from forebay.cli.render.state import (
    draw_alignment,
    draw_gaps,
    draw_remote_estimate,
    draw_status,
    draw_summary,
    draw_teacher_estimate,
    draw_tier,
    draw_tier_clean,
    draw_tier_clear,
    draw_tier_contents,
    draw_tier_fill,
    draw_tier_verify,
    draw_warm,
)
from forebay.preview.row_records import (
    BundleReport,
    DemoReport,
    FeatureSheet,
    ImagePeek,
    ImageSheet,
    PackedPeek,
    Peek,
    Viewing,
)
from forebay.teachers import Alignment, TeacherEstimate
from forebay.tiers.tier_value import TierClearReport, TierSummary, TierVerifyReport, WarmReport

DRAWINGS: dict[type[Any], Callable[[Any], RenderableType]] = {
    Alignment: draw_alignment,
    BuildReport: draw_build,
    BundleReport: draw_bundle,
    CleanReport: draw_clean,
    CopyReport: draw_copy,
    DemoReport: draw_demo,
    DoctorReport: draw_doctor,
    DropReport: draw_drop,
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
    RemoteEstimate: draw_remote_estimate,
    RepairReport: draw_repair,
    Status: draw_status,
    Summary: draw_summary,
    FeatureSheet: draw_feature_sheet,
    TeacherEstimate: draw_teacher_estimate,
    TierClean: draw_tier_clean,
    TierClearReport: draw_tier_clear,
    TierContents: draw_tier_contents,
    TierFill: draw_tier_fill,
    TierSummary: draw_tier,
    TierVerifyReport: draw_tier_verify,
    VerifyReport: draw_verify,
    Viewing: draw_viewing,
    WarmReport: draw_warm,
}


def draw(record: Any) -> RenderableType:
    """A record, or a list of records, as a rich renderable."""
    if isinstance(record, (list, tuple)):
        return Group(*map(draw, record))
    return DRAWINGS[type(record)](record)
