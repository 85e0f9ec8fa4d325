"""ministack, with the one condition that it lacks: `If-None-Match: *` of `CopyObject`, which Amazon honors too.

`python -m tests.remote.s3_that_copies`, as `python -m ministack`.
"""

from typing import Any

from ministack.app import main
from ministack.services import s3

copied = s3._copy_object


def copy_object(bucket: str, key: str, headers: dict[str, str]) -> Any:
    there = (s3._ensure_bucket(bucket) or {}).get("objects", {}).get(key)
    return s3._check_put_preconditions(headers, there) or copied(bucket, key, headers)


if __name__ == "__main__":
    s3._copy_object = copy_object
    main()
