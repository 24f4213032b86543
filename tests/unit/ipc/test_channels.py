"""Links over real sockets: order, loss, sessions, back-pressure."""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from ipc import channels, sockets
from ipc.channels import AsyncDealer, AsyncRouter, BlockingDealer
from ipc.codec import Decoder, encode
from ipc.messages import Abort, Hello, ModelInfo, Outputs, ToClient, ToTokenizer, Welcome
from ipc.sessions import LinkError, new_incarnation
from ipc.stats_channel import StatsPublisher, StatsSubscriber
from ipc.stats_messages import EngineDetails, Stats

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
    monkeypatch.setattr(sockets, "_HWM", 10)

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


def test_a_peer_that_was_cut_off_is_told_and_begins_anew(tmp_path: Path) -> None:
    """Its connection stands, so nothing else would ever tell it, and it would wait for ever."""

    async def body(pair: Pair) -> None:
        dealer = pair.dealer(b"careless")
        await until(lambda: dealer.connected)
        dealer.send(Hello("x"))
        await until(lambda: len(pair.heard) == 1)
        dealer.send(Abort("no number"))  # type: ignore[arg-type]
        await until(lambda: pair.events == ["connected", "lost", "connected"])
        assert pair.lost == [b"careless"]
        dealer.send(Hello("again"))
        await until(lambda: len(pair.heard) == 2)
        assert pair.router.send(b"careless", WELCOME)
        await until(lambda: pair.events[-1] == WELCOME)
        assert pair.lost == [b"careless"]

    run(tmp_path, body)


def test_a_peer_that_did_not_read_is_told_of_its_end_once_it_reads(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(channels, "_MAX_BACKLOG", 50)
    monkeypatch.setattr(channels, "_TELL_SECONDS", 0.01)
    monkeypatch.setattr(sockets, "_HWM", 10)

    async def body(pair: Pair) -> None:
        socket = raw_dealer(pair, b"sleeps")
        socket.send_multipart((struct.pack("<QQ", 7, 0), encode(Hello("z"))))
        await until(lambda: len(pair.heard) == 1)
        while pair.router.send(b"sleeps", Outputs(())):
            pass
        assert pair.lost == [b"sleeps"]
        got: list[list[bytes]] = []

        def read() -> bool:
            while socket.poll(0):
                got.append(socket.recv_multipart())
            return bool(got) and len(got[-1]) == 1 and got[-1] != [b""]

        await until(read)
        assert got[-1] == [struct.pack("<Q", 7)]
        numbers = [struct.unpack("<QQ", frames[0])[1] for frames in got if len(frames) == 2]
        assert numbers == list(range(len(numbers)))  # what came before the end has no gap
        socket.close(0)

    run(tmp_path, body)


def test_the_end_of_a_session_that_is_over_ends_no_other(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        dealer = pair.dealer(b"a")
        await until(lambda: dealer.connected)
        dealer.send(Hello("x"))
        await until(lambda: len(pair.heard) == 1)
        session = pair.router.incarnation_of(b"a")
        pair.router._io.socket.send_multipart((b"a", struct.pack("<Q", session - 1)))
        assert pair.router.send(b"a", WELCOME)
        await until(lambda: len(pair.events) == 2)
        assert pair.events == ["connected", WELCOME]

    run(tmp_path, body)


@pytest.mark.parametrize(
    "frames",
    [
        [b"x"],
        [b"short", b"x"],
        [struct.pack("<QQ", new_incarnation() << 1, 0), b"x"],
        [struct.pack("<QQ", 1 << 62, 1), encode(WELCOME)],
        [struct.pack("<QQ", 1 << 62, 0), b"\xc1"],
        [struct.pack("<QQ", 1 << 62, 0), encode(Hello("of another edge"))],
        [struct.pack("<QQ", 1 << 62, 0), b"", b""],
    ],
    ids=["one frame", "short header", "incarnation", "gap", "garbage", "another type", "three frames"],
)
def test_what_cannot_be_read_is_told_and_the_peer_connects_again(
    tmp_path: Path, monkeypatch, frames: list[bytes]
) -> None:
    monkeypatch.setattr(channels, "_NEXT_HANDSHAKE_SECONDS", 0.01)

    async def main() -> None:
        router = zmq.Context.instance().socket(zmq.ROUTER)
        router.bind(f"ipc://{tmp_path}/edge")
        events: list[object] = []
        dealer: AsyncDealer[ToClient] = AsyncDealer(
            f"ipc://{tmp_path}/edge",
            Decoder(ToClient),
            b"a",
            events.append,
            lambda: events.append("connected"),
            lambda: events.append("lost"),
            on_unreadable=lambda reason: events.append("cannot be read" in reason),
        )
        dealer.start()
        await until(lambda: events == ["connected"])
        router.send_multipart([b"a", *frames])
        await until(lambda: len(events) == 4)
        assert events == ["connected", "lost", True, "connected"]
        dealer.close()
        router.close(0)

    asyncio.run(main())


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
    session = new_incarnation()
    router.send_multipart((b"a", struct.pack("<QQ", session, 0), encode(WELCOME)))
    router.send_multipart((b"a", struct.pack("<QQ", session, 2), encode(WELCOME)))
    assert dealer.recv(5.0) == WELCOME
    with pytest.raises(LinkError, match="where 1 was due"):
        dealer.recv(5.0)
    dealer.close()
    router.close(0)


def raw_dealer(pair: Pair, identity: bytes) -> "zmq.Socket[bytes]":
    """A peer that writes its own headers."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.IDENTITY, identity)
    socket.set(zmq.LINGER, 0)
    socket.connect(pair.endpoint)
    return socket


def test_late_messages_of_a_lost_session_are_dropped_and_do_not_keep_its_successor_out(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        header = struct.Struct("<QQ")
        old = raw_dealer(pair, b"rank0")
        for number in range(3):
            old.send_multipart((header.pack(100, number), encode(Abort(number))))
        await until(lambda: len(pair.heard) == 3)
        assert pair.router.incarnation_of(b"rank0") == 100
        old.close(0)
        await until(lambda: pair.lost == [b"rank0"])
        # Whatever it had sent may still come up after its loss has been noticed, from the middle of its numbers.
        new = raw_dealer(pair, b"rank0")
        new.send_multipart((header.pack(100, 3), encode(Abort(3))))
        new.send_multipart((header.pack(200, 0), encode(Hello("new"))))
        await until(lambda: len(pair.heard) == 4)
        assert pair.heard[3] == (b"rank0", Hello("new"))
        assert pair.lost == [b"rank0"]
        new.close(0)

    run(tmp_path, body)


def test_a_loss_is_reported_before_the_first_message_of_the_successor(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        order: list[object] = pair.lost
        pair.router._on_message = lambda peer, message: order.append(message)
        header = struct.Struct("<QQ")
        old = raw_dealer(pair, b"rank0")
        old.send_multipart((header.pack(100, 0), encode(Hello("old"))))
        await until(lambda: len(order) == 1)
        # The old connection still stands when the successor takes its name over.
        new = raw_dealer(pair, b"rank0")
        new.send_multipart((header.pack(200, 0), encode(Hello("new"))))
        await until(lambda: len(order) == 3)
        assert order == [Hello("old"), b"rank0", Hello("new")]
        old.close(0)
        new.close(0)

    run(tmp_path, body)


def test_a_peer_that_was_cut_off_is_heard_again_in_a_new_session_only(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        header = struct.Struct("<QQ")
        socket = raw_dealer(pair, b"tok0")
        socket.send_multipart((header.pack(100, 0), encode(Hello("x"))))
        socket.send_multipart((header.pack(100, 5), encode(Abort(5))))
        socket.send_multipart((header.pack(100, 6), encode(Abort(6))))
        socket.send_multipart((header.pack(101, 0), encode(Abort(7))))
        await until(lambda: len(pair.heard) == 2)
        assert [message for _, message in pair.heard] == [Hello("x"), Abort(7)]
        assert pair.lost == [b"tok0"]
        socket.close(0)

    run(tmp_path, body)


def test_what_was_meant_for_a_predecessor_is_not_taken(tmp_path: Path) -> None:
    """A router that has not yet noticed a loss may send the next plan to the rank that took the name over."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/edge")
    began = new_incarnation()
    dealer: BlockingDealer[ToClient] = BlockingDealer(f"ipc://{tmp_path}/edge", b"a", Decoder(ToClient), began)
    dealer.send(Hello("x"))
    router.recv_multipart()
    router.send_multipart((b"a", struct.pack("<QQ", began - 1, 7), encode(Outputs(()))))
    router.send_multipart((b"a", struct.pack("<QQ", began + 1, 0), encode(WELCOME)))
    assert dealer.recv(5.0) == WELCOME
    dealer.close()
    router.close(0)


def test_a_routers_session_is_later_than_its_peers_even_when_the_clock_was_set_back(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        future = new_incarnation() + 10**15
        dealer: BlockingDealer[ToClient] = BlockingDealer(pair.endpoint, b"rank0", Decoder(ToClient), future)
        await asyncio.to_thread(dealer.send, Hello("x"))
        await until(lambda: bool(pair.heard))
        assert pair.router.send(b"rank0", WELCOME)
        assert await asyncio.to_thread(dealer.recv, 5.0) == WELCOME
        dealer.close()

    run(tmp_path, body)


def test_a_strict_router_does_not_go_on_without_a_peer_it_cannot_trust(tmp_path: Path) -> None:
    async def main() -> None:
        failed: list[BaseException | None] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context.get("exception")))
        router: AsyncRouter[ToTokenizer] = AsyncRouter(
            f"ipc://{tmp_path}/edge",
            Decoder(ToTokenizer),
            1,
            lambda peer, message: None,
            lambda peer: None,
            strict=True,
        )
        router.start()
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, b"rank0")
        socket.connect(f"ipc://{tmp_path}/edge")
        socket.send_multipart((struct.pack("<QQ", 5, 1), encode(Abort(0))))
        await until(lambda: bool(failed))
        assert isinstance(failed[0], LinkError)
        assert "rank0" in str(failed[0])
        socket.close(0)
        router.close()

    asyncio.run(main())


def test_a_stats_subscriber_hears_of_the_loss_after_the_last_counters_and_finds_the_successor(tmp_path: Path) -> None:
    def counters(step: int) -> Stats:
        required = Stats.__struct_fields__[: -len(Stats.__struct_defaults__)]
        return Stats(**(dict.fromkeys(required, 0) | {"step": step}))

    async def main() -> None:
        events: list[object] = []
        subscriber = StatsSubscriber(
            f"ipc://{tmp_path}/stats", lambda stats: events.append(stats.step), lambda: events.append("lost")
        )
        subscriber.start()
        for first in (1, 100):
            publisher = StatsPublisher(f"ipc://{tmp_path}/stats")
            step = first
            async with asyncio.timeout(10):
                while not any(isinstance(event, int) and event >= first for event in events):
                    publisher.send(counters(step))
                    step += 1
                    await asyncio.sleep(0.01)
            publisher.send(counters(step))
            await asyncio.sleep(0)
            publisher.close()
            await until(lambda count=1 + (first == 100): events.count("lost") == count)
            assert events[-1] == "lost"
        subscriber.close()

    asyncio.run(main())


def test_a_stats_publisher_knows_whether_anybody_asks_for_details(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/stats"

    async def main() -> None:
        publisher = StatsPublisher(endpoint)
        got: list[list[EngineDetails]] = [[], []]
        subscribers = [StatsSubscriber(endpoint, lambda stats: None, lambda: None, each.append) for each in got]
        for subscriber in subscribers:
            subscriber.start()
        await asyncio.sleep(0.05)
        assert not publisher.watched
        for subscriber in subscribers:
            subscriber.ask_for_details(True)
        await until(lambda: publisher.watched)

        def send() -> bool:
            publisher.send_details(EngineDetails(7.0, (), (), 0))
            return bool(got[0] and got[1])

        await until(send)
        assert got[0][0] == got[1][0] == EngineDetails(7.0, (), (), 0)
        subscribers[0].ask_for_details(False)
        await asyncio.sleep(0.05)
        assert publisher.watched, "the other one still looks"
        subscribers[1].close()  # gone without a word
        await until(lambda: not publisher.watched)
        subscribers[0].close()
        publisher.close()

    asyncio.run(main())


class SlowToNotice:
    """A ROUTER that takes the first probes of a peer that is already gone, as a busy one does (see `_probe`)."""

    def __init__(self, socket: "zmq.Socket[bytes]", probes: int) -> None:
        self._socket = socket
        self.probes = probes

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)

    def send_multipart(self, frames: tuple[bytes, ...], flags: int) -> None:
        if self.probes and len(frames) == 2:
            self.probes -= 1
        else:
            self._socket.send_multipart(frames, flags)


@pytest.mark.parametrize("probes", [1, 3])
def test_a_loss_is_reported_even_when_the_socket_notices_it_later_than_its_monitor(tmp_path: Path, probes: int) -> None:
    async def body(pair: Pair) -> None:
        dealer = pair.dealer(b"rank0")
        await until(lambda: dealer.connected)
        dealer.send(Hello("x"))
        await until(lambda: bool(pair.heard))
        slow = SlowToNotice(pair.router._io.socket, probes)
        pair.router._io.socket = slow
        dealer.close()
        pair.dealers.remove(dealer)
        await until(lambda: pair.lost == [b"rank0"])
        assert slow.probes == 0

    run(tmp_path, body)
