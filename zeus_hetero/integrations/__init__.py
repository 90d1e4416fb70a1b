"""Uneven shares and power limits in other training frameworks; each module needs its own."""
