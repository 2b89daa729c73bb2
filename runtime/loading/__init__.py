"""Files of any kind, by what they hold."""
