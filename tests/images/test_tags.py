"""Vocabularies of tags, index lists, multi-hot rows and flips."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.columns import Ragged
from forebay.errors import RecipeInvalid
from forebay.images import Tags, tags
from forebay.images.tags import ImageUnreadable, tags_in

NAMES = st.lists(st.text("abcde", min_size=1, max_size=2), max_size=8)


def test_a_vocabulary_is_ordered_by_count_then_by_name():
    said = [{"tags": ["b", "z", "z"]}, {"tags": "b, z, c"}, {"tags": ["a", "z"]}, {}, {"tags": 7}, {"tags": None}]
    assert Tags.counted(said, "tags").names == ("z", "b", "a", "c")
    assert Tags.counted(said, "tags", min_count=2).names == ("z", "b")
    assert Tags.counted(said, "other").names == ()


def test_sentences_are_no_vocabulary(monkeypatch):
    monkeypatch.setattr(tags, "MOST_TAGS", 100)
    said = [{"caption": f"picture number {number}", "tags": ["cat"]} for number in range(101)]
    assert Tags.counted(said, "tags").names == ("cat",)
    assert len(Tags.counted(said[:100], "caption")) == 100
    with pytest.raises(RecipeInvalid, match=r"(?s)more than 100 different tags under 'caption'.*--tag-key"):
        Tags.counted(said, "caption")


@given(st.lists(NAMES, max_size=6), NAMES)
def test_indices_and_multi_hot_say_what_was_named(rows, names):
    vocabulary = Tags(tuple(dict.fromkeys(names)))
    indices = [vocabulary.indices(row) for row in rows]
    hot = vocabulary.multi_hot(indices)
    assert hot.shape == (len(rows), len(vocabulary))
    for row, found, bits in zip(rows, indices, hot, strict=True):
        assert set(vocabulary.named(found)) == set(row) & set(names)
        assert found.tolist() == sorted(found.tolist()) == np.flatnonzero(bits).tolist()
    assert (vocabulary.multi_hot(Ragged.of(indices, np.dtype(np.uint32))) == hot).all()


@given(st.sets(st.text("abcdef", min_size=1, max_size=2), min_size=4, max_size=12), st.data())
def test_a_flip_swaps_pairs_and_twice_is_nothing(names, data):
    vocabulary = Tags(tuple(data.draw(st.permutations(sorted(names)))))
    one, other, third, fourth = data.draw(st.permutations(sorted(names)))[:4]
    order = vocabulary.swapped({one: other, third: fourth})
    assert (order[order] == np.arange(len(vocabulary))).all()
    renamed = [vocabulary.names[place] for place in order]
    expected = {one: other, other: one, third: fourth, fourth: third}
    assert renamed == [expected.get(name, name) for name in vocabulary.names]
    assert (vocabulary.swapped({}) == np.arange(len(vocabulary))).all()


def test_a_pair_named_from_both_sides_is_one_pair():
    vocabulary = Tags(("left", "right", "cat"))
    assert vocabulary.swapped({"left": "right", "right": "left"}).tolist() == [1, 0, 2]


def test_pairs_that_are_none_are_refused():
    vocabulary = Tags(("left", "right", "cat"))
    with pytest.raises(RecipeInvalid, match="'up' is not in the vocabulary of 3 tags"):
        vocabulary.swapped({"left": "up"})
    with pytest.raises(RecipeInvalid, match="two pairs"):
        vocabulary.swapped({"left": "right", "cat": "left"})


def test_a_tag_stands_in_a_vocabulary_once():
    with pytest.raises(RecipeInvalid, match="'cat' is in the vocabulary twice"):
        Tags(("cat", "dog", "cat"))


def test_tags_are_a_list_of_strings_or_a_string_with_commas():
    assert tags_in({"t": ["b", "a", "b"]}, "t") == ["b", "a"]
    assert tags_in({"t": " b, a b ,,b"}, "t") == ["b", "a b"]
    assert tags_in({"t": None}, "t") == tags_in({}, "t") == []
    for wrong in (7, [1], {"a": 1}, ["a", None]):
        with pytest.raises(ImageUnreadable, match="bad-tags"):
            tags_in({"t": wrong}, "t")


@pytest.mark.parametrize(
    ("metadata", "key", "separator", "tags"),
    [
        ({"tag_string": "1girl solo  long_hair "}, "tag_string", " ", ["1girl", "solo", "long_hair"]),
        ({"tags": "a b\nc"}, "tags", "\n", ["a b", "c"]),
        ({"general": "solo sky", "character": "miku solo"}, ("general", "character"), " ", ["solo", "sky", "miku"]),
        ({"general": "solo"}, ("general", "character"), None, ["solo"]),
        ({"tags": [{"name": "cat", "id": 7}, {"name": "dog"}, "cat"]}, "tags", None, ["cat", "dog"]),
        ({"tags": ["looking left", "cat"]}, "tags", None, ["looking left", "cat"]),
        ({"tags": ["1girl solo", "cat"]}, "tags", " ", ["1girl", "solo", "cat"]),
    ],
)
def test_tags_may_have_another_separator_several_keys_and_objects_with_a_name(metadata, key, separator, tags):
    assert tags_in(metadata, key, separator) == tags


def test_an_object_without_a_name_is_no_tag():
    with pytest.raises(ImageUnreadable, match="bad-tags"):
        tags_in({"tags": [{"id": 7}]}, "tags")


@pytest.mark.parametrize(
    ("said", "separator", "note"),
    [
        ([{"tags": "1girl solo long_hair"}], None, "1 of 1 tags hold spaces, as sentences do ('1girl solo long_hair')"),
        ([{"tags": "1girl solo long_hair"}], " ", ""),
        ([{"tags": ["cat", "dog", "looking left"]}], None, ""),
        ([{"tags": [f"tag{number}", "cat"]} for number in range(20)], None, "20 of 21 tags occur once"),
        ([{"tags": [f"tag{number % 5}", "cat"]} for number in range(20)], None, ""),
    ],
)
def test_tags_that_look_like_sentences_are_noted(said, separator, note):
    found = Tags.counted(said, "tags", separator=separator).note
    assert found.startswith(note)
    assert bool(found) == bool(note)
    assert not found or "--tag-separator" in found
