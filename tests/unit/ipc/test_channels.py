"""Links over real sockets: order, loss, sessions, back-pressure."""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from ipc import channels
from ipc.channels import AsyncDealer, AsyncRouter, BlockingDealer, LinkError, new_incarnation
from ipc.codec import Decoder, encode
from ipc.messages import Abort, Hello, ModelInfo, Outputs, ToClient, ToTokenizer, Welcome

WELCOME = Welcome(ModelInfo(("m",), 10, 20, 0, True))


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; it fails after ten seconds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


class Pair:
    """A router and what it heard."""

    def __init__(self, tmp_path: Path) -> None:
        self.endpoint = f"ipc://{tmp_path}/edge"
        self.heard: list[tuple[bytes, ToTokenizer]] = []
        self.lost: list[bytes] = []
        self.router: AsyncRouter[ToTokenizer] = AsyncRouter(
            self.endpoint,
            Decoder(ToTokenizer),
            new_incarnation(),
            lambda peer, message: self.heard.append((peer, message)),
            self.lost.append,
        )
        self.router.start()
        self.events: list[object] = []
        self.dealers: list[AsyncDealer[ToClient]] = []

    def dealer(self, identity: bytes) -> AsyncDealer[ToClient]:
        dealer: AsyncDealer[ToClient] = AsyncDealer(
            self.endpoint,
            Decoder(ToClient),
            identity,
            self.events.append,
            lambda: self.events.append("connected"),
            lambda: self.events.append("lost"),
        )
        dealer.start()
        self.dealers.append(dealer)
        return dealer

    def close(self) -> None:
        for dealer in self.dealers:
            dealer.close()
        self.router.close()


def run(tmp_path: Path, body: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        pair = Pair(tmp_path)
        try:
            await body(pair)
        finally:
            pair.close()

    asyncio.run(main())


def test_messages_arrive_whole_and_in_order(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        dealer = pair.dealer(b"a")
        await until(lambda: dealer.connected)
        sent = [Abort(number) for number in range(20_000)]
        for message in sent:
            while not dealer.send(message):
                await asyncio.sleep(0.001)
        await until(lambda: len(pair.heard) == len(sent))
        assert [message for _, message in pair.heard] == sent

    run(tmp_path, body)


def test_a_dealer_that_goes_is_reported_lost_though_nothing_is_sent_to_it(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        stays, goes = pair.dealer(b"stays"), pair.dealer(b"goes")
        await until(lambda: stays.connected and goes.connected)
        stays.send(Hello("x"))
        goes.send(Hello("y"))
        await until(lambda: len(pair.heard) == 2)
        goes.close()
        pair.dealers.remove(goes)
        await until(lambda: pair.lost == [b"goes"])
        assert pair.router.peers == (b"stays",)
        assert not pair.router.send(b"goes", WELCOME)
        assert pair.router.send(b"stays", WELCOME)
        await until(lambda: WELCOME in pair.events)

    run(tmp_path, body)


def test_a_router_that_goes_is_reported_lost_and_its_successor_is_found(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        dealer = pair.dealer(b"a")
        await until(lambda: dealer.connected)
        dealer.send(Hello("x"))
        await until(lambda: bool(pair.heard))
        pair.router.close()
        await until(lambda: pair.events == ["connected", "lost"])
        assert not dealer.send(Abort(1)), "what cannot be delivered is refused, not kept"
        heard: list[tuple[bytes, ToTokenizer]] = []
        pair.router = AsyncRouter(
            pair.endpoint,
            Decoder(ToTokenizer),
            new_incarnation(),
            lambda peer, message: heard.append((peer, message)),
            lambda peer: None,
        )
        pair.router.start()
        await until(lambda: dealer.connected)
        dealer.send(Hello("again"))
        await until(lambda: heard == [(b"a", Hello("again"))])

    run(tmp_path, body)


def test_a_peer_whose_numbers_have_a_gap_is_cut_off(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, b"bad")
        socket.connect(pair.endpoint)
        header = struct.Struct("<QQ")
        socket.send_multipart((header.pack(5, 0), encode(Abort(0))))
        await until(lambda: len(pair.heard) == 1)
        socket.send_multipart((header.pack(4, 0), encode(Abort(9))))  # an older session: dropped
        socket.send_multipart((header.pack(5, 1), encode(Abort(1))))
        await until(lambda: len(pair.heard) == 2)
        socket.send_multipart((header.pack(6, 0), encode(Abort(2))))  # a newer one: replaces it
        await until(lambda: len(pair.heard) == 3)
        assert pair.lost == [b"bad"]
        socket.send_multipart((header.pack(6, 2), encode(Abort(3))))
        await until(lambda: pair.lost == [b"bad", b"bad"])
        assert [message for _, message in pair.heard] == [Abort(0), Abort(1), Abort(2)]
        socket.close(0)

    run(tmp_path, body)


def test_garbage_cuts_off_its_sender_and_nobody_else(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        good = pair.dealer(b"good")
        await until(lambda: good.connected)
        good.send(Hello("x"))
        header = struct.pack("<QQ", 1, 0)
        deep = b"\x91" * 200_000 + b"\x01"  # an array in an array in an array ...
        hostile = (
            [b"x"],
            [b"short", b"x"],
            [header, b"\xc1"],
            [header, b"", b""],
            [header, b"\x93\xa5Abort\x01" + deep],
        )
        for number, frames in enumerate(hostile):
            socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.set(zmq.IDENTITY, b"bad%d" % number)
            socket.connect(pair.endpoint)
            socket.send_multipart(frames)
            await until(lambda count=number + 1: len(pair.lost) == count)
            socket.close(0)
        good.send(Abort(1))
        await until(lambda: (b"good", Abort(1)) in pair.heard)

    run(tmp_path, body)


def test_a_peer_that_does_not_read_is_buffered_up_to_a_bound_and_then_cut_off(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(channels, "_MAX_BACKLOG", 50)
    monkeypatch.setattr(channels, "_HWM", 10)

    async def body(pair: Pair) -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, b"sleeps")
        socket.set(zmq.RCVHWM, 1)
        socket.connect(pair.endpoint)
        socket.send_multipart((struct.pack("<QQ", 1, 0), encode(Hello("z"))))
        await until(lambda: len(pair.heard) == 1)
        large = Outputs(())
        for _ in range(100_000):
            if not pair.router.send(b"sleeps", large):
                break
        assert pair.lost == [b"sleeps"]
        socket.close(0)

    run(tmp_path, body)


def test_a_blocking_dealer_waits_and_times_out(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        dealer: BlockingDealer[ToClient] = BlockingDealer(pair.endpoint, b"rank0", Decoder(ToClient))
        await asyncio.to_thread(dealer.send, Hello("x"))
        await until(lambda: pair.heard == [(b"rank0", Hello("x"))])
        assert dealer.recv(0.01) is None
        pair.router.send(b"rank0", WELCOME)
        assert await asyncio.to_thread(dealer.recv, 5.0) == WELCOME
        dealer.close()

    run(tmp_path, body)


def test_a_gap_on_the_connecting_side_is_an_error(tmp_path: Path) -> None:
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/edge")
    dealer: BlockingDealer[ToClient] = BlockingDealer(f"ipc://{tmp_path}/edge", b"a", Decoder(ToClient))
    dealer.send(Hello("x"))
    router.recv_multipart()
    router.send_multipart((b"a", struct.pack("<QQ", 1, 0), encode(WELCOME)))
    router.send_multipart((b"a", struct.pack("<QQ", 1, 2), encode(WELCOME)))
    assert dealer.recv(5.0) == WELCOME
    with pytest.raises(LinkError, match="where 1 was due"):
        dealer.recv(5.0)
    dealer.close()
    router.close(0)
