"""The base of all sections of a scenario: frozen, named fields only, and a key that nobody knows is an error."""

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass
