"""Draw texts: alphanumeric utterances like AN4's (spelled names, numbers, dates, commands), or commands only."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

Grammar = Literal["an4", "commands"]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "ZERO ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE".split()
TEENS = "TEN ELEVEN TWELVE THIRTEEN FOURTEEN FIFTEEN SIXTEEN SEVENTEEN EIGHTEEN NINETEEN".split()
TENS = "TWENTY THIRTY FORTY FIFTY SIXTY SEVENTY EIGHTY NINETY".split()
MONTHS = "JANUARY FEBRUARY MARCH APRIL MAY JUNE JULY AUGUST SEPTEMBER OCTOBER NOVEMBER DECEMBER".split()
STREETS = "AVENUE DRIVE LANE ROAD STREET".split()
ORDINALS = {
    **{"ONE": "FIRST", "TWO": "SECOND", "THREE": "THIRD", "FIVE": "FIFTH", "EIGHT": "EIGHTH", "NINE": "NINTH"},
    **{"TWELVE": "TWELFTH", "TWENTY": "TWENTIETH", "THIRTY": "THIRTIETH"},
}  # the others have TH behind the number
COMMANDS = "YES NO GO STOP START HELP REPEAT".split()  # a whole utterance each
VERBS = "ENTER ERASE RUBOUT".split()  # with letters or numbers behind them
NAMES = (
    "ADAMS ALLEN BAKER BENNETT BROOKS CARTER COLLINS COOPER DAVIES EVANS FISHER FOSTER GARCIA GRAHAM HUGHES JACKSON "
    "KELLY KUMAR LOPEZ MARTIN MORGAN MURPHY NGUYEN OWENS PARKER QUINN RUSSELL SCHMIDT TAYLOR VASQUEZ WALKER YOUNG "
    "ZIMMER ALICE BRIAN CHARLES DIANA ELENA FELIX GEORGE HELEN ISAAC JULIA KEVIN LAURA MAX NORA OSCAR PAULA QUENTIN "
    "ROBERT SUSAN THOMAS URSULA VICTOR WENDY XAVIER"
).split()
PLACES = (
    "ALBANY AUSTIN BOSTON BUFFALO CHICAGO DALLAS DENVER DETROIT ERIE FRESNO GALVESTON HOUSTON IOWA JUNEAU KANSAS "
    "LINCOLN MEXICO NEWARK OMAHA PHOENIX QUEENS RICHMOND SEATTLE TUCSON UTICA VIENNA WACO XENIA YORK ZURICH"
).split()


def say(grammar: Grammar, random: Random) -> str:
    """Return one utterance."""
    kinds = KINDS[grammar]
    return random.choices(list(kinds), weights=list(kinds.values()))[0](random)


def below_hundred(number: int) -> str:
    """Return a number from 0 to 99 in words.

    >>> below_hundred(42), below_hundred(11), below_hundred(7)
    ('FORTY TWO', 'ELEVEN', 'SEVEN')
    """
    if number < 20:
        return (DIGITS + TEENS)[number]
    tens = TENS[number // 10 - 2]
    return f"{tens} {DIGITS[number % 10]}" if number % 10 else tens


def ordinal(number: int) -> str:
    """Return the day of a month in words.

    >>> ordinal(1), ordinal(14), ordinal(22), ordinal(30)
    ('FIRST', 'FOURTEENTH', 'TWENTY SECOND', 'THIRTIETH')
    """
    *before, last = below_hundred(number).split()
    return " ".join([*before, ORDINALS.get(last, f"{last}TH")])


def _some(random: Random, words: Sequence[str], least: int, most: int) -> str:
    return " ".join(random.choices(words, k=random.randint(least, most)))


def _few_digits(random: Random) -> str:
    return _some(random, DIGITS, 1, 3)


def _spelled(random: Random, words: Sequence[str]) -> str:
    return " ".join(random.choice(words))


def _street(random: Random) -> str:
    return f"{below_hundred(random.randrange(1, 100))} {_spelled(random, PLACES)} {random.choice(STREETS)}"


def _number(random: Random) -> str:
    hundreds, rest = DIGITS[random.randrange(1, 10)], below_hundred(random.randrange(1, 100))
    first, second = (below_hundred(random.randrange(10, 100)) for _ in range(2))
    return random.choice((rest, f"{first} {rest}", f"{hundreds} HUNDRED AND {rest}", f"{hundreds} {second}"))


def _date(random: Random) -> str:
    day, year, month = random.randrange(1, 32), below_hundred(random.randrange(10, 100)), random.randrange(12)
    spoken = f"{MONTHS[month]} {ordinal(day)}"
    in_numbers = f"{below_hundred(month + 1)} {below_hundred(day)} {year}"
    return random.choice((f"{spoken} NINETEEN {year}", spoken, in_numbers))


def _entry(random: Random) -> str:
    return f"{random.choice(VERBS)} {random.choice((_number, _few_digits, _mixed))(random)}"


def _mixed(random: Random) -> str:
    return f"{_some(random, LETTERS, 2, 5)} {random.choice((_number, _few_digits))(random)}"


def _command(random: Random) -> str:
    return random.choice(COMMANDS)


KINDS: dict[Grammar, dict[Callable[[Random], str], float]] = {
    "an4": {
        lambda random: _spelled(random, NAMES): 0.2,
        lambda random: _spelled(random, PLACES): 0.12,
        _street: 0.05,
        lambda random: _some(random, DIGITS, 1, 7): 0.15,
        **{_number: 0.08, _date: 0.08, _command: 0.1, _entry: 0.12, _mixed: 0.1},
    },
    "commands": {_command: 0.3, lambda random: f"{random.choice(VERBS)} {_few_digits(random)}": 0.4, _few_digits: 0.3},
}
"""Share of each kind of utterance, roughly as in AN4."""
