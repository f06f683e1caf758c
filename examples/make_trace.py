"""Writes a trace of made-up conversations for `hostkv simulate`: make_trace.py [REQUESTS [SEED]] > trace.jsonl

Some users ask one question, some go on for many turns; each turn sends everything said before. A few prompts of a thousand to eight
thousand tokens are shared by many. One JSON object a line: timestamp (ms), input_length and output_length (tokens), hash_ids (one per
512 tokens of the prompt, the last of which may be partial; equal ids mean equal prefixes). The same arguments write the same trace.
"""

from __future__ import annotations

import heapq
import json
import random
import sys

BLOCK_TOKENS = 512


class Talk:
    def __init__(self, rng: random.Random, prompts: int) -> None:
        self.prompt = min(int(rng.paretovariate(1.0)), prompts) - 1  # the first ones are the most popular
        self.tokens = 1024 * (1 + self.prompt % 8)  # of which the shared prompt is the beginning
        self.shared = self.tokens
        self.turns = min(int(rng.paretovariate(1.1)), 30)


def trace(requests: int, seed: int) -> list[dict[str, object]]:
    rng = random.Random(seed)
    numbers: dict[object, int] = {}
    waiting: list[tuple[float, int, Talk]] = []  # when the next turn comes, of whom
    lines: list[dict[str, object]] = []
    now_ms = 0.0
    for who in range(requests):
        now_ms += rng.expovariate(1 / 400)
        waiting.append((now_ms, who, Talk(rng, 12)))  # in order: a heap
    while len(lines) < requests:
        at_ms, who, talk = heapq.heappop(waiting)
        talk.tokens += int(rng.lognormvariate(6, 1)) + 1
        answer_tokens = int(rng.lognormvariate(5.5, 0.7)) + 1
        ids = []
        for end in range(BLOCK_TOKENS, talk.tokens + BLOCK_TOKENS, BLOCK_TOKENS):
            # What a block is: shared by all who have the prompt, or this talk's own; a partial one differs from the whole one.
            block: object = (talk.prompt, end) if end <= talk.shared else (talk.prompt, who, min(end, talk.tokens))
            ids.append(numbers.setdefault(block, len(numbers)))
        lines.append({"timestamp": int(at_ms), "input_length": talk.tokens, "output_length": answer_tokens, "hash_ids": ids})
        talk.tokens += answer_tokens
        talk.turns -= 1
        if talk.turns:
            heapq.heappush(waiting, (at_ms + 1000 * rng.lognormvariate(4, 1), who, talk))
    return lines


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    for line in trace(*(arguments + [1000, 1][len(arguments) :])):
        print(json.dumps(line))
