"""The command line. One file per command; nothing in the library imports it."""
