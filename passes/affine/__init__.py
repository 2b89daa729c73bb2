"""Arithmetic with one pair of numbers a channel, and the weights of products and convolutions that take it up."""
