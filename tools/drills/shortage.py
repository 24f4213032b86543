"""More long requests than the KV pool holds, under each answer to the shortage: do all finish, with which tokens?"""

import asyncio
import random
import time
from argparse import Namespace

from tools.drills.kv import kv_plan
from tools.drills.server import complete, http, server, work_done


async def run(options: Namespace) -> None:
    """Print the time and the work of each setting, and whether every request got the tokens it has alone."""
    rng = random.Random(3)
    prompts = [[rng.randrange(100, 40000) for _ in range(options.prompt_tokens)] for _ in range(options.requests)]
    length = options.prompt_tokens + options.output_tokens
    plan = kv_plan(options.model)
    blocks = -(-length // plan.block_size) * options.fitting
    print(
        f"{options.requests} requests of {options.prompt_tokens} + {options.output_tokens} tokens, a pool of {blocks} "
        f"blocks of {plan.block_size}: {options.fitting} of them fit"
    )
    async with server(options.model) as url, http() as session:
        alone = [(await complete(session, url, prompt, options.output_tokens)).token_ids for prompt in prompts]
    sizes = ("--kv-memory", str(blocks * plan.block_bytes), "--max-model-len", str(length))
    for shortage in ("wait", "recompute", "swap"):
        flags = ("--max-seqs", str(options.requests), "--kv-shortage", shortage, *sizes)
        async with server(options.model, *flags) as url, http() as session:
            begin = time.perf_counter()
            replies = await asyncio.gather(
                *[complete(session, url, prompt, options.output_tokens) for prompt in prompts]
            )
            seconds = time.perf_counter() - begin
            work = await work_done(session, url)
        finished = sum(reply.finished for reply in replies)
        same = sum(reply.token_ids == tokens for reply, tokens in zip(replies, alone, strict=True))
        print(
            f"{shortage:10} {seconds:6.1f} s, {finished} finished, {same} with the tokens they have alone; {work}",
            flush=True,
        )
