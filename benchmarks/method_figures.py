"""The pictures of docs/methods.md: what crosses between a client and the server, for each method.

python benchmarks/method_figures.py   writes docs/method-NAME.svg for every method of the package

Nothing is drawn by hand. What stands in a picture is what the method declares of itself: its
messages, the networks beside the client's own, and who uses the public set.
"""

from __future__ import annotations

import re
import textwrap

from idea_figures import ROOT, WIDTH, arrow, box, drawn, text
from method_costs import methods

import perfed
from perfed.core.algorithm import OWN, Algorithm, Between
from perfed.core.declaration import SAMPLES, Array, Entries, Maybe

MARGIN, BOX, LINE = 16, 144, 19
LEFT, RIGHT = MARGIN + BOX, WIDTH - MARGIN - BOX
ACROSS = 38  # letters that fit between the boxes
FEWER_WORDS = {
    r"a number for each parameter of the head of": "weights of the head of",
    r"a number for each parameter of": "a number for each weight of",
    r"all but the head of": "the body of",
    r"the client's network": "its network",
    r"matrices in factors": "in factors",
    r"as many as candidates numbers.*": "a number a candidate",
    r"numbers of public samples": "sample numbers",
    r"probabilities, a row for each .*": "probabilities",
    r"numbers(, at| from) .*": "numbers",
}
"""Words of declarations, and fewer for a picture that say the same, without bounds of numbers."""


def shown(name: str, words: str) -> str:
    for long, short in FEWER_WORDS.items():
        words = re.sub(long, short, words)
    return (
        words
        if words.startswith("weights") or words.endswith(f" {name}")
        else f"{name.replace('_', ' ')}: {words}"
    )


def crossing(entries: Entries | None) -> list[str]:
    """What a message holds, in lines: arrays one by one, single numbers together."""
    said, single = list[str](), list[str]()
    for name, entry in (entries or {}).items():
        while isinstance(entry, Maybe):  # what it lacks, it lacks in the first rounds
            entry = entry.entry
        if isinstance(entry, Array) and not entry.shape:
            single.append("its number of samples" if entry == SAMPLES else name)
        else:
            said.append(shown(name, entry.words()))
    said += [f"and {', '.join(single)}"] if single else []
    return [line for one in said for line in even_lines(one)]


def even_lines(words: str) -> list[str]:
    """As few lines as fit between the boxes, of about one length."""
    fewest = len(textwrap.wrap(words, ACROSS))
    widths = range(1, ACROSS + 1)
    return next(
        w
        for width in widths
        if len(w := textwrap.wrap(words, width, break_long_words=False)) <= fewest
    )


def holdings(algorithm: Algorithm) -> tuple[list[str], list[str]]:
    """What a client has, and what the server has. A network that neither crosses nor stands between
    others of a client is the server's own."""
    client, server = ["its data", "its network"], list[str]()
    networks, declared = algorithm.networks(), algorithm.messages()
    crossing = [e.words() for way in (declared.up, declared.down) for e in (way or {}).values()]
    for name, network in networks.items():
        clients = isinstance(network, Between) or any(f"'{name}'" in words for words in crossing)
        if network == OWN:
            client.append("a second model")
        else:
            (client if clients else server).append(f"network '{name}'")
    if algorithm.trains_on_public_set:
        client.append("the public set")
    if algorithm.needs_public_set and (server or not algorithm.trains_on_public_set):
        server.append("the public set")
    return client, server


def column(x: float, top: float, lines: list[str], kind: str) -> list[str]:
    return [text(x, top + LINE * number, line, kind) for number, line in enumerate(lines)]


def picture(name: str) -> str:
    """The SVG of one method."""
    algorithm = perfed.algorithms[name]()
    declared = algorithm.messages()
    up, down = crossing(declared.up), crossing(declared.down)
    client, server = holdings(algorithm)
    between = LINE * (len(up) + len(down)) + 64
    height = max(150, between + 2 * MARGIN, LINE * max(len(client), len(server)) + 76)
    top, middle = (height - between) / 2, WIDTH / 2
    parts = [box(x, MARGIN, BOX, height - 2 * MARGIN) for x in (MARGIN, RIGHT)]
    for x, title, has in ((MARGIN, "client", client), (RIGHT, "server", server)):
        parts.append(text(x + BOX / 2, MARGIN + 26, title, "bold mid"))
        parts += column(x + BOX / 2, MARGIN + 50, has, "small muted mid")
    for lines, path in (
        (up, f"M{LEFT + 10} {{y:g}} H{RIGHT - 10}"),
        (down, f"M{RIGHT - 10} {{y:g}} H{LEFT + 10}"),
    ):
        if not lines:
            continue
        parts += column(middle, top + 14, lines, "small mid")
        top += LINE * len(lines) + 10
        parts.append(arrow(path.format(y=top)))
        top += 22
    if not up and not down:
        parts.append(text(middle, height / 2 + 5, "nothing crosses", "small muted mid"))
    return drawn(f"What crosses with {name}", height, parts)


def main() -> None:
    for name, _ in methods():
        (ROOT / "docs" / f"method-{name}.svg").write_text(picture(name), "utf-8")


if __name__ == "__main__":
    main()
