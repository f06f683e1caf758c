"""One simulated host: the sidecar (host.py), the processes around it (clients.py), the network between, and everything that goes wrong.

All of it is one thread and one random.Random, so a seed replays exactly. A step is one event: a request or a reply arrives, a client moves
on, the loop looks at the members, or a fault: a process is killed, stopped, continued, or its lock is out of sight; a connection or a reply
is lost; the sidecar is killed between any two messages, after one that it did not answer, or stopped for a minute; the clock jumps.

A fork's child has none of its parent's locks and must use nothing, so it is not here; exec and a descriptor too many closed show as locks
that are lost.
"""

from __future__ import annotations

from typing import Any

from hostkv.schemas import messages as m
from hostkv.schemas.errors import ErrorCode, Status

from .clients import COPY, LOST, Client, Connection, Process, Task, joined_tags
from .host import MAX_CONNECTIONS, NO_NAME, SECOND, Host, small_limits
from .layouts import ENCODED, FINGERPRINTS, KEYS, LAYOUTS, NAMES, NUMBERS, TOO_LARGE
from .model import LATER, Block, Violation, handles, require, split
from .tier import RECOVERING, SERVING, Transfer, advance_orphan

MAX_PROCESSES, MAX_TASKS = 4, 3
DRAIN_STEPS = 4000


class World(Host):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.max_connections = self.rng.choice([2, MAX_CONNECTIONS + 2])
        self.disks = self.rng.choice([0.15, 0.6])  # how often something happens there
        self.moves = self.rng.choice([0.1, 1.0, 3.0])  # how often the loop comes to that, beside one event of a tier
        self.processes: list[Process] = []
        self.drivers: list[Task] = []  # what the devices of dead processes still copy
        self.sessions = [self.new_id() for _ in range(3)]
        self.orphans: list[Connection] = []  # of dead processes
        for _ in range(3):
            self.spawn()

    # ---- messages -------------------------------------------------------------------------------------------------------------------

    def deliver(self, connection: Connection) -> None:
        """One request arrives; its answer is on its way, or lost with the connection, or with the sidecar."""
        number, request = connection.outbox.popleft()
        reply = self.exchange(connection.name, number, request)
        if not connection.outbox and connection in self.orphans:
            self.orphans.remove(connection)
        if reply is LATER:
            return
        lives, fate = connection.client.process.alive, 0.0 if self.calm else self.random()
        if lives and fate < 0.97:
            connection.inbox.append((number, self.instance, reply))
        elif not lives or fate < 0.995:
            self.lose_reply(connection.name)
        else:
            self.kill_sidecar()

    def send_late(self, name: bytes, number: int, reply: Any) -> None:
        connection = next((each for each in self.connections() if each.name == name), None)
        if connection is not None and connection.client.process.alive and (self.calm or self.random() < 0.95):
            connection.inbox.append((number, self.instance, reply))
        else:
            self.lose_reply(name)

    def lose_reply(self, name: bytes) -> None:
        self.note("reply lost", name)
        require(self.core.forget(name) == (name in self.model.connections), "forget answers wrong")
        self.model.forget(name)

    def kill_sidecar(self) -> None:
        self.note("sidecar killed")
        self.core = None
        self.tables.close()
        self.exits.clear()
        self.unanswered.clear()
        if self.tier is not None:
            self.tier.kill()
            self.tier = None
        for connection in self.connections():
            connection.outbox.clear()
            if self.random() < 0.5:
                connection.inbox.clear()
            connection.broken = True
            if not connection.busy and connection in connection.client.connections:
                connection.client.drop(connection)
        self.orphans.clear()
        for client in self.known.values():  # a pidfd went with it, and without one only 5 s count
            client.process.exit_ns = min(client.process.exit_ns, self.now_ns + 4 * SECOND)

    def junk(self) -> None:
        """What no client of ours sends: refused, and nothing changes."""
        name = self.rng.choice([b"stranger", *self.model.connections])
        if name in self.model.connections and self.random() < 0.5:
            member = self.model.connections[name]
            self.exchange(
                name, 1, m.Hello([m.PROTOCOL_MAJOR, 0], self.new_id(), member.session.session_id, member.lock, 1, "another client")
            )
            return
        if name in self.model.connections and self.random() < 0.5:  # another session for a client whose lock is out of sight
            member = self.model.connections[name]
            process = self.known[member.client].process
            lock, hidden = process.lock, dict(self.hidden)
            process.take_lock()
            self.hidden[member.lock] = None
            self.exchange(name, 1, m.Hello([m.PROTOCOL_MAJOR, 0], member.client, self.new_id(), process.lock, 1, "another session"))
            process.lock, self.hidden = lock, hidden
            return
        require(not self.core.attach(self.new_id()), "who is no member has a device")
        if self.random() < 0.2:
            self.exchange(b"stranger", 1, m.Hello([m.PROTOCOL_MAJOR, 0], self.new_id(), self.new_id(), NO_NAME, 1, "a lock without a name"))
            return
        tiers = [member for member in self.model.members.values() if member.tier]
        locks = [process.lock for process in self.processes if process.alive and process.lock in process.locks]
        if tiers and locks and self.random() < 0.5:
            own = self.rng.choice(tiers).client
            for client, session in ((own, own), (own, self.new_id()), (self.new_id(), own)):
                self.exchange(b"stranger", 1, m.Hello([m.PROTOCOL_MAJOR, 0], client, session, self.rng.choice(locks), 1, "a sidecar"))
            require(not self.core.attach(own), "a tier's member has a device")
            return
        payload = self.rng.choice([b"", b"junk", b"\x80", m.encode_request(m.Bye(), 1)[:-1], bytes(40)])
        self.note("junk", name)
        _, _, reply = m.decode_reply(self.core.handle(name, payload, self.now_ns), m.Bye())
        require(isinstance(reply, m.ErrorReply), "junk was answered", reply)
        if name in self.model.waits:
            self.model.end_wait(name)
        self.take_replies()
        self.compare(False)

    def receive(self, connection: Connection) -> None:
        number, instance, reply = connection.inbox.popleft()
        task = connection.waiting
        if task is not None and number == connection.sent:
            connection.waiting = None
            connection.debts += connection.told.values()  # answers come in order, so what is still open has lost its own
            connection.told.clear()
            if isinstance(reply, m.HelloReply):
                connection.greeted = instance
            self.go_on(task, reply)
        else:
            told = connection.told.pop(number, None)
            if told is not None and isinstance(reply, m.ErrorReply) and reply.error == ErrorCode.NO_SESSION:
                connection.debts.append(told)

    def give_up(self, task: Task) -> None:
        """Its reply did not come in time."""
        assert task.connection is not None
        self.note("times out", task.client.number, task.what)
        task.connection.waiting = None
        self.go_on(task, LOST)

    def go_on(self, task: Task, value: Any) -> None:
        """The client takes its next step, up to its next request or to where others may come in between."""
        task.connection = None
        try:
            wanted = task.steps.send(value)
        except StopIteration:
            if task in task.client.tasks:
                task.client.tasks.remove(task)
            return
        task.copies = wanted is COPY
        if isinstance(wanted, tuple):
            task.connection, request = wanted
            task.connection.send(request)
            task.connection.waiting = task

    # ---- what happens ---------------------------------------------------------------------------------------------------------------

    @property
    def clients(self) -> list[Client]:
        return [client for process in self.processes for client in process.clients]

    def connections(self) -> list[Connection]:
        return [connection for client in self.clients for connection in client.connections] + self.orphans

    def spawn(self) -> None:
        """A new process: a scheduler, a worker of an engine that is there, or one with two clients of different sessions."""
        if sum(process.alive for process in self.processes) >= MAX_PROCESSES:
            return
        process = Process(self, self.ids, device=self.random() < 0.35, beats=self.random() < 0.9)
        process.pidfd = self.random() < 0.5
        for session in self.rng.sample(self.sessions, self.rng.choice([1, 1, 2])):
            client = Client(process, self.ids, session)
            self.known[client.id] = client
            process.clients.append(client)
        self.processes = [other for other in self.processes if other.alive]
        self.processes.append(process)
        self.note("process starts", process.number, "device" if process.device else "")

    def kill(self, process: Process) -> None:
        """The kernel drops its locks; requests that it sent may still arrive; its driver may still copy for a moment."""
        self.note("process killed", process.number)
        process.alive = False
        longest = 20 if all(client.id in self.exits for client in process.clients) else 4
        process.exit_ns = self.now_ns + int(self.random() * longest * SECOND) if process.device else self.now_ns
        for client in process.clients:
            for task in client.tasks:
                if task.connection is not None:
                    task.connection.waiting = None
                elif process.device and task.copies:
                    self.drivers.append(task)
                    continue
                task.steps.close()
            client.tasks.clear()
            for connection in client.connections:
                if connection.outbox and self.random() < 0.5:
                    self.orphans.append(connection)
            client.connections.clear()

    def drive(self, task: Task) -> None:
        """The device of a dead process finishes a copy. Nobody is left to go on after it."""
        try:
            wanted = None if task.client.process.exited else task.steps.send(None)
        except StopIteration:
            wanted = None
        if wanted is not COPY:
            task.steps.close()
            self.drivers.remove(task)

    def start_task(self, client: Client) -> None:
        kind, pick, moved = self.random(), self.rng.choice, self.moved_block()
        layout = pick(self.layouts)
        keys = self.rng.sample(KEYS[layout][: pick([3, NAMES])], pick([1, 1, 2, 3]))  # some are wanted more than others
        if kind < 0.45:
            if self.random() < 0.3:
                layout, keys = self.on_tier(layout, keys)
            shards = range(LAYOUTS[layout].shards)
            items = [(key, shard) for key in keys for shard in (shards if self.random() < 0.5 else [pick(shards)])]
            if self.random() < 0.05:
                items.append(pick(items))
            if self.random() < 0.06:
                self.start(client, "churn", client.churn(layout, pick(self.layouts)))
                return
            ending = "commit" if self.random() < 0.7 else pick(["abort", "part", "wrong"])
            steps, what = client.save(layout, items, ending), "save"
        elif kind < 0.8:
            reader = pick(
                [other for other in self.clients if other.session == client.session and other.process.alive and not other.closing]
            )
            if moved is not None and self.random() < 0.5:
                layout, keys = self.layout_of(moved.space), [moved.key]
            steps, what = client.load(layout, keys, reader), "load"
            if self.random() < 0.06:
                steps, what = client.hold(*self.in_pool(layout, keys)), "hold"
            elif self.random() < (0.6 if self.directories else 0.1):
                layout, keys = self.on_tier(layout, keys, only=self.random() < 0.5)
                begun = [(key, 0) for key in keys[1:] or keys] if LAYOUTS[layout].shards > 1 and self.random() < 0.6 else []
                steps, what = client.prefetch(layout, keys, pick([0, 50, 500, 3000]), begun), "prefetch"
        elif kind < 0.85 and client.kept:
            handle, of = pick(client.kept)
            steps, what = client.read(of, [handle]), "peek"
        elif kind < 0.87:
            steps, what = client.say(lambda index: m.Lookup(index, b"".join(keys)), layout), "lookup"
        elif kind < 0.93 and moved is not None:
            steps, what = client.discard(self.layout_of(moved.space), [(moved.key, moved.page, moved.generation)]), "discard"
        elif kind < 0.93 and client.kept:
            _, of = pick(client.kept)
            wrong = self.rng.choices([handle for handle, each in client.kept if each == of], k=pick([1, 2, 4]))
            if self.random() < 0.2:
                wrong = [(key, page, generation + 1) for key, page, generation in wrong]  # as if it were another block's
            steps, what = client.discard(of if self.random() < 0.8 else layout, wrong), "discard"
        elif kind < 0.95:
            everything = self.random() < 0.3
            if moved is not None and self.random() < 0.7:
                layout = self.layout_of(moved.space)
            steps, what = client.say(lambda index: m.Clear(m.ALL_NAMESPACES if everything else index), layout), "clear"
        elif kind < 0.96:
            steps, what = client.say(lambda index: m.StatusRequest()), "status"
        elif kind < 0.98:
            steps, what = client.say(pick(self.odd_requests(client, layout)), layout), "odd"
        else:
            client.closing = True
            steps, what = client.bye(), "bye"
        self.start(client, what, steps)

    def moved_block(self) -> Block | None:
        """One that is read or written by the tier, and by others if there is such a one."""
        blocks = [self.model.blocks[each.key] for each in self.tier.transfers] if self.tier is not None else []
        return max(blocks, key=lambda block: len(block.pins), default=None)

    def on_tier(self, layout: int, keys: list[bytes], only: bool = False) -> tuple[int, list[bytes]]:
        """Some that the tier has, in most cases where it has any. `only`: and the pool has not."""
        if self.tier is None or self.random() < 0.2:
            return layout, keys
        numbers = {each: self.tier.names.get(FINGERPRINTS[each], 0) for each in self.layouts}
        pool = self.model.blocks if only else ()
        found = {
            each: [key for key in KEYS[each] if key not in pool and self.tier.index.real.has(key, numbers[each])[0]]
            for each in self.layouts
        }
        return self.some_of(found, layout, keys)

    def in_pool(self, layout: int, keys: list[bytes]) -> tuple[int, list[bytes]]:
        """Some that are READY, where there are any."""
        known = [(space, FINGERPRINTS.index(each[0])) for space, each in enumerate(self.model.spaces) if each is not None]
        found = {each: [key for key in KEYS[each] if self.model.found(space, key)] for space, each in known}
        return self.some_of(found, layout, keys)

    def some_of(self, found: dict[int, list[bytes]], layout: int, keys: list[bytes]) -> tuple[int, list[bytes]]:
        """Of those found; layout and keys, where none are."""
        layouts = [each for each, there in found.items() if there]
        if not layouts:
            return layout, keys
        layout = self.rng.choice(layouts)
        return layout, self.rng.sample(found[layout], min(len(found[layout]), self.rng.choice([1, 2, 4, NAMES])))

    def start(self, client: Client, what: str, steps: Any) -> None:
        task = Task(client, what, steps)
        client.tasks.append(task)
        self.note("starts", client.number, what)
        self.go_on(task, None)

    def odd_requests(self, client: Client, layout: int) -> list[Any]:
        """What honest clients do not send, or not now."""
        key, tag = KEYS[layout][1], client.new_tag()
        unknown = self.rng.randrange(self.sizes["max_namespaces"] + 1)  # or one that this client does not know, or knows as another
        return [
            lambda index: m.Reserve(index, tag, key, (LAYOUTS[layout].shards).to_bytes(2, "little")),
            lambda index: m.Commit(tag, key, bytes(2), (1).to_bytes(8, "little"), bytes(8)),
            lambda index: m.Lookup(unknown, key),
            lambda index: m.Reserve(unknown, tag, key, (64).to_bytes(2, "little")),
            lambda index: m.Acquire(unknown, tag, bytes(31) + b"x"),
            lambda index: m.Discard(unknown, key, bytes(8)),
            lambda index: m.Clear(unknown),
            lambda index: m.Hello([m.PROTOCOL_MAJOR, 0], client.id, client.session, client.process.lock, 1, "again"),
            lambda index: m.Register(TOO_LARGE.encode()),
            lambda index: m.Register(b"junk"),
            lambda index: m.Hello([m.PROTOCOL_MAJOR, 0], client.id, self.new_id(), client.process.lock, 1, ""),
            lambda index: m.Hello([m.PROTOCOL_MAJOR, 0], client.id, client.session, self.new_id(), 1, ""),
        ]

    def fault(self) -> None:
        if self.directories and self.random() < 0.25:
            self.fault_of_a_directory()
            return
        kind, pick = self.random(), self.rng.choice
        process = pick(self.processes) if self.processes else None
        if process is None or kind < 0.12:
            self.spawn()
        elif kind < 0.24:
            careless = [other for other in self.processes if other.alive and other.careless]
            process = pick(careless) if careless and self.random() < 0.5 else process
            if process.alive:
                self.kill(process)
        elif kind < 0.40:
            if process.runs:
                self.note("process stopped", process.number)
                process.stop()
        elif kind < 0.44:
            self.hang()
        elif kind < 0.60:
            if process.stopped:
                self.note("process continues", process.number)
                process.resume()
        elif kind < 0.65:
            lock = pick(process.locks)
            self.note("lock hidden", process.number)
            self.hidden[lock] = None
        elif kind < 0.68:
            self.hidden.clear()
        elif kind < 0.74:
            if self.core is not None and not self.paused:
                self.lose_locks()
        elif kind < 0.82:
            if self.core is not None:
                self.kill_sidecar()
        elif kind < 0.86:
            self.paused = self.rng.randrange(1, 12)
            self.note("sidecar stopped")
        elif kind < 0.90:
            connections = self.connections()
            if connections and self.core is not None:
                self.cut(pick(connections))
        elif kind < 0.93:
            self.scribble()
        elif kind < 0.96:
            self.note("the clock jumps, for nobody runs")
            self.now_ns += self.rng.randrange(60 * SECOND)
        elif self.core is not None and not self.paused:
            self.junk()

    def fault_of_a_directory(self) -> None:
        kind, directory = self.random(), self.rng.choice(self.directories)
        places = [] if self.tier is None or self.paused else self.tier.places
        place = next((place for place in places if place.directory is directory and place.state in (RECOVERING, SERVING)), None)
        if kind < 0.4:
            directory.hangs = not directory.hangs
            self.note("a directory hangs" if directory.hangs else "a directory hangs no more")
        elif kind < 0.65 and place is not None:
            self.note("a directory fails")
            self.tier.fail(place)
        elif kind < 0.85:
            self.note("a bit flips on the disk")
            payload = self.rng.choice(directory.payload)
            payload[self.rng.randrange(len(payload))] = (-self.steps,)
        elif place is not None:
            self.scribble()
        else:
            self.note("a bit flips in a record")
            records = self.rng.choice(directory.records)
            records[self.rng.randrange(len(records))] ^= 4

    def lose_locks(self) -> None:
        """A process that does nothing closes a file too many and loses its locks with it; then it takes another one, and says so."""
        idle = [process for process in self.processes if process.alive and not any(client.tasks for client in process.clients)]
        if not idle:
            return
        driven = [process for process in idle if process.device and not process.pidfd]
        process = self.rng.choice(driven if driven and self.random() < 0.7 else idle)
        self.note("all locks lost, another one taken", process.number)
        process.locks.clear()
        process.take_lock()
        process.careless = True
        for client in process.clients:  # it becomes another member, which registers and attaches anew
            client.attached = b""
            client.indexes.clear()
        if process.device and self.random() < 0.7:
            self.watch()  # so its connections are no good any more
            for client in process.clients:
                if process.runs and not client.closing:
                    self.start(client, "status", client.say(lambda index: m.StatusRequest()))
            return
        for connection in [connection for client in process.clients for connection in client.connections]:
            self.cut(connection)

    def hang(self) -> None:
        """An engine that has promised blocks stands still."""
        pinning = [session for session in self.model.sessions.values() if session.pins and not session.tiers]
        if not pinning:
            return
        session = self.rng.choice(pinning)
        for client in session.members:
            process = self.known[client].process
            if process.runs:
                self.note("process stopped", process.number)
                process.stop()
        if self.core is None or self.paused:
            return
        if self.random() < 0.5:
            self.watch_for_long()
            return
        for _ in range(13):  # until exactly ten seconds have passed, and a little longer
            self.pass_time(SECOND)
            self.watch()

    def watch_for_long(self) -> None:
        """Nothing else happens for a while."""
        for _ in range(self.rng.randrange(20)):
            self.pass_time(self.rng.choice([SECOND // 4, SECOND, SECOND, SECOND, 2 * SECOND]))
            self.watch()

    def cut(self, connection: Connection) -> None:
        """A connection is gone, with all that is under way on it."""
        self.note("connection cut", connection.name)
        connection.outbox.clear()
        connection.inbox.clear()
        connection.broken = True
        self.core.forget(connection.name)
        self.model.forget(connection.name)
        if connection in self.orphans:
            self.orphans.remove(connection)
        elif not connection.busy:
            connection.client.drop(connection)

    def pass_time(self, ns: int) -> None:
        self.now_ns += ns
        self.alive_ns += ns

    def step(self) -> bool:
        """One event. False when nothing is left to happen."""
        self.steps += 1
        rng = self.random
        self.pass_time(int(rng() * 0.1 * SECOND) if rng() < 0.97 else int(rng() * 7 * SECOND))
        if self.paused:
            self.paused -= 1
            if not self.paused:
                self.pass_time(60 * SECOND)
        up = self.core is not None and not self.paused
        if self.directories and rng() < self.disks and (events := self.events_of_tiers(up)):  # disks go on beside all the rest
            what, whom = self.rng.choice(events)
            what(whom)
            up = self.core is not None
        kind = rng()
        if not self.calm and kind < 0.045:
            self.fault()
            return True
        if kind < 0.09 or (not up and kind < 0.15):
            if self.core is None:
                self.start_sidecar()
            elif up:
                self.watch()
                if rng() < 0.1:
                    self.watch_for_long()
            return True
        clients = [client for client in self.clients if client.process.runs]
        if not self.calm and kind < 0.24:
            free = [client for client in clients if len(client.tasks) < MAX_TASKS and not client.closing]
            if free:
                self.start_task(self.rng.choice(free))
                return True
        events = []
        if up:
            events += [(self.deliver, connection) for connection in self.connections() if connection.outbox]
        for client in clients:
            events += [(self.receive, connection) for connection in client.connections if connection.inbox]
            for task in client.tasks:
                if task.connection is None:
                    events.append((self.advance, task))
                elif task.connection.broken or not up or rng() < 0.01 or not self.expects(task.connection):
                    events.append((self.give_up, task))
        events += [(self.drive, task) for task in self.drivers]
        if self.calm:  # until nothing is left
            events += self.events_of_tiers(up)
        if up and self.model.waits and (self.calm or not events):
            events.append((self.wait_on, None))
        if not events:
            return False
        what, whom = self.rng.choice(events)
        what(whom)
        return True

    def advance(self, task: Task) -> None:
        self.go_on(task, None)

    def events_of_tiers(self, up: bool) -> list[tuple[Any, Any]]:
        events: list[tuple[Any, Any]] = []
        for each in self.directories:
            events += [(self.advance_orphan, orphan) for orphan in each.orphans if not each.hangs]
        if self.tier is not None:
            events += self.tier.events(up)
            if up and (self.tier.done or self.model.moving.has_work(self.now_ns)):
                often = 1 if self.calm else self.moves
                events += [(self.move, None)] * (int(often) or self.random() < often)
        return events

    def expects(self, connection: Connection) -> bool:
        """Whether a reply may still come; a client is not always patient until the tier has done what it can."""
        waits = connection.name in self.model.waits and (self.calm or self.random() < 0.95)
        return bool(connection.outbox or connection.inbox or waits)

    def advance_orphan(self, orphan: Transfer) -> None:
        advance_orphan(self, orphan)

    def move(self, _: object = None) -> None:
        super().move()
        wait_ns = self.model.moving.again_ns - self.now_ns
        if wait_ns > 0 and not self.calm and self.random() < 0.3:  # until just then
            self.pass_time(wait_ns)
            super().move()

    def wait_on(self, _: object) -> None:
        """Until the first deadline, if it is near."""
        first_ns = min(wait.deadline_ns for wait in self.model.waits.values())
        self.pass_time(max(0, min(first_ns - self.now_ns, SECOND // 4)))
        self.watch()

    # ---- the end --------------------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Whatever happened, nothing stays behind: first all that is under way ends, then everybody leaves or dies, and then every key can
        be written again."""
        for _ in range(self.rng.choice([0, 14])):  # restarts with little in between, whatever they find
            if self.random() < 0.2 and self.processes and (process := self.rng.choice(self.processes)).alive:
                self.kill(process)
            if self.core is not None:
                self.kill_sidecar()
            self.start_sidecar()
            if not self.paused and self.random() < 0.3:
                self.write_keys([self.rng.choice(self.layouts)])
            for _ in range(12):
                self.step()
        self.calm, self.paused = True, 0
        self.hidden.clear()
        for directory in self.directories:
            directory.hangs = False
        if self.core is None:
            self.start_sidecar()
        for process in self.processes:
            if process.stopped:
                process.resume()
        if self.random() < 0.6:
            self.drain()
            self.lose_locks()
            self.drain()
        if self.random() < 0.3:
            self.want_all()
            self.note("nobody is served any more")
            self.core.end_members()
            for member in list(self.model.members.values()):
                if not member.tier:
                    self.model.leave(member)
            if self.model.moving is not None:
                self.model.moving.wanted.clear()
            self.compare(True)
            self.come_to_rest()
        for process in self.processes:
            if process.alive:
                self.kill(process)
        for connection in list(self.orphans):
            while connection.outbox:
                self.deliver(connection)
        for _ in range(4):
            self.pass_time(10 * SECOND)
            self.watch()
        self.come_to_rest()
        stats = self.tables.stats()
        left = {name: stats[name] for name in ("members", "pins", "shards_in_flight", "doomed")}
        left["members"] -= self.tier is not None
        require(not any(left.values()), "everybody is gone, and there still are", left)
        self.meet_at_the_tier()
        self.write_keys([FINGERPRINTS.index(known[0]) for known in self.model.spaces if known is not None])
        self.come_to_rest()
        self.tables.set_removed()
        keys, handles_now = (
            b"".join(KEYS[self.layouts[0]]),
            [(key, block.page, block.generation) for key, block in self.model.blocks.items()],
        )
        for space in range(self.sizes["max_namespaces"]):
            require(not any(self.view.lookup(space, keys)), "a pool that was removed has hits")
            require(set(self.view.locate(space, keys)[0]) == {Status.MISS}, "a pool that was removed has blocks")
            require(self.view.lookup_prefix(space, keys) == 0 and self.view.lookup_reverse(space, keys) == -1, "a removed pool has hits")
        require(not any(self.check_handles(handles_now)), "a handle of a removed pool is good")

    def drain(self) -> None:
        """Everybody lives and finishes what was begun, and pays what is owed: nothing is held any more."""
        for _ in range(DRAIN_STEPS):
            if self.step():
                continue
            owing = [client for client in self.clients if client.id in self.model.members and client.owes()]
            if not owing:
                break
            self.start(owing[0], "pay", owing[0].say(lambda index: m.Lookup(0, KEYS[0][0]), self.layouts[0]))
        else:
            raise Violation("the clients do not come to rest")
        self.watch()
        for block in self.model.blocks.values():  # but the pins of the dead while their session lives, and what their drivers may write
            held = [tag >> 16 for _, tag in (*block.pins, *block.writers.values())]
            members = [client for client in self.clients if client.process.alive and client.id in self.model.members]
            living = [client.number for client in members if client.number in held]
            require(not living, "nobody does anything, and still hold", short(block.key, "keys"), living)

    def come_to_rest(self) -> None:
        """The tier works, and nobody wants anything: what moves ends, and what only the pool has goes to the tier, where it has a place."""
        for _ in range(60):
            for directory in self.directories:
                while directory.orphans:
                    self.advance_orphan(directory.orphans[0])
            self.pass_time(SECOND)
            self.watch()
            if self.tier is None:
                return
            self.move()
            while events := self.tier.events(True):
                what, whom = self.rng.choice(events)
                what(whom)
            moving = self.model.moving
            if not (
                self.tier.done
                or moving.wanted
                or not moving.idle()
                or self.model.waits
                or any(map(self.is_stuck, self.model.blocks.values()))
            ):
                return
        raise Violation("the tier works, and is not given what there is to do")

    def is_stuck(self, block: Block) -> bool:
        """Whether the tier wants it and does not get it for no reason: nobody uses it, and no other namespace has its key."""
        others = {number for name, number in self.tier.names.items() if name != self.model.spaces[block.space][0]}
        taken = any(self.tier.index.real.has(block.key, number)[0] for number in others)
        return self.model.wanted(block) and block.idle and not taken

    def newcomer(self) -> tuple[Client, bytes] | None:
        """A client and its connection; None where there are too many."""
        process = Process(self, self.ids, device=False, beats=False)
        client, name = Client(process, self.ids, self.new_id()), self.new_name()
        hello = m.Hello([m.PROTOCOL_MAJOR, 0], client.id, client.session, process.lock, 1, "a newcomer")
        return (client, name) if isinstance(self.exchange(name, 1, hello), m.HelloReply) else None

    def put(self, client: Client, name: bytes, index: int, key: bytes, shard: int) -> int:
        """Reserves, writes and commits at once; the status of the reserve."""
        layout, number = self.layout_of(index), shard.to_bytes(2, "little")
        status, page, generation = handles(self.exchange(name, 1, m.Reserve(index, 1, key, number)))[0]
        if status == Status.OK:
            for half in (0, 1):
                self.write(client, layout, key, shard, page, generation, half)
            checksum = self.checksum_of(layout, key, generation, shard).to_bytes(8, "little")
            self.exchange(name, 1, m.Commit(1, key, number, generation.to_bytes(8, "little"), checksum))
        return int(status)

    def write_keys(self, layouts: list[int]) -> None:
        """Somebody comes, writes all blocks of these layouts that are not there, and goes; when it is calm nothing is in the way."""
        if (found := self.newcomer()) is None:
            return
        client, name = found
        for layout in layouts:
            registered = self.exchange(name, 1, m.Register(ENCODED[layout]))
            for key in KEYS[layout] if isinstance(registered, m.RegisterReply) else []:
                other = self.model.blocks.get(key)
                free = self.calm and (other is None or other.space == registered.index)
                for shard in range(LAYOUTS[layout].shards):
                    status = self.put(client, name, registered.index, key, shard)
                    require(not free or status in (Status.OK, Status.EXISTS), "a key is busy forever", key, status)
        self.exchange(name, 1, m.Bye())

    def want_all(self) -> None:
        """Somebody asks for all that is on the tier, and does not wait for it."""
        if self.tier is None or (found := self.newcomer()) is None:
            return
        for layout in self.layouts:
            registered = self.exchange(found[1], 1, m.Register(ENCODED[layout]))
            if isinstance(registered, m.RegisterReply):
                self.exchange(found[1], 1, m.Prefetch(registered.index, b"".join(KEYS[layout]), 0))

    def meet_at_the_tier(self) -> None:
        """What seldom comes together: a block is read while another one that is wanted is half written again, and one that somebody holds
        is discarded while it is written."""
        known = [(space, FINGERPRINTS.index(each[0])) for space, each in enumerate(self.model.spaces) if each is not None]
        found = self.newcomer() if self.tier is not None else None
        if found is None:
            return
        client, name = found
        for space, layout in known:
            self.exchange(name, 1, m.Register(ENCODED[layout]))
            on_tier = self.tier.index.real.has(b"".join(KEYS[layout]), self.tier.names.get(FINGERPRINTS[layout], 0))
            old = [key for key, there in zip(KEYS[layout], on_tier, strict=True) if there][:2]
            for block in [self.model.blocks[key] for key in old if self.model.found(space, key)]:
                self.exchange(name, 1, m.Discard(space, block.key, block.generation.to_bytes(8, "little")))
            if len(old) == 2 and LAYOUTS[layout].shards > 1:
                self.put(client, name, space, old[1], 0)
            self.exchange(name, 1, m.Prefetch(space, b"".join(old or KEYS[layout][:1]), 0))
            self.move()
            new = next((key for key in KEYS[layout] if key not in old and not self.model.found(space, key)), None)
            if new is not None:
                for shard in range(LAYOUTS[layout].shards):
                    self.put(client, name, space, new, shard)
                self.move()
                status, _, generation = handles(self.exchange(name, 1, m.Acquire(space, 2, new)))[0]
                if status == Status.OK:
                    self.exchange(name, 1, m.Discard(space, new, generation.to_bytes(8, "little")))
            self.come_to_rest()
            self.exchange(name, 1, m.Release(joined_tags(2)))
        self.exchange(name, 1, m.Bye())


def run(seed: int, steps: int) -> None:
    """One seed. Violation (or whatever the core raised) carries what happened last and how to see it again."""
    with small_limits():
        world = World(seed)
        try:
            while world.steps < steps:
                world.step()
            world.end()
        except Exception as error:
            events = "\n".join("  " + " ".join(map(short, event)) for event in world.log)
            raise Violation(
                f"seed {seed}, step {world.steps}: {type(error).__name__}: {error}\nthe last {len(world.log)} events:\n{events}\n"
                f"again: python -m tests.sim --seeds 1 --first {seed} --steps {steps}"
            ) from error
        finally:
            world.close()


def short(value: Any, name: str = "") -> str:
    """For a person who reads what happened: ids and keys as the numbers they were made of."""
    if hasattr(value, "__dataclass_fields__"):
        fields = " ".join(f"{each}={short(getattr(value, each), each)}" for each in value.__dataclass_fields__ if each != "protocol")
        return f"{type(value).__name__.lower()}({fields})"
    if not isinstance(value, bytes):
        return str(value)
    if name == "keys":
        return ",".join(str(NUMBERS.get(key, "odd")) for key in split(value))
    width = {"shards": 2, "generations": 8, "tags": 8}.get(name)
    if width:
        return ",".join(str(int.from_bytes(value[i : i + width], "little")) for i in range(0, len(value), width))
    return (
        f"#{int.from_bytes(value, 'little')}"
        if len(value) == 16
        else f"{len(value)} bytes"
        if len(value) > 16
        else value.decode(errors="replace")
    )
