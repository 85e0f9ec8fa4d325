from forebay.kernels.reference import (
    best_fit as best_fit,
)
from forebay.kernels.reference import (
    copy_runs as copy_runs,
)
from forebay.kernels.reference import (
    frame_documents as frame_documents,
)
from forebay.kernels.reference import (
    gather as gather,
)
from forebay.kernels.reference import (
    line_starts as line_starts,
)
from forebay.kernels.reference import (
    locate_rows as locate_rows,
)
from forebay.kernels.reference import (
    mirror as mirror,
)
from forebay.kernels.reference import (
    pack_tokens as pack_tokens,
)
from forebay.kernels.reference import (
    paint as paint,
)
from forebay.kernels.reference import (
    paint_scaled as paint_scaled,
)
from forebay.kernels.reference import (
    permute as permute,
)
from forebay.kernels.reference import (
    read_rows as read_rows,
)
from forebay.kernels.reference import (
    token_places as token_places,
)
