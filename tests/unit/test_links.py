"""The proxies of the chaos harness: what is cut does not arrive, in that direction alone, and arrives once it is healed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from wheelsched.cluster.frames import Hello, Kind, encode
from wheelsched.testing.links import Links, free_ports, run_links

HELLO = encode(Kind.HELLO, Hello("wheelsched", 1, 1, "c", b"", "n1", 1, 2, b"i", "1", b"n", 8, 1024, b"h", ()), 1)
# Longer than anything takes here, shorter than anybody waits.
NOTHING_S = 0.2


@asynccontextmanager
async def talk() -> AsyncIterator[tuple[Links, asyncio.StreamReader, asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Links, the ends of a connection at n1, which called, and at n2."""
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    port, target = free_ports(2)
    server = await asyncio.start_server(lambda reader, writer: accepted.put_nowait((reader, writer)), "127.0.0.1", target)
    try:
        async with asyncio.timeout(20), run_links({"n2": port}, {"n2": target}) as links:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HELLO)
            far_reader, far_writer = await accepted.get()
            assert await far_reader.readexactly(len(HELLO)) == HELLO
            yield links, reader, writer, far_reader, far_writer
            for end in (writer, far_writer):
                end.close()
    finally:
        server.close()


async def nothing_from(reader: asyncio.StreamReader) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(NOTHING_S):
            await reader.readexactly(1)


async def test_a_cut_holds_one_direction_up_until_it_is_healed() -> None:
    async with talk() as (links, reader, writer, far_reader, far_writer):
        links.cut([("n1", "n2")])
        writer.write(b"there")
        far_writer.write(b"back")
        assert await reader.readexactly(4) == b"back"
        await nothing_from(far_reader)
        links.heal()
        assert await far_reader.readexactly(5) == b"there"


async def test_an_end_of_a_connection_does_not_pass_a_cut_either() -> None:
    async with talk() as (links, reader, _writer, _far_reader, far_writer):
        links.cut([("n2", "n1")])
        far_writer.close()
        await nothing_from(reader)
        links.heal()
        assert await reader.read() == b""


async def test_a_slow_link_delays_what_passes() -> None:
    async with talk() as (links, _reader, writer, far_reader, _far_writer):
        links.slow([("n1", "n2")], 0.1)
        began = asyncio.get_running_loop().time()
        writer.write(b"x")
        await far_reader.readexactly(1)
        assert asyncio.get_running_loop().time() - began >= 0.1


async def test_a_call_across_a_cut_does_not_reach_the_other_side() -> None:
    async with talk() as (links, _reader, _writer, far_reader, _far_writer):
        links.cut([("n2", "n1")])  # a connection takes both directions
        reader, writer = await asyncio.open_connection("127.0.0.1", links.ports["n2"])
        writer.write(HELLO)
        await nothing_from(reader)
        await nothing_from(far_reader)
        writer.close()
