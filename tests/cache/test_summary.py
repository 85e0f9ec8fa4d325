"""What a cache is."""

from pathlib import Path

from tests.helpers.layer_recipes import LineRecipe, layered_cache

import forebay as fb


def test_a_summary_has_counts_recipes_source_and_versions(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    summary = fb.info(root)
    assert (summary.root, summary.base, summary.generation, summary.generations) == (str(root), "numbers", 1, 2)
    assert (summary.planned_chunks, summary.rows, summary.source_files, summary.tagged) == (5, 20, 2, False)
    assert summary.source == {"kind": "lines", "root": str(tmp_path / "raw"), "patterns": ["."]}
    assert summary.bytes == sum(path.stat().st_size for path in (root / "layers").rglob("0*"))
    assert set(summary.versions[0]) >= {"python", "numpy", "zstd", "lz4"}
    layers = {layer.layer: layer for layer in summary.layers}
    assert layers["numbers"].fingerprint == fb.fingerprint(LineRecipe())
    assert layers["numbers"].fields == {"chunk_rows": 4, "codec": "zstd", "scale": 0.5}
    assert layers["numbers"].columns == ("number: int64", "vector: float32 [2] zstd", "text: uint8 ragged lz4")
    assert layers["numbers"].statistics == {"sum": sum(range(20))}
    assert layers["length"].columns[-1] == "present: bool"
    assert (layers["length"].chunks, layers["length"].rows, layers["length"].failures) == (5, 20, 5)
