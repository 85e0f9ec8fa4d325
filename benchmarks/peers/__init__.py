"""What others do with the same text. Each script runs in the peers' own environment and imports nothing of forebay."""
