"""Sizes on the wire. Whoever reads records needs them too, without torch."""

WORD_BYTES = 4
"""Bytes of a word, the unit of every block: an int32 or a float32."""

HEADER_WORDS = 4
"""Words before the pairs of a block, on the host and on a GPU (see `oktopk.codec`)."""
