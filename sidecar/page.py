"""The page that `hostkv status` prints: a status map (core.py) for people."""

from __future__ import annotations

from typing import Any

BAR = 40
HUNG_S = 3.0  # without a heartbeat, of which there is one every second


def page(status: dict[str, Any]) -> str:
    pool, blocks, items, limits = status["pool"], status["blocks"], status["items"], status["limits"]
    used = pool["used_bytes"] / pool["bytes"]
    full = round(used * BAR)
    lines = [
        f"hostkv {status['version']}  pid {status['pid']}  up {_duration(status['uptime_s'])}  {status['endpoint']}",
        f"pool    [{'#' * full}{'.' * (BAR - full)}] {used:.0%}  {size_text(pool['used_bytes'])} of {size_text(pool['bytes'])}  "
        f"{pool['path']}{'  verify: load' if pool['verify'] else ''}",
        f"blocks  {blocks['ready']} ready, {blocks['writing']} being written, {blocks['pinned']} pinned, {items['evicted']} evicted; "
        f"at most {limits['blocks']}",
        f"extents {pool['extents'] - pool['free_extents']} of {pool['extents']} in use, {size_text(pool['extent_bytes'])} each",
    ]
    lines += [
        f"        {size_text(line['slot_bytes'])} slots: {line['taken']} of {line['slots']} taken, in {line['extents']} extents"
        for line in pool["sizes"]
    ]
    asked = items["acquired"] + items["missed"]
    hits = f"{items['acquired'] / asked:.0%} of {asked} asked for" if asked else "nothing asked for yet"
    lines += [
        f"loads   {items['acquired']} acquired, {items['missed']} missed ({hits}), {items['discarded']} discarded as damaged",
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
