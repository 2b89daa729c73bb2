"""What each format of each unit would damage, in squared relative error of the outputs, which adds up over units."""
