"""What the server, or another client, can see: attacks on what a run sends, measured beside what guessing gives."""
