"""The prefix cache finds the longest prefix, gives up what was used longest ago, and notices when it is broken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpserve.kv.radix import STALE, TRIM, RadixTree
from tpserve.tokens import pack_ids


class Cache:
    """A tree of pages of one id that is written in letters, and whose pages are numbered as they come."""

    def __init__(self):
        self.tree = RadixTree(1)
        self.pages = 0

    def stand(self, text):
        """Stand at the end of a text that is now cached."""
        ids = letters(text)
        node, found = self.tree.match(ids)
        rest = list(range(self.pages, self.pages + len(text) - len(found)))
        self.pages += len(rest)
        return self.tree.extend(node, ids[4 * len(found) :], rest) if rest else node

    def put(self, *texts):
        for text in texts:
            self.tree.unlock(self.stand(text))

    def edges(self):
        return [spelled(node.key) for node in self.tree.nodes()]

    def cached(self, text):
        return text[: self.tree.peek(letters(text))[0]]


def letters(text):
    return pack_ids(map(ord, text))


def spelled(key):
    return key.decode("utf-32-le")


def test_an_empty_tree_finds_nothing():
    tree = RadixTree(4)
    assert tree.peek(pack_ids(range(9))) == (0, 0)
    node, pages = tree.match(pack_ids(range(9)))
    assert (node, pages) == (tree.root, [])
    tree.check([node])
    tree.unlock(node)
    tree.check([])


@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
def test_only_whole_pages_are_found(page_size):
    tree = RadixTree(page_size)
    ids = pack_ids(range(4 * page_size))
    tree.unlock(tree.extend(tree.root, ids, [7, 5, 3, 1]))
    for tokens in range(4 * page_size + 3):
        asked = pack_ids([*range(tokens), -1])
        whole = min(tokens, 4 * page_size) // page_size
        assert tree.peek(asked) == (whole, whole)
        node, pages = tree.match(asked)
        assert pages == [7, 5, 3, 1][:whole]
        tree.check([node])
        tree.unlock(node)


def test_sequences_that_part_share_an_edge():
    cache = Cache()
    cache.put("abcdef", "abcxyz", "abq")
    assert sorted(cache.edges()) == ["ab", "c", "def", "q", "xyz"]
    assert cache.tree.match(letters("abcxyzw"))[1] == [0, 1, 2, 6, 7, 8]
    assert cache.cached("abcdefg") == "abcdef"
    assert cache.cached("xab") == ""


def test_who_goes_on_finds_what_is_cached_there():
    cache = Cache()
    cache.put("abcx")
    node = cache.stand("a")
    assert cache.tree.peek(letters("bcd"), node) == (2, 2)
    node, pages = cache.tree.follow(node, letters("bcd"))
    assert pages == [1, 2]
    assert cache.tree.path(node) == [0, 1, 2]
    assert cache.tree.evictable == 1
    cache.tree.check([node])
    assert cache.tree.follow(node, letters("d")) == (node, [])
    node = cache.tree.extend(node, letters("d"), [9])
    assert cache.cached("abcde") == "abcd"
    cache.tree.check([node])
    cache.tree.unlock(node)
    cache.tree.check([])


def test_who_looks_ahead_sees_which_pages_nobody_stands_on():
    cache = Cache()
    cache.put("abcdef")
    held = cache.stand("abcd")
    assert cache.tree.peek(letters("abcdex")) == (5, 1)
    assert cache.tree.peek(letters("ab")) == (2, 0)
    assert cache.tree.peek(letters("ef"), held) == (2, 2)
    cache.tree.unlock(held)
    assert cache.tree.peek(letters("abcdex")) == (5, 5)


def test_a_sequence_that_only_one_stands_on_grows_in_its_edge():
    cache = Cache()
    node = cache.stand("ab")
    assert cache.tree.extend(node, letters("cd"), [8, 9]) is node
    assert cache.edges() == ["abcd"]
    cache.tree.unlock(node)
    cache.put("abcdef")
    assert cache.edges() == ["abcdef"]


def test_a_node_on_which_others_stand_stays_where_it_is():
    cache = Cache()
    first, second = cache.stand("ab"), cache.stand("ab")
    assert first is second
    first = cache.tree.extend(first, letters("cd"), [8, 9])
    assert cache.edges() == ["ab", "cd"]
    cache.tree.check([first, second])
    cache.tree.unlock(first)
    assert cache.tree.evict(2) == [8, 9]
    cache.tree.check([second])


def test_a_node_that_nobody_needs_is_joined_with_its_child():
    cache = Cache()
    cache.put("abcdef", "abcxy", "abcdef")
    assert cache.tree.evict(2) == [6, 7]
    assert cache.edges() == ["abc", "def"]
    assert cache.tree.match(letters("abcdef"))[1] == [0, 1, 2, 3, 4, 5]
    assert cache.edges() == ["abcdef"]


def test_joining_keeps_the_nodes_that_requests_stand_on():
    cache = Cache()
    low = cache.stand("abcdef")
    cache.put("abcxy")
    cache.tree.evict(2)
    middle = cache.stand("abcde")
    assert cache.edges() == ["abcde", "f"]
    cache.tree.check([low, middle])
    assert cache.tree.path(low) == [0, 1, 2, 3, 4, 5]
    cache.tree.unlock(middle)
    cache.tree.unlock(low)
    cache.tree.check([])


def test_locked_pages_are_not_evictable():
    cache = Cache()
    cache.put("abcdef", "abcxyz")
    assert cache.tree.evictable == cache.tree.size == 9
    node = cache.stand("abcd")
    assert cache.tree.evictable == 5
    cache.tree.evict(5)
    assert cache.cached("abcdef") == "abcd"
    assert cache.cached("abcxyz") == "abc"
    with pytest.raises(AssertionError, match="1 pages wanted, 0 evictable"):
        cache.tree.evict(1)
    cache.tree.unlock(node)
    assert cache.tree.evictable == 4
    with pytest.raises(AssertionError, match="nobody stands"):
        cache.tree.unlock(node)


def test_what_was_left_longest_ago_is_evicted_first():
    cache = Cache()
    cache.put("aaa", "bbb", "ccc")
    held = cache.stand("aaa")
    cache.put("bbb")
    cache.tree.unlock(held)
    assert cache.tree.evict(3) == [6, 7, 8]
    assert cache.tree.evict(3) == [3, 4, 5]
    assert cache.tree.evict(3) == [0, 1, 2]


def test_the_end_of_an_edge_is_evicted_before_its_beginning():
    cache = Cache()
    cache.put("abcdef", "xyz")
    assert cache.tree.evict(2) == [4, 5]
    assert cache.cached("abcdef") == "abcd"
    assert cache.tree.evict(5) == [0, 1, 2, 3, 8]
    assert cache.cached("xyz") == "xy"
    cache.tree.check([])


def test_a_parent_is_next_by_its_own_stamp():
    cache = Cache()
    cache.put("abc", "abx")
    cache.tree.unlock(cache.stand("mn"))
    cache.tree.unlock(cache.tree.match(letters("ab"))[0])
    assert [cache.tree.evict(1) for _ in range(6)] == [[2], [3], [5], [4], [1], [0]]
    assert cache.tree.size == cache.tree.evictable == 0
    cache.tree.check([])


def test_trimming_a_long_edge_takes_a_part_that_pays_for_its_copy():
    cache = Cache()
    cache.put("a" * 100 * TRIM)
    assert cache.tree.evict(1) == list(range(100 * TRIM - 100, 100 * TRIM))
    assert cache.tree.size == cache.tree.evictable == 100 * TRIM - 100
    cache.tree.check([])


def test_pages_for_other_ids_are_refused():
    tree = RadixTree(4)
    with pytest.raises(AssertionError, match="2 pages for 16 bytes"):
        tree.extend(tree.root, pack_ids(range(4)), [0, 1])


def test_stale_stamps_do_not_pile_up():
    cache = Cache()
    texts = [f"{name}{tail}" for name in "abcdefgh" for tail in range(6)]
    cache.put(*texts)
    for _ in range(50):
        cache.put(*texts)
        assert len(cache.tree._heap) <= 2 * len(texts) + STALE
    cache.tree.check([])
    cache.tree.evict(cache.tree.size)
    assert not cache.tree._leaves
    cache.put("a")
    assert cache.tree.evict(1) == [cache.pages - 1]


@given(st.lists(st.text("ab", max_size=6), max_size=20), st.text("ab", max_size=7))
def test_the_longest_prefix_of_all_that_was_put_is_found(texts, asked):
    cache = Cache()
    for text in texts:
        cache.put(text)
        cache.tree.check([])
    prefixes = {text[:end] for text in texts for end in range(1, len(text) + 1)}
    assert cache.tree.size == len(prefixes)
    longest = max([prefix for prefix in prefixes if asked.startswith(prefix)], key=len, default="")
    assert cache.cached(asked) == longest
    node, pages = cache.tree.match(letters(asked))
    assert len(pages) == len(longest)
    assert cache.tree.path(node) == pages
    cache.tree.check([node])


def lose_pages(tree, held, shared):
    held.key, held.pages = b"", []


def shorten_the_key(tree, held, shared):
    held.key = held.key[:-1]


def drop_a_page(tree, held, shared):
    held.pages.pop()


def misfile(tree, held, shared):
    tree.root.children = {b"none": held}


def age_a_parent(tree, held, shared):
    shared.stamp = 0


def lock_twice(tree, held, shared):
    held.locks += 1


def miscount_pages(tree, held, shared):
    tree.size += 1


def miscount_evictable_pages(tree, held, shared):
    tree.evictable += 1


def list_a_locked_leaf(tree, held, shared):
    tree._leaves[99] = held


def list_a_leaf_by_another_stamp(tree, held, shared):
    tree._leaves[99] = tree._leaves.popitem()[1]


def empty_the_heap(tree, held, shared):
    tree._heap.clear()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_pages, "has no pages"),
        (shorten_the_key, "does not fill its pages"),
        (drop_a_page, "does not fill its pages"),
        (misfile, "not where its key says"),
        (age_a_parent, "left later than its parent"),
        (lock_twice, "2 locks, 0 below and 1 standing"),
        (miscount_pages, "counts 7 pages and has 6"),
        (miscount_evictable_pages, "counts 5 evictable pages and has 4"),
        (list_a_locked_leaf, "listed that is none"),
        (list_a_leaf_by_another_stamp, "a leaf is not listed"),
        (empty_the_heap, "not in the heap"),
    ],
)
def test_the_check_finds_what_is_broken(damage, message):
    cache = Cache()
    cache.put("xyw", "xyz")
    held, shared = cache.stand("ab"), cache.tree.root.children[letters("x")]
    cache.tree.check([held])
    damage(cache.tree, held, shared)
    with pytest.raises(AssertionError, match=message):
        cache.tree.check([held])


def test_the_check_finds_requests_that_do_not_stand_where_they_say():
    cache = Cache()
    node = cache.stand("ab")
    cache.put("cd")
    with pytest.raises(AssertionError, match="1 locks, 0 below and 0 standing"):
        cache.tree.check([])
    with pytest.raises(AssertionError, match="0 locks, 0 below and 1 standing"):
        cache.tree.check([node, cache.tree.root.children[letters("c")]])
    other = Cache().stand("x")
    with pytest.raises(AssertionError, match="not in the tree"):
        cache.tree.check([node, other])
