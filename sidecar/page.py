"""The page that `hostkv status` prints: a status map (core.py) for people."""

from __future__ import annotations

from typing import Any

BAR = 40
HUNG_S = 3.0  # without a heartbeat, of which there is one every second


def page(status: dict[str, Any]) -> str:
    pool, blocks, items, limits = status["pool"], status["blocks"], status["items"], status["limits"]
    used = pool["used_bytes"] / pool["bytes"]
    lines = [
        f"hostkv {status['version']}  pid {status['pid']}  up {_duration(status['uptime_s'])}  {status['endpoint']}",
        f"pool    {_bar(used)}  {size_text(pool['used_bytes'])} of {size_text(pool['bytes'])}  "
        f"{pool['path']}  eviction: {pool['eviction']}{'  verify: load' if pool['verify'] else ''}",
        f"blocks  {blocks['ready']} ready, {blocks['writing']} being written, {blocks['pinned']} pinned, {items['evicted']} evicted; "
        f"at most {limits['blocks']}",
        f"extents {pool['extents'] - pool['free_extents']} of {pool['extents']} in use, {size_text(pool['extent_bytes'])} each",
    ]
    lines += [
        f"        {size_text(line['slot_bytes'])} slots: {line['taken']} of {line['slots']} taken, in {line['extents']} extents"
        for line in pool["sizes"]
    ]
    for tier in status["tiers"]:
        lines += _tier(tier, status)
    asked = items["acquired"] + items["missed"]
    hits = f"{items['acquired'] / asked:.0%} of {asked} asked for" if asked else "nothing asked for yet"
    lines += [
        f"loads   {items['acquired']} acquired{_sources(status)}, {items['missed']} missed ({hits}), "
        f"{items['discarded']} discarded as damaged",
        f"saves   {items['committed']} shards committed, {items['exists']} existed, {items['busy']} busy, {items['full']} full, "
        f"{items['throttled']} throttled, {items['aborted']} aborted",
        f"errors  {', '.join(f'{code} {n}' for code, n in status['errors'].items() if n) or 'none'}",
        f"namespaces {len(status['namespaces'])}",
    ]
    lines += [
        f"  {line['index']:>4}  {line['fingerprint'][:12]}  {line['blocks']} blocks of {line['shards']} x {size_text(line['shard_bytes'])}"
        f"  {line['label']}"
        for line in status["namespaces"]
    ]
    silenced = f", {status['sessions_silenced']} lost their pins because they hung" if status["sessions_silenced"] else ""
    lines.append(f"sessions {len(status['sessions'])}{silenced}")
    for session in status["sessions"]:
        members = ", ".join(map(_member, session["members"]))
        lines.append(f"  {session['id'][:12]}  {session['tags']} requests hold pins  {members}")
    return "\n".join(printable(line) for line in lines)


def _sources(status: dict[str, Any]) -> str:
    """Where blocks that were acquired came from; one that was read from disk counts there once, and after that as the pool's."""
    if not status["tiers"]:
        return ""
    acquired = status["items"]["acquired"]
    read = min(acquired, sum(tier["promoted"] for tier in status["tiers"]))
    return f" ({acquired - read} from the pool, {read} from disk)"


def _tier(tier: dict[str, Any], status: dict[str, Any]) -> list[str]:
    index, items, dirty = tier["index"], status["items"], status["blocks"]["dirty"]
    why_not = f" and not io_uring ({tier['engine_why']})" if tier["engine_why"] else ""
    lines = [
        f"disk    {_bar(index['used_bytes'] / tier['size_bytes'])}  {size_text(index['used_bytes'])} of {size_text(tier['size_bytes'])}  "
        f"by {tier['engine']}{why_not}",
        *(f"        {_directory(directory)}" for directory in tier["directories"]),
        f"        {index['blocks']} blocks of at most {index['max_blocks']}, {index['evicted']} evicted; "
        f"{size_text(index['memory_bytes'])} of memory",
        f"spills  {tier['spilled']} blocks written, {tier['spilling']} on their way, {dirty} in the pool only "
        f"({size_text(_dirty_bytes(status))}){_told(tier, spills_failed='failed', too_large='too large for a slab')}"
        f"{_told(items, evicted_dirty='evicted before they were on disk')}",
        f"reads   {tier['promoted']} blocks read, {tier['reading']} on their way, {tier['wanted']} asked for"
        f"{_told(tier, promotions_failed='failed', corrupt='corrupt', no_slot='found no slot in the pool', unwanted='too many at a time')}",
    ]
    return [*lines, *(f"     -> {hint}" for hint in _hints(tier, status))]


def _hints(tier: dict[str, Any], status: dict[str, Any]) -> list[str]:
    """What a person can do about it."""
    hints, index = [], tier["index"]
    if not any(directory["state"] == "serving" for directory in tier["directories"]):
        hints.append("no directory serves: nothing is written to disk, and what lies there cannot be read")
    elif 2 * _dirty_bytes(status) > status["pool"]["bytes"]:
        hints.append("most of the pool is not on disk: more is saved than the disks take; add directories on other disks")
    hung = [each["path"] for each in tier["directories"] if each["silent_s"] >= HUNG_S or each["reason"].startswith("no answer")]
    if hung:
        hints.append(
            f"{', '.join(hung)} does not answer: see whether the disk, or the server behind it, still works; it is used again when it "
            "does, and nothing has to be restarted"
        )
    if index["blocks"] + index["writing"] + index["gone"] >= index["max_blocks"]:
        hints.append(
            f"the index is full, which limits what is kept and not the size: raise max_blocks of the tier over {index['max_blocks']}"
        )
    if tier["not_quiet"]:
        where = ", ".join(tier["not_quiet"])
        hints.append(
            f"an earlier sidecar may still be reading or writing in {where}: slots of the pool that it used stay unused until then"
        )
    return hints


def _directory(directory: dict[str, Any]) -> str:
    state = directory["state"]
    words = [f"{directory['path']}  {'FAILED' if state == 'failed' else state}"]
    if state == "recovering":
        words[0] += f" {directory['slabs_recovered']} of {directory['slabs']} slabs, {directory['blocks_recovered']} blocks so far"
    if directory["reason"]:
        words[0] += f": {directory['reason']}"
    if state in ("failed", "quarantine"):
        when = f"in {_duration(directory['retry_in_s'])}" if directory["retry_in_s"] else "now"
        if directory["in_flight"]:
            when = f"when {directory['in_flight']} transfers have ended"
        words.append(f"looked at again {when}")
    if "used_bytes" in directory:  # it is in the index
        words.append(f"{size_text(directory['used_bytes'])} of {size_text(directory['total_bytes'])}, {directory['blocks']} blocks")
        if directory["slabs"] < directory["slabs_wanted"]:
            words.append(f"room for {directory['slabs']} of {directory['slabs_wanted']} slabs only")
        if not directory["direct"]:
            words.append("buffered (no O_DIRECT there)")
    words.append(f"read {directory['read_bytes'] / 1e9:.1f} GB, written {directory['written_bytes'] / 1e9:.1f} GB")
    if directory["silent_s"] >= HUNG_S:
        words.append(f"no answer for {_duration(directory['silent_s'])}")
    return "; ".join(words) + _told(
        directory, errors="errors", corrupt="corrupt", failures="times out of service", dropped_blocks="blocks lost by that"
    )


def _told(counts: dict[str, Any], **names: str) -> str:
    """Those counters that are not 0."""
    return "".join(f", {counts[name]} {words}" for name, words in names.items() if counts[name])


def _dirty_bytes(status: dict[str, Any]) -> int:
    """Of blocks that no tier has: as many of the pool's bytes as of its blocks."""
    blocks = status["blocks"]
    return int(status["pool"]["used_bytes"] * blocks["dirty"] // max(1, blocks["total"]))


def _bar(used: float) -> str:
    full = round(used * BAR)
    return f"[{'#' * full}{'.' * (BAR - full)}] {used:.0%}"


def _member(member: dict[str, Any]) -> str:
    words = [f"pid {member['pid']}"]
    if member["device"]:
        words.append("device")
    if member["silent_s"] >= HUNG_S:
        words.append(f"hung for {_duration(member['silent_s'])}")
    if member["ending"]:
        words.append("ending")
    return f"{member['name'] or '?'} ({', '.join(words)})"


def printable(line: str) -> str:
    """What others wrote, such as names of clients, for a terminal: nothing in it may move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in line)


def size_text(size: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes}m" if hours else f"{minutes}m {whole % 60}s" if minutes else f"{seconds:.1f}s"
