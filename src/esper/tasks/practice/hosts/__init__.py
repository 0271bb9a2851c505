"""Small hosts of the usual kinds: plain modules that know nothing of growth, one file each."""
