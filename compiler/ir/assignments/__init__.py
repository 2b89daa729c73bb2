"""What passes have decided about single nodes, as their metadata: it prints, and is saved with the model."""
