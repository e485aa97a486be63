"""The lean HTTP client, against a server that does what each test says."""

import asyncio
from contextlib import suppress

import pytest

from saga_gateway.wire import BrokenAnswerError, ClosedError, NotHTTPError, Pool

HEAD = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


class Server:
    """Answers the requests of a connection in turn with ``answers``: bytes, or a coroutine that
    gets the reader and the writer. After the last it closes the connection."""

    def __init__(self):
        self.answers = []
        self.connections = 0
        self.lost = asyncio.Event()

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self):
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):  # The client has gone.
                while self.answers:
                    await reader.readuntil(b"\r\n\r\n")
                    answer = self.answers.pop(0)
                    if isinstance(answer, bytes):
                        writer.write(answer)
                    else:
                        await answer(reader, writer)
        finally:
            writer.close()
            self.lost.set()


@pytest.fixture
async def server():
    server = Server()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def pool():
    pool = Pool(idle_s=4.0, connect_s=5.0)
    yield pool
    pool.close()


async def ask(pool, server, limit_s=5.0, body=b""):
    connection = await pool.get(server.url)
    return await connection.request(HEAD, body, limit_s)


async def whole(response):
    pieces = []
    while not response.connection.is_read:
        pieces.append(await response.connection.read())
    return b"".join(pieces)


def answer(body=b"hello", status=200, **headers):
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_a_connection_serves_one_request_after_the_other(pool, server):
    server.answers = [answer(b"one", x_a="1"), answer(b"two", status=404), answer(b"three")]
    seen = []
    for _ in range(3):
        response = await ask(pool, server)
        seen.append((response.status, await whole(response), response.connection.reused))
        pool.put(server.url, response.connection)
    assert seen == [(200, b"one", False), (404, b"two", True), (200, b"three", True)]
    assert server.connections == 1


async def test_headers_come_as_they_were_sent(pool, server):
    server.answers = [answer(X_Mixed="a", Set_Cookie="b")]
    response = await ask(pool, server)
    assert response.raw_headers == [
        (b"Content-Length", b"5"),
        (b"X-Mixed", b"a"),
        (b"Set-Cookie", b"b"),
    ]
    assert (response.header(b"x-mixed"), response.header(b"none")) == ("a", None)


@pytest.mark.parametrize(
    ("last", "is_kept"),
    [
        (answer(), True),
        (answer(Connection="close"), False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", False),
        (b"HTTP/1.1 204 No\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", True),
        (answer() + b"more than was said", False),
        (answer() + answer(b"SECOND", status=404, X_Other="1"), False),
        (answer() + b"HTTP/1.1 404 X\r\nConte", False),
    ],
)
async def test_only_a_clean_connection_is_kept(pool, server, last, is_kept):
    server.answers = [last, answer()]
    response = await ask(pool, server)
    assert response.status in (200, 204)
    assert response.header(b"x-other") is None
    assert await whole(response) == (b"" if response.status == 204 else b"hello")
    pool.put(server.url, response.connection)
    assert (await pool.get(server.url) is response.connection) is is_kept


async def test_an_answer_without_a_length_ends_with_its_connection(pool, server):
    server.answers = [b"HTTP/1.1 200 OK\r\n\r\nall there is"]
    response = await ask(pool, server)
    assert await whole(response) == b"all there is"
    pool.put(server.url, response.connection)
    assert not response.connection.is_open


async def test_heads_that_come_first_are_passed_over(pool, server):
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    server.answers = [b"HTTP/1.1 100 Continue\r\n\r\n" + hints + answer(b"real")]
    response = await ask(pool, server)
    assert (response.status, await whole(response)) == (200, b"real")
    assert response.header(b"link") is None


@pytest.mark.parametrize(
    "nonsense",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**20,
        b"HTTP/1.1 099 X\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 700 X\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused(pool, server, nonsense):
    server.answers = [nonsense]
    with pytest.raises(NotHTTPError):
        await ask(pool, server)


async def test_a_close_before_an_answer_says_whether_the_connection_was_stale(pool, server):
    async def close(_reader, writer):
        writer.transport.abort()

    server.answers = [answer(), close]
    response = await ask(pool, server)
    await whole(response)
    pool.put(server.url, response.connection)
    for is_stale in (True, False):
        server.answers = server.answers or [close]
        with pytest.raises(ClosedError) as caught:
            await ask(pool, server)
        assert caught.value.is_stale is is_stale


async def test_one_that_dies_at_work_was_not_stale(pool, server, monkeypatch):
    async def work(_reader, writer):
        await asyncio.sleep(0.2)
        writer.transport.abort()

    monkeypatch.setattr("saga_gateway.wire._STALE_S", 0.1)
    server.answers = [answer(), work]
    response = await ask(pool, server)
    await whole(response)
    pool.put(server.url, response.connection)
    with pytest.raises(ClosedError) as caught:
        await ask(pool, server)
    assert caught.value.is_stale is False


async def test_trailers_are_no_headers(pool, server):
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    server.answers = [chunked + b"5\r\nhello\r\n0\r\nSet-Cookie: x\r\n\r\n"]
    response = await ask(pool, server)
    assert await whole(response) == b"hello"
    assert response.header(b"set-cookie") is None


async def test_a_connection_with_an_upload_under_way_is_not_kept(pool, server):
    async def refuse(reader, writer):
        writer.write(answer(status=401))
        await reader.read()

    server.answers = [refuse]
    response = await ask(pool, server, body=b"y" * 2**25)
    await whole(response)
    pool.put(server.url, response.connection)
    assert not response.connection.is_open


@pytest.mark.parametrize(
    "cut",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nsome",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nsome\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nsome\r\nnonsense\r\n",
    ],
)
async def test_what_came_before_a_break_is_read_before_the_error(pool, server, cut):
    server.answers = [cut]
    response = await ask(pool, server)
    await server.lost.wait()
    await asyncio.sleep(0)  # Let the loop see the end.
    assert await response.connection.read() == b"some"
    with pytest.raises(BrokenAnswerError):
        await response.connection.read()


async def test_a_slow_reader_holds_the_worker_up_and_loses_nothing(pool, server):
    total, sent = 64 * 2**20, 0

    async def much(_reader, writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(b"x" * 2**20)
            sent += 2**20
            await writer.drain()

    server.answers = [much]
    response = await ask(pool, server)
    before = -1
    while sent != before:  # Until the server can send no more.
        before = sent
        await asyncio.sleep(0.05)
    assert sent < total
    assert len(await whole(response)) == total


async def test_silence_has_a_limit_before_and_in_an_answer(pool, server):
    async def wait(reader, _writer):
        await reader.read()

    server.answers = [wait]
    with pytest.raises(TimeoutError):
        await ask(pool, server, limit_s=0.05)
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nsome", wait]
    response = await ask(pool, server, limit_s=0.1)
    assert await response.connection.read() == b"some"
    await asyncio.sleep(0.2)  # Nobody waits: the reader is slow, not the worker.
    with pytest.raises(TimeoutError):
        await response.connection.read()


async def test_a_request_that_is_given_up_closes_its_connection(pool, server):
    begun = asyncio.Event()

    async def wait(reader, _writer):
        begun.set()
        await reader.read()

    server.answers = [wait]
    task = asyncio.create_task(ask(pool, server))
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(server.lost.wait(), 5)


async def test_an_answer_that_is_not_read_to_its_end_closes_its_connection(pool, server):
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nsome", answer()]
    response = await ask(pool, server)
    pool.put(server.url, response.connection)
    assert not response.connection.is_open


async def test_connections_that_have_waited_too_long_are_closed(server):
    pool = Pool(idle_s=0.05, connect_s=5.0)
    server.answers = [answer() for _ in range(4)]
    responses = [await ask(pool, server) for _ in range(2)]
    for response in responses:
        await whole(response)
        pool.put(server.url, response.connection)
    async with asyncio.timeout(5):
        while any(response.connection.is_open for response in responses):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert pool._waiting == {}


async def test_a_host_that_is_no_name_is_no_crash(pool):
    with pytest.raises((OSError, UnicodeError)):
        await pool.get("http://a..b:80")
