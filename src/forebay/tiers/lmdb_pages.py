"""The pages of an LMDB file, read with `pread` and checked before use.

LMDB trusts its file: a flipped bit in a length makes it copy past the end of the map (SIGBUS), one in a page header
fails an assertion (SIGABRT), and either ends the process. Here every number is compared with the bounds of its page
and of the file, so damage raises `PageDamaged`, a short file or a bad sector included.

    meta 0, meta 1     the roots of two trees and the number of pages; the transaction number chooses between them
    branch             key -> page        leaf        key -> value, or the first page of a large value
    overflow           a large value, behind a header that counts its pages

A `LmdbSnapshot` is valid while a read transaction of the same number is open: LMDB does not reuse its pages meanwhile.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

LARGEST_VALUE = 1 << 30
_MAGIC, _DATA_VERSION, _META_FLAG = 0xBEEFC0DE, 1, 0x08
_BRANCH, _LEAF, _OVERFLOW = 0x01, 0x02, 0x04
_LARGE = 0x01  # flag of a node whose value is on separate pages
_NO_PAGE = (1 << 64) - 1
_HEAD = struct.Struct("=QHHHH")  # page number, padding, flags, end of the pointers, begin of the nodes
_LARGE_HEAD = struct.Struct("=QHHI")  # page number, padding, flags, pages
_NODE = struct.Struct("=HHHH")  # low and high half of the size (or of a page number), flags, size of the key
_META = struct.Struct("=QHHIIIQQ")  # page header, magic, version, address, size of the map
_TREE = struct.Struct("=IHHQQQQQ")  # padding, flags, depth, branch, leaf and overflow pages, entries, root
_PAGE_NUMBER, _POINTER = struct.Struct("=Q"), struct.Struct("=H")
_KEY_LENGTH = 6  # where in a node it is
_PAGE_SIZES = tuple(512 << shift for shift in range(8))
_DEEPEST = 32
_META_READINGS = 100


class PageDamaged(Exception):
    """A page is not what LMDB writes."""


class Tree(NamedTuple):
    """What a meta page says of one of the two trees."""

    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class Meta(NamedTuple):
    """One of the two meta pages."""

    page_size: int
    free: Tree
    main: Tree
    pages: int
    transaction: int


class LmdbEntry(NamedTuple):
    """A key, and where its value is: `offset` is that of the content, `page` that of a large one, else 0."""

    key: bytes
    size: int
    offset: int
    page: int


def read_metas(descriptor: int) -> tuple[Meta, Meta]:
    """Both meta pages of a file that is not empty."""
    first = read_meta(descriptor, 0)
    second = read_meta(descriptor, 1, first.page_size)
    if second.page_size != first.page_size:
        raise PageDamaged(f"its meta pages disagree on the size of a page: {first.page_size}, {second.page_size}")
    return first, second


def read_meta(descriptor: int, number: int, page_size: int = 0) -> Meta:
    """A meta page; read twice, as another process may be writing it."""
    size, place = _META.size + 2 * _TREE.size + 16, number * page_size
    content = _read(descriptor, size, place)
    for _ in range(_META_READINGS):
        before, content = content, _read(descriptor, size, place)
        if content == before:
            return _meta(content, number)
    raise PageDamaged(f"meta page {number} changes while it is read")


class LmdbSnapshot:
    """The two trees as one transaction left them."""

    def __init__(self, descriptor: int, page_size: int, transaction: int) -> None:
        """`Outdated` where later transactions have taken the place of the meta page."""
        meta = read_meta(descriptor, transaction & 1, page_size)
        if meta.transaction != transaction:
            raise Outdated(f"meta page {transaction & 1} is of transaction {meta.transaction}, not {transaction}")
        size = os.fstat(descriptor).st_size
        if meta.pages * meta.page_size > size:
            raise PageDamaged(f"its file has {size:,} bytes of {meta.pages * meta.page_size:,}")
        self.meta = meta
        self._descriptor = descriptor
        self._branches: dict[int, bytes] = {}  # that were read; the branches of a full tier take a few MB

    def get(self, key: bytes) -> bytes | None:
        """The value of a key in the main tree."""
        tree = self.meta.main
        if tree.root == _NO_PAGE:
            return None
        number = tree.root
        for _ in range(tree.depth - 1):
            branch = self._branch(number)
            number = self.child(branch, self._first(branch, key, is_leaf=False))[1]
        leaf = self.page(number, _LEAF)
        place = self._first(leaf, key, is_leaf=True)
        if place == _count(leaf):
            return None
        entry = self.entry(number, leaf, place)
        return self.content(entry) if entry.key == key else None

    def content(self, entry: LmdbEntry, most: int | None = None) -> bytes:
        """The value of an entry, or its first bytes."""
        size = entry.size if most is None else min(most, entry.size)
        if entry.page:
            self.check_large(entry)
        return _read(self._descriptor, size, entry.offset)

    def check_large(self, entry: LmdbEntry) -> None:
        """The header of a large value counts as many pages as its leaf says."""
        number, _, flags, pages = _LARGE_HEAD.unpack(
            _read(self._descriptor, _HEAD.size, entry.page * self.meta.page_size)
        )
        if (number, flags, pages) != (entry.page, _OVERFLOW, self._pages_of(entry.size)):
            raise PageDamaged(
                f"page {entry.page} begins with ({number}, {flags:#x}, {pages}), "
                f"and a leaf says that it begins a value of {entry.size:,} bytes"
            )

    def entries(self, start: bytes = b"") -> Iterator[LmdbEntry]:
        """The entries of the main tree from a key on, in order."""
        tree = self.meta.main
        return self._entries_below(tree.root, tree.depth, start) if tree.root != _NO_PAGE else iter(())

    def check(self) -> None:
        """Walk both trees: `PageDamaged` unless LMDB can write to them. Large values are not read."""
        used = np.zeros(self.meta.pages, np.bool_)
        used[:2] = True
        for tree, is_free in ((self.meta.main, False), (self.meta.free, True)):
            counted = _Walk(self, used, is_free).counted(tree)
            if counted != tree:
                raise PageDamaged(f"a tree is said to be {tuple(tree)} and is {tuple(counted)}")

    def check_writable(self, keys: Sequence[bytes]) -> None:
        """`PageDamaged` unless LMDB can put or delete these keys: the branches and leaves on the way to them, the
        first page of a large value under one of them, and the tree of free pages.

        The numbers of free pages are not compared with those in use, as `check` does: a wrong one spoils values, whose
        checksums say so, and not the process.
        """
        wanted, checked = set(keys) if self.meta.main.root != _NO_PAGE else set(), set[int]()
        for number, leaf in dict(self._leaf_for(key, checked) for key in wanted).items():
            for place in range(_count(leaf)):
                entry = self.entry(number, leaf, place)
                if entry.page and entry.key in wanted:
                    self.check_large(entry)
        tree = self.meta.free
        for entry in self._entries_below(tree.root, tree.depth, b"") if tree.root != _NO_PAGE else ():
            (listed,) = _PAGE_NUMBER.unpack(self.content(entry, _PAGE_NUMBER.size).ljust(_PAGE_NUMBER.size, b"\xff"))
            if listed > entry.size // _PAGE_NUMBER.size - 1:
                raise PageDamaged("a list of free pages is longer than its value")

    def _leaf_for(self, key: bytes, checked: set[int]) -> tuple[int, bytes]:
        """The leaf in which a key is, or would be; every node of the branches above it is checked, once."""
        tree = self.meta.main
        number = tree.root
        for _ in range(tree.depth - 1):
            branch = self._branch(number)
            for place in range(_count(branch) if number not in checked else 0):
                self.child(branch, place)
            checked.add(number)
            number = self.child(branch, self._first(branch, key, is_leaf=False))[1]
        return number, self.page(number, _LEAF)

    def page(self, number: int, flags: int) -> bytes:
        """A branch or a leaf."""
        if not 2 <= number < self.meta.pages:
            raise PageDamaged(f"page {number} is named, and there are {self.meta.pages}")
        content = _read(self._descriptor, self.meta.page_size, number * self.meta.page_size)
        said, _, found, lower, upper = _HEAD.unpack_from(content)
        if (said, found) != (number, flags) or lower & 1 or not _HEAD.size < lower <= upper <= len(content):
            raise PageDamaged(f"page {number} begins with ({said}, {found:#x}, {lower}, {upper})")
        return content

    def child(self, page: bytes, place: int) -> tuple[bytes, int]:
        """A key of a branch, and the page it leads to. The first key of a branch is not used."""
        start, low, high, flags, length = self._node(page, place)
        return page[start : start + length], low | high << 16 | flags << 32

    def entry(self, number: int, page: bytes, place: int) -> LmdbEntry:
        """A key of a leaf, and where its value is."""
        start, low, high, flags, length = self._node(page, place)
        size, stop = low | high << 16, start + length
        if flags == _LARGE:
            if stop + _PAGE_NUMBER.size > len(page):
                raise PageDamaged(f"node {place} of page {number} ends outside of it")
            (first,) = _PAGE_NUMBER.unpack_from(page, stop)
            if size > LARGEST_VALUE or not 2 <= first <= self.meta.pages - self._pages_of(size):
                raise PageDamaged(f"a value of {size:,} bytes at page {first} does not fit into the file")
            return LmdbEntry(page[start:stop], size, first * self.meta.page_size + _HEAD.size, first)
        if flags or stop + size > len(page):
            raise PageDamaged(f"node {place} of page {number} has flags {flags:#x} and {size:,} bytes")
        return LmdbEntry(page[start:stop], size, number * self.meta.page_size + stop, 0)

    def _node(self, page: bytes, place: int) -> tuple[int, int, int, int, int]:
        """Where the key of a node begins, and the four numbers before it."""
        (at,) = _POINTER.unpack_from(page, _HEAD.size + 2 * place)
        if not _HEAD.size <= at <= len(page) - _NODE.size:
            raise PageDamaged(f"a node begins at {at} of a page of {len(page)} bytes")
        low, high, flags, length = _NODE.unpack_from(page, at)
        if at + _NODE.size + length > len(page):
            raise PageDamaged(f"a key of {length} bytes begins at {at + _NODE.size} of a page of {len(page)}")
        return at + _NODE.size, low, high, flags, length

    def _entries_below(self, number: int, depth: int, start: bytes) -> Iterator[LmdbEntry]:
        if depth == 1:
            page = self.page(number, _LEAF)
            for place in range(self._first(page, start, is_leaf=True), _count(page)):
                yield self.entry(number, page, place)
            return
        page = self._branch(number)
        for place in range(self._first(page, start, is_leaf=False), _count(page)):
            yield from self._entries_below(self.child(page, place)[1], depth - 1, start)

    def _branch(self, number: int) -> bytes:
        page = self._branches.get(number)
        if page is None:
            page = self._branches[number] = self.page(number, _BRANCH)
        return page

    def _first(self, page: bytes, start: bytes, *, is_leaf: bool) -> int:
        """The first node of a leaf that is not before a key; of a branch, the last one that is not after it."""
        low, high = (0 if is_leaf else 1), _count(page)
        room = len(page) - _NODE.size
        while low < high:
            middle = (low + high) // 2
            (at,) = _POINTER.unpack_from(page, _HEAD.size + 2 * middle)
            if at > room:
                raise PageDamaged(f"a node begins at {at} of a page of {len(page)} bytes")
            (length,) = _POINTER.unpack_from(page, at + _KEY_LENGTH)
            key = page[at + _NODE.size : at + _NODE.size + length]
            if key < start or (key == start and not is_leaf):
                low = middle + 1
            else:
                high = middle
        return low if is_leaf else low - 1

    def _pages_of(self, size: int) -> int:
        return (_HEAD.size - 1 + size) // self.meta.page_size + 1


class Outdated(PageDamaged):
    """The meta page is of another transaction. Begun again, a transaction finds the newest."""


class _Walk:
    """One tree, page by page: every page once, keys rising and between those of the branches above."""

    def __init__(
        self, snapshot: LmdbSnapshot, used: "np.ndarray[tuple[int], np.dtype[np.bool_]]", is_free: bool
    ) -> None:
        self._snapshot, self._used, self._is_free = snapshot, used, is_free
        self._branches = self._leaves = self._large = self._entries = 0

    def counted(self, tree: Tree) -> Tree:
        if tree.root != _NO_PAGE:
            self._visit(tree.root, tree.depth, None, None)
        return Tree(tree.depth, self._branches, self._leaves, self._large, self._entries, tree.root)

    def _visit(self, number: int, depth: int, least: bytes | int | None, most: bytes | int | None) -> None:
        if depth < 1:
            raise PageDamaged(f"page {number} is deeper than its tree")
        page = self._snapshot.page(number, _LEAF if depth == 1 else _BRANCH)
        self._take(number, 1)
        if depth == 1:
            self._leaves += 1
            self._check_leaf(number, page, least, most)
            return
        self._branches += 1
        children = [self._snapshot.child(page, place) for place in range(_count(page))]
        keys = [self._order(key) for key, _ in children[1:]]
        self._check_order(number, keys, least, most)
        for (_, below), low, high in zip(children, [least, *keys], [*keys, most], strict=True):
            self._visit(below, depth - 1, low, high)

    def _check_leaf(self, number: int, page: bytes, least: bytes | int | None, most: bytes | int | None) -> None:
        entries = [self._snapshot.entry(number, page, place) for place in range(_count(page))]
        self._check_order(number, [self._order(entry.key) for entry in entries], least, most)
        self._entries += len(entries)
        for entry in entries:
            if entry.page:
                pages = self._snapshot._pages_of(entry.size)
                self._take(entry.page, pages)
                self._large += pages
            if self._is_free:
                self._take_list(self._snapshot.content(entry))

    def _take(self, first: int, pages: int) -> None:
        if self._used[first : first + pages].any():
            raise PageDamaged(f"page {first} is in use twice")
        self._used[first : first + pages] = True

    def _take_list(self, content: bytes) -> None:
        """Free pages: how many, then their numbers, falling."""
        numbers = np.frombuffer(content[: len(content) // 8 * 8], np.uint64)
        if not len(numbers) or int(numbers[0]) > len(numbers) - 1:
            raise PageDamaged("a list of free pages is longer than its value")
        listed = numbers[1 : 1 + int(numbers[0])]
        if not len(listed):
            return
        if int(listed.max()) >= self._snapshot.meta.pages or (listed[:-1] <= listed[1:]).any():
            raise PageDamaged("a list of free pages is not in order, or names pages beyond the last")
        if self._used[listed].any():
            raise PageDamaged("a page is free and in use")
        self._used[listed] = True

    def _order(self, key: bytes) -> bytes | int:
        """Keys of the free list are numbers of transactions."""
        if not self._is_free:
            return key
        if len(key) != _PAGE_NUMBER.size:
            raise PageDamaged(f"the free list has a key of {len(key)} bytes")
        return int(_PAGE_NUMBER.unpack(key)[0])

    def _check_order(
        self, number: int, keys: list[bytes | int], least: bytes | int | None, most: bytes | int | None
    ) -> None:
        bounds = [*([] if least is None else [least]), *keys, *([] if most is None else [most])]
        pairs = list(pairwise(bounds))
        if least is not None and keys and keys[0] == least:
            pairs = pairs[1:]  # the first key of a page may be the one that leads to it
        if any(not one < other for one, other in pairs):  # type: ignore[operator]  # all bytes, or all numbers
            raise PageDamaged(f"the keys of page {number} are not in order")


def _meta(content: bytes, number: int) -> Meta:
    said, _, flags, _, magic, version, _, map_bytes = _META.unpack_from(content)
    if (said, flags, magic, version) != (number, _META_FLAG, _MAGIC, _DATA_VERSION):
        raise PageDamaged(f"meta page {number} begins with ({said}, {flags:#x}, {magic:#x}, {version})")
    size, _, *free = _TREE.unpack_from(content, _META.size)
    _, _, *main = _TREE.unpack_from(content, _META.size + _TREE.size)
    last, transaction = struct.unpack_from("=QQ", content, _META.size + 2 * _TREE.size)
    meta = Meta(size, Tree(*free), Tree(*main), last + 1, transaction)
    if size not in _PAGE_SIZES or meta.pages * size > map_bytes:
        raise PageDamaged(f"meta page {number} says {size} bytes a page, {meta.pages:,} pages, a map of {map_bytes:,}")
    for tree in (meta.free, meta.main):
        empty = tree.root == _NO_PAGE
        if not int(not empty) <= tree.depth <= (0 if empty else _DEEPEST):
            raise PageDamaged(f"meta page {number} says that page {tree.root} is the root of a tree {tree.depth} deep")
    return meta


def _count(page: bytes) -> int:
    """Nodes of a branch or a leaf."""
    lower: int = _HEAD.unpack_from(page)[3]
    return (lower - _HEAD.size) // 2


def _read(descriptor: int, size: int, offset: int) -> bytes:
    try:
        content = os.pread(descriptor, size, offset)
    except OSError as error:
        raise PageDamaged(f"{size:,} bytes at {offset:,} cannot be read: {error.strerror}") from error
    if len(content) != size:
        raise PageDamaged(f"{len(content):,} of {size:,} bytes at {offset:,} can be read")
    return content
