"""Draws the diagram of states in architecture.md from the table of legal moves: `python docs/draw_states.py`."""

from __future__ import annotations

from pathlib import Path

from wheelsched.model.states import FINAL, MOVES, Status

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- states:begin -->", "<!-- states:end -->"


def drawn_states() -> str:
    """The diagram in Mermaid's notation, causes of one arrow together."""
    causes: dict[tuple[Status, Status], list[str]] = {}
    for before, cause, after in MOVES:
        causes.setdefault((before, after), []).append(cause)
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> SCHEDULED: create", "    [*] --> QUEUED: create, due at once"]
    lines += [f"    {before.name} --> {after.name}: {', '.join(names)}" for (before, after), names in causes.items()]
    lines += [f"    {status.name} --> [*]" for status in Status if status in FINAL]
    return "\n".join([*lines, "```"])


def with_diagram(page: str) -> str:
    """The page with the diagram between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{drawn_states()}\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(with_diagram(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
