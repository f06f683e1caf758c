"""The tier of the simulation: a real Index over directories whose records and payload outlive the sidecar.

It does what sidecar/tiers/__init__.py asks of a tier, as disk.py does it, but when and how a job goes on and ends is an event of the seed:
it moves one half of a block, then the other, then the record; it fails, finds bytes that are not those it should be, or hangs with its
directory. Transfers of a sidecar that was killed go on: they still read from or write into slots of the pool until they end, and until then
their directory is not used (QUARANTINE of disk.py) and `quiet` says no.

What the core asks and is told is kept in `said`, for the model: which blocks a tier has is no rule of the core's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from errno import EBUSY, EIO, ENODEV, ENOSPC, EROFS, ESTALE
from typing import TYPE_CHECKING, Any

from hostkv.cext import Index, xxh3_64
from hostkv.schemas.layout import PAGE, RECORD
from hostkv.sidecar.tiers import CORRUPT, Done, Forget, Job, Read, Space, Write

from .layouts import FINGERPRINTS, GRAIN, KEYS, LAYOUTS, NAMES
from .model import require, split

if TYPE_CHECKING:
    from .host import Host

OPENING, RECOVERING, SERVING, FAILED = "opening", "recovering", "serving", "failed"
Grain = tuple[int, ...]


class Directory:
    """What is on one disk."""

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        self.records = [bytearray(RECORD.size * (slab_bytes // PAGE)) for _ in range(slabs)]
        self.written: dict[tuple[int, int], tuple[bytes, int]] = {}  # key and checksum of each record, whatever flipped in it since
        self.payload: list[list[Grain]] = [[(0,)] * (slab_bytes // GRAIN) for _ in range(slabs)]
        self.listed: dict[int, tuple[bytes, int]] = {}  # namespace number -> fingerprint and slot_bytes
        self.numbers = 0  # given so far
        self.hangs = False
        self.orphans: list[Transfer] = []  # transfers of sidecars that were killed

    def add(self, name: bytes, slot_bytes: int) -> int:
        """The number of a namespace that is new on its list."""
        self.numbers += 1
        self.listed[self.numbers] = (name, slot_bytes)
        return self.numbers

    def drop(self, numbers: Iterable[int]) -> None:
        self.listed = {number: space for number, space in self.listed.items() if number not in numbers}

    def write_record(self, slab: int, slot: int, key: bytes, checksum: int, sequence: int, number: int, slot_bytes: int) -> None:
        record = RECORD.pack(key, checksum, sequence, number, slot_bytes // PAGE, 0)[:-8]
        self.written[slab, slot] = key, checksum
        at = slot * RECORD.size
        self.records[slab][at : at + RECORD.size] = record + xxh3_64(record, slab << 32 | slot).to_bytes(8, "little")

    def fill(self, world: Host, layouts: list[int]) -> None:
        """What an earlier boot has left there, of generation 0."""
        numbers = {}
        for slab, payload in enumerate(self.payload):
            layout = world.rng.choice(layouts)
            size, name = LAYOUTS[layout].slot_bytes // GRAIN, FINGERPRINTS[layout]
            numbers[layout] = numbers.get(layout) or self.add(name, LAYOUTS[layout].slot_bytes)
            for slot, key in enumerate(world.rng.sample(KEYS[layout], min(len(payload) // size, NAMES))):
                row = world.content(layout, key, 0)
                payload[slot * size : (slot + 1) * size] = row
                checksum = world.checksum(row)
                world.contents[checksum] = (key, [0] * LAYOUTS[layout].shards, True)
                self.write_record(slab, slot, key, checksum, slab, numbers[layout], size * GRAIN)


class Transfer:
    """A job under way. `steps`: how much of it is done: one half of the payload, both, and the record of a write."""

    def __init__(self, job: Read | Write, place: Place, key: bytes, generation: int) -> None:
        self.job, self.place, self.directory, self.key, self.generation = job, place, place.directory, key, generation
        self.steps = 0
        self.checksum = 0
        self.number = 0  # of its namespace, in the directory

    def move(self, world: Host) -> None:
        job, size = self.job, self.job.slot_bytes // GRAIN
        half = size // 2 if self.steps == 0 else size - size // 2
        done = 0 if self.steps == 0 else size // 2
        page, at = job.page * (PAGE // GRAIN) + done, job.slot * size + done
        payload = self.directory.payload[job.slab]
        if isinstance(job, Write):
            payload[at : at + half] = world.pool[page : page + half]
        else:
            world.pool[page : page + half] = payload[at : at + half]
        self.steps += 1

    def write_record(self) -> None:
        job = self.job
        assert isinstance(job, Write)
        self.directory.write_record(job.slab, job.slot, job.key, self.checksum, job.sequence, self.number, job.slot_bytes)


class Place:
    """A directory as one sidecar sees it."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.state = OPENING
        self.looked = False
        self.number = -1  # in the index
        self.loaded = 0  # slabs
        self.numbers: dict[int, int] = {}  # namespace number there -> in the tier
        self.retired: dict[bytes, int] = {}  # namespaces that were, before anybody knew its list -> their number in the tier
        self.owed: dict[int, int] = {}  # numbers there that are never to be seen again -> in the tier
        self.busy = 0


class Told:
    """An index that keeps what it was asked, and what it said."""

    def __init__(self, index: Index, said: list[tuple[Any, ...]], places: list[Place]) -> None:
        self.real, self.said, self.places = index, said, places

    def has(self, keys: bytes, namespace: int) -> bytes:
        found = self.real.has(keys, namespace)
        self.said += [("has", key, namespace, hit) for key, hit in zip(split(keys), found, strict=True)]
        return found

    def place(self, key: bytes, namespace: int, slot_bytes: int) -> Any:
        placed = self.real.place(key, namespace, slot_bytes)
        self.said.append(("place", key, namespace, slot_bytes, placed))
        return placed

    def open(self, key: bytes, namespace: int) -> Any:
        found = self.real.open(key, namespace)
        self.said.append(("open", key, namespace, found))
        if found is not None:
            _, number, slab, slot, checksum = found
            directory = next(place.directory for place in self.places if place.number == number)
            require(directory.written[slab, slot] == (key, checksum), "the index names a place where another block was written", key)
        return found

    def settle(self, entry: int, checksum: int | None) -> None:
        self.said.append(("settle", entry, checksum, None))
        self.real.settle(entry, checksum)

    def close(self, entry: int, keep: bool) -> None:
        self.said.append(("close", entry, keep, None))
        self.real.close(entry, keep)

    def remove_namespace(self, namespace: int) -> int:
        self.said.append(("remove_namespace", namespace, None))
        return self.real.remove_namespace(namespace)


class Tier:
    """`most`: how many namespaces have a number at a time. `queue`: how many jobs a directory takes."""

    def __init__(self, world: Host, index: Index, directories: list[Directory], slab_bytes: int, most: int, queue: int) -> None:
        self.world, self.largest_bytes, self.most, self.queue = world, slab_bytes, most, queue
        self.said: list[tuple[Any, ...]] = []
        self.places = [Place(directory) for directory in directories]
        self.index: Any = Told(index, self.said, self.places)
        self.names: dict[bytes, int] = {}  # fingerprint -> number, the one asked for last at the end
        self.next_number = 1
        self.owing: dict[int, bytes] = {}  # numbers that are retired, but not forgotten for good
        self.transfers: list[Transfer] = []
        self.forgets: list[Forget] = []
        self.done: list[Done] = []

    # ---- the contract ---------------------------------------------------------------------------------------------------------------

    def number(self, space: Space) -> int:
        layout = LAYOUTS[FINGERPRINTS.index(space.fingerprint)]
        shape = (layout.shards, layout.shard_bytes, layout.slot_bytes)
        require((space.shards, space.shard_bytes, space.slot_bytes) == shape, "the tier is told of another shape", space)
        number = self.number_of(space.fingerprint)
        self.said.append(("number", space.fingerprint, number))
        return number

    def number_of(self, name: bytes) -> int:
        if name in self.names:
            number = self.names.pop(name)
        else:
            if len(self.names) == self.most:
                oldest = next(iter(self.names))
                self.index.real.remove_namespace(self.names[oldest])
                self.give_up(oldest, self.names.pop(oldest))
            number = self.new_number()
        self.names[name] = number
        return number

    def new_number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def give_up(self, name: bytes, number: int) -> None:
        self.owing[number] = name
        for place in self.places:
            place.owed |= {there: number for there, known in place.numbers.items() if known == number}

    def retire(self, spaces: Iterable[Space] | None) -> list[int]:
        """Also numbers of which nobody knows that they are forgotten, and of namespaces that may be on a list that nobody could look at."""
        names = list(FINGERPRINTS) if spaces is None else [space.fingerprint for space in spaces]
        unlooked = [place for place in self.places if not place.looked]
        numbers: list[int] = []
        for name in names:
            owing = [number for number, known in self.owing.items() if known == name]
            if name in self.names or (unlooked and not owing):
                owing.append(self.names.pop(name, 0) or self.new_number())
                self.give_up(name, owing[-1])
            for place in unlooked:
                place.retired[name] = owing[-1]
            numbers += owing
        self.said.append(("retire", None if spaces is None else tuple(names), numbers))
        return numbers

    def takes(self) -> bool:
        return any(place.state == SERVING for place in self.places)

    def room(self) -> int:
        rooms = [self.queue - place.busy for place in self.places if place.state in (RECOVERING, SERVING)]
        return min((room for room in rooms if room > 0), default=0)

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if isinstance(job, Forget):
                self.forgets.append(job)
                continue
            place = next((place for place in self.places if place.number == job.directory), None)
            if place is None:
                self.done.append(Done(job.token, ENODEV, 0))
            elif place.busy >= self.queue:
                self.done.append(Done(job.token, EBUSY, 0))
            else:
                place.busy += 1
                self.transfers.append(Transfer(job, place, *self.world.model.moving.moved(job.token)))

    def reap(self) -> list[Done]:
        done, self.done = self.done, []
        return done

    def status(self) -> dict[str, Any]:
        return {"type": "simulated"}

    # ---- what happens to it ---------------------------------------------------------------------------------------------------------

    def events(self, up: bool) -> list[tuple[Any, Any]]:
        """What may happen next; `up`: also what the sidecar takes part in."""
        found: list[tuple[Any, Any]] = [(self.advance, transfer) for transfer in self.transfers if not transfer.directory.hangs]
        if up:
            found += [(self.end_forget, forget) for forget in self.forgets]
            for place in self.places:
                directory = place.directory
                if place.state == RECOVERING:
                    found.append((self.recover, place))
                elif place.state in (OPENING, FAILED) and not (directory.hangs or directory.orphans or place.busy):
                    found.append((self.open, place))
        return found

    def end(self, transfer: Transfer, result: int) -> None:
        self.transfers.remove(transfer)
        transfer.place.busy -= 1
        self.done.append(Done(transfer.job.token, result, transfer.checksum if result == 0 else 0))

    def advance(self, transfer: Transfer) -> None:
        world, job = self.world, transfer.job
        fails = not world.calm and world.random() < 0.04
        if isinstance(job, Write):
            if fails:
                self.end(transfer, world.rng.choice([EIO, EIO, ENOSPC, EROFS, EBUSY]))
            elif transfer.steps == 2:
                transfer.write_record()
                self.end(transfer, 0)
            elif transfer.steps == 0 and not self.begin_write(transfer, job):
                pass
            else:
                transfer.move(world)
        else:
            if transfer.steps < 2:
                transfer.move(world)
            if fails:
                self.end(transfer, world.rng.choice([EIO, EIO, EBUSY]))
            elif transfer.steps == 2:
                transfer.checksum = world.checksum(self.in_pool(job))
                self.end(transfer, 0 if transfer.checksum == job.checksum else CORRUPT)
                if transfer.checksum == job.checksum:
                    world.delivered(transfer)

    def in_pool(self, job: Read | Write) -> list[Grain]:
        at = job.page * (PAGE // GRAIN)
        return self.world.pool[at : at + job.slot_bytes // GRAIN]

    def begin_write(self, transfer: Transfer, job: Write) -> bool:
        """False: it has ended already."""
        place = transfer.place
        if job.namespace not in self.names.values():
            self.end(transfer, ESTALE)
            return False
        numbers = [number for number, known in place.numbers.items() if known == job.namespace and number not in place.owed]
        if not numbers:
            name = next(name for name, number in self.names.items() if number == job.namespace)
            numbers = [place.directory.add(name, job.slot_bytes)]
            place.numbers[numbers[0]] = job.namespace
        transfer.number = numbers[0]
        row = self.in_pool(job)
        transfer.checksum = self.world.checksum(row)
        if job.checksum is not None and transfer.checksum != job.checksum:
            self.end(transfer, CORRUPT)
            return False
        self.world.taken(transfer, row)
        return True

    def end_forget(self, forget: Forget) -> None:
        world, result = self.world, 0
        self.forgets.remove(forget)
        for place in self.places:
            if not place.looked:
                result = ENODEV
            numbers = [number for number, known in place.owed.items() if known == forget.namespace]
            if numbers and not world.calm and world.random() < (0.5 if place.state == FAILED else 0.15):
                result = EIO
            else:
                place.directory.drop(numbers)
        if result == 0:
            self.owing.pop(forget.namespace, None)
        self.done.append(Done(forget.token, result, 0))

    def open(self, place: Place) -> None:
        """Its list is read, and what was retired meanwhile taken off."""
        directory = place.directory
        place.number = self.index.real.add_directory(len(directory.records))
        place.state, place.loaded, place.looked, place.numbers = RECOVERING, 0, True, {}
        place.owed |= {number: place.retired[name] for number, (name, _) in directory.listed.items() if name in place.retired}
        place.retired.clear()
        if self.world.random() < 0.7:
            directory.drop(place.owed)
        for number, (name, _) in directory.listed.items():
            if number not in place.owed:
                place.numbers[number] = self.number_of(name)

    def recover(self, place: Place) -> None:
        """One slab."""
        directory, current = place.directory, self.names.values()
        numbers = {
            number: (known, directory.listed[number][1])
            for number, known in place.numbers.items()
            if number not in place.owed and known in current
        }
        self.index.real.load(place.number, place.loaded, bytes(directory.records[place.loaded]), numbers)
        place.loaded += 1
        if place.loaded == len(directory.records):
            place.state = SERVING
            self.index.real.enable(place.number)

    def fail(self, place: Place) -> None:
        """It is given up, until nothing is under way there any more: what waits ends, what the kernel has begun goes on."""
        self.index.real.drop(place.number)
        place.number, place.state = -1, FAILED
        for transfer in [each for each in self.transfers if each.place is place and each.steps == 0]:
            if self.world.random() < 0.5:
                self.end(transfer, ENODEV)

    def kill(self) -> None:
        """The process is gone: some of what it had submitted is with the kernel, and goes on."""
        random = self.world.random
        for transfer in self.transfers:
            if transfer.steps == 1 or random() < 0.5:
                transfer.directory.orphans.append(transfer)
        for forget in self.forgets:
            for place in self.places:
                if random() < 0.5:
                    place.directory.drop([number for number, known in place.owed.items() if known == forget.namespace])


def advance_orphan(world: Host, transfer: Transfer) -> None:
    """A record is written when the payload is, by a process that lived until then."""
    if transfer.steps < 2:
        transfer.move(world)
    else:
        transfer.write_record()
        transfer.steps += 1
    if transfer.steps >= 2:
        transfer.directory.orphans.remove(transfer)


class Seen:
    """The tables as the core uses them. Tells the pages that were reserved for the tier: no message does."""

    def __init__(self, tables: Any, said: list[tuple[Any, ...]]) -> None:
        self.real, self.said = tables, said
        self.member = -1  # the tier's

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def reserve(
        self, index: int, member: int, tag: int, keys: bytes, shards: bytes, low_priority: bool = False
    ) -> tuple[bytes, bytes, bytes]:
        statuses, pages, generations = self.real.reserve(index, member, tag, keys, shards, low_priority)
        if member == self.member:
            self.said.append(("reserve", keys, tag, [int.from_bytes(pages[at : at + 4], "little") for at in range(0, len(pages), 4)]))
        return statuses, pages, generations
