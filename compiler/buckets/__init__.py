"""Programs for inputs that are padded to a few sizes, where that changes nothing."""
