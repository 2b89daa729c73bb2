"""Memory as Plans speak of it."""
