"""The proving ground: networks as slow as you like in one machine, and what each method of exchange costs on them."""
