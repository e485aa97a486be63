"""The decisions of SAGA: pure functions and objects, no I/O, no clock of their own."""
