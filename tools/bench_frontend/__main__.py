"""What one frontend process carries: streamed tokens, short requests, and the delay that it adds."""

import argparse
import asyncio
import os
import socket
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil

from config.schema import ServerConfig
from ipc.control import Drain
from launch.process import Process
from tools.arguments import count, positive, tool_parser

from .client import Counted
from .engine import MODEL
from .specification import frontend_spec

_EPILOG = """\
Three processes: the real frontend, an engine that answers at a given pace without a model (one message a step for all
streams, as the real tokenizer process sends them), and a client that reads plain sockets and counts.

streams    --streams connections get --rate tokens a second together, and ask again when an answer has ended.
           tokens/s is what arrived (in fewer events, where tokens of a stream came faster than they could be sent: they
           then share one); of one core is what this would be if the frontend had a whole core, from the CPU
           time that it took; added latency is from the engine's sending of a token to the client's reading of it.
requests   --connections ask for one token without streaming, again and again: as fast as it goes.

On a machine with two cores the three processes share them, so that what arrives is less than what one core carries.
All streams get their tokens at one moment, so the last of them waits until all others have been served: of 256 streams
that is some milliseconds.

  python -m tools.bench_frontend                                   both parts, about 20 seconds
  python -m tools.bench_frontend --rate 30000 --streams 512        more than the target
  python -m tools.bench_frontend --only requests --profile         where the frontend's time goes
"""
_PARTS = ("streams", "requests")
_STREAM_TOKENS = 200  # of one answer
_READY_SECONDS = 30.0
_CLIENT_BEGINS_SECONDS = 1.5  # its start and its warm-up


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = tool_parser("bench_frontend", __doc__, _EPILOG)
    parser.add_argument("--only", choices=_PARTS, help="one part (default: both)")
    parser.add_argument("--seconds", type=positive, default=8.0, help="measured time of each part (default: 8)")
    parser.add_argument("--streams", type=count, default=256, help="streams at once (default: 256)")
    parser.add_argument("--rate", type=positive, default=20000.0, help="tokens/s of all streams (default: 20000)")
    parser.add_argument("--connections", type=count, default=32, help="clients of the second part (default: 32)")
    parser.add_argument("--profile", action="store_true", help="run the frontend under cProfile, which slows it down")
    return parser.parse_args(arguments)


async def measure(part: str, options: argparse.Namespace) -> tuple[Counted, float, float]:
    """What the client counted, and how much of a core the frontend took meanwhile: in all, and in the kernel."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        clients, stats = (f"ipc://{folder}/{name}" for name in ("clients-0", "stats"))
        spec = frontend_spec(MODEL, clients, stats, folder, listener.fileno(), ServerConfig())
        changed = asyncio.Event()
        frontend = Process(spec, lambda process: changed.set())
        file = Path(folder) / "frontend.json"
        file.write_bytes(msgspec.json.encode(spec))
        step = options.streams / options.rate
        engine = await _start("engine", clients, str(step))
        await frontend.spawn("tools.bench_frontend.profiled" if options.profile else "frontend.main", file)
        try:
            async with asyncio.timeout(_READY_SECONDS):
                while not frontend.ready:
                    if not frontend.alive:
                        raise SystemExit(frontend.ending())
                    await changed.wait()
                    changed.clear()
            connections, tokens = (options.streams, _STREAM_TOKENS) if part == "streams" else (options.connections, 1)
            port = str(listener.getsockname()[1])
            client = await _start("client", port, str(connections), str(tokens), str(options.seconds))
            cpu = asyncio.create_task(_cpu_seconds(psutil.Process(frontend.pid), options.seconds))
            output, _ = await client.communicate()
            if client.returncode:
                raise SystemExit("the client failed")
            return msgspec.json.decode(output, type=Counted), *await cpu
        finally:
            frontend.order(Drain())
            while frontend.alive:
                await changed.wait()
                changed.clear()
            assert engine.stdin is not None
            engine.stdin.close()
            await engine.wait()


async def _start(module: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"tools.bench_frontend.{module}",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def _cpu_seconds(process: psutil.Process, seconds: float) -> tuple[float, float]:
    """CPU seconds per second of the process, after the client's warm-up; of that, in the kernel."""
    await asyncio.sleep(_CLIENT_BEGINS_SECONDS)
    wait = 0.8 * seconds
    before = process.cpu_times()
    await asyncio.sleep(wait)
    after = process.cpu_times()
    user, system = after.user - before.user, after.system - before.system
    return (user + system) / wait, system / wait


def percentile(values: list[int], share: float) -> float:
    """The value below which this share of all lies; nan of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def report(part: str, counted: Counted, cpu: float, kernel: float) -> str:
    """One line of numbers with their names."""
    amount, unit = (counted.tokens, "tokens/s") if part == "streams" else (counted.requests, "requests/s")
    rate = amount / counted.seconds
    events = f" in {counted.events / counted.seconds:.0f} events/s" if part == "streams" else ""
    values = counted.latencies_us if part == "streams" else counted.request_us
    what = "added latency" if part == "streams" else "request"
    times = ", ".join(f"p{share * 100:g} {percentile(values, share) / 1e3:.2f} ms" for share in (0.5, 0.99))
    return (
        f"{part:9} {rate:8.0f} {unit}{events}, of one core {rate / max(cpu, 0.001):8.0f}; "
        f"frontend {cpu:4.0%} of a core ({kernel:.0%} in the kernel); {what}: {times}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when everything was measured."""
    options = parse(arguments)
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    for part in _PARTS if options.only is None else (options.only,):
        print(report(part, *asyncio.run(measure(part, options))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
