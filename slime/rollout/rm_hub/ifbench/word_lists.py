"""Closed lists of English words that instruction checks count. They are data; nothing here reads a response."""

from __future__ import annotations


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A full stop after these ends no sentence; after the second kind it does when a capital follows.
ABBREVIATIONS = _set("mr mrs ms dr prof sr jr st vs e.g i.e u.s u.k fig vol approx")
CLOSING_ABBREVIATIONS = _set("etc inc ltd co corp dept est al a.m p.m")

CONJUNCTIONS = _set("and but for nor or so yet")

# Title case may leave these small.
MINOR_WORDS = _set(
    "a an the and but or nor for so yet as at by in of off on per to up via from into like near onto over past than "
    "upon with is"
)

PERSON_NAMES = _set(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin "
    "Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria "
    "Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella "
    "Jonathan"
)

PRONOUNS = _set(
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves"
)

STOP_WORDS = _set(
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself "
    "it its itself they them their theirs themselves what which who whom this that these those am is are was were be "
    "been being have has had having do does did doing a an the and but if or because as until while of at by for with "
    "about against between into through during before after above below to from up down in out on off over under "
    "again further then once here there when where why how all any both each few more most other some such no nor not "
    "only own same so than too very s t can will just don should now"
)
