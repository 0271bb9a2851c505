"""Settings: declared as classes, read from files and command lines, checked."""
