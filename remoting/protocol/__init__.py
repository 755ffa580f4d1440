"""The sans-IO half of the wire: bytes in, commands out. Reaches no event loop and no socket."""
