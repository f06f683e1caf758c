"""The eviction policies: what each promises, against small models written another way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hostkv.sidecar.policies import POLICIES, S3Fifo
from hostkv.sidecar.simulate import Directory
from hypothesis import given
from hypothesis import strategies as st

# A tree of prompts: block b of depth d has children 3b+1 .. 3b+3; a prompt is a path from a first block (1, 2, 3) downward.
# Long ones: what is short tries out nothing.
PATHS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=20, max_size=40)
KEYS = st.lists(st.integers(0, 20), min_size=100, max_size=200)


def prompt(turns: Sequence[int]) -> list[int]:
    keys, block = [], 0
    for turn in turns:
        block = 3 * block + turn
        keys.append(block)
    return keys


def parents(keys: Sequence[int]) -> dict[int, int | None]:
    return dict(zip(keys, [None, *keys[:-1]], strict=True))


class Watched(Directory):
    """A directory that is looked at after each change."""

    def __init__(self, policy: str, capacity: int) -> None:
        super().__init__(POLICIES[policy](capacity), capacity)
        self.capacity = capacity

    def request(self, keys: list[int]) -> None:
        held = set(keys) & self.blocks
        self.use(keys)
        for key in keys:
            self.save([key], parents(keys), keys)
            assert len(self.blocks) <= self.capacity
        assert held <= self.blocks, "nothing that the request stands on has gone"


@pytest.mark.parametrize("policy", POLICIES)
@given(paths=PATHS, capacity=st.integers(1, 12))
def test_capacity_is_never_exceeded_and_used_to_the_full(policy: str, paths: list[list[int]], capacity: int) -> None:
    directory = Watched(policy, capacity)
    seen: set[int] = set()
    for turns in paths:
        keys = prompt(turns)
        directory.request(keys)
        seen.update(keys)
        assert directory.blocks <= seen
    if len(seen) >= capacity:
        assert len(directory.blocks) == capacity


@pytest.mark.parametrize("policy", POLICIES)
@given(paths=PATHS, capacity=st.integers(1, 12), busy=st.sets(st.integers(1, 39), min_size=10))
def test_a_victim_is_here_and_not_busy_and_there_is_one_while_it_can_be(
    policy: str, paths: list[list[int]], capacity: int, busy: set[int]
) -> None:
    directory = Watched(policy, capacity)
    for turns in paths:
        directory.request(prompt(turns))
    order = directory._policy
    free = directory.blocks - busy
    while free:
        victim = order.victim(busy)
        assert victim in free
        assert order.victim(busy) == victim, "proposing is not taking"
        order.remove(victim)
        free.remove(victim)
    assert order.victim(busy) is None


@given(paths=PATHS, capacity=st.integers(1, 12))
def test_prefix_never_leaves_an_orphan(paths: list[list[int]], capacity: int) -> None:
    directory = Watched("prefix", capacity)
    for turns in paths:
        keys = prompt(turns)
        directory.request(keys)
        assert all((block - 1) // 3 in directory.blocks for block in directory.blocks if block > 3)


class LeafModel:
    """What `prefix` means, word by word: of the blocks without children that one goes which was used longest ago, the deepest of one
    request first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[int, tuple[int, int]] = {}  # request, and nearer to the front is later

    def request(self, number: int, keys: list[int]) -> None:
        self.used.update({key: (number, -depth) for depth, key in enumerate(keys) if key in self.used})
        for depth, key in enumerate(keys):
            if key in self.used:
                continue
            if len(self.used) == self.capacity:
                parents_here = {(block - 1) // 3 for block in self.used}
                leaves = self.used.keys() - parents_here - set(keys)
                if not leaves:
                    return
                del self.used[min(leaves, key=lambda leaf: self.used[leaf])]
            self.used[key] = (number, -depth)


@given(paths=PATHS, capacity=st.integers(1, 12))
def test_prefix_is_the_coldest_leaf_first(paths: list[list[int]], capacity: int) -> None:
    directory, model = Watched("prefix", capacity), LeafModel(capacity)
    for number, turns in enumerate(paths):
        keys = prompt(turns)
        directory.request(keys)
        model.request(number, keys)
        assert directory.blocks == model.used.keys()


@given(paths=PATHS, capacity=st.integers(1, 12))
def test_prefix_is_lru_told_of_each_request_deepest_first(paths: list[list[int]], capacity: int) -> None:
    directory = Watched("prefix", capacity)
    order: list[int] = []  # oldest first
    for turns in paths:
        keys = prompt(turns)
        order = [key for key in order if key not in keys] + keys[:capacity][::-1]
        order = order[max(0, len(order) - capacity) :]
        directory.request(keys)
        assert directory.blocks == set(order)


def test_prefix_gives_an_unreachable_block_first() -> None:
    order = POLICIES["prefix"](4)
    for key, after in ((1, None), (4, 1), (8, 2)):
        order.add(key, after)
    assert order.victim(()) == 8


@given(KEYS, st.integers(1, 12))
def test_lru_evicts_what_was_used_longest_ago(keys: list[int], capacity: int) -> None:
    directory = Watched("lru", capacity)
    for number, key in enumerate(keys):
        directory.request([key])
        newest = list(dict.fromkeys(reversed(keys[: number + 1])))
        assert directory.blocks == set(newest[:capacity])


@given(KEYS, st.integers(1, 12))
def test_clock_goes_round_its_slots_and_spares_what_was_used(keys: list[int], capacity: int) -> None:
    directory = Watched("clock", capacity)
    slots: list[list[int]] = []  # [key, bit] in a ring
    hand = 0
    for key in keys:
        directory.request([key])
        found = [slot for slot in slots if slot[0] == key]
        if found:
            found[0][1] = 1
        elif len(slots) < capacity:
            slots.append([key, 0])
        else:
            while slots[hand][1]:
                slots[hand][1] = 0
                hand = (hand + 1) % capacity
            slots[hand] = [key, 0]
            hand = (hand + 1) % capacity
        assert directory.blocks == {slot[0] for slot in slots}


class Published:
    """Algorithm 1 of the S3-FIFO paper on lists, head first; one decision between the queues for each block that leaves one."""

    def __init__(self, size: int) -> None:
        self.size, self.small_size = size, max(1, size // 10)
        self.S: list[int] = []
        self.M: list[int] = []
        self.G: list[int] = []
        self.freq: dict[int, int] = {}

    def read(self, x: int) -> None:
        if x in self.S or x in self.M:
            self.freq[x] = min(self.freq[x] + 1, 3)
            return
        while len(self.S) + len(self.M) >= self.size:
            self.evict_small() if len(self.S) >= self.small_size else self.evict_main()
        if x in self.G:
            self.G.remove(x)
            self.M.insert(0, x)
        else:
            self.S.insert(0, x)
        self.freq[x] = 0

    def evict_small(self) -> None:
        t = self.S.pop()
        if self.freq[t] > 1:
            self.M.insert(0, t)
            self.freq[t] = 0
        else:
            self.G = [t, *self.G][: self.size - self.small_size]

    def evict_main(self) -> None:
        t = self.M.pop()
        if self.freq[t] > 0:
            self.M.insert(0, t)
            self.freq[t] -= 1


@given(KEYS, st.integers(1, 18))
def test_s3fifo_is_as_published(keys: list[int], capacity: int) -> None:
    directory, model = Watched("s3fifo", capacity), Published(capacity)
    for key in keys:
        directory.request([key])
        model.read(key)
        assert directory.blocks == {*model.S, *model.M}


def test_s3fifo_lets_a_scan_pass_what_is_used_often() -> None:
    directory = Watched("s3fifo", 100)
    often = range(50)
    for _ in range(3):
        for key in often:
            directory.request([key])
    for key in range(1000, 5000):
        directory.request([key])
    assert directory.blocks >= set(often)


def test_s3fifo_remembers_what_left_the_small_queue() -> None:
    order = S3Fifo(10)
    for key in range(10):
        order.add(key, None)
    assert order.victim(()) == 0
    order.remove(0)
    order.add(0, None)
    for key in range(1, 10):
        assert order.victim(()) == key, "0 came back into the main queue, the small one goes first"
        order.remove(key)


def test_s3fifo_takes_from_the_small_queue_where_the_main_one_has_nothing_to_give() -> None:
    order = S3Fifo(20)  # of which the small queue should have 2
    order.add(1, None)
    assert order.victim(()) == 1
