"""HTML that what it shows cannot break: every value is escaped unless it is markup itself."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from saga_gateway.units import NONE


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(value: object) -> str:
    """The value as HTML; None as a dash."""
    if isinstance(value, Markup):
        return value
    return NONE if value is None else html.escape(str(value), quote=True)


def markup(template: str, /, **values: object) -> Markup:
    """A template of ours with its ``{names}`` filled in."""
    return Markup(template.format(**{name: escaped(value) for name, value in values.items()}))


def joined(parts: Iterable[Markup]) -> Markup:
    """The parts, one after the other."""
    return Markup("".join(parts))


def table(caption: str, columns: str, rows: Sequence[Sequence[object]], *, empty: str) -> Markup:
    """A table whose first column names the row.

    Args:
        columns: their names, with ``; `` between; one that begins with ``#`` holds numbers.
        empty: what is said where there is no row.
    """
    if not rows:
        return markup('<p class="empty">{empty}</p>', empty=empty)
    names = columns.split("; ")
    kinds = ["n" if name.startswith("#") else "t" for name in names]
    heads = joined(
        markup('<th scope="col" class="{kind}">{name}</th>', kind=kind, name=name.lstrip("#"))
        for kind, name in zip(kinds, names, strict=True)
    )
    lines = []
    for first, *others in rows:
        cells = [markup('<th scope="row">{value}</th>', value=first)]
        cells += [
            markup('<td class="{kind}">{value}</td>', kind=kind, value=value)
            for kind, value in zip(kinds[1:], others, strict=True)
        ]
        lines.append(markup("<tr>{cells}</tr>", cells=joined(cells)))
    return markup(
        '<div class="scroll" role="region" aria-label="{caption}" tabindex="0"><table>'
        "<caption>{caption}</caption><thead><tr>{heads}</tr></thead>"
        "<tbody>{lines}</tbody></table></div>\n",
        caption=caption,
        heads=heads,
        lines=joined(lines),
    )


def section(name: str, title: str, *parts: Markup, more: tuple[str, str] | None = None) -> Markup:
    """A part of a page, which is refreshed by itself.

    Args:
        more: path and words of a link to the whole.
    """
    link = Markup("")
    if more is not None:
        link = markup(' <a class="more" href="{path}">{words}</a>', path=more[0], words=more[1])
    return markup(
        '<section id="{name}" aria-labelledby="{name}-title">'
        '<h2 id="{name}-title">{title}{link}</h2>{parts}</section>\n',
        name=name,
        title=title,
        link=link,
        parts=joined(parts),
    )


def facts(pairs: Iterable[tuple[str, object, str]]) -> Markup:
    """Numbers with a name and a remark each."""
    items = (
        markup(
            "<div><dt>{name}</dt><dd><b>{value}</b> <span>{remark}</span></dd></div>",
            name=name,
            value=value,
            remark=remark,
        )
        for name, value, remark in pairs
    )
    return markup('<dl class="facts">{items}</dl>\n', items=joined(items))


def meter(share: float | None, text: str, *, name: str) -> Markup:
    """A share as a bar, with its text beside; the text alone where the share is not known."""
    if share is None:
        return Markup(escaped(text))
    return markup(
        '<meter min="0" max="1" low="0.7" high="0.9" optimum="0" value="{value}" '
        'aria-label="{name}"></meter> {text}',
        value=f"{min(1.0, max(0.0, share)):.3f}",
        name=name,
        text=text,
    )


def badge(word: str) -> Markup:
    """One of our own words, such as a state, in its colour."""
    return markup('<span class="badge {word}">{word}</span>', word=word)
