"""A report as one HTML file: no scripts, no links elsewhere; its policy forbids every request."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape

from .section import Picture, Section, Table

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  color: #1d1f23; }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #d5d8de; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem } p, li { overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; margin: .5rem 0 1rem; font-size: 13px; }
th, td { text-align: left; padding: .15rem .7rem .15rem 0; vertical-align: top;
  border-bottom: 1px solid #eceef1; }
tr.bad td { color: #b3261e; font-weight: 600 } .source { color: #666b75; font-size: 13px; }
.passed { color: #1b7f3b } .failed { color: #b3261e } img { max-width: 100% }
figure { display: inline-block; margin: .5rem; }
figcaption { font-size: 12px; color: #666b75 } summary { cursor: pointer; padding: .2rem 0 }
@media (max-width: 40rem) { body { margin: 1rem auto; font-size: 16px } figure { margin: .5rem 0 } }
@media (prefers-color-scheme: dark) { body { background: #17181b; color: #e3e5e9 } a { color: #8ab4f8 }
th, td { border-color: #2b2d32 } figure { background: #fff } figcaption { padding: 0 .3rem } }
"""


def page(title: str, sections: Sequence[Section], missing: Sequence[str] = ()) -> str:
    """The document; `missing` are sentences on what was not found."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1><nav>",
        *(f'<a href="#s{number}">{escape(each.title)}</a>' for number, each in enumerate(sections)),
        "</nav>",
    ]
    if missing:
        parts += ["<ul>", *(f'<li class="failed">{escape(each)}</li>' for each in missing), "</ul>"]
    for number, each in enumerate(sections):
        mark = (
            '<span class="passed">&#10003;</span>' if each.passed else '<span class="failed">&#10007;</span>'
        )
        parts.append(
            f'<section id="s{number}"><h2>{mark} {escape(each.title)}</h2><p>{escape(each.text)}</p>'
        )
        parts.append(f'<p class="source">From {escape(each.source)}.</p>')
        parts += [_table(table) for table in each.tables]
        parts += [_picture(picture) for picture in each.pictures]
        parts.append("</section>")
    return "\n".join([*parts, "</body></html>\n"])


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "\n".join(_row(row, number in table.bad) for number, row in enumerate(table.rows))
    title = escape(f"{table.title} ({len(table.rows)})")
    body = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    if table.long:
        shown = " open" if table.bad and len(table.rows) <= 20 else ""
        return f"<details{shown}><summary>{title}</summary>{body}</details>"
    return f"<p><strong>{title}</strong></p>{body}"


def _row(cells: Sequence[str], bad: bool) -> str:
    inner = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr class="bad">{inner}</tr>' if bad else f"<tr>{inner}</tr>"


def _picture(picture: Picture) -> str:
    caption = escape(picture.caption)
    drawn = f'<img alt="{caption}" src="data:image/png;base64,{b64encode(picture.png).decode()}">'
    return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>"
