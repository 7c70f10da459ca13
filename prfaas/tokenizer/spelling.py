"""The bytes that single tokens stand for, out of how a vocabulary writes them.

Two conventions are known: byte-level vocabularies write each byte as one printable character (GPT-2's table), and
SentencePiece ones write a space as U+2581 and single bytes as `<0xE4>`.
"""

import re

SENTENCEPIECE_SPACE = "\u2581"
SINGLE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_table() -> dict[str, int]:
    """The byte for each character of a byte-level vocabulary: printable Latin-1 stands for itself, the others for what
    is left, in order, from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


BYTES = byte_table()


def spelled(token: str, *, byte_level: bool) -> bytes:
    """An added token, which holds text as it is, may not be a byte-level one: then it says so itself."""
    if byte_level and all(character in BYTES for character in token):
        return bytes([BYTES[character] for character in token])
    if not byte_level and (single := SINGLE_BYTE.fullmatch(token)):
        return bytes([int(single[1], 16)])
    return (token if byte_level else token.replace(SENTENCEPIECE_SPACE, " ")).encode()
