"""Submissions: a mixer of somebody else with its rows on a board, checked here and repeated by us."""
