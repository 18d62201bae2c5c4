"""The common parts of programs in examples/ and benchmark/ that measure one op and have their own command lines."""
