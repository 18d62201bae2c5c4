"""What programs in examples/ and benchmark/ have in common that measure one op, with command lines of their own."""
