"""Every row busy with requests as long as the context, in a pool that holds a few of them: does anything ever fail?"""

import asyncio
import random
import time
from argparse import Namespace

import aiohttp

from tools.drills.kv import kv_plan
from tools.drills.progress import Progress
from tools.drills.server import Reply, complete, http, server, work_done

_ABORTED = 0.05  # share of the requests whose client goes away


async def run(options: Namespace) -> None:
    """Print what became of the requests of `options.seconds`, and what was preempted and copied meanwhile."""
    pool = options.pool_contexts * options.context * kv_plan(options.model).kv_bytes_per_token
    flags = ("--max-seqs", str(options.rows), "--max-model-len", str(options.context), "--kv-memory", str(pool))
    async with server(options.model, *flags, "--kv-shortage", options.kv_shortage) as url, http() as session:
        end = time.monotonic() + options.seconds
        with Progress("soak", int(options.seconds)) as progress:
            clients = [asyncio.create_task(_client(session, url, options, end, seed)) for seed in range(options.rows)]
            while time.monotonic() < end:
                await asyncio.sleep(1.0)
                progress.step()
            replies = [reply for client in clients for reply in await client]
        work = await work_done(session, url)
    failed = [reply for reply in replies if not reply.finished]
    print(
        f"{options.rows} rows of up to {options.context} tokens in a pool of {options.pool_contexts} contexts, "
        f"{options.kv_shortage}, {options.seconds:g} s: {len(replies)} requests, {len(failed)} failed; {work}"
    )
    for reply in failed[:5]:
        print(f"  status {reply.status}: {reply.error}")


async def _client(session: aiohttp.ClientSession, url: str, options: Namespace, end: float, seed: int) -> list[Reply]:
    """One request after the other, each filling the context; those whose client went away are not in the list."""
    rng = random.Random(seed)
    replies: list[Reply] = []
    while time.monotonic() < end:
        prompt = [rng.randrange(100, 40000) for _ in range(rng.randrange(1, options.context))]
        request = asyncio.create_task(complete(session, url, prompt, options.context - len(prompt)))
        if rng.random() < _ABORTED:
            await asyncio.sleep(rng.uniform(0, 5))
            request.cancel()
            await asyncio.wait([request])
        else:
            replies.append(await request)
    return replies
