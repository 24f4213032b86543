"""Requests with a grammar: the scheduler hears of them once it is compiled, and of no others."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from ipc.codec import unpack_ints
from ipc.messages import Abort, Grammar
from tests.unit.tokenizer_proc.test_service import EOS, PEER, VOCABULARY, Bench
from tokenizer_proc.grammars import GrammarCompiler

GRAMMAR = Grammar("regex", "a+")


def run(path: Path, test: Callable[[Bench], Awaitable[None]], timeout: float = 20.0) -> None:
    async def main() -> None:
        compiler = GrammarCompiler(VOCABULARY, VOCABULARY.size, (EOS,), path / "tokens", timeout)
        try:
            await test(Bench(grammars=compiler))
        finally:
            await compiler.close()

    asyncio.run(main())


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not done():
            await asyncio.sleep(0.01)


def test_it_is_compiled_first_and_at_once_the_next_time(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.generate(1, grammar=GRAMMAR, n=2, ignore_eos=True)
        assert bench.submits == []
        await until(lambda: len(bench.submits) == 2)
        bench.generate(2, grammar=GRAMMAR)
        assert len(bench.submits) == 3
        assert {submit.sampling.grammar for submit in bench.submits} == {bench.submits[0].sampling.grammar}
        assert "/a+/" in bench.submits[0].sampling.grammar
        # End-of-sequence stays the end of a whole output.
        assert [list(unpack_ints(submit.stop_token_ids)) for submit in bench.submits] == [[EOS]] * 3
        bench.generate(3)
        assert bench.submits[3].sampling.grammar == ""

    run(tmp_path, test)


def test_a_bad_grammar_fails_its_request_by_name(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.generate(grammar=Grammar("regex", "("))
        await until(lambda: bool(bench.sent))
        failed = bench.failure()
        assert (failed.status, failed.param) == (400, "grammar")
        assert "unclosed group" in failed.message
        assert bench.asked == []
        assert bench.service.live_requests == 0

    run(tmp_path, test)


def test_one_that_takes_too_long_fails_and_the_next_is_served(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.generate(1, grammar=GRAMMAR)
        await until(lambda: bool(bench.sent))
        assert "took longer than" in bench.failure().message
        bench.generate(2)
        assert len(bench.submits) == 1

    run(tmp_path, test, timeout=1e-5)


def test_an_abort_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.generate(1, grammar=GRAMMAR)
        await asyncio.sleep(0)
        bench.service.from_client(PEER, Abort(1))
        assert bench.service.live_requests == 0
        bench.generate(2, grammar=Grammar("regex", "b"))
        await until(lambda: bool(bench.submits))
        assert "/b/" in bench.submits[0].sampling.grammar
        assert bench.sent == []

    run(tmp_path, test)


def test_where_nothing_compiles_grammars_they_are_refused() -> None:
    bench = Bench()
    bench.generate(grammar=GRAMMAR)
    assert bench.failure().param == "grammar"
