"""From samples to chunks."""
