"""The report of `tools.check_gpu`: Markdown, with a summary of all sections at its top."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.check_gpu.targets import Verdict

_WIDEST_CELL = 300


@dataclass(slots=True)
class Section:
    """What one part found. `summary`: in a line; `failures`: what is wrong, each in words."""

    title: str
    summary: str
    text: str = ""
    failures: Sequence[str] = ()
    verdicts: Sequence[Verdict] = field(default=())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """All columns but the first are aligned right; empty without rows."""
    if not rows:
        return ""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:_WIDEST_CELL]


def report(heading: str, sections: Sequence[Section]) -> str:
    """The whole file: heading, summary, failures, targets, then the sections."""
    parts = [f"# {heading}\n"]
    parts.append("\n".join(f"- {section.title}: {section.summary}" for section in sections) + "\n")
    failures = [f"- {section.title}: {text}" for section in sections for text in section.failures]
    if failures:
        parts.append("**Wrong**\n\n" + "\n".join(failures) + "\n")
    verdicts = [verdict for section in sections for verdict in section.verdicts]
    if verdicts:
        parts.append("## Targets\n")
        header = ["target", "reached in", "worst", "where"]
        parts.append(markdown_table(header, [verdict.row for verdict in verdicts]))
    for section in sections:
        if section.text:
            parts.append(f"## {section.title}\n\n{section.text.rstrip()}\n")
    return "\n".join(parts)
