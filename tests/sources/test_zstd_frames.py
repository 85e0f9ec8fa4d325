"""A Zstandard file is whole exactly where its last frame ends."""

from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from tests.sources.written import read_all

import forebay as fb
from forebay.errors import SourceUnreadable

SKIPPABLE = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"12345"


def frame(content: bytes, checksum: bool, sized: bool) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=checksum, write_content_size=sized)
    return compressor.compress(content)


FRAMES = st.just(SKIPPABLE) | st.builds(
    frame,
    st.binary(max_size=40)
    | st.integers(1, 400_000).map(lambda count: b"a" * count)
    | st.just(bytes(range(256)) * 2000),
    st.booleans(),
    st.booleans(),
)


@given(frames=st.lists(FRAMES, max_size=4), data=st.data())
@settings(max_examples=scaled(60), deadline=None)
def test_zstd_file_is_readable_if_and_only_if_its_last_frame_is_complete(frames, data):
    content = b"".join(frames)
    ends = {len(b"".join(frames[:count])) for count in range(len(frames) + 1)}
    size = data.draw(st.integers(0, len(content)) | st.sampled_from(sorted(ends)))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.zst"
        path.write_bytes(content[:size])
        with nullcontext() if size in ends else pytest.raises(SourceUnreadable, match="in the middle of a stream"):
            read_all(fb.sources.lines(path))
