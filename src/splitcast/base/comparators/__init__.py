"""Formats of other papers, to compare with: each file opens with its paper and with what differs from it."""
