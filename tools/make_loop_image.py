"""Draw docs/images/loop.svg, the picture of the training loop.

    python tools/make_loop_image.py                 write the picture
    python tools/make_loop_image.py --output FILE   write it somewhere else

A test compares the file with what this makes. Colors work on light and dark pages.
"""

from __future__ import annotations

import argparse
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "loop.svg"
WIDTH, HEIGHT, BOX = 860, 250, (170, 74)
# Name, what it does, x, y.
BOXES = [
    ("Data source", "prompts, buffer", 20, 30),
    ("SGLang engines", "generate groups", 240, 30),
    ("Your functions", "reward, tools, filter", 460, 30),
    ("Megatron trainer", "advantages, loss, step", 460, 150),
    ("Weight sync", "memory, NCCL or files", 240, 150),
]
# Start, end, label, position of the label.
ARROWS = [
    ((190, 67), (240, 67), "", (0, 0)),
    ((410, 67), (460, 67), "", (0, 0)),
    ((545, 104), (545, 150), "samples", (552, 131)),
    ((460, 187), (410, 187), "", (0, 0)),
    ((325, 150), (325, 104), "version v + 1", (332, 131)),
]
SIDE = ["Ray places them", "one Python loop", "drives them", "every part is watched"]


def render() -> str:
    """Return the picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" role="img">',
        "<title>The loop: prompts, engines, rewards, trainer, weight sync, engines again</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#3d7a3f"/></marker></defs>',
    ]
    for name, does, x, y in BOXES:
        parts += [
            f'<rect x="{x}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="10" fill="#e8f3e6" stroke="#3d7a3f"/>',
            f'<text x="{x + 85}" y="{y + 33}" text-anchor="middle" font-size="16" fill="#16301a">{name}</text>',
            f'<text x="{x + 85}" y="{y + 55}" text-anchor="middle" font-size="13" fill="#3b5a3f">{does}</text>',
        ]
    for (x1, y1), (x2, y2), label, (x, y) in ARROWS:
        parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#3d7a3f" stroke-width="2" marker-end="url(#tip)"/>'
        )
        if label:
            parts.append(f'<text x="{x}" y="{y}" font-size="13" fill="#5f8a62">{label}</text>')
    for i, line in enumerate(SIDE):
        parts.append(f'<text x="665" y="{100 + 22 * i}" font-size="14" fill="#5f8a62">{line}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Command line of this tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file to write")
    output = parser.parse_args().output
    output.write_text(render())
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
