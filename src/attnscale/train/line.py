"""A record as a line of a log, and back."""

import json
from collections.abc import Iterable, Iterator
from typing import NoReturn

from attnscale.train.record import Record
from attnscale.train.schema import LineError


def line_of(record: Record) -> bytes:
    """A record as a line of a log."""
    return f"{record.to_json()}\n".encode("utf-8", "surrogatepass")


def records_of(lines: Iterable[bytes]) -> Iterator[Record]:
    """The records of lines, without those that were cut off since somebody looked at them."""
    for line in lines:
        try:
            yield parsed(line)
        except LineError:
            continue


def parsed(line: bytes) -> Record:
    """The record of a line, or a LineError that says what is wrong with it."""
    try:
        return Record.from_dict(_DECODER.decode(line.decode("utf-8", "surrogatepass")))
    except LineError:
        raise
    except json.JSONDecodeError as error:
        raise LineError(f"no JSON: {error.msg} at character {error.pos + 1}") from None
    except UnicodeDecodeError:
        raise LineError("no text in UTF-8") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits; lists in lists in lists
        raise LineError(f"no JSON that can be read: {str(error).partition(';')[0]}") from None


def _refuse(word: str) -> NoReturn:
    raise LineError(f"no JSON: {word} is no number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
