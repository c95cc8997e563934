"""Communicators, how their ranks meet, and the runtimes that execute operations."""

from dtcomm.runtime import bootstrap, communicator

communicator.connect_with(bootstrap.make_connection)
