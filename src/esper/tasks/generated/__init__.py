"""Problems without end: every number names a suite of its own, in which hardly anything is as in another."""
