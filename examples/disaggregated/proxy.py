"""Prefill and decode apart: proxy.py --port PORT --prefill URL --decode URL

An OpenAI-compatible proxy before two vLLM servers of one host that share one HostKV sidecar. A completion goes to the prefill server
first, for a single token: that server computes the prompt's KV, and has saved it when it answers. Then the same request goes to the
decode server, which loads the prompt's whole blocks from the sidecar, computes what is left of it, and writes the answer. The proxy
hands nothing from one to the other: both name a block by the tokens before it.

So nothing can go wrong but speed. Where the prefill server is away, slow, or answers an error, the decode server computes the prompt
itself, and the log says why; its errors are the answer. All other paths (/v1/models, /metrics, ...) are the decode server's.

It needs aiohttp, which vLLM brings.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

log = logging.getLogger("proxy")

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
CONNECT_S = 5
PREFILL_S = 120  # longer than any prompt takes; then the decode server goes on alone
BODY_BYTES = 64 << 20
# What belongs to one connection, not to the message.
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "trailer", "upgrade", "expect"}


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP_BY_HOP)


def for_prefill(body: bytes) -> bytes | None:
    """The same request for one token, not streamed; None for what is no request at all (the decode server will say so)."""
    try:
        request = json.loads(body)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    request.update(stream=False, max_tokens=1, n=1)
    if "max_completion_tokens" in request:
        request["max_completion_tokens"] = 1
    for unneeded in ("stream_options", "min_tokens"):
        request.pop(unneeded, None)
    return json.dumps(request).encode()


class Proxy:
    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill_url = prefill.rstrip("/")
        self._decode_url = decode.rstrip("/")
        self._http: aiohttp.ClientSession

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES)
        app.cleanup_ctx.append(self._session)
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app

    async def _session(self, _: web.Application) -> AsyncIterator[None]:
        # Only connecting has a bound: an answer takes as long as the model writes. Each request has a connection of its own, because one
        # that was kept may be closed by the server in the moment in which it is used again.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as self._http:
            yield

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method == "POST" and request.path in COMPLETIONS:
            await self._prefill(request, body)
        return await self._decode(request, body)

    async def _prefill(self, request: web.Request, body: bytes) -> None:
        """Has the prompt computed and saved. Whatever goes wrong, the request goes on."""
        prefill = for_prefill(body)
        if prefill is None:
            return
        started = time.monotonic()
        try:
            timeout = aiohttp.ClientTimeout(total=PREFILL_S, sock_connect=CONNECT_S)
            headers = end_to_end(request.headers)
            async with self._http.post(self._prefill_url + request.path_qs, data=prefill, headers=headers, timeout=timeout) as reply:
                text = await reply.read()
                if reply.status == 200:
                    log.info("prefill took %.2f s", time.monotonic() - started)
                    return
                reason = f"answered {reply.status}: {text[:300].decode(errors='replace')}"
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            reason = str(error) or type(error).__name__
        log.warning("the prefill server %s is left out, decode computes this prompt: %s", self._prefill_url, reason)

    async def _decode(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """The decode server's answer, piece by piece as it comes."""
        url, answer = self._decode_url + request.path_qs, None
        try:
            async with self._http.request(request.method, url, data=body, headers=end_to_end(request.headers)) as reply:
                answer = web.StreamResponse(status=reply.status, headers=end_to_end(reply.headers))
                await answer.prepare(request)
                async for piece in reply.content.iter_any():
                    await answer.write(piece)
                await answer.write_eof()
                return answer
        except aiohttp.ClientError as error:
            if request.transport is None or request.transport.is_closing():
                raise  # it is the client that went away
            reason = f"the decode server {self._decode_url} does not answer: {str(error) or type(error).__name__}"
        log.error("%s", reason)
        failure = json.dumps({"error": {"message": reason, "type": "bad_gateway", "param": None, "code": 502}})
        if answer is None:
            return web.Response(status=502, text=failure, content_type="application/json")
        if answer.content_type == "text/event-stream":
            await answer.write(f"data: {failure}\n\n".encode())  # as vLLM tells of an error within a stream
            await answer.write_eof()
        else:
            request.transport.abort()  # half an answer must not look whole
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", metavar="URL", required=True, help="the server with kv_role kv_producer")
    parser.add_argument("--decode", metavar="URL", required=True, help="the server with kv_role kv_consumer")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    app = Proxy(options.prefill, options.decode).app()
    # A client that goes away cancels its request here, and with that at the server that works on it.
    web.run_app(
        app, host=options.host, port=options.port, handler_cancellation=True, print=lambda line: log.info("%s", line.split("\n")[0])
    )


if __name__ == "__main__":
    main()
