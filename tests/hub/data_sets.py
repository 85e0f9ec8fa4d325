"""Small data sets of Parquet shards, as they lie on a hub."""

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

README = """---
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample
  data_files:
  - split: train
    path: sample/*.parquet
  - split: test
    path: [held-out/a.parquet, held-out/b.parquet]
---
# A data set
"""


def shard(documents: Sequence[str | None], rows_per_group: int = 10, column: str = "text") -> bytes:
    """A Parquet file with a column of documents among others."""
    table = pa.table(
        {
            "id": pa.array(range(len(documents)), pa.int64()),
            column: pa.array(documents, pa.string()),
            "url": pa.array([f"https://example.org/{number}" * 20 for number in range(len(documents))], pa.string()),
        }
    )
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=rows_per_group, compression="zstd", write_statistics=False)
    return out.getvalue()


def documents(count: int, name: str) -> list[str]:
    return [f"{name} {number} " + "äöü words " * (number * 7919 % 37) for number in range(count)]
