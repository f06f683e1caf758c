"""What a successor may find in the tables of a sidecar that was killed, and what it must make of it.

Three kinds. All that layout.h calls derived may hold anything, since it is rebuilt. A writer killed inside a call leaves an update
unfinished: an entry with an odd seq, a record whose block is gone, a number that was counted and not used; that is dropped without a word.
And bytes that no writer of ours can have left are dropped, counted as bad, and cost at most the block they are in.

Each function changes the memory and the model alike and says how many bad blocks and records adoption has to count; None: there is nothing
here that it could be done to.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack_into
from typing import TYPE_CHECKING, Any

from hostkv.cext import xxh3_64
from hostkv.schemas import layout as bytes_of

from .model import Block, Member

if TYPE_CHECKING:
    from .host import Host

FAR = 1 << 62
BLOCKS, AUX, SHARDS, PINS, MEMBERS, NAMESPACES, EXTENTS, SLOTS = range(8)
Bad = tuple[int, int] | None


class Tables:
    """The bytes of the tables while nobody serves."""

    def __init__(self, world: Host) -> None:
        self.world, self.memory, self.random = world, world.memory, world.rng
        self.places: dict[bytes, int] = {}  # key -> index of its entry
        self.twins: dict[int, bytes] = {}  # and of its second one
        self.touched: set[int] = set()  # extents that had a block that is lost
        for index in range(world.capacity):
            entry = bytes_of.BLOCK.unpack_from(self.memory, self.at(BLOCKS, index))
            if entry[1] in (bytes_of.WRITING, bytes_of.READY):
                self.places[entry[4]] = index

    def at(self, table: int, index: int) -> int:
        width = {BLOCKS: 64, AUX: 32, SHARDS: 64, PINS: 64, MEMBERS: 64, NAMESPACES: 128, EXTENTS: 64, SLOTS: 4}[table]
        return self.world.offsets[table] + width * index

    def put(self, table: int, index: int, offset: int, form: str, *values: Any) -> None:
        pack_into("<" + form, self.memory, self.at(table, index) + offset, *values)

    def is_sealed(self, index: int, block: Block) -> bool:
        return not self.world.verify and self.memory[self.at(BLOCKS, index) + 56 : self.at(BLOCKS, index) + 64] == self.seal(
            index, block.mask
        )

    def break_entry(self, block: Block, index: int, offset: int, form: str, *values: Any) -> Bad:
        """Changes it, with the seal that it would have or without, and loses the block."""
        sealed = self.is_sealed(index, block) and self.random.random() < 0.7
        self.put(BLOCKS, index, offset, form, *values)
        if sealed:
            self.put(BLOCKS, index, 56, "8s", self.seal(index, block.mask))
        self.lose(block)
        return 1, 0

    def seal(self, index: int, mask: int) -> bytes:
        """The checksum of an entry where those of payload are not wanted."""
        entry = bytearray(self.memory[self.at(BLOCKS, index) : self.at(BLOCKS, index) + 64])
        entry[0:6], entry[56:64] = bytes(6), mask.to_bytes(8, "little")
        return xxh3_64(bytes(entry)).to_bytes(8, "little")

    def free(self, table: int, count: int) -> int | None:
        """A record that nobody uses."""
        unused = [n for n in range(count) if self.memory[self.at(table, n) : self.at(table, n) + 4] == bytes(4)]
        return self.random.choice(unused) if unused else None

    def empty(self) -> list[int]:
        return [n for n in range(self.world.capacity) if self.memory[self.at(BLOCKS, n) + 4] == bytes_of.EMPTY]

    def slot_bytes(self) -> list[int]:
        """Of each extent."""
        places = [self.at(EXTENTS, n) for n in range(len(self.world.model.extents))]
        return [int.from_bytes(self.memory[at : at + 8], "little") for at in places]

    def whole(self) -> set[bytes]:
        """The keys of entries to which nothing was done yet."""
        return {key for key, index in self.places.items() if self.memory[self.at(BLOCKS, index)] % 2 == 0} - set(self.twins.values())

    def pick(self, of: Callable[[Block], bool]) -> tuple[Block, int] | None:
        """A block that nothing was done to yet, and where its entry is."""
        whole = [
            key for key, index in self.places.items() if self.memory[self.at(BLOCKS, index)] % 2 == 0 and key not in self.twins.values()
        ]
        blocks = [block for block in self.world.model.blocks.values() if block.key in whole and of(block)]
        block = self.random.choice(blocks) if blocks else None
        return None if block is None else (block, self.places[block.key])

    def lose(self, block: Block) -> None:
        model = self.world.model
        for session_id, tag in block.pins:
            session = model.sessions[session_id]
            del session.pins[tag][block.key]
            if not session.pins[tag]:
                del session.pins[tag]
        self.touched.add(block.page * bytes_of.PAGE // self.world.sizes["extent_bytes"])
        model.erase(block)
        self.world.lost.add(block.generation)

    def stays(self, client: bytes) -> bool:
        member = self.world.model.members[client]
        return member.flags != 0 or self.world.look(member.lock).held is not False


def scramble(t: Tables) -> None:
    """Everything that is derived, and all that is not used."""
    world, noise = t.world, t.random.randbytes
    model, sizes = world.model, world.sizes
    keys = {index: key for key, index in t.places.items()} | t.twins
    for index in range(world.capacity):
        t.put(AUX, index, 0, "8s", noise(8))
        if index not in keys:
            t.put(AUX, index, 8, "16s", noise(16))
        elif keys[index] in model.blocks and model.blocks[keys[index]].ready:
            t.put(AUX, index, 16, "8s", noise(8))
        t.put(AUX, index, 24, "8s", noise(8))
    for table, count, rest in ((SHARDS, sizes["max_shards"], (12, 4)), (PINS, sizes["max_pins"], (56, 8))):
        for n in range(count):
            start, width = rest if t.memory[t.at(table, n)] else (4, 60)
            t.put(table, n, start, f"{width}s", noise(width))
    for n in range(sizes["max_namespaces"]):
        t.put(NAMESPACES, n, 24, "8s", noise(8))
    for n in range(len(model.extents)):
        t.put(EXTENTS, n, 8, "32s", noise(32))
    t.memory[t.at(SLOTS, 0) : t.at(SLOTS, sizes["pool_bytes"] // bytes_of.PAGE)] = noise(4 * (sizes["pool_bytes"] // bytes_of.PAGE))


def shuffle(t: Tables) -> None:
    """Where a record lies means nothing."""
    for table, count in ((SHARDS, t.world.sizes["max_shards"]), (PINS, t.world.sizes["max_pins"])):
        records = [t.memory[t.at(table, n) : t.at(table, n + 1)] for n in range(count)]
        t.random.shuffle(records)
        for n, record in enumerate(records):
            t.put(table, n, 0, "64s", record)


# ---- what a writer killed inside a call leaves ---------------------------------------------------------------------------------------


def entry_in_change(t: Tables) -> Bad:
    """A commit or a clear was under way. Nobody can be told what it holds; while somebody who lives may be writing or reading there, its
    slot is kept from others all the same."""
    wanted = t.random.choice([lambda block: not block.idle, lambda block: not block.ready, lambda block: True])
    if (found := t.pick(wanted)) is None:
        return None
    block, index = found
    t.put(BLOCKS, index, 0, "I", 2 * t.random.getrandbits(20) + 1)
    t.put(BLOCKS, index, 5, "B", t.random.choice([0, bytes_of.DOOMED]))
    if not block.ready:
        t.put(BLOCKS, index, 4, "B", t.random.choice([bytes_of.WRITING, bytes_of.READY]))
        t.put(BLOCKS, index, 56, "Q", t.random.getrandbits(64))
    if any(t.stays(client) for client, _ in block.writers.values()):
        block.doomed, block.uses, block.checksum = True, 0, 0
    elif any(t.stays(client) for session, _ in block.pins for client in t.world.model.sessions[session].members):
        block.doomed, block.uses = True, 0
    else:
        bad = _nearly_held(t, block)
        t.lose(block)
        return 0, bad
    return 0, 0


def _nearly_held(t: Tables, block: Block) -> int:
    """Records that look as if somebody held it. How many of them are bad."""
    sizes, members = t.world.sizes, [member for member in t.world.model.members.values() if t.stays(member.client)]
    if not members:
        return 0
    known = bytes_of.MEMBER.unpack_from(t.memory, t.at(MEMBERS, members[0].index))
    index, number, generation = members[0].index, known[1], block.generation
    undone = [shard for shard in range(block.shards) if shard not in block.done]
    bad = 0
    if undone:
        unused = [n for n in range(sizes["max_members"]) if n not in {member.index for member in t.world.model.members.values()}]
        nearly = [
            (0, index, undone[0], generation, block.key),
            (1, index, undone[0], generation + 1, block.key),
            (1, index, undone[0], generation, bytes(31) + b"x"),
            (1, 1 << 24, undone[0], generation, block.key),
            (1, index, 64, generation, block.key),
            *[(1, other, undone[0], generation, block.key) for other in unused[:1]],
            *[(1, index, shard, generation, block.key) for shard in sorted(block.done)[:1]],
        ]
        t.random.shuffle(nearly)
        nearly.sort(key=lambda record: -record[0])  # those that are free last, or others would take their place
        for used, member, shard, of, key in nearly:
            if (record := t.free(SHARDS, sizes["max_shards"])) is not None:
                t.put(SHARDS, record, 0, "IIIIQQ32s", used, member, shard, 0, 1, of, key)
                bad += member == 1 << 24
    if t.free(PINS, sizes["max_pins"]) is not None:
        numbers = {t.memory[t.at(MEMBERS, member.index) + 4] for member in t.world.model.members.values()}
        gone = [n for n in range(sizes["max_members"]) if n not in numbers]
        nearly_pinned = [
            (0, number, generation, block.key),
            (1, number, generation + 1, block.key),
            (1, number, generation, bytes(31) + b"x"),
            *[(1, other, generation, block.key) for other in gone[:1]],
        ]
        t.random.shuffle(nearly_pinned)
        nearly_pinned.sort(key=lambda record: -record[0])
        for used, session, of, key in nearly_pinned:
            if (record := t.free(PINS, sizes["max_pins"])) is not None:
                t.put(PINS, record, 0, "IIQQ32s", used, session, 1, of, key)
    return bad


def not_freed(t: Tables) -> Bad:
    """The last pin of a doomed block is given back, and it is still there."""
    if (found := t.pick(lambda block: block.idle)) is None:
        return None
    block, index = found
    t.put(BLOCKS, index, 5, "B", bytes_of.DOOMED)
    t.lose(block)
    return 0, 0


def entry_begun(t: Tables) -> Bad:
    empty = t.empty()
    if len(empty) < 4:
        return None
    t.put(
        BLOCKS, t.random.choice(empty), 0, "IBBH32s", 2 * t.random.getrandbits(20) + 1, t.random.randrange(4), 0, 1, t.random.randbytes(32)
    )
    return 0, 0


def shard_of_nothing(t: Tables) -> Bad:
    if (record := t.free(SHARDS, t.world.sizes["max_shards"])) is None:
        return None
    t.put(SHARDS, record, 0, "IIIIQQ32s", 1, 0, 0, 0, 1, 1, t.random.randbytes(32))
    return 0, 0


def pin_of_nothing(t: Tables) -> Bad:
    if (record := t.free(PINS, t.world.sizes["max_pins"])) is None:
        return None
    t.put(PINS, record, 0, "IIQQ32s", 1, 0, 1, 1, t.random.randbytes(32))
    return 0, 0


def pin_of_a_session_that_is_gone(t: Tables) -> Bad:
    numbers = {t.memory[t.at(MEMBERS, n) + 4] for n in range(t.world.sizes["max_members"]) if t.memory[t.at(MEMBERS, n)]}
    unused = [n for n in range(t.world.sizes["max_members"]) if n not in numbers]
    record, found = t.free(PINS, t.world.sizes["max_pins"]), t.pick(lambda block: block.ready)
    if record is None or found is None or not unused:
        return None
    t.put(PINS, record, 0, "IIQQ32s", 1, unused[0], 1, found[0].generation, found[0].key)
    return 0, 0


def acquire_not_answered(t: Tables) -> Bad:
    """Of two requests of one session, whose pins stay until it ends."""
    model, whole = t.world.model, t.whole()
    sessions = [session for session in model.sessions.values() if not session.tiers]
    blocks = [block for block in model.blocks.values() if block.ready and not block.doomed and block.key in whole]
    if not sessions or not blocks:
        return None
    session = t.random.choice(sessions)
    number = t.memory[t.at(MEMBERS, next(iter(session.members.values())).index) + 4]
    first = t.random.randrange(1 << 15)  # a tag that no client has
    for block in blocks[:2]:
        for tag in (first, first + 1):
            record = t.free(PINS, t.world.sizes["max_pins"])
            if record is None or block.key in session.pins.get(tag, {}):
                continue
            t.put(PINS, record, 0, "IIQQ32s", 1, number, tag, block.generation, block.key)
            session.pins.setdefault(tag, {})[block.key] = block
            block.pins[session.session_id, tag] = None
    return 0, 0


def commit_not_finished(t: Tables) -> Bad:
    """The shard is in the entry and its record is there."""
    if (found := t.pick(lambda block: bool(block.writers) and not block.doomed)) is None:
        return None
    block, index = found
    shard = t.random.choice(sorted(block.writers))
    layout = t.world.layout_of(block.space)
    if (block.generation, shard) not in t.world.copied:
        return None
    del block.writers[shard]
    is_sealed = t.is_sealed(index, block)
    block.done.add(shard)
    if t.world.verify:
        block.checksum ^= t.world.checksum_of(layout, block.key, block.generation, shard)
        t.put(BLOCKS, index, 56, "Q", block.checksum)
    elif is_sealed:
        t.put(BLOCKS, index, 56, "8s", t.seal(index, block.mask))
    t.put(AUX, index, 16, "Q", block.mask)
    if block.ready:
        t.put(BLOCKS, index, 4, "B", bytes_of.READY)
    t.world.lost.add(block.generation)  # its writer is not answered
    return 0, 0


def _leave_record(t: Tables, block: Block) -> None:
    """Of a shard that was given back."""
    record, undone = t.free(SHARDS, t.world.sizes["max_shards"]), set(range(block.shards)) - block.done
    members = [member.index for member in t.world.model.members.values() if t.stays(member.client)]
    if record is not None and undone and members:
        t.put(SHARDS, record, 0, "IIIIQQ32s", 0, t.random.choice(members), min(undone), 0, 1, block.generation, block.key)


def moved_halfway(t: Tables) -> Bad:
    """A block is in the tombstone that it moved into, or almost, and where it was. Who has written it, or not, is told by free records."""
    capacity = t.world.capacity
    if (found := t.pick(lambda block: block.idle)) is None:
        return None
    index = found[1]
    home = int.from_bytes(found[0].key[:8], "little")
    for distance in range((index - home) % capacity):
        to = (home + distance) % capacity
        if t.memory[t.at(BLOCKS, to) + 4] == bytes_of.TOMBSTONE and t.memory[t.at(BLOCKS, to)] % 2 == 0:
            for table, width in ((BLOCKS, 64), (AUX, 32)):
                t.memory[t.at(table, to) : t.at(table, to) + width] = t.memory[t.at(table, index) : t.at(table, index) + width]
            if t.random.random() < 0.5:
                t.put(BLOCKS, to, 0, "I", 2 * t.random.getrandbits(20) + 1)
                _leave_record(t, found[0])
            t.twins[to] = found[0].key
            return 0, 0
    return None


def extent_without_blocks(t: Tables) -> Bad:
    free = [n for n, size in enumerate(t.slot_bytes()) if not size]
    if not free:
        return None
    t.put(EXTENTS, t.random.choice(free), 0, "Q", 4096)
    return 0, 0


def numbers_not_used(t: Tables) -> Bad:
    t.world.model.generation += 3
    pack_into("<QQ", t.memory, bytes_of.GENERATION_OFFSET, t.world.model.generation, t.world.number_at(bytes_of.TICK_OFFSET) + 5)
    return 0, 0


def tombstone_before_empty(t: Tables) -> Bad:
    empty = t.empty()
    before = [n for n in empty if (n + 1) % t.world.capacity in empty]
    if len(empty) < 4 or not before:
        return None
    t.put(BLOCKS, t.random.choice(before), 4, "B", bytes_of.TOMBSTONE)
    return 0, 0


# ---- what no writer of ours leaves ---------------------------------------------------------------------------------------------------


def bad_field(t: Tables) -> Bad:
    if (found := t.pick(lambda block: block.idle)) is None:
        return None
    block, index = found
    fields = [
        (5, "B", bytes_of.CLEAN) if not block.ready else (4, "B", 9),
        (4, "B", 7),
        (6, "H", block.shards + 1),
        (40, "Q", 0),
        (40, "Q", t.world.model.generation + 1),
        (52, "I", t.world.sizes["max_namespaces"]),
        (52, "I", (1 << 32) - 1),
    ]
    return t.break_entry(block, index, *t.random.choice(fields))


def bad_place(t: Tables) -> Bad:
    """Outside of the pool, in an extent of another size, in the place of another block, between two places, or in the rest of an extent."""
    if (found := t.pick(lambda block: block.idle)) is None:
        return None
    block, index = found
    world, extent_pages = t.world, t.world.sizes["extent_bytes"] // bytes_of.PAGE
    own = world.model.extents[block.page // extent_pages]
    step, first = own.slot_bytes // bytes_of.PAGE, block.page // extent_pages * extent_pages
    places = [
        [(1 << 32) - 1, world.sizes["pool_bytes"] // bytes_of.PAGE],
        [n * extent_pages for n, size in enumerate(t.slot_bytes()) if size != own.slot_bytes],
        [other.page for other in own.blocks.values() if t.places[other.key] < index],
        [block.page + 1] if step > 1 else [],
        [first + extent_pages // step * step] if extent_pages % step else [],
    ]
    return t.break_entry(block, index, 48, "I", t.random.choice(t.random.choice([pages for pages in places if pages])))


def broken_seal(t: Tables) -> Bad:
    found = t.pick(lambda block: block.idle)
    if found is None or not t.is_sealed(found[1], found[0]):
        return None
    t.put(BLOCKS, found[1], 56, "Q", t.random.getrandbits(64))
    t.lose(found[0])
    return 1, 0


def entry_of_a_namespace_that_is_not_there(t: Tables) -> Bad:
    unused = [n for n, space in enumerate(t.world.model.spaces) if space is None]
    found = t.pick(lambda block: block.idle)
    if found is None or not unused:
        return None
    return t.break_entry(found[0], found[1], 52, "I", unused[0])


def bad_mask(t: Tables) -> Bad:
    if (found := t.pick(lambda block: block.idle and not block.ready)) is None:
        return None
    block, index = found
    mask = t.random.choice([1 << block.shards | 1, (1 << block.shards) - 1, 0, 0])
    sealed = t.is_sealed(index, block)
    if mask == 0 and (sealed or t.memory[t.at(BLOCKS, index) + 56 : t.at(BLOCKS, index) + 64] == bytes(8)):
        return None  # nothing of it is committed, and nothing says that it was
    t.put(AUX, index, 16, "Q", mask)
    if sealed:
        t.put(BLOCKS, index, 56, "8s", t.seal(index, mask))
    t.lose(block)
    return 1, 0


def checksum_of_nothing(t: Tables) -> Bad:
    found = t.pick(lambda block: not block.done and not any(t.stays(client) for client, _ in block.writers.values()))
    if found is None:
        return None
    t.put(BLOCKS, found[1], 56, "Q", 1)
    t.lose(found[0])
    return 1, 0


def key_that_no_search_finds(t: Tables) -> Bad:
    """Its search begins just behind its place and ends at an EMPTY one."""
    if (found := t.pick(lambda block: block.idle)) is None:
        return None
    return t.break_entry(found[0], found[1], 8, "Q24s", found[1] + 1, b"x" * 24)


def key_that_is_there_twice(t: Tables) -> Bad:
    capacity = t.world.capacity
    if (found := t.pick(lambda block: block.idle)) is None:
        return None
    block, index = found
    for other, at in t.places.items():
        home = int.from_bytes(other[:8], "little")
        if other in t.world.model.blocks and (at - home) % capacity < (index - home) % capacity:
            return t.break_entry(block, index, 8, "32s", other)
    return None


def generation_given_twice(t: Tables) -> Bad:
    """The later of the two in the table goes."""
    if (found := t.pick(lambda block: block.idle)) is None:
        return None
    block, index = found
    earlier = [other for other in t.world.model.blocks.values() if other.key in t.whole() and t.places[other.key] < index]
    if not earlier:
        return None
    return t.break_entry(block, index, 40, "Q", t.random.choice(earlier).generation)


def bad_shard_record(t: Tables) -> Bad:
    """In a record that nobody uses, so that nobody loses a right."""
    sizes = t.world.sizes
    record, found = t.free(SHARDS, sizes["max_shards"]), t.pick(lambda block: True)
    if record is None or found is None:
        return None
    block, _ = found
    used, member, shard, generation = t.random.choice(
        [
            (2, 0, 0, block.generation),
            (1, sizes["max_members"], 0, block.generation),
            (1, 0, block.shards, block.generation),
            (1, 0, 0, block.generation + 1),
        ]
    )
    t.put(SHARDS, record, 0, "IIIIQQ32s", used, member, shard, 0, 1, generation, block.key)
    return 0, 1


def shard_held_twice(t: Tables) -> Bad:
    record = t.free(SHARDS, t.world.sizes["max_shards"])
    living = []
    for n in range(t.world.sizes["max_shards"]):
        used, _, shard, _, tag, generation, key = bytes_of.SHARD.unpack_from(t.memory, t.at(SHARDS, n))
        block = t.world.model.blocks.get(key)
        client, held = block.writers.get(shard, (b"", -1)) if block is not None and block.generation == generation else (b"", -1)
        if used == 1 and held == tag and t.stays(client):
            living.append(n)
    if record is None or not living:
        return None
    source = t.at(SHARDS, t.random.choice(living))
    t.memory[t.at(SHARDS, record) : t.at(SHARDS, record) + 64] = t.memory[source : source + 64]
    return 0, 1


def bad_pin(t: Tables) -> Bad:
    sizes = t.world.sizes
    record, found = t.free(PINS, sizes["max_pins"]), t.pick(lambda block: True)
    if record is None or found is None:
        return None
    block, _ = found
    choices = [(2, 0, block.generation), (1, sizes["max_members"], block.generation), (1, 0, block.generation + 1)]
    if not block.ready:
        choices.append((1, 0, block.generation))
    used, session, generation = t.random.choice(choices)
    t.put(PINS, record, 0, "IIQQ32s", used, session, 1, generation, block.key)
    return 0, 1


def bad_member(t: Tables) -> Bad:
    """In a record behind those that are used, or with a flag that there is not."""
    model, sizes = t.world.model, t.world.sizes
    members: list[Member] = list(model.members.values())
    last = max((member.index for member in members), default=-1)
    if last + 1 == sizes["max_members"] or not members:
        return None
    known = bytes_of.MEMBER.unpack_from(t.memory, t.at(MEMBERS, t.random.choice(members).index))
    numbers = [t.memory[t.at(MEMBERS, member.index) + 4] for member in members]
    number = next(n for n in range(sizes["max_members"]) if n not in numbers)  # there are fewer members than that
    strange = t.random.randbytes(16)
    record = t.random.choice(
        [
            (2, number, 1, 0, strange, strange, strange),
            (1, number, 1, 0, strange, strange, bytes(16)),
            (1, sizes["max_members"], 1, 0, strange, strange, strange),
            (1, known[1], 1, 0, known[4], known[5], strange),
            (1, known[1], 1, 0, strange, strange, strange),
            (1, number, 1, 0, strange, known[5], strange),
        ]
    )
    t.put(MEMBERS, last + 1, 0, "IIII16s16s16s", *record)
    return 0, 1


def bad_flag_of_a_member(t: Tables) -> Bad:
    members = list(t.world.model.members.values())
    if not members:
        return None
    member = t.random.choice(members)
    t.put(MEMBERS, member.index, 12, "I", 4 | member.flags)
    return 0, 1


def bad_namespace(t: Tables) -> Bad:
    model, sizes = t.world.model, t.world.sizes
    whole = t.whole()
    blocks: dict[int, list[Block]] = {n: [] for n, space in enumerate(model.spaces) if space is not None}
    for block in model.blocks.values():
        blocks[block.space].append(block)
    idle = [n for n, own in blocks.items() if all(block.idle and block.key in whole for block in own)]
    if not idle:
        return None
    index = t.random.choice(idle)
    offset, form, value = t.random.choice(
        [(0, "I", 2), (4, "I", 0), (4, "I", 65), (8, "Q", 0), (8, "Q", sizes["pool_bytes"] + 1), (16, "Q", 4095), (16, "Q", 1 << 40)]
    )
    t.put(NAMESPACES, index, offset, form, value)
    for block in blocks[index]:
        t.lose(block)
    model.spaces[index] = None
    return len(blocks[index]), 1


def namespace_that_is_there_twice(t: Tables) -> Bad:
    known = [n for n, space in enumerate(t.world.model.spaces) if space is not None]
    unused = [n for n, space in enumerate(t.world.model.spaces) if space is None]
    if not known or not unused or unused[-1] < known[0]:
        return None
    source = t.at(NAMESPACES, known[0])
    t.memory[t.at(NAMESPACES, unused[-1]) : t.at(NAMESPACES, unused[-1]) + 128] = t.memory[source : source + 128]
    return 0, 1


def bad_extent(t: Tables) -> Bad:
    """Of no size that there can be, or of another one than its blocks."""
    whole = t.whole()
    extents = [
        (n, extent)
        for n, extent in enumerate(t.world.model.extents)
        if n not in t.touched and extent.blocks and all(block.idle and block.key in whole for block in extent.blocks.values())
    ]
    if not extents:
        return None
    n, extent = t.random.choice(extents)
    t.put(EXTENTS, n, 0, "Q", t.random.choice([0, extent.slot_bytes + 1, extent.slot_bytes + bytes_of.PAGE, 1 << 40]))
    count = len(extent.blocks)
    for block in list(extent.blocks.values()):
        t.lose(block)
    return count, 0


def counters_far_off(t: Tables) -> Bad:
    if t.world.model.generation >= FAR // 2:
        return None
    far = [FAR + t.random.getrandbits(61), (1 << 64) - 1 - t.random.getrandbits(2)]
    pack_into("<QQ", t.memory, bytes_of.GENERATION_OFFSET, t.random.choice(far), t.random.choice(far))
    t.world.model.generation = FAR // 2
    return 0, 0


def used_later_than_now(t: Tables) -> Bad:
    """Of the one that was used last, it changes nothing else."""
    block = max(t.world.model.blocks.values(), key=lambda block: block.used, default=None)
    if block is None or not block.idle or block.key not in t.whole():
        return None
    t.put(AUX, t.places[block.key], 8, "Q", (1 << 64) - 1)
    block.used = t.world.number_at(bytes_of.TICK_OFFSET)
    return 0, 0


def no_empty_entry(t: Tables) -> Bad:
    """No table of ours is without; nothing in it is believed."""
    blocks = list(t.world.model.blocks.values())
    if any(block.writers for block in blocks):
        return None
    for index in t.empty():
        t.put(BLOCKS, index, 4, "B", bytes_of.TOMBSTONE)
    for block in blocks:
        t.lose(block)
    return len(blocks), 0


# One of each line at most is done at a time, in this order, so that none undoes another.
DAMAGES: list[list[Callable[[Tables], Bad]]] = [
    [entry_in_change],
    [entry_begun],
    [moved_halfway],
    [commit_not_finished],
    [numbers_not_used, counters_far_off, used_later_than_now],
    [tombstone_before_empty],
    [bad_mask, checksum_of_nothing, broken_seal],
    [bad_field],
    [entry_of_a_namespace_that_is_not_there, bad_namespace, namespace_that_is_there_twice, not_freed],
    [
        *[bad_place, bad_place, bad_place, bad_place, bad_extent, extent_without_blocks],
        *[key_that_no_search_finds, key_that_is_there_twice, generation_given_twice],
    ],
    [shard_of_nothing, bad_shard_record, shard_held_twice],
    [pin_of_nothing, pin_of_a_session_that_is_gone, bad_pin, acquire_not_answered],
    [bad_member, bad_flag_of_a_member],
]


def crash(world: Host) -> tuple[str, tuple[int, int]]:
    """What happened to the tables, and how many bad blocks and records adoption has to count."""
    tables, blocks, records, done = Tables(world), 0, 0, []
    if world.random() < 0.03:
        lines: list[list[Callable[[Tables], Bad]]] = [[no_empty_entry]]
    else:
        chosen = sorted(world.rng.sample(range(len(DAMAGES)), world.rng.choice([0, 1, 3, 8, 8])))
        lines = [DAMAGES[n] for n in chosen]
    for line in lines:
        damage = world.rng.choice(line)
        bad = damage(tables)
        if bad is not None:
            done.append(damage.__name__)
            blocks, records = blocks + bad[0], records + bad[1]
    shuffle(tables)
    if world.random() < 0.6:
        scramble(tables)
        done.append("scrambled")
    return ", ".join(done) or "nothing", (blocks, records)
