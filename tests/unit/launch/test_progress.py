"""What is shown while the engine starts."""

import io
import re

from launch.progress import StartDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO) -> str:
    display = StartDisplay(stream)
    display.stage("worker 0", "loading weights", 0.1)
    display.stage("worker 0", "loading weights", 0.6)
    display.stage("tokenizer 0", "loading the vocabulary")
    display.stage("worker 0", "ready")
    display.note("try: curl")
    return stream.getvalue()


def test_elsewhere_every_stage_is_one_line_with_its_time() -> None:
    lines = show(io.StringIO()).splitlines()
    assert [re.sub(r"^\[ *\d+\.\d\d s\] ", "", line) for line in lines] == [
        "worker 0: loading weights",
        "tokenizer 0: loading the vocabulary",
        "worker 0: ready",
        "try: curl",
    ]
    assert all(line.startswith("[") for line in lines[:-1])


def test_on_a_terminal_one_line_is_written_over_until_a_process_is_ready() -> None:
    text = show(Terminal())
    *kept, last = text.rstrip("\n").split("\n")
    assert last == "try: curl"
    assert len(kept) == 1
    frames = kept[0].split("\r\x1b[K")[1:]
    assert "worker 0: loading weights 60%" in frames[1]
    assert "tokenizer 0: loading the vocabulary | worker 0: loading weights" in frames[2]
    assert frames[-1].endswith("worker 0: ready")
