"""Searches replayed on brute-forced spaces: the spaces, the rules of play, and the methods."""
