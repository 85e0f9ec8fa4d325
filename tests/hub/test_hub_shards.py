"""Which files are the shards of a subset and a split."""

import pytest
from tests.hub.data_sets import README

from forebay.errors import SourceNotFound
from forebay.hub import RemoteFile, parquet_shards

FINE = ["README.md", "data/2013/0.parquet", "data/2014/0.parquet", "sample/0.parquet", "sample/1.parquet"]


def shards(paths: list[str], subset: str | None = None, split: str = "train", readme: str = "") -> list[str]:
    files = [RemoteFile(path, 1, "0" * 40) for path in sorted(paths)]
    return [file.path for file in parquet_shards(files, readme, "the data set 'org/set'", subset, split)]


def test_the_readme_says_which_files_a_subset_has():
    assert shards(FINE, None, readme=README) == ["data/2013/0.parquet", "data/2014/0.parquet"]
    assert shards(FINE, "sample", readme=README) == ["sample/0.parquet", "sample/1.parquet"]
    paths = [*FINE, "held-out/a.parquet", "held-out/b.parquet", "held-out/c.parquet", "sample/deep/2.parquet"]
    assert shards(paths, "sample", "test", README) == ["held-out/a.parquet", "held-out/b.parquet"]
    assert shards(paths, "sample", "train", README) == ["sample/0.parquet", "sample/1.parquet"]


def test_an_unknown_subset_or_split_names_those_there_are():
    with pytest.raises(
        SourceNotFound, match=r"(?s)subset 'big' of the data set 'org/set'.*there are: 'default', 'sample'"
    ):
        shards(FINE, "big", readme=README)
    with pytest.raises(
        SourceNotFound, match=r"(?s)split 'dev' of subset 'sample'.*there are: the splits 'test', 'train'"
    ):
        shards(FINE, "sample", "dev", README)
    with pytest.raises(SourceNotFound, match=r"several subsets\nhint: choose one: 'en', 'de'"):
        shards(
            FINE, readme="---\nconfigs:\n- {config_name: en, data_files: a}\n- {config_name: de, data_files: b}\n---\n"
        )


@pytest.mark.parametrize(
    "data_files",
    [
        "x/*.parquet",
        '["x/*.parquet"]',
        '["./x/0.parquet", "x/1.parquet"]',
        "{split: train, path: x/*.parquet}",
        '[{split: train, path: "**/?.parquet"}]',
        '[{path: ["x/0.parquet", "x/[1-2].parquet"]}]',
    ],
)
def test_patterns_are_written_in_many_ways(data_files):
    readme = f"---\r\nconfigs:\r\n- config_name: only\r\n  data_files: {data_files}\r\n---\r\n"
    assert shards(["x/0.parquet", "x/1.parquet", "x/more.txt"], readme=readme) == ["x/0.parquet", "x/1.parquet"]


def test_a_marked_subset_is_the_default_and_a_folder_goes_before_its_patterns():
    readme = "---\nconfigs:\n- {config_name: a, data_files: '*'}\n"
    readme += "- {config_name: b, data_dir: deep, data_files: '*.parquet', default: true}\n---\n"
    assert shards(["a.parquet", "deep/b.parquet"], readme=readme) == ["deep/b.parquet"]


@pytest.mark.parametrize(
    "readme",
    ["", "# prose", "---\nlicense: mit\n---\n", "---\n- 1\n---\n"],
)
def test_without_a_word_in_the_readme_names_decide(readme):
    paths = ["en/train-0.parquet", "en/train-1.parquet", "en/test-0.parquet", "de/train-0.parquet", "en/training.txt"]
    assert shards(paths, "en", readme=readme) == ["en/train-0.parquet", "en/train-1.parquet"]
    assert shards(paths, "en", "test", readme) == ["en/test-0.parquet"]
    assert shards(paths, None, readme=readme) == ["de/train-0.parquet", "en/train-0.parquet", "en/train-1.parquet"]
    assert shards(["0.parquet", "1.parquet"], readme=readme) == ["0.parquet", "1.parquet"]
    with pytest.raises(SourceNotFound, match=r"(?s)split 'test' of the data set.*there are: '0\.parquet'"):
        shards(["0.parquet"], split="test", readme=readme)
    with pytest.raises(SourceNotFound, match=r"(?s)subset 'fr'.*there are: 'de', 'en'"):
        shards(paths, "fr", readme=readme)


def test_a_data_set_without_parquet_says_what_it_has_and_where_the_hub_converts():
    with pytest.raises(
        SourceNotFound, match=r"only has files of type 'gz', 'md'\nhint: try the revision 'refs/convert/parquet'"
    ):
        shards(["README.md", "data.jsonl.gz"])
