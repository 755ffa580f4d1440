"""One module per request family: decode, ask the group or the state, encode."""
