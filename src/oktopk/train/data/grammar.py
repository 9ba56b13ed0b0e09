"""What is said: alphanumeric utterances like AN4's (spelled names, numbers, dates, commands), or commands only."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Literal

Grammar = Literal["an4", "commands"]

DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
TEENS = (
    *("TEN", "ELEVEN", "TWELVE", "THIRTEEN", "FOURTEEN"),
    *("FIFTEEN", "SIXTEEN", "SEVENTEEN", "EIGHTEEN", "NINETEEN"),
)
TENS = ("TWENTY", "THIRTY", "FORTY", "FIFTY", "SIXTY", "SEVENTY", "EIGHTY", "NINETY")
MONTHS = (
    *("JANUARY", "FEBRUARY", "MARCH", "APRIL", "MAY", "JUNE"),
    *("JULY", "AUGUST", "SEPTEMBER", "OCTOBER", "NOVEMBER", "DECEMBER"),
)
ORDINALS = {
    **{"ONE": "FIRST", "TWO": "SECOND", "THREE": "THIRD", "FIVE": "FIFTH", "EIGHT": "EIGHTH", "NINE": "NINTH"},
    **{"TWELVE": "TWELFTH", "TWENTY": "TWENTIETH", "THIRTY": "THIRTIETH"},
}
"""Those that are not the number with TH behind it."""

COMMANDS = ("YES", "NO", "GO", "STOP", "START", "HELP", "REPEAT")
"""Said alone."""

VERBS = ("ENTER", "ERASE", "RUBOUT")
"""Said with letters or numbers behind them."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

NAMES = (
    *("ADAMS", "ALLEN", "BAKER", "BENNETT", "BROOKS", "CARTER", "COLLINS", "COOPER", "DAVIES", "EVANS", "FISHER"),
    *("FOSTER", "GARCIA", "GRAHAM", "HUGHES", "JACKSON", "KELLY", "KUMAR", "LOPEZ", "MARTIN", "MORGAN", "MURPHY"),
    *("NGUYEN", "OWENS", "PARKER", "QUINN", "RUSSELL", "SCHMIDT", "TAYLOR", "VASQUEZ", "WALKER", "YOUNG", "ZIMMER"),
    *("ALICE", "BRIAN", "CHARLES", "DIANA", "ELENA", "FELIX", "GEORGE", "HELEN", "ISAAC", "JULIA", "KEVIN", "LAURA"),
    *("MAX", "NORA", "OSCAR", "PAULA", "QUENTIN", "ROBERT", "SUSAN", "THOMAS", "URSULA", "VICTOR", "WENDY", "XAVIER"),
)
PLACES = (
    *("ALBANY", "AUSTIN", "BOSTON", "BUFFALO", "CHICAGO", "DALLAS", "DENVER", "DETROIT", "ERIE", "FRESNO", "GALVESTON"),
    *("HOUSTON", "IOWA", "JUNEAU", "KANSAS", "LINCOLN", "MEXICO", "NEWARK", "OMAHA", "PHOENIX", "QUEENS", "RICHMOND"),
    *("SEATTLE", "TUCSON", "UTICA", "VIENNA", "WACO", "XENIA", "YORK", "ZURICH"),
)
STREETS = ("AVENUE", "DRIVE", "LANE", "ROAD", "STREET")


def say(grammar: Grammar, random: Random) -> str:
    """Return one utterance."""
    kinds = KINDS[grammar]
    return random.choices(list(kinds), weights=list(kinds.values()))[0](random)


def spelled(word: str) -> str:
    """Return a word letter by letter.

    >>> spelled("YORK")
    'Y O R K'
    """
    return " ".join(word)


def below_hundred(number: int) -> str:
    """Return a number from 0 to 99 in words.

    >>> below_hundred(42), below_hundred(11), below_hundred(7)
    ('FORTY TWO', 'ELEVEN', 'SEVEN')
    """
    if number < 10:
        return DIGITS[number]
    if number < 20:
        return TEENS[number - 10]
    tens = TENS[number // 10 - 2]
    return f"{tens} {DIGITS[number % 10]}" if number % 10 else tens


def ordinal(number: int) -> str:
    """Return the day of a month in words.

    >>> ordinal(1), ordinal(14), ordinal(22), ordinal(30)
    ('FIRST', 'FOURTEENTH', 'TWENTY SECOND', 'THIRTIETH')
    """
    *before, last = below_hundred(number).split()
    return " ".join([*before, ORDINALS.get(last, f"{last}TH")])


def _name(random: Random) -> str:
    return spelled(random.choice(NAMES))


def _place(random: Random) -> str:
    return spelled(random.choice(PLACES))


def _street(random: Random) -> str:
    return f"{below_hundred(random.randrange(1, 100))} {_place(random)} {random.choice(STREETS)}"


def _digits(random: Random) -> str:
    return _some(random, DIGITS, 1, 7)


def _number(random: Random) -> str:
    hundreds, rest = random.randrange(1, 10), random.randrange(1, 100)
    return random.choice(
        (
            below_hundred(rest),
            f"{below_hundred(random.randrange(10, 100))} {below_hundred(rest)}",
            f"{DIGITS[hundreds]} HUNDRED AND {below_hundred(rest)}",
            f"{DIGITS[hundreds]} {below_hundred(random.randrange(10, 100))}",
        )
    )


def _date(random: Random) -> str:
    day, year = random.randrange(1, 32), below_hundred(random.randrange(10, 100))
    month = random.randrange(12)
    return random.choice(
        (
            f"{MONTHS[month]} {ordinal(day)} NINETEEN {year}",
            f"{MONTHS[month]} {ordinal(day)}",
            f"{below_hundred(month + 1)} {below_hundred(day)} {year}",
        )
    )


def _command(random: Random) -> str:
    return random.choice(COMMANDS)


def _entry(random: Random) -> str:
    return f"{random.choice(VERBS)} {random.choice((_number, _digits_short, _mixed))(random)}"


def _mixed(random: Random) -> str:
    return f"{_some(random, LETTERS, 2, 5)} {random.choice((_number, _digits_short))(random)}"


def _digits_short(random: Random) -> str:
    return _some(random, DIGITS, 1, 3)


def _command_entry(random: Random) -> str:
    return f"{random.choice(VERBS)} {_digits_short(random)}"


def _some(random: Random, words: str | tuple[str, ...], least: int, most: int) -> str:
    return " ".join(random.choices(words, k=random.randint(least, most)))


KINDS: dict[Grammar, dict[Callable[[Random], str], float]] = {
    "an4": {
        **{_name: 0.2, _place: 0.12, _street: 0.05, _digits: 0.15, _number: 0.08},
        **{_date: 0.08, _command: 0.1, _entry: 0.12, _mixed: 0.1},
    },
    "commands": {_command: 0.3, _command_entry: 0.4, _digits_short: 0.3},
}
"""How often each kind of utterance is said; as in AN4, roughly."""
